"""Radii that follow the gradients: an RMS of margin for free, variances that are random, moments that are estimated."""

import numpy as np
import pytest

from carryclip import EWMA, Adaptive, Capped, Component, Norm
from carryclip.theory import bounds, radii
from carryclip.theory.noise import Rare
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import run
from theory.lanes import POINTS, SEEDS, Lanes, dominates, norms, on_average, rarely


@pytest.mark.parametrize("multiple", [1.2, 1.5, 2.0])
def test_two_rms_are_a_margin_for_any_law(multiple):
    """Mean and law change at random from point to point; the second moment is 1 in all of them."""
    rng = np.random.default_rng(3)
    mean, p = rng.uniform(-1.0, 1.0, POINTS)[:, None, None], rng.uniform(0.01, 0.5, POINTS)[:, None, None]
    height = np.sqrt((1 - mean**2) / (p * (1 - p)))
    lanes, seen = Lanes(Component(multiple), True, (POINTS, SEEDS, 1)), np.zeros((POINTS, SEEDS))
    for _ in range(80):
        seen += norms(lanes.carry) / 80
        lanes.step(mean + height * ((rng.random((SEEDS, 1)) < p) - p))
    on_average(seen, radii.rms_average(multiple))
    on_average(seen, radii.rms_average(multiple, steady=True))


def adversary(multiple, runs, steps):
    """Rare spikes while the carry is small, then a mean of 0.999 RMS that holds it up; the RMS is 1 throughout."""
    rng = np.random.default_rng(43)
    lanes = Lanes(Component(multiple), True, (runs, 1))
    sizes, weighted, margins = np.zeros(runs), 0.0, 0.0
    height = 1 / np.sqrt(0.01 * 0.99)
    for _ in range(steps):
        carry = lanes.carry
        small = np.abs(carry) < 5
        hold = np.sign(carry) * 0.999 + np.sqrt(1 - 0.999**2) * rng.choice([-1.0, 1.0], (runs, 1))
        margin = multiple - np.where(small, 0.0, 0.999)
        sizes += np.abs(carry[:, 0]) / steps
        weighted, margins = weighted + (margin * np.abs(carry)).mean(), margins + margin.mean()
        lanes.step(np.where(small, height * ((rng.random((runs, 1)) < 0.01) - 0.01), hold))
    return sizes, weighted / margins


def test_one_rms_is_not_enough_for_a_mean_that_moves():
    sizes, weighted = adversary(1.0, 400, 3000)
    assert sizes.mean() > 5.0
    assert weighted <= 1.0, "weighted by the margin it holds"
    with pytest.raises(bounds.OutsideConditionsError, match=r"multiple > 1 \(at 1 a moving mean"):
        radii.rms_average(1.0)
    for multiple in (1.5, 2.0):
        sizes, _ = adversary(multiple, 400, 3000)
        assert sizes.mean() <= radii.rms_average(multiple)


def test_at_one_rms_the_bound_is_nearly_reached_by_a_steady_mean():
    """A mean of 5 deviations, and a fair coin."""
    p, rms = 0.5, np.sqrt(26.0)
    rng = np.random.default_rng(0)
    lanes, seen = Lanes(Component(rms), True, (400, 1)), np.zeros((1, 400))
    for n in range(6000):
        seen += norms(lanes.carry) * (n >= 1000) / 5000
        lanes.step(5.0 + ((rng.random((400, 1)) < p) - p) / np.sqrt(p * (1 - p)))
    dominates(seen, radii.rms_average(1.0, rms=rms, steady=True), noticed=0.75)


# ------------------------------------------------------------------ |gbar| + beta·sigma_t²


def swinging(beta, deviations, seeds, steps):
    """Mean |carry| after each step, for deviations that are a function of (step, carry); axes (steps, seeds)."""
    rng, carry, seen, weights = np.random.default_rng(9), np.zeros(seeds), [], []
    for n in range(steps):
        deviation = deviations(n, carry)
        weights.append(np.broadcast_to(deviation**2, carry.shape))
        seen.append(np.abs(carry))
        total = deviation * np.where(rng.random(seeds) < 0.5, -1.0, 1.0) + carry
        carry = total - np.clip(total, -beta * deviation**2, beta * deviation**2)
    return np.array(seen), np.array(weights)


def test_fixed_variances_need_no_smallest_one():
    rng = np.random.default_rng(1)
    for beta in rng.uniform(0.1, 1.0, POINTS):
        levels = rng.choice([0.01, 0.3, 1.5], 60)
        seen, _ = swinging(beta, lambda n, carry, levels=levels: levels[n], SEEDS, 60)
        on_average(seen, radii.fixed_adaptive_mean(beta=beta, max_variance=2.25))
    steady, _ = swinging(0.05, lambda n, carry: 1.5, 2000, 2000)
    dominates(steady[-1:], radii.fixed_adaptive_mean(beta=0.05, max_variance=2.25), noticed=0.3)


def test_random_variances_need_it_by_a_logarithm():
    """Noise that is turned off while the carry is large keeps it large: the bound for fixed variances fails."""
    beta, quiet = 0.3, 1e-4
    seen, weights = swinging(beta, lambda n, carry: np.where(np.abs(carry) > 3 / beta, quiet, 1.0), 2000, 4000)
    fixed = radii.fixed_adaptive_mean(beta=beta, max_variance=1.0)
    assert seen[-1].mean() > 1.5 * fixed
    on_average(seen[-1:], radii.adaptive_mean(beta=beta, min_variance=quiet**2))
    assert (weights * seen).sum() / weights.sum() <= radii.adaptive_average(beta=beta, max_variance=1.0)
    assert (weights * seen).sum() / weights.sum() > 0.7 * radii.adaptive_average(beta=beta, max_variance=1.0)


