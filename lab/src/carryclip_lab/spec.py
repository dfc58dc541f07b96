"""A run as data: everything that decides its result, and an id that follows from it."""

import ast
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import carryclip
from carryclip.algorithm import Rule
from carryclip.carry import CarryPolicy
from carryclip.policy import Policy
from carryclip.regions import Region
from carryclip_lab import task as tasks
from carryclip_lab.checks import check_choice, check_keys, check_whole, hint

OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "momentum",
    "nesterov": "Nesterov momentum",
    "adam": "Adam",
    "adamw": "AdamW",
    "adamw-torch": "AdamW",
}
"""By name: in words, and in the order of tables."""
_WORDS = (
    "Component",
    "Norm",
    "Adaptive",
    "Sign",
    "Symmetric",
    "Welford",
    "EWMA",
    "Capped",
    "Leaky",
    "Gated",
    "Drip",
    "Shrunk",
    "RMS",
    "Quantile",
    "ZScore",
    "Average",
    "OfWeights",
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One training run.

    Args:
        task: data and network, such as ``"digits"`` or ``"cifar10"``: a file of ``tasks/``, or ``"module:Class"``.
        optimizer: ``"sgd"``, ``"momentum"`` or ``"nesterov"`` (0.9), ``"adam"`` (0.9, 0.999), ``"adamw"`` as language
            models have it (0.9, 0.99, decay 0.1), or ``"adamw-torch"`` by PyTorch's defaults (0.9, 0.999, decay 0.01).
        lr: learning rate; of ImageNet the peak, for 256 examples: it is multiplied by batch / 256.
        batch: examples per step; the last partial batch of an epoch is kept.
        epochs: the most there may be.
        seed: of weights and order.
        region: where to clip, as one writes it: ``"Norm(0.5)"``, ``"Norm(Quantile(0.9))"``; None for no clipping.
        carry: ``"none"`` (plain clipping), ``"full"`` (U-Clip), or a policy: ``"Shrunk()"``.
        examples: size of a stratified subset of the training set; None for all.
        target: train accuracy at which a run is over; None to go on to the last epoch.
        method: ``"module:function"`` that attaches a method of your own; region and carry are what it makes of them.
        settings: what else the task lets one choose: the fields of its class.
        code: checksum of the files that a task or a method of your own is in.
        floors: when to give a run up that is not on its way to the target: ``"10:0.25, 20:0.4"`` for one whose running
            accuracy is below 0.25 after epoch 10, or below 0.4 after epoch 20. None to go on to the last epoch.
        brief: stop measuring the train accuracy as soon as the target is out of reach, and record none then: the same
            training, at less cost. It is known of the last epoch, and of the one that reaches the target.

    >>> given = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 30, "seed": 0}
    >>> spec = Spec(**given, region="Norm(0.5)", carry="full")
    >>> spec.region, spec.label, len(spec.id)
    ("Norm(radius=0.5, over='all')", 'U-Clip', 16)
    """

    task: str
    optimizer: str
    lr: float
    batch: int
    epochs: int
    seed: int
    region: str | None = None
    carry: str = "none"
    examples: int | None = None
    target: float | None = None
    method: str | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    code: str | None = None
    floors: str | None = None
    brief: bool = False

    def __post_init__(self) -> None:
        task = tasks.find(self.task)
        check_choice("optimizer", self.optimizer, tuple(OPTIMIZERS))
        _number("lr", self.lr, above=0.0)
        if self.target is None:
            self._set(target=task.target)
        elif task.target is None:
            raise ValueError(f"{self.task} has no target: its runs go on to their last epoch.")
        else:
            _number("target", self.target, above=0.0, most=1.0)
            self._set(target=float(self.target))
        check_whole(self, batch=1, epochs=1, seed=0)
        if self.examples is not None:
            check_whole(self, examples=1)
        self._check_shortcuts()
        if self.seed >= 2**62:
            raise ValueError(f"seed must be below 2**62, got {self.seed}.")
        if self.method is not None and (not isinstance(self.method, str) or ":" not in self.method):
            raise ValueError(f"method must be 'module:function', got {self.method!r}.")
        if self.region is None and self.carry != "none" and self.method is None:
            raise ValueError(f"There is no carry without a region: carry is {self.carry!r}.")
        region, carry = _canonical(self.region, self.carry)
        chosen = task(**dict(self.settings))
        # All that can be chosen is written down, so that a default that changes some day changes no old run.
        self._set(region=region, carry=carry, lr=float(self.lr), settings=tuple(sorted(vars(chosen).items())))
        if self.code is None:
            self._set(code=code_of(self.task, self.method))

    def _check_shortcuts(self) -> None:
        if not isinstance(self.brief, bool):
            raise ValueError(f"brief must be true or false, got {self.brief!r}.")
        if self.target is None and (self.brief or self.floors is not None):
            raise ValueError(f"floors and brief are for runs to a target, and {self.task} has none.")
        if self.floors is not None:
            self._set(floors=", ".join(f"{epoch}:{least:g}" for epoch, least in floors_of(self.floors).items()))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def recipe(self) -> Any:
        """The task with this run's settings."""
        return tasks.find(self.task)(**dict(self.settings))

    @property
    def goal(self) -> float:
        """The target; infinity if there is none."""
        return math.inf if self.target is None else self.target

    @property
    def values(self) -> dict[str, Any]:
        """Every choice by its name."""
        own = {} if self.code is None else {"code": self.code}
        common = {name: getattr(self, name) for name in FIELDS}
        # What came later is not written down where it is not used, so that older runs keep their ids.
        used = {name: value for name, value in common.items() if name not in LATER or value != LATER[name]}
        return {**used, **own, **dict(self.settings)}

    @property
    def canonical(self) -> str:
        """The one way to write this spec down."""
        return json.dumps(self.values, sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """The same for equal specs, on every machine."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """The method in a word or two."""
        if self.method is not None:
            return self.method.rpartition(":")[2]
        if self.region is None:
            return "none"
        return {"none": "clip", "full": "U-Clip"}.get(self.carry, self.carry.partition("(")[0])

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str = "spec") -> "Spec":
        """From a mapping, with an error that names what is unknown or missing."""
        try:
            own = list(tasks.settings(given["task"])) if "task" in given else []
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        check_keys(where, given, [*FIELDS, *own])
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.default is dataclasses.MISSING and field.name not in given
        ]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(missing)}.")
        common = {name: value for name, value in given.items() if name not in own}
        try:
            return cls(**common, settings=tuple((name, given[name]) for name in own if name in given))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def from_canonical(cls, text: str) -> "Spec":
        """The spec that was written down so: what was checked then is not checked again, and its task not loaded."""
        given = json.loads(text)
        spec = object.__new__(cls)
        spec._set(code=given.pop("code", None), **{name: given.pop(name, unused) for name, unused in LATER.items()})
        spec._set(**{name: given.pop(name) for name in FIELDS if name not in LATER})
        spec._set(settings=tuple(sorted((name, value) for name, value in given.items())))
        return spec


FIELDS = [field.name for field in dataclasses.fields(Spec) if field.name not in ("settings", "code")]
"""What all runs have."""
LATER = {"floors": None, "brief": False}
"""Fields that came after the first results, with what they are where they are not used."""


@functools.lru_cache(maxsize=1024)
def _canonical(region: str | None, carry: str) -> tuple[str | None, str]:
    """Region and carry as they are written down, once they are found to go together; a study has few of them."""
    policy = policy_of(carry)
    written = carry if carry in ("none", "full") else repr(policy)
    if region is None:
        return None, written
    found = parse(region)
    if not isinstance(found, Region):
        raise ValueError(f"region must be a region such as 'Norm(0.5)', got {region!r}.")
    Rule(found, policy)
    return repr(found), written


def parse(text: str) -> Any:
    """A region, a policy or a radius from its text; nothing but carryclip's own words and literals is understood.

    >>> parse("Adaptive(mean=1, std=2, moments=EWMA(0.95))")
    Adaptive(mean=1, std=2, moments=EWMA(decay=0.95, debias=True), min_radius=0.0, include_current=False)
    """
    if not isinstance(text, str):
        raise ValueError(
            f"{text!r} is no region or policy: it is written in quotes, such as 'Norm(0.5)' or 'Shrunk()'."
        )
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no region or policy: {error}") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and (near := _written(node.id)):
        raise ValueError(f"did you mean {near!r}?")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id not in _WORDS:
            near = hint(node.func.id, _WORDS, f"known are {', '.join(_WORDS)}.")
            raise ValueError(f"there is no {node.func.id}; {near}")
        named = {keyword.arg: _value(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        made = getattr(carryclip, node.func.id)(*map(_value, node.args), **named)
        if any(isinstance(value, (Region, Policy)) for value in vars(made).values()):
            raise ValueError(f"a {node.func.id} has no region or policy inside.")
        return made
    try:
        value = ast.literal_eval(node)
    except ValueError:  # which shows a node by its address
        raise ValueError(f"{ast.unparse(node)} is neither a number nor a word.") from None
    if value is None:  # as policies and radii write what they leave open
        return None
    if not isinstance(value, (int, float, str)) or value in (math.inf, -math.inf):
        raise ValueError(f"{ast.unparse(node)} is neither a number nor a word.")
    return value


def _written(word: str) -> str | None:
    """The nearest of carryclip's words, as one writes it in a study; None if none is near.

    >>> _written("shrunk"), _written("norm"), _written("x")
    ('Shrunk()', 'Norm(...)', None)
    """
    lower = {name.lower(): name for name in _WORDS}
    near = difflib.get_close_matches(word.lower(), lower, n=1)
    return _call(lower[near[0]]) if near else None


def _call(name: str) -> str:
    """``Name()``, or ``Name(...)`` if it needs numbers."""
    needed = [each for each in dataclasses.fields(getattr(carryclip, name)) if each.default is dataclasses.MISSING]
    return f"{name}(...)" if needed else f"{name}()"


def floors_of(text: str) -> dict[int, float]:
    """Running accuracies that a run must have, by epoch.

    >>> floors_of("10:0.25, 20:0.4")
    {10: 0.25, 20: 0.4}
    """
    try:
        pairs = [(int(epoch), float(least)) for epoch, least in (part.split(":") for part in text.split(","))]
    except (AttributeError, ValueError):
        raise ValueError(f"floors must be like '10:0.25, 20:0.4', epoch:accuracy, got {text!r}.") from None
    found = dict(sorted(pairs))
    if len(found) < len(pairs) or min(found) < 1 or not all(0.0 < least < 1.0 for least in found.values()):
        raise ValueError(f"floors are accuracies between 0 and 1, each after another epoch, got {text!r}.")
    return found


def policy_of(carry: str) -> CarryPolicy:
    """The carry policy that a spec names."""
    if carry in ("none", "full"):
        return carry == "full"
    if not isinstance(carry, str) or carry.isidentifier():
        raise ValueError(_no_carry(carry))
    policy = parse(carry)
    if not isinstance(policy, Policy):
        raise ValueError(_no_carry(carry))
    return policy


def _no_carry(carry: Any) -> str:
    """What can be written instead, the nearest of it as a question."""
    said = f"carry must be 'none', 'full' or a policy such as 'Shrunk()', got {carry!r}"
    policies = {name.lower(): _call(name) for name in _WORDS if issubclass(getattr(carryclip, name), Policy)}
    # The library's own words for these two are False and True.
    written = {"none": "none", "full": "full", "false": "none", "true": "full", **policies}
    near = difflib.get_close_matches(str(carry).lower(), written, n=1)
    return (
        f"{said}; did you mean {written[near[0]]!r}?"
        if near
        else f"{said}; policies are {', '.join(policies.values())}."
    )


def code_of(*paths: str | None) -> str | None:
    """Checksum of the files of tasks and methods that are somebody's own: other code is another run.

    Only the named modules count, not what they import.
    """
    own = [path.partition(":")[0] for path in paths if path is not None and ":" in path]
    found = [_file(module) for module in own if module.partition(".")[0] not in ("carryclip", "carryclip_lab")]
    files = [file for file in found if file is not None]
    return _checksum(tuple((file, file.stat().st_mtime_ns) for file in files)) if files else None


@functools.lru_cache(maxsize=64)
def _checksum(files: tuple[tuple[Path, int], ...]) -> str:
    """Of files and the times when they were written: a study has many runs with the same ones."""
    return hashlib.sha256(b"".join(file.read_bytes() for file, _ in files)).hexdigest()[:16]


def check_code(spec: Spec) -> None:
    """Complain if this machine's files are not those that a run was planned with."""
    found = code_of(spec.task, spec.method)
    if spec.code is not None and found != spec.code:
        raise ValueError(
            f"Run {spec.id} was planned with other code of {spec.method or spec.task} (checksum {spec.code}) than is "
            f"here ({found}). Give every machine the same file, or start the study again."
        )


def _file(module: str) -> Path | None:
    """None if there is none, which whoever loads it says."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return None if found is None or found.origin is None or not found.has_location else Path(found.origin)


def _number(name: str, value: Any, *, above: float, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most or value == math.inf:
        raise ValueError(
            f"{name} must be a number above {above:g}{'' if most == math.inf else f' up to {most:g}'}, got {value!r}."
        )
