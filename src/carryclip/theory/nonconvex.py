"""Smooth objectives that are not convex: how fast the gradient vanishes, with a margin, without one, and exactly.

Setting: f is L-smooth (``smoothness``), f(x_1) - inf f <= ``gap``, x_{t+1} = x_t - eta·u_t with constant eta (``lr``),
T ``steps``. Proofs are in docs/theory/nonconvex. Arguments may be arrays and broadcast; outside its conditions a
function raises ``carryclip.theory.bounds.OutsideConditionsError``.
"""

import math
from collections.abc import Callable

import numpy as np

from carryclip.theory.bounds._conditions import Array, above_mean, need, nonnegative, numbers, positive
from carryclip.theory.bounds._moment import second_moment_average


def with_margin(
    *, steps: Array, lr: Array, smoothness: Array, gap: Array, gradient_norm: Array, alpha: Array, variance: Array
) -> Array:
    """Mean over t of E||grad f(x_t)||² with the full carry and a margin; heavy tails, any convex region.

    (gap/(eta·T) + L·eta·v/2 + L·eta·M·c)/(1 - L·eta/2), with c = v/(2·alpha) + alpha/2 by ``second_moment_average``.

    Args:
        steps: T.
        lr: eta < 2/L.
        smoothness: L.
        gap: f(x_1) - inf f.
        gradient_norm: M >= ||grad f(x_t)|| on the way.
        alpha: margin: the region contains the ball of radius alpha around grad f(x_t).
        variance: v >= E||xi_t||², of the whole vector.

    >>> at = dict(steps=10_000, lr=0.01, smoothness=1.0, gap=1.0, gradient_norm=1.0, variance=1.0)
    >>> float(round(with_margin(alpha=0.5, **at), 4))
    0.0276
    """
    owner = "with_margin"
    steps, lr, smoothness, gap, norm, alpha, variance = numbers(
        owner,
        steps=steps,
        lr=lr,
        smoothness=smoothness,
        gap=gap,
        gradient_norm=gradient_norm,
        alpha=alpha,
        variance=variance,
    )
    _smooth(owner, steps, lr, smoothness, gap)
    need(owner, "lr < 2/smoothness", lr * smoothness < 2.0, lr=lr, smoothness=smoothness)
    above_mean(owner, alpha)
    nonnegative(owner, gradient_norm=norm, variance=variance)
    carry = second_moment_average(alpha=alpha, variance=variance)
    price = smoothness * lr * (variance / 2.0 + norm * carry)
    return (gap / (lr * steps) + price) / (1.0 - smoothness * lr / 2.0)


def exact_gradients(*, steps: Array, lr: Array, smoothness: Array, gap: Array, radius: Array) -> Array:
    """The smallest ||grad f(x_t)||² up to T with exact gradients, the full carry and *any* radius: D/(T - 2·D/gamma²).

    D = gap/(eta·(1 - L·eta/2)). All but 2·D/gamma² steps are plain gradient descent, whose bound is D/T. It is infinite
    as long as T does not exceed that number of steps.

    Conditions: eta < 2/L, gamma > 0: for a box or a ball of this radius, or any region that contains that ball.

    >>> at = dict(lr=0.1, smoothness=1.0, gap=1.0)
    >>> [float(round(exact_gradients(steps=1000, radius=r, **at), 5)) for r in (0.1, 0.2, 10.0)]
    [inf, 0.02222, 0.01053]
    """
    owner = "exact_gradients"
    steps, lr, smoothness, gap, radius = numbers(
        owner, steps=steps, lr=lr, smoothness=smoothness, gap=gap, radius=radius
    )
    budget = _budget(owner, steps, lr, smoothness, gap)
    positive(owner, radius=radius)
    left = steps - 2.0 * budget / radius**2
    return np.where(left > 0.0, budget / np.where(left > 0.0, left, 1.0), math.inf)[()]


def clipped_steps(*, lr: Array, smoothness: Array, gap: Array, radius: Array) -> Array:
    """The most steps that are clipped with exact gradients, whatever the policy: gap/(eta·(1 - L·eta/2)·gamma²).

    Any policy that keeps a part of what was cut: full, none, ``Capped``, ``Leaky``, ``Gated``. Conditions: as for
    ``exact_gradients``.

    >>> float(round(clipped_steps(lr=0.1, smoothness=1.0, gap=1.0, radius=0.5), 2))
    42.11
    """
    owner = "clipped_steps"
    lr, smoothness, gap, radius = numbers(owner, lr=lr, smoothness=smoothness, gap=gap, radius=radius)
    budget = _budget(owner, np.asarray(1.0), lr, smoothness, gap)
    positive(owner, radius=radius)
    return budget / radius**2


