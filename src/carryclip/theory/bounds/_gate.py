"""What can be proved of ``Gated``: a bound without conditions, and how rarely the gate shuts when it should not."""

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


def gate_shut(t: Array = math.inf, *, clipped_mean: Array, policy: Gated | None = None) -> Array:
    """Probability that the gate is shut at step t: at most exp(-(threshold - c)²/(2w)).

    c (``clipped_mean``) bounds the mean of the plainly clipped gradient given the past, |E[clip(g_t, gamma) | past]| <=
    c·gamma, at every step: the feed's average has at most that mean, so only a deviation of threshold - c can shut the
    gate. w is the sum of its squared weights, (1 - d)(1 + d^t)/((1 + d)(1 - d^t)) for decay d: 0.005 at 0.99 in the
    long run.

    Conditions: component-wise clipping, constant radius, 0 <= c < threshold.

    >>> f"{gate_shut(clipped_mean=0.2):.1e}"
    '1.3e-04'
    """
    owner, policy = "gate_shut", policy or Gated()
    t, mean = numbers(owner, t=t, clipped_mean=clipped_mean)
    step(owner, t)
    nonnegative(owner, clipped_mean=mean)
    need(owner, f"clipped_mean < threshold = {policy.threshold:g}", mean < policy.threshold, clipped_mean=mean)
    past = np.power(policy.decay, t)
    weights = (1.0 - policy.decay) * (1.0 + past) / ((1.0 + policy.decay) * (1.0 - past))
    return np.exp(-((policy.threshold - mean) ** 2) / (2.0 * weights))


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
