"""What policies cost: what ``Capped`` and ``Gated`` drop and its regret, what ``Drip`` and ``Shrunk`` keep and forget.

Setting: a norm or one coordinate, radius gamma constant, gbar_t within the region. v is E||xi||² (``variance``) and b
the most that plain clipping can lose in a step, sup E[(||g_t|| - gamma)_+ | past] (``excess``). Proofs are in
docs/theory/policies. Outside its conditions a function raises ``carryclip.theory.bounds.OutsideConditionsError``.
"""

import math
from collections.abc import Callable

import numpy as np

from carryclip.carry import Drip, Gated, Shrunk
from carryclip.theory.bounds._conditions import Array, need, nonnegative, numbers, positive
from carryclip.theory.bounds._gate import _squared_weights, gate_shut


def capped_bias(*, variance: Array, radius: Array, cap: Array) -> Array:
    """Time average of the mean of what a cap drops: at most v/(2·cap·gamma), whatever the tails.

    For ``Capped(cap)``, and for the cap of ``Gated``; the margin may be 0. Coordinate by coordinate, v and the result
    are sums over coordinates.

    >>> float(capped_bias(variance=25.0, radius=1.0, cap=100))
    0.125
    """
    owner = "capped_bias"
    variance, radius, cap = numbers(owner, variance=variance, radius=radius, cap=cap)
    nonnegative(owner, variance=variance)
    positive(owner, radius=radius, cap=cap)
    return variance / (2.0 * cap * radius)


def largest_excess(*, second_moment: Array, radius: Array) -> Array:
    """A bound on ``excess`` if nothing but E[||g_t||² | past] <= q is known: E(||g|| - gamma)_+ <= q/(4·gamma).

    Since (x - gamma)_+ <= x²/(4·gamma) for every x.

    >>> float(largest_excess(second_moment=4.0, radius=1.0))
    1.0
    """
    owner = "largest_excess"
    moment, radius = numbers(owner, second_moment=second_moment, radius=radius)
    nonnegative(owner, second_moment=moment)
    positive(owner, radius=radius)
    return moment / (4.0 * radius)


def late_shut(t: Array, *, clipped_mean: Array, policy: Gated | None = None) -> Array:
    """Probability that the feeds before step t could shut the gate at t, whatever the feed of step t is.

    At most exp(-(threshold - a - c·(1 - a))_+²/(2·(w - a²))), where a = (1 - d)/(1 - d^t) is the weight of the feed at
    t and c, d, w are those of ``bounds.gate_shut``. The event belongs to the past of g_t, which is what lets the mean
    of what a shut gate drops be bounded by this times ``excess``.

    Conditions: those of ``bounds.gate_shut``.

    >>> [f"{p:.1e}" for p in late_shut([1, 50, 1000], clipped_mean=0.2)]
    ['1.0e+00', '1.4e-01', '1.7e-04']
    """
    owner, policy = "late_shut", policy or Gated()
    gate_shut(t, clipped_mean=clipped_mean, policy=policy)  # complains about bad arguments
    t, mean = numbers(owner, t=t, clipped_mean=clipped_mean)
    own = (1.0 - policy.decay) / (1.0 - np.power(policy.decay, t))
    missing = np.maximum(policy.threshold - own - mean * (1.0 - own), 0.0)
    spread = np.maximum(_squared_weights(t, policy) - own**2, 0.0)
    usable = (missing > 0.0) & (spread > 0.0)
    # Without a past (t = 1, or decay 0) no sum can reach what is missing, if anything is.
    certain = np.where(missing > 0.0, 0.0, 1.0)
    return np.where(usable, np.exp(-(missing**2) / (2.0 * np.where(usable, spread, 1.0))), certain)[()]


