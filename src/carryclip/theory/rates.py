"""Learning rates that change: regret bounds for any schedule, and a rate that needs no tuning.

``AdaptiveRate`` and ``projected_regret`` are path-wise: they hold for every sequence of gradients. The others are in
expectation. Sequences are arrays over the steps t = 1..T. Proofs are in docs/theory/rates.
"""

import math
from typing import Any

import numpy as np

from carryclip import _checks
from carryclip.theory.bounds._conditions import (
    Array,
    OutsideConditionsError,
    above_mean,
    nonnegative,
    numbers,
    positive,
)


class AdaptiveRate:
    """The learning rate R/(2·sqrt(S_t)) with S_t = sum of ||u_i||²/2 + ||u_i||·||D_{i+1}|| over i <= t.

    With projection onto a set of diameter R the regret on *every* sequence of gradients is at most
    2·R·sqrt(S_T) + R·||D_{T+1}|| (``regret``). Nothing but R is to be tuned, and iterates do not change if gradients
    and radii are multiplied by a constant.

    Args:
        diameter: R.

    >>> rate = AdaptiveRate(2.0)
    >>> rate.step(update_norm=1.0, carry_norm=0.0), rate.step(update_norm=1.0, carry_norm=1.0)
    (1.414..., 0.707...)
    >>> float(round(rate.regret, 3))
    7.657
    """

    def __init__(self, diameter: float) -> None:
        _checks.number("AdaptiveRate", "diameter", diameter, low_open=True, high_open=True)
        self.diameter = float(diameter)
        self.spent = 0.0
        """S_t."""
        self.carried = 0.0
        """Norm of the carry after the last step."""

    def step(self, update_norm: float, carry_norm: float) -> float:
        """The rate for an update of this norm that leaves a carry of that norm; 0 as long as all updates were 0."""
        for name, value in (("update_norm", update_norm), ("carry_norm", carry_norm)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"AdaptiveRate: {name} must be at least 0 and finite, got {value!r}.")
        self.spent += float(update_norm) ** 2 / 2.0 + float(update_norm) * float(carry_norm)
        self.carried = float(carry_norm)
        return self.diameter / (2.0 * math.sqrt(self.spent)) if self.spent > 0.0 else 0.0

    @property
    def regret(self) -> float:
        """The bound on the sum of <g_t, x_t - x*> over the steps so far, for every x* in the set."""
        return self.diameter * (2.0 * math.sqrt(self.spent) + self.carried)


def projected_regret(rates: Any, update_norms: Any, carry_norms: Any, *, diameter: float) -> float:
    """The sum of <g_t, x_t - x*> on every sequence of gradients, with projection and rates that never grow.

    R²/(2·eta_T) + sum of eta_t·(||u_t||²/2 + ||u_t||·||D_{t+1}||) + R·||D_{T+1}||, for every x* in the set of diameter
    R.

    Args:
        rates: eta_t > 0, not increasing; they may depend on everything up to u_t.
        update_norms: ||u_t||.
        carry_norms: ||D_{t+1}||, after each step.
        diameter: R.

    >>> projected_regret([0.1, 0.1], [1.0, 1.0], [0.5, 0.0], diameter=1.0)
    5.15
    """
    owner = "projected_regret"
    eta, update, carry = _series(owner, rates=rates, update_norms=update_norms, carry_norms=carry_norms)
    (size,) = numbers(owner, diameter=diameter)
    positive(owner, diameter=size)
    if (eta <= 0.0).any() or (np.diff(eta) > 0.0).any():
        raise ValueError(f"{owner}: rates must be above 0 and must not increase.")
    steps = float(np.sum(eta * (update**2 / 2.0 + update * carry)))
    return float(size**2 / (2.0 * eta[-1]) + steps + size * carry[-1])


def leader_regret(rates: Any, gradient_norms: Any, carry_norms: Any, *, distance: float) -> float:
    """The sum of <g_t, x_t - x*> of follow the regularized leader on the updates, on every sequence of gradients.

    x_t minimises <u_1 + ... + u_{t-1}, x> + ||x - x_1||²/(2·eta_t) over a closed convex set, which may be unbounded:
    ||x* - x_1||²/(2·eta_T) + sum of eta_t·(||g_t||²/2 + ||g_t||·||D_t||). This is the bound of delayed feedback, where
    the carry is the sum of the gradients that are still missing.

    Args:
        rates: eta_t > 0, not increasing.
        gradient_norms: ||g_t||; in expectation ||gbar_t|| may stand in the second place.
        carry_norms: ||D_t||, before each step.
        distance: ||x* - x_1||.

    >>> leader_regret([0.1, 0.1], [1.0, 1.0], [0.0, 0.5], distance=1.0)
    5.15
    """
    owner = "leader_regret"
    eta, size, carry = _series(owner, rates=rates, gradient_norms=gradient_norms, carry_norms=carry_norms)
    (far,) = numbers(owner, distance=distance)
    nonnegative(owner, distance=far)
    if (eta <= 0.0).any() or (np.diff(eta) > 0.0).any():
        raise ValueError(f"{owner}: rates must be above 0 and must not increase.")
    return float(far**2 / (2.0 * eta[-1]) + np.sum(eta * (size**2 / 2.0 + size * carry)))


