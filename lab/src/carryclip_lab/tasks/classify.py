"""Images with a long tail of rare classes, with wrong labels, or with one broken batch."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carryclip_lab.checks import check_choice, check_whole, make_float
from carryclip_lab.problem import Problem
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Place, Task
from carryclip_lab.tasks._images import ImageTask, loaded
from carryclip_lab.tasks.cifar10 import Cifar10
from carryclip_lab.tasks.digits import Digits

SOURCES: dict[str, tuple[str, ImageTask]] = {"digits": ("digits", Digits()), "cifar10": ("CIFAR-10", Cifar10())}
BRIGHT = 100.0
"""Factor of the images in a broken batch."""
BINS = 15
"""Of confidence, for calibration."""


@dataclass(frozen=True, kw_only=True)
class Classify(Task):
    """Images of which some classes are rare, some labels wrong, or one batch is broken; the rate falls by a cosine.

    Args:
        source: of the images, ``"digits"`` or ``"cifar10"``.
        largest: examples of the most frequent class, at most.
        imbalance: how many times as frequent as the rarest it is; the others lie between, by the same factor each.
        noise: share of the training labels that are replaced by another class.
        spike: step whose images are a hundred times as bright; -1 for none.
        steps: of an epoch.
    """

    weights = (1e-4, 2e-3)

    source: str = "digits"
    largest: int = 5000
    imbalance: float = 1.0
    noise: float = 0.0
    spike: int = -1
    steps: int = 100

    def __post_init__(self) -> None:
        check_choice("source", self.source, tuple(SOURCES))
        check_whole(self, largest=1, spike=-1, steps=1)
        make_float(self, "imbalance", least=1.0)
        make_float(self, "noise", below=1.0)

    def judged(self) -> Judged:
        """By the accuracy if all classes counted alike."""
        source = SOURCES[self.source][0]
        title, kind, setting = f"Images, {source}", "ordinary", "all classes alike"
        if self.noise:
            title, kind, setting = f"Wrong labels, {source}", "corruption", f"{self.noise:.0%} of the labels are wrong"
        elif self.spike >= 0:
            title, kind = f"One broken batch, {source}", "corruption"
            setting = f"the images of step {self.spike:,} are 100 times as bright"
        elif self.imbalance > 1.0:
            title, kind = f"Long tail, {source}", "signal"
            setting = f"the rarest class is {self.imbalance:g} times as rare as the most frequent"
        return Judged(
            title,
            setting,
            "balanced_accuracy",
            "balanced accuracy on test images",
            higher=True,
            little=0.01,
            kind=kind,
            also=(("tail_recall", "recall of the rarer half"), ("calibration_error", "calibration error")),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """Batches drawn at random from a training set that is spoilt on purpose; tests are what they always were."""
        return _Spoilt(spec, self)

    def at_hand(self, data: str | None) -> None:
        """As the source says."""
        SOURCES[self.source][1].at_hand(data)


@functools.lru_cache(maxsize=4)
def _drawn(task: Classify) -> tuple[Tensor, Tensor]:
    """Places in the training set, and the labels they are given; the same for every run."""
    labels = loaded(SOURCES[task.source][1].read).labels
    classes = int(labels.max()) + 1
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    chosen = []
    for label in range(classes):
        mine = order[labels[order] == label]
        most = min(task.largest, len(mine))
        chosen.append(mine[: max(1, round(most * task.imbalance ** (-label / (classes - 1))))])
    places = torch.cat(chosen)
    given = labels[places]
    wrong = torch.rand(len(given), generator=generator) < task.noise
    shift = torch.randint(1, classes, (len(given),), generator=generator)
    return places, torch.where(wrong, (given + shift) % classes, given)


class _Spoilt(Problem):
    floor = 0.0

    def __init__(self, spec: Spec, task: Classify) -> None:
        super().__init__(spec, task.steps)
        self.task, self.data = task, loaded(SOURCES[task.source][1].read)
        self.places, self.labels = _drawn(task)

    def build(self, generator: torch.Generator) -> nn.Module:
        """The network that comes with the images."""
        return self.data.build(generator)

    def loss(self, net: nn.Module, generator: torch.Generator, step: int) -> Tensor:
        """Cross-entropy of a batch."""
        chosen = torch.randint(len(self.places), (self.spec.batch,), generator=generator)
        images = self.data.images[self.places[chosen]]
        if step == self.task.spike:
            images = BRIGHT * images
        return cross_entropy(net(images), self.labels[chosen])

    def measure(self, net: nn.Module) -> dict[str, Any]:
        """Recall, of all classes alike and of the rarer half; loss; how far confidence is from accuracy."""
        logits = torch.cat([net(images) for images in self.data.test_images.split(self.data.chunk)]).double()
        labels, chances = self.data.test_labels, logits.softmax(1)
        sure, said = chances.max(1)
        right = (said == labels).double()
        counts = torch.bincount(labels).double()
        recall = torch.bincount(labels, weights=right) / counts
        bins = (sure * BINS).long().clamp(max=BINS - 1)
        gaps = torch.bincount(bins, weights=right - sure, minlength=BINS).abs()
        rare = len(recall) // 2
        return {
            "balanced_accuracy": float(recall.mean()),
            "tail_recall": float(recall[rare:].mean()),
            "tail_share": float(chances[:, rare:].sum() / counts[rare:].sum()),
            "test_loss": float(cross_entropy(logits, labels)),
            "calibration_error": float(gaps.sum() / len(labels)),
        }
