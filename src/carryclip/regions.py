"""Clipping regions: where an update must lie. Each knows its radius and how to project onto itself.

The radius of a ``Norm`` may be a rule of ``carryclip.radius``. Other sizes (``radius``, ``scale``, the multiples of
``Adaptive``) may be a number, a schedule ``step -> number`` with steps counted from 0, or, for the kinds that work
coordinate by coordinate, one value per parameter: a list in the order of the parameters or a mapping from parameter to
value, each value a number or an array of the parameter's shape.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal

from carryclip import _checks
from carryclip.moments import EWMA, Moments, Welford
from carryclip.radius import Radius

Size = Any
"""A number, a schedule ``step -> number``, or one value per parameter."""

OVER = ("all", "group", "tensor", "row", "column")
"""What makes up one vector of a ``Norm``."""

_OFF_HINT = "To leave parameters unclipped give their group None instead of a region; to send signs only use Sign()."


def at_step(owner: str, value: Size, step: Any) -> Any:
    """``value`` with a schedule replaced by what it says for ``step``."""
    if callable(value):
        value = value(step)
        if value is None or isinstance(value, (bool, str)):
            raise TypeError(f"{owner}: the schedule gave {value!r} at step {step}; it must give a number.")
        if isinstance(value, Real) and not float(value) >= 0.0:
            raise ValueError(f"{owner}: the schedule gave {value!r} at step {step}; a radius must be at least 0.")
    return float(value) if isinstance(value, Real) else value


class Region:
    """What the algorithm asks of a region."""

    joint: ClassVar[bool] = False
    """True if one radius holds for a whole vector rather than for each coordinate."""
    centred: ClassVar[bool] = True
    """True if the region lies around zero, so that its radius bounds the update and is rounded toward zero."""

    @property
    def estimator(self) -> Moments | None:
        """The moments this region needs, if any."""
        return None

    @property
    def rule(self) -> Radius | None:
        """What says the radius, if that is a rule and not a number."""
        return None

    split: ClassVar[Any] = False
    """True if vectors are parts of a tensor."""

    @property
    def scheduled(self) -> bool:
        """Whether a number of it changes with the step."""
        return any(callable(value) for value in vars(self).values())

    @property
    def counts_current(self) -> bool:
        """True if the moments take in the current gradient before the radius is read."""
        return False

    def sizes(self, step: Any) -> tuple[Any, ...]:
        """The region's own numbers at ``step``."""
        raise NotImplementedError

    def is_shut(self, sizes: tuple[Any, ...]) -> bool:
        """Whether ``sizes`` are known to make every radius 0, so that nothing gets through."""
        return all(isinstance(size, float) and size == 0.0 for size in sizes)

    def extent(self, xp: Any, sizes: tuple[Any, ...], mean: Any, std: Any) -> Any:
        """The radius, from ``sizes`` and the moments (None where the region has none)."""
        return sizes[0]

    def project(self, xp: Any, total: Any, radius: Any, mean: Any) -> Any:
        """The point of the region that stands for ``total``."""
        return xp.clip(total, -radius, radius)


@dataclass(frozen=True)
class Component(Region):
    """Clip each coordinate to [-radius, radius].

    >>> Component(0.25)
    Component(radius=0.25)
    >>> Component(lambda step: 1.0 / (1 + step)).sizes(3)
    (0.25,)
    """

    radius: Size

    def __post_init__(self) -> None:
        if isinstance(self.radius, Radius):
            raise TypeError(
                f"Component: {self.radius!r} follows norms, so it is for Norm({self.radius!r}). For coordinates that "
                "follow their own gradients use Adaptive(mean=0, std=2, moments=EWMA())."
            )
        _checks.size("Component", "radius", self.radius, hint=_OFF_HINT)

    def sizes(self, step: Any) -> tuple[Any, ...]:
        """The radius at ``step``."""
        return (at_step("Component", self.radius, step),)


