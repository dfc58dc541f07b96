"""What a task is: the noun of the laboratory. Data, network and loss, what it is judged by, what it costs.

A task that ships is one class in one file of ``tasks/``, and is found there by the file's name. A task of your own is a
class in a file beside your study, named ``"module:Class"``. The fields of the class are what a study may choose. This
module and the classes import nothing heavy: torch comes with the ``Problem`` that a task makes for a run.
"""

import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from carryclip_lab.checks import check_choice

if TYPE_CHECKING:
    from carryclip_lab.engine.team import Team
    from carryclip_lab.problem import Problem, Timing
    from carryclip_lab.spec import Spec
    from carryclip_lab.store.records import Epoch, Record

Kind = Literal["ordinary", "signal", "corruption", "frozen"]
"""What large gradients are; ``"frozen"`` where nothing is learnt, only bias measured."""


@dataclass(frozen=True)
class Judged:
    """A task in words, and what counts in it.

    Attributes:
        title: short.
        setting: the sizes that matter.
        metric: name of what it is judged by, as measured after the last epoch.
        words: the same for people, with its unit.
        higher: whether more of it is better.
        little: a difference that is too small to matter.
        kind: what large gradients are there.
        bias: name of a metric whose mean over seeds is off by the bias, if there is one.
        unbiased: what that mean should be.
        also: what else is shown, by name and in words.
    """

    title: str
    setting: str
    metric: str
    words: str
    higher: bool
    little: float
    kind: Kind = "ordinary"
    bias: str | None = None
    unbiased: float = 0.0
    also: tuple[tuple[str, str], ...] = ()

    def score(self, epochs: "Callable[[str], Sequence[Epoch]]") -> "Callable[[Record], float]":
        """Of a run that is done: its metric, turned so that less is better; infinite if it came to nothing."""
        from carryclip_lab.store.records import last

        return lambda record: self.oriented(last(epochs(record.spec.id), self.metric))

    def oriented(self, value: float | None) -> float:
        """A value of the metric turned so that less is better; infinite if the run came to nothing."""
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self.higher else value

    def shown(self, score: float) -> float:
        """The metric behind a score."""
        return -score if self.higher else score


