"""What becomes of the part that was cut: kept whole, dropped, or kept under a policy.

``carry=True`` is the paper's algorithm and ``carry=False`` plain clipping. The policies below trade some of the
carry's unbiasedness for protection against its two dangers: wind-up, when the radius is below the mean gradient and
the debt grows without end, and a finite spike, which is paid out for thousands of steps.
"""

from dataclasses import dataclass

from carryclip import _checks


@dataclass(frozen=True)
class Capped:
    """Keep the carry within ``radii`` radii; what exceeds them is dropped.

    >>> Capped(10)
    Capped(radii=10)
    """

    radii: float

    def __post_init__(self) -> None:
        _checks.number("Capped", "radii", self.radii, low_open=True, high_open=True)


@dataclass(frozen=True)
class Leaky:
    """Keep the fraction ``kappa`` of what was cut: carry = kappa·(s - u). 1 is the full carry, 0 none.

    >>> Leaky(0.9)
    Leaky(kappa=0.9)
    """

    kappa: float

    def __post_init__(self) -> None:
        _checks.number("Leaky", "kappa", self.kappa, high=1.0)


@dataclass(frozen=True)
class Gated:
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

    def __post_init__(self) -> None:
        _checks.number("Gated", "decay", self.decay, high=1.0, high_open=True)
        _checks.number("Gated", "threshold", self.threshold, high=1.0, low_open=True)
        _checks.number("Gated", "cap", self.cap, low_open=True, high_open=True)


CarryPolicy = bool | Capped | Leaky | Gated


def check_policy(policy: object) -> CarryPolicy:
    """Return ``policy`` if it is one; otherwise say which there are."""
    if isinstance(policy, (bool, Capped, Leaky, Gated)):
        return policy
    if isinstance(policy, type) and issubclass(policy, (Capped, Leaky, Gated)):
        raise TypeError(f"carry={policy.__name__} is the class: write carry={policy.__name__}(...).")
    raise TypeError(
        f"Unknown carry policy {policy!r}. Use True (keep all), False (plain clipping), Gated(), Capped(radii) or "
        "Leaky(kappa)."
    )
