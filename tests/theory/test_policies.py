"""What policies drop, keep and forget, through the shipped algorithm."""

import numpy as np
import pytest

from carryclip import Capped, Component, Drip, Gated, Norm, Shrunk
from carryclip.theory import bounds, policies
from carryclip.theory.noise import Pareto, Rare, StudentT, Uniform
from theory.lanes import POINTS, SEEDS, Lanes, dominates, norms, on_average, rarely


def dropping(region, policy, law, tilt, steps, dimension=1):
    """(mean over steps of the size of what is dropped, mean size of the carry); axes (points, seeds)."""
    rng = np.random.default_rng(4)
    lanes = Lanes(region, policy, (POINTS, SEEDS, dimension))
    lost, carried = np.zeros((2, POINTS, SEEDS))
    for _ in range(steps):
        gradient = tilt[:, None, None] + law.scale[:, None, None] * law.draw(rng, (SEEDS, dimension))
        carry = lanes.carry
        update = lanes.step(gradient)
        lost += norms(gradient + carry - update - lanes.carry) / steps
        carried += norms(carry) / steps
    return lost, carried


@pytest.mark.parametrize("kind", [Pareto, StudentT, Rare])
@pytest.mark.parametrize("over", [Component, Norm])
def test_what_a_cap_drops_whatever_the_tails(kind, over):
    rng = np.random.default_rng(1)
    law, tilt = kind(rng.uniform(0.5, 3.0, POINTS)), rng.uniform(-0.9, 0.9, POINTS)
    lost, _ = dropping(over(1.0), Capped(3), law, tilt, 80)
    bound = policies.capped_bias(variance=law.variance, radius=1.0, cap=3)
    on_average(lost, bound)
    assert (lost.mean(-1) > 0.05 * bound).any()


def test_a_cap_of_few_radii_comes_near_its_bound():
    """A fair coin of 5 radii at a margin of 0: half of the bound is noticed."""
    law = Uniform(np.full(POINTS, 8.0))
    lost, _ = dropping(Component(0.5), Capped(40), law, np.full(POINTS, 0.5), 400)
    dominates(lost, policies.capped_bias(variance=law.variance, radius=0.5, cap=40), noticed=0.3)


def test_a_mean_that_holds_the_carry_up_comes_close_to_a_caps_bound():
    """A mean gradient of one radius with the carry, at a margin of 0: nothing is paid but by noise."""
    rng, runs, steps, radius, cap = np.random.default_rng(12), 1000, 3000, 1.0, 10
    lanes, lost = Lanes(Component(radius), Capped(cap), (1, runs, 1)), np.zeros((1, runs))
    for _ in range(steps):
        carry = lanes.carry
        gradient = np.where(carry >= 0.0, radius, -radius) + 0.5 * rng.choice([-1.0, 1.0], (1, runs, 1))
        update = lanes.step(gradient)
        lost += norms(gradient + carry - update - lanes.carry) / steps
    dominates(lost, policies.capped_bias(variance=0.25, radius=radius, cap=cap), noticed=0.8)


@pytest.mark.parametrize("over", [Component, Norm])
def test_what_gated_drops(over):
    """Noise of several radii around a small mean: no bound on gradients, no exponential moment."""
    rng = np.random.default_rng(2)
    policy, tilt, steps = Gated(decay=0.97, cap=10), rng.uniform(-0.2, 0.2, POINTS), 150
    law = StudentT(rng.uniform(1.0, 3.0, POINTS), degrees=3.0)
    lost, _ = dropping(over(1.0), policy, law, tilt, steps)
    draws = tilt[:, None] + law.scale[:, None] * law.draw(rng, (1, 200_000))
    excess = np.maximum(np.abs(draws) - 1.0, 0.0).mean(1) * 1.02
    given = {"clipped_mean": np.abs(tilt), "variance": law.variance, "radius": 1.0, "policy": policy}
    bound = policies.gated_average_bias(steps, excess=excess, **given)
    dominates(lost, bound, noticed=0.2)
    assert (excess <= policies.largest_excess(second_moment=tilt**2 + law.variance, radius=1.0)).all()


def test_the_new_bias_of_gated_is_far_below_the_old_for_fair_noise_of_five_radii():
    rate = bounds.lundberg_rate(alpha=0.5, proxy=25.0)
    old = bounds.gated_bias(clipped_mean=0.0, gradient_bound=5.5, radius=1.0, rate=rate)
    new = policies.gated_average_bias(100_000, clipped_mean=0.0, excess=4.5, variance=25.0, radius=1.0)
    assert old > 0.5 > 0.13 > new


