"""Carry bounds for radii that follow the gradients: their root mean square, or the variance of their noise.

    rms_average            radius of at least b RMS: nothing need be known of the mean gradient
    fixed_adaptive_mean    radius |gbar_t| + beta·sigma_t², sigma_t fixed beforehand: at every t, without sigma_min
    adaptive_mean          the same with sigma_t random: at every t, with the logarithm of sigma_min
    adaptive_average       the same on average over time, weighted by sigma_t²: without sigma_min
    estimated_average      radii from estimated moments, which fall short of their margin now and then

Proofs are in docs/theory/adaptive. Arguments may be arrays and broadcast; outside its conditions a function raises
``carryclip.theory.bounds.OutsideConditionsError``.
"""

import numpy as np

from carryclip.theory.bounds._conditions import Array, above_mean, need, nonnegative, numbers, positive
from carryclip.theory.bounds._solve import lowest
from carryclip.theory.bounds._walk import arccosh_exp


def rms_average(multiple: Array, *, rms: Array = 1.0, steady: bool = False) -> Array:
    """Time average of E||D_t|| where the radius is at least ``multiple`` times the gradients' root mean square.

    With E[||g_t||² | past] <= r² (``rms``) and radius b·r: r for b >= 2, r·(1/(2(b - 1)) + (b - 1)/2) for 1 < b < 2.
    The law, the dimension and the mean gradient, which may move as it likes, do not enter. If the norm of the mean
    gradient never changes (``steady``) it is r from b = 1 on.

    Conditions: a norm, or one coordinate of component-wise clipping; the radius is known before the noise; multiple > 1
    (>= 1 if steady).

    >>> rms_average([1.25, 1.5, 2.0, 4.0]).tolist()
    [2.125, 1.25, 1.0, 1.0]
    >>> float(rms_average(1.0, rms=3.0, steady=True))
    3.0
    """
    owner = "rms_average"
    multiple, rms = numbers(owner, multiple=multiple, rms=rms)
    nonnegative(owner, rms=rms)
    if steady:
        need(owner, "multiple >= 1", multiple >= 1.0, multiple=multiple)
        return rms + 0.0 * multiple
    why = "at 1 a moving mean gradient leaves no margin; steady=True if its norm is constant"
    need(owner, f"multiple > 1 ({why})", multiple > 1.0, multiple=multiple)
    margin = np.minimum(multiple - 1.0, 1.0)
    return rms * (1.0 / (2.0 * margin) + margin / 2.0)


def fixed_adaptive_mean(*, beta: Array, max_variance: Array) -> Array:
    """E|D_t| at every t for radii of at least |gbar_t| + beta·sigma_t², with variance proxies fixed beforehand.

    The smallest arccosh(1 + exp(b²·sigma_max²/2))/b over 0 < b <= beta: about 1.32/beta where beta·sigma_max is small.
    Neither G nor sigma_min enters, and the noise may depend on the past. Where it does not, ``lundberg_mean`` with a
    rate of 2·beta is smaller, 0.85/beta.

    Conditions: one coordinate; the proxies sigma_t² <= ``max_variance`` are *not* random. If they may depend on the
    past, no such bound exists: an adversary that turns the noise off while the carry is large keeps it large for ever.

    >>> float(round(fixed_adaptive_mean(beta=0.05, max_variance=2.25), 2))
    26.37
    """
    owner = "fixed_adaptive_mean"
    beta, variance = numbers(owner, beta=beta, max_variance=max_variance)
    positive(owner, beta=beta)
    nonnegative(owner, max_variance=variance)

    def value(rate: np.ndarray) -> np.ndarray:
        log_level = np.logaddexp(0.0, rate**2 * variance[..., None] / 2.0)
        return arccosh_exp(log_level) / rate

    return lowest(value, beta * 1e-3, beta)[()]


def adaptive_mean(*, beta: Array, min_variance: Array) -> Array:
    """E|D_t| at every t for radii of at least |gbar_t| + beta·sigma_t², with sigma_t random but known before xi_t.

    (1 + log(4/(beta²·sigma_min²)))/beta, or 4/(beta³·sigma_min²) where that is smaller: the integral of the smaller of
    1 and ``bounds.adaptive_carry_tail``. The paper has 8/(beta³·sigma_min²) + (2 + beta)·G. The logarithm has to be
    there: an adversary reaches half of it in the limit of a small sigma_min, a fifth at beta·sigma_min = 0.01.

    Conditions: one coordinate; sigma_t² >= ``min_variance`` > 0 are variance proxies given the past.

    >>> float(round(adaptive_mean(beta=0.05, min_variance=0.0025), 1))
    287.4
    """
    owner = "adaptive_mean"
    beta, variance = numbers(owner, beta=beta, min_variance=min_variance)
    positive(owner, beta=beta, min_variance=variance)
    count = 4.0 / (beta**2 * variance)
    return np.where(count > 1.0, 1.0 + np.log(np.maximum(count, 1.0)), count) / beta


