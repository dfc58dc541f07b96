"""Observing without clipping, and turning what was seen into words and one line to paste."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from carryclip.carry import CarryPolicy, Gated
from carryclip.diagnosis import LAST_STEP
from carryclip.regions import Component, Norm
from carryclip.torch._engine import Report
from carryclip.torch._layout import Layout

SAMPLED_COORDINATES = 16_384
REMEMBERED_STEPS = 1_000
LEAST_STEPS = 20
QUANTILES = (0.5, 0.9, 0.99, 1.0)
NEGLIGIBLE_BIAS = 0.01


@dataclass(frozen=True)
class Advice:
    """What observed gradients say about clipping. Printing it gives the words; ``line`` is what to paste.

    Sizes are Euclidean norms of the whole gradient for a ``Norm`` and single coordinates otherwise.
    """

    steps: int
    skipped: int
    quantiles: dict[float, float]
    """Of the gradient's size."""
    mean_size: float
    """Size of the mean gradient: what the radius must exceed for the carry to drain."""
    radius: float | None
    """Radius of the observed region, None if it is not a constant."""
    clipped: float
    """Share of gradients (norm) or of their coordinates that are larger than it."""
    bias: float
    """Plain clipping's bias at that radius, relative to the mean gradient."""
    carry_ratio: float
    """Largest carry, in radii, that the observed rule would have built up."""
    suggested_radius: float | None
    suggested_bias: float
    """Plain clipping's bias at the suggested radius, relative to the mean gradient."""
    line: str
    reason: str

    def __str__(self) -> str:
        what = "gradient norm" if self.line.find("Norm(") >= 0 else "|gradient| per coordinate"
        seen = ", ".join(f"{'max' if q == 1 else f'{q:.0%}'} {value:.3g}" for q, value in self.quantiles.items())
        lines = [
            f"Observed {self.steps} steps" + (f", {self.skipped} more were not finite." if self.skipped else "."),
            f"  {what}: {seen}",
            f"  mean gradient: {self.mean_size:.3g}; the carry drains only where the radius is above it",
        ]
        if self.radius is not None:
            lines.append(
                f"  at the observed radius {self.radius:.3g}: clips {self.clipped:.1%}; plain clipping would be off by "
                f"{_percent(self.bias)} of the mean gradient; the carry reached {self.carry_ratio:.3g} radii"
            )
        else:
            lines.append(
                f"  the observed region clips {self.clipped:.1%} of the coordinates; "
                f"the carry reached {self.carry_ratio:.3g} radii"
            )
        if self.suggested_radius is not None:
            lines.append(
                f"  at the suggested radius {self.suggested_radius:.3g} plain clipping would be off by "
                f"{_percent(self.suggested_bias)} of the mean gradient"
            )
        return "\n".join([*lines, f"Advice: {self.reason}", f"    {self.line}"])


class Observer:
    """Remembers, for the last steps, the metrics and a fixed sample of the gradient's coordinates."""

    def __init__(self) -> None:
        self._picks: list[Tensor] = []
        self._coordinates = 0
        self._samples: deque[Tensor] = deque(maxlen=REMEMBERED_STEPS)
        self._metrics: deque[Tensor] = deque(maxlen=REMEMBERED_STEPS)
        self._skips: deque[Tensor | None] = deque(maxlen=REMEMBERED_STEPS)

    def record(self, layout: Layout, report: Report, grad_scale: Tensor | None) -> None:
        """Take in one step; everything stays on the device."""
        if report.metrics is None:
            return
        if len(self._picks) != len(layout.leaves):
            self._choose(layout)
        parts = []
        for leaf, pick in zip(layout.leaves, self._picks, strict=True):
            gradient = leaf.param.grad
            if gradient is None:
                parts.append(torch.full((pick.numel(),), math.nan, device=pick.device))
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            parts.append(gradient.detach().reshape(-1)[pick].float())
        device = report.metrics.device
        sample = torch.cat([part.to(device, non_blocking=True) for part in parts])
        self._samples.append(sample if grad_scale is None else sample / grad_scale)
        self._metrics.append(report.metrics)
        self._skips.append(report.skip)

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
        for memory in (self._samples, self._metrics, self._skips):
            memory.clear()

    def advise(self, layout: Layout, policy: CarryPolicy, latest: Any) -> Advice:
        """Judge the remembered steps."""
        skipped = [False if skip is None else bool(skip) for skip in self._skips]
        good = [k for k, skip in enumerate(skipped) if not skip]
        if len(good) < LEAST_STEPS:
            raise RuntimeError(
                f"advise() has seen {len(good)} usable steps and needs at least {LEAST_STEPS}; a few hundred are "
                "better. Train on with the clipper attached, then ask again."
            )
        region = layout.rules[0].region
        if len(layout.rules) > 1 or (isinstance(region, Norm) and region.over != "all"):
            raise RuntimeError(
                "advise() judges one region for the whole gradient. Observe with Norm(radius) or Component(radius) "
                "alone; metrics() works with any region."
            )
        gradients = torch.stack([self._samples[k] for k in good]).double().cpu()
        metrics = torch.stack([self._metrics[k] for k in good]).double().cpu()
        norms = metrics[:, LAST_STEP.index("grad_norm")]
        joint = isinstance(region, Norm)
        view = _NormView(gradients, norms, self._coordinates) if joint else _CoordinateView(gradients)
        quantiles = {q: view.size_quantile(q) for q in QUANTILES}
        mean_size = view.mean_size()
        constant = region.sizes(latest.step)[0] if isinstance(region, (Norm, Component)) else None
        radius = float(constant) if isinstance(constant, (int, float)) else None
        suggested = _two_digits_up(max(view.size_quantile(0.9 if joint else 0.99), 2 * mean_size))
        carry_ratio = float(metrics[:, LAST_STEP.index("carry_ratio")].max())
        suggested_bias = view.bias(suggested)
        spikes = quantiles[1.0] / suggested
        if not isinstance(region, (Norm, Component)):
            call, reason = repr(region), "keep the adaptive region"
            choice = ", carry=Gated()" if carry_ratio > Gated().cap else ""
            reason += "; the carry grows large, so gate it." if choice else "; the full carry stays small."
        else:
            call = f"{type(region).__name__}({suggested:g})"
            choice, reason = _choose_policy(radius, mean_size, suggested, suggested_bias, spikes)
        return Advice(
            steps=len(good),
            skipped=len(skipped) - len(good),
            quantiles=quantiles,
            mean_size=mean_size,
            radius=radius,
            clipped=view.clipped(radius)
            if radius is not None
            else float(metrics[:, LAST_STEP.index("clipped_fraction")].mean()),
            bias=view.bias(radius) if radius is not None else math.nan,
            carry_ratio=carry_ratio,
            suggested_radius=suggested if isinstance(region, (Norm, Component)) else None,
            suggested_bias=suggested_bias,
            line=f"clipper = UClip(optimizer, {call}{choice})",
            reason=reason,
        )