@dataclass(frozen=True)
class Place:
    """Where a run is trained, which changes nothing about what is trained."""

    device: str = "cpu"
    data: str | None = None
    """What ``--data`` says: a folder or a file."""
    threads: int = 1
    strict: bool = False
    """Whether a file that cannot be read ends the run."""
    team: "Team | None" = None
    """The processes that train it together; None for this one alone."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, with a run's settings as its fields.

    A task of your own has at least ``judged``, ``problem`` and a field ``steps``, the steps of an epoch.
    """

    name: ClassVar[str] = ""
    """For people; the name of the class by default."""
    shown_as: ClassVar[Literal["trial", "epochs", "accuracy"]] = "trial"
    """Which table, figures and claims it has: of methods by their metric, epochs to a target, or best accuracy."""
    in_paper: ClassVar[bool] = False
    """Whether the paper's claims about training are about it."""
    target: ClassVar[float | None] = None
    """Train accuracy at which a run is over, unless its spec says otherwise; None where all go on to the last epoch."""
    size: ClassVar[int | None] = None
    """Examples of the training set, if a spec may take a part of them."""
    lasting: ClassVar[bool] = False
    """Runs that take days: no limit of time, saved within an epoch when asked to stop, and moved to other hardware."""
    joint: ClassVar[bool] = False
    """Whether several processes can train one run, under torchrun."""
    needs: ClassVar[str] = ""
    """What else a command must be given, such as ``--data DIR``."""
    missing: ClassVar[str] = ""
    """What to say to somebody who has not given it."""
    weights: ClassVar[tuple[float, float]] = (1e-6, 1e-3)
    """A guess at the seconds of an example and of a step, for weighing runs that have not been timed."""

    # ------------------------------------------------------------------ to be written for every task

    def judged(self) -> Judged | None:
        """What it is judged by; None where epochs to a target, or the best accuracy, count."""
        return None

    def problem(self, spec: "Spec", place: Place) -> "Problem":
        """Data, network and loss of a run, in memory."""
        raise NotImplementedError(f"{type(self).__name__} needs a method problem(spec, place).")

    # ------------------------------------------------------------------ to be written where the usual does not do

    def epoch(self, spec: "Spec") -> tuple[int, int]:
        """Steps and examples of an epoch."""
        steps: int = getattr(self, "steps")  # noqa: B009  # a field of the subclass
        return steps, steps * spec.batch

    def timing(self, spec: "Spec", place: Place) -> "Timing":
        """What to time for a plan."""
        return self.problem(spec, place).timing(spec, place)

    def check(self, spec: "Spec", processes: int) -> None:
        """Complain with a ValueError about a run that cannot be trained, before anything starts."""
        if spec.examples is not None and (self.size is None or spec.examples > self.size):
            if self.size is None:
                raise ValueError(f"{spec.task} takes no number of examples.")
            raise ValueError(f"{spec.task} has {self.size:,} training examples, not {spec.examples:,}.")

    def at_hand(self, data: str | None) -> None:
        """Complain with a DataError if the data are not here, and say how to get them."""

    @classmethod
    def found(cls, data: str | None, tier: str, *, make: bool) -> Mapping[str, Any] | None:
        """Settings that follow from the data that ``--data`` names; None if without it nothing can be trained.

        Args:
            data: a folder or a file, if one is named.
            tier: of the study; a smoke tier may make data of its own.
            make: whether to make it now, or only say what it will be.
        """
        return {}

    @classmethod
    def own_data(cls) -> str | None:
        """Where data are that the smoke tier makes for itself, if it does."""
        return None

    def described(self, specs: Sequence["Spec"]) -> str:
        """The data, and how long a run is, in words."""
        judged = self.judged()
        if judged is None:
            return self.data_name(specs[0].examples)
        steps = sorted({spec.epochs * spec.recipe.epoch(spec)[0] for spec in specs})
        return f"{judged.title}, {judged.setting}, {' or '.join(f'{count:,}' for count in steps)} steps"

    def data_name(self, examples: int | None) -> str:
        """The data in words."""
        judged = self.judged()
        if judged is not None:
            return judged.title
        return (self.name or type(self).__name__) + ("" if examples is None else f", {examples:,} examples")


@functools.cache
def find(name: str) -> type[Task]:
    """A task that ships, by its name, or one of your own, ``"module:Class"``.

    >>> find("digits").target
    0.99
    """
    if ":" in str(name):
        return _own(name)
    check_choice("task", name, names())
    return _in_module(importlib.import_module(f"carryclip_lab.tasks.{name}"))


@functools.cache
def names() -> tuple[str, ...]:
    """The tasks that ship: the files of ``tasks/``.

    >>> {"amounts", "cifar10", "text"} <= set(names())
    True
    """
    folder = Path(__file__).parent / "tasks"
    return tuple(sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")))


def _in_module(module: Any) -> type[Task]:
    """The one task that a module defines."""
    mine = [value for value in vars(module).values() if _is_task(value) and value.__module__ == module.__name__]
    if len(mine) != 1:
        raise ValueError(f"{module.__name__} should define one task, and defines {len(mine)}.")
    return mine[0]


def _is_task(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Task)


def _own(path: str) -> type[Task]:
    found = load(path, "task")
    if not _is_task(found):
        raise ValueError(f"The task {path!r} is no class derived from carryclip_lab.task.Task.")
    return found


def load(path: str, what: str) -> Any:
    """What is behind ``"module:name"``; modules beside the study, or in this folder, are found."""
    module, _, name = path.partition(":")
    module = MOVED.get(module, module)
    if not name:
        raise ValueError(f"{what} must be 'module:name', got {path!r}.")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The {what} {path!r} cannot be loaded: {error}. It should be in a file {module.replace('.', '/')}.py "
            "beside the study, or in the folder where the command is typed."
        ) from None


MOVED = {"carryclip.experiments.peers": "carryclip_lab.peers"}
"""Modules that studies and stores name as they were called when their runs' ids were made."""


@functools.cache
def settings(task: str | None = None) -> dict[str, Any]:
    """What can be chosen for a task, or for any that ships, with its default."""
    kinds: Iterator[type[Task]] = map(find, names() if task is None else (task,))
    return {field.name: field.default for kind in kinds for field in fields(kind)}
