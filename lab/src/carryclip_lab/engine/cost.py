"""What a run costs: one model for all tasks, its rates guessed for weighing runs or measured for planning them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from carryclip_lab.spec import Spec

Method = tuple[str, str | None, str, str | None]
Data = tuple[tuple[str, Any], ...]


def method_of(spec: Spec) -> Method:
    """What besides data and batch decides how long a step takes."""
    return spec.optimizer, spec.region, spec.carry, spec.method


def data_of(spec: Spec) -> Data:
    """What is trained, however long an epoch is."""
    return tuple(pair for pair in spec.settings if pair[0] != "steps")


@dataclass(frozen=True)
class Rates:
    """Seconds of a task on some machine, with as many workers as there are to be."""

    step: Mapping[tuple[int, Data], float]
    """Of a step by SGD without clipping, by batch size and data."""
    epoch: Mapping[tuple[int | None, Data], float]
    """Of what comes with an epoch, by number of examples and data."""
    method: Mapping[Method, float]
    """That a method adds to a step."""
    start: float = 0.0
    """Before a worker's first step."""

    def seconds(self, spec: Spec, epochs: float) -> float:
        """For a run of so many epochs."""
        step = self.step[spec.batch, data_of(spec)] + self.method.get(method_of(spec), 0.0)
        steps, _ = spec.recipe.epoch(spec)
        return epochs * (steps * step + self.epoch[spec.examples, data_of(spec)])


def priced(specs: list[Spec], images_per_second: float) -> Rates:
    """Rates from a speed that was measured elsewhere; an image that is only evaluated takes a third."""
    step = {(spec.batch, data_of(spec)): spec.batch / images_per_second for spec in specs}
    epoch = {(spec.examples, data_of(spec)): spec.recipe.tests / 3 / images_per_second for spec in specs}
    return Rates(step, epoch, {})


def weight(spec: Spec, epochs: float) -> float:
    """A guess at the cost of a run in no particular unit, for weighing runs against each other."""
    task = spec.recipe
    per_example, per_step = task.weights
    steps, examples = task.epoch(spec)
    return epochs * (examples * per_example + steps * per_step) + 0.2