def free_cap(*, radius: Array, noise_bound: Array, proxy: Array, steps: Array) -> Array:
    """The cap, in radii, that costs nothing in ``any_radius``: (2·B + (4·s²/gamma)·log T)/gamma.

    For ``Capped``, coordinate by coordinate. Conditions: as for ``any_radius``.

    >>> float(round(free_cap(radius=1.0, noise_bound=2.0, proxy=1.0, steps=10_000), 2))
    40.84
    """
    owner = "free_cap"
    radius, bound, proxy, steps = numbers(owner, radius=radius, noise_bound=noise_bound, proxy=proxy, steps=steps)
    _noise(owner, radius, bound, proxy, steps)
    return (2.0 * bound + 4.0 * proxy / radius * np.log(steps)) / radius


def any_radius(
    *,
    steps: Array,
    lr: Array,
    smoothness: Array,
    gap: Array,
    radius: Array,
    noise_bound: Array,
    proxy: Array,
    dimension: Array = 1,
) -> Array:
    """Mean over t of E||clip(grad f(x_t), gamma)||², component-wise, with noise, for *any* radius: no margin.

    (3/2)·(gap/(eta·T) + d·gamma·(R + 2·p)/T + eta·L·d·gamma·(gamma/2 + R + p) + 8·d·s²/T), with
    R = 2·B + (4·s²/gamma)·log T and p = (4·s²/gamma)·log(1 + exp(-R·gamma/(4·s²))): of the order of
    sqrt(L·gap·d·s²·log(T)/T) at the best eta. Where ||clip(grad f)|| < gamma it is the gradient itself, so that a
    random iterate is nearly stationary. It holds for the full carry and for ``Capped(k)`` with k >= ``free_cap``.

    Args:
        steps: T >= 2.
        lr: eta.
        smoothness: L.
        gap: f(x_1) - inf f.
        radius: gamma, constant.
        noise_bound: B >= |xi_t,i|.
        proxy: variance proxy s² of each xi_t,i given the past.
        dimension: d.

    >>> at = dict(smoothness=1.0, gap=1.0, radius=0.1, noise_bound=1.0, proxy=0.25)
    >>> [float(round(any_radius(steps=T, lr=0.3 / T**0.5, **at), 3)) for T in (1e4, 1e6, 1e8)]
    [0.094, 0.011, 0.001]
    """
    owner = "any_radius"
    steps, lr, smoothness, gap, radius, bound, proxy, dimension = numbers(
        owner,
        steps=steps,
        lr=lr,
        smoothness=smoothness,
        gap=gap,
        radius=radius,
        noise_bound=noise_bound,
        proxy=proxy,
        dimension=dimension,
    )
    _smooth(owner, steps, lr, smoothness, gap)
    _noise(owner, radius, bound, proxy, steps)
    need(owner, "dimension >= 1", dimension >= 1.0, dimension=dimension)
    width = 4.0 * proxy / radius
    reach = 2.0 * bound + width * np.log(steps)
    start = width * np.log1p(np.exp(-reach / width))
    once = dimension * (radius * (reach + 2.0 * start) + 8.0 * proxy) / steps
    drift = lr * smoothness * dimension * radius * (radius / 2.0 + reach + start)
    return 1.5 * (gap / (lr * steps) + once + drift)


