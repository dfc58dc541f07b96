"""What the gate of ``Gated`` does and what it does not, gradient by gradient through the shipped algorithm."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carryclip import Component, Gated, Norm
from carryclip.theory import bounds, noise, simulate
from carryclip.theory.problems import Custom, Linear

BOTH = pytest.mark.parametrize("region", [Component(1.0), Norm(1.0)], ids=repr)


def play(gradients, region=Component(1.0), carry=Gated()):  # noqa: B008
    """(updates, carries) of gradients written down beforehand: axes (steps, runs), or (steps,) for one run."""
    script = np.asarray(gradients, float)
    rows = iter(script.reshape(len(script), -1, 1))
    problem = Custom(lambda x: np.zeros(x.shape[:-1]), lambda x: next(rows))
    seen = simulate.run(
        problem,
        region,
        carry=carry,
        lr=1.0,  # so that the path's differences are the updates
        steps=len(script),
        seeds=script[0].size,
        times=range(1, len(script) + 1),
        paths=True,
    )
    assert seen.path is not None
    path = np.concatenate([np.zeros_like(seen.path[:1]), seen.path])
    return -np.diff(path, axis=0).reshape(script.shape), seen.carry.reshape(script.shape)


# ------------------------------------------------------------------ how soon it shuts


@BOTH
def test_a_constant_gradient_from_the_first_step_on_is_stopped_at_once(region):
    _, carry = play([1.5] * 300, region)
    assert carry == pytest.approx(np.full(300, 0.5))


@BOTH
def test_after_a_quiet_time_a_constant_gradient_winds_up_for_a_while(region):
    """A carry of 0 does not make the gate new: a thousand quiet feeds hold it open, and 0.5 becomes 34.5."""
    _, carry = play([0.5] * 1000 + [1.5] * 300, region)
    assert not carry[:1000].any()
    assert carry.max() == pytest.approx(34.5)
    assert 0.5 * (1 + bounds.gated_growth_steps(average=0.0)) == 34.5


@BOTH
def test_the_number_of_steps_is_reached(region):
    """Gradients that turn the carry over at every step make the worst average there is."""
    worst = [10.0] + [-12.0, 12.0] * 1000
    _, carry = play(worst + [1.5] * 300, region)
    grew = np.flatnonzero(np.diff(carry[len(worst) - 1 :]) > 0)
    assert grew.tolist() == list(range(137))
    assert bounds.gated_growth_steps() == 137


def test_it_depends_on_decay_and_threshold():
    assert bounds.gated_growth_steps(policy=Gated(decay=0.9)) == 13
    assert bounds.gated_growth_steps(policy=Gated(decay=0.999)) == 1385
    assert bounds.gated_growth_steps(policy=Gated(threshold=0.9)) == 298
    assert bounds.gated_growth_steps(policy=Gated(decay=0.0)) == 0
    assert bounds.gated_growth_steps(feed=0.6) > bounds.gated_growth_steps(feed=1.0)
    with pytest.raises(bounds.OutsideConditionsError, match="threshold = 1 < feed"):
        bounds.gated_growth_steps(policy=Gated(threshold=1.0))


@given(
    history=st.lists(st.floats(-30, 30), min_size=1, max_size=60),
    repeats=st.integers(1, 4),
    more=st.lists(st.floats(0, 1), min_size=1, max_size=20),
    slack=st.floats(0, 0.9),
    policy=st.builds(Gated, decay=st.sampled_from([0.0, 0.5, 0.9, 0.97]), threshold=st.floats(0.1, 0.9)),
    region=st.sampled_from([Component(1.0), Norm(1.0)]),
)
def test_whatever_the_history_a_carry_that_is_fed_soon_stops_growing(history, repeats, more, slack, policy, region):
    feed = 1.0 - slack * (1.0 - policy.threshold)
    allowed = int(bounds.gated_growth_steps(feed=feed, policy=policy))
    past = history * repeats
    updates, carry = play(past, region, policy)
    assume(carry[-1] > 0)
    feeding = np.sign(updates[-1]) * np.resize(feed + np.array(more), allowed + 30)
    carry = play([*past, *feeding], region, policy)[1][len(past) - 1 :]
    gone = np.flatnonzero(carry == 0)  # feeds of less than a radius may use it up, and then nothing is fed
    if gone.size:
        carry = carry[: gone[0]]
    assert np.count_nonzero(np.diff(carry) > 1e-9) <= allowed


def test_under_noise_it_is_seldom_open_while_the_mean_feeds_the_carry():
    """After the worst history, and with a carry of 60 radii that is not used up; one that grows shows an open gate."""
    policy, runs = Gated(decay=0.98), 4000
    worst = np.repeat([10.0] + [-12.0, 12.0] * 300 + [-12.0, 70.0], runs).reshape(-1, runs)
    noisy = np.random.default_rng(6).uniform(0.1, 2.1, (300, runs))
    clipped = 1.0 - 0.9**2 / 4  # 1 less the mean of what lies below 1
    carry = play(np.concatenate([worst, noisy]), carry=policy)[1][len(worst) - 1 :]
    assert (carry > 0).all()
    steps = np.arange(1, 301)
    bound = bounds.gate_open(steps, clipped_mean=clipped, policy=policy)
    grew = (np.diff(carry, axis=0) > 0).mean(1)
    assert (grew <= bound + 6 * np.sqrt(bound / runs)).all()
    assert grew[:80].min() > 0.5, "the history holds it open"
    assert grew[95] > 0.01, "and does so past the step from which the bound is below 1"
    assert bound[94] < 1.0
    assert bound[-1] < 0.02


# ------------------------------------------------------------------ what it tests is not the mean


def test_a_mean_of_two_radii_in_rare_large_gradients_goes_to_the_cap():
    """20 radii once in ten steps: the feed is 1 once in ten steps, and the gate stays open."""
    gradients = np.where(np.random.default_rng(0).random((3000, 200)) < 0.1, 20.0, 0.0)
    _, carry = play(gradients)
    assert (carry.max(0) == 100.0).all()
    assert carry[1500:].mean() == pytest.approx(89, abs=1)


def test_under_noise_of_several_radii_only_the_cap_bounds_the_carry():
    """A mean of 1.5 radii and noise of ±4: the clipped mean is 0.375, below the threshold."""
    gradients = 1.5 + np.random.default_rng(1).uniform(-4.0, 4.0, (6000, 200))
    assert np.clip(gradients, -1.0, 1.0).mean() == pytest.approx(0.375, abs=0.005)
    _, carry = play(gradients)
    assert carry[3000:].mean() == pytest.approx(95, abs=1)
    assert (carry.max(0) == 100.0).all()
    _, full = play(gradients, carry=True)
    assert full[-1].mean() > 2500


@pytest.mark.parametrize(("mean", "carried"), [(1.5, 2.1), (3.0, 2.2)])
def test_under_noise_of_two_radii_the_gate_does_its_work(mean, carried):
    gradients = mean + np.random.default_rng(2).uniform(-2.0, 2.0, (6000, 200))
    _, carry = play(gradients)
    assert carry[3000:].mean() == pytest.approx(carried, abs=0.2)


def test_a_mean_close_below_the_radius_shuts_the_gate_though_it_could_be_paid():
    """A mean of 0.9 radii and noise of ±1: the full carry has no bias and stays small, Gated loses 0.045 a step."""
    gradients = 0.9 + np.random.default_rng(3).uniform(-1.0, 1.0, (6000, 400))
    lost = {}
    for name, policy in (("full", True), ("gated", Gated()), ("none", False)):
        updates, carry = play(gradients, carry=policy)
        lost[name] = (gradients - updates)[3000:].mean()
        if name == "full":
            assert carry[3000:].mean() < 1.6
    assert lost["full"] == pytest.approx(0.0, abs=0.002)
    assert lost["gated"] == pytest.approx(0.045, abs=0.003)
    assert lost["none"] == pytest.approx(0.2, abs=0.01)


def test_with_a_carry_the_mean_update_is_at_least_the_mean_of_plain_clipping():
    """Whatever the gate does: clipping g + D for D >= 0 gives no less than clipping g."""
    gradients = np.random.default_rng(4).lognormal(0.0, 1.0, (500, 200))
    updates, _ = play(gradients)
    plain = np.clip(gradients, -1.0, 1.0)
    assert (updates >= plain - 1e-9).all()
    assert (updates > plain + 0.01).any()


def test_under_a_norm_the_gate_shuts_as_rarely_as_its_bound_says():
    """Symmetric noise around a mean of 0.3 radii. A gate that never shuts leaves the full carry, here below the cap."""
    policy, tilt, dimension = Gated(decay=0.95), 0.3, 5
    along = np.full(dimension, tilt / math.sqrt(dimension))
    rng = np.random.default_rng(5)
    direction = rng.normal(size=(200, dimension))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    draws = (along + 0.9 * rng.normal(size=(20_000, dimension))) @ direction.T
    assert np.clip(draws, -1.0, 1.0).mean(0).max() <= tilt, "the norm of the mean bounds the clipped mean of any part"
    common = {"noise": noise.Gaussian(0.9), "dimension": dimension, "steps": 120, "seeds": 4000, "times": [120]}
    problem = Linear(along[0])
    gated = simulate.run(problem, Norm(1.0), carry=policy, **common)
    full = simulate.run(problem, Norm(1.0), carry=True, **common)
    assert full.peak_carry.max() < 100
    shut_once = np.abs(gated.carry[-1] - full.carry[-1]) > 1e-9
    expected = sum(bounds.gate_shut(t, clipped_mean=tilt, policy=policy) for t in range(1, 121))
    assert shut_once.mean() <= min(expected, 1.0)
