"""Other remedies for the bias of clipping, each from its published rule: methods that a study names by module:function.

They stand beside plain clipping and U-Clip at the same radius and at the same cost, one buffer of the gradient's size
unless said otherwise. All of them rewrite the gradients before the optimizer's step, so that any optimizer will do.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from carryclip.regions import Component, Norm
from carryclip.torch import UClip
from carryclip_lab.spec import Spec, parse, policy_of

DECAY = 0.9
"""Of averages of gradients."""
Tensors = list[Tensor]


class Peer:
    """A rule that rewrites the gradients, with buffers that are saved with the run."""

    def __init__(self, optimizer: torch.optim.Optimizer, spec: Spec) -> None:
        region: Any = None if spec.region is None else parse(spec.region)
        whole = isinstance(region, Norm) and region.over == "all"
        if not (whole or isinstance(region, Component)) or not isinstance(region.radius, (int, float)):
            raise ValueError(f"{type(self).__name__} wants a Norm or a Component with a number, got {region}.")
        self.radius, self.whole, self.optimizer, self.count = float(region.radius), whole, optimizer, 0
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.buffers: dict[str, Tensors] = {}
        self._told: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._rewrite)

    def rule(self, gradients: Tensors) -> Tensors:
        """The updates in place of gradients."""
        raise NotImplementedError

    def clip(self, tensors: Tensors) -> Tensors:
        """To the radius: as one vector, or each entry."""
        if not self.whole:
            return list(torch._foreach_clamp_max(torch._foreach_clamp_min(tensors, -self.radius), self.radius))
        scale = (self.radius / get_total_norm(tensors)).clamp(max=1.0).nan_to_num(1.0)
        return list(torch._foreach_mul(tensors, scale))

    def buffer(self, name: str) -> Tensors:
        """Zeros at first."""
        if name not in self.buffers:
            self.buffers[name] = [torch.zeros_like(each) for each in self.parameters]
        return self.buffers[name]

    def average(self, name: str, gradients: Tensors) -> Tensors:
        """The exponential average, not yet free of the zeros it began with."""
        kept = self.buffer(name)
        torch._foreach_lerp_(kept, gradients, 1.0 - DECAY)
        return kept

    @torch.no_grad()
    def _rewrite(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters]
        updates = self.rule(gradients)
        self.count += 1
        self._told = {"clipped_fraction": self._clipped(gradients)}
        if self.buffers:
            self._told["carry_norm"] = get_total_norm([each for kept in self.buffers.values() for each in kept])
        for parameter, update in zip(self.parameters, updates, strict=True):
            parameter.grad = update

    def _clipped(self, gradients: Tensors) -> Tensor:
        if self.whole:
            return (get_total_norm(gradients) > self.radius).float()
        return torch.cat([(each.abs() > self.radius).flatten() for each in gradients]).float().mean()

    def metrics(self) -> dict[str, float]:
        """Of the last step: the share of the gradient beyond the radius, and the norm of what is kept."""
        return {"radius_norm": self.radius, **{name: value.item() for name, value in self._told.items()}}

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps."""
        return {"buffers": self.buffers, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.buffers, self.count = state["buffers"], state["count"]


class Average(Peer):
    """Clip the exponential average of the gradients instead of each: averaging shrinks the noise before it is cut."""

    def rule(self, gradients: Tensors) -> Tensors:
        """Clip m, where m is the average without its initial zeros."""
        kept = self.average("average", gradients)
        return self.clip(list(torch._foreach_div(kept, 1.0 - DECAY ** (self.count + 1))))


class ErrorFeedback(Peer):
    """EF-SGD with clipping as the compressor (Karimireddy et al. 2019).

    What is kept is in units of the weights: at a constant learning rate this is U-Clip, under a schedule it is not.
    """

    def rule(self, gradients: Tensors) -> Tensors:
        """From p = lr g + e: the step is p clipped to lr times the radius, and e what it lacks."""
        kept, lr = self.buffer("error"), self.optimizer.param_groups[0]["lr"]
        if lr == 0.0:  # a step of nothing, that leaves nothing behind
            return gradients
        total = torch._foreach_add(gradients, torch._foreach_div(kept, lr))
        updates = self.clip(list(total))
        self.buffers["error"] = list(torch._foreach_mul(torch._foreach_sub(total, updates), lr))
        return updates


class Dice(Peer):
    """DiceSGD without its noise (Zhang et al. 2024): gradient and error are clipped apart, both to the radius."""

    def rule(self, gradients: Tensors) -> Tensors:
        """The update is clip(g) + clip(e), which may be twice the radius; e keeps what it lacks."""
        kept = self.buffer("error")
        updates = list(torch._foreach_add(self.clip(gradients), self.clip(kept)))
        torch._foreach_add_(kept, gradients)
        torch._foreach_sub_(kept, updates)
        return updates


class Clip21(Peer):
    """Clip21 with momentum (Islamov et al. 2025) without its noise: an estimate follows the average of gradients.

    Two buffers.
    """

    def rule(self, gradients: Tensors) -> Tensors:
        """The update is w, which moves towards the average of gradients by at most the radius."""
        average, estimate = self.average("average", gradients), self.buffer("estimate")
        torch._foreach_add_(estimate, self.clip(list(torch._foreach_sub(average, estimate))))
        return [each.clone() for each in estimate]


class ZScore:
    """A radius by the z-score of the gradient's norm (ZClip, Kumar et al. 2025), with the spec's carry behind it.

    After 25 steps, a norm that is more than 2.5 deviations above its average is cut to fewer the further off it was. A
    carry is paid back within those 2.5.
    """

    ALPHA, THRESHOLD, WARMUP = 0.97, 2.5, 25

    def __init__(self, optimizer: torch.optim.Optimizer, spec: Spec) -> None:
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]
        self.radius, self.norms = math.inf, list[float]()
        self.mean, self.variance = 0.0, 0.0
        optimizer.register_step_pre_hook(self._look)  # before the clipper's own
        self._clipper = UClip(optimizer, Norm(lambda _: min(self.radius, 1e30)), policy_of(spec.carry))

    @property
    def metrics_every(self) -> int:
        """Steps between two that are measured."""
        return self._clipper.metrics_every

    @metrics_every.setter
    def metrics_every(self, every: int) -> None:
        self._clipper.metrics_every = every

    @torch.no_grad()
    def _look(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        norm = get_total_norm([each.grad for each in self.parameters if each.grad is not None]).item()
        if len(self.norms) < self.WARMUP:
            if math.isfinite(norm):
                self.norms.append(norm)
                self.mean = math.fsum(self.norms) / len(self.norms)
                self.variance = math.fsum((each - self.mean) ** 2 for each in self.norms) / len(self.norms)
            return
        deviation = math.sqrt(self.variance) + 1e-12
        score = (norm - self.mean) / deviation
        self.radius = self.mean + self.THRESHOLD * deviation
        if score > self.THRESHOLD:
            self.radius = norm = self.mean + self.THRESHOLD**2 / score * deviation
        if math.isfinite(norm):
            self.variance = self.ALPHA * self.variance + (1 - self.ALPHA) * (norm - self.mean) ** 2
            self.mean = self.ALPHA * self.mean + (1 - self.ALPHA) * norm

    def metrics(self) -> Any:
        """The clipper's."""
        return self._clipper.metrics()

    def state_dict(self) -> dict[str, Any]:
        """What is kept between steps, but for the carry, which is the optimizer's."""
        return {"norms": self.norms, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.norms, self.mean, self.variance = state["norms"], state["mean"], state["variance"]