@dataclass(frozen=True)
class Norm(Region):
    """Scale the vector so that its Euclidean norm is at most ``radius``; the direction is kept.

    Args:
        radius: largest norm: a number, a schedule, or a rule such as ``RMS()`` or ``Quantile(0.9)``.
        over: what makes up one vector: ``"all"`` parameters (default), each parameter ``"group"``, each ``"tensor"``,
            or each ``"row"`` of each tensor, ``w[k]``: the weights into one unit in PyTorch, for a convolution those of
            one output channel. ``"column"`` is ``w[..., k]``, the same in JAX. A tensor with one axis is one vector.

    >>> Norm(1.0)
    Norm(radius=1.0, over='all')
    """

    radius: Size
    over: Literal["all", "group", "tensor", "row", "column"] = "all"
    joint: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.radius, (list, tuple, Mapping)):
            raise TypeError(
                "Norm: one radius holds for the whole vector; a value per parameter is for Component and Sign. "
                'For a norm per tensor use Norm(radius, over="tensor").'
            )
        if isinstance(self.radius, type) and issubclass(self.radius, Radius):
            name = self.radius.__name__
            raise TypeError(f"Norm: radius={name} is the class: write Norm({name}()).")
        if not isinstance(self.radius, Radius):
            _checks.size("Norm", "radius", self.radius, hint=_OFF_HINT)
        if self.over not in OVER:
            raise ValueError(
                f"Norm: over must be {', '.join(map(repr, OVER[:-1]))} or {OVER[-1]!r}, got {self.over!r}."
            )

    @property
    def rule(self) -> Radius | None:
        """The radius, if it is a rule."""
        return self.radius if isinstance(self.radius, Radius) else None

    @property
    def scheduled(self) -> bool:
        """Whether the radius, or the number of its rule, changes with the step."""
        return callable(self.radius if self.rule is None else self.rule.size)

    @property
    def split(self) -> bool:  # type: ignore[override]
        """Whether vectors are parts of a tensor."""
        return self.over in ("row", "column")

    def axis(self, dimensions: int) -> int | None:
        """The axis of a tensor along which its vectors lie, if ``split``; None if it is one vector."""
        if dimensions < 2:
            return None
        return 0 if self.over == "row" else dimensions - 1

    def vectors(self, shape: Sequence[int]) -> int:
        """How many vectors there are in a tensor of this shape, if ``split``."""
        axis = self.axis(len(shape))
        return 1 if axis is None else shape[axis]

    def sizes(self, step: Any) -> tuple[Any, ...]:
        """The radius at ``step``, or the number of its rule."""
        return (at_step("Norm", self.radius if self.rule is None else self.rule.size, step),)

    def is_shut(self, sizes: tuple[Any, ...]) -> bool:
        """Whether a schedule says 0; a rule says more than that."""
        return super().is_shut(sizes) and (self.rule is None or self.rule.least == 0.0)


@dataclass(frozen=True)
class Sign(Region):
    """U-Sign: send scale·sign(s) and carry the difference; sign(0) = 0.

    >>> Sign(scale=0.5)
    Sign(scale=0.5)
    """

    scale: Size = 1.0

    def __post_init__(self) -> None:
        _checks.size("Sign", "scale", self.scale)
        if isinstance(self.scale, Real) and float(self.scale) == math.inf:
            raise ValueError("Sign: scale must be finite, got inf.")

    def sizes(self, step: Any) -> tuple[Any, ...]:
        """The scale at ``step``."""
        return (at_step("Sign", self.scale, step),)

    def project(self, xp: Any, total: Any, radius: Any, mean: Any) -> Any:
        """±radius by the sign of ``total``; a schedule that reaches infinity stays at the largest number there is."""
        largest = float(xp.finfo(total.dtype).max)
        held = min(radius, largest) if isinstance(radius, (int, float)) else xp.clip(radius, 0.0, largest)
        return held * xp.sign(total)


class _WithMoments(Region):
    """A region whose radius comes from the moments of past gradients."""

    moments: Moments
    include_current: bool

    @property
    def estimator(self) -> Moments:
        """The moments the radius is taken from."""
        return self.moments

    @property
    def counts_current(self) -> bool:
        """Whether the current gradient counts in its own radius."""
        return self.include_current

    def _check_moments(self) -> None:
        if not isinstance(self.moments, (Welford, EWMA)):
            name = type(self).__name__
            raise TypeError(f"{name}: moments must be Welford() or EWMA(decay=...), got {self.moments!r}.")


