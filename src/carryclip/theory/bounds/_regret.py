"""What the carry costs in regret: the gradient-transformation lemma, the convergence theorems, and a sharper way.

Setting: convex f_t on R^d, x_{t+1} = x_t - eta·u_t without projection, average regret R_T = (1/T)·sum of f_t(x_t) -
f_t(x*). ``distance`` is ||x_1 - x*||, ``lr`` is eta, ``steps`` is T. The f_t and x* are fixed before the noise is
drawn, and E||g_t||² is finite. All of it is for the full carry: a policy that drops part of what was cut is biased, and
no bound on its carry says by how much (``carryclip.theory.policies`` does).
"""

import math

import numpy as np

from carryclip.theory.bounds._carry import geometric_sum
from carryclip.theory.bounds._conditions import (
    Array,
    Form,
    above_mean,
    form_is,
    need,
    nonnegative,
    numbers,
    positive,
    probability,
)
from carryclip.theory.bounds._moment import second_moment_average


def transformation_mean(
    *,
    steps: Array,
    lr: Array,
    distance: Array,
    carry: Array,
    update: Array,
    update_square: Array | None = None,
    form: Form = "corrected",
) -> Array:
    """E R_T by item 1 of the gradient-transformation lemma, from a bound on the carry's expectation.

    2·eta·D·mean(Gamma_t) + (eta/2)·mean(Gamma_t²) + ||x_1 - x*||²/(2·eta·T) + D·||x_1 - x*||/T, where E||D_t|| <= D
    (``carry``) up to t = T + 1 and ||u_t|| <= Gamma_t. Both forms are this: the statement holds, with filtrations
    instead of conditioning on x_1, ..., x_T in its proof. ``shadow_regret`` is sharper.

    Args:
        steps: T.
        lr: eta.
        distance: ||x_1 - x*||.
        carry: bound on E||D_t||.
        update: mean over t of the bounds Gamma_t on ||u_t||.
        update_square: mean of their squares; by default ``update`` squared (constant Gamma).
        form: both are the same here.

    >>> float(round(transformation_mean(steps=10_000, lr=0.01, distance=1.0, carry=2.0, update=1.0), 4))
    0.0502
    """
    owner = "transformation_mean"
    form_is(owner, form)
    return _transformation(owner, steps, lr, distance, carry, update, update_square)


def transformation_quantile(
    delta: Array,
    *,
    steps: Array,
    lr: Array,
    distance: Array,
    carry: Array,
    update: Array,
    domain: Array,
    sigma: Array,
    update_square: Array | None = None,
    form: Form = "corrected",
) -> Array:
    """What R_T stays below with probability 1 - 2·delta, by item 2 of the gradient-transformation lemma.

    Item 1 plus a term for the noise: sqrt(2)·R·sigma·log(2/delta)/sqrt(T) as printed, R·sigma·sqrt(2·log(1/delta)/T)
    corrected (Azuma, one side). ``domain`` is R >= ||x_t - x*||, ``sigma``² a variance proxy of the noise *vector* in
    every direction: E[exp(<z, xi_t>) | past] <= exp(||z||²·sigma²/2) for every vector z.

    Conditions: ``carry`` must bound ||D_t|| for all t <= T + 1 *at once* with probability 1 - delta. The paper asks
    it for each t by itself, and that is not enough. One coordinate: ``walk_quantile(delta / (T + 1), ...)`` does, by
    adding up the T + 1 probabilities. x* must not depend on the noise.

    >>> arguments = dict(steps=10_000, lr=0.01, distance=1.0, carry=2.0, update=1.0, domain=1.0, sigma=1.0)
    >>> float(round(transformation_quantile(0.01, **arguments), 4))
    0.0805
    >>> float(round(transformation_quantile(0.01, form="printed", **arguments), 4))
    0.1251
    """
    owner = "transformation_quantile"
    delta, domain, sigma = numbers(owner, delta=delta, domain=domain, sigma=sigma)
    probability(owner, delta)
    nonnegative(owner, domain=domain, sigma=sigma)
    bound = _transformation(owner, steps, lr, distance, carry, update, update_square)
    level = math.log(2.0) - np.log(delta) if form_is(owner, form) else np.sqrt(-np.log(delta))
    return bound + domain * sigma * np.sqrt(2.0 / np.asarray(steps, float)) * level


