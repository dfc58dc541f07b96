"""What holds step by step for every sequence: descent for any policy and region, energy, momentum as a filter."""

import numpy as np
import pytest

from carryclip import Capped, Component, Drip, Gated, Leaky, Norm, reference
from carryclip.theory import nonconvex
from theory.lanes import Lanes, norms

KEEPING = [True, False, Capped(3), Leaky(0.9), Gated(decay=0.8, cap=5)]
"""Policies that keep a part of what was cut."""
RUNS, DIMENSION = 2000, 3


class Landscape:
    """sum of a·cos(<w, x> + b) + x'Qx/2 with a function of its own for every run: smooth, not convex."""

    def __init__(self, rng, runs, dimension):
        self.a, self.b = rng.normal(size=(runs, 4)), rng.uniform(0.0, 6.0, (runs, 4))
        self.w = rng.normal(size=(runs, 4, dimension))
        root = rng.normal(size=(runs, dimension, dimension)) * rng.uniform(0.0, 1.0, (runs, 1, 1))
        self.q = np.einsum("rij,rkj->rik", root, root)
        self.smoothness = (np.abs(self.a) * (self.w**2).sum(-1)).sum(-1) + np.linalg.norm(self.q, 2, axis=(1, 2))
        self.least = -np.abs(self.a).sum(-1)

    def value(self, x):
        waves = np.cos(np.einsum("rki,ri->rk", self.w, x) + self.b)
        return (self.a * waves).sum(-1) + np.einsum("ri,rij,rj->r", x, self.q, x) / 2

    def slope(self, x):
        waves = np.sin(np.einsum("rki,ri->rk", self.w, x) + self.b)
        return -np.einsum("rk,rki->ri", self.a * waves, self.w) + np.einsum("rij,rj->ri", self.q, x)


def support(region, z):
    """h_K: the largest inner product with a point of the region."""
    return region.radius * (np.abs(z).sum(-1) if isinstance(region, Component) else norms(z))


def descents(region, policy, steps=60, seed=0):
    """(potential before, potential after, what it must have fallen by) at each step of 2,000 runs."""
    rng = np.random.default_rng(seed)
    hills = Landscape(rng, RUNS, DIMENSION)
    rate = rng.uniform(0.05, 1.9, RUNS) / hills.smoothness
    x, lanes = 10.0 * rng.normal(size=(RUNS, DIMENSION)), Lanes(region, policy, (RUNS, DIMENSION))
    for _ in range(steps):
        gradient, carry = hills.slope(x), lanes.carry
        update = lanes.step(gradient)
        dropped = gradient + carry - update - lanes.carry
        before = hills.value(x) + rate * support(region, carry)
        x = x - rate[:, None] * update
        after = hills.value(x) + rate * support(region, lanes.carry)
        spent = (1 - hills.smoothness * rate / 2) * norms(update) ** 2
        yield before, after, rate * (spent + support(region, dropped))


@pytest.mark.parametrize("policy", KEEPING, ids=str)
@pytest.mark.parametrize("region", [Component(0.03), Component(1.0), Norm(0.03), Norm(1.0)], ids=repr)
def test_exact_gradients_descend_for_any_radius_and_policy(region, policy):
    """f + eta·h_K(carry) falls by eta·(1 - L·eta/2)·||u||² and by what is dropped: to 1e-12, in 2,000 landscapes."""
    closest = np.inf
    for before, after, fall in descents(region, policy):
        size = np.maximum(1.0, np.abs(before))
        assert ((after - before + fall) / size).max() <= 1e-12
        closest = min(closest, ((before - after - fall) / np.maximum(fall, 1e-300))[fall > 1e-6].min())
    assert closest < 0.5, "a fall that is half as large again would be noticed"


@pytest.mark.parametrize("policy", KEEPING[:1] + KEEPING[2:], ids=str)
def test_a_fall_that_is_a_little_larger_is_not_true(policy):
    worst = max(((a - b + 1.5 * fall) / np.maximum(1.0, np.abs(b))).max() for b, a, fall in descents(Norm(1.0), policy))
    assert worst > 1e-3