def test_the_bias_of_gated_is_the_smaller_of_two():
    """Bounded noise: each part by whichever bound is smaller, above what is seen and below either bound alone."""
    rng = np.random.default_rng(11)
    policy, steps = Gated(decay=0.97, cap=5), 150
    law, tilt = Uniform(rng.uniform(1.5, 4.0, POINTS)), rng.uniform(-0.2, 0.2, POINTS)
    lost, _ = dropping(Component(1.0), policy, law, tilt, steps)
    bound = np.abs(tilt) + law.scale
    given = {"clipped_mean": np.abs(tilt), "policy": policy, "radius": 1.0}
    rate = bounds.lundberg_rate(alpha=1.0 - np.abs(tilt), noise=law)
    old = np.mean([bounds.gated_bias(t, gradient_bound=bound, rate=rate, **given) for t in range(1, steps + 1)], axis=0)
    other = given | {"excess": bound - 1.0, "variance": law.variance}
    new = policies.gated_average_bias(steps, **other)
    both = policies.gated_average_bias(steps, gradient_bound=bound, rate=rate, **other)
    on_average(lost, both)
    assert (both <= np.minimum(old, new) * (1 + 1e-12)).all()
    assert (old < new).any()
    assert (new < old).any()
    with pytest.raises(bounds.OutsideConditionsError, match="gradient_bound >= radius"):
        policies.gated_average_bias(steps, gradient_bound=0.5, **other)
    with pytest.raises(bounds.OutsideConditionsError, match="rate > 0"):
        policies.gated_average_bias(steps, rate=0.0, **other)


def test_the_past_that_shuts_the_gate_is_rare():
    """The feeds of a run, weighted as the gate does; the event belongs to the past of each step."""
    rng, policy = np.random.default_rng(3), Gated(decay=0.95)
    tilt, width = rng.uniform(0.0, 0.3, (2, POINTS, 1))
    width = 1.5 + 5.0 * width
    clipped = (tilt / width)[:, 0]  # exact while width - tilt is at least a radius
    lanes, average = Lanes(Component(1.0), policy, (POINTS, SEEDS, 1)), np.zeros((POINTS, SEEDS))
    for n in range(80):
        own = (1 - policy.decay) / (1 - policy.decay ** (n + 1))
        before = average * policy.decay / (1 - policy.decay ** (n + 1))
        rarely(before >= policy.threshold - own, policies.late_shut(n + 1, clipped_mean=clipped, policy=policy))
        row = tilt + width * (2.0 * rng.random((1, SEEDS)) - 1.0)
        feed = np.clip(row * np.sign(lanes.carry[..., 0]), -1.0, 1.0)
        average = policy.decay * average + (1 - policy.decay) * feed
        lanes.step(row[..., None])
    assert policies.late_shut(80, clipped_mean=clipped.max(), policy=policy) < 0.7


def test_a_gate_that_is_fed_is_seldom_open_after_the_worst_history():
    """Carries of 10,000 radii that are drained for a while, then fed; one that grows shows an open gate."""
    rng, policy = np.random.default_rng(13), Gated(decay=0.9, cap=1e6)
    mean, width = rng.uniform(0.75, 1.0, (POINTS, 1)), rng.uniform(0.2, 0.9, (POINTS, 1))
    clipped = np.clip(mean + width * np.linspace(-1, 1, 200_001), -1.0, 1.0).mean(1)
    lanes, opened = Lanes(Component(1.0), policy, (POINTS, SEEDS, 1)), 0.0
    lanes.step(np.full((POINTS, SEEDS, 1), 1e4))
    for _ in range(60):
        lanes.step(np.full((POINTS, SEEDS, 1), -2.0))
    for n in range(1, 61):
        before = lanes.carry[..., 0]
        lanes.step((mean + width * (2.0 * rng.random((1, SEEDS)) - 1.0))[..., None])
        grew = lanes.carry[..., 0] > before
        rarely(grew, bounds.gate_open(n, clipped_mean=clipped, policy=policy))
        opened = max(opened, grew.mean())
    assert opened > 0.2, "it was open at first"
    assert (bounds.gate_open(60, clipped_mean=clipped, policy=policy) < 0.9).any()


