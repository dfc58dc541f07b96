"""Learning rates that change: path-wise bounds on 2,000 adversarial sequences, schedules against simulation."""

import numpy as np
import pytest

from carryclip import Component, Norm
from carryclip.theory import bounds, rates
from theory.lanes import POINTS, SEEDS, Lanes, dominates, norms

RUNS, STEPS, DIMENSION = 2000, 60, 2


def projected(x, radius):
    return x * np.minimum(1.0, radius / np.maximum(norms(x), 1e-300))[:, None]


def adversaries(rng, scale=1.0):
    """Gradients as a function of (step, x, carry): noise, one way, heavy tails, away from 0, with the carry."""
    size = scale * 10.0 ** rng.uniform(-1, 1, (RUNS, 1))
    kind = rng.integers(0, 5, (RUNS, 1))
    side = np.sign(rng.normal(size=(RUNS, DIMENSION)))
    draws = rng.standard_t(3, (STEPS, RUNS, DIMENSION))

    def gradient(n, x, carry):
        noise = size * draws[n]
        heavy = noise * np.abs(draws[n, :, :1]) ** 2
        ways = [
            noise,
            np.abs(noise) * side,
            heavy,
            noise + 2 * size * np.sign(x),
            np.abs(noise) * np.sign(carry + 1e-9),
        ]
        return np.choose(kind, ways)

    return gradient


def play(over, etas, scale=1.0, diameter=2.0):
    """Projected descent in 2,000 balls at once: (largest regret over the ball, ||u||, ||D||, rates, path)."""
    gradient = adversaries(np.random.default_rng(7), scale)
    lanes = Lanes(over(scale), True, (RUNS, DIMENSION))
    x = np.zeros((RUNS, DIMENSION))
    linear, along, path, used = np.zeros_like(x), np.zeros(RUNS), [], []
    updates, carries = [], []
    for n in range(STEPS):
        g = gradient(n, x, lanes.carry)
        u = lanes.step(g)
        updates.append(norms(u))
        carries.append(norms(lanes.carry))
        along, linear = along + (g * x).sum(-1), linear + g
        eta = etas(n, updates[-1], carries[-1])
        used.append(np.broadcast_to(eta, RUNS))
        x = projected(x - np.reshape(eta, (-1, 1)) * u, diameter / 2)
        path.append(x)
    return along + norms(linear) * diameter / 2, np.array(updates), np.array(carries), np.array(used), np.array(path)


@pytest.mark.parametrize("over", [Component, Norm])
def test_any_rates_that_never_grow(over):
    given = np.sort(10.0 ** np.random.default_rng(1).uniform(-3, 1, (STEPS, RUNS)), axis=0)[::-1]
    regret, updates, carries, used, _ = play(over, lambda n, u, d: given[n])
    bound = np.array(
        [rates.projected_regret(*row, diameter=2.0) for row in zip(used.T, updates.T, carries.T, strict=True)]
    )
    assert (regret <= bound * (1 + 1e-12)).all()
    assert (regret > 0.3 * bound).any(), "a third of it would be noticed"


class ManyRates:
    def __init__(self, diameter):
        self.rates = [rates.AdaptiveRate(diameter) for _ in range(RUNS)]

    def __call__(self, n, update, carry):
        return np.array([r.step(float(u), float(d)) for r, u, d in zip(self.rates, update, carry, strict=True)])


@pytest.mark.parametrize("over", [Component, Norm])
def test_the_rate_that_tunes_itself(over):
    chosen = ManyRates(2.0)
    regret, _, _, used, path = play(over, chosen)
    bound = np.array([rate.regret for rate in chosen.rates])
    assert (regret <= bound * (1 + 1e-12)).all()
    assert (regret > 0.5 * bound).any(), "half of it would be noticed"
    assert (np.diff(used, axis=0)[used[:-1] > 0] <= 0).all()
    assert np.abs(play(over, ManyRates(2.0), scale=137.0)[-1] - path).max() < 1e-9, "scale-free"


def test_follow_the_leader_on_updates():
    """On the whole space, and with x* the best point of a ball for the comparison."""
    given = np.sort(10.0 ** np.random.default_rng(2).uniform(-3, 0, (STEPS, RUNS)), axis=0)[::-1]
    gradient, lanes = adversaries(np.random.default_rng(7)), Lanes(Norm(1.0), True, (RUNS, DIMENSION))
    sums = linear = np.zeros((RUNS, DIMENSION))
    along, sizes, carries = np.zeros(RUNS), [], []
    for n in range(STEPS):
        x = projected(-given[n][:, None] * sums, 1.0)
        g = gradient(n, x, lanes.carry)
        sizes.append(norms(g))
        carries.append(norms(lanes.carry))
        along, linear = along + (g * x).sum(-1), linear + g
        sums = sums + lanes.step(g)
    regret = along + norms(linear)
    rows = zip(given.T, np.array(sizes).T, np.array(carries).T, strict=True)
    bound = np.array([rates.leader_regret(*row, distance=1.0) for row in rows])
    assert (regret <= bound * (1 + 1e-12)).all()
    assert (regret > 0.1 * bound).any()