def test_an_adversary_reaches_a_fifth_of_the_bound_for_random_variances():
    beta, quiet = 0.5, 0.02
    seen, _ = swinging(beta, lambda n, carry: np.where(np.abs(carry) > 5.0, quiet, 0.5), 100, 12_000)
    late = seen[-2000:].mean(0)
    dominates(late[None], radii.adaptive_mean(beta=beta, min_variance=quiet**2), noticed=0.12)


def test_random_variances_at_twenty_points():
    rng = np.random.default_rng(2)
    for beta, low, level in rng.uniform([0.1, 0.05, 0.3], [1.0, 0.3, 2.0], (POINTS, 3)):
        seen, weights = swinging(beta, lambda n, c, a=low, b=level: np.where(np.abs(c) > b, a, 1.2), SEEDS, 50)
        on_average(seen, radii.adaptive_mean(beta=beta, min_variance=low**2))
        weighted = (weights * seen).sum(0) / weights.sum(0).mean()
        on_average(weighted[None], radii.adaptive_average(beta=beta, max_variance=1.44))


def test_the_logarithm_is_far_below_the_papers_power():
    given = {"beta": np.geomspace(0.01, 0.5, 20), "min_variance": 0.01}
    assert (radii.adaptive_mean(**given) <= bounds.adaptive_carry_mean(**given)).all()
    assert radii.adaptive_mean(**given)[0] < 1e-4 * bounds.adaptive_carry_mean(**given)[0]


# ------------------------------------------------------------------ estimated moments


def test_estimated_radii_miss_their_margin_now_and_then():
    """EWMA's second moment times 1.5, capped; 20 points, 20,000 seeds."""
    rng = np.random.default_rng(6)
    tilt, cap, decay = rng.uniform(-1.5, 1.5, POINTS), 30.0, 0.9
    law = Rare(rng.uniform(1.0, 3.0, POINTS), p=0.2)
    region = Adaptive(mean=0, std=1.5, moments=EWMA(decay))
    steps, draws = 60, np.random.default_rng(0)
    lanes, seen = Lanes(region, Capped(cap), (POINTS, SEEDS, 1)), np.zeros((POINTS, SEEDS))
    rms = np.sqrt(tilt**2 + law.variance)
    alpha = 0.5 * (1.5 * rms - np.abs(tilt))
    short, second, largest = np.zeros(POINTS), np.zeros((POINTS, SEEDS)), 0.0
    for n in range(steps):
        seen += norms(lanes.carry) / steps
        if n:
            radius = 1.5 * np.sqrt(second / (1 - decay**n))
            short += (radius < (np.abs(tilt) + alpha)[:, None]).mean(1) / steps
        gradient = tilt[:, None, None] + law.scale[:, None, None] * law.draw(draws, (SEEDS, 1))
        second = decay * second + (1 - decay) * gradient[..., 0] ** 2
        lanes.step(gradient)
        largest = max(largest, norms(lanes.carry).max())
    given = {"alpha": alpha, "variance": law.variance, "mean_gradient": np.abs(tilt), "largest_carry": largest}
    assert (short > 0.01).any()
    on_average(seen, radii.estimated_average(short=short, **given))


def test_welford_soon_has_its_margin():
    """Uniform gradients at 20 means and widths, 20,000 runs of 40 gradients each."""
    rng, n = np.random.default_rng(7), 40
    for mean, width in rng.uniform([0.0, 0.5], [1.0, 2.0], (POINTS, 2)):
        gradients = mean + rng.uniform(-width, width, (SEEDS, n))
        excess = 2 * width / np.sqrt(3) - 0.1
        missed = np.abs(gradients.mean(1)) + 2 * gradients.std(1, ddof=1) < mean + 0.1
        given = {"excess": excess, "mean_multiple": 1, "std_multiple": 2, "gradient_bound": mean + width}
        rarely(missed, radii.welford_short(n, **given))
    late = radii.welford_short([500, 5000], excess=1.5, mean_multiple=1, std_multiple=2, gradient_bound=2.0)
    assert late[1] < 1e-6 < late[0]


@pytest.mark.parametrize(
    ("function", "given", "condition"),
    [
        (radii.fixed_adaptive_mean, {"beta": 0.0, "max_variance": 1.0}, "beta > 0"),
        (radii.adaptive_mean, {"beta": 1.0, "min_variance": 0.0}, "min_variance > 0"),
        (radii.adaptive_average, {"beta": -1.0, "max_variance": 1.0}, "beta > 0"),
        (
            radii.estimated_average,
            {"alpha": 1.0, "variance": 1.0, "mean_gradient": 1.0, "short": 2.0, "largest_carry": 1.0},
            "0 <= short <= 1",
        ),
    ],
)
def test_outside_its_conditions_a_bound_names_the_condition(function, given, condition):
    with pytest.raises(bounds.OutsideConditionsError, match=condition):
        function(**given)


def test_the_norm_of_a_vector_may_be_followed_too():
    """Twice the RMS of the norm, in ten dimensions, with a mean that turns at every step."""
    seen = run(
        Linear(0.2),
        Norm(2.0 * np.sqrt(10 * 0.04 + 10 * 0.16)),
        noise=Rare(0.4 / 0.3, p=0.1),
        dimension=10,
        steps=60,
        seeds=500,
        times=[60],
    )
    on_average(seen.average_carry, radii.rms_average(2.0, rms=np.sqrt(10 * 0.04 + 10 * 0.16)))