def test_the_regret_of_a_policy_that_drops():
    """|x| from 1 with skewed noise: SGD's bound, the carry's price and R times what is dropped."""
    rng = np.random.default_rng(5)
    steps, policy = 100, Capped(2)
    law, radius, rate = Rare(rng.uniform(2.0, 5.0, POINTS), p=0.1), 1.2, 0.1
    lanes, x = Lanes(Component(radius), policy, (POINTS, SEEDS, 1)), np.full((POINTS, SEEDS, 1), 1.0)
    regret, carried, far = np.zeros((POINTS, SEEDS)), np.zeros((POINTS, SEEDS)), 0.0
    for _ in range(steps):
        regret += np.abs(x[..., 0]) / steps
        carried += norms(lanes.carry) / steps
        far = max(far, np.abs(x - rate * lanes.carry).max())
        x = x - rate * lanes.step(np.sign(x) + law.scale[:, None, None] * law.draw(rng, (SEEDS, 1)))
    given = {"steps": steps, "lr": rate, "distance": 1.0, "gradient_square": 1 + law.variance, "mean_gradient": 1.0}
    full = bounds.shadow_regret(carry=carried.mean(-1), **given)
    lost = policies.capped_bias(variance=law.variance, radius=radius, cap=2)
    bound = policies.dropped_regret(full, domain=far, dropped=lost)
    on_average(regret, bound)
    assert (regret.mean(-1) > 0.1 * bound).any()


def test_nothing_that_limits_growth_makes_a_step_longer_than_the_gradient():
    """||g - drop|| <= ||g||: what lets the regret of a gated carry keep SGD's second term."""
    rng = np.random.default_rng(6)
    lanes = Lanes(Norm(1.0), Gated(decay=0.5, threshold=0.2, cap=5), (5000, 3))
    for _ in range(40):
        gradient, carry = rng.standard_t(2, (5000, 3)), lanes.carry
        update = lanes.step(gradient)
        dropped = gradient + carry - update - lanes.carry
        assert (norms(gradient - dropped) <= norms(gradient) * (1 + 1e-12) + 1e-12).all()


# ------------------------------------------------------------------ Drip


@pytest.mark.parametrize("region", [Component(1.0), Norm(1.0)], ids=repr)
def test_drip_pays_like_an_average_forgets(region):
    policy = Drip(0.03, centred=False)
    lanes = Lanes(region, policy, (1, 1))
    lanes.step(np.array([[10.0]]))
    owed = lanes.carry.item()
    assert owed == 9.0
    for n in range(1, 80):
        lanes.step(np.zeros((1, 1)))
        assert lanes.carry.item() == pytest.approx(owed * float(policies.drip_share(n, policy=policy)), rel=1e-12)


@pytest.mark.parametrize("policy", [Drip(), Drip(0.1, cap=3.0), Drip(0.5, centred=False)], ids=str)
@pytest.mark.parametrize("over", [Component, Norm])
def test_drips_carry_never_exceeds_its_cap(policy, over):
    rng = np.random.default_rng(7)
    lanes = Lanes(over(0.5), policy, (RUNS := 2000, 2))
    largest = 0.0
    for _ in range(200):
        lanes.step(rng.standard_t(1.2, (RUNS, 2)) + 3.0 * np.sign(lanes.carry + 1e-9))
        sizes = np.abs(lanes.carry) if over is Component else norms(lanes.carry)
        largest = max(largest, sizes.max())
    bound = policies.drip_carry_bound(radius=0.5, policy=policy)
    assert 0.9 * bound < largest <= bound * (1 + 1e-12)


