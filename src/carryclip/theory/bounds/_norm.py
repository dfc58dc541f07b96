"""Carry bounds for norm clipping, which the paper leaves open: no dimension enters.

Setting: any Euclidean space; gamma_t >= ||gbar_t|| + alpha, noise of mean zero given the past with ||xi_t|| <= B
(``noise_bound``). With r = ||D_t|| and lambda > 0

    E[cosh(lambda·||D_{t+1}||) | past] <= cosh(lambda·B)·cosh(lambda·(r - alpha)_+) <= k·(q·cosh(lambda·r) + 1 - q),

k = cosh(lambda·B), q = exp(-lambda·alpha); so E cosh(lambda·||D_t||) <= M = k(1 - q)/(1 - kq) at every t if kq < 1.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np

from carryclip.theory.bounds._conditions import Array, above_mean, numbers, positive, probability
from carryclip.theory.bounds._solve import lowest
from carryclip.theory.bounds._walk import arccosh_exp, log_cosh, log_potential, lundberg_rate
from carryclip.theory.noise import TwoPoint

NormForm = Literal["sharp", "coth"]


def norm_carry_tail(x: Array, *, alpha: Array, noise_bound: Array, form: NormForm = "sharp") -> Array:
    """P(||D_t|| >= x) at every t under norm clipping.

    Sharp: the smallest M/cosh(lambda·x) over lambda. ``form="coth"``: coth(alpha²/(4B²))·exp(-alpha·x/B²), a closed
    form that is never below the sharp one. Zero where alpha >= B: nothing is clipped there.

    Conditions: x > 0, alpha > 0.

    >>> float(round(norm_carry_tail(20.0, alpha=0.3, noise_bound=1.0), 6))
    0.000237
    """
    owner = "norm_carry_tail"
    x, alpha, bound = _arguments(owner, alpha, noise_bound, x=x)
    positive(owner, x=x)
    if _is_coth(owner, form):
        tail = _coth(alpha, bound) * np.exp(-alpha * x / bound**2)
    else:
        tail = np.exp(_best(alpha, bound, lambda rate, log_m: log_m - log_cosh(rate * (x / bound)[..., None])))
    return np.where(alpha >= bound, 0.0, np.minimum(tail, 1.0))[()]


def norm_carry_quantile(delta: Array, *, alpha: Array, noise_bound: Array, form: NormForm = "sharp") -> Array:
    """What ||D_t|| stays below with probability 1 - delta under norm clipping, at every t.

    Sharp: the smallest arccosh(M/delta)/lambda. Conditions: alpha > 0.

    >>> float(round(norm_carry_quantile(0.01, alpha=0.3, noise_bound=1.0), 2))
    13.51
    """
    owner = "norm_carry_quantile"
    delta, alpha, bound = _arguments(owner, alpha, noise_bound, delta=delta)
    probability(owner, delta)
    if _is_coth(owner, form):
        quantile = bound**2 / alpha * (np.log(_coth(alpha, bound)) - np.log(delta))
    else:
        level = np.log(delta)[..., None]
        quantile = bound * _best(alpha, bound, lambda rate, log_m: arccosh_exp(log_m - level) / rate)
    return np.where(alpha >= bound, 0.0, quantile)[()]


def norm_carry_mean(*, alpha: Array, noise_bound: Array, form: NormForm = "sharp") -> Array:
    """E||D_t|| at every t under norm clipping.

    Sharp: the smallest arccosh(M)/lambda, by Jensen's inequality, at most 1.32·B²/alpha for small alpha.
    ``form="coth"``: (B²/alpha)·log coth(alpha²/(4B²)). ``second_moment_average`` is smaller still, but speaks of the
    average over time. Conditions: alpha > 0.

    >>> float(round(norm_carry_mean(alpha=0.1, noise_bound=1.0), 2))
    13.05
    >>> float(round(norm_carry_mean(alpha=0.1, noise_bound=1.0, form="coth"), 2))
    59.91
    """
    owner = "norm_carry_mean"
    alpha, bound = _arguments(owner, alpha, noise_bound)
    if _is_coth(owner, form):
        mean = bound**2 / alpha * np.log(_coth(alpha, bound))
    else:
        mean = bound * _best(alpha, bound, lambda rate, log_m: arccosh_exp(log_m) / rate)
    return np.where(alpha >= bound, 0.0, mean)[()]


def _arguments(owner: str, alpha: Array, noise_bound: Array, **more: Array) -> list[np.ndarray]:
    arrays = numbers(owner, **more, alpha=alpha, noise_bound=noise_bound)
    above_mean(owner, arrays[-2])
    positive(owner, noise_bound=arrays[-1])
    return arrays


def _is_coth(owner: str, form: str) -> bool:
    if form not in ("sharp", "coth"):
        raise ValueError(f"{owner}: form must be 'sharp' or 'coth', got {form!r}.")
    return form == "coth"


def _coth(alpha: Array, bound: Array) -> Array:
    return 1.0 / np.tanh((alpha / bound) ** 2 / 4.0)


def _best(alpha: np.ndarray, bound: np.ndarray, value: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The smallest value(lambda·B, log M) over the lambdas with kq < 1: from 0 to the rate of a fair coin ±B."""
    margin = np.where(alpha < bound, alpha, 0.5 * bound) / bound
    coin = TwoPoint(1.0)
    top = np.asarray(lundberg_rate(alpha=margin, noise=coin))

    def at(rate: np.ndarray) -> np.ndarray:
        return value(rate, log_potential(coin.log_mgf(rate), rate * margin[..., None], np.inf))

    return lowest(at, top * 1e-3, top * (1.0 - 1e-6))
