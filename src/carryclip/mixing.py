"""``Drip`` and ``Shrunk``: policies that clip each gradient by itself and mix something of the carry into it.

What they give back is small beside a radius and spread over many steps, so that momentum and Adam, which a full carry
harms, can take it. Under a norm everything follows from |g|², |carry|² and <g, carry>: they read and write no more
memory than the full carry does.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from carryclip import _checks
from carryclip.policy import Clipped, Memory, Mixing, Policy, Scaling, Sums, share_within
from carryclip.precision import debias_weight, held


def _plain(xp: Any, size: Any, radius: Any) -> tuple[Any, Any]:
    """(whether plain clipping cuts, what it multiplies with)."""
    clipped = size > radius
    return clipped, xp.where(clipped, radius / xp.where(clipped, size, 1.0), 1.0)


def _length(xp: Any, x: Any, y: Any, sums: Sums) -> Any:
    """The norm of x·g + y·carry."""
    square = x * x * sums.total_sq + 2.0 * x * y * sums.dot + y * y * sums.carry_sq
    # What cancels may leave less than nothing; NaN must stay.
    return xp.sqrt(xp.where(square < 0.0, 0.0, square))


def _usual(xp: Any, decay: float, memory: Memory, factor: Any) -> tuple[Any, Memory]:
    """(what plain clipping usually multiplies with, the memory with this step in it).

    Averaged is the deficit, 1 - factor: it is exactly 0 where nothing is ever clipped. Without a past, this factor is
    all there is to go by.
    """
    deficit = 1.0 - factor
    seen = memory.count > 0
    weight = debias_weight(xp, decay, xp.astype(xp.where(seen, memory.count, 1), memory.average.dtype))
    usual = xp.where(seen, 1.0 - memory.average / weight, factor)
    average = memory.average + (1.0 - decay) * (deficit - memory.average)
    return usual, memory._replace(average=average, count=memory.count + 1)


def _factor(xp: Any, sums: Sums) -> Any:
    """The factor by which plain clipping, coordinate by coordinate, comes nearest to a mere scaling; 1 if unknown."""
    known = (sums.total_sq > 0.0) & xp.isfinite(sums.total_sq)
    return xp.where(known, xp.clip(1.0 - sums.dot / xp.where(known, sums.total_sq, 1.0), 0.0, 1.0), 1.0)


@dataclass(frozen=True)
class Drip(Policy):
    """Pay back slowly, and only what is not pure scale.

        a     = what plain clipping multiplies the gradient with: min(1, radius/||g||)
        usual = average of past a's: 1 where little is clipped
        owed  = carry + usual·g
        u     = clip((1 - rate)·a·g + rate·owed, radius)
        carry = owed - u, within cap radii

    Each update is the plain clipped gradient, moved a little toward what is owed. What plain clipping does to every
    gradient alike is a matter of the learning rate, to which Adam is blind; that is not owed. With what is dropped,
    sum(u) = sum(usual·g) - carry.

    Args:
        rate: part of the debt that is paid in a step, in (0, 1].
        decay: of the average of a.
        cap: largest carry, in radii; 1/rate unless said otherwise. Less leaves bias, more serves nothing.
        centred: False owes all that is cut, the usual part too; with rate 1 and an infinite cap that is the full carry.

    >>> Drip()
    Drip(rate=0.03, decay=0.99, cap=None, centred=True)
    """

    rate: float = 0.03
    decay: float = 0.99
    cap: float | None = None
    centred: bool = True

    def __post_init__(self) -> None:
        _checks.number("Drip", "rate", self.rate, high=1.0, low_open=True)
        _checks.number("Drip", "decay", self.decay, high=1.0, high_open=True)
        if self.cap is not None:
            _checks.number("Drip", "cap", self.cap, low_open=True)

    @property
    def radii(self) -> float:
        """The largest carry, in radii."""
        return 1.0 / self.rate if self.cap is None else self.cap

    @property
    def reach(self) -> float:  # type: ignore[override]
        """As much as can be owed."""
        return self.radii

    @property
    def mixes(self) -> bool:  # type: ignore[override]
        """False where it is the paper's rule: all that is owed is paid at once."""
        return self.centred or self.rate < 1.0

    @property
    def follows(self) -> str | None:  # type: ignore[override]
        """What plain clipping cuts off, unless all of it is owed."""
        return "deficit" if self.centred else None

    @property
    def bounded(self) -> bool:  # type: ignore[override]
        """Whether there is a cap."""
        return self.radii < math.inf

    @property
    def limited(self) -> bool:  # type: ignore[override]
        """The same, for where it does not mix."""
        return self.bounded

    def limit(self, xp: Any, radius: Any, owed: Any, closed: Any) -> Any:
        """The cap."""
        return self.radii * radius

    def weigh(
        self, xp: Any, sums: Sums, radius: Any, memory: Memory | None, rounding: Any, unit: Any
    ) -> tuple[Scaling, Memory | None]:
        """See ``Policy``. The vector is x·g + rate·carry, the rest w·g + y·carry."""
        clipped, factor = _plain(xp, xp.sqrt(sums.total_sq), radius)
        usual: Any = 1.0
        if memory is not None:
            usual, memory = _usual(xp, self.decay, memory, factor)
        x = factor + self.rate * (usual - factor)
        length = _length(xp, x, self.rate, sums)
        over, scale = _plain(xp, length, radius)
        scale = xp.where(length == length, scale, length)
        rest = _length(xp, usual - scale * x, 1.0 - scale * self.rate, sums)
        keep = share_within(xp, self.radii * radius, rest + rounding * xp.where(over, radius, length))
        return Scaling(scale, keep, rest * (1.0 - keep) / unit, clipped | over, factor, usual), memory

    def mix(self, xp: Any, gradient: Any, carry: Any, scaling: Scaling) -> tuple[Any, Any]:
        """See ``Policy``."""
        owed = xp.plus(carry, gradient, scaling.taken)
        return xp.between(gradient, scaling.base, owed, self.rate, scaling.scale), owed

    def left(self, xp: Any, owed: Any, update: Any, scaling: Scaling) -> Any:
        """See ``Policy``."""
        return (owed - update) * scaling.keep

    def weigh_coordinates(self, xp: Any, sums: Sums, memory: Memory | None) -> tuple[Scaling, Memory | None]:
        """See ``Policy``."""
        assert memory is not None
        usual, memory = _usual(xp, self.decay, memory, _factor(xp, sums))
        return Scaling(taken=usual), memory

    def mix_coordinates(self, xp: Any, mixing: Mixing) -> Clipped:
        """See ``Policy``."""
        base = mixing.project(mixing.gradient)
        usual: Any = 1.0 if mixing.scaling is None else mixing.scaling.taken
        owed = mixing.hold(mixing.carry + mixing.gradient * usual)
        vector = xp.lerp(base, owed, self.rate)
        aim = mixing.project(vector)
        update = mixing.round(aim)
        limit = held(xp, self.radii * mixing.radius, owed.dtype)
        rest = owed - update
        kept = xp.clip(rest, -limit, limit)
        return Clipped(vector, aim, update, kept, rest - kept)


