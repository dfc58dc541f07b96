"""What a run costs: a model of seconds per epoch, its rates guessed for weighing or measured for planning."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from carryclip_lab.imagenet import schedule
from carryclip_lab.spec import Spec
from carryclip_lab.tasks.recipes import TRIALS

EXAMPLES = {"digits": 1438, "cifar10": 50_000}
Method = tuple[str, str | None, str, str | None]
Kind = tuple[int, tuple[Any, ...], bool]


def method_of(spec: Spec) -> Method:
    """What besides the batch decides how long a step takes."""
    return spec.optimizer, spec.region, spec.carry, spec.method


def examples_of(spec: Spec) -> int:
    """Size of the training set."""
    if spec.task == "imagenet":
        return spec.recipe.images
    if spec.task in TRIALS:
        return spec.recipe.steps * spec.batch
    return spec.examples if spec.examples is not None else EXAMPLES[spec.task]


def steps_of(spec: Spec) -> int:
    """Steps per epoch."""
    if spec.task == "imagenet":
        return schedule.steps_of(spec)
    return math.ceil(examples_of(spec) / spec.batch)


@dataclass(frozen=True)
class Rates:
    """Seconds on some machine, with as many workers as there are to be."""

    step: Mapping[int, float]
    """Of a step without clipping by SGD, by batch size."""
    method: Mapping[Method, float]
    """That a method adds to it."""
    example: float
    """Of evaluating one example."""
    start: float = 0.0
    """Before a worker's first step."""
    test: Mapping[str, int] = field(default_factory=lambda: {"digits": 359, "cifar10": 10_000})

    def seconds(self, spec: Spec, epochs: float) -> float:
        """For a run of so many epochs."""
        step = self.step[spec.batch] + self.method.get(method_of(spec), 0.0)
        return epochs * (steps_of(spec) * step + examples_of(spec) * self.example) + self.test[spec.task] * self.example


@dataclass(frozen=True)
class Throughput:
    """What decides the time of ImageNet: training images per second, by network, size of images and precision."""

    rates: Mapping[Method, float]
    start: float = 0.0

    @staticmethod
    def key(spec: Spec) -> Method:
        """What the rate depends on."""
        return spec.recipe.net, str(spec.recipe.image), spec.recipe.precision, str(spec.recipe.micro)

    def seconds(self, spec: Spec, epochs: float) -> float:
        """For a run of so many epochs; an image that is only evaluated takes a third."""
        return epochs * (spec.recipe.images + spec.recipe.tests / 3) / self.rates[self.key(spec)]


@dataclass(frozen=True)
class Steps:
    """What decides the time of a trial: seconds of a step and of what comes with an epoch, by kind of run."""

    step: Mapping[Kind, float]
    epoch: Mapping[Kind, float]
    start: float = 0.0

    @staticmethod
    def key(spec: Spec) -> Kind:
        """What they depend on: the data, and whether gradients are touched."""
        data = tuple(pair for pair in spec.settings if pair[0] != "steps")
        return spec.batch, data, spec.region is not None or spec.method is not None

    def seconds(self, spec: Spec, epochs: float) -> float:
        """For a run of so many epochs."""
        key = self.key(spec)
        return epochs * (steps_of(spec) * self.step[key] + self.epoch[key])


def weight(spec: Spec, epochs: float) -> float:
    """A guess at the cost of a run in no particular unit, for weighing runs against each other."""
    costs = {"digits": (1e-5, 1e-3), "cifar10": (1.2e-3, 5e-3), "imagenet": (1e-3, 1e-2)}
    source = spec.values.get("source", spec.task)
    per_example, per_step = costs.get(source, (3e-6 * spec.values.get("width", 0), 1e-3))
    return epochs * (examples_of(spec) * per_example + steps_of(spec) * per_step) + 0.2
