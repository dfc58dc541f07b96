"""Carry bounds for one recorded sequence of gradients: no probability, no model, any radius.

For one coordinate the carry is what a limiter of speed gamma leaves behind: within a factor 2 its largest size is the
most by which the gradients of any stretch of steps, added up, exceed the radii of that stretch. So gradients that were
recorded once tell how large the full carry would have been for *every* radius. Proofs are in docs/theory/paths.
"""

from typing import Any, NamedTuple

import numpy as np

from carryclip.theory.bounds._conditions import Array, above_mean, need, nonnegative, numbers, positive


class PathCarry(NamedTuple):
    """What ``path_carry`` finds; each coordinate by itself."""

    least: np.ndarray
    """The largest |carry| on the way was at least this, half of ``most``."""
    most: np.ndarray
    """And at most this."""
    above: np.ndarray
    """Bounds on the carry before each step and after the last, from above: axes (steps + 1, coordinates...)."""
    below: np.ndarray
    """Bounds on minus the carry, likewise."""


def path_carry(gradients: Any, radii: Any) -> PathCarry:
    """How large the full carry of component-wise clipping would have been, up to a factor 2.

    With W(t) the largest sum of g_i - gamma_i over the steps from any s to t - 1 (0 if all are negative), and the same
    of -g_i - gamma_i, D_t lies between -W₋(t) and W₊(t); and the largest of all W lies between max|D_t| and twice that.

    Args:
        gradients: recorded gradients, axes (steps, coordinates...).
        radii: a number, or an array that broadcasts against the gradients: (steps, 1) for a schedule.

    >>> path_carry([3.0, 0.0, -0.5, 0.0], 1.0).most.item()
    2.0
    >>> found = path_carry([-1.5, 1.5, 1.5], 0.5)  # the carry is -1, 0, 1
    >>> found.least.item(), found.most.item()
    (1.0, 2.0)
    """
    gradients, radii = _recorded("path_carry", gradients, radii)
    above, below = _excess(gradients - radii), _excess(-gradients - radii)
    most = np.maximum(above.max(0), below.max(0))
    return PathCarry(most / 2.0, most, above, below)


def path_curve(gradients: Any, radii: Any) -> np.ndarray:
    """``path_carry(...).most`` for each of several constant radii: axes (radii, coordinates...).

    >>> path_curve([3.0, 0.0, -0.5, 0.0], [0.5, 1.0, 5.0]).tolist()
    [2.5, 2.0, 0.0]
    """
    radii = np.atleast_1d(np.asarray(radii, float))
    return np.stack([path_carry(gradients, float(radius)).most for radius in radii])


def path_radius(gradients: Any, carry: Any) -> np.ndarray:
    """The smallest constant radius for which ``path_carry(...).most`` is at most ``carry``, coordinate by coordinate.

    With it the full carry stays within ``carry`` on these gradients; with less than the radius for twice the carry it
    does not. ``carry`` is in the units of the gradient.

    >>> float(round(path_radius([3.0, 0.0, 3.0, 0.0], 2.0).item(), 6))
    1.333333
    """
    gradients, carry = _recorded("path_radius", gradients, carry)
    limit = carry[0]
    low, high = np.zeros(gradients.shape[1:]), np.abs(gradients).max(0)
    for _ in range(60):
        middle = (low + high) / 2.0
        too_small = path_carry(gradients, middle[None]).most > limit
        low, high = np.where(too_small, middle, low), np.where(too_small, high, middle)
    return high


def age_certificate(*, carry: Array, age: Array, radius: Array) -> Array:
    """What the mean of the last ``age`` gradients was at least: radius + carry/age.

    A carry that has kept its sign for ``age`` steps is a proof of it: on such a stretch it grows by exactly g - gamma a
    step. So an old carry is wind-up, whatever the noise. For radii that change, the mean of those of the stretch.

    Conditions: full carry, one coordinate; carry is |D_t| and age the steps since it last was 0 or had the other sign.

    >>> float(age_certificate(carry=5.0, age=100, radius=1.0))
    1.05
    """
    owner = "age_certificate"
    carry, age, radius = numbers(owner, carry=carry, age=age, radius=radius)
    nonnegative(owner, carry=carry, radius=radius)
    need(owner, "age >= 1", age >= 1.0, age=age)
    return radius + carry / age


