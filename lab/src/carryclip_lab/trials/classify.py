"""Images with a long tail of rare classes, with wrong labels, or with one broken batch."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carryclip_lab.spec import Spec
from carryclip_lab.tasks import old as tasks
from carryclip_lab.tasks.recipes import Classify as Recipe
from carryclip_lab.trials import rates

BRIGHT = 100.0
"""Factor of the images in a broken batch."""
BINS = 15
"""Of confidence, for calibration."""


@functools.lru_cache(maxsize=4)
def _drawn(recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Places in the training set, and the labels they are given; the same for every run."""
    labels = tasks.load(recipe.source).labels
    classes = int(labels.max()) + 1
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    chosen = []
    for label in range(classes):
        mine = order[labels[order] == label]
        most = min(recipe.largest, len(mine))
        chosen.append(mine[: max(1, round(most * recipe.imbalance ** (-label / (classes - 1))))])
    places = torch.cat(chosen)
    given = labels[places]
    wrong = torch.rand(len(given), generator=generator) < recipe.noise
    shift = torch.randint(1, classes, (len(given),), generator=generator)
    return places, torch.where(wrong, (given + shift) % classes, given)


class Classify:
    """Batches drawn at random from a training set that is spoilt on purpose; tests are what they always were."""

    def __init__(self, spec: Spec) -> None:
        self.recipe, self.batch, self.steps = spec.recipe, spec.batch, spec.recipe.steps
        self.total = spec.epochs * self.steps
        self.task = tasks.load(self.recipe.source)
        self.places, self.labels = _drawn(self.recipe)

    def build(self, generator: torch.Generator) -> nn.Module:
        """A network with fresh weights."""
        return self.task.build(generator)

    def loss(self, net: nn.Module, generator: torch.Generator, step: int) -> Tensor:
        """Cross-entropy of a batch."""
        chosen = torch.randint(len(self.places), (self.batch,), generator=generator)
        images = self.task.images[self.places[chosen]]
        if step == self.recipe.spike:
            images = BRIGHT * images
        return cross_entropy(net(images), self.labels[chosen])

    def measure(self, net: nn.Module) -> dict[str, Any]:
        """Recall, of all classes alike and of the rarer half; loss; how far confidence is from accuracy."""
        logits = torch.cat([net(images) for images in self.task.test_images.split(self.task.chunk)]).double()
        labels, chances = self.task.test_labels, logits.softmax(1)
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

    def rate(self, step: int) -> float:
        """Falling by a cosine to 0."""
        return rates.cosine(step, self.total)
