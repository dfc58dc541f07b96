"""The delay law: how many steps of gradients the full carry mixes into an update under a norm.

The full carry makes of norm clipping an exponential average of gradients, whose length the radius sets. With sums
s_t = g_t + D_t beyond the radius r the update is (r/|s_t|)·s_t and the new carry (1 - r/|s_t|)·s_t, so that
s_{t+1} = g_{t+1} + (1 - r/|s_t|)·s_t: a momentum of 1 - r/|s_t|. The mean of |s_t|/r is the delay.

All functions take the root mean square of the gradient's norm, noise included (``gradient_rms``), and may be told the
norm of the mean gradient. Arguments may be arrays and broadcast; outside its conditions a function raises
``carryclip.theory.bounds.OutsideConditionsError``.
"""

import numpy as np

from carryclip.theory.bounds._conditions import Array, need, nonnegative, numbers, positive


def steps(*, gradient_rms: Array, radius: Array, mean_gradient: Array = 0.0) -> Array:
    """The delay, |s|/r: (1 + (G² - m²)/(r² - m²))/2 where that is above 1, and 1 otherwise.

    G is ``gradient_rms``, r the radius and m the norm of the mean gradient; with m = 0 it is (1 + (G/r)²)/2. At 1 a
    gradient is sent at once; in general its parts are delay - 1 steps old on average when they are sent.

    The law is about one norm over many coordinates, the full carry, and gradients whose noise is independent in time.
    For m = 0 the time average of E|s_t|/r is at most (1 + (G/r)²)/2 and, once settled, at least (G/r)²/2, in any
    dimension and for one coordinate of component-wise clipping.

    Conditions: radius > mean_gradient (the carry winds up otherwise), gradient_rms >= mean_gradient.

    >>> steps(gradient_rms=[0.5, 1.0, 3.0, 10.0], radius=1.0).tolist()
    [1.0, 1.0, 5.0, 50.5]
    """
    owner = "delay.steps"
    rms, radius, mean = numbers(owner, gradient_rms=gradient_rms, radius=radius, mean_gradient=mean_gradient)
    positive(owner, radius=radius)
    _mean_below(owner, rms, mean)
    why = "the carry winds up otherwise"
    need(owner, f"radius > mean_gradient ({why})", radius > mean, radius=radius, mean_gradient=mean)
    with np.errstate(over="ignore"):
        # Factors of differences of squares, so that nothing cancels where the radius is close to the mean gradient.
        ratio = (rms - mean) / (radius - mean) * ((rms + mean) / (radius + mean))
    return np.maximum(0.5 + 0.5 * ratio, 1.0)


def momentum(*, gradient_rms: Array, radius: Array, mean_gradient: Array = 0.0) -> Array:
    """The momentum that has the same memory, 1 - 1/delay; 0 where all is sent at once.

    Updates lag steps apart correlate as this to the power of lag. Conditions: those of ``steps``.

    >>> momentum(gradient_rms=[1.0, 3.0, 19**0.5], radius=1.0).round(3).tolist()
    [0.0, 0.8, 0.9]
    """
    return 1.0 - 1.0 / steps(gradient_rms=gradient_rms, radius=radius, mean_gradient=mean_gradient)


def radius(*, steps: Array, gradient_rms: Array, mean_gradient: Array = 0.0) -> Array:
    """The radius for a delay of ``steps``: sqrt(m² + (G² - m²)/(2·steps - 1)), the law solved for r.

    Conditions: steps >= 1, gradient_rms >= mean_gradient.

    >>> radius(steps=[1.0, 2.0, 10.0, 100.0], gradient_rms=1.0).round(3).tolist()
    [1.0, 0.577, 0.229, 0.071]
    """
    owner = "delay.radius"
    wanted, rms, mean = numbers(owner, steps=steps, gradient_rms=gradient_rms, mean_gradient=mean_gradient)
    need(owner, "steps >= 1 (1 is sent at once)", wanted >= 1.0, steps=wanted)
    _mean_below(owner, rms, mean)
    # hypot and factors, because squares of tiny or huge gradients leave the range of floats.
    return np.hypot(mean, np.sqrt((rms - mean) / (2.0 * wanted - 1.0)) * np.sqrt(rms + mean))


def _mean_below(owner: str, rms: np.ndarray, mean: np.ndarray) -> None:
    nonnegative(owner, gradient_rms=rms, mean_gradient=mean)
    need(owner, "gradient_rms >= mean_gradient", rms >= mean, gradient_rms=rms, mean_gradient=mean)