@dataclass(frozen=True)
class Adaptive(_WithMoments):
    """Clip each coordinate to ±(mean·|m| + std·s), with m and s its running mean and deviation.

    Until the moments exist (two samples for Welford, one for EWMA, counted per parameter) nothing is clipped.

    Args:
        mean: multiple of |m|, the ``a`` of the paper.
        std: multiple of s, the ``b`` of the paper.
        moments: ``Welford()`` or ``EWMA(decay=0.95)``.
        min_radius: the radius never falls below this.
        include_current: let the current gradient count in its own radius; by default only past gradients do, as the
            theory needs.

    >>> Adaptive(mean=1, std=2)
    Adaptive(mean=1, std=2, moments=Welford(), min_radius=0.0, include_current=False)
    """

    mean: Size
    std: Size
    moments: Moments = Welford()
    min_radius: float = 0.0
    include_current: bool = False

    def __post_init__(self) -> None:
        _checks.size("Adaptive", "mean", self.mean, zero_ok=True)
        _checks.size("Adaptive", "std", self.std, zero_ok=True)
        _checks.number("Adaptive", "min_radius", self.min_radius)
        self._check_moments()
        if all(isinstance(size, Real) and size == 0 for size in (self.mean, self.std, self.min_radius)):
            raise ValueError(
                "Adaptive: mean and std are both 0, so every radius would be 0. Try Adaptive(mean=1, std=2)."
            )

    def sizes(self, step: Any) -> tuple[Any, ...]:
        """The two multiples at ``step``."""
        return (at_step("Adaptive", self.mean, step), at_step("Adaptive", self.std, step))

    def is_shut(self, sizes: tuple[Any, ...]) -> bool:
        """Whether both multiples are 0, and there is no smallest radius."""
        return self.min_radius == 0 and super().is_shut(sizes)

    def extent(self, xp: Any, sizes: tuple[Any, ...], mean: Any, std: Any) -> Any:
        """a·|m| + b·s, but at least ``min_radius``."""
        radius = sizes[0] * xp.abs(mean) + sizes[1] * std
        return xp.clip(radius, self.min_radius, None) if self.min_radius > 0 else radius


@dataclass(frozen=True)
class Symmetric(_WithMoments):
    """Clip each coordinate to m ± std·s: an interval around the running mean instead of around zero.

    >>> Symmetric(std=3)
    Symmetric(std=3, moments=Welford(), include_current=False)
    """

    std: Size
    moments: Moments = Welford()
    include_current: bool = False
    centred: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _checks.size("Symmetric", "std", self.std)
        self._check_moments()

    def sizes(self, step: Any) -> tuple[Any, ...]:
        """The multiple at ``step``."""
        return (at_step("Symmetric", self.std, step),)

    def is_shut(self, sizes: tuple[Any, ...]) -> bool:
        """Never: with a multiple of 0 the mean still gets through."""
        return False

    def extent(self, xp: Any, sizes: tuple[Any, ...], mean: Any, std: Any) -> Any:
        """b·s, half the interval."""
        return sizes[0] * std

    def project(self, xp: Any, total: Any, radius: Any, mean: Any) -> Any:
        """``total`` held within radius of the running mean."""
        return xp.clip(total, mean - radius, mean + radius)


def check_region(region: object) -> Region:
    """Return ``region`` if it is one; otherwise say which there are."""
    if isinstance(region, Region):
        return region
    if isinstance(region, type) and issubclass(region, Region):
        raise TypeError(f"{region.__name__} is the class: write {region.__name__}(...), for example Norm(1.0).")
    if isinstance(region, (int, float)) and not isinstance(region, bool):
        raise TypeError(f"A bare number does not say what to clip: write Norm({region!r}) or Component({region!r}).")
    raise TypeError(f"Unknown region {region!r}. Use Component, Norm, Adaptive, Sign or Symmetric, e.g. Norm(1.0).")
