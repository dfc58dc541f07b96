"""Several devices: aggregate then clip equals one device, clip then aggregate conserves every device's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from carryclip import EWMA, Adaptive, Component, Drip, Gated, Norm, Shrunk
from carryclip.optax import aggregate_then_clip, clip_then_aggregate, metrics, uclip

DEVICES = 4
RULES = [
    (Norm(0.5), True),
    (Component(0.05), Gated()),
    (Adaptive(1, 1, EWMA()), True),
    (Norm(0.5), Gated()),
    (Norm(0.5), Shrunk()),
    (Component(0.05), Drip()),
]


@pytest.fixture(params=[AxisType.Explicit, AxisType.Auto], ids=str)
def mesh(request):
    assert jax.device_count() == DEVICES, "conftest gives JAX four devices on the host"
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(request.param,))


def params():
    keys = jax.random.split(jax.random.key(0))
    return {"w": jax.random.normal(keys[0], (6, 8)), "v": jax.random.normal(keys[1], (8,))}


def batches(steps, size=32):
    for step in range(steps):
        keys = jax.random.split(jax.random.key(100 + step))
        x = jax.random.normal(keys[0], (size, 6))
        yield {"x": x, "y": 10 * jax.random.cauchy(keys[1], (size,))}


def loss(p, batch):
    return jnp.mean(jnp.abs(jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - batch["y"]))


def close(one, other, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), **tolerance)


@pytest.mark.pairwise(together=1)
@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize(("region", "carry"), RULES, ids=str)
def test_aggregate_then_clip_equals_one_device(mesh, region, carry):
    many = aggregate_then_clip(loss, optax.adam(1e-2), mesh, region, carry)
    tx = optax.chain(uclip(region, carry), optax.adam(1e-2))
    state, p = many.init(params()), params()
    alone = tx.init(p)

    @jax.jit
    def step(p, alone, batch):
        value, grads = jax.value_and_grad(loss)(p, batch)
        updates, alone = tx.update(grads, alone, p)
        return optax.apply_updates(p, updates), alone, value

    for batch in batches(20):
        state, value = many.step(state, batch)
        p, alone, expected = step(p, alone, batch)
        assert float(value) == pytest.approx(float(expected), rel=1e-6)
    close(state.params, p, rtol=1e-6, atol=1e-6)
    close(state.clip.carry, alone[0].carry, rtol=1e-6, atol=1e-6)
    assert len(state.params["w"].sharding.device_set) == DEVICES
    assert float(metrics(state.clip)["carry_norm"]) > 0


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize(("region", "carry"), [(Norm(0.2), True), (Component(0.02), True)], ids=str)
def test_clip_then_aggregate_conserves_what_devices_saw(mesh, region, carry):
    run = clip_then_aggregate(loss, optax.sgd(1.0), mesh, region, carry)
    state = run.init(params())
    given = jax.tree.map(jnp.zeros_like, params())
    for batch in batches(20):
        here = jax.device_get(state.params)
        parts = [jax.tree.map(lambda x, k=k: x[8 * k : 8 * k + 8], batch) for k in range(DEVICES)]
        for part in parts:
            given = jax.tree.map(jnp.add, given, jax.grad(loss)(here, part))
        state, _ = run.step(state, batch)
    # With learning rate 1 the parameters moved by the mean of the updates.
    sent = jax.tree.map(lambda a, b: DEVICES * (a - b), params(), jax.device_get(state.params))
    carries = jax.tree.map(lambda c: jax.device_get(c).sum(axis=0), state.clip.carry)
    close(jax.tree.map(jnp.subtract, given, sent), carries, rtol=1e-4, atol=2e-5)
    assert state.clip.carry["w"].shape == (DEVICES, 6, 8)
    assert state.clip.carry["w"].sharding.spec[0] == "data"
    owed = metrics(state.clip)["carry_norm"]
    assert owed.shape == (DEVICES,)
    assert len(set(owed.tolist())) == DEVICES, "each device has a carry of its own"


def test_clip_then_aggregate_equals_a_loop_over_devices(mesh):
    run = clip_then_aggregate(loss, optax.sgd(0.1), mesh, Norm(0.2), Gated(), metrics_every=3)
    state, p = run.init(params()), params()
    tx = uclip(Norm(0.2), Gated())
    own = [tx.init(p) for _ in range(DEVICES)]
    for batch in batches(10):
        state, _ = run.step(state, batch)
        sent = []
        for k in range(DEVICES):
            part = jax.tree.map(lambda x, k=k: x[8 * k : 8 * k + 8], batch)
            updates, own[k] = tx.update(jax.grad(loss)(p, part), own[k])
            sent.append(updates)
        p = jax.tree.map(lambda a, *u: a - 0.1 * sum(u) / DEVICES, p, *sent)
    close(jax.device_get(state.params), p, rtol=1e-5, atol=1e-5)
    for k in range(DEVICES):
        close(jax.tree.map(lambda c, k=k: c[k], jax.device_get(state.clip.carry)), own[k].carry, rtol=1e-4, atol=1e-5)
    assert np.isfinite(metrics(state.clip)["grad_norm"]).all()


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("build", [aggregate_then_clip, clip_then_aggregate])
def test_one_bad_device_makes_all_skip(mesh, build):
    run = build(loss, optax.sgd(0.1), mesh, Norm(0.2))
    state = run.init(params())
    first, second = batches(2)
    state, _ = run.step(state, first)
    before = jax.tree.map(lambda x: np.array(x, copy=True), (state.params, state.clip.carry))  # a step donates them
    second["x"] = second["x"].at[9, 0].set(jnp.nan)  # on the second device
    state, _ = run.step(state, second)
    close((state.params, state.clip.carry), before, rtol=0, atol=0)
    assert np.all(np.asarray(metrics(state.clip)["skipped_steps"]) == 1)


def test_optimizers_that_keep_the_parameters(mesh):
    for build in (aggregate_then_clip, clip_then_aggregate):
        run = build(loss, optax.contrib.prodigy(), mesh, Norm(0.2))
        state = run.init(params())
        for batch in batches(2):
            state, value = run.step(state, batch)
        assert np.isfinite(value)


def test_a_state_made_inside_shard_map(mesh):
    tx = uclip(Norm(1.0), carry=True, axis_name="data", metrics_every=10)
    local = jax.shard_map(
        lambda x: tx.update(x, tx.init(x))[0],
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    sent = jax.jit(local)(jax.device_put(jnp.full((4, 3), 5.0), NamedSharding(mesh, PartitionSpec("data"))))
    np.testing.assert_allclose(np.linalg.norm(sent, axis=1), 1.0, rtol=1e-6)


def test_the_state_is_sharded_as_the_parameters(mesh):
    sharding = NamedSharding(mesh, PartitionSpec(None, "data"))
    p = {"w": jax.device_put(jnp.ones((3, 8)), sharding)}
    tx = uclip(Adaptive(mean=1, std=1), Gated())
    state = tx.init(p)
    for tree in (state.carry, state.mean, state.second, state.feed):
        assert tree["w"].sharding.is_equivalent_to(sharding, 2)
    g = {"w": jax.device_put(jax.random.normal(jax.random.key(0), (3, 8)), sharding)}
    updates, state = jax.jit(tx.update)(g, state)
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)
    assert state.carry["w"].sharding.is_equivalent_to(sharding, 2)


@pytest.mark.pairwise(together=1)
@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize(("region", "carry"), RULES, ids=str)
def test_sharded_parameters_give_the_same_updates(mesh, region, carry):
    """Fully sharded: each device holds a slice of parameters, gradients and carry; the norm still spans all."""
    slices = NamedSharding(mesh, PartitionSpec("data"))
    tx = uclip(region, carry, metrics_every=2)
    p = {"w": jnp.ones((8, 3)), "b": jnp.ones(4)}
    q = jax.device_put(p, slices)
    here, there = tx.init(p), tx.init(q)
    for step in range(5):
        g = {"w": jax.random.normal(jax.random.key(step), (8, 3)), "b": jnp.arange(4.0)}
        mine, here = jax.jit(tx.update)(g, here)
        theirs, there = jax.jit(tx.update)(jax.device_put(g, slices), there)
        close(mine, theirs, rtol=1e-6, atol=1e-6)
    close(metrics(here), metrics(there), rtol=1e-5, atol=1e-6)


def test_bad_batches_and_axes_are_named(mesh):
    with pytest.raises(ValueError, match=r"no axis 'model'.*'data'"):
        aggregate_then_clip(loss, optax.sgd(0.1), mesh, Norm(1.0), carry=True, axis="model")
    for build in (aggregate_then_clip, clip_then_aggregate):
        run = build(loss, optax.sgd(0.1), mesh, Norm(1.0))
        with pytest.raises(ValueError, match=r"\['x'\] has shape \(30, 6\).*multiple of the 4 devices"):
            run.step(run.init(params()), next(batches(1, 30)))
