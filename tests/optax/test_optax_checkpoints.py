"""Saving and restoring by orbax: bit-equal, on other devices, and from checkpoints that know no carry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from carryclip import EWMA, Adaptive, Component, Drip, Gated, Norm, Shrunk, Welford
from carryclip.optax import graft, metrics, uclip

TX = optax.chain(uclip(Adaptive(mean=1, std=0.5, moments=EWMA()), Gated(), metrics_every=3), optax.adam(1e-2))
RULES = {
    "norm": uclip(Norm(0.5), Gated()),
    "component": uclip(Component(0.1), carry=True),
    "adaptive": uclip(Adaptive(mean=1, std=0.5, moments=EWMA()), Gated(), metrics_every=3),
    "plain": uclip(Norm(0.5), carry=False),
    "drip": uclip(Norm(0.5), Drip()),
    "shrunk": uclip(Component(0.1), Shrunk()),
    "groups": uclip({"a": Norm(0.5), "b": None}, Gated(), groups={"w": "a", "b": "b"}),
}


def params():
    return {"w": jnp.arange(32.0).reshape(8, 4) / 10, "b": jnp.ones(4)}


@functools.cache
def compiled(tx):
    """A step, compiled once for all who train with ``tx``."""

    @jax.jit
    def step(p, state, key):
        grads = jax.tree.map(lambda x: x + jax.random.cauchy(key, x.shape), p)
        updates, state = tx.update(grads, state, p)
        return optax.apply_updates(p, updates), state

    return step


def train(tx, p, state, steps, start=0):
    step = compiled(tx)
    for k in range(start, start + steps):
        p, state = step(p, state, jax.random.key(k))
    return p, state


def identical(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def checkpointer():
    with ocp.StandardCheckpointer() as keeper:
        yield keeper


@pytest.mark.parametrize("rule", RULES)
def test_resuming_is_bit_equal(tmp_path, checkpointer, rule):
    tx = optax.chain(RULES[rule], optax.adam(1e-2))
    p, state = train(tx, params(), tx.init(params()), 7)
    checkpointer.save(tmp_path / "seven", {"params": p, "state": state})
    checkpointer.wait_until_finished()
    target = jax.eval_shape(lambda: {"params": params(), "state": tx.init(params())})
    found = checkpointer.restore(tmp_path / "seven", target)
    identical(found["state"], state)
    identical(train(tx, found["params"], found["state"], 5, 7), train(tx, p, state, 5, 7))


def test_restoring_onto_other_devices(tmp_path, checkpointer):
    mesh = jax.make_mesh((4,), ("model",))
    p, state = train(TX, params(), TX.init(params()), 5)
    checkpointer.save(tmp_path / "five", state)
    checkpointer.wait_until_finished()
    rows = NamedSharding(mesh, PartitionSpec("model"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = optax.tree_map_params(
        TX,
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows),
        jax.eval_shape(TX.init, params()),
        transform_non_params=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
    )
    found = checkpointer.restore(tmp_path / "five", placed)
    identical(found, state)
    for tree in (found[0].carry, found[0].mean, found[0].feed):
        assert tree["w"].sharding.is_equivalent_to(rows, 2)
    here, after = train(TX, p, state, 5, 5)
    there, resumed = train(TX, jax.device_put(p, rows), found, 5, 5)
    for a, b in zip(jax.tree.leaves((here, after)), jax.tree.leaves((there, resumed)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


OLD = {
    "adam": (optax.adam(1e-2), optax.chain(uclip(Norm(0.5), carry=True), optax.adam(1e-2))),
    "clip, then adam": (
        optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        optax.chain(uclip(Norm(0.5), Gated()), optax.adam(1e-2)),
    ),
    "accumulated": (
        optax.MultiSteps(optax.adamw(1e-2), 2),
        optax.MultiSteps(optax.chain(uclip(Norm(0.5), carry=True), optax.adamw(1e-2)), 2),
    ),
}


@pytest.mark.parametrize("case", OLD)
def test_an_old_checkpoint_gets_a_zero_carry(tmp_path, checkpointer, case):
    before, tx = OLD[case]
    p, state = train(before, params(), before.init(params()), 3)
    checkpointer.save(tmp_path / "old", state)
    checkpointer.wait_until_finished()
    with pytest.raises((ValueError, KeyError)):
        checkpointer.restore(tmp_path / "old", jax.eval_shape(tx.init, params()))
    old = checkpointer.restore(tmp_path / "old", jax.eval_shape(before.init, params()))
    grafted = graft(tx.init(p), old)
    assert jax.tree.structure(grafted) == jax.tree.structure(tx.init(p))
    assert float(metrics(grafted)["carry_norm"]) == 0.0
    same = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim]
    kept = [leaf for leaf in jax.tree.leaves(grafted) if leaf.ndim and bool(jnp.any(leaf))]
    identical(kept, [leaf for leaf in same if bool(jnp.any(leaf))])
    train(tx, p, grafted, 2)


def test_graft_into_another_rule_keeps_the_carry_and_starts_averages_anew():
    old = optax.chain(uclip(Norm(0.5), carry=True), optax.adam(1e-2))
    _, state = train(old, params(), old.init(params()), 4)
    for region, policy in ((Norm(0.5), Gated()), (Adaptive(mean=1, std=1), True)):
        tx = optax.chain(uclip(region, policy), optax.adam(1e-2))
        moved = graft(tx.init(params()), state)
        identical(moved[0].carry, state[0].carry)
        identical(moved[1], state[1])
        assert int(moved[0].step) == 4
        for tree in (moved[0].mean, moved[0].gate):
            assert not any(bool(jnp.any(leaf)) for leaf in jax.tree.leaves(tree))


def test_graft_moves_the_whole_training_state():
    old, new = {"p": params(), "opt": optax.adam(1e-2).init(params())}, OLD["adam"][1].init(params())
    assert int(graft({"p": params(), "opt": new}, old)["opt"][0].step) == 0


def test_graft_complains_of_what_does_not_fit():
    fresh = optax.chain(uclip(Norm(0.5), carry=True), optax.adam(1e-2)).init(params())
    with pytest.raises(ValueError, match="no uclip in the fresh state"):
        graft(optax.adam(1e-2).init(params()), fresh)
    with pytest.raises(ValueError, match="arrays where the fresh one has"):
        graft(fresh, optax.sgd(1e-2, momentum=0.9).init(params()))
    other = {**params(), "b": jnp.ones(5)}
    with pytest.raises(ValueError, match=r"mu\['b'\].*float32\[4\].*float32\[5\]"):
        graft(fresh, optax.adam(1e-2).init(other))
    named = {"w": params()["w"], "a": params()["b"]}
    with pytest.raises(ValueError, match=r"mu\['b'\]"):
        graft(fresh, optax.adam(1e-2).init(named))


def test_moments_of_another_kind_start_anew():
    one, other = (uclip(Adaptive(mean=0, std=3, moments=m), carry=True) for m in (Welford(), EWMA()))
    _, trained = train(one, params(), one.init(params()), 5)
    moved = graft(other.init(params()), trained)
    assert not any(bool(jnp.any(x)) for x in jax.tree.leaves((moved.mean, moved.second, moved.samples)))
    identical(graft(one.init(params()), trained), trained)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (optax.chain(optax.scale_by_rms(), optax.trace(0.9)), optax.chain(optax.trace(0.9), optax.scale_by_rms())),
        (optax.adabelief(1e-2), optax.adam(1e-2)),
        (optax.rmsprop(1e-2), optax.sgd(1e-2, momentum=0.9)),
    ],
)
def test_graft_refuses_the_state_of_another_optimizer(old, new):
    with pytest.raises(ValueError, match="same optimizer"):
        graft(optax.chain(uclip(Norm(1.0), carry=True), new).init(params()), old.init(params()))