REGIONS = {
    "a radius for each coordinate": (Component([np.array([0.1, 0.5]), np.array([[0.3, 2.0], [1.0, 0.05]])]), None),
    "a norm for each tensor": (Norm(0.4, over="tensor"), None),
    "a norm for each row": (Norm(0.4, over="row"), None),
    "a box and a ball": ({0: Component(0.2), 1: Norm(0.5)}, [0, 1]),
}


def region_support(name, parts):
    vector, matrix = parts
    if name == "a radius for each coordinate":
        radii = REGIONS[name][0].radius
        return sum(float((radius * np.abs(part)).sum()) for radius, part in zip(radii, parts, strict=True))
    if name == "a norm for each tensor":
        return 0.4 * (np.linalg.norm(vector) + np.linalg.norm(matrix))
    if name == "a norm for each row":
        return 0.4 * (np.linalg.norm(vector) + np.linalg.norm(matrix, axis=1).sum())
    return 0.2 * np.abs(vector).sum() + 0.5 * np.linalg.norm(matrix)


@pytest.mark.parametrize("policy", KEEPING, ids=str)
@pytest.mark.parametrize("name", REGIONS)
def test_products_of_regions_descend_too(name, policy):
    """Through the reference, with a vector and a matrix for parameters."""
    region, groups = REGIONS[name]
    for seed in range(6):
        hills = Landscape(np.random.default_rng(seed), 1, 6)
        rate = (0.3 + 0.25 * seed) / hills.smoothness[0]
        clipper, x = reference.UClip(region, carry=policy, groups=groups), np.full((1, 6), 4.0)
        carry = [np.zeros(2), np.zeros((2, 2))]
        for _ in range(25):
            flat = hills.slope(x)[0]
            gradient = [flat[:2], flat[2:].reshape(2, 2)]
            update = clipper.step(gradient)
            kept = [np.zeros_like(part) if new is None else new for new, part in zip(clipper.carry, carry, strict=True)]
            lost = [g + c - u - k for g, c, u, k in zip(gradient, carry, update, kept, strict=True)]
            before = hills.value(x)[0] + rate * region_support(name, carry)
            sent = np.concatenate([update[0], update[1].ravel()])
            x = x - rate * sent
            after = hills.value(x)[0] + rate * region_support(name, kept)
            fall = rate * ((1 - hills.smoothness[0] * rate / 2) * sent @ sent + region_support(name, lost))
            assert after - before + fall <= 1e-12 * max(1.0, abs(before))
            carry = kept


def test_drip_need_not_descend():
    """What it pays back is no part of this gradient: the potential may rise. So the theorem leaves it out."""
    rises = [(after - before).max() for before, after, _ in descents(Norm(1.0), Drip(0.2))]
    assert max(rises) > 1e-3


@pytest.mark.parametrize("policy", KEEPING, ids=str)
def test_the_number_of_clipped_steps_is_bounded(policy):
    region = Norm(1.0)
    rng = np.random.default_rng(1)
    hills = Landscape(rng, RUNS, DIMENSION)
    rate = 0.5 / hills.smoothness
    x, lanes = 3.0 * rng.normal(size=(RUNS, DIMENSION)), Lanes(region, policy, (RUNS, DIMENSION))
    gap = hills.value(x) - hills.least
    given = {"lr": rate, "smoothness": hills.smoothness, "gap": gap, "radius": 1.0}
    clipped, smallest = np.zeros(RUNS), np.full(RUNS, np.inf)
    steps = 400
    for _ in range(steps):
        gradient = hills.slope(x)
        smallest = np.minimum(smallest, norms(gradient) ** 2)
        total = gradient + lanes.carry
        x = x - rate[:, None] * lanes.step(gradient)
        clipped += norms(total) > 1.0
    assert (clipped <= nonconvex.clipped_steps(**given)).all()
    assert (clipped > 0.02 * nonconvex.clipped_steps(**given)).any()
    if policy is True:
        bound = nonconvex.exact_gradients(steps=steps, **given)
        assert np.isfinite(bound).any()
        assert (smallest <= bound).all()