def convergence(
    *,
    steps: Array,
    distance: Array,
    alpha: Array,
    gradient_bound: Array,
    radius: Array,
    dimension: Array = 1,
    mean_radius: Array | None = None,
    mean_square_radius: Array | None = None,
    form: Form = "corrected",
) -> Array:
    """E R_T of U-Clip with eta = 1/sqrt(T): both convergence theorems for component-wise clipping.

    Printed: 8·G⁴·d^{3/2}·gbar/(alpha³·sqrt T) + (4(G + gamma_+)·sqrt(d)·gbar + d·g2 + ||x_1 - x*||²)/(2·sqrt T)
    + (4dG⁴/alpha³ + G + gamma_+)·||x_1 - x*||/T with gbar, g2 the means of gamma_t and gamma_t². Its union bound over
    coordinates is false, but its number holds, because E||D_t|| <= sum of E|D_t,i| <= 2dcG²/alpha (``carry_mean``); the
    corrected form puts that in, without the offset G + gamma_+.

    Args:
        steps: T.
        distance: ||x_1 - x*||.
        alpha: inf of gamma_t - |gbar_t|, above 0.
        gradient_bound: G, for each coordinate.
        radius: gamma, or the largest of the gamma_t, at most G.
        dimension: d.
        mean_radius: mean of gamma_t; by default the radius (the theorem for a constant one).
        mean_square_radius: mean of gamma_t²; by default radius·``mean_radius``, which it never exceeds.
        form: ``"printed"`` or ``"corrected"``.

    >>> arguments = dict(steps=10_000, distance=1.0, alpha=0.5, gradient_bound=1.0, radius=1.0)
    >>> float(round(convergence(form="printed", **arguments), 4)), float(round(convergence(**arguments), 4))
    (0.6934, 0.6138)
    """
    owner = "convergence"
    printed = form_is(owner, form)
    alpha, bound, radius, dimension = numbers(
        owner, alpha=alpha, gradient_bound=gradient_bound, radius=radius, dimension=dimension
    )
    above_mean(owner, alpha)
    positive(owner, gradient_bound=bound, radius=radius)
    need(owner, "dimension >= 1", dimension >= 1.0, dimension=dimension)
    need(owner, "radius <= gradient_bound", radius <= bound, radius=radius, gradient_bound=bound)
    need(owner, "alpha <= radius", alpha <= radius, alpha=alpha, radius=radius)
    if printed:
        carry = 4.0 * dimension * bound**4 / alpha**3 + bound + radius
    else:
        carry = dimension * 2.0 * geometric_sum(alpha**2 / (2.0 * bound**2)) * bound**2 / alpha
    return _by_lemma(owner, steps, distance, carry, dimension, radius, mean_radius, mean_square_radius)


def adaptive_convergence(
    *,
    steps: Array,
    distance: Array,
    beta: Array,
    min_variance: Array,
    gradient_bound: Array,
    largest_radius: Array | None = None,
    dimension: Array = 1,
    form: Form = "corrected",
) -> Array:
    """E R_T with radii |gbar_t| + beta·sigma_t² and eta = 1/sqrt(T): the theorem on adaptive clipping.

    Printed: 16·d^{3/2}·G/(beta³·sigma_min²·sqrt T) + (4(2 + beta)·sqrt(d)·G² + d·G² + ||x_1 - x*||²)/(2·sqrt T)
    + (8d/(beta³·sigma_min²) + (2 + beta)·G)·||x_1 - x*||/T. It takes gamma_t <= G "without loss of generality", which
    is true of constant radii only. The corrected form uses ``largest_radius`` in its place and 4d/(beta³·sigma_min²)
    for the carry.

    >>> arguments = dict(steps=10_000, distance=1.0, beta=0.5, min_variance=1.0, gradient_bound=2.0)
    >>> float(round(adaptive_convergence(form="printed", **arguments), 4))
    2.7919
    >>> float(round(adaptive_convergence(largest_radius=1.5, **arguments), 4))
    0.9794
    """
    owner = "adaptive_convergence"
    beta, variance, bound, dimension = numbers(
        owner, beta=beta, min_variance=min_variance, gradient_bound=gradient_bound, dimension=dimension
    )
    positive(owner, beta=beta, min_variance=variance, gradient_bound=bound)
    need(owner, "dimension >= 1", dimension >= 1.0, dimension=dimension)
    if form_is(owner, form):
        carry, radius = 8.0 * dimension / (beta**3 * variance) + (2.0 + beta) * bound, bound
    else:
        (radius,) = numbers(owner, largest_radius=largest_radius)
        positive(owner, largest_radius=radius)
        carry = 4.0 * dimension / (beta**3 * variance) + 0.0 * bound  # in the shape of all
    return _by_lemma(owner, steps, distance, carry, dimension, radius, None, None)


