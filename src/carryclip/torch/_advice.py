"""Observing without clipping, and turning what was seen into words and one line to paste."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from carryclip.carry import Gated
from carryclip.diagnosis import LAST_STEP
from carryclip.regions import Component, Norm
from carryclip.torch._engine import Report
from carryclip.torch._layout import Layout
from carryclip.torch._shards import local

SAMPLED_COORDINATES = 16_384
REMEMBERED_STEPS = 1_000
LEAST_STEPS = 20
QUANTILES = (0.5, 0.9, 0.99, 1.0)
NEGLIGIBLE_BIAS = 0.01
LARGE_CARRY = 10.0
DIVIDING = tuple(
    getattr(torch.optim, name)
    for name in ("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop")
)
"""Optimizers that divide gradients by a running average of their size, or look at their signs alone."""


@dataclass(frozen=True)
class Advice:
    """What observed gradients say about clipping. Printing it gives the words; ``line`` is what to paste.

    Sizes are Euclidean norms of the whole gradient for a ``Norm`` and those of single coordinates otherwise.
    """

    steps: int
    skipped: int
    quantiles: dict[float, float]
    """Of the gradient's size."""
    mean_size: float
    """Size of the mean gradient (of 99 % of the coordinates: at most this); NaN if it is lost in the noise."""
    radius: float | None
    """Radius of the observed region, None if it is not a constant."""
    clipped: float
    """Share of gradients (norm) or of their coordinates that are larger than it."""
    bias: float
    """Plain clipping's bias at that radius, relative to the mean gradient: 0 if none shows, NaN if of unknown size."""
    carry_ratio: float
    """Largest carry, in radii, that the observed rule would have built up in the later half of the steps."""
    suggested_radius: float | None
    suggested_bias: float
    """Plain clipping's bias at the suggested radius, as ``bias``."""
    line: str
    reason: str

    def __str__(self) -> str:
        norm = "Norm(" in self.line
        what = "gradient norm" if norm else "|gradient| per coordinate"
        seen = ", ".join(f"{'max' if q == 1 else f'{q:.0%}'} {value:.3g}" for q, value in self.quantiles.items())
        mean = f"norm {self.mean_size:.3g}" if norm else f"at most {self.mean_size:.3g} in 99% of the coordinates"
        lines = [
            f"Observed {self.steps} steps" + (f", {self.skipped} more were not finite." if self.skipped else "."),
            f"  {what}: {seen}",
            f"  mean gradient: {mean}; the carry drains only where the radius is above it"
            if self.mean_size == self.mean_size
            else "  mean gradient: lost in the noise of these steps",
        ]
        reached = f"the carry reached {self.carry_ratio:.3g} radii"
        if self.radius is None:
            lines.append(f"  the observed region clips {self.clipped:.1%} of the coordinates; {reached}")
        else:
            lines.append(
                f"  radius {self.radius:.3g} (observed): clips {self.clipped:.1%}; {_words(self.bias)}; {reached}"
            )
        if self.suggested_radius is not None:
            lines.append(f"  radius {self.suggested_radius:.3g} (suggested): {_words(self.suggested_bias)}")
        return "\n".join([*lines, f"Advice: {self.reason}", f"    {self.line}", CAVEAT])