@pytest.mark.parametrize("over", [Component, Norm])
def test_the_carry_never_raises_the_energy(over):
    """sum |u|² + sum |g - u|² + 2·h_K(carry) <= sum |g|² on 2,000 adversarial sequences."""
    rng = np.random.default_rng(2)
    region = over(1.0)
    lanes = Lanes(region, True, (RUNS, DIMENSION))
    size = 10.0 ** rng.uniform(-1, 1, (RUNS, 1))
    mean, raw, kept = rng.normal(size=(RUNS, DIMENSION)), np.zeros(RUNS), np.zeros(RUNS)
    tightest = 0.0
    for n in range(80):
        gradient = size * (rng.standard_t(2.5, (RUNS, DIMENSION)) + mean)
        if n % 3 == 0:  # a third of the steps goes against the carry, a third with it
            gradient = -np.abs(gradient) * np.sign(lanes.carry)
        update = lanes.step(gradient)
        raw += norms(gradient) ** 2
        kept += norms(update) ** 2 + norms(gradient - update) ** 2
        left = kept + 2 * support(region, lanes.carry)
        assert (left <= raw * (1 + 1e-12)).all()
        tightest = max(tightest, (left / np.maximum(raw, 1e-12)).max())
    assert tightest > 0.99


@pytest.mark.parametrize("policy", [True, Capped(2)], ids=str)
@pytest.mark.parametrize("region", [Component(0.5), Norm(0.5)], ids=repr)
def test_momentum_does_not_see_the_carry(region, policy):
    """x - x_raw = eta·EMA(carry) to 1e-12, with what a policy drops added to the gradients."""
    rng = np.random.default_rng(3)
    rate, momentum, shape = 0.05, 0.9, (RUNS, DIMENSION)
    lanes = Lanes(region, policy, shape)
    x = raw = average = m = m_raw = shadow = np.zeros(shape)
    largest = 0.0
    for _ in range(200):
        gradient, carry = rng.standard_t(2.5, shape), lanes.carry
        update = lanes.step(gradient)
        seen = update + lanes.carry - carry  # the gradient, less what is dropped
        m, m_raw = momentum * m + (1 - momentum) * update, momentum * m_raw + (1 - momentum) * seen
        x, raw = x - rate * m, raw - rate * m_raw
        average = momentum * average + (1 - momentum) * lanes.carry
        assert np.abs(x - raw - rate * average).max() <= 1e-12 * max(1.0, np.abs(raw).max())
        shadow = shadow - rate * seen
        moved = x - rate * momentum / (1 - momentum) * m - rate * lanes.carry
        assert np.abs(moved - shadow).max() <= 1e-12 * max(1.0, np.abs(shadow).max())
        largest = max(largest, norms(lanes.carry).max())
        if policy is True:
            assert norms(m - m_raw).max() <= 2 * (1 - momentum) * largest * (1 + 1e-12)
            assert np.abs(seen - gradient).max() < 1e-9 * max(1.0, np.abs(gradient).max(), largest)


def test_drip_conserves_the_sum_up_to_scale():
    """sum(u) = sum(usual·g) - carry - what is dropped; usual is the average of past factors."""
    rng = np.random.default_rng(4)
    policy, region = Drip(0.1, cap=1000.0), Norm(1.0)
    lanes = Lanes(region, policy, (RUNS, DIMENSION))
    sent = owed = np.zeros((RUNS, DIMENSION))
    average, weight = np.zeros((RUNS, 1)), 0.0
    for _ in range(300):
        gradient = rng.standard_t(2.5, (RUNS, DIMENSION)) + 0.3
        factor = np.minimum(1.0, 1.0 / norms(gradient))[:, None]
        usual = average / weight if weight else factor
        average, weight = policy.decay * average + (1 - policy.decay) * factor, 1 - policy.decay * (1 - weight)
        owed = owed + usual * gradient
        sent = sent + lanes.step(gradient)
        assert np.abs(sent - (owed - lanes.carry)).max() <= 1e-9
