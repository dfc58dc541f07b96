"""Carry bounds from the second moment of the noise alone: any dimension, any convex region, heavy tails."""

import math

import numpy as np

from carryclip.theory.bounds._conditions import Array, OutsideConditionsError, nonnegative, numbers, positive, step


def second_moment_mean(t: Array, *, variance: Array) -> Array:
    """E||D_t|| <= sqrt((t - 1)·v): the carry never outgrows the random walk of the noise.

    Conditions: E||xi||² <= v (``variance``, of the whole vector), and gbar_t inside the region (alpha >= 0).

    >>> float(second_moment_mean(101, variance=4.0))
    20.0
    """
    owner = "second_moment_mean"
    t, variance = numbers(owner, t=t, variance=variance)
    step(owner, t)
    nonnegative(owner, variance=variance)
    return np.sqrt(np.where(variance > 0.0, t - 1.0, 0.0) * variance)


def second_moment_average(steps: Array = math.inf, *, alpha: Array, variance: Array) -> Array:
    """The time average of E||D_t|| over t = 1..``steps`` is at most v/(2·alpha) + alpha/2.

    For any convex region that contains the ball of radius alpha around gbar_t: a component or norm radius of at least
    |gbar_t| + alpha, or ||gbar_t|| + alpha. A smaller alpha than the true one may always be put in, so above sqrt(v)
    the bound stays at sqrt(v); and it never exceeds the average of ``second_moment_mean``. No dimension and no tail
    enters but v = E||xi||². Tight: a test in dimension 100 comes within 3 % of it.

    Conditions: alpha >= 0; ``steps`` must be finite where alpha = 0. The region is closed and known before xi_t (so no
    ``include_current=True``), and the update is the nearest point of it (so no ``Sign``).

    >>> float(second_moment_average(alpha=0.1, variance=2.0))
    10.05
    """
    owner = "second_moment_average"
    steps, alpha, variance = numbers(owner, steps=steps, alpha=alpha, variance=variance)
    step(owner, steps)
    nonnegative(owner, alpha=alpha, variance=variance)
    if np.any(np.isinf(steps) & (alpha == 0.0)):
        raise OutsideConditionsError(f"{owner} needs a finite number of steps where alpha = 0; the carry grows there.")
    margin = np.minimum(alpha, np.sqrt(variance))
    with np.errstate(divide="ignore", invalid="ignore"):
        settled = np.where(variance > 0.0, variance / (2.0 * margin) + margin / 2.0, 0.0)
        # The mean of sqrt(t - 1) over t = 1..T is at most (2/3)·sqrt(T).
        return np.minimum(settled, 2.0 / 3.0 * np.sqrt(np.where(variance > 0.0, steps, 0.0) * variance))


def sign_carry_bound(*, gradient_bound: Array, scale: Array = 1.0) -> Array:
    """U-Sign: if |g_t| <= scale always, then |D_t| <= scale always.

    Conditions: ``gradient_bound`` <= scale, which is constant.

    >>> float(sign_carry_bound(gradient_bound=0.8))
    1.0
    """
    owner = "sign_carry_bound"
    bound, scale = numbers(owner, gradient_bound=gradient_bound, scale=scale)
    positive(owner, scale=scale)
    nonnegative(owner, gradient_bound=bound)
    _within(owner, "gradient_bound <= scale", bound <= scale, bound, scale)
    return scale + 0.0 * bound


def sign_carry_average(*, mean_gradient: Array, variance: Array, scale: Array = 1.0) -> Array:
    """U-Sign: the time average of E|D_t| is at most ((scale + |gbar|)² + v)/(2·(scale - |gbar|)), per coordinate.

    Conditions: |gbar_t| <= ``mean_gradient`` < scale. Above it the carry grows by |gbar| - scale a step.

    >>> float(sign_carry_average(mean_gradient=0.5, variance=0.75))
    3.0
    """
    owner = "sign_carry_average"
    mean, variance, scale = numbers(owner, mean_gradient=mean_gradient, variance=variance, scale=scale)
    positive(owner, scale=scale)
    nonnegative(owner, mean_gradient=mean, variance=variance)
    _within(owner, "mean_gradient < scale (beyond it the carry winds up)", mean < scale, mean, scale)
    return ((scale + mean) ** 2 + variance) / (2.0 * (scale - mean))


def leak_bias(*, mean_carry: Array, kappa: Array) -> Array:
    """``Leaky``: E u - E g = -((1 - kappa)/kappa)·E D in the stationary state, exactly.

    Conditions: 0 < kappa <= 1.

    >>> float(round(leak_bias(mean_carry=2.0, kappa=0.9), 4))
    -0.2222
    """
    owner = "leak_bias"
    carry, kappa = numbers(owner, mean_carry=mean_carry, kappa=kappa)
    _within(owner, "0 < kappa <= 1", (kappa > 0.0) & (kappa <= 1.0), kappa, kappa)
    return -(1.0 - kappa) / kappa * carry


def _within(owner: str, condition: str, holds: Array, value: Array, limit: Array) -> None:
    if not np.all(holds):
        raise OutsideConditionsError(f"{owner} needs {condition}; got {value} against {limit}.")