def test_drip_comes_to_rest_where_the_gradient_is_small():
    """log(1 + x²) with skewed noise: the weighted mean of the squared gradient, with what the cap drops counted."""
    rng = np.random.default_rng(8)
    steps, rate, radius, policy = 120, 0.05, 0.5, Drip(0.2, cap=3.0)
    law, start = Rare(rng.uniform(0.5, 3.0, POINTS), p=0.1), rng.uniform(0.5, 3.0, POINTS)
    x, lanes = np.ones((POINTS, SEEDS, 1)) * start[:, None, None], Lanes(Norm(radius), policy, (POINTS, SEEDS, 1))
    seen, moved, lost = np.zeros((3, POINTS, SEEDS))
    average, weight = np.zeros((POINTS, SEEDS, 1)), 0.0
    for _ in range(steps):
        slope = 2 * x / (1 + x**2)
        gradient = slope + law.scale[:, None, None] * law.draw(rng, (SEEDS, 1))
        factor = np.minimum(1.0, radius / np.maximum(np.abs(gradient), 1e-12))
        usual = average / weight if weight else factor
        average, weight = policy.decay * average + (1 - policy.decay) * factor, 1 - policy.decay * (1 - weight)
        carry = lanes.carry
        update = lanes.step(gradient)
        drop = usual * gradient + carry - update - lanes.carry
        seen += (usual * slope**2)[..., 0] / steps
        moved += norms(usual * gradient - drop) ** 2 / steps
        lost += norms(drop) / steps
        x = x - rate * update
    given = {"steps": steps, "lr": rate, "smoothness": 2.0, "gap": np.log1p(start**2), "gradient_norm": 1.0}
    measured = {"moved_square": moved.mean(-1), "dropped": lost.mean(-1), "radius": radius, "policy": policy}
    dominates(seen, policies.drip_stationarity(**given, **measured), noticed=0.4)


# ------------------------------------------------------------------ Shrunk


def biases(gradients, policy):
    """(cuts, what is added back) at each step after the first five hundred; axes (steps, runs, coordinates)."""
    lanes, cuts, added = Lanes(Norm(1.0), policy, gradients.shape[1:]), [], []
    for n, row in enumerate(gradients):
        old = lanes.carry
        lanes.step(row)
        if n < 500:
            continue
        carry, level = lanes.carry, lanes.rule.memory.noise
        cuts.append((carry - policy.decay * old) * policy.memory)
        square = norms(carry)[..., None] ** 2
        share = np.maximum(0.0, 1.0 - level**2 / square)
        added.append(share * carry)
    return np.array(cuts), np.array(added)


def test_the_share_of_bias_that_shrunk_leaves():
    """Long gradients lean a little to one side, amid noise in 200 dimensions."""
    rng = np.random.default_rng(9)
    policy, dimension = Shrunk(50), 200
    for lean in (1.0, 0.3):
        size = rng.lognormal(0.0, 1.0, (1500, 20, 1))
        gradients = size * rng.normal(size=(1500, 20, dimension)) / np.sqrt(dimension)
        gradients[..., 0] += lean * np.maximum(size[..., 0] - 1.0, 0.0)
        cuts, added = biases(gradients, policy)
        mean = cuts.mean((0, 1))
        spread = ((cuts - mean) ** 2).sum(-1).mean() / (mean @ mean)
        given_back = (added.mean((0, 1)) @ mean) / (mean @ mean)
        assert given_back == pytest.approx(1 - float(policies.shrunk_left(spread, policy=policy)), rel=0.1)


@pytest.mark.parametrize("point", range(POINTS))
def test_what_shrunk_pays_where_there_is_no_bias(point):
    """At 20 random points, with 20,000 seeds; from 1 dimension on, where noise passes for bias most easily."""
    rng = np.random.default_rng(100 + point)
    dimension, memory = int(rng.integers(1, 25)), float(rng.uniform(3.0, 15.0))
    tail, scale = rng.uniform(0.2, 1.2), rng.uniform(0.5, 3.0)
    lanes = Lanes(Norm(1.0), Shrunk(memory), (SEEDS, dimension))
    for _ in range(round(8 * memory)):
        size = scale * rng.lognormal(0.0, tail, (SEEDS, 1)) / np.sqrt(dimension)
        lanes.step(size * rng.normal(size=(SEEDS, dimension)))
    square, level = norms(lanes.carry) ** 2, lanes.rule.memory.noise.reshape(SEEDS) ** 2
    paid = np.maximum(0.0, square - level)  # the share of the square that stands out
    bound = float(policies.shrunk_noise(dimension)) * level.mean()
    dominates(paid, bound, noticed=0.25)  # the truth is between a third and two thirds of it


def test_bad_input_is_named():
    with pytest.raises(bounds.OutsideConditionsError, match="cap > 0"):
        policies.capped_bias(variance=1.0, radius=1.0, cap=0.0)
    with pytest.raises(ValueError, match="whole number of steps"):
        policies.gated_average_bias(0, clipped_mean=0.0, excess=1.0, variance=1.0, radius=1.0)
    with pytest.raises(bounds.OutsideConditionsError, match="clipped_mean < threshold"):
        policies.late_shut(10, clipped_mean=0.6)
    with pytest.raises(bounds.OutsideConditionsError, match="dimension >= 1"):
        policies.shrunk_noise(0.5)
