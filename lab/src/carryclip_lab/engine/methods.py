"""The optimizer of a spec, its method attached, and what is measured of it now and then."""

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from carryclip.diagnosis import CarryClipWarning
from carryclip.torch import UClip
from carryclip_lab.spec import Spec, parse, policy_of
from carryclip_lab.task import load

SAMPLES = 10
"""Steps per epoch, or a few more, whose metrics are averaged."""
NEVER = 1 << 62
"""More steps than there are, between two that are measured."""


def optimizer_of(spec: Spec, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """As the spec names it."""
    if spec.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=spec.lr, betas=(0.9, 0.999))
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=spec.lr, betas=(0.9, 0.99), weight_decay=0.1)
    if spec.optimizer == "adamw-torch":
        return torch.optim.AdamW(parameters, lr=spec.lr)
    if spec.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=spec.lr)
    return torch.optim.SGD(parameters, lr=spec.lr, momentum=0.9, nesterov=spec.optimizer == "nesterov")


def attach(spec: Spec, optimizer: torch.optim.Optimizer, every: int) -> Any:
    """The spec's method on the optimizer: a clipper, whatever a method of one's own returns, or None."""
    if spec.method is not None:
        clipper = load(spec.method, "method")(optimizer, spec)
        if hasattr(clipper, "metrics_every"):
            clipper.metrics_every = every
        return clipper
    if spec.region is None:
        return None
    with unwarned():
        return UClip(optimizer, parse(spec.region), policy_of(spec.carry), metrics_every=every)


def sampling(steps: int) -> int:
    """Steps between two samples; counted over the whole run, as the clipper counts, so that a resumed run agrees."""
    return max(1, steps // SAMPLES)


def measure_next(clipper: Any, *, wanted: bool) -> None:
    """Have a clipper measure its next step, or not: a sample is of the steps that are sampled, and of no others."""
    if hasattr(clipper, "metrics_every"):
        clipper.metrics_every = 1 if wanted else NEVER


def own_state(clipper: Any) -> dict[str, Any]:
    """A clipper's state is in the optimizer's; what a method of one's own returns may have some of its own."""
    if isinstance(clipper, UClip) or not hasattr(clipper, "state_dict"):
        return {}
    return {"clipper": clipper.state_dict()}


class Samples:
    """Metrics of some steps, to be averaged; nothing waits for the device until they are."""

    NAMES = ("grad_norm", "carry_norm", "radius_norm", "clipped_fraction", "carry_feed")

    def __init__(self, known: dict[str, list[float]] | None = None) -> None:
        self._known = known or {}
        self._taken: list[tuple[Tensor, Any]] = []

    def take(self, norm: Tensor, clipper: Any) -> None:
        """After a step: the norm of its gradient, and the clipper's metrics."""
        self._taken.append((norm, clipper.metrics() if hasattr(clipper, "metrics") else {}))

    def values(self) -> dict[str, list[float]]:
        """All of them by name; waits for the device."""
        for norm, metrics in self._taken:
            told = {"grad_norm": norm.item(), **{name: metrics[name] for name in self.NAMES[1:] if name in metrics}}
            for name, value in told.items():
                self._known.setdefault(name, []).append(value)
        self._taken = []
        return self._known

    def means(self) -> dict[str, Any]:
        """None for what there is not, or what is not finite."""
        found = self.values()
        # A region that learns its radius has none at its first steps.
        radii = [radius for radius in found.get("radius_norm", []) if radius != math.inf]
        return {name: _mean(radii if name == "radius_norm" else found.get(name, [])) for name in self.NAMES}


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values and all(map(math.isfinite, values)) else None


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Without the clipper's warnings: what it would warn of is in the metrics of every epoch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryClipWarning)
        yield


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Of all gradients together."""
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
