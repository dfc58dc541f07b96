"""Shares of classes by Zipf's law: most classes are rare, and each has its largest gradient when it comes up."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from carryclip_lab.checks import check_whole, make_float
from carryclip_lab.problem import Problem, Weights
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Place, Task


@dataclass(frozen=True, kw_only=True)
class Softmax(Task):
    """Logits that should become the logarithms of the classes' shares.

    Args:
        classes: how many.
        exponent: of the law; the k-th class has a share in proportion to k to the power of its negative.
        steps: of an epoch.
    """

    classes: int = 100
    exponent: float = 1.0
    steps: int = 200

    def __post_init__(self) -> None:
        check_whole(self, classes=2, steps=1)
        make_float(self, "exponent")

    def judged(self) -> Judged:
        """By the divergence from the true shares."""
        even = self.exponent == 0.0
        shares = "equal shares" if even else "shares by Zipf's law"
        return Judged(
            "Even softmax" if even else "Zipf softmax",
            f"{self.classes} classes with {shares}",
            "divergence",
            "divergence from the true shares (nats)",
            higher=False,
            little=0.002,
            kind="ordinary" if even else "signal",
            bias="iterate",
            also=(("rare_share", "rare classes are given, by their due"),),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """The optimum is known."""
        return _Shares(spec, self)


class _Shares(Problem):
    def __init__(self, spec: Spec, task: Softmax) -> None:
        super().__init__(spec, task.steps)
        shares = torch.arange(1, task.classes + 1, dtype=torch.float64) ** -task.exponent
        self.shares = shares / shares.sum()
        self.optimum = _centred(self.shares.log())

    def build(self, generator: torch.Generator) -> Weights:
        """All classes alike."""
        return Weights(torch.zeros(len(self.shares)))

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Cross-entropy of a batch of labels."""
        batch = self.spec.batch
        labels = torch.multinomial(self.shares, batch, replacement=True, generator=generator)
        return cross_entropy(net.values.expand(batch, -1), labels)

    def measure(self, net: Any) -> dict[str, Any]:
        """Divergence from the true shares; what the rarer half is given, by what it has; distance of the logits."""
        logits = net.values.double()
        given = logits.softmax(0)
        rare = len(self.shares) // 2
        return {
            "divergence": float((self.shares * (self.shares.log() - logits.log_softmax(0))).sum()),
            "rare_share": float(given[rare:].sum() / self.shares[rare:].sum()),
            "distance": float((_centred(logits) - self.optimum).norm()),
            "iterate": (_centred(logits) - self.optimum).tolist(),
        }


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean()
