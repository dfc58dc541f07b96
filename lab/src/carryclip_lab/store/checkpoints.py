"""A run that is half done, and the file it is in: written whole or not at all, read only if it is of this very run."""

import contextlib
import os
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from carryclip import __version__
from carryclip_lab.spec import Spec


class _Restorable(Protocol):
    def restore(self, state: dict[str, Any]) -> None: ...


R = TypeVar("R", bound=_Restorable)


def resumed(make: Callable[[], R], path: Path | None, state: dict[str, Any] | None) -> R:
    """A run at its beginning, or as a file had it; if what was in the file does not fit, at its beginning."""
    run = make()
    if path is None or state is None:
        return run
    try:
        run.restore(state)
    except Exception as error:  # as many kinds as there are ways to be damaged
        _unreadable(path, error)
        return make()
    return run


def save(path: Path, spec: Spec, device: str, state: dict[str, Any]) -> None:
    """Written aside, then put in its place. That it cannot be is no reason to stop."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"made": _made(spec, device), **state}, aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:  # torch says RuntimeError when the disk is full
        warnings.warn(f"The checkpoint {path} cannot be written: {error}.", stacklevel=2)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def place(store: Path, spec: Spec) -> Path:
    """Of a run that is under way."""
    return folder(store) / f"{spec.id}.pt"


def kept(store: Path, spec: Spec) -> Path:
    """Of a run that is done, if its weights are wanted."""
    return store.resolve().with_name(f"{store.name}.weights") / f"{spec.id}.pt"


def folder(store: Path) -> Path:
    """Where the checkpoints of a store are."""
    return store.resolve().with_name(f"{store.name}.checkpoints")


def read(path: Path, spec: Spec, device: str | None = None) -> dict[str, Any] | None:
    """What was saved; None if there is nothing, if it is of another run, or if it cannot be read.

    Args:
        path: the file.
        spec: of the run.
        device: on which it shall go on, by the same software; None to look at it anywhere.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        made = state.pop("made")
        if made == _made(spec, device) if device is not None else made.startswith(f"{spec.canonical} "):
            return state
        if device is not None:
            aside = path.with_name(f"{path.name}.aside")
            os.replace(path, aside)
            was, now = (text.removeprefix(f"{spec.canonical} ") for text in (made, _made(spec, device)))
            warnings.warn(
                f"{path} was made by another setup ({was}; now {now}), so the run starts anew; it is kept as "
                f"{aside.name}.",
                stacklevel=2,
            )
        return None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # torch names many kinds for a damaged file
        _unreadable(path, error)
        return None


def _unreadable(path: Path, error: Exception) -> None:
    warnings.warn(f"The checkpoint {path} cannot be read, so the run starts anew: {error}.", stacklevel=3)


def _made(spec: Spec, device: str) -> str:
    """What must agree, or a resumed run would be neither the one nor the other.

    A run of days may move to other hardware, where its last bits may differ.
    """
    if spec.recipe.lasting:
        return f"{spec.canonical} {__version__}"
    return f"{spec.canonical} {__version__} {torch.__version__} {device} {torch.get_num_threads()}"
