"""Minibatches, momentum, Adam's normaliser and clipping of the step, through the shipped algorithm."""

import numpy as np
import pytest

from carryclip import Component
from carryclip.theory import bounds, optimizers
from theory.lanes import POINTS, SEEDS, Lanes, dominates, norms, on_average


def test_larger_batches_carry_less_in_proportion():
    rng = np.random.default_rng(1)
    batch, alpha = rng.integers(1, 33, POINTS), rng.uniform(0.05, 0.5, POINTS)
    seen = np.zeros((POINTS, SEEDS))
    lanes = Lanes(Component(0.5 + alpha), True, (POINTS, SEEDS, 1))
    for _ in range(60):
        seen += norms(lanes.carry) / 60
        noise = np.stack([2.0 * rng.binomial(b, 0.5, SEEDS) / b - 1.0 for b in batch])
        lanes.step(0.5 + noise[..., None])
    dominates(seen, optimizers.batch_average(batch, alpha=alpha, variance=1.0), noticed=0.5)


def test_workers_that_clip_first_carry_more():
    """Four workers with four samples each against one mean of sixteen."""
    rng, seen = np.random.default_rng(2), {}
    for name, workers, size in (("before", 4, 4), ("after", 1, 16)):
        lanes, total = Lanes(Component(0.6), True, (workers, 2000, 1)), np.zeros((1, 2000))
        for _ in range(1500):
            total += np.abs(lanes.carry[..., 0].mean(0)) / 1500
            lanes.step(0.5 + 2.0 * rng.binomial(size, 0.5, (workers, 2000, 1)) / size - 1.0)
        seen[name] = total
    on_average(seen["before"], optimizers.batch_average(16, alpha=0.1, variance=1.0, workers=4))
    on_average(seen["after"], optimizers.batch_average(16, alpha=0.1, variance=1.0))
    assert seen["before"].mean() > 1.5 * seen["after"].mean()


def test_what_workers_carry_is_bounded_at_any_margin():
    """Three workers with up to eight samples each, at 20 points with 20,000 seeds."""
    rng, workers, steps = np.random.default_rng(7), 3, 40
    size, alpha = rng.integers(1, 9, POINTS), rng.uniform(0.05, 0.5, POINTS)
    lanes = Lanes(Component(0.5 + np.repeat(alpha, workers)), True, (POINTS * workers, SEEDS, 1))
    seen = np.zeros((POINTS, SEEDS))
    for _ in range(steps):
        seen += np.abs(lanes.carry.reshape(POINTS, workers, SEEDS).mean(1)) / steps
        noise = np.stack([2.0 * rng.binomial(b, 0.5, SEEDS) / b - 1.0 for b in np.repeat(size, workers)])
        lanes.step(0.5 + noise[..., None])
    dominates(seen, optimizers.batch_average(size * workers, workers=workers, alpha=alpha, variance=1.0), noticed=0.3)


def test_regret_under_momentum():
    """|x| with momentum 0.8: SGD's bound with beta·gamma/(1 - beta) added to the carry."""
    rng = np.random.default_rng(3)
    steps, rate, beta = 120, 0.05, 0.8
    width, alpha, start = rng.uniform(0.5, 2.0, POINTS), rng.uniform(0.1, 1.0, POINTS), rng.uniform(0.0, 4.0, POINTS)
    lanes, x = (
        Lanes(Component(1.0 + alpha), True, (POINTS, SEEDS, 1)),
        np.ones((POINTS, SEEDS, 1)) * start[:, None, None],
    )
    m, regret, carried = np.zeros_like(x), np.zeros((POINTS, SEEDS)), np.zeros((POINTS, SEEDS))
    for _ in range(steps):
        regret += np.abs(x[..., 0]) / steps
        carried += norms(lanes.carry) / steps
        noise = width[:, None, None] * (2.0 * rng.random((SEEDS, 1)) - 1.0)
        m = beta * m + (1 - beta) * lanes.step(np.sign(x) + noise)
        x = x - rate * m
    carry = optimizers.momentum_carry(momentum=beta, radius=1.0 + alpha, carry=carried.mean(-1))
    given = {"steps": steps, "lr": rate, "distance": start, "gradient_square": 1 + width**2 / 3, "mean_gradient": 1.0}
    dominates(regret, bounds.shadow_regret(carry=carry, **given), noticed=0.7)