def gated_average_bias(
    steps: int,
    *,
    clipped_mean: Array,
    excess: Array,
    variance: Array,
    radius: Array,
    gradient_bound: Array | None = None,
    rate: Array | None = None,
    policy: Gated | None = None,
) -> Array:
    """Average over ``steps`` steps of the mean of what ``Gated`` drops: b·mean of P(S_t) + v/(2·cap·gamma).

    P(S_t) bounds the probability that the feeds *before* step t could shut the gate at t (``late_shut``), so
    that a shut gate loses as much as plain clipping at its worst, but rarely. It needs no bound on the gradients, no
    exponential moment and no independence, and serves a norm as well as a coordinate.

    Where there are such bounds, each of the two parts is the smaller of this and of that of ``bounds.gated_bias``:
    (G - gamma)·mean of P(gate shut) if ``gradient_bound`` is given, 2·exp(-theta·cap·gamma)/theta if ``rate`` is.

    Args:
        steps: T.
        clipped_mean: c.
        excess: b; ``largest_excess`` if nothing else is known.
        variance: v.
        radius: gamma.
        gradient_bound: G >= ||g_t||, if there is one.
        rate: theta of ``bounds.lundberg_rate``, for one coordinate with noise that is independent in time.
        policy: ``Gated()`` by default.

    Conditions: those of ``bounds.gate_shut`` on ``clipped_mean``; gbar_t within the region.

    >>> at = dict(clipped_mean=0.0, variance=25.0, radius=1.0, excess=4.0)
    >>> f"{gated_average_bias(100_000, **at):.4f}"
    '0.1254'
    >>> f"{gated_average_bias(100_000, gradient_bound=5.0, rate=0.2, **at):.1e}"
    '3.0e-04'
    """
    owner = "gated_average_bias"
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"{owner} needs a whole number of steps, at least 1; got {steps!r}.")
    policy = policy or Gated()
    clipped, excess, variance, radius = numbers(
        owner, clipped_mean=clipped_mean, excess=excess, variance=variance, radius=radius
    )
    nonnegative(owner, excess=excess)
    gate = excess * _mean_over_time(late_shut, steps, clipped, policy)
    cap = capped_bias(variance=variance, radius=radius, cap=policy.cap)
    if gradient_bound is not None:
        (bound,) = numbers(owner, gradient_bound=gradient_bound)
        need(owner, "gradient_bound >= radius", bound >= radius, gradient_bound=bound, radius=radius)
        gate = np.minimum(gate, (bound - radius) * _mean_over_time(gate_shut, steps, clipped, policy))
    if rate is not None:
        (theta,) = numbers(owner, rate=rate)
        positive(owner, rate=theta)
        cap = np.minimum(cap, 2.0 * np.exp(-theta * policy.cap * radius) / theta)
    return gate + cap


def _mean_over_time(
    probability: Callable[..., Array], steps: int, clipped_mean: np.ndarray, policy: Gated
) -> np.ndarray:
    """The mean of ``late_shut`` or ``gate_shut`` over t = 1..steps; once the average has settled they hardly change."""
    settled = min(steps, math.ceil(40.0 / -math.log(policy.decay)) if policy.decay > 0.0 else 2)
    early = probability(np.arange(1.0, settled + 1.0), clipped_mean=clipped_mean[..., None], policy=policy)
    late = probability(float(settled), clipped_mean=clipped_mean, policy=policy)
    return (early.sum(-1) + (steps - settled) * late) / steps


def dropped_regret(regret: Array, *, domain: Array, dropped: Array) -> Array:
    """E R_T of ``Capped`` or ``Gated``: the full carry's (``bounds.shadow_regret``) + R·(mean of what is dropped).

    R (``domain``) bounds ||x_t - eta·D_t - x*||; ``dropped`` is ``capped_bias`` or ``gated_average_bias``. The carry
    that enters ``regret`` may be bounded as for the full carry, since policies only shrink it.

    >>> float(dropped_regret(0.02, domain=2.0, dropped=0.001))
    0.022
    """
    owner = "dropped_regret"
    regret, domain, dropped = numbers(owner, regret=regret, domain=domain, dropped=dropped)
    nonnegative(owner, regret=regret, domain=domain, dropped=dropped)
    return regret + domain * dropped


def drip_share(steps: Array, *, policy: Drip | None = None) -> Array:
    """``Drip``: the part of a debt that is still unpaid after ``steps`` steps within the radius, (1 - rate)^steps.

    As long as updates stay within the radius, a debt is paid like an average with decay 1 - rate forgets: half of it
    after log(2)/rate steps, and 1/rate steps after it was made on average (23 and 33 at the default rate).

    >>> [float(round(drip_share(n), 3)) for n in (1, 23, 100)]
    [0.97, 0.496, 0.048]
    """
    (steps,) = numbers("drip_share", steps=steps)
    nonnegative("drip_share", steps=steps)
    return np.power(1.0 - (policy or Drip()).rate, steps)


def drip_carry_bound(*, radius: Array, policy: Drip | None = None) -> Array:
    """``Drip``: the carry never exceeds cap radii (1/rate of them by default), whatever the gradients are.

    >>> float(round(drip_carry_bound(radius=0.5), 2))
    16.67
    """
    (radius,) = numbers("drip_carry_bound", radius=radius)
    positive("drip_carry_bound", radius=radius)
    return (policy or Drip()).radii * radius


