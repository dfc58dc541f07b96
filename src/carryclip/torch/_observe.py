"""Observing without clipping: remember what ``carryclip.advice`` needs to judge, on the device, until it is asked."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from carryclip.advice import Advice, advise
from carryclip.regions import Component, Norm
from carryclip.torch._foreign import traits
from carryclip.torch._layout import Layout
from carryclip.torch._shards import local
from carryclip.torch._step import Report

SAMPLED_COORDINATES = 16_384
REMEMBERED_STEPS = 1_000
STOCK = {
    Norm: "torch.nn.utils.clip_grad_norm_(parameters, {radius})",
    Component: "torch.nn.utils.clip_grad_value_(parameters, {radius})",
}
"""What clips as ``carry=False`` does."""


class Seen(NamedTuple):
    """One remembered step."""

    skip: Tensor | None
    """Whether it was skipped; None: it cannot be."""
    data: tuple[Tensor, Tensor] | None
    """Its sampled coordinates and its metrics; None if it was not measured, as a skipped step need not be."""


class Observer:
    """Remembers, for the last steps, the metrics and a fixed sample of the gradient's coordinates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Asked now: the optimizers may be gone by the time somebody wants advice, and they are not held from here.
        self._traits = traits(optimizers)
        self._picks: list[Tensor] = []
        self._coordinates = 0
        self._seen: deque[Seen] = deque(maxlen=REMEMBERED_STEPS)

    def record(self, layout: Layout, report: Report, grad_scale: Tensor | None) -> None:
        """Take in one step; everything stays on the device."""
        if report.measured is None and report.skip is None:
            return
        if len(self._picks) != len(layout.leaves):
            self._choose(layout)
        if report.measured is None:
            self._seen.append(Seen(report.skip, None))
            return
        metrics = report.measured.metrics
        sample = torch.cat([part.to(metrics.device, non_blocking=True) for part in self._parts(layout)])
        sample = sample if grad_scale is None else sample / grad_scale
        self._seen.append(Seen(report.skip, (sample, metrics)))

    def _parts(self, layout: Layout) -> list[Tensor]:
        """The picked coordinates of each parameter's gradient; NaN where there is none."""
        parts = []
        for leaf, pick in zip(layout.leaves, self._picks, strict=True):
            gradient = None if leaf.param.grad is None else local(leaf.param.grad)
            if gradient is None:
                parts.append(torch.full((pick.numel(),), math.nan, device=pick.device))
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            parts.append(gradient.detach().reshape(-1)[pick].float())
        return parts

    def _choose(self, layout: Layout) -> None:
        """Pick the coordinates to remember: all of a small model, else a fixed random sample of the whole vector."""
        sizes = [leaf.param.numel() * (2 if leaf.param.is_complex() else 1) for leaf in layout.leaves]
        self._coordinates = sum(sizes)
        if self._coordinates <= SAMPLED_COORDINATES:
            chosen = torch.arange(self._coordinates)
        else:
            generator = torch.Generator().manual_seed(0)
            chosen = torch.randint(self._coordinates, (SAMPLED_COORDINATES,), generator=generator).sort().values
        self._picks, start = [], 0
        for leaf, size in zip(layout.leaves, sizes, strict=True):
            pick = chosen[(chosen >= start) & (chosen < start + size)] - start
            self._picks.append(pick.to(leaf.param.device))
            start += size
        self._seen.clear()

    def advise(self, layout: Layout, step: int) -> Advice:
        """Judge the remembered steps."""
        skipped = [seen.skip is not None and bool(seen.skip) for seen in self._seen]
        good = [seen.data for seen, skip in zip(self._seen, skipped, strict=True) if seen.data is not None and not skip]
        return advise(
            _table([sample for sample, _ in good]),
            _table([metrics for _, metrics in good]),
            sum(skipped),
            layout.rules[0].region,
            step,
            coordinates=self._coordinates,
            optimizer=self._traits,
            stock=STOCK,
        )


def check_observable(layout: Layout) -> None:
    """Observing judges one region for the whole gradient."""
    region = layout.rules[0].region
    if layout.spread is not None and layout.spread.size > 1:
        raise ValueError(
            "observe=True judges whole gradients, and these parameters are spread over ranks: observe on one process, "
            "or with DDP, and use what it says here."
        )
    if len(layout.rules) > 1 or (isinstance(region, Norm) and region.over != "all"):
        raise ValueError(
            "observe=True judges one region for the whole gradient: give a single region for all groups, and a Norm "
            'with over="all".'
        )
    sizes = [value for value in vars(region).values() if not callable(value)]
    if any(isinstance(value, (list, tuple, Mapping)) or getattr(value, "shape", ()) for value in sizes):
        raise ValueError("observe=True judges one region for the whole gradient: give a radius that is one number.")


def _table(rows: list[Tensor]) -> np.ndarray:
    """Rows in the host's memory, in double precision; without any it is empty, for ``advise`` to complain of."""
    if not rows:
        return np.empty((0, 0))
    # To the host first: not every device has double precision.
    return torch.stack(rows).cpu().double().numpy()