CAVEAT = "Numbers cannot tell signal from corruption: if large gradients are bad data, take carry=False."


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
        if report.measured is None:
            return
        if len(self._picks) != len(layout.leaves):
            self._choose(layout)
        parts = []
        for leaf, pick in zip(layout.leaves, self._picks, strict=True):
            gradient = None if leaf.param.grad is None else local(leaf.param.grad)
            if gradient is None:
                parts.append(torch.full((pick.numel(),), math.nan, device=pick.device))
                continue
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            parts.append(gradient.detach().reshape(-1)[pick].float())
        device = report.measured.metrics.device
        sample = torch.cat([part.to(device, non_blocking=True) for part in parts])
        self._samples.append(sample if grad_scale is None else sample / grad_scale)
        self._metrics.append(report.measured.metrics)
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

    def advise(self, layout: Layout, step: int, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Advice:
        """Judge the remembered steps, for those who will be given the updates."""
        skipped = [False if skip is None else bool(skip) for skip in self._skips]
        good = [k for k, skip in enumerate(skipped) if not skip]
        if len(good) < LEAST_STEPS:
            raise RuntimeError(
                f"advise() has seen {len(good)} usable steps and needs at least {LEAST_STEPS}; a few hundred are "
                "better. Train on with the clipper attached, then ask again."
            )
        region = layout.rules[0].region
        gradients = torch.stack([self._samples[k] for k in good]).double().cpu()
        metrics = torch.stack([self._metrics[k] for k in good]).double().cpu()
        view: _NormView | _CoordinateView = _CoordinateView(gradients)
        if isinstance(region, Norm):
            view = _NormView(gradients, metrics[:, LAST_STEP.index("grad_norm")], self._coordinates)
        quantiles = {q: view.size_quantile(q) for q in QUANTILES}
        mean_size = view.mean_size()
        carry_ratio = float(metrics[len(good) // 2 :, LAST_STEP.index("carry_ratio")].max())
        radius = suggested = None
        suggested_bias = math.nan
        if isinstance(region, (Norm, Component)):
            constant = region.sizes(step)[0]
            radius = constant if isinstance(constant, float) else None
            quantile = view.size_quantile(0.9 if isinstance(region, Norm) else 0.99)
            suggested = _two_digits_up(max(quantile, 0.0 if math.isnan(mean_size) else 2 * mean_size))
            suggested_bias = view.bias(suggested)
            choice, reason = _choose_policy(
                mean_size,
                suggested,
                suggested_bias,
                quantiles[1.0],
                any(isinstance(each, DIVIDING) for each in optimizers),
            )
            call = f"{type(region).__name__}({suggested:g})"
        else:
            call = repr(region)
            choice = ", carry=Gated()" if carry_ratio > LARGE_CARRY else ""
            reason = "Keep the region; " + ("the carry grows, so gate it." if choice else "the full carry stays small.")
        share = metrics[:, LAST_STEP.index("clipped_fraction")].mean()
        return Advice(
            steps=len(good),
            skipped=len(skipped) - len(good),
            quantiles=quantiles,
            mean_size=mean_size,
            radius=radius,
            clipped=float(share) if radius is None else view.clipped(radius),
            bias=math.nan if radius is None else view.bias(radius),
            carry_ratio=carry_ratio,
            suggested_radius=suggested,
            suggested_bias=suggested_bias,
            line=f"clipper = UClip(optimizer, {call}{choice})",
            reason=reason,
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
            'without over="group" or over="tensor".'
        )


def _choose_policy(mean: float, radius: float, bias: float, largest: float, divides: bool) -> tuple[str, str]:
    """(argument to paste, why), for the suggested radius."""
    if bias < NEGLIGIBLE_BIAS:
        return ", carry=False", "At the suggested radius plain clipping has next to no bias, so a carry buys nothing."
    if divides:
        return (
            ", carry=False",
            "This optimizer divides gradients by their own size, so that shorter ones cost it little; a carry helped "
            "it in no trial.",
        )
    if largest > Gated().cap * radius:
        return ", carry=Gated()", f"There are spikes of {largest / radius:.3g} radii; Gated bounds what is paid back."
    if not radius > 2.1 * mean:
        return (
            ", carry=Gated()",
            "The mean gradient is not far below the radius; Gated keeps the carry from winding up.",
        )
    return (
        ", carry=Gated()",
        "The radius is well above the mean gradient, so the carry drains and removes the bias; Gated bounds what a "
        "spike can do.",
    )


class _View:
    """Means and biases from the remembered gradients; NaN marks a coordinate that had no gradient in a step.

    <E g, E g> is the mean of <g_s, g_t> over pairs of different steps, so that noise does not count as signal.
    """

    def __init__(self, gradients: Tensor) -> None:
        self.gradients = gradients
        self.signal = _squared_mean(gradients)
        """||E g||², or 0 if the mean gradient cannot be told from 0."""

    def cut(self, radius: float) -> Tensor:
        """G - clip(g) by plain clipping."""
        raise NotImplementedError

    def bias(self, radius: float) -> float:
        """Norm of E[g - clip(g)] relative to that of E[g]; 0 if none shows; NaN if only E[g] is lost in the noise."""
        lost = _squared_mean(self.cut(radius))
        return 0.0 if lost == 0.0 else math.nan if self.signal == 0.0 else math.sqrt(lost / self.signal)


class _NormView(_View):
    """Gradient norms are known exactly; directions from the sampled coordinates."""

    def __init__(self, gradients: Tensor, norms: Tensor, coordinates: int) -> None:
        super().__init__(gradients)
        self.norms = norms
        self.blow_up = coordinates / gradients.shape[1]

    def size_quantile(self, q: float) -> float:
        return float(torch.quantile(self.norms, q))

    def mean_size(self) -> float:
        return math.sqrt(self.signal * self.blow_up) if self.signal else math.nan

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
        if not self.signal:
            return math.nan
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


def _squared_mean(rows: Tensor) -> float:
    """Estimate of ||E[row]||² from all pairs of different rows; 0 if within 2.5 standard errors of it."""
    rows = rows.nan_to_num(0.0)
    pairs = rows.shape[0] * (rows.shape[0] - 1)
    products = rows @ rows.T
    products.fill_diagonal_(0.0)
    estimate, error = products.sum() / pairs, (2.0 * products.square().sum() / pairs / pairs).sqrt()
    return float(estimate) if estimate > 2.5 * error else 0.0


def _two_digits_up(value: float) -> float:
    if not 0.0 < value < math.inf:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


def _words(bias: float) -> str:
    if math.isnan(bias):
        return "plain clipping would be biased"
    if bias == 0.0:
        return "plain clipping shows no bias"
    return f"plain clipping would be off by {bias:.1%} of the mean gradient"
