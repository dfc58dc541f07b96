"""Every bound lies above what is simulated, at 20 random points of its conditions with 20,000 seeds each.

Sampling error: a probability p may be exceeded by six standard errors of a share of 20,000, and ten cases; a mean by
six of its standard errors. Most bounds leave far more room than that.
"""

import functools

import numpy as np
import pytest

from carryclip import Capped, Component, Gated, Leaky, Norm, Sign
from carryclip.theory import bounds
from carryclip.theory.noise import Gaussian, Pareto, Rare, Sphere, StudentT, TwoPoint, Uniform
from carryclip.theory.problems import Absolute, Linear
from carryclip.theory.simulate import Above, Simulation, run

POINTS, SEEDS = 20, 20_000
TIMES = (1, 4, 20, 150)


def rarely(exceeded: np.ndarray, probability: np.ndarray) -> None:
    """The share of runs that exceed something is at most ``probability``, allowing for sampling error."""
    runs = exceeded.shape[-1]
    expected = runs * np.asarray(probability)
    allowed = expected + 6 * np.sqrt(expected * (1 - np.minimum(probability, 1.0))) + 10
    assert (exceeded.sum(-1) <= allowed).all(), (exceeded.sum(-1) - allowed).max()


def on_average(values: np.ndarray, bound: np.ndarray) -> None:
    """The mean over runs is at most ``bound``, allowing for sampling error."""
    error = values.std(-1) / np.sqrt(values.shape[-1])
    assert (values.mean(-1) <= bound + 6 * error + 1e-12).all(), (values.mean(-1) - bound).max()


@functools.cache
def component(kind: type) -> tuple[Simulation, dict[str, np.ndarray]]:
    """Component-wise clipping at random margins, noise scales and mean gradients."""
    rng = np.random.default_rng(7)
    scale, tilt = rng.uniform(0.2, 3.0, POINTS), rng.uniform(-1.0, 1.0, POINTS)
    law = kind(scale)
    alpha = np.sqrt(law.variance) * np.exp(rng.uniform(np.log(0.1), np.log(0.95), POINTS))
    seen = run(Linear(tilt), Above(alpha), noise=law, steps=TIMES[-1], seeds=SEEDS, times=TIMES)
    bound = np.abs(tilt) + law.bound
    radius = np.abs(tilt) + alpha
    return seen, {"alpha": alpha, "G": bound, "radius": radius, "proxy": law.proxy, "v": law.variance, "law": law}


BOUNDED = [TwoPoint, Uniform, Rare]


@pytest.mark.parametrize("kind", BOUNDED)
@pytest.mark.parametrize("form", ["printed", "corrected"])
def test_first_carry_bound(kind, form):
    seen, at = component(kind)
    given = {"alpha": at["alpha"], "gradient_bound": at["G"], "form": form}
    for row, t in zip(seen.carry, np.add(TIMES, 1), strict=True):
        for epsilon in (0.1, 1.0, 5.0):
            level = epsilon + at["G"] + at["radius"]
            rarely(row >= level[:, None], bounds.carry_tail(epsilon, t, **given))
            rarely(row >= level[:, None], bounds.corollary_tail(epsilon, **given))
        for delta in (0.3, 0.01):
            level = bounds.carry_quantile(delta, t, largest_radius=at["radius"], **given)
            rarely(row > level[:, None], delta)
        on_average(row, bounds.carry_mean(largest_radius=at["radius"], **given))


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_corollarys_level(kind):
    """The corrected one always, the printed one for alpha up to 1 only."""
    seen, at = component(kind)
    given = {"alpha": at["alpha"], "gradient_bound": at["G"]}
    level = bounds.corollary_quantile(0.01, largest_radius=at["radius"], **given)
    rarely(seen.carry[-1] > level[:, None], 0.01)
    small = (at["alpha"] <= 1.0) & (at["radius"] <= at["G"])
    printed = bounds.corollary_quantile(0.01, form="printed", **given)
    rarely((seen.carry[-1] > printed[:, None])[small], 0.01)


@pytest.mark.parametrize("kind", [*BOUNDED, Gaussian])
def test_walk(kind):
    seen, at = component(kind)
    given = {"alpha": at["alpha"], "proxy": at["proxy"]}
    for row, t in zip(seen.carry, np.add(TIMES, 1), strict=True):
        for x in (0.3, 1.0, 3.0):
            rarely(row >= x, bounds.walk_tail(x, t, **given))
        for delta in (0.3, 0.01):
            rarely(row > bounds.walk_quantile(delta, t, **given)[:, None], delta)
        on_average(row, bounds.walk_mean(t, **given))


