"""What a task lets a spec choose besides the fields that all runs have. Imports nothing heavy."""

import dataclasses
import difflib
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

PRECISIONS = ("float32", "bfloat16")


class Shape(NamedTuple):
    """What makes one ResNet differ from another."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    width: int
    """Channels after the first convolution; each group doubles them."""


NETS = {
    "resnet50": Shape((3, 4, 6, 3), bottleneck=True, width=64),
    "resnet26": Shape((2, 2, 2, 2), bottleneck=True, width=64),
    "resnet18": Shape((2, 2, 2, 2), bottleneck=False, width=64),
    "resnet10": Shape((1, 1, 1, 1), bottleneck=False, width=16),
}
"""By name; the last is narrow, for trials on a CPU."""


@dataclass(frozen=True, kw_only=True)
class NoRecipe:
    """Nothing: data and network are fixed."""


@dataclass(frozen=True, kw_only=True)
class ImageNet:
    """A ResNet on a folder of images; the defaults are the paper's.

    Args:
        net: name of the network.
        image: side of the images, in pixels.
        micro: images that go through the network together, and so share their batch statistics.
        warmup: epochs in which the learning rate rises.
        decay: factor of the L2 term in the loss, on all weights but batch norm's.
        smoothing: of labels.
        precision: in which the network computes; weights and carry stay in float32.
        data: fingerprint of the folder; with the next three it is filled in from the folder that is used.
        classes: of images.
        images: in the training set.
        tests: images in the validation set.
    """

    net: str = "resnet50"
    image: int = 224
    micro: int = 128
    warmup: int = 5
    decay: float = 1e-4
    smoothing: float = 0.1
    precision: str = "float32"
    data: str = "imagenet"
    classes: int = 1000
    images: int = 1_281_167
    tests: int = 50_000

    def __post_init__(self) -> None:
        for name, least in (("image", 8), ("micro", 2), ("warmup", 0), ("classes", 2), ("images", 1), ("tests", 1)):
            check_whole(name, getattr(self, name), least)
        for name in ("decay", "smoothing"):
            _floated(self, name, below=1.0)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("net", self.net, tuple(NETS))


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """Shares of classes by Zipf's law.

    Args:
        classes: how many.
        exponent: of the law; the k-th class has a share in proportion to k to the power of its negative.
        steps: of an epoch.
    """

    classes: int = 100
    exponent: float = 1.0
    steps: int = 200

    def __post_init__(self) -> None:
        check_whole("classes", self.classes, 2)
        check_whole("steps", self.steps, 1)
        _floated(self, "exponent")


@dataclass(frozen=True, kw_only=True)
class Regression:
    """A line through noisy points.

    Args:
        law: of the noise: ``"normal"``, ``"skewed"`` or ``"heavy"``.
        dimension: of the inputs, the constant among them.
        start: distance from the truth at the start, which is the norm of the mean gradient there.
        spike: step whose targets are off by 1000; -1 for none.
        frozen: whether the weights stay where they are, to see what a method makes of the gradients there.
        steps: of an epoch.
    """

    law: str = "normal"
    dimension: int = 10
    start: float = 1.0
    spike: int = -1
    frozen: bool = False
    steps: int = 200

    def __post_init__(self) -> None:
        check_choice("law", self.law, ("normal", "skewed", "heavy"))
        for name, least in (("dimension", 1), ("steps", 1), ("spike", -1)):
            check_whole(name, getattr(self, name), least)
        _floated(self, "start")
        if not isinstance(self.frozen, bool):
            raise ValueError(f"frozen must be true or false, got {self.frozen!r}.")


@dataclass(frozen=True, kw_only=True)
class Bandit:
    """One arm that is the best and pays rarely.

    Args:
        arms: how many.
        rare: chance that it pays.
        steps: of an epoch.
    """

    arms: int = 10
    rare: float = 0.01
    steps: int = 200

    def __post_init__(self) -> None:
        check_whole("arms", self.arms, 2)
        check_whole("steps", self.steps, 1)
        _floated(self, "rare", above=0.0, below=1.0)


@dataclass(frozen=True, kw_only=True)
class Text:
    """A decoder-only transformer on the bytes of a text; warm-up over the first twentieth, then a cosine to a tenth.

    Args:
        text: ``"tinyshakespeare"``, which ``carryclip data`` fetches, ``"python"``, the help that comes with Python, or
            the checksum of a file of your own, filled in from ``--data``.
        context: bytes that go in together.
        width: of the network.
        layers: of the network.
        heads: of attention in each of them.
        windows: pieces of the held-out tenth that are measured.
        steps: of an epoch.
    """

    text: str = "tinyshakespeare"
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    windows: int = 256
    steps: int = 250

    def __post_init__(self) -> None:
        for name, least in (("context", 2), ("width", 1), ("layers", 1), ("heads", 1), ("windows", 1), ("steps", 1)):
            check_whole(name, getattr(self, name), least)
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if not isinstance(self.text, str) or not self.text:
            raise ValueError(f"text must be a name, got {self.text!r}.")


@dataclass(frozen=True, kw_only=True)
class Classify:
    """Images of which some classes are rare, some labels wrong, or one batch is broken; the rate falls by a cosine.

    Args:
        source: of the images, ``"digits"`` or ``"cifar10"``.
        largest: examples of the most frequent class, at most.
        imbalance: how many times as frequent as the rarest it is; the others lie between, by the same factor each.
        noise: share of the training labels that are replaced by another class.
        spike: step whose images are a hundred times as bright; -1 for none.
        steps: of an epoch.
    """

    source: str = "digits"
    largest: int = 5000
    imbalance: float = 1.0
    noise: float = 0.0
    spike: int = -1
    steps: int = 100

    def __post_init__(self) -> None:
        check_choice("source", self.source, ("digits", "cifar10"))
        for name, least in (("largest", 1), ("spike", -1), ("steps", 1)):
            check_whole(name, getattr(self, name), least)
        _floated(self, "imbalance", least=1.0)
        _floated(self, "noise", below=1.0)


RECIPES: dict[str, type[Any]] = {
    "digits": NoRecipe,
    "cifar10": NoRecipe,
    "imagenet": ImageNet,
    "softmax": Softmax,
    "regression": Regression,
    "bandit": Bandit,
    "text": Text,
    "classify": Classify,
}
TRIALS = ("softmax", "regression", "bandit", "text", "classify")
"""Those that ask when the carry is worth having."""


@functools.cache
def names(task: str | None = None) -> list[str]:
    """What can be chosen for a task, or for any."""
    kinds = [RECIPES[task]] if task in RECIPES else RECIPES.values()
    return list(dict.fromkeys(field.name for kind in kinds for field in dataclasses.fields(kind)))


def defaults() -> dict[str, Any]:
    """What can be chosen for any task, as it is if nobody chooses."""
    return {field.name: field.default for kind in RECIPES.values() for field in dataclasses.fields(kind)}


def check_choice(name: str, value: Any, known: tuple[str, ...]) -> None:
    """One of some words."""
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}."
        raise ValueError(f"there is no {name} {value!r}; {hint}")


def _floated(recipe: Any, name: str, *, least: float = 0.0, above: float = -1.0, below: float = math.inf) -> None:
    """Make a field a finite number, in bounds."""
    value = getattr(recipe, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value < below or not value > above:
        low = f"above {above:g}" if above >= 0.0 else f"at least {least:g}"
        high = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} must be a number {low}{high}, got {value!r}.")
    object.__setattr__(recipe, name, float(value))


def check_whole(name: str, value: Any, least: int) -> None:
    """A whole number, not too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}; got {value!r}.")