def shadow_regret(
    *, steps: Array, lr: Array, distance: Array, gradient_square: Array, mean_gradient: Array, carry: Array
) -> Array:
    """E R_T through the shadow x_t - eta·D_t, which moves by plain SGD with the gradients taken at x_t.

    ||x_1 - x*||²/(2·eta·T) + (eta/2)·mean E||g_t||² + eta·L·mean E||D_t|| with L >= ||gbar_t||: plain SGD's bound, and
    the price of the carry. No bound on the updates enters, and the carry counts once, on average over time.

    Args:
        steps: T.
        lr: eta, constant.
        distance: ||x_1 - x*||.
        gradient_square: mean over t of E||g_t||².
        mean_gradient: L, a bound on ||gbar_t||.
        carry: mean over t of E||D_t||.

    >>> arguments = dict(steps=10_000, lr=0.01, distance=1.0, gradient_square=1.0, mean_gradient=0.5)
    >>> float(round(shadow_regret(carry=2.0, **arguments), 4)), float(round(shadow_regret(carry=0.0, **arguments), 4))
    (0.02, 0.01)
    """
    owner = "shadow_regret"
    steps, lr, distance, square, mean, carry = numbers(
        owner,
        steps=steps,
        lr=lr,
        distance=distance,
        gradient_square=gradient_square,
        mean_gradient=mean_gradient,
        carry=carry,
    )
    _horizon(owner, steps)
    positive(owner, lr=lr)
    nonnegative(owner, distance=distance, gradient_square=square, mean_gradient=mean, carry=carry)
    return distance**2 / (2.0 * lr * steps) + lr / 2.0 * square + lr * mean * carry


def sharp_convergence(
    *, steps: Array, distance: Array, alpha: Array, gradient_bound: Array, dimension: Array = 1
) -> Array:
    """E R_T of component-wise U-Clip with eta = 1/sqrt(T), through ``shadow_regret`` and ``second_moment_average``.

    (||x_1 - x*||² + d·G² + d·G·(G² + a²)/a)/(2·sqrt T) with a = min(alpha, G): of the order of d·G³/alpha where the
    paper's theorem has d^{3/2}·G⁵/alpha³.

    Conditions: |g_t| <= G in each coordinate, radii at least |gbar_t| + alpha, alpha > 0.

    >>> float(round(sharp_convergence(steps=10_000, distance=1.0, alpha=0.5, gradient_bound=1.0), 4))
    0.0225
    """
    owner = "sharp_convergence"
    steps, distance, alpha, bound, dimension = numbers(
        owner, steps=steps, distance=distance, alpha=alpha, gradient_bound=gradient_bound, dimension=dimension
    )
    above_mean(owner, alpha)
    positive(owner, gradient_bound=bound)
    need(owner, "dimension >= 1", dimension >= 1.0, dimension=dimension)
    _horizon(owner, steps)
    carry = second_moment_average(alpha=alpha, variance=bound**2)  # of one coordinate
    return shadow_regret(
        steps=steps,
        lr=1.0 / np.sqrt(steps),
        distance=distance,
        gradient_square=dimension * bound**2,
        mean_gradient=bound,
        carry=dimension * carry,
    )


def _horizon(owner: str, steps: Array) -> None:
    need(owner, "a finite number of steps, at least 1", (steps >= 1.0) & np.isfinite(steps), steps=steps)


def _transformation(
    owner: str, steps: Array, lr: Array, distance: Array, carry: Array, update: Array, update_square: Array | None
) -> Array:
    steps, lr, distance, carry, update = numbers(
        owner, steps=steps, lr=lr, distance=distance, carry=carry, update=update
    )
    square = update**2 if update_square is None else numbers(owner, update_square=update_square)[0]
    _horizon(owner, steps)
    positive(owner, lr=lr)
    nonnegative(owner, distance=distance, carry=carry, update=update)
    need(owner, "update_square >= update²", square >= update**2 * (1.0 - 1e-12), update_square=square, update=update)
    path = 2.0 * lr * carry * update + lr / 2.0 * square
    return path + distance**2 / (2.0 * lr * steps) + carry * distance / steps


def _by_lemma(
    owner: str,
    steps: Array,
    distance: Array,
    carry: Array,
    dimension: Array,
    radius: Array,
    mean_radius: Array | None,
    mean_square_radius: Array | None,
) -> Array:
    """Item 1 of the lemma at eta = 1/sqrt(T), with ||u_t|| <= sqrt(d)·gamma_t."""
    steps, mean = numbers(owner, steps=steps, mean_radius=radius if mean_radius is None else mean_radius)
    largest = radius * mean  # gamma_t² <= gamma_+·gamma_t
    (square,) = numbers(owner, mean_square_radius=largest if mean_square_radius is None else mean_square_radius)
    _horizon(owner, steps)
    need(owner, "mean_radius <= radius", mean <= radius, mean_radius=mean, radius=radius)
    lr = 1.0 / np.sqrt(steps)
    return _transformation(owner, steps, lr, distance, carry, np.sqrt(dimension) * mean, dimension * square)
