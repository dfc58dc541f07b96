"""Promises at the edges of the JAX front end: radii near the ends of float32, long sums, and what ``check`` says."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import carryclip.optax
from carryclip import Capped, Component, Gated, Norm
from carryclip.optax import uclip

# ---------------------------------------------------------------------- very small and very large radii


@pytest.mark.pairwise
@pytest.mark.parametrize("over", [2.0, 1000.0])
@pytest.mark.parametrize("radius", [1e-21, 1e-25, 1e-30])
@pytest.mark.parametrize("every", [0, 1])
def test_a_tiny_radius_holds(radius, over, every):
    tx = uclip(Norm(radius), carry=True, metrics_every=every)
    state, step = tx.init(jnp.zeros(100)), jax.jit(tx.update)
    rng = np.random.default_rng(0)
    given, sent = np.zeros(100), np.zeros(100)
    for _ in range(10):
        g = (over * radius / 10 * (1 + 0.1 * rng.standard_normal(100))).astype(np.float32)
        update, state = step(jnp.asarray(g), state)
        given += g
        sent += np.asarray(update, float)
        assert np.linalg.norm(np.asarray(update, float)) == pytest.approx(radius, rel=1e-6, abs=0.0)
    assert np.linalg.norm(given - sent - np.asarray(state.carry, float)) <= 1e-5 * np.linalg.norm(given)


@pytest.mark.parametrize("radius", [1e-25, 1e-30])
def test_what_is_within_a_tiny_radius_passes(radius):
    tx = uclip(Norm(radius), carry=True)
    gradient = jnp.full(100, 0.03 * radius, jnp.float32)
    update, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    assert jnp.array_equal(update, gradient)
    assert not jnp.any(state.carry)


@pytest.mark.pairwise
@pytest.mark.parametrize("carry", [Gated(), Capped(100)], ids=["gated", "capped"])
@pytest.mark.parametrize("radius", [1e37, 3e38])
@pytest.mark.parametrize("every", [0, 1])
def test_a_huge_radius_of_coordinates_leaves_gradients_alone(carry, radius, every):
    tx = uclip(Component(radius), carry=carry, metrics_every=every)
    gradient = jnp.array([1.0, -2e36, 0.0])
    state, step = tx.init(gradient), jax.jit(tx.update)
    for _ in range(3):
        update, state = step(gradient, state)
        assert jnp.array_equal(update, gradient)
    assert not jnp.any(state.carry)


# ---------------------------------------------------------------------- how exact sums are


PATTERNS = {
    "constant": lambda n: np.full(n, 1 / 3),
    "lognormal": lambda n: np.exp(2 * np.random.default_rng(1).standard_normal(n)),
    "one huge": lambda n: np.where(np.arange(n) == n // 2, 1e4, 0.7),
    "growing": lambda n: np.linspace(0.1, 1.0, n),
}


@pytest.mark.parametrize("make", PATTERNS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_clipped_vectors_norm_is_the_radius_to_a_few_units(make, dtype):
    off = {}
    with jax.enable_x64(dtype == "float64"):
        for count in (10, 1023, 4097, 100_000, 1_000_000):
            tx = uclip(Norm(1.0), carry=True)
            gradient = jnp.asarray(PATTERNS[make](count), dtype)
            update, _ = jax.jit(tx.update)(gradient, tx.init(gradient))
            norm = math.sqrt(math.fsum(x * x for x in np.asarray(update, float).tolist()))
            off[count] = abs(norm - 1.0) / np.finfo(dtype).eps
    assert max(off.values()) <= 4, off


@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=repr)
def test_small_drops_are_not_lost_behind_a_large_one(region):
    tx = uclip(region, carry=False, metrics_every=1000)
    drops = np.concatenate([[1e8], np.full(5000, 3.5)]).astype(np.float32)
    gradients = (1.0 + drops)[:, None].astype(np.float32)

    def step(state, gradient):
        _, state = tx.update(gradient, state)
        return state, None

    state, _ = jax.jit(lambda g: lax.scan(step, tx.init(g[0]), g))(jnp.asarray(gradients))
    total = float(gradients.astype(float).sum() - len(gradients))
    assert float(carryclip.optax.metrics(state)["dropped_norm"]) == pytest.approx(total, rel=1e-5)


# ---------------------------------------------------------------------- what check says


def wound_up(every, region=None):
    """Fifty steps with a radius of a tenth of the gradient."""
    tx = optax.chain(uclip(region or Norm(1.0), carry=True, metrics_every=every), optax.sgd(0.1))
    state, step = tx.init(jnp.zeros(2)), jax.jit(tx.update)
    for _ in range(50):
        _, state = step(jnp.array([6.0, 8.0]), state)
    return state


def test_check_warns_of_a_wind_up_where_metrics_are_on():
    with pytest.warns(UserWarning, match="wind"):
        carryclip.optax.check(wound_up(1))


def test_check_does_not_keep_silent_where_metrics_are_off():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            carryclip.optax.check(wound_up(0))
        except ValueError as error:
            assert "metrics_every" in str(error)  # noqa: PT017
            return
    assert any("wind" in str(one.message) or "metrics_every" in str(one.message) for one in said)
