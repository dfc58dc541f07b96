"""What becomes of the part that was cut: kept whole, dropped, or kept under a policy.

``carry=True`` is the paper's algorithm and ``carry=False`` plain clipping. The policies below trade some of the
carry's unbiasedness for protection against its two dangers: wind-up, when the radius is below the mean gradient and
the debt grows without end, and a finite spike, which is paid out for thousands of steps.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from carryclip import _checks
from carryclip.precision import held


class Policy:
    """What the algorithm asks of a carry policy.

    A policy sees the *rest*, what clipping has cut off, and says how much of it is kept: a fraction of it, or as much
    as fits within a limit. Limits are norms under a ``Norm`` and absolute values of coordinates otherwise.
    """

    carries: ClassVar[bool] = True
    """False if nothing is kept, so that there is no buffer."""
    gated: ClassVar[bool] = False
    """True if it follows how the carry is fed: a running average of ``decay`` for each norm, or for each coordinate.
    Its gate is closed while that is at or above ``threshold``."""
    decay: Any
    threshold: Any
    bounded: ClassVar[bool] = False
    """True if the carry cannot grow without end, so that there is nothing to warn of."""

    limited: ClassVar[bool] = False
    """True if there is a ``limit``."""

    fraction: ClassVar[Any] = None
    """The part of the rest that is kept, if there is no limit; None for all of it."""

    def limit(self, xp: Any, radius: Any, owed: Any, closed: Any) -> Any:
        """The largest carry there may be; asked for only if the policy is ``limited``.

        Args:
            xp: the array namespace.
            radius: of the region at this step.
            owed: size of the carry before the step; None if the policy is not gated.
            closed: whether the gate is closed, so that the carry must not grow; None likewise.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Full(Policy):
    """Keep all of it: ``carry=True``, the paper's algorithm."""


@dataclass(frozen=True)
class Dropped(Policy):
    """Keep nothing: ``carry=False``, plain clipping."""

    carries: ClassVar[bool] = False
    bounded: ClassVar[bool] = True


@dataclass(frozen=True)
class Capped(Policy):
    """Keep the carry within ``radii`` radii; what exceeds them is dropped.

    >>> Capped(10)
    Capped(radii=10)
    """

    radii: float
    bounded: ClassVar[bool] = True
    limited: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checks.number("Capped", "radii", self.radii, low_open=True, high_open=True)

    def limit(self, xp: Any, radius: Any, owed: Any, closed: Any) -> Any:
        """``radii`` radii."""
        return self.radii * radius


@dataclass(frozen=True)
class Leaky(Policy):
    """Keep the fraction ``kappa`` of what was cut: carry = kappa·(s - u). 1 is the full carry, 0 none.

    >>> Leaky(0.9)
    Leaky(kappa=0.9)
    """

    kappa: float

    def __post_init__(self) -> None:
        _checks.number("Leaky", "kappa", self.kappa, high=1.0)

    @property
    def fraction(self) -> float | None:  # type: ignore[override]
        """``kappa``."""
        return self.kappa if self.kappa < 1.0 else None


@dataclass(frozen=True)
class Gated(Policy):
    """Let the carry grow only while the radius can pay it back.

    The feed is how much of a radius each gradient adds in the carry's direction:
    clamp(g·sign(carry)/radius, -1, 1) per coordinate, or clamp(<g, carry>/(radius·||carry||), -1, 1) for a norm.
    While its debiased exponential average is at or above ``threshold``, the carry may drain but not grow: what is
    fed faster than the radius pays can never be paid. ``cap``, in radii, bounds a single spike.

    Args:
        decay: of the feed's average; anything from 0.9 to 0.999 behaves alike.
        threshold: average feed, in (0, 1], from which growth stops.
        cap: largest carry, in radii.

    >>> Gated()
    Gated(decay=0.99, threshold=0.5, cap=100)
    """

    decay: float = 0.99
    threshold: float = 0.5
    cap: float = 100
    gated: ClassVar[bool] = True
    bounded: ClassVar[bool] = True
    limited: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checks.number("Gated", "decay", self.decay, high=1.0, high_open=True)
        _checks.number("Gated", "threshold", self.threshold, high=1.0, low_open=True)
        _checks.number("Gated", "cap", self.cap, low_open=True, high_open=True)

    def limit(self, xp: Any, radius: Any, owed: Any, closed: Any) -> Any:
        """The cap; or, with the gate closed, what was owed before."""
        cap = held(xp, self.cap * radius, owed.dtype)
        return xp.where(closed & (owed < cap), owed, cap)


CarryPolicy = bool | Capped | Leaky | Gated
"""What users write."""


def check_policy(policy: object) -> CarryPolicy:
    """Return ``policy`` if it is one; otherwise say which there are."""
    if isinstance(policy, (bool, Policy)):
        return policy  # type: ignore[return-value]
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise TypeError(f"carry={policy.__name__} is the class: write carry={policy.__name__}(...).")
    raise TypeError(
        f"Unknown carry policy {policy!r}. Use True (keep all), False (plain clipping), Gated(), Capped(radii) or "
        "Leaky(kappa)."
    )


def policy_of(carry: CarryPolicy) -> Policy:
    """The policy as an object, also where users write True or False."""
    if isinstance(carry, bool):
        return Full() if carry else Dropped()
    return carry
