"""Small problems whose optimum is known: shares by Zipf's law, a line under odd noise, a bandit with rare prizes."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from carryclip_lab.spec import Spec
from carryclip_lab.trials import rates


class Weights(nn.Module):
    """One vector."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(start)


class Softmax:
    """Classes by Zipf's law, and logits that should become the logarithms of their shares.

    Most classes are rare. Whenever one comes up, its gradient is as large as it ever gets.
    """

    rate = staticmethod(rates.constant)

    def __init__(self, spec: Spec) -> None:
        self.batch, self.steps, count = spec.batch, spec.recipe.steps, spec.recipe.classes
        shares = torch.arange(1, count + 1, dtype=torch.float64) ** -spec.recipe.exponent
        self.shares = shares / shares.sum()
        self.optimum = _centred(self.shares.log())

    def build(self, generator: torch.Generator) -> Weights:
        """All classes alike."""
        return Weights(torch.zeros(len(self.shares)))

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Cross-entropy of a batch of labels."""
        labels = torch.multinomial(self.shares, self.batch, replacement=True, generator=generator)
        return cross_entropy(net.values.expand(self.batch, -1), labels)

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


class Regression:
    """A line through points with noise that is skewed, heavy-tailed, or fine but for one batch.

    The noise has mean 0 in each case, so that the optimum of the squared error is the true line.
    """

    rate = staticmethod(rates.constant)

    def __init__(self, spec: Spec) -> None:
        self.recipe, self.batch, self.steps = spec.recipe, spec.batch, spec.recipe.steps
        size = self.recipe.dimension
        self.truth = torch.ones(size) / math.sqrt(size)

    def build(self, generator: torch.Generator) -> Weights:
        """Somewhere at the given distance; to stay there, where noise and mean gradient have their tail on one side."""
        direction = torch.randn(len(self.truth), generator=generator)
        if self.recipe.frozen:
            direction = torch.zeros(len(self.truth))
            direction[0] = -1.0
        return Weights(self.truth + self.recipe.start * direction / direction.norm())

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Half of the mean squared error of a batch."""
        inputs = torch.randn(self.batch, len(self.truth), generator=generator)
        inputs[:, 0] = 1.0  # the constant, which skewed noise pulls at
        targets = inputs @ self.truth + self._noise(generator)
        if step == self.recipe.spike:
            targets = targets + 1000.0
        return (inputs @ net.values - targets).square().mean() / 2

    def _noise(self, generator: torch.Generator) -> Tensor:
        uniform = torch.rand(self.batch, generator=generator).clamp_min(1e-12)
        match self.recipe.law:
            case "skewed":  # Pareto with tail 2.5, its mean taken off
                return uniform ** (-1 / 2.5) - 2.5 / 1.5
            case "heavy":  # Student's t with 1.5 degrees of freedom: no variance
                normal = torch.randn(self.batch, generator=generator)
                gamma = torch._standard_gamma(torch.full((self.batch,), 0.75), generator=generator)
                return normal / (gamma / 0.75).sqrt()
        return torch.randn(self.batch, generator=generator)

    def measure(self, net: Any) -> dict[str, Any]:
        """Distance to the true line, and the way there."""
        error = (net.values - self.truth).double()
        return {"distance": float(error.norm()), "iterate": error.tolist()}


class Bandit:
    """One arm pays much and rarely, and is the best; the others pay a little always. A policy by its gradient."""

    rate = staticmethod(rates.constant)

    def __init__(self, spec: Spec) -> None:
        self.recipe, self.batch, self.steps = spec.recipe, spec.batch, spec.recipe.steps
        self.means = torch.full((self.recipe.arms,), 1.0, dtype=torch.float64)
        self.means[0] = 2.0

    def build(self, generator: torch.Generator) -> Weights:
        """All arms alike."""
        return Weights(torch.zeros(len(self.means)))

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Whose gradient is that of the expected reward, by the pulls of a batch; 1 is taken off as a baseline."""
        chances = net.values.log_softmax(0)
        pulls = torch.multinomial(chances.detach().exp(), self.batch, replacement=True, generator=generator)
        lucky = torch.rand(self.batch, generator=generator) < self.recipe.rare
        rewards = torch.where(pulls == 0, torch.where(lucky, 2.0 / self.recipe.rare, 0.0), 1.0)
        return -((rewards - 1.0) * chances[pulls]).mean()

    def measure(self, net: Any) -> dict[str, Any]:
        """Expected reward and the best arm's chance."""
        policy = net.values.double().softmax(0)
        return {"reward": float(policy @ self.means), "best_arm": float(policy[0])}
