"""Every optimizer of optax with a clip before it: a wide region changes no bit, and the state keeps its form."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from carryclip import EWMA, Adaptive, Component, Norm
from carryclip.optax import uclip

OPTIONS = {
    "adafactor": {"learning_rate": 0.01},
    "adadelta": {"learning_rate": 0.1},
    "galore": {"rank": 2},
    "noisy_sgd": {"eta": 1e-4, "key": 0},
    "optimistic_gradient_descent": {"alpha": 0.7, "beta": 0.1},
    "schedule_free_sgd": {"warmup_steps": 2},
    "schedule_free_adamw": {"warmup_steps": 2},
}
"""What an optimizer wants beside a learning rate."""

LEFT_OUT = {
    "lbfgs": "it searches along a line with the function itself, which no clip before it can serve",
    "dpsgd": "it takes a gradient for each example",
    "mechanize": "a wrapper",
    "sam": "a wrapper",
    "schedule_free": "a wrapper",
    "optimistic_adam": "deprecated for optimistic_adam_v2",
}


def makers():
    """Functions of optax and its contrib that take a learning rate, or need none, and make an optimizer."""
    for module in (optax, contrib):
        for name, function in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(function) or name in LEFT_OUT:
                continue
            taken = inspect.signature(function).parameters
            rate = next((x for x in ("learning_rate", "max_learning_rate") if x in taken), None)
            if function.__module__.startswith(("optax._src.alias", "optax.contrib")) and (rate or name == "cocob"):
                yield name, function, {rate: 0.01} if rate else {}


MAKERS = {name: (function, rate | OPTIONS.get(name, {})) for name, function, rate in makers()}
WIDE = {"component": Component(1e30), "norm": Norm(1e30)}
START = {"matrix": jnp.linspace(-1.0, 2.0, 12).reshape(3, 4), "vector": jnp.array([0.5, -2.0, 3.0])}


def loss(params):
    return sum(jnp.sum((x - 1.0) ** 2) for x in jax.tree.leaves(params))


gradients_of = jax.jit(jax.value_and_grad(loss))


def descend(tx, params, steps=2):
    """Parameters and state after a few steps, with the value and the function for those that ask for them.

    Not under jit: XLA contracts products and sums as it likes, so that two programs differ in the last bit.
    """
    tx = optax.with_extra_args_support(tx)
    state = tx.init(params)
    for _ in range(steps):
        value, gradients = gradients_of(params)
        updates, state = tx.update(gradients, state, params, value=value, obj_fn=loss)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_all_that_optax_exports_is_here():
    assert len(MAKERS) >= 45


CASES = [(name, "component") for name in MAKERS] + [(name, "norm") for name in ("sgd", "adam", "lion", "muon")]


@pytest.mark.parametrize(("name", "region"), CASES)
def test_a_wide_region_changes_no_bit(name, region):
    function, options = MAKERS[name]
    bare = function(**options)
    params, state = descend(optax.chain(uclip(WIDE[region], carry=True), function(**options)), START)
    twins, expected = descend(bare, START)
    assert_same_bits(params, twins)
    assert_same_bits(state[1], expected)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(params))


REGIONS = {"component": Component(0.1), "norm": Norm(0.1), "adaptive": Adaptive(1, 1, EWMA())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("carry", [True, False], ids=["carry", "clip"])
@pytest.mark.parametrize("region", REGIONS)
def test_shapes_and_types_of_the_state_stay(region, carry, dtype):
    """A loop by scan, and a step compiled once, need a state whose form no step changes."""
    if dtype == "complex64" and region == "adaptive":
        pytest.skip("moments of complex numbers are refused")
    tx = optax.chain(uclip(REGIONS[region], carry=carry), optax.sgd(0.1))
    params = jax.tree.map(lambda x: x.astype(dtype), START)

    def form(tree):
        return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), jax.eval_shape(lambda: tree))

    before = tx.init(params)
    updates, after = jax.jit(tx.update)(params, before, params)
    assert form(after) == form(before)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, params)
    last, _ = jax.lax.scan(lambda state, _: (tx.update(params, state, params)[1], None), before, length=3)
    assert form(last) == form(before)


@pytest.mark.parametrize("region", REGIONS)
def test_the_state_can_be_mapped_as_parameters(region):
    """optax finds what has the form of the parameters in any state, for casts and shardings."""
    tx = optax.chain(uclip(REGIONS[region], carry=True), optax.adam(0.1))
    state = tx.init(START)
    _, state = tx.update(START, state, START)
    marked = optax.tree_utils.tree_map_params(tx, lambda _: "param", state, transform_non_params=lambda _: "other")
    # Two moments of Adam, the carry, and the two moments of an adaptive region.
    trees = 5 if region == "adaptive" else 3
    assert jax.tree.leaves(marked).count("param") == trees * len(START)


def test_a_masked_part_is_left_alone():
    tx = optax.masked(uclip(Component(0.1), carry=True), {"matrix": True, "vector": False})
    updates, _ = jax.jit(tx.update)(START, tx.init(START), START)
    np.testing.assert_array_equal(updates["vector"], START["vector"])
    assert jnp.abs(updates["matrix"]).max() <= 0.1


def test_a_prefix_masks_a_whole_branch():
    params = {"body": START, "head": START["vector"]}
    tx = optax.masked(uclip(Component(0.1), carry=True), {"body": False, "head": True})
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert_same_bits(updates["body"], START)
    assert jnp.abs(updates["head"]).max() <= 0.1
