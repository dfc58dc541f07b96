"""The paper's second carry bound: radii gamma_t = |gbar_t| + beta·sigma_t², with sigma_t² the noise's variance proxy.

Setting: scalars, or one coordinate. sigma_t >= sigma_min > 0 known before xi_t, beta > 0. The printed form adds an
offset for gradients within G (``gradient_bound``); the corrected one, which follows from the random walk of
``walk_tail``, has none, so that neither G nor the largest radius enters.
"""

import math

import numpy as np

from carryclip.theory.bounds._conditions import Array, Form, form_is, numbers, positive, probability, step


def _count(t: Array, beta: Array, variance: Array, printed: bool) -> Array:
    """m_t: the paper prints 1/(2·beta²·sigma²) where its proof gives 2/(beta²·sigma²)."""
    return np.minimum(t, (0.5 if printed else 2.0) / (beta**2 * variance))


def _printed_offset(owner: str, beta: Array, bound: Array | None) -> Array:
    """(2 + beta)·G, as printed."""
    if bound is None:
        raise TypeError(f"{owner}: form='printed' needs gradient_bound, for its offset (2 + beta)·G.")
    return (2.0 + beta) * bound


def _optional_bound(owner: str, bound: Array | None) -> Array | None:
    """G, checked if it is given."""
    if bound is None:
        return None
    (bound,) = numbers(owner, gradient_bound=bound)
    positive(owner, gradient_bound=bound)
    return bound


def adaptive_carry_tail(
    epsilon: Array, t: Array = math.inf, *, beta: Array, min_variance: Array, form: Form = "corrected"
) -> Array:
    """By the second carry bound: 2·m_t·exp(-beta·epsilon).

    As printed it bounds P(|D_t| >= epsilon + G + gamma_+), with m_t = min(t, 1/(2·beta²·sigma_min²)), which is too
    small by a factor of four: the sum of exp(-j·beta²·sigma_min²/2) over j >= 1 is at most 2/(beta²·sigma_min²), the
    corrected form. The corrected one bounds P(|D_t| >= epsilon): the offset is not needed.

    Conditions: epsilon > 0; sigma_t >= sigma_min may be random if it is known before the noise of its step.

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
    gradient_bound: Array | None = None,
    form: Form = "corrected",
) -> Array:
    """What |D_t| stays below with probability 1 - delta, by the second carry bound: the paper's third figure.

    Printed: (2/beta)·log(2·m_t/delta) + (2 + beta)·G with m_t = min(t, 1/(2·beta²·sigma_min²)). Corrected:
    (1/beta)·log(2·m_t/delta) with m_t = min(t, 2/(beta²·sigma_min²)), and no G.

    Conditions: those of ``adaptive_carry_tail``; the printed form needs ``gradient_bound``.

    >>> arguments = dict(beta=0.5, min_variance=1.0)
    >>> float(round(adaptive_carry_quantile(0.01, form="printed", gradient_bound=2.0, **arguments), 3))
    28.966
    >>> float(round(adaptive_carry_quantile(0.01, **arguments), 3))
    14.756
    """
    owner = "adaptive_carry_quantile"
    delta, t, beta, variance = numbers(owner, delta=delta, t=t, beta=beta, min_variance=min_variance)
    bound = _optional_bound(owner, gradient_bound)
    probability(owner, delta)
    step(owner, t)
    positive(owner, beta=beta, min_variance=variance)
    printed = form_is(owner, form)
    level = np.log(2.0 * _count(t, beta, variance, printed)) - np.log(delta)
    if printed:
        return 2.0 / beta * level + _printed_offset(owner, beta, bound)
    return np.maximum(level, 0.0) / beta + (0.0 if bound is None else 0.0 * bound)  # in the shape of all


def adaptive_carry_mean(
    *, beta: Array, min_variance: Array, gradient_bound: Array | None = None, form: Form = "corrected"
) -> Array:
    """E|D_t| by the second carry bound, at every t.

    Printed: 8/(beta³·sigma_min²) + (2 + beta)·G. Corrected: 4/(beta³·sigma_min²), the integral of
    ``adaptive_carry_tail``. ``carryclip.theory.radii`` has far smaller ones: ``adaptive_mean`` for random sigma_t, and
    ``fixed_adaptive_mean`` without sigma_min for those fixed beforehand.

    Conditions: those of ``adaptive_carry_tail``; the printed form needs ``gradient_bound``.

    >>> arguments = dict(beta=0.5, min_variance=1.0)
    >>> float(adaptive_carry_mean(form="printed", gradient_bound=2.0, **arguments))
    69.0
    >>> float(adaptive_carry_mean(**arguments))
    32.0
    """
    owner = "adaptive_carry_mean"
    beta, variance = numbers(owner, beta=beta, min_variance=min_variance)
    bound = _optional_bound(owner, gradient_bound)
    positive(owner, beta=beta, min_variance=variance)
    if form_is(owner, form):
        return 8.0 / (beta**3 * variance) + _printed_offset(owner, beta, bound)
    return 4.0 / (beta**3 * variance) + (0.0 if bound is None else 0.0 * bound)