@pytest.mark.parametrize("kind", [*BOUNDED, Gaussian])
def test_lundberg(kind):
    seen, at = component(kind)
    for rate in (
        bounds.lundberg_rate(alpha=at["alpha"], noise=at["law"]),
        bounds.lundberg_rate(alpha=at["alpha"], proxy=at["proxy"]),
    ):
        for row in seen.carry:
            for x in (0.3, 1.0, 3.0):
                rarely(row >= x, bounds.lundberg_tail(x, rate=rate))
            for delta in (0.3, 0.01):
                rarely(row > bounds.lundberg_quantile(delta, rate=rate)[:, None], delta)
            on_average(row, bounds.lundberg_mean(rate=rate))


@pytest.mark.parametrize("kind", [*BOUNDED, Gaussian, StudentT, Pareto])
def test_second_moment(kind):
    """With tails as heavy as a finite variance allows."""
    seen, at = component(kind)
    for n, average, row in zip(TIMES, seen.average_carry, seen.carry, strict=True):
        on_average(average, bounds.second_moment_average(n, alpha=at["alpha"], variance=at["v"]))
        on_average(row, bounds.second_moment_mean(n + 1, variance=at["v"]))


@pytest.mark.parametrize("form", ["printed", "corrected"])
def test_second_carry_bound(form):
    """Radii |gbar| + beta·sigma², at random beta and sigma²."""
    rng = np.random.default_rng(11)
    sigma, beta = rng.uniform(0.2, 0.9, POINTS), rng.uniform(0.1, 1.0, POINTS)
    tilt = rng.uniform(-1.0, 1.0, POINTS)
    seen = run(Linear(tilt), Above(beta * sigma**2), noise=TwoPoint(sigma), steps=150, seeds=SEEDS, times=TIMES)
    given = {"beta": beta, "min_variance": sigma**2}
    bound, radius = np.abs(tilt) + sigma, np.abs(tilt) + beta * sigma**2
    for row, t in zip(seen.carry, np.add(TIMES, 1), strict=True):
        for epsilon in (0.1, 1.0, 5.0):
            level = epsilon + (bound + radius if form == "printed" else 0.0 * radius)
            rarely(row >= level[:, None], bounds.adaptive_carry_tail(epsilon, t, form=form, **given))
        more = {"gradient_bound": bound, "form": form}
        level = bounds.adaptive_carry_quantile(0.01, t, **more, **given)
        rarely(row > level[:, None], 0.01)
        on_average(row, bounds.adaptive_carry_mean(**more, **given))
        # Sharper: theta = 2·beta, with neither sigma nor G.
        rarely(row > bounds.lundberg_quantile(0.01, rate=2 * beta)[:, None], 0.01)
        on_average(row, bounds.lundberg_mean(rate=2 * beta))


