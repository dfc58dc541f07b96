"""Argument checks shared by the public classes: each error says what is wrong and what to write instead."""

import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any


def number(
    owner: str,
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = math.inf,
    low_open: bool = False,
    high_open: bool = False,
) -> None:
    """Raise unless ``value`` is a real number between ``low`` and ``high``.

    Bounds belong to the range unless the matching ``*_open`` flag is set. NaN is never inside.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r} of type {type(value).__name__}.")
    value = float(value)
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (above and below):
        if high == math.inf:
            wanted = f"{'above' if low_open else 'at least'} {low:g}" + (" and finite" if high_open else "")
        else:
            wanted = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise ValueError(f"{owner}: {name} must be {wanted}, got {value!r}.")


def size(owner: str, name: str, value: Any, *, zero_ok: bool = False, hint: str = "") -> None:
    """Check a radius or a multiple: a number, a schedule, or one value per parameter (checked entry by entry)."""
    if callable(value):
        _schedule(owner, name, value)
        return
    if isinstance(value, bool) or value is None or isinstance(value, str):
        raise TypeError(
            f"{owner}: {name} must be a number, a schedule step -> number, or one value per parameter; got {value!r}."
        )
    if isinstance(value, Real):
        if math.isnan(value) or value < 0 or (value == 0 and not zero_ok):
            wanted = "at least 0" if zero_ok else "above 0"
            raise ValueError(f"{owner}: {name} must be {wanted}, got {value!r}.{' ' + hint if hint else ''}")
        return
    if isinstance(value, (list, tuple, Mapping)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            size(owner, name, entry, zero_ok=True, hint=hint)
    elif hasattr(value, "shape") and _known_bad(value):
        raise ValueError(f"{owner}: {name} has entries that are negative or NaN; every entry must be at least 0.")


def _schedule(owner: str, name: str, schedule: Callable[..., Any]) -> None:
    """Raise unless it can be called with a step, as far as that can be told without calling it."""
    if isinstance(schedule, type):
        label = schedule.__name__
        raise TypeError(f"{owner}: {name}={label} is the class: pass an instance, {name}={label}(...), or a function.")
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):  # some functions written in C do not tell
        return
    try:
        signature.bind(0)
    except TypeError:
        label = getattr(schedule, "__name__", type(schedule).__name__)
        raise TypeError(
            f"{owner}: {name} is a schedule and is called with one argument, the step (counted from 0), which "
            f"{label}{signature} does not take. Write {name}=lambda step: ..., for example."
        ) from None


def _known_bad(values: Any) -> bool:
    """Whether an array has a negative or NaN entry; a traced array has no values to look at and passes."""
    try:
        return not bool((values >= 0).all())
    except Exception:
        return False


def storage(name: str, value: Any) -> str | None:
    """The name of a narrower type to store buffers in, or None; raise unless it is one that works."""
    if value is None:
        return None
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    if text.removeprefix("torch.") != "bfloat16":
        raise ValueError(
            f'{name} must be None (at least float32) or "bfloat16", got {value!r}. float16 would overflow, and wider '
            "types are chosen by themselves."
        )
    return "bfloat16"


def needs(module: str, framework: str, package: str, error: ImportError) -> ModuleNotFoundError:
    """An error that says what a module of ours needs, and how to get it."""
    said = f"{module} needs {framework}, which cannot be imported ({error}): pip install {package}"
    return ModuleNotFoundError(said, name=error.name)
