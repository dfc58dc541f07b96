"""What is kept of a run: how it ended, what was seen after each epoch, where it ran."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from carryclip_lab.spec import Spec


def duration(seconds: float) -> str:
    """In the unit that a person would choose."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:,.0f} days"


Outcome = Literal["reached", "not_reached", "diverged", "oom", "timeout", "crashed"]
OUTCOMES: tuple[Outcome, ...] = ("reached", "not_reached", "diverged", "oom", "timeout", "crashed")
FAULTS: tuple[Outcome, ...] = ("oom", "timeout", "crashed")
"""Those that say nothing about the method."""


@dataclass(frozen=True)
class Epoch:
    """What is known of a run after one epoch; None for what there is not, such as a carry without clipping."""

    epoch: int
    loss: float | None = None
    running_accuracy: float | None = None
    train_accuracy: float | None = None
    test_accuracy: float | None = None
    grad_norm: float | None = None
    carry_norm: float | None = None
    radius_norm: float | None = None
    clipped_fraction: float | None = None
    carry_feed: float | None = None
    seconds: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    """What else the task has measured, by name: numbers, and short lists of them."""


def last(epochs: Sequence[Epoch], name: str) -> Any:
    """What was measured after the last epoch; None if it was not, or if the run came to nothing."""
    return epochs[-1].metrics.get(name) if epochs and epochs[-1].loss is not None else None


@dataclass(frozen=True)
class Progress:
    """How far a run is within an epoch."""

    epoch: int
    step: int
    steps: int
    rate: float
    """Examples per second."""
    left: float
    """Seconds to the end of the run."""
    broken: int = 0
    """Files that could not be read."""

    def __str__(self) -> str:
        unread = f", {self.broken} files unreadable" if self.broken else ""
        return f"step {self.step:,} of {self.steps:,}, {self.rate:,.0f}/s, {duration(self.left)} left{unread}"


@dataclass(frozen=True)
class End:
    """How a run ended."""

    outcome: Outcome
    reached: int | None = None
    """The first epoch at the target."""
    message: str | None = None


class StoppedError(Exception):
    """A run was asked to stop, and has saved what it had."""


@dataclass(frozen=True)
class Record:
    """A run as the store has it."""

    spec: Spec
    state: str
    outcome: Outcome | None
    reached: int | None
    """The first epoch at the target."""
    seconds: float | None
    message: str | None
    environment: dict[str, Any]