@dataclass(frozen=True)
class Shrunk(Policy):
    """Add back clipping's bias, as far as it stands out of its own noise.

        a     = what plain clipping multiplies the gradient with: min(1, radius/||g||)
        usual = average of past a's: 1 where little is clipped
        share = max(0, 1 - noise/||carry||²)
        u     = clip(a·g + share·carry, radius)
        cut   = usual·g + share·carry - u, within memory radii: what was cut beyond the usual, by both clips
        carry = average of the last ``memory`` cuts, within three radii: clipping's bias
        noise = what the carry's square would be if the cuts had nothing to do with each other

    The carry is not a debt that is paid but an estimate that is added at every step, shrunk as Stein's estimator
    shrinks a mean. One bad batch, and noise as large on both sides, is forgotten; so sums of gradients are not kept.
    By coordinates the cut is what the first clip takes, usual·g - clip(g), and bounded by ``memory`` radii alone.

    Args:
        memory: steps that the averages look back.

    >>> Shrunk()
    Shrunk(memory=100)
    """

    memory: float = 100
    follows: ClassVar[str] = "deficit"
    mixes: ClassVar[bool] = True
    noisy: ClassVar[bool] = True
    idle: ClassVar[float] = 0.0
    radii: ClassVar[float] = 3.0  # the largest carry under a norm: it cannot wind up while every gradient is cut
    bounded: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checks.number("Shrunk", "memory", self.memory, low=1.0, low_open=True, high_open=True)

    @property
    def reach(self) -> float:  # type: ignore[override]
        """As much as counts of a cut."""
        return self.memory

    @property
    def decay(self) -> float:  # type: ignore[override]
        """Of all its averages."""
        return 1.0 - 1.0 / self.memory

    def weigh(
        self, xp: Any, sums: Sums, radius: Any, memory: Memory | None, rounding: Any, unit: Any
    ) -> tuple[Scaling, Memory | None]:
        """See ``Policy``. The vector is factor·g + share·carry, and the new carry held·carry + taken·g."""
        assert memory is not None
        size = xp.sqrt(sums.total_sq)
        clipped, factor = _plain(xp, size, radius)
        usual, moved = _usual(xp, self.decay, memory, factor)
        share = self._share(xp, memory.noise * unit, xp.sqrt(sums.carry_sq))
        length = _length(xp, factor, share, sums)
        over, scale = _plain(xp, length, radius)
        scale = xp.where(length == length, scale, length)
        # The cut is x·g + y·carry: what the radius takes from g beyond the usual, and from both together.
        # With no carry in it, what is not 0 there is rounding.
        again = xp.where(share > 0.0, scale, 1.0)
        x, y = usual - again * factor, share - again * share
        cut = _length(xp, x, y, sums)
        weight = share_within(xp, self.memory * radius, cut) / self.memory
        taken, held = weight * x, self.decay + weight * y
        keep = share_within(xp, self.radii * radius, _length(xp, taken, held, sums))
        taken, held = keep * taken, keep * held
        known = self.decay * (memory.noise * unit)
        noise = keep * xp.sqrt(known * known + (weight * cut) * (weight * cut))
        # The update is written from the new carry, which may take the old one's place: old = (new - taken·g)/held.
        alive = held > 0.0
        back = xp.where(alive, share / xp.where(alive, held, 1.0), 0.0)
        dropped = _length(xp, usual - scale * factor, -scale * share, sums)
        return (
            Scaling(scale, None, dropped / unit, clipped | over, factor - back * taken, taken, back, held),
            moved._replace(noise=noise / unit),
        )

    @staticmethod
    def _share(xp: Any, noise: Any, bias: Any) -> Any:
        """1 - noise²/bias², but at least 0, and 0 where nothing is known."""
        stands_out = bias > noise
        part = xp.where(stands_out, noise / xp.where(stands_out, bias, 1.0), 1.0)
        return 1.0 - part * part

    def mix(self, xp: Any, gradient: Any, carry: Any, scaling: Scaling) -> tuple[Any, Any]:
        """See ``Policy``."""
        bias = xp.weighted(carry, scaling.held, gradient, scaling.taken)
        # Scaled beforehand, so that the update is one pass over memory.
        return xp.weighted(gradient, scaling.base * scaling.scale, bias, scaling.back * scaling.scale), bias

    def left(self, xp: Any, owed: Any, update: Any, scaling: Scaling) -> Any:
        """See ``Policy``."""
        return owed

    def weigh_coordinates(self, xp: Any, sums: Sums, memory: Memory | None) -> tuple[Scaling, Memory | None]:
        """See ``Policy``. The share follows from the carry as the steps before have left it."""
        assert memory is not None
        usual, moved = _usual(xp, self.decay, memory, _factor(xp, sums))
        share = self._share(xp, memory.noise, xp.sqrt(sums.carry_sq))
        # usual·g - clip(g) is what was cut less what is cut usually.
        less = 1.0 - usual
        cut_sq = sums.cut_sq - less * (2.0 * sums.dot - less * sums.total_sq)
        usable = (cut_sq > 0.0) & xp.isfinite(cut_sq)  # sums of huge gradients overflow, and then say nothing
        own = xp.sqrt(xp.where(usable, cut_sq, 0.0)) / self.memory
        known = self.decay * memory.noise
        noise = xp.sqrt(known * known + own * own)
        return Scaling(taken=usual, back=share), moved._replace(noise=noise)

    def mix_coordinates(self, xp: Any, mixing: Mixing) -> Clipped:
        """See ``Policy``."""
        assert mixing.scaling is not None
        base = mixing.project(mixing.gradient)
        wanted = mixing.gradient * mixing.scaling.taken
        limit = held(xp, self.memory * mixing.radius, base.dtype)
        cut = xp.clip(mixing.hold(wanted - base), -limit, limit)
        bias = xp.lerp(mixing.carry, cut, 1.0 / self.memory)
        vector = mixing.hold(xp.plus(base, bias, mixing.scaling.back))
        aim = mixing.project(vector)
        update = mixing.round(aim)
        return Clipped(vector, aim, update, bias, wanted - update)
