"""What becomes of the part that was cut: kept whole, dropped, or kept under a policy.

``carry=True`` is the paper's algorithm and ``carry=False`` plain clipping. The policies below clip the sum of gradient
and carry as the paper does, and keep less of the rest, against the carry's two dangers: wind-up, when the radius is
below the mean gradient and the debt grows without end, and a finite spike, which is paid out for thousands of steps.
``Drip`` and ``Shrunk``, which go another way, are in ``carryclip.mixing``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from carryclip import _checks
from carryclip.mixing import Drip as Drip
from carryclip.mixing import Shrunk as Shrunk
from carryclip.policy import Policy
from carryclip.precision import held


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
    """Stop the carry's growth while gradients keep feeding it, and never let it exceed ``cap`` radii.

    The feed is how much of a radius each gradient adds in the carry's direction:
    clamp(g·sign(carry)/radius, -1, 1) per coordinate, or clamp(<g, carry>/(radius·||carry||), -1, 1) for a norm.
    While its debiased exponential average is at or above ``threshold``, the carry may drain but not grow. So gradients
    that feed it a whole radius at every step wind it up for a limited number of steps, 137 at the defaults
    (``carryclip.theory.bounds.gated_growth_steps``).

    The gate compares the mean of the *clipped* gradient with ``threshold`` radii; it does not know whether the radius
    can pay. A mean above the radius that comes in rare or very noisy gradients (noise of several radii) leaves it open,
    and only ``cap`` bounds the carry; a mean close below the radius shuts it, which leaves some bias.

    Args:
        decay: of the feed's average.
        threshold: average feed, in (0, 1], from which growth stops. At 1 it may never stop before the cap.
        cap: largest carry, in radii: what bounds a single spike, too.

    >>> Gated()
    Gated(decay=0.99, threshold=0.5, cap=100)
    """

    decay: float = 0.99
    threshold: float = 0.5
    cap: float = 100
    follows: ClassVar[str] = "feed"
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


CarryPolicy = bool | Policy
"""What users write."""


DEFAULT = Shrunk()
"""What ``carry=`` is where nothing is said: ``benchmarks/carries.py`` has the rule and the trials that picked it."""


def check_policy(policy: object) -> CarryPolicy:
    """Return ``policy`` if it is one; otherwise say which there are."""
    if isinstance(policy, (bool, Policy)):
        return policy
    if isinstance(policy, type) and issubclass(policy, Policy):
        raise TypeError(f"carry={policy.__name__} is the class: write carry={policy.__name__}(...).")
    raise TypeError(
        f"Unknown carry policy {policy!r}. Use Drip(), Shrunk(), True (the full carry of the paper), False (plain "
        "clipping), Gated(), Capped(radii) or Leaky(kappa)."
    )


def policy_of(carry: CarryPolicy) -> Policy:
    """The policy as an object, also where users write True or False."""
    if isinstance(carry, bool):
        return Full() if carry else Dropped()
    return carry
