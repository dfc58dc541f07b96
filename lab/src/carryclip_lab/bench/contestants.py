"""What is compared: U-Clip in its modes, the clipping people have, bare optimizers, and the floor of memory traffic."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from carryclip import EWMA, RMS, Adaptive, Component, Drip, Gated, Norm, Shrunk, Welford
from carryclip.presets import agc
from carryclip.torch import UClip
from carryclip.torch._bundles import Tuning

Step = Callable[[], Any]

COMPONENT_RADIUS = 0.01
"""One standard deviation of the gradients: a third of the coordinates is clipped."""


@dataclass
class Entry:
    """One contestant on one set of parameters."""

    step: Step
    held: Callable[[], int] = field(default=lambda: 0)
    """Bytes it keeps between steps."""


Make = Callable[[list[Tensor]], Entry]


def baselines() -> dict[str, Make]:
    """The clipping people have, each as its own library does it."""
    return {
        "clip_grad_norm_": lambda params: Entry(lambda: torch.nn.utils.clip_grad_norm_(params, _half_norm(params))),
        "clip_grad_value_": lambda params: Entry(lambda: torch.nn.utils.clip_grad_value_(params, COMPONENT_RADIUS)),
        "AGC rule": _agc,
        "ZClip-style rule": _zclip,
    }


def optimizers() -> dict[str, Make]:
    """Bare optimizer steps, for scale."""
    return {
        "SGD step": _optimizer(torch.optim.SGD, lr=0.0),
        "AdamW step, foreach": _optimizer(torch.optim.AdamW, lr=0.0, foreach=True),
        "AdamW step, fused": _optimizer(torch.optim.AdamW, lr=0.0, fused=True),
    }


def modes(compile: bool) -> dict[str, Make]:
    """U-Clip in its modes: with the full carry and metrics off but where they are named."""
    word = "compiled" if compile else "eager"
    table: dict[str, tuple[Any, dict[str, Any]]] = {
        "Component": (Component(COMPONENT_RADIUS), {}),
        "Component, propagate": (Component(COMPONENT_RADIUS), {"nonfinite": "propagate"}),
        "Component, metrics every 10": (Component(COMPONENT_RADIUS), {"metrics_every": 10}),
        "Component, Gated": (Component(COMPONENT_RADIUS), {"carry": Gated()}),
        "Component, no carry": (Component(COMPONENT_RADIUS), {"carry": False}),
        "Norm": (None, {}),
        "Norm, metrics every 10": (None, {"metrics_every": 10}),
        "Norm, Gated": (None, {"carry": Gated()}),
        "Norm, Drip": (None, {"carry": Drip()}),
        "Norm, Shrunk": (None, {"carry": Shrunk()}),
        "Norm, no carry": (None, {"carry": False}),
        "Norm, inside its radius": (Norm(1e9), {}),
        "Adaptive EWMA": (Adaptive(mean=1, std=1, moments=EWMA()), {}),
        "Adaptive Welford": (Adaptive(mean=1, std=1, moments=Welford()), {}),
        "Component, bfloat16 carry": (Component(COMPONENT_RADIUS), {"carry_dtype": "bfloat16"}),
    }
    if not compile:  # rows are never compiled, and rules for the radius cost the same
        rows = Norm(10 * COMPONENT_RADIUS, over="row")
        table |= {
            "Norm, RMS radius": (Norm(RMS(0.5, warmup=1)), {}),
            "Norm of rows": (rows, {}),
            "Norm of rows, Shrunk": (rows, {"carry": Shrunk()}),
            "Norm of rows, no carry": (rows, {"carry": False}),
            "AGC, no carry": (agc(), {"carry": False}),
        }
    return {f"{word} {name}": _uclip(region, compile, options) for name, (region, options) in table.items()}


def floors() -> dict[str, Make]:
    """Bare compiled passes over the same arrays: what memory traffic alone costs."""
    return {
        "floor Component, propagate": _floor(reads=0, arrays=2),
        "floor Component": _floor(reads=1, arrays=2),
        "floor Norm": _floor(reads=2, arrays=2),
        "floor Adaptive EWMA": _floor(reads=1, arrays=4),
    }


def _half_norm(params: list[Tensor]) -> float:
    """Half the norm of normal gradients, so that every step clips."""
    return COMPONENT_RADIUS * sum(p.numel() for p in params) ** 0.5 / 2


def _uclip(region: Any, compile: bool, options: dict[str, Any]) -> Make:
    def make(params: list[Tensor]) -> Entry:
        own = Norm(_half_norm(params)) if region is None else region
        settings: dict[str, Any] = {"carry": True, "metrics_every": 0, "compile": compile} | options
        clipper = UClip(params, own, **settings)

        def held() -> int:
            entries = [clipper._session.stepper.home.peek(param) for param in params]
            return sum(x.nbytes for each in entries for x in each.values())

        return Entry(clipper.clip_, held)

    return make


def _optimizer(kind: Any, **options: Any) -> Make:
    def make(params: list[Tensor]) -> Entry:
        optimizer = kind(params, **options)

        def held() -> int:
            return sum(x.nbytes for entry in optimizer.state.values() for x in entry.values() if torch.is_tensor(x))

        return Entry(optimizer.step, held)

    return make


def _agc(params: list[Tensor], factor: float = 0.01) -> Entry:
    """Adaptive gradient clipping: each unit's gradient to a fraction of its weights' norm."""

    def norm(x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())) if x.dim() > 1 else None, keepdim=x.dim() > 1)

    @torch.no_grad()
    def step() -> None:
        for param in params:
            assert param.grad is not None
            most = norm(param).clamp_(min=1e-3).mul_(factor)
            size = norm(param.grad)
            param.grad.mul_(torch.where(size > most, most / size.clamp(min=1e-6), 1.0))

    return Entry(step)


def _zclip(params: list[Tensor], memory: float = 0.97, threshold: float = 2.5) -> Entry:
    """The norm against its own running mean and deviation; spikes come down to a few deviations."""
    state = {"mean": _half_norm(params), "variance": 1e-4}

    def step() -> None:
        gradients = [param.grad for param in params if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        size, deviation = norm.item(), state["variance"] ** 0.5
        score = (size - state["mean"]) / (deviation + 1e-6)
        held = state["mean"] + deviation * threshold**2 / score if score > threshold else size
        torch.nn.utils.clip_grads_with_norm_(params, held, norm)
        state["mean"] = memory * state["mean"] + (1 - memory) * held
        state["variance"] = memory * state["variance"] + (1 - memory) * (held - state["mean"]) ** 2

    return Entry(step)


def _floor(reads: int, arrays: int) -> Make:
    """Read ``reads`` of the arrays once, then read and write all of them: nothing can do with less."""

    def look(vectors: list[Tensor]) -> Tensor:
        return sum(vectors[1:], vectors[0]).abs().amax()

    def move(vectors: list[Tensor]) -> None:
        total = sum(vectors[1:], vectors[0])
        for k, vector in enumerate(vectors):
            vector.copy_(total * (0.5 if k == 0 else 0.25))

    read, write = (torch.compile(f, dynamic=True, fullgraph=True) for f in (look, move))

    small_size = Tuning().small

    def make(params: list[Tensor]) -> Entry:
        large = [p for p in params if p.numel() >= small_size]
        rest = sum(p.numel() for p in params if p.numel() < small_size)
        buffers = [[torch.zeros(p.numel()) for _ in range(arrays - 1)] for p in large]
        small = [[torch.zeros(rest) for _ in range(arrays)]] if rest else []

        def step() -> None:
            rows = [[p.grad.view(-1), *own] for p, own in zip(large, buffers, strict=True) if p.grad is not None]
            with torch.no_grad():
                for row in rows + small if reads else []:
                    read(row[:reads])
                for row in rows + small:
                    write(row)

        return Entry(step)

    return make
