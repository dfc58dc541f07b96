"""How studies are run, as far as that can change nothing about their results. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Literal

from carryclip_lab.spec import Spec

CHECKPOINT_SECONDS = 60.0
USUAL_LIMIT = 24 * 3600.0


def limit_of(spec: Spec, timeout: float | None) -> float | None:
    """Seconds that a run may take: as given, or a day, or as long as it wants if its task takes days."""
    if timeout is not None:
        return timeout
    return None if spec.recipe.lasting else USUAL_LIMIT


@dataclass(frozen=True)
class Options:
    """What the supervisor is told."""

    engine: Literal["local", "ray", "torchrun"] = "local"
    address: str | None = None
    workers: int | None = None
    threads: int = 1
    device: str = "cpu"
    gpus: float = 0.0
    timeout: float | None = None
    """Seconds that a run may take; None for what is usual for its task."""
    memory: float | None = None
    every: float = CHECKPOINT_SECONDS
    data: str | None = None
    """Folder of images, or a text."""
    strict: bool = False
    paths: tuple[str, ...] = ()
    """Where workers look for tasks and methods of one's own."""
    keep: bool = False
    """The weights of runs that are done."""


@dataclass(frozen=True)
class Setting:
    """What workers are told besides the spec."""

    threads: int = 1
    device: str = "cpu"
    memory: float | None = None
    """GB that a worker may hold, None for no limit."""
    store: str | None = None
    """Path of the store, beside which checkpoints are kept; None for none."""
    keep: bool = False
    """Whether to keep the last one of a run that is done."""
    every: float = CHECKPOINT_SECONDS
    """Seconds between two of them."""
    commit: str | None = None
    paths: tuple[str, ...] = ()
    """Where else to look for methods of one's own."""
    data: str | None = None
    """Folder of images, or a text, for tasks that need one."""
    strict: bool = False
    """Whether an image that cannot be read ends the run."""