def schedule_regret(
    rates: Any,
    *,
    distance: Array,
    gradient_square: Array,
    mean_gradient: Array,
    alpha: Array,
    variance: Array,
    jump: Array | None = None,
    carry: Array | None = None,
) -> Array:
    """E f(x̄) - f* with the carry in *update* units and a schedule of any shape; x̄ is the mean weighted by eta_t.

    (||x_1 - x*||² + sum eta_t²·(q + 2·M·c))/(2·sum eta_t) with c = (v + a²)/(2·a), a = min(alpha, sqrt v). Warm-up,
    cosine and restarts are all the same to it.

    In *gradient* units, as ``UClip`` keeps the carry, two things are added. The shadow jumps: 2·``jump``, which
    ``unit_price`` gives. And c bounds the mean carry on average over time only: where rates rise, and weigh some steps
    more than earlier ones, it takes a bound C on E||D_t|| at every t (``carry``), and
    2·M·(C - c)_+·sum of eta_t² - min(eta_1², ..., eta_t²) is added.

    Args:
        rates: eta_t > 0, fixed beforehand, in any order.
        distance: ||x_1 - x*||.
        gradient_square: q >= E||g_t||².
        mean_gradient: M >= ||gbar_t||.
        alpha: margin, in units of the gradient.
        variance: v >= E||xi_t||².
        jump: see above; None in update units.
        carry: see above; needed in gradient units if a rate is larger than an earlier one. ``bounds.walk_mean``, or
            ``bounds.second_moment_mean`` at the last step.

    >>> at = dict(distance=1.0, gradient_square=2.0, mean_gradient=1.0, alpha=0.5, variance=1.0)
    >>> float(round(schedule_regret([0.01] * 10_000, **at), 4))
    0.0275
    """
    owner = "schedule_regret"
    (eta,) = _series(owner, rates=rates)
    distance, square, mean, alpha, variance = numbers(
        owner,
        distance=distance,
        gradient_square=gradient_square,
        mean_gradient=mean_gradient,
        alpha=alpha,
        variance=variance,
    )
    above_mean(owner, alpha)
    nonnegative(owner, distance=distance, gradient_square=square, mean_gradient=mean, variance=variance)
    if (eta <= 0.0).any():
        raise ValueError(f"{owner}: rates must be above 0.")
    average = _average(alpha, variance)
    more = np.asarray(0.0) if jump is None else _in_gradient_units(owner, eta, jump, carry, mean, average)
    return (distance**2 + np.sum(eta**2) * (square + 2.0 * mean * average) + 2.0 * more) / (2.0 * np.sum(eta))


def _in_gradient_units(
    owner: str, eta: np.ndarray, jump: Array, carry: Array | None, mean: np.ndarray, average: np.ndarray
) -> np.ndarray:
    """What a carry in gradient units adds."""
    (jump,) = numbers(owner, jump=jump)
    nonnegative(owner, jump=jump)
    above_least = float(np.sum(eta**2 - np.minimum.accumulate(eta) ** 2))
    if above_least == 0.0:
        return jump
    if carry is None:
        raise OutsideConditionsError(
            f"{owner} needs carry, a bound on E||D_t|| at every t, for a carry in gradient units and rates that rise: "
            "the margin bounds it on average over time only."
        )
    (carry,) = numbers(owner, carry=carry)
    nonnegative(owner, carry=carry)
    return jump + mean * np.maximum(carry - average, 0.0) * above_least


def _average(alpha: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """The time average of the carry at this margin: (v + a²)/(2·a), a = min(alpha, sqrt v)."""
    used = np.where(variance > 0.0, np.minimum(alpha, np.sqrt(variance)), alpha)
    return np.where(variance > 0.0, (variance + used**2) / (2.0 * used), 0.0)


def update_carry(rates: Any, *, alpha: Array, variance: Array) -> Array:
    """The sum of eta_t·E||e_t|| for a carry e in update units: at most (v + a²)/(2·a)·sum of eta_t².

    Conditions: the region of step t is eta_t times one with margin alpha; rates fixed beforehand, in any order.

    >>> float(round(update_carry([0.1, 0.2], alpha=0.5, variance=1.0), 6))
    0.0625
    """
    owner = "update_carry"
    (eta,) = _series(owner, rates=rates)
    alpha, variance = numbers(owner, alpha=alpha, variance=variance)
    above_mean(owner, alpha)
    nonnegative(owner, variance=variance)
    return _average(alpha, variance) * np.sum(eta**2)


def unit_price(rates: Any, *, domain: Array, carry: Array) -> Array:
    """What a carry in gradient units adds for a schedule: R·sum of |eta_t - eta_{t+1}|·E||D_{t+1}||.

    At most the schedule's total variation times R (``domain``, at least ||x_t - eta_t·D_t - x*||) times the largest
    mean carry (``carry``, at least E||D_t|| at every t): paid once, however long the run is.

    >>> float(round(unit_price([0.1, 0.2, 0.0], domain=2.0, carry=3.0), 6))
    1.8
    """
    owner = "unit_price"
    (eta,) = _series(owner, rates=rates)
    domain, carry = numbers(owner, domain=domain, carry=carry)
    nonnegative(owner, domain=domain, carry=carry)
    return domain * carry * np.sum(np.abs(np.diff(eta)))


def _series(owner: str, **given: Any) -> list[np.ndarray]:
    """Finite numbers over the same steps, at least 0."""
    arrays = numbers(owner, **{name: np.atleast_1d(np.asarray(value)) for name, value in given.items()})
    for name, array in zip(given, arrays, strict=True):
        if array.ndim != 1 or not len(array):
            raise ValueError(f"{owner}: {name} must be a list of numbers, one for each step.")
        nonnegative(owner, "", **{name: array})
    return arrays