def window_carry(*, deviation: Array, alpha: Array) -> Array:
    """The largest |D_t|, if every stretch of j gradients adds up to j·mu up to ``deviation``·sqrt(j): A²/(4·alpha).

    Conditions: one coordinate, radii of at least |mu| + alpha, alpha > 0. Sharp.

    >>> float(window_carry(deviation=2.0, alpha=0.5))
    2.0
    """
    owner = "window_carry"
    deviation, alpha = numbers(owner, deviation=deviation, alpha=alpha)
    above_mean(owner, alpha)
    nonnegative(owner, deviation=deviation)
    return deviation**2 / (4.0 * alpha)


def comparator_carry(*, deviation: Array, alpha: Array, diameter: Array | None = None) -> Array:
    """The largest ||D_t|| for any convex region in any dimension: 2·r + (2·r·X - X²)/(2·alpha), X = min(r, diameter).

    r (``deviation``) bounds ||sum of (g_i - v_i)|| over i < t for every t, with any comparators v_t around which the
    region of step t contains a ball of radius alpha; ``diameter`` is the largest of the regions' (none by default: X =
    r).

    Conditions: alpha > 0. Without a margin there is no such bound for norms in two dimensions or more: gradients that
    go to and fro across the mean make the carry grow like the cube root of t.

    >>> float(comparator_carry(deviation=5.0, alpha=0.1, diameter=2.0))
    90.0
    """
    owner = "comparator_carry"
    deviation, alpha = numbers(owner, deviation=deviation, alpha=alpha)
    above_mean(owner, alpha)
    nonnegative(owner, deviation=deviation)
    used = deviation
    if diameter is not None:
        deviation, alpha, diameter = numbers(owner, deviation=deviation, alpha=alpha, diameter=diameter)
        positive(owner, diameter=diameter)
        used = np.minimum(deviation, diameter)
    return 2.0 * deviation + (2.0 * deviation * used - used**2) / (2.0 * alpha)


def comparator_average(*, mean_square: Array, alpha: Array) -> Array:
    """The average of ||D_t|| on the way: the mean of ||sum of (g_i - v_i)||² over t, over 2·alpha.

    Conditions: those of ``comparator_carry``.

    >>> float(comparator_average(mean_square=4.0, alpha=0.5))
    4.0
    """
    owner = "comparator_average"
    mean_square, alpha = numbers(owner, mean_square=mean_square, alpha=alpha)
    above_mean(owner, alpha)
    nonnegative(owner, mean_square=mean_square)
    return mean_square / (2.0 * alpha)


def _excess(surplus: np.ndarray) -> np.ndarray:
    """W before each step and after the last: the running sum less its smallest value so far."""
    sums = np.concatenate([np.zeros((1, *surplus.shape[1:])), np.cumsum(surplus, axis=0)])
    return sums - np.minimum.accumulate(sums, axis=0)


def _recorded(owner: str, gradients: Any, other: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both as finite float arrays of one shape, steps first."""
    arrays = []
    for name, value in (("gradients", gradients), ("radii" if owner == "path_carry" else "carry", other)):
        try:
            array = np.asarray(value, float)
        except (TypeError, ValueError):
            raise TypeError(f"{owner}: {name} must be numbers, got {type(value).__name__}.") from None
        if not np.isfinite(array).all():
            raise ValueError(f"{owner}: {name} must be finite; leave out the steps that were skipped.")
        arrays.append(array)
    recorded, second = arrays
    if recorded.ndim == 0 or len(recorded) == 0:
        raise ValueError(f"{owner}: gradients must have an axis of steps, with one at least; got {gradients!r}.")
    if (second < 0.0).any():
        raise ValueError(f"{owner}: {'radii' if owner == 'path_carry' else 'carry'} must be at least 0.")
    try:
        return recorded, np.broadcast_to(second, recorded.shape)
    except ValueError:
        raise ValueError(
            f"{owner}: an array of shape {second.shape} does not go with gradients of shape {recorded.shape}; a "
            "schedule for several coordinates has shape (steps, 1)."
        ) from None