def any_norm_radius(
    *, steps: Array, lr: Array, smoothness: Array, gap: Array, radius: Array, gradient_norm: Array, noise_bound: Array
) -> Array:
    """Mean over t of E min(||grad f(x_t)||, gamma)² for norm clipping with noise and *any* radius; no dimension.

    1.2·(gap/(eta·T) + eta·L·gamma·(gamma/2 + R + p) + gamma·(R + 2·p + 2.3·Q)/T), where Q = M + B + gamma,
    R = (64·Q²/gamma)·(1 + log T) + Q and p = (64·Q²/gamma)·log(1 + exp(-R·gamma/(64·Q²))). The constants are
    the proof's, far from sharp. For the full carry.

    Args:
        steps: T >= 2.
        lr: eta.
        smoothness: L.
        gap: f(x_1) - inf f.
        radius: gamma, constant.
        gradient_norm: M >= ||grad f(x_t)|| on the way.
        noise_bound: B >= ||xi_t||.

    >>> at = dict(smoothness=1.0, gap=1.0, radius=1.0, gradient_norm=2.0, noise_bound=1.0)
    >>> [float(round(any_norm_radius(steps=T, lr=0.01 / T**0.5, **at), 3)) for T in (1e6, 1e8)]
    [0.32, 0.036]
    """
    owner = "any_norm_radius"
    steps, lr, smoothness, gap, radius, norm, bound = numbers(
        owner,
        steps=steps,
        lr=lr,
        smoothness=smoothness,
        gap=gap,
        radius=radius,
        gradient_norm=gradient_norm,
        noise_bound=noise_bound,
    )
    _smooth(owner, steps, lr, smoothness, gap)
    nonnegative(owner, gradient_norm=norm)
    _noise(owner, radius, bound, np.ones_like(radius), steps)
    largest = norm + bound + radius
    width = 64.0 * largest**2 / radius
    reach = width * (1.0 + np.log(steps)) + largest
    start = width * np.log1p(np.exp(-reach / width))
    drift = lr * smoothness * radius * (radius / 2.0 + reach + start)
    return 1.2 * (gap / (lr * steps) + drift + radius * (reach + 2.0 * start + 2.3 * largest) / steps)


def turning_points(function: Callable[[float], float], start: float, *, radius: float, count: int = 5) -> list[float]:
    """Where the full carry turns round in one dimension without noise, for small learning rates; ``start`` comes first.

    Between two turning points f falls by radius times their distance: the law of wind-up. On h·x²/2 each is
    2·radius/h nearer to the optimum than the one before; where f is flatter on the other side it is further away. Stops
    early where the path settles.

    Args:
        function: f, bounded from below, with one minimum at 0.
        start: where the path begins; its carry is 0.
        radius: gamma.
        count: how many turning points to give.

    >>> [round(x, 6) for x in turning_points(lambda x: x**2, 10.0, radius=1.0)]
    [10.0, -9.0, 8.0, -7.0, 6.0]
    """
    if not radius > 0.0:
        raise ValueError(f"turning_points: radius must be above 0, got {radius!r}.")
    points = [float(start)]
    while len(points) < count:
        here = points[-1]
        side = -math.copysign(1.0, here)

        def left(size: float, here: float = here, side: float = side) -> float:
            """What f still has to fall, at a distance ``size`` beyond the optimum."""
            return function(side * size) - function(here) + radius * (size + abs(here))

        if left(0.0) >= 0.0:
            break
        low, high = 0.0, abs(here)
        while left(high) < 0.0:
            high *= 2.0
            if math.isinf(high):
                raise ValueError("turning_points: the function falls without end; it must be bounded from below.")
        for _ in range(200):
            middle = (low + high) / 2.0
            low, high = (middle, high) if left(middle) < 0.0 else (low, middle)
        points.append(side * low)
    return points


def _smooth(owner: str, steps: Array, lr: Array, smoothness: Array, gap: Array) -> None:
    need(owner, "a finite number of steps, at least 1", (steps >= 1.0) & np.isfinite(steps), steps=steps)
    positive(owner, lr=lr, smoothness=smoothness)
    nonnegative(owner, gap=gap)


def _budget(owner: str, steps: Array, lr: Array, smoothness: Array, gap: Array) -> np.ndarray:
    """The most that all squared updates add up to."""
    _smooth(owner, steps, lr, smoothness, gap)
    need(owner, "lr < 2/smoothness", lr * smoothness < 2.0, lr=lr, smoothness=smoothness)
    return gap / (lr * (1.0 - smoothness * lr / 2.0))


def _noise(owner: str, radius: Array, bound: Array, proxy: Array, steps: Array) -> None:
    positive(owner, radius=radius, proxy=proxy)
    nonnegative(owner, noise_bound=bound)
    need(owner, "a finite number of steps, at least 2", (steps >= 2.0) & np.isfinite(steps), steps=steps)
