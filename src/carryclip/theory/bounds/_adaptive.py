"""The paper's second carry bound: radii gamma_t = |gbar_t| + beta·sigma_t², with sigma_t² the noise's variance proxy.

Setting: scalars, or one coordinate. sigma_t >= sigma_min > 0, |g_t| <= G (``gradient_bound``), beta > 0.
"""

import math

import numpy as np

from carryclip.theory.bounds._conditions import Array, Form, form_is, need, numbers, positive, probability, step


def _count(t: Array, beta: Array, variance: Array, printed: bool) -> Array:
    """m_t: the paper prints 1/(2·beta²·sigma²) where its proof gives 2/(beta²·sigma²)."""
    return np.minimum(t, (0.5 if printed else 2.0) / (beta**2 * variance))


def _checked(owner: str, beta: Array, variance: Array, bound: Array) -> None:
    positive(owner, beta=beta, min_variance=variance, gradient_bound=bound)


def _offset(owner: str, beta: Array, variance: Array, bound: Array, largest_radius: Array | None, form: Form) -> Array:
    """(2 + beta)·G as printed, or G + gamma_+."""
    if form_is(owner, form):
        return (2.0 + beta) * bound
    if largest_radius is not None:
        radius, bound = numbers(owner, largest_radius=largest_radius, gradient_bound=bound)
        positive(owner, largest_radius=radius)
        return bound + radius
    condition = "sigma² <= G for gamma <= (1 + beta)·G, or largest_radius given"
    need(owner, condition, variance <= bound, min_variance=variance, gradient_bound=bound)
    return (2.0 + beta) * bound


def adaptive_carry_tail(
    epsilon: Array, t: Array = math.inf, *, beta: Array, min_variance: Array, form: Form = "corrected"
) -> Array:
    """P(|D_t| >= epsilon + G + gamma_+) by the second carry bound: 2·m_t·exp(-beta·epsilon).

    m_t = min(t, 1/(2·beta²·sigma_min²)) as printed, which is too small by a factor of four: the sum of
    exp(-j·beta²·sigma_min²/2) over j >= 1 is at most 2/(beta²·sigma_min²), the corrected form.

    >>> float(round(adaptive_carry_tail(30.0, beta=0.5, min_variance=1.0), 9))
    4.894e-06
    """
    owner = "adaptive_carry_tail"
    epsilon, t, beta, variance = numbers(owner, epsilon=epsilon, t=t, beta=beta, min_variance=min_variance)
    positive(owner, epsilon=epsilon, beta=beta, min_variance=variance)
    step(owner, t)
    printed = form_is(owner, form)
    tail = 2.0 * _count(t, beta, variance, printed) * np.exp(-beta * epsilon)
    return tail if printed else np.minimum(tail, 1.0)


def adaptive_carry_quantile(
    delta: Array,
    t: Array = math.inf,
    *,
    beta: Array,
    min_variance: Array,
    gradient_bound: Array,
    largest_radius: Array | None = None,
    form: Form = "corrected",
) -> Array:
    """What |D_t| stays below with probability 1 - delta, by the second carry bound: the paper's third figure.

    Printed: (2/beta)·log(2·m_t/delta) + (2 + beta)·G with m_t = min(t, 1/(2·beta²·sigma_min²)). Corrected:
    (1/beta)·log(2·m_t/delta) + G + gamma_+ with m_t = min(t, 2/(beta²·sigma_min²)).

    Conditions: (2 + beta)·G stands for G + gamma_+ only where sigma² <= G; give ``largest_radius`` elsewhere.

    >>> arguments = dict(beta=0.5, min_variance=1.0, gradient_bound=2.0)
    >>> float(round(adaptive_carry_quantile(0.01, form="printed", **arguments), 3))
    28.966
    >>> float(round(adaptive_carry_quantile(0.01, largest_radius=1.5, **arguments), 3))
    18.256
    """
    owner = "adaptive_carry_quantile"
    delta, t, beta, variance, bound = numbers(
        owner, delta=delta, t=t, beta=beta, min_variance=min_variance, gradient_bound=gradient_bound
    )
    probability(owner, delta)
    step(owner, t)
    _checked(owner, beta, variance, bound)
    printed = form_is(owner, form)
    level = np.log(2.0 * _count(t, beta, variance, printed)) - np.log(delta)
    offset = _offset(owner, beta, variance, bound, largest_radius, form)
    return 2.0 / beta * level + offset if printed else np.maximum(level, 0.0) / beta + offset


def adaptive_carry_mean(
    *,
    beta: Array,
    min_variance: Array,
    gradient_bound: Array,
    largest_radius: Array | None = None,
    form: Form = "corrected",
) -> Array:
    """E|D_t| by the second carry bound, at every t.

    Printed: 8/(beta³·sigma_min²) + (2 + beta)·G. Corrected: 4/(beta³·sigma_min²) + G + gamma_+.
    ``lundberg_mean`` has 0.85/beta instead, with neither sigma_min nor G, where the noise is independent in time.

    >>> arguments = dict(beta=0.5, min_variance=1.0, gradient_bound=2.0)
    >>> float(adaptive_carry_mean(form="printed", **arguments)), float(adaptive_carry_mean(**arguments))
    (69.0, 37.0)
    """
    owner = "adaptive_carry_mean"
    beta, variance, bound = numbers(owner, beta=beta, min_variance=min_variance, gradient_bound=gradient_bound)
    _checked(owner, beta, variance, bound)
    offset = _offset(owner, beta, variance, bound, largest_radius, form)
    return (8.0 if form_is(owner, form) else 4.0) / (beta**3 * variance) + offset
