"""The paper's first carry bound (component-wise clipping) and its corollary.

Setting of both: scalars, or one coordinate of component-wise clipping. |g_t| <= G (``gradient_bound``), radii
gamma_t >= |gbar_t| + alpha with supremum gamma_+ (``largest_radius``), carry D_1 = 0.
"""

import math

import numpy as np

from carryclip.theory.bounds._conditions import (
    Array,
    Form,
    above_mean,
    form_is,
    nonnegative,
    numbers,
    positive,
    probability,
    step,
)


def geometric_sum(exponent: Array) -> Array:
    """1/(exp(exponent) - 1) = sum of exp(-j·exponent) over j >= 1: the paper's c_alpha for alpha²/(2G²).

    >>> float(round(geometric_sum(0.5), 4))
    1.5415
    """
    with np.errstate(divide="ignore", over="ignore"):
        return 1.0 / np.expm1(np.asarray(exponent, float))


def _log_count(t: Array, alpha: Array, bound: Array, printed: bool) -> Array:
    """Log of c_alpha, or in the corrected form of min(t, c_alpha), which also serves alpha = 0."""
    exponent = (alpha / bound) ** 2 / 2.0
    with np.errstate(divide="ignore"):
        count = -exponent - np.log(-np.expm1(-exponent))
        return count if printed else np.minimum(np.log(t), count)


def carry_tail(
    epsilon: Array, t: Array = math.inf, *, alpha: Array, gradient_bound: Array, form: Form = "corrected"
) -> Array:
    """P(|D_t| >= epsilon + G + gamma_+), by the first carry bound.

    2·c·exp(-(epsilon² + 2·alpha·epsilon·t)/(2·G²·t)) with c = 1/(exp(alpha²/(2G²)) - 1).

    Conditions: epsilon > 0, alpha > 0. The corrected form takes min(t, c) for c, since there are t terms at most: so it
    holds for alpha = 0 as well, where the printed closed form is vacuous. Never above 1 in the corrected form.

    >>> float(round(carry_tail(30.0, 100, alpha=0.5, gradient_bound=1.0), 9))
    5.1e-08
    """
    owner = "carry_tail"
    epsilon, t, alpha, bound = numbers(owner, epsilon=epsilon, t=t, alpha=alpha, gradient_bound=gradient_bound)
    printed = form_is(owner, form)
    positive(owner, epsilon=epsilon, gradient_bound=bound)
    step(owner, t)
    above_mean(owner, alpha) if printed else nonnegative(owner, alpha=alpha)
    exponent = (epsilon**2 / t + 2.0 * alpha * epsilon) / (2.0 * bound**2)
    tail = 2.0 * np.exp(_log_count(t, alpha, bound, printed) - exponent)
    return tail if printed else np.minimum(tail, 1.0)


def carry_quantile(
    delta: Array,
    t: Array = math.inf,
    *,
    alpha: Array,
    gradient_bound: Array,
    largest_radius: Array,
    form: Form = "corrected",
) -> Array:
    """What |D_t| stays below with probability 1 - delta: the first carry bound solved for epsilon.

    G + gamma_+ + epsilon, where epsilon² + 2·alpha·t·epsilon = 2·G²·t·log(2c/delta); for t = inf
    epsilon = (G²/alpha)·log(2c/delta). The forms differ as those of ``carry_tail``.

    >>> float(round(carry_quantile(0.01, alpha=0.5, gradient_bound=1.0, largest_radius=1.0), 3))
    16.629
    """
    owner = "carry_quantile"
    delta, t, alpha, bound, radius = numbers(
        owner, delta=delta, t=t, alpha=alpha, gradient_bound=gradient_bound, largest_radius=largest_radius
    )
    printed = form_is(owner, form)
    probability(owner, delta)
    step(owner, t)
    positive(owner, gradient_bound=bound, largest_radius=radius)
    above_mean(owner, np.where(np.isfinite(t) & (not printed) & (alpha == 0.0), 1.0, alpha))
    level = np.maximum(math.log(2.0) + _log_count(t, alpha, bound, printed) - np.log(delta), 0.0)
    target = 2.0 * bound**2 * level
    with np.errstate(divide="ignore", invalid="ignore"):
        # The root of epsilon² + 2·alpha·t·epsilon = target·t, written so that nothing cancels and t may be infinite.
        epsilon = target / (alpha + np.sqrt(alpha**2 + target / t))
    return (np.where(level > 0.0, epsilon, 0.0) + bound + radius)[()]