def _choose_policy(radius: float | None, mean: float, suggested: float, bias: float, spikes: float) -> tuple[str, str]:
    """(argument to paste, why)."""
    low = ""
    if radius is not None and radius < mean:
        low = f"the observed radius {radius:.3g} is below the mean gradient, where the full carry winds up. "
    if math.isnan(bias):
        return ", carry=Gated()", "the mean gradient cannot be told from 0 in these steps; Gated is safe either way."
    if bias < NEGLIGIBLE_BIAS:
        return (
            ", carry=False",
            low + "at the suggested radius plain clipping has next to no bias, so the carry's memory buys nothing.",
        )
    if spikes > Gated().cap:
        return (
            ", carry=Gated()",
            low + f"there are spikes of {spikes:.3g} radii; Gated bounds what is paid back for them.",
        )
    if low or suggested <= 2 * mean:
        return (
            ", carry=Gated()",
            low + "the mean gradient is near the radius; Gated stops the carry where it could not drain.",
        )
    return "", "the radius is well above the mean gradient, so the full carry drains and removes the bias."


class _View:
    """Means and biases from the remembered gradients; NaN marks a coordinate that had no gradient in a step.

    <E g, E g> is the mean of <g_s, g_t> over pairs of different steps, so that noise does not count as signal.
    """

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.signal, error = _squared_mean(gradients)
        self.lost_in_noise = self.signal <= 2.5 * error
        """Whether the mean gradient cannot be told from 0."""

    def cut(self, radius: float) -> Tensor:
        """G - clip(g) by plain clipping."""
        raise NotImplementedError

    def bias(self, radius: float) -> float:
        """Norm of E[g - clip(g)] relative to that of E[g]; NaN if the mean is lost in the noise."""
        if self.lost_in_noise:
            return math.nan
        return math.sqrt(max(0.0, _squared_mean(self.cut(radius))[0]) / self.signal)


class _NormView(_View):
    """Gradient norms are known exactly; directions from the sampled coordinates."""

    def __init__(self, gradients: Tensor, norms: Tensor, coordinates: int) -> None:
        super().__init__(gradients)
        self.norms = norms
        self.blow_up = coordinates / gradients.shape[1]

    def size_quantile(self, q: float) -> float:
        return float(torch.quantile(self.norms, q))

    def mean_size(self) -> float:
        return math.sqrt(max(0.0, self.signal * self.blow_up))

    def clipped(self, radius: float) -> float:
        return float((self.norms > radius).double().mean())

    def cut(self, radius: float) -> Tensor:
        return self.gradients * (1.0 - (radius / self.norms).clamp(max=1.0).nan_to_num(1.0)).unsqueeze(1)


class _CoordinateView(_View):
    """Every coordinate by itself."""

    def __init__(self, gradients: Tensor) -> None:
        super().__init__(gradients)
        self.sizes = gradients[~gradients.isnan()].abs().sort().values

    def size_quantile(self, q: float) -> float:
        return float(self.sizes[min(len(self.sizes) - 1, int(q * len(self.sizes)))])

    def mean_size(self) -> float:
        """99 % of the coordinates have a mean below this; the estimate's own noise is taken out."""
        steps = (~self.gradients.isnan()).sum(0)
        mean = self.gradients.nanmean(0)
        variance = (self.gradients - mean).square().nansum(0) / (steps - 1).clamp(min=1)
        signal = (mean.square() - variance / steps.clamp(min=1)).clamp(min=0).sqrt()
        signal = signal[~signal.isnan()].sort().values
        return float(signal[min(len(signal) - 1, int(0.99 * len(signal)))])

    def clipped(self, radius: float) -> float:
        return float((self.sizes > radius).double().mean())

    def cut(self, radius: float) -> Tensor:
        return self.gradients - self.gradients.clamp(-radius, radius)


def _squared_mean(rows: Tensor) -> tuple[float, float]:
    """(unbiased estimate of ||E[row]||², its standard error if the mean were 0), from all pairs of different rows."""
    rows = rows.nan_to_num(0.0)
    pairs = rows.shape[0] * (rows.shape[0] - 1)
    products = rows @ rows.T
    products.fill_diagonal_(0.0)
    return float(products.sum() / pairs), math.sqrt(float(2.0 * products.square().sum() / pairs) / pairs)


def _two_digits_up(value: float) -> float:
    if not 0.0 < value < math.inf:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def _percent(share: float) -> str:
    return "an unknown part" if math.isnan(share) else f"{share:.1%}"
