"""Bounds for recorded gradients: 2,000 adversarial sequences each, no probability and no allowance."""

import numpy as np
import pytest

from carryclip import Capped, Component, Gated, Leaky, Norm
from carryclip.theory import bounds, paths
from theory.lanes import Lanes, norms

RUNS, STEPS = 2000, 60


def sequences(seed=5):
    """Sequences of many kinds, axes (steps, runs): noise, drifts, swings, spikes, and a push against the carry."""
    rng = np.random.default_rng(seed)
    gradients = rng.normal(size=(STEPS, RUNS)) * rng.choice([0.3, 1.0, 3.0], RUNS) + 0.5 * rng.normal(size=RUNS)
    kind = rng.integers(0, 5, RUNS)
    gradients = np.where(kind == 1, 0.2 * np.cumsum(gradients, axis=0), gradients)
    gradients = np.where(
        kind == 2, 3.0 * np.sign(np.sin(np.arange(STEPS)[:, None] / rng.uniform(1, 9, RUNS))), gradients
    )
    gradients = np.where(kind == 3, gradients * (rng.random((STEPS, RUNS)) < 0.1) * 20.0, gradients)
    return gradients, rng


def carries(gradients, radius, policy=True):
    """The carry before each step and after the last, through the shipped algorithm."""
    lanes = Lanes(Component(radius), policy, (gradients.shape[1], 1))
    found = [np.zeros(gradients.shape[1])]
    for row in gradients:
        lanes.step(row[:, None])
        found.append(lanes.carry[:, 0])
    return np.array(found)


@pytest.mark.parametrize("radius", [0.1, 0.7, 2.0])
def test_recorded_gradients_tell_the_carry_up_to_a_factor_two(radius):
    gradients, _ = sequences()
    carry = carries(gradients, radius)
    found = paths.path_carry(gradients, radius)
    room = 1e-9 * (1 + np.abs(gradients).sum(0))
    assert (carry <= found.above + room).all()
    assert (-carry <= found.below + room).all()
    largest = np.abs(carry).max(0)
    assert (largest <= found.most + room).all()
    assert (largest >= found.least - room).all()
    known = found.most > 1e-6
    share = largest[known] / found.most[known]
    assert share.max() > 0.999, "a smaller upper bound is wrong"
    assert share.min() < 0.62, "and a larger lower one"


def test_both_factors_are_reached():
    found = paths.path_carry([-1.5, 1.5, 1.5], 0.5)
    assert carries(np.array([[-1.5], [1.5], [1.5]]), 0.5)[:, 0].tolist() == [0.0, -1.0, 0.0, 1.0]
    assert (found.least, found.most) == (1.0, 2.0)
    assert paths.path_carry([3.0], 1.0).most == np.abs(carries(np.array([[3.0]]), 1.0)).max()


def test_radii_that_change():
    gradients, rng = sequences(6)
    radii = rng.uniform(0.1, 1.5, (STEPS, 1))
    carry = carries(gradients, lambda step: float(radii[step, 0]))
    found = paths.path_carry(gradients, radii)
    room = 1e-9 * (1 + np.abs(gradients).sum(0))
    assert ((found.least - room <= np.abs(carry).max(0)) & (np.abs(carry).max(0) <= found.most + room)).all()


@pytest.mark.parametrize("policy", [Capped(2), Leaky(0.8), Gated(decay=0.8)], ids=str)
def test_policies_stay_below_the_upper_bound(policy):
    gradients, _ = sequences()
    found = paths.path_carry(gradients, 0.5)
    assert (np.abs(carries(gradients, 0.5, policy)).max(0) <= found.most + 1e-8).all()


def test_the_radius_for_a_carry():
    gradients, _ = sequences()
    radius = paths.path_radius(gradients, 2.0)
    assert (paths.path_carry(gradients, radius[None] * (1 + 1e-9)).most <= 2.0 + 1e-6).all()
    smaller = paths.path_carry(gradients, 0.98 * radius[None]).most
    assert (smaller[radius > 0.01] > 2.0).all()
    curve = paths.path_curve(gradients, [0.1, 0.5, 2.0])
    assert curve.shape == (3, RUNS)
    assert (np.diff(curve, axis=0) <= 0).all()


def test_an_old_carry_proves_that_the_mean_exceeded_the_radius():
    """On a stretch of one sign the carry grows by g - gamma a step, exactly."""
    gradients, _ = sequences()
    carry, radius = carries(gradients, 0.5), 0.5
    ages = np.zeros(RUNS, int)
    seen = 0
    for t in range(1, STEPS + 1):
        same = (np.sign(carry[t]) == np.sign(carry[t - 1])) & (carry[t] != 0)
        ages = np.where(carry[t] == 0, 0, np.where(same, ages + 1, 1))
        for run in np.flatnonzero(ages == 12):
            stretch = np.sign(carry[t, run]) * gradients[t - 12 : t, run]
            proved = paths.age_certificate(carry=abs(carry[t, run]), age=12, radius=radius)
            start = -np.sign(carry[t, run]) * carry[t - 12, run]
            assert stretch.mean() == pytest.approx(float(proved) + start / 12, rel=1e-9)
            assert stretch.mean() >= proved - 1e-9
            seen += 1
    assert seen > 300