def drip_stationarity(
    *,
    steps: Array,
    lr: Array,
    smoothness: Array,
    gap: Array,
    gradient_norm: Array,
    moved_square: Array,
    radius: Array,
    dropped: Array = 0.0,
    policy: Drip | None = None,
) -> Array:
    """``Drip`` on a smooth f, not convex: a bound on the mean over t of E[usual_t·||grad f(x_t)||²].

    gap/(eta·T) + L·eta·q/2 + L·eta·M·C + (M + L·eta·C)·d: the first two are SGD's with the learning rate eta·usual_t,
    the third is the price of a carry of at most C = cap·gamma, the last that of what the cap drops.

    Args:
        steps: T.
        lr: eta, constant.
        smoothness: L.
        gap: f(x_1) - inf f.
        gradient_norm: M >= ||grad f(x_t)||.
        moved_square: q, mean over t of E||usual_t·g_t - drop_t||²; at most that of ||g_t||² where nothing is dropped.
        radius: gamma.
        dropped: d, mean over t of E||drop_t||; the metric ``dropped_norm`` adds it up.
        policy: ``Drip()`` by default.

    Conditions: usual_t known before g_t, as it is from the second step on: T counts from there, and x_1 is where it
    begins. (In the first step usual_t is the factor of g_t itself.)

    >>> at = dict(lr=0.001, smoothness=1.0, gap=1.0, gradient_norm=1.0, moved_square=2.0, radius=1.0)
    >>> float(round(drip_stationarity(steps=1e6, **at), 4))
    0.0353
    """
    owner, policy = "drip_stationarity", policy or Drip()
    steps, lr, smoothness, gap, norm, square, radius, dropped = numbers(
        owner,
        steps=steps,
        lr=lr,
        smoothness=smoothness,
        gap=gap,
        gradient_norm=gradient_norm,
        moved_square=moved_square,
        radius=radius,
        dropped=dropped,
    )
    positive(owner, steps=steps, lr=lr, smoothness=smoothness, radius=radius)
    nonnegative(owner, gap=gap, gradient_norm=norm, moved_square=square, dropped=dropped)
    carry = policy.radii * radius
    settled = gap / (lr * steps) + smoothness * lr * square / 2.0
    return settled + smoothness * lr * norm * carry + (norm + smoothness * lr * carry) * dropped


def shrunk_left(noise: Array, *, policy: Shrunk | None = None) -> Array:
    """``Shrunk``: the share of clipping's bias that is not given back, w·(1 + n)/(1 + w·n).

    n (``noise``) is the variance of a cut over the square of its mean, E||e - E e||²/||E e||², and w = 1/(2·memory - 1)
    the weight of one cut in the running mean's square. A ratio of means: right where noise spreads over many
    dimensions, so that ||carry||² and its noise level hardly vary; a guide in few.

    Conditions: settled, cuts independent and alike. Under a norm a cut is all that a step lacks, also what the last
    clip takes of the carry; by coordinates the update has to be within the radius.

    >>> shrunk_left([1.0, 10.0, 100.0, 1000.0]).round(3).tolist()
    [0.01, 0.053, 0.338, 0.835]
    """
    (noise,) = numbers("shrunk_left", noise=noise)
    nonnegative("shrunk_left", noise=noise)
    weight = 1.0 / (2.0 * (policy or Shrunk()).memory - 1.0)
    return weight * (1.0 + noise) / (1.0 + weight * noise)


def shrunk_noise(dimension: Array) -> Array:
    """``Shrunk``: what is paid where there is no bias at all: E[h·||carry||²] <= E[noise level²]/sqrt(2·d).

    d is the dimension in which the cuts spread, tr(S)²/tr(S²) for their covariance S. *Whether* anything is paid is
    close to a coin's toss in many dimensions; *how much* vanishes like 1/sqrt(d).

    Conditions: cuts independent in time, of mean 0 and one covariance; dimension >= 1.

    >>> shrunk_noise([1.0, 200.0, 20_000.0]).round(3).tolist()
    [0.707, 0.05, 0.005]
    """
    (dimension,) = numbers("shrunk_noise", dimension=dimension)
    need("shrunk_noise", "dimension >= 1", dimension >= 1.0, dimension=dimension)
    return 1.0 / np.sqrt(2.0 * dimension)
