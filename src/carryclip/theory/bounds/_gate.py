"""What can be proved of ``Gated``: a bound without conditions, how soon the gate shuts, and how rarely without need."""

import math

import numpy as np

from carryclip.carry import Gated
from carryclip.theory.bounds._conditions import Array, need, nonnegative, numbers, positive, step


def gated_carry_bound(*, radius: Array, policy: Gated | None = None) -> Array:
    """Under ``Gated`` the carry (its norm, or each coordinate) never exceeds cap radii, whatever the gradients are.

    The radius is that of the last step.

    >>> float(gated_carry_bound(radius=0.5))
    50.0
    """
    (radius,) = numbers("gated_carry_bound", radius=radius)
    positive("gated_carry_bound", radius=radius)
    return (policy or Gated()).cap * radius


def gated_growth_steps(*, feed: Array = 1.0, average: Array = -1.0, policy: Gated | None = None) -> Array:
    """The most steps in which the carry can still grow once every feed is at least ``feed``, whatever came before.

    The whole numbers up to log((feed - average)/(feed - threshold))/log(1/decay): that long an average of the past can
    hold the gate open. So gradients of at least a radius in the carry's direction (a feed of 1) wind it up for 137
    steps at the defaults, and for 68 if the average is not negative.

    Args:
        feed: least feed from some step on, above the threshold.
        average: least the debiased average of the feed can be before that; -1 is any history.
        policy: ``Gated()`` by default.

    Conditions: any region, any radii; threshold < feed <= 1, -1 <= average <= 1.

    >>> gated_growth_steps(average=[-1.0, 0.0, 0.5]).tolist()
    [137.0, 68.0, 0.0]
    """
    owner, policy = "gated_growth_steps", policy or Gated()
    feed, average = numbers(owner, feed=feed, average=average)
    above = f"threshold = {policy.threshold:g} < feed <= 1"
    need(owner, above, (feed > policy.threshold) & (feed <= 1.0), feed=feed)
    need(owner, "-1 <= average <= 1", np.abs(average) <= 1.0, average=average)
    if policy.decay == 0.0:
        return np.zeros(feed.shape)[()]
    missing = np.maximum(feed - average, feed - policy.threshold) / (feed - policy.threshold)
    # A hair more than the quotient: where it is a whole number, rounding may hold the gate open for that step too.
    return np.floor(np.log(missing) / -math.log(policy.decay) * (1.0 + 1e-12))


def gate_open(steps: Array = math.inf, *, clipped_mean: Array, policy: Gated | None = None) -> Array:
    """Probability that the gate is open although the mean gradient has fed the carry for ``steps`` steps.

    At most exp(-(c - (1 + c)·d^n - threshold)²/(2w)) for n steps and decay d, where c (``clipped_mean``) is the least
    mean of the plainly clipped gradient in the carry's direction, sign(D_t)·E[clip(g_t, gamma) | past] >= c·gamma, and
    the carry was never 0 in these steps. The feed's average has at least the mean c - (1 + c)·d^n, whatever came
    before; w is as in ``gate_shut``, at t = n. It is 1 where that mean is below the threshold.

    Conditions: component-wise clipping, threshold < c <= 1.

    >>> [f"{p:.3f}" for p in gate_open([100, 300, 1000], clipped_mean=0.8)]
    ['1.000', '0.018', '0.000']
    """
    owner, policy = "gate_open", policy or Gated()
    steps, mean = numbers(owner, steps=steps, clipped_mean=clipped_mean)
    need(owner, "steps >= 1", steps >= 1.0, steps=steps)
    above = f"threshold = {policy.threshold:g} < clipped_mean <= 1"
    need(owner, above, (mean > policy.threshold) & (mean <= 1.0), clipped_mean=mean)
    surplus = np.maximum(mean - (1.0 + mean) * np.power(policy.decay, steps) - policy.threshold, 0.0)
    return np.exp(-(surplus**2) / (2.0 * _squared_weights(steps, policy)))


def gate_shut(t: Array = math.inf, *, clipped_mean: Array, policy: Gated | None = None) -> Array:
    """Probability that the gate is shut at step t: at most exp(-(threshold - c)²/(2w)).

    c (``clipped_mean``) bounds the mean of the plainly clipped gradient given the past, |E[clip(g_t, gamma) | past]| <=
    c·gamma, at every step: the feed's average has at most that mean, so only a deviation of threshold - c can shut the
    gate. w is the sum of its squared weights, (1 - d)(1 + d^t)/((1 + d)(1 - d^t)) for decay d: 0.005 at 0.99 in the
    long run.

    Conditions: component-wise clipping, constant radius, 0 <= c < threshold. For a norm, c must bound the mean of the
    gradient's clipped part along every direction e, E[clip(<g_t, e>, gamma) | past] <= c·gamma: ||gbar_t||/gamma does
    where the noise is symmetric.

    >>> f"{gate_shut(clipped_mean=0.2):.1e}"
    '1.3e-04'
    """
    owner, policy = "gate_shut", policy or Gated()
    t, mean = numbers(owner, t=t, clipped_mean=clipped_mean)
    step(owner, t)
    nonnegative(owner, clipped_mean=mean)
    need(owner, f"clipped_mean < threshold = {policy.threshold:g}", mean < policy.threshold, clipped_mean=mean)
    return np.exp(-((policy.threshold - mean) ** 2) / (2.0 * _squared_weights(t, policy)))


def gated_bias(
    t: Array = math.inf,
    *,
    clipped_mean: Array,
    gradient_bound: Array,
    radius: Array,
    rate: Array,
    policy: Gated | None = None,
) -> Array:
    """|E u_t + E D_{t+1} - E D_t - E g_t|, the mean of what ``Gated`` drops at step t.

    (G - gamma)·P(gate shut) + 2·exp(-theta·cap·gamma)/theta: the first term for a shut gate, which drops at most what
    the gradient exceeds the radius by, the second for the cap, with theta from ``lundberg_rate``.

    Conditions: those of ``gate_shut`` and ``lundberg_tail``; gradient_bound >= radius.

    >>> f"{gated_bias(clipped_mean=0.0, gradient_bound=5.0, radius=1.0, rate=0.2):.1e}"
    '2.1e-08'
    """
    owner, policy = "gated_bias", policy or Gated()
    bound, radius, rate, t, clipped_mean = numbers(
        owner, gradient_bound=gradient_bound, radius=radius, rate=rate, t=t, clipped_mean=clipped_mean
    )
    positive(owner, radius=radius, rate=rate)
    need(owner, "gradient_bound >= radius", bound >= radius, gradient_bound=bound, radius=radius)
    shut = gate_shut(t, clipped_mean=clipped_mean, policy=policy)
    return (bound - radius) * shut + 2.0 * np.exp(-rate * policy.cap * radius) / rate  # 0 where nothing is clipped


def _squared_weights(t: np.ndarray, policy: Gated) -> np.ndarray:
    """Sum of the squared weights in a debiased average of t feeds."""
    past = np.power(policy.decay, t)
    return (1.0 - policy.decay) * (1.0 + past) / ((1.0 + policy.decay) * (1.0 - past))
