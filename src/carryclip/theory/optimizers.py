"""The carry before and after what optimizers do: minibatches, momentum, Adam's normaliser, clipping of the step itself.

Proofs are in docs/theory/optimizers. Arguments may be arrays and broadcast; outside its conditions a function raises
``carryclip.theory.bounds.OutsideConditionsError``.
"""

import numpy as np

from carryclip.theory.bounds._conditions import Array, above_mean, need, nonnegative, numbers, positive
from carryclip.theory.bounds._moment import second_moment_average
from carryclip.theory.radii import rms_average


def batch_average(batch: Array, *, alpha: Array, variance: Array, workers: Array = 1) -> Array:
    """Time average of E||D_t|| for gradients that are means of ``batch`` samples, at a fixed margin.

    v/(2·b·a) + a/2 with a = min(alpha, sqrt(v/b)): ``second_moment_average`` with the variance v/b. If each of k
    ``workers`` clips its own part of the batch before they are averaged, the mean of their carries has the variance of
    b/k samples in it: k times as much. Average first.

    Args:
        batch: samples in all.
        alpha: margin.
        variance: v >= E||xi||² of one sample.
        workers: that clip before averaging; 1 if the mean is clipped.

    >>> [float(round(batch_average(b, alpha=0.1, variance=1.0), 3)) for b in (1, 4, 16, 64)]
    [5.05, 1.3, 0.362, 0.128]
    """
    owner = "batch_average"
    batch, alpha, variance, workers = numbers(owner, batch=batch, alpha=alpha, variance=variance, workers=workers)
    need(owner, "batch >= workers >= 1", (workers >= 1.0) & (batch >= workers), batch=batch, workers=workers)
    above_mean(owner, alpha)
    nonnegative(owner, variance=variance)
    return second_moment_average(alpha=alpha, variance=variance * workers / batch)


def momentum_carry(*, momentum: Array, radius: Array, carry: Array) -> Array:
    """What stands for the mean carry in ``shadow_regret`` and ``nonconvex.with_margin`` under momentum.

    beta·gamma/(1 - beta) + E||D||: with m_t = beta·m_{t-1} + (1 - beta)·u_t and x_{t+1} = x_t - eta·m_t the point
    x_t - eta·beta/(1 - beta)·m_{t-1} - eta·D_t moves by -eta·g_t, exactly.

    Args:
        momentum: beta.
        radius: largest norm of an update: gamma for a norm and for one coordinate, sqrt(d)·gamma for d coordinates.
        carry: mean over t of E||D_t||.

    >>> float(round(momentum_carry(momentum=0.9, radius=1.0, carry=2.0), 6))
    11.0
    """
    owner = "momentum_carry"
    momentum, radius, carry = numbers(owner, momentum=momentum, radius=radius, carry=carry)
    _momentum(owner, momentum)
    nonnegative(owner, radius=radius, carry=carry)
    return momentum * radius / (1.0 - momentum) + carry


def momentum_gap(*, momentum: Array, largest_carry: Array) -> Array:
    """How far the momentum buffer of the updates can be from that of raw gradients: 2·(1 - beta)·max||D||.

    >>> float(round(momentum_gap(momentum=0.9, largest_carry=5.0), 6))
    1.0
    """
    owner = "momentum_gap"
    momentum, carry = numbers(owner, momentum=momentum, largest_carry=largest_carry)
    _momentum(owner, momentum)
    nonnegative(owner, largest_carry=carry)
    return 2.0 * (1.0 - momentum) * carry


def rate_factor(*, gradient_rms: Array, update_rms: Array) -> Array:
    """The factor by which the full carry raises the learning rate of Adam and its like: rms(g)/rms(u).

    Adam divides by the root mean square of what it is given, and the carry makes that smaller without making the sum
    smaller: U-Clip before Adam with rate eta behaves as Adam on raw gradients with eta times this. Both are averages of
    the metrics ``grad_norm``² and ``update_norm``². Not a theorem as a whole: docs/theory/optimizers has what is
    proved.

    >>> float(rate_factor(gradient_rms=3.0, update_rms=1.0))
    3.0
    """
    owner = "rate_factor"
    gradient, update = numbers(owner, gradient_rms=gradient_rms, update_rms=update_rms)
    positive(owner, gradient_rms=gradient, update_rms=update)
    return gradient / update


def step_average(*, lr: Array, multiple: Array = 2.0) -> Array:
    """Time average of E|e| in each coordinate where the *step* of Adam or RMSProp is clipped at ``multiple``·eta.

    At most eta from 2·eta on: the normalised step has a root mean square of at most eta, so ``rms_average`` applies
    whatever the gradient's size, mean or tails. Conditions: the normaliser is the true second moment given the past, or
    more; Adam's own is an estimate of it. No momentum. multiple > 1.

    >>> float(step_average(lr=0.001))
    0.001
    """
    owner = "step_average"
    lr, multiple = numbers(owner, lr=lr, multiple=multiple)
    positive(owner, lr=lr)
    return rms_average(multiple, rms=lr)


def waiting(*, mean_carry: Array, mass: Array) -> Array:
    """How many steps a unit of gradient waits on average: E|D| over the mass that is carried per step (Little's law).

    Conditions: settled, one coordinate, a carry that keeps its sign (masses of both signs cancel instead of waiting).

    >>> float(waiting(mean_carry=4.0, mass=0.5))
    8.0
    """
    owner = "waiting"
    carry, mass = numbers(owner, mean_carry=mean_carry, mass=mass)
    nonnegative(owner, mean_carry=carry)
    positive(owner, mass=mass)
    return carry / mass


def _momentum(owner: str, momentum: np.ndarray) -> None:
    need(owner, "0 <= momentum < 1", (momentum >= 0.0) & (momentum < 1.0), momentum=momentum)
