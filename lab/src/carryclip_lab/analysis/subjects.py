"""What each trial is about: its name, what it is judged by, and whether its large gradients are worth keeping."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from carryclip_lab.spec import Spec
from carryclip_lab.store.records import Epoch, Record
from carryclip_lab.tasks import recipes

Kind = Literal["ordinary", "signal", "corruption", "frozen"]
FAR = 10.0
"""A start this far from the optimum makes the mean gradient larger than a usual radius."""
SOURCES = {"digits": "digits", "cifar10": "CIFAR-10"}


@dataclass(frozen=True)
class Subject:
    """A trial in words.

    Attributes:
        title: short.
        setting: the sizes that matter.
        kind: what large gradients are there; ``"frozen"`` where nothing is learnt, only bias measured.
        metric: name of what it is judged by, as measured after the last epoch.
        words: the same for people.
        higher: whether more of it is better.
        little: a difference that nobody would care about.
        bias: name of a metric whose mean over seeds is off by the bias, if there is one.
        unbiased: what that mean should be.
        also: what else is shown, by name and in words.
    """

    title: str
    setting: str
    kind: Kind
    metric: str
    words: str
    higher: bool
    little: float
    bias: str | None = None
    unbiased: float = 0.0
    also: tuple[tuple[str, str], ...] = ()

    def score(self, epochs: Callable[[str], Sequence[Epoch]]) -> Callable[[Record], float]:
        """Of a run that is done: its metric, turned so that less is better; infinite if it came to nothing."""
        return lambda record: self.oriented(last(epochs(record.spec.id), self.metric))

    def oriented(self, value: float | None) -> float:
        """The same for one value."""
        if value is None or not math.isfinite(value):
            return math.inf
        return -value if self.higher else value

    def shown(self, score: float) -> float:
        """The metric behind a score."""
        return -score if self.higher else score


def last(epochs: Sequence[Epoch], name: str) -> Any:
    """What was measured after the last epoch; None if it was not, or if the run came to nothing."""
    return epochs[-1].metrics.get(name) if epochs and epochs[-1].loss is not None else None


def subject_of(spec: Spec) -> Subject | None:
    """What a spec's trial is about; None for the paper's tasks."""
    if spec.task not in recipes.TRIALS:
        return None
    return {"softmax": _softmax, "regression": _regression, "bandit": _bandit, "text": _text, "classify": _classify}[
        spec.task
    ](spec.recipe)


def _softmax(recipe: recipes.Softmax) -> Subject:
    return Subject(
        "Zipf softmax",
        f"{recipe.classes} classes with shares by Zipf's law",
        "signal",
        "divergence",
        "divergence from the true shares (nats)",
        higher=False,
        little=0.002,
        bias="iterate",
        also=(("rare_share", "rare classes are given, by their due"),),
    )


def _regression(recipe: recipes.Regression) -> Subject:
    size = f"{recipe.dimension} dimensions"
    if recipe.frozen:
        return Subject(
            "Bias at a frozen point",
            f"{recipe.law} noise, {size}, mean gradient of norm {recipe.start:g}",
            "frozen",
            "bias_along",
            "mean update less mean gradient, along the mean gradient",
            higher=False,
            little=0.0,
        )
    kinds: dict[str, Kind] = {"skewed": "signal", "heavy": "corruption", "normal": "ordinary"}
    kind: Kind = "corruption"
    if recipe.spike >= 0:
        title = "One spiked batch"
    elif recipe.start >= FAR:
        title = "Radius below the mean gradient"
    else:
        title = {"skewed": "Skewed noise", "heavy": "Symmetric heavy tails", "normal": "Normal noise"}[recipe.law]
        kind = kinds[recipe.law]
    return Subject(
        title,
        f"linear regression in {size}, {recipe.law} noise, from a distance of {recipe.start:g}",
        kind,
        "distance",
        "distance from the optimum",
        higher=False,
        little=0.01,
        bias="iterate",
    )


def _bandit(recipe: recipes.Bandit) -> Subject:
    return Subject(
        "Bandit with rare rewards",
        f"{recipe.arms} arms, the best pays once in {1 / recipe.rare:g} pulls",
        "signal",
        "reward",
        "expected reward",
        higher=True,
        little=0.01,
        also=(("best_arm", "chance of the best arm"),),
    )


def _text(recipe: recipes.Text) -> Subject:
    name = {"tinyshakespeare": "Tiny Shakespeare", "python": "Python's help"}.get(recipe.text, "a text")
    return Subject(
        f"Language model, {name}",
        f"{recipe.layers} layers of width {recipe.width}, {recipe.context} bytes of context",
        "ordinary",
        "validation_loss",
        "validation loss (nats per byte)",
        higher=False,
        little=0.01,
        bias="rare_share",
        unbiased=1.0,
        also=(
            ("rare_loss", "loss on rare bytes"),
            ("rare_share", "rare bytes are given, by their due"),
            ("frequent_share", "frequent bytes"),
        ),
    )


def _classify(recipe: recipes.Classify) -> Subject:
    source = SOURCES[recipe.source]
    kind: Kind = "corruption"
    if recipe.noise:
        title, setting = f"Wrong labels, {source}", f"{recipe.noise:.0%} of the labels are wrong"
    elif recipe.spike >= 0:
        title = f"One broken batch, {source}"
        setting = f"the images of step {recipe.spike:,} are 100 times as bright"
    elif recipe.imbalance > 1.0:
        title, kind = f"Long tail, {source}", "signal"
        setting = f"the rarest class is {recipe.imbalance:g} times as rare as the most frequent"
    else:
        title, kind, setting = f"Images, {source}", "ordinary", "all classes alike"
    return Subject(
        title,
        setting,
        kind,
        "balanced_accuracy",
        "balanced accuracy on test images",
        higher=True,
        little=0.01,
        also=(("tail_recall", "recall of the rarer half"), ("calibration_error", "calibration error")),
    )