def adaptive_average(*, beta: Array, max_variance: Array) -> Array:
    """Average over time of |D_t|, weighted by sigma_t²: sum of E[sigma_t²·|D_t|] over sum of E[sigma_t²].

    At most 1/(2·beta) + beta·sigma_max²/2, for radii of at least |gbar_t| + beta·sigma_t² with sigma_t random but known
    before xi_t. Only variances enter, no proxies, so that tails may be heavy.

    Conditions: a norm, or one coordinate; E[||xi_t||² | past] <= sigma_t² <= ``max_variance``.

    >>> float(adaptive_average(beta=0.5, max_variance=1.0))
    1.25
    """
    owner = "adaptive_average"
    beta, variance = numbers(owner, beta=beta, max_variance=max_variance)
    positive(owner, beta=beta)
    nonnegative(owner, max_variance=variance)
    # A smaller beta than the true one may be put in: best is 1/sigma_max.
    with np.errstate(divide="ignore"):
        used = np.minimum(beta, np.where(variance > 0.0, 1.0 / np.sqrt(variance), np.inf))
    return 1.0 / (2.0 * used) + used * variance / 2.0


def estimated_average(
    *, alpha: Array, variance: Array, mean_gradient: Array, short: Array, largest_carry: Array
) -> Array:
    """Time average of E|D_t| for radii that are estimated, and now and then too small.

    (v + alpha²)/(2·alpha) + p·(2(M + alpha)·C + M²)/(2·alpha), where p (``short``) is the average probability that the
    radius is below |gbar_t| + alpha, M bounds |gbar_t| and C bounds the carry: cap radii under ``Capped`` or ``Gated``.

    Conditions: a norm, or one coordinate; the radius is known before the noise; alpha > 0, 0 <= short <= 1.

    >>> at = dict(alpha=0.5, variance=1.0, mean_gradient=1.0, largest_carry=10.0)
    >>> float(estimated_average(short=0.0, **at)), float(estimated_average(short=0.01, **at))
    (1.25, 1.56)
    """
    owner = "estimated_average"
    alpha, variance, mean, short, carry = numbers(
        owner, alpha=alpha, variance=variance, mean_gradient=mean_gradient, short=short, largest_carry=largest_carry
    )
    above_mean(owner, alpha)
    nonnegative(owner, variance=variance, mean_gradient=mean, largest_carry=carry)
    need(owner, "0 <= short <= 1", (short >= 0.0) & (short <= 1.0), short=short)
    missed = short * (2.0 * (mean + alpha) * carry + mean**2)
    return (variance + alpha**2 + missed) / (2.0 * alpha)


def welford_short(
    n: Array, *, excess: Array, mean_multiple: Array, std_multiple: Array, gradient_bound: Array
) -> Array:
    """Probability that a radius a·|mean| + b·deviation, estimated by Welford from n gradients, misses its margin.

    2·exp(-n·eps²/(8·a²·G²)) + exp(-(n - 1)·eps²/(32·b²·G²)), at most 1, with eps = (a - 1)·|mu| + b·sigma - alpha
    (``excess``): the amount by which the radius of the true moments exceeds |mu| + alpha. It goes to 0 so fast that its
    sum over n is finite: ``estimated_average``'s second term is of the order of 1/T. By the inequalities of Hoeffding,
    and of Maurer and Pontil (2009) for the deviation.

    Conditions: independent gradients of one law within G, a >= 1, b > 0, excess > 0, n >= 2.

    >>> f"{welford_short(2000, excess=1.0, mean_multiple=1, std_multiple=2, gradient_bound=3.0):.3f}"
    '0.176'
    """
    owner = "welford_short"
    n, excess, a, b, bound = numbers(
        owner, n=n, excess=excess, mean_multiple=mean_multiple, std_multiple=std_multiple, gradient_bound=gradient_bound
    )
    need(owner, "n >= 2", n >= 2.0, n=n)
    need(owner, "mean_multiple >= 1", a >= 1.0, mean_multiple=a)
    positive(owner, excess=excess, std_multiple=b, gradient_bound=bound)
    mean = 2.0 * np.exp(-n * excess**2 / (8.0 * a**2 * bound**2))
    deviation = np.exp(-(n - 1.0) * excess**2 / (32.0 * b**2 * bound**2))
    return np.minimum(mean + deviation, 1.0)