def schedule(kind, steps):
    t = np.arange(steps)
    return {
        "cosine": 0.05 * (1 + np.cos(np.pi * t / steps)) + 1e-4,
        "warm-up": 0.1 * np.minimum(1.0, (t + 1) / (steps / 3)),
        "restarts": np.where(t % 40 < 20, 0.02, 0.2),
    }[kind]


@pytest.mark.parametrize("kind", ["cosine", "warm-up", "restarts"])
def test_a_carry_in_update_units_takes_any_schedule(kind):
    """|x| with uniform noise at 20 points with 20,000 seeds: the shipped clipping, given eta·g and eta·radius."""
    rng = np.random.default_rng(3)
    steps = 100
    eta = schedule(kind, steps)
    alpha, width, start = rng.uniform(0.1, 1.0, POINTS), rng.uniform(0.5, 2.0, POINTS), rng.uniform(0.0, 4.0, POINTS)
    x = np.ones((POINTS, SEEDS, 1)) * start[:, None, None]
    region = Component(lambda step: eta[step] * (1.0 + alpha))
    lanes, owed, regret = Lanes(region, True, x.shape), np.zeros((POINTS, SEEDS)), np.zeros((POINTS, SEEDS))
    for n in range(steps):
        owed += eta[n] * norms(lanes.carry)
        regret += eta[n] * np.abs(x[..., 0]) / eta.sum()
        noise = width[:, None, None] * (2.0 * rng.random((SEEDS, 1)) - 1.0)
        x = x - lanes.step(eta[n] * (np.sign(x) + noise))
    given = {"alpha": alpha, "variance": width**2 / 3}
    dominates(owed, rates.update_carry(eta, **given), noticed=0.1)
    more = {"distance": start, "gradient_square": 1.0 + width**2 / 3, "mean_gradient": 1.0}
    dominates(regret, rates.schedule_regret(eta, **more, **given), noticed=0.6)


def test_gradient_units_pay_for_a_schedule_once():
    """A carry made at a small rate is paid at a large one: the shadow jumps by the difference times the carry."""
    rng = np.random.default_rng(4)
    steps, eta = 100, schedule("warm-up", 100)
    alpha, width, start = rng.uniform([[0.1], [0.5], [0.5]], [[1.0], [2.0], [4.0]], (3, POINTS))
    x = np.ones((POINTS, SEEDS, 1)) * start[:, None, None]
    lanes, regret = Lanes(Component(1.0 + alpha), True, x.shape), np.zeros((POINTS, SEEDS))
    largest = far = np.zeros(POINTS)
    for n in range(steps):
        regret += eta[n] * np.abs(x[..., 0]) / eta.sum()
        far = np.maximum(far, np.abs(x - eta[n] * lanes.carry).max((1, 2)))
        noise = width[:, None, None] * (2.0 * rng.random((SEEDS, 1)) - 1.0)
        x = x - eta[n] * lanes.step(np.sign(x) + noise)
        largest = np.maximum(largest, norms(lanes.carry).mean(-1))
    jump = rates.unit_price(eta, domain=far, carry=largest)
    given = {"distance": start, "gradient_square": 1 + width**2 / 3, "mean_gradient": 1.0}
    given |= {"alpha": alpha, "variance": width**2 / 3}
    bound = rates.schedule_regret(eta, jump=jump, carry=largest, **given)
    dominates(regret, bound, noticed=0.6)
    with pytest.raises(bounds.OutsideConditionsError, match=r"needs carry, a bound on .* rates that rise"):
        rates.schedule_regret(eta, jump=jump, **given)
    falls = rates.schedule_regret(eta[::-1], jump=jump, **given)
    assert falls == pytest.approx(rates.schedule_regret(eta[::-1], jump=jump, carry=100.0, **given)), "not needed there"