def test_windows_that_stray_little():
    """A²/(4·alpha), and a sequence that comes within one percent of it."""
    rng = np.random.default_rng(7)
    gradients = rng.normal(size=(80, RUNS))
    sums = np.concatenate([np.zeros((1, RUNS)), np.cumsum(gradients, axis=0)])
    deviation = np.max([np.abs(sums[j:] - sums[:-j]).max(0) / np.sqrt(j) for j in range(1, 81)], axis=0)
    largest = np.abs(carries(gradients + 0.3, 0.3 + 0.2)).max(0)
    assert (largest <= paths.window_carry(deviation=deviation, alpha=0.2)).all()
    j = np.arange(1, 401)
    slow = np.diff(np.concatenate([[0.0], np.sqrt(j)]))  # every window of it is within sqrt(its length)
    largest = np.abs(carries(slow[:, None] + 0.1, 0.1 + 0.05)).max()
    assert 0.99 <= largest / paths.window_carry(deviation=1.0, alpha=0.05) <= 1.0


@pytest.mark.parametrize("over", [Component, Norm])
def test_any_region_and_dimension_with_a_comparator(over):
    rng = np.random.default_rng(8)
    dimension, alpha = 3, rng.uniform(0.02, 0.9, (RUNS, 1))
    comparator = 0.1 * np.cumsum(rng.normal(size=(STEPS, RUNS, dimension)), axis=0)
    room = 1.0 - alpha
    if over is Component:
        comparator = np.clip(comparator, -room, room)
    else:
        comparator = comparator * np.minimum(1.0, room / np.maximum(norms(comparator)[..., None], 1e-12))
    stray = rng.normal(size=(STEPS + 1, RUNS, dimension))
    stray *= 10.0 ** rng.uniform(-0.5, 1.5, (RUNS, 1)) / norms(stray)[..., None]
    stray[0] = 0.0
    lanes, largest, total = Lanes(over(1.0), True, (RUNS, dimension)), np.zeros(RUNS), np.zeros(RUNS)
    for n in range(STEPS):
        lanes.step(comparator[n] + stray[n + 1] - stray[n])
        largest, total = np.maximum(largest, norms(lanes.carry)), total + norms(lanes.carry)
    given = {"alpha": alpha[:, 0]}
    diameter = 2.0 * (np.sqrt(dimension) if over is Component else 1.0)
    deviation = norms(stray).max(0)
    bound = paths.comparator_carry(deviation=deviation, diameter=diameter, **given)
    assert (largest <= bound).all()
    assert (bound <= paths.comparator_carry(deviation=deviation, **given)).all()
    assert (largest > 0.4 * bound).any(), "half of it would be noticed"
    average = paths.comparator_average(mean_square=(norms(stray[1:]) ** 2).mean(0), **given)
    assert (total / STEPS <= average).all()


def test_without_a_margin_a_norm_in_two_dimensions_has_no_bound():
    """Deviations of ±5 across the mean: the carry grows like the cube root of t; with a margin it settles."""
    grown = {}
    for alpha in (0.0, 0.1):
        lanes = Lanes(Norm(1.0), True, (1, 2))
        across, sizes = 0.0, {}
        for n in range(1, 10_001):
            there = 5.0 if n % 2 else -5.0
            lanes.step(np.array([[1.0 - alpha, there - across]]))
            across = there
            sizes[n] = norms(lanes.carry).item()
        grown[alpha] = sizes
    assert [grown[0.0][n] for n in (100, 1000, 10_000)] == pytest.approx([14.8, 32.8, 71.5], abs=0.2)
    assert grown[0.1][10_000] < 1.05 * grown[0.1][2000] < paths.comparator_carry(deviation=5.0, alpha=0.1, diameter=2.0)


def test_radii_at_the_windows_rms_leave_little():
    """By Cauchy and Schwarz a window's sum is at most sqrt(j·sum of squares)."""
    gradients, _ = sequences()
    squares = np.concatenate([np.zeros((1, RUNS)), np.cumsum(gradients**2, axis=0)])
    largest = np.abs(carries(gradients, 0.5)).max(0)
    bound = np.zeros(RUNS)
    for j in range(1, STEPS + 1):
        bound = np.maximum(bound, (np.sqrt(j * (squares[j:] - squares[:-j])) - 0.5 * j).max(0))
    assert (largest <= bound + 1e-9).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: paths.path_carry([np.nan], 1.0), "gradients must be finite"),
        (lambda: paths.path_carry([1.0], -1.0), "radii must be at least 0"),
        (lambda: paths.path_carry([[1.0, 2.0]] * 3, [1.0, 1.0, 1.0]), r"has shape \(steps, 1\)"),
        (lambda: paths.path_carry(3.0, 1.0), "must have an axis of steps"),
        (lambda: paths.path_radius([1.0], -1.0), "carry must be at least 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
    with pytest.raises(TypeError, match="gradients must be numbers"):
        paths.path_carry("all", 1.0)
    with pytest.raises(bounds.OutsideConditionsError, match="age >= 1"):
        paths.age_certificate(carry=1.0, age=0, radius=1.0)