def norm_clipping(dimension: int, points: int, seeds: int, steps: int) -> tuple[Simulation, dict[str, np.ndarray]]:
    rng = np.random.default_rng(dimension)
    scale, tilt = rng.uniform(0.2, 3.0, points), rng.uniform(0.0, 1.0, points) / np.sqrt(dimension)
    alpha = scale * np.exp(rng.uniform(np.log(0.05), np.log(0.95), points))
    seen = run(
        Linear(tilt),
        Above(alpha, over="norm"),
        noise=Sphere(scale),
        dimension=dimension,
        steps=steps,
        seeds=seeds,
        times=(1, steps // 3, steps),
    )
    return seen, {"alpha": alpha, "noise_bound": scale}


@pytest.mark.parametrize("form", ["sharp", "coth"])
@pytest.mark.parametrize(
    ("dimension", "points", "seeds", "steps"),
    [(1, 8, SEEDS, 150), (2, 8, SEEDS, 100), (10, 4, SEEDS, 40), (100, 4, 1000, 100), (1000, 4, 200, 60)],
)
def test_norm_clipping(dimension, points, seeds, steps, form):
    """20 points with 20,000 seeds in dimensions 1, 2 and 10, fewer seeds above, where all runs look alike."""
    seen, at = norm_clipping(dimension, points, seeds, steps)
    for row in seen.carry:
        for delta in (0.3, 0.01):
            rarely(row > bounds.norm_carry_quantile(delta, form=form, **at)[:, None], delta)
        for x in (0.3, 1.0, 3.0):
            rarely(row >= x, bounds.norm_carry_tail(x, form=form, **at))
        on_average(row, bounds.norm_carry_mean(form=form, **at))
    for n, average in zip(seen.times, seen.average_carry, strict=True):
        variance = at["noise_bound"] ** 2
        on_average(average, bounds.second_moment_average(n, alpha=at["alpha"], variance=variance))


def test_norm_clipping_in_a_hundred_dimensions_is_close_to_its_bound():
    """E||xi||² = 2, alpha = 0.1: 10.05 by the bound."""
    seen = run(
        Linear(), Norm(0.1), noise=Gaussian(np.sqrt(0.02)), dimension=100, steps=12_000, seeds=20, times=[2000, 12_000]
    )
    late = (12 * seen.average_carry[1] - 2 * seen.average_carry[0]).mean() / 10
    assert 0.97 * 10.05 < late < bounds.second_moment_average(alpha=0.1, variance=2.0) + 0.05


def test_component_clipping_obeys_the_second_moment_in_any_dimension():
    seen = run(Linear(0.3), Component(0.5), noise=Gaussian(0.4), dimension=30, steps=300, seeds=500, times=[300])
    on_average(seen.average_carry[-1], bounds.second_moment_average(300, alpha=0.2, variance=30 * 0.16))


@pytest.mark.parametrize("policy", [Capped(3), Leaky(0.9), Gated(decay=0.9)])
@pytest.mark.parametrize("over", ["component", "norm"])
def test_policies_only_shrink_the_carry(policy, over):
    alpha = np.linspace(0.1, 0.8, POINTS)
    seen = run(
        Linear(0.5), Above(alpha, over=over), noise=TwoPoint(1.0), carry=policy, steps=150, seeds=2000, times=TIMES
    )
    for row, t in zip(seen.carry, np.add(TIMES, 1), strict=True):
        rarely(row > bounds.walk_quantile(0.01, t, alpha=alpha, proxy=1.0)[:, None], 0.01)
        on_average(row, bounds.walk_mean(t, alpha=alpha, proxy=1.0))


@functools.cache
def regrets() -> tuple[Simulation, dict[str, np.ndarray], np.ndarray]:
    """|x| in two dimensions with eta = 1/sqrt(T), radii |gbar| + alpha <= G."""
    rng = np.random.default_rng(5)
    steps = 150
    noise, start = rng.uniform(0.3, 2.0, POINTS), rng.uniform(0.0, 8.0, POINTS)
    alpha = noise * rng.uniform(0.1, 0.9, POINTS)
    seen = run(
        Absolute(),
        Above(alpha),
        noise=Uniform(noise),
        start=start[:, None, None],
        dimension=2,
        lr=1 / np.sqrt(steps),
        steps=steps,
        seeds=SEEDS,
        times=10,
    )
    at = {"steps": steps, "distance": start * np.sqrt(2), "alpha": alpha, "gradient_bound": 1.0 + noise}
    return seen, at, noise


@pytest.mark.parametrize("form", ["printed", "corrected"])
def test_convergence(form):
    seen, at, _ = regrets()
    bound = bounds.convergence(**at, dimension=2, radius=1.0 + at["alpha"], form=form)
    on_average(seen.regret[-1], bound)


def test_adaptive_convergence():
    seen, at, noise = regrets()
    variance = noise**2  # the paper's proxy; radii 1 + alpha are 1 + beta·sigma²
    given = {
        "steps": at["steps"],
        "distance": at["distance"],
        "beta": at["alpha"] / variance,
        "min_variance": variance,
        "gradient_bound": at["gradient_bound"],
        "dimension": 2,
    }
    on_average(seen.regret[-1], bounds.adaptive_convergence(largest_radius=1.0 + at["alpha"], **given))
    on_average(seen.regret[-1], bounds.adaptive_convergence(form="printed", **given))


def test_sharp_convergence():
    seen, at, noise = regrets()
    on_average(seen.regret[-1], bounds.sharp_convergence(**at, dimension=2))
    shadow = bounds.shadow_regret(
        steps=at["steps"],
        lr=1 / np.sqrt(at["steps"]),
        distance=at["distance"],
        gradient_square=2 * (1.0 + noise**2 / 3),
        mean_gradient=np.sqrt(2),
        carry=seen.average_carry[-1].mean(-1),
    )
    on_average(seen.regret[-1], shadow)
    assert (shadow < 0.6 * bounds.sharp_convergence(**at, dimension=2)).any()


@pytest.mark.parametrize("form", ["printed", "corrected"])
def test_gradient_transformation(form):
    """With the carry that was seen: its mean for item 1, its quantile over all steps at once for item 2."""
    seen, at, noise = regrets()
    given = {
        "steps": at["steps"],
        "lr": 1 / np.sqrt(at["steps"]),
        "distance": at["distance"],
        "update": np.sqrt(2) * (1.0 + at["alpha"]),
        "form": form,
    }
    mean = seen.carry.mean(-1).max(0)
    on_average(seen.regret[-1], bounds.transformation_mean(carry=mean, **given))
    for delta in (0.1, 0.01):
        all_steps = np.quantile(seen.peak_carry, 1 - delta, axis=-1)
        domain = at["distance"] + 5.0
        level = bounds.transformation_quantile(delta, carry=all_steps, domain=domain, sigma=noise / np.sqrt(3), **given)
        rarely(seen.regret[-1] > level[:, None], 2 * delta)


def test_sign():
    rng = np.random.default_rng(3)
    tilt, noise = rng.uniform(-0.9, 0.9, POINTS), rng.uniform(0.1, 3.0, POINTS)
    seen = run(Linear(tilt), Sign(), noise=Uniform(noise), steps=150, seeds=SEEDS, times=TIMES)
    bound = bounds.sign_carry_average(mean_gradient=np.abs(tilt), variance=noise**2 / 3)
    for average in seen.average_carry:
        on_average(average, bound)
    tame = np.abs(tilt) + noise <= 1.0
    assert tame.any()
    assert (seen.peak_carry[tame] <= bounds.sign_carry_bound(gradient_bound=1.0)).all()


def test_sign_winds_up_beyond_its_scale():
    seen = run(Linear(1.5), Sign(), noise=Uniform(0.3), steps=1000, seeds=100, times=[500, 1000])
    assert seen.carry.mean(-1) == pytest.approx([250.0, 500.0], rel=0.01)


@pytest.mark.parametrize("kappa", [0.5, 0.9, 0.99])
def test_a_leaks_bias_is_exact(kappa):
    """Mean update from the distance covered in 500 late steps; skewed noise, by which plain clipping is biased."""
    window = np.arange(1000, 1501)
    seen = run(
        Linear(0.2), Component(0.5), noise=Rare(4.0), carry=Leaky(kappa), lr=1.0, steps=1500, seeds=SEEDS, times=window
    )
    update = -(seen.mean_position[-1] - seen.mean_position[0]).item() / 500
    carry = seen.mean_carry[:, 0]
    exact = bounds.leak_bias(mean_carry=carry[:-1].mean(), kappa=kappa)
    drift = abs(carry[-1] - carry[0]) / (500 * kappa)  # 0 in the stationary state
    drawn = np.sqrt(Rare(4.0).variance / (500 * SEEDS))
    assert update - 0.2 == pytest.approx(exact, abs=drift + 6 * drawn)
    assert abs(exact) > 10 * drawn


def test_gated_bounds():
    """The cap always; and what is dropped while the radius is above twice the clipped mean."""
    rng = np.random.default_rng(2)
    policy = Gated(decay=0.95, cap=20)
    wild = run(Linear(5.0), Component(0.5), noise=StudentT(degrees=1.5), carry=policy, steps=300, seeds=2000)
    assert wild.peak_carry.max() <= bounds.gated_carry_bound(radius=0.5, policy=policy) * (1 + 1e-12)
    tilt, steps = rng.uniform(-0.25, 0.25, POINTS), 150
    law = Uniform(rng.uniform(1.5, 4.0, POINTS))
    seen = run(Linear(tilt), Component(1.0), noise=law, carry=policy, lr=1.0, steps=steps, seeds=SEEDS, times=[steps])
    draws = tilt[:, None] + law.scale[:, None] * law.draw(rng, (1, 200_000))
    clipped = np.abs(np.clip(draws, -1.0, 1.0).mean(-1)) + 0.01
    rate = bounds.lundberg_rate(alpha=1.0 - np.abs(tilt), noise=law)
    given = {"clipped_mean": clipped, "gradient_bound": np.abs(tilt) + law.scale, "radius": 1.0, "rate": rate}
    allowed = sum(bounds.gated_bias(t, policy=policy, **given) for t in range(1, steps + 1))
    dropped = steps * tilt + seen.mean_position[-1, :, 0] - seen.mean_carry[-1, :, 0]
    error = law.scale * np.sqrt(steps / 3 / SEEDS)
    assert (np.abs(dropped) <= allowed + 6 * error).all()