def test_a_rate_that_rises_weighs_the_carry_where_it_is_large():
    """Spikes of 2·alpha for each step that is left: at the last step the carry exceeds its average over time.

    So in gradient units the margin alone does not bound the carry weighted by a rate that has its peak there.
    """
    rng, steps, runs, alpha = np.random.default_rng(6), 400, SEEDS, 0.1
    lanes, largest, sizes = Lanes(Component(alpha), True, (runs, 1)), 0.0, []
    for n in range(steps):
        height = max(2 * alpha * (steps - n), 1.0)
        p = min(1 / height**2, 0.5)
        sizes.append(np.abs(lanes.carry).mean())
        lanes.step(height * ((rng.random((runs, 1)) < p) - p))
    sizes.append(np.abs(lanes.carry).mean())
    largest = max(sizes)
    given = {"alpha": alpha, "variance": 1.0}
    average = float(rates.update_carry([1.0], **given))
    assert np.mean(sizes) < average < 0.85 * largest
    eta = np.append(np.full(steps, 1e-3), 1.0)
    weighted = (eta**2 * sizes).sum()
    assert weighted > 1.15 * rates.update_carry(eta, **given)
    more = {"distance": 0.0, "gradient_square": 0.0, "mean_gradient": 1.0, "jump": 0.0, **given}
    assert weighted <= eta.sum() * rates.schedule_regret(eta, carry=largest, **more)
    assert weighted > 0.8 * eta.sum() * rates.schedule_regret(eta, carry=largest, **more)


def test_exact_gradients_descend_in_update_units_for_any_schedule():
    """f + h_K(e) has no rate in it: it falls by (1/eta - L/2)·||w||², to 1e-12."""
    rng = np.random.default_rng(5)
    curvature = rng.uniform(0.1, 3.0, (RUNS, DIMENSION))
    smooth = curvature.max(1) + 1.0
    eta = rng.uniform(0.01, 1.9, STEPS)
    owed, x = np.zeros((RUNS, DIMENSION)), 10.0 * rng.normal(size=(RUNS, DIMENSION))

    def value(x):
        return (curvature * x**2 / 2 + np.cos(x)).sum(-1)

    for n in range(STEPS):
        rate = (eta[n] / smooth)[:, None]
        # The shipped rule on (eta·g + e)/eta and radius 1, put back into update units.
        lanes = Lanes(Norm(1.0), True, (RUNS, DIMENSION))
        sent = rate * lanes.step(curvature * x - np.sin(x) + owed / rate)
        left = rate * lanes.carry
        before, after = value(x) + norms(owed), value(x - sent) + norms(left)
        fall = (1 / rate[:, 0] - smooth / 2) * norms(sent) ** 2
        assert ((after - before + fall) / np.maximum(1.0, np.abs(before))).max() <= 1e-12
        x, owed = x - sent, left


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="must not increase"):
        rates.projected_regret([0.1, 0.2], [1.0, 1.0], [0.0, 0.0], diameter=1.0)
    with pytest.raises(ValueError, match="diameter must be above 0"):
        rates.AdaptiveRate(0.0)
    with pytest.raises(ValueError, match="carry_norm must be at least 0"):
        rates.AdaptiveRate(1.0).step(1.0, float("nan"))
    with pytest.raises(ValueError, match="one for each step"):
        rates.unit_price([[0.1, 0.2]], domain=1.0, carry=1.0)
    assert rates.AdaptiveRate(1.0).step(0.0, 0.0) == 0.0
    assert rates.AdaptiveRate(np.float32(1.0)).diameter == 1.0
    for bad in (-1.0, float("nan")):
        with pytest.raises(bounds.OutsideConditionsError, match="diameter"):
            rates.projected_regret([0.1], [1.0], [0.0], diameter=bad)
        with pytest.raises(bounds.OutsideConditionsError, match="distance"):
            rates.leader_regret([0.1], [1.0], [0.0], distance=bad)


SEEN = {
    (1.2, "cosine"): (0.43, 0.44),
    (1.2, "warm-up"): (0.45, 0.45),
    (1.2, "restarts"): (0.83, 0.82),
    (0.5, "cosine"): (0.60, 0.61),
    (0.5, "warm-up"): (0.71, 0.55),
    (0.5, "restarts"): (1.88, 0.92),
}
"""Weighted regret in gradient units and in update units, as docs/theory/rates has it."""


@pytest.mark.parametrize(("radius", "kind"), SEEN)
def test_where_the_units_of_the_carry_matter(radius, kind):
    """|x| from 5 with rare gradients of 10. With a margin hardly; below the mean gradient where rates rise."""
    steps = 3000
    t = np.arange(steps)
    restarts = np.where(t % 200 < 100, 0.02, 0.2)
    eta = restarts if kind == "restarts" else schedule(kind, steps)
    regrets = []
    for region in (Component(radius), Component(lambda step: float(eta[step] * radius))):
        rng, x = np.random.default_rng(0), np.full((500, 1), 5.0)
        lanes, regret = Lanes(region, True, x.shape), 0.0
        for n in range(steps):
            regret += eta[n] * np.abs(x).mean() / eta.sum()
            gradient = np.sign(x) + 10.0 * ((rng.random(x.shape) < 0.1) - 0.1)
            before, after = (eta[n], 1.0) if callable(region.radius) else (1.0, eta[n])
            x = x - after * lanes.step(before * gradient)
        regrets.append(regret)
    assert regrets == pytest.approx(SEEN[radius, kind], abs=0.006)