def carry_mean(
    *, alpha: Array, gradient_bound: Array, largest_radius: Array | None = None, form: Form = "corrected"
) -> Array:
    """E|D_t| by the first carry bound: 2·c·G²/alpha + G + gamma_+, at every t.

    The printed form holds as it stands. The corrected form drops what the proof does not need: by ``walk_tail`` the
    offset G + gamma_+ can go, which leaves 2·c·G²/alpha.

    Conditions: alpha > 0; the printed form needs ``largest_radius``.

    >>> float(round(carry_mean(alpha=0.5, gradient_bound=1.0, largest_radius=1.0, form="printed"), 3))
    32.042
    """
    owner = "carry_mean"
    radius = gradient_bound if largest_radius is None and not form_is(owner, form) else largest_radius
    alpha, bound, radius = numbers(owner, alpha=alpha, gradient_bound=gradient_bound, largest_radius=radius)
    positive(owner, gradient_bound=bound, largest_radius=radius)
    above_mean(owner, alpha)
    mean = 2.0 * geometric_sum((alpha / bound) ** 2 / 2.0) * bound**2 / alpha
    return mean + bound + radius if form_is(owner, form) else mean


def corollary_tail(epsilon: Array, *, alpha: Array, gradient_bound: Array, form: Form = "corrected") -> Array:
    """P(|D_t| >= epsilon + G + gamma_+) by the corollary: (4G²/alpha²)·exp(-alpha·epsilon/G²).

    Both forms are this; the corrected one is never above 1. Conditions: epsilon > 0, alpha > 0.

    >>> float(round(corollary_tail(30.0, alpha=0.5, gradient_bound=1.0), 9))
    4.894e-06
    """
    owner = "corollary_tail"
    epsilon, alpha, bound = numbers(owner, epsilon=epsilon, alpha=alpha, gradient_bound=gradient_bound)
    positive(owner, epsilon=epsilon, gradient_bound=bound)
    above_mean(owner, alpha)
    tail = 4.0 * (bound / alpha) ** 2 * np.exp(-alpha * epsilon / bound**2)
    return tail if form_is(owner, form) else np.minimum(tail, 1.0)


def corollary_quantile(
    delta: Array, *, alpha: Array, gradient_bound: Array, largest_radius: Array | None = None, form: Form = "corrected"
) -> Array:
    """What |D_t| stays below with probability 1 - delta, by the corollary: the bound of the paper's second figure.

    Printed: (G²/alpha²)·log(4G²/(alpha²·delta)) + 2G, which is false in general: a factor of alpha is lost, so for
    alpha > 1 it can be far too small. Corrected: (G²/alpha)·log(4G²/(alpha²·delta)) + G + gamma_+.

    Conditions: alpha > 0; the corrected form needs ``largest_radius``.

    >>> float(round(corollary_quantile(0.01, alpha=0.5, gradient_bound=1.0, form="printed"), 3))
    31.511
    >>> float(round(corollary_quantile(0.01, alpha=0.5, gradient_bound=1.0, largest_radius=1.0), 3))
    16.756
    """
    owner = "corollary_quantile"
    printed = form_is(owner, form)
    delta, alpha, bound = numbers(owner, delta=delta, alpha=alpha, gradient_bound=gradient_bound)
    probability(owner, delta)
    positive(owner, gradient_bound=bound)
    above_mean(owner, alpha)
    level = math.log(4.0) + 2.0 * np.log(bound / alpha) - np.log(delta)
    if printed:
        return (bound / alpha) ** 2 * level + 2.0 * bound
    (radius,) = numbers(owner, largest_radius=largest_radius)
    positive(owner, largest_radius=radius)
    return bound**2 / alpha * np.maximum(level, 0.0) + bound + radius
