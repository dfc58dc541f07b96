"""Sharper carry bounds for component-wise clipping, through the random walk above which the carry never gets.

With gamma_t >= |gbar_t| + alpha the positive part of the carry satisfies D⁺_{t+1} <= max(0, D⁺_t + xi_t - alpha), hence
D⁺_t <= max over j < t of (xi_{t-j} + ... + xi_{t-1} - j·alpha), and the negative part likewise. No bound on the
gradients enters, only the noise's variance proxy s² (``proxy``): E[exp(theta·xi_t) | past] <= exp(theta²·s²/2) for
every real theta.
Every carry policy only shrinks the carry, so these bounds hold for ``Capped``, ``Leaky`` and ``Gated`` as well.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from carryclip.theory.bounds._conditions import (
    Array,
    OutsideConditionsError,
    above_mean,
    need,
    nonnegative,
    numbers,
    positive,
    probability,
    step,
)
from carryclip.theory.bounds._solve import erfc, last_true, lowest, sum_over_steps
from carryclip.theory.noise import Noise

TERMS = 1000
"""Longest sum over the walk; where more terms matter, the other bound is smaller anyway."""


def walk_tail(x: Array, t: Array = math.inf, *, alpha: Array, proxy: Array) -> Array:
    """P(|D_t| >= x), the smaller of two: the sum over the walk, and the smallest M_t/cosh(theta·x) over theta.

    The sum is 2·sum over j < t of exp(-(x + j·alpha)²/(2·j·s²)): no offset G + gamma_+ as in the paper's bound, and
    twice its rate of decay, 2·alpha/s². The other serves a small alpha, where the sum says little: M_t bounds
    E cosh(theta·D_t), M_{t+1} = k·(q·M_t + 1 - q) from 1 on, with k = exp(theta²·s²/2) and q = exp(-theta·alpha). The
    noise may depend on the past (a martingale difference suffices).

    Conditions: x > 0, alpha >= 0; t must be finite where alpha = 0.

    >>> float(round(walk_tail(5.0, 100, alpha=0.5, proxy=1.0), 4))
    0.2154
    """
    owner = "walk_tail"
    x, t, alpha, proxy = numbers(owner, x=x, t=t, alpha=alpha, proxy=proxy)
    positive(owner, x=x)
    _conditions(owner, t, alpha, proxy)
    sharp = np.exp(_potential(t, alpha, proxy, lambda theta, log_m: log_m - log_cosh(theta * x[..., None])))
    short, until = _short(t, alpha, proxy)
    tail = np.where(short, _sum(x, until, alpha, proxy), np.inf)
    return np.minimum.reduce([tail, sharp, np.ones_like(sharp)])[()]


def walk_quantile(delta: Array, t: Array = math.inf, *, alpha: Array, proxy: Array) -> Array:
    """What |D_t| stays below with probability 1 - delta: ``walk_tail`` solved for x.

    Conditions: as for ``walk_tail``.

    >>> float(round(walk_quantile(0.01, alpha=0.5, proxy=1.0), 3))
    8.402
    """
    owner = "walk_quantile"
    delta, t, alpha, proxy = numbers(owner, delta=delta, t=t, alpha=alpha, proxy=proxy)
    probability(owner, delta)
    _conditions(owner, t, alpha, proxy)
    sharp = _potential(t, alpha, proxy, lambda theta, log_m: arccosh_exp(log_m - np.log(delta[..., None])) / theta)
    short, until = _short(t, alpha, proxy)
    high = np.sqrt(proxy)
    while np.any(above := _sum(high, until, alpha, proxy) > delta):
        high = np.where(above, 2.0 * high, high)
    # The largest x where the sum is still above delta, and a hair more.
    found = last_true(lambda x: _sum(x, until, alpha, proxy) > delta, high * 1e-9, high) * (1 + 1e-12)
    return np.where(t > 1.0, np.minimum(np.where(short, found, np.inf), sharp), 0.0)[()]


def walk_mean(t: Array = math.inf, *, alpha: Array, proxy: Array) -> Array:
    """E|D_t| from the same walk.

    The smallest of three: 2·sum over j < t of the integral of ``walk_tail``'s terms; sqrt((t - 1)·s²), by
    ``second_moment_mean``; and the smallest arccosh(M_t)/theta, about 1.305·s²/alpha for small alpha. The noise may
    depend on the past; where it does not, ``lundberg_mean`` is smaller.

    Conditions: alpha >= 0; t must be finite where alpha = 0.

    >>> [float(round(walk_mean(t, alpha=0.1, proxy=1.0), 2)) for t in (100, math.inf)]
    [8.51, 13.08]
    """
    owner = "walk_mean"
    t, alpha, proxy = numbers(owner, t=t, alpha=alpha, proxy=proxy)
    _conditions(owner, t, alpha, proxy)
    s = np.sqrt(proxy)

    def term(j: np.ndarray) -> np.ndarray:
        tail = np.asarray(erfc(alpha[..., None] / s[..., None] * np.sqrt(j / 2.0)), float)
        return s[..., None] * np.sqrt(2.0 * np.pi * j) * tail

    def rest(n: np.ndarray) -> np.ndarray:
        # Each term is at most 2·(s²/alpha)·exp(-j·alpha²/(2s²)), which sums to a geometric series.
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            rate = alpha**2 / (2.0 * proxy)
            left = 2.0 * proxy / alpha * np.exp(-n * rate) / np.expm1(rate)
        return np.where(alpha > 0.0, left, np.inf)

    short, until = _short(t, alpha, proxy)
    mean = np.where(short, sum_over_steps(term, until - 1.0, rest), np.inf)
    sharp = _potential(t, alpha, proxy, lambda theta, log_m: arccosh_exp(log_m) / theta)
    return np.minimum.reduce([mean, np.sqrt((t - 1.0) * proxy), sharp])[()]


def lundberg_rate(*, alpha: Array, noise: Noise | None = None, proxy: Array | None = None) -> Array:
    """The theta > 0 with E exp(±theta·xi) = exp(theta·alpha): how fast the carry's tail decays.

    From a noise law with a moment generating function the exact root; from a variance proxy 2·alpha/s², which always
    works. Infinite where alpha is at least the noise's bound: nothing is ever clipped there and the carry is 0.

    Conditions: alpha > 0.

    >>> from carryclip.theory.noise import Uniform
    >>> float(round(lundberg_rate(alpha=0.5, noise=Uniform(1.0)), 4)), float(lundberg_rate(alpha=0.5, proxy=1.0))
    (4.3073, 1.0)
    """
    owner = "lundberg_rate"
    if (noise is None) == (proxy is None):
        raise TypeError(f"{owner}: give either noise= (a law of carryclip.theory.noise) or proxy=.")
    if noise is None:
        alpha, proxy = numbers(owner, alpha=alpha, proxy=proxy)
        above_mean(owner, alpha)
        positive(owner, proxy=proxy)
        return 2.0 * alpha / proxy
    if not isinstance(noise, Noise):
        raise TypeError(f"{owner}: noise must be a law of carryclip.theory.noise, such as Uniform(1.0); got {noise!r}.")
    alpha, scale = numbers(owner, alpha=alpha, scale=noise.scale)
    above_mean(owner, alpha)
    # In units of the noise, so that neither tiny nor huge numbers get in the way.
    unit = replace(noise, scale=1.0)  # pyright: ignore[reportArgumentType]
    none = (scale == 0.0) | (unit.bound * np.where(scale == 0.0, 1.0, scale) <= alpha)
    need(owner, "noise with exponential moments", np.isfinite(unit.proxy) | none, scale=scale)
    with np.errstate(over="ignore", divide="ignore"):
        # A smaller margin than the true one has a smaller rate, which is valid; beyond this nothing is left to gain.
        margin = np.minimum(np.where(none, 0.5, alpha) / np.where(none, 1.0, scale), 1e100)
        low = 2.0 * margin / unit.proxy
        high = 2.0 * low
        while np.any(below := unit.log_mgf(high) <= high * margin):
            high = np.where(below, 2.0 * high, high)
        # log-mgf - theta·alpha is convex and 0 at 0, so it changes sign once.
        root = last_true(lambda theta: unit.log_mgf(theta) <= theta * margin, low, high)
        return np.where(none, np.inf, root / np.where(none, 1.0, scale))[()]


def lundberg_tail(x: Array, *, rate: Array) -> Array:
    """P(|D_t| >= x) <= 2·exp(-theta·x) at every t, with theta from ``lundberg_rate``.

    Conditions: x > 0, theta > 0, noise independent in time. For radii |gbar_t| + beta·sigma_t² with sigma_t fixed
    beforehand, theta = 2·beta.

    >>> float(round(lundberg_tail(5.0, rate=1.0), 5))
    0.01348
    """
    owner = "lundberg_tail"
    x, rate = numbers(owner, x=x, rate=rate)
    positive(owner, x=x, rate=rate)
    return np.minimum(2.0 * np.exp(-rate * x), 1.0)


def lundberg_quantile(delta: Array, *, rate: Array) -> Array:
    """What |D_t| stays below with probability 1 - delta: log(2/delta)/theta. Conditions: as for ``lundberg_tail``.

    >>> float(round(lundberg_quantile(0.01, rate=1.0), 3))
    5.298
    """
    owner = "lundberg_quantile"
    delta, rate = numbers(owner, delta=delta, rate=rate)
    probability(owner, delta)
    positive(owner, rate=rate)
    return np.log(2.0 / delta) / rate


def lundberg_mean(*, rate: Array) -> Array:
    """E|D_t| <= (1 + log 2)/theta: the integral of min(1, 2·exp(-theta·x)). Conditions: as for ``lundberg_tail``.

    >>> float(round(lundberg_mean(rate=2.0), 4))
    0.8466
    """
    owner = "lundberg_mean"
    (rate,) = numbers(owner, rate=rate)
    positive(owner, rate=rate)
    return (1.0 + math.log(2.0)) / rate


def _conditions(owner: str, t: Array, alpha: Array, proxy: Array) -> None:
    step(owner, t)
    nonnegative(owner, why="below the mean gradient the carry winds up", alpha=alpha)
    positive(owner, proxy=proxy)
    if np.any(np.isinf(t) & (alpha == 0.0)):
        raise OutsideConditionsError(f"{owner} needs a finite t where alpha = 0: the carry grows like sqrt(t) there.")


def _sum(x: Array, t: Array, alpha: Array, proxy: Array) -> Array:
    x, t, alpha, proxy = np.broadcast_arrays(x, t, alpha, proxy)

    def term(j: np.ndarray) -> np.ndarray:
        return 2.0 * np.exp(-((x[..., None] + j * alpha[..., None]) ** 2) / (2.0 * j * proxy[..., None]))

    def rest(n: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            rate = alpha**2 / (2.0 * proxy)
            return np.where(rate > 0.0, 2.0 * np.exp(-alpha * x / proxy - n * rate) / np.expm1(rate), np.inf)

    return sum_over_steps(term, t - 1.0, rest)


def _short(t: Array, alpha: Array, proxy: Array) -> tuple[np.ndarray, np.ndarray]:
    """(where the walk's sum is short enough to be worth adding up, t there and 1 elsewhere)."""
    with np.errstate(divide="ignore"):
        short = np.minimum(t, 64.0 * proxy / alpha**2) <= TERMS
    return short, np.where(short, t, 1.0)


def _potential(
    t: Array, alpha: Array, proxy: Array, value: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """The smallest value(theta, log M_t) over theta."""
    s = np.sqrt(proxy)
    with np.errstate(divide="ignore"):
        settled, free = 2.0 * alpha / proxy, 60.0 / (s * np.sqrt(t - 1.0))
    # From a late step on only theta below 2·alpha/s² has a limit; before, the free walk's scale counts as well.
    top = np.where(np.isfinite(t), np.maximum(settled, np.where(t > 1.0, free, 1.0 / s)), settled * (1.0 - 1e-6))

    def at(theta: np.ndarray) -> np.ndarray:
        return value(theta, log_potential(theta**2 * proxy[..., None] / 2.0, theta * alpha[..., None], t[..., None]))

    return lowest(at, top * 1e-4, top)


def log_potential(growth: Array, shrink: Array, t: Array) -> Array:
    """Log of M_t, the solution of M_{t+1} = k·(q·M_t + 1 - q) from M_1 = 1, with k = exp(growth), q = exp(-shrink).

    M_t = (kq)^(t-1) + k(1 - q)·((kq)^(t-1) - 1)/(kq - 1); for t = inf its limit, which is infinite unless kq < 1.
    """
    rate = growth - shrink
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        power = np.where(
            np.isfinite(t), (np.where(np.isfinite(t), t, 2.0) - 1.0) * rate, np.where(rate < 0, -np.inf, np.inf)
        )
        # log of ((kq)^(t-1) - 1)/(kq - 1), from whichever side of kq = 1.
        series = np.where(
            rate > 0.0,
            power + np.log(-np.expm1(-power)) - rate - np.log(-np.expm1(-rate)),
            np.log(-np.expm1(power)) - np.log(-np.expm1(rate)),
        )
        series = np.where(np.abs(rate) < 1e-12, np.log(t - 1.0), series)
        return np.logaddexp(power, growth + np.log(-np.expm1(-shrink)) + series)


def arccosh_exp(y: Array) -> Array:
    """arccosh(exp(y)) for y >= 0, without overflow."""
    return np.maximum(y, 0.0) + np.log1p(np.sqrt(-np.expm1(-2.0 * np.maximum(y, 0.0))))


def log_cosh(x: Array) -> Array:
    """Log of cosh(x) for x >= 0, without overflow."""
    return x + np.log1p(np.exp(-2.0 * x)) - math.log(2.0)