def adam(policy, rate, steps=12_000, seeds=60, decay=0.999, momentum=0.9):
    """(RMS of x over the second half, rms(g)/rms(u)) on x²/2 with rare gradients of ten radii."""
    rng = np.random.default_rng(0)
    region = Component(1.0) if policy is not None else Component(np.inf)
    lanes = Lanes(region, policy if policy is not None else False, (seeds, 1))
    x = m = v = np.zeros((seeds, 1))
    squares = np.zeros(3)
    for t in range(1, steps + 1):
        g = x + 10.0 * ((rng.random((seeds, 1)) < 0.02) - 0.02)
        u = lanes.step(g)
        m, v = momentum * m + (1 - momentum) * u, decay * v + (1 - decay) * u**2
        x = x - rate * (m / (1 - momentum**t)) / (np.sqrt(v / (1 - decay**t)) + 1e-12)
        if t > steps // 2:
            squares += [(x**2).mean(), (g**2).mean(), (u**2).mean()]
    return np.sqrt(squares[0] / (steps / 2)), np.sqrt(squares[1] / squares[2])


def test_before_adam_the_full_carry_is_a_larger_learning_rate():
    """Divided by rms(g)/rms(u), the rate gives what Adam has on raw gradients."""
    raw, _ = adam(None, 1e-3)
    same, ratio = adam(True, 1e-3)
    factor = float(optimizers.rate_factor(gradient_rms=ratio, update_rms=1.0))
    assert factor > 2.0
    assert same > 1.4 * raw
    matched, _ = adam(True, 1e-3 / factor)
    assert matched == pytest.approx(raw, rel=0.1)


@pytest.mark.parametrize("multiple", [1.5, 2.0])
def test_a_step_clipped_at_two_rates_keeps_its_carry_below_one(multiple):
    """Gradients of any size, mean and tail, divided by their true root mean square."""
    rng = np.random.default_rng(5)
    rate, mean, p = 1e-3, rng.uniform(-3, 3, POINTS), rng.uniform(0.01, 0.5, POINTS)
    height = 10.0 ** rng.uniform(-2, 2, POINTS)
    rms = np.sqrt(mean**2 + height**2 * p * (1 - p))
    lanes, seen = Lanes(Component(multiple * rate), True, (POINTS, SEEDS, 1)), np.zeros((POINTS, SEEDS))
    for _ in range(60):
        seen += norms(lanes.carry) / 60
        g = mean + height * ((rng.random((SEEDS, 1)) < p) - p)
        lanes.step((rate * g / rms).T[..., None])
    on_average(seen, optimizers.step_average(lr=rate, multiple=multiple))


def test_a_falling_preconditioner_keeps_the_descent():
    """Gradient units before a diagonal that never grows: f + gamma·sum h|D| falls, to 1e-12."""
    rng = np.random.default_rng(6)
    curvature = rng.uniform(0.1, 3.0, (1000, 3))
    smooth = (curvature.max(1) + 1.0)[:, None]
    h = rng.uniform(0.1, 1.9, (1000, 3)) / smooth
    lanes, x = Lanes(Component(0.7), True, (1000, 3)), 10.0 * rng.normal(size=(1000, 3))

    def value(x):
        return (curvature * x**2 / 2 + np.cos(x)).sum(-1)

    for _ in range(100):
        before = value(x) + 0.7 * (h * np.abs(lanes.carry)).sum(-1)
        u = lanes.step(curvature * x - np.sin(x))
        x, spent = x - h * u, (h * u**2 - smooth / 2 * (h * u) ** 2).sum(-1)
        h = h * rng.uniform(0.97, 1.0, h.shape)
        after = value(x) + 0.7 * (h * np.abs(lanes.carry)).sum(-1)
        assert ((after - before + spent) / np.maximum(1.0, np.abs(before))).max() <= 1e-12


def test_a_unit_of_gradient_waits_for_the_mean_carry_over_what_is_fed():
    """Spikes of 6 radii once in ten steps: 5 radii are carried, and paid one a step."""
    lanes, carried, fed = Lanes(Component(1.0), True, (1, 1)), 0.0, 0.0
    for n in range(1000):
        before = lanes.carry.item()
        lanes.step(np.array([[6.0 if n % 10 == 0 else 0.0]]))
        carried += lanes.carry.item() / 1000
        fed += max(0.0, lanes.carry.item() - before) / 1000
    assert float(optimizers.waiting(mean_carry=carried, mass=fed)) == pytest.approx(3.0)


def test_bad_input_is_named():
    with pytest.raises(bounds.OutsideConditionsError, match="0 <= momentum < 1"):
        optimizers.momentum_gap(momentum=1.0, largest_carry=1.0)
    with pytest.raises(bounds.OutsideConditionsError, match="batch >= workers >= 1"):
        optimizers.batch_average(2, alpha=1.0, variance=1.0, workers=4)
    with pytest.raises(bounds.OutsideConditionsError, match="update_rms > 0"):
        optimizers.rate_factor(gradient_rms=1.0, update_rms=0.0)
