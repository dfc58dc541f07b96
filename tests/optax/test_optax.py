"""carryclip.optax inside everything optax and its neighbours have to offer."""

import functools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state

from carryclip import (
    EWMA,
    Adaptive,
    Capped,
    CarryClipWarning,
    Component,
    Drip,
    Gated,
    Leaky,
    Norm,
    Shrunk,
    Sign,
    Symmetric,
)
from carryclip.diagnosis import LAST_STEP, RUNNING, Course, dangers
from carryclip.optax import UClipState, check, metrics, uclip
from carryclip.optax._namespace import xp
from carryclip.reference import UClip as Reference

NAN, INF = float("nan"), float("inf")


def params():
    return {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3)}


def gradients(step, size=3.0):
    keys = jax.random.split(jax.random.key(step))
    return {"w": size * jax.random.normal(keys[0], (2, 3)), "b": size * jax.random.normal(keys[1], (3,))}


def run(tx, steps=5, feed=gradients):
    state, seen = tx.init(params()), []
    update = jax.jit(tx.update)
    for step in range(steps):
        updates, state = update(feed(step), state, params())
        seen.append(updates)
    return seen, state


def same(one, other, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, **tolerance or {"rtol": 0, "atol": 0})


# ---------------------------------------------------------------- the algorithm, and what it keeps


def test_updates_are_unbiased_over_the_run():
    tx = uclip(Norm(1.0), carry=True)
    seen, state = run(tx, 40)
    sent = jax.tree.map(lambda *u: sum(u), *seen)
    given = jax.tree.map(lambda *g: sum(g), *(gradients(k) for k in range(40)))
    same(jax.tree.map(jnp.subtract, given, sent), state.carry, rtol=1e-5, atol=1e-4)


def test_jit_changes_nothing():
    for region in (Component(0.5), Norm(1.0), Adaptive(mean=1, std=1, moments=EWMA())):
        tx = uclip(region, Gated(), metrics_every=1)
        state = jitted = tx.init(params())
        for step in range(5):
            plain, state = tx.update(gradients(step), state)
            fast, jitted = jax.jit(tx.update)(gradients(step), jitted)
            same(plain, fast, rtol=1e-6, atol=1e-6)
        same(state, jitted, rtol=1e-5, atol=1e-6)


def test_the_state_mirrors_the_parameters():
    tree = {"half": jnp.ones((2, 2), jnp.bfloat16), "full": jnp.ones(3), "steps": jnp.arange(4), "none": None}
    state = uclip(Adaptive(mean=1, std=1), Gated()).init(tree)
    for buffer in (state.carry, state.mean, state.second, state.feed):
        assert set(buffer) == set(tree)
        assert buffer["half"].dtype == buffer["full"].dtype == jnp.float32
        assert buffer["half"].shape == (2, 2)
        assert isinstance(buffer["steps"], optax.MaskedNode)
        assert buffer["none"] is None


def test_plain_clipping_is_optax_clip():
    for region, other in ((Component(0.5), optax.clip(0.5)), (Norm(1.0), optax.clip_by_global_norm(1.0))):
        same(run(uclip(region, carry=False))[0], run(other)[0], rtol=1e-6, atol=0)


def test_metrics_have_the_names_and_numbers_of_torch():
    import torch

    from carryclip.torch import UClip

    for region in (Norm(1.0), Component(0.4), Adaptive(mean=1, std=1, moments=EWMA())):
        weight = torch.nn.Parameter(torch.zeros(2, 3))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        clipper = UClip(optimizer, region, carry=Gated(decay=0.5), metrics_every=1)
        tx = uclip(region, Gated(decay=0.5), metrics_every=1)
        state = tx.init(jnp.zeros((2, 3)))
        for step in range(4):
            g = np.asarray(gradients(step)["w"])
            weight.grad = torch.tensor(g)
            optimizer.step()
            _, state = jax.jit(tx.update)(jnp.asarray(g), state)
        ours, theirs = metrics(state), clipper.metrics()
        assert list(ours) == list(theirs) == [*LAST_STEP, *RUNNING]
        for name, value in ours.items():
            assert float(value) == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_metrics_every_so_many_steps():
    tx = uclip(Norm(1.0), carry=True, metrics_every=3)
    state, measured = tx.init(params()), []
    for step in range(7):
        _, state = jax.jit(tx.update)(gradients(step), state)
        measured.append(int(state.watch.at))
    assert measured == [0, 0, 2, 2, 2, 5, 5]
    exact = optax.tree.norm(gradients(5))
    assert float(metrics(state)["grad_norm"]) == pytest.approx(float(exact), rel=1e-6)


def test_metrics_without_measuring_tell_what_the_state_knows():
    figures = metrics(run(uclip(Norm(1.0), carry=True), 3)[1])
    assert float(figures["carry_norm"]) > 0
    assert int(figures["skipped_steps"]) == 0
    assert np.isnan(figures["grad_norm"])


def test_metrics_find_uclip_anywhere_and_say_when_they_cannot():
    tx = optax.MultiSteps(optax.chain(optax.identity(), uclip(Norm(1.0), carry=True), optax.adam(1e-3)), 2)
    assert "carry_norm" in metrics(tx.init(params()))
    with pytest.raises(ValueError, match="no uclip"):
        metrics(optax.adam(1e-3).init(params()))
    two = optax.chain(uclip(Norm(1.0), carry=True), uclip(Component(0.1), carry=True)).init(params())
    with pytest.raises(ValueError, match="2 uclips"):
        metrics(two)


# ---------------------------------------------------------------- bad gradients


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("region", [Component(0.5), Norm(1.0), Adaptive(mean=1, std=1, moments=EWMA())], ids=repr)
def test_a_bad_step_is_skipped(region, bad):
    tx = uclip(region, Gated(), metrics_every=1)
    _, state = run(tx, 4)
    spoiled = gradients(4)
    spoiled["b"] = spoiled["b"].at[1].set(bad)
    updates, after = jax.jit(tx.update)(spoiled, state)
    same(updates, jax.tree.map(jnp.zeros_like, spoiled))
    unchanged = after._replace(step=state.step, skipped=state.skipped, watch=state.watch)
    same(unchanged, state)
    assert int(metrics(after)["skipped_steps"]) == 1
    assert int(after.step) == int(state.step) + 1


def test_zero_removes_bad_entries_and_propagate_lets_them_through():
    bad = {"w": jnp.full((2, 3), 2.0).at[0, 0].set(NAN), "b": jnp.full(3, INF)}
    zeroed, state = uclip(Component(1.0), carry=True, nonfinite="zero").update(
        bad, uclip(Component(1.0), carry=True).init(params())
    )
    assert float(zeroed["w"][0, 0]) == 0.0
    assert float(state.carry["w"][1, 1]) == 1.0
    tx = uclip(Component(1.0), carry=True, nonfinite="propagate")
    through, state = tx.update(bad, tx.init(params()))
    assert np.isnan(through["w"][0, 0])
    assert np.isnan(state.carry["w"][0, 0])


def test_raise_is_refused_with_a_pointer_to_checkify():
    with pytest.raises(ValueError, match="checkify"):
        uclip(Norm(1.0), carry=True, nonfinite="raise")


def test_ten_skips_in_a_row_and_wind_up_warn():
    bad = lambda step: {"w": jnp.full((2, 3), NAN), "b": jnp.ones(3)}  # noqa: E731
    with pytest.warns(CarryClipWarning, match="last 12 steps were all skipped"):
        check(run(uclip(Norm(1.0), carry=True, metrics_every=10), 12, bad)[1])
    steady = lambda step: {"w": jnp.full((2, 3), 5.0), "b": jnp.ones(3)}  # noqa: E731
    with pytest.warns(CarryClipWarning, match="winding up"):
        check(run(uclip(Norm(1.0), carry=True, metrics_every=1), 20, steady)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(run(uclip(Norm(1.0), Gated(), metrics_every=1), 20, steady)[1])
        check(run(uclip(Norm(100.0), carry=True, metrics_every=1), 20)[1])


def test_a_schedule_that_comes_to_0_is_told_by_check():
    tx = uclip(Norm(lambda step: jnp.maximum(0.0, 1.0 - step / 5)), Gated(), metrics_every=1)
    check(run(tx, 5)[1])  # a warning would be an error
    with pytest.warns(CarryClipWarning, match=r"the radius was 0 at step 7, and so was the update.*small positive"):
        check(run(tx, 8)[1])
    mean = Symmetric(std=lambda step: jnp.maximum(0.0, 1.0 - step / 5))
    check(run(uclip(mean, Gated(), metrics_every=1), 8)[1])  # here the running mean still gets through


@pytest.mark.parametrize("carry", [Shrunk(), Drip(), True], ids=repr)
def test_a_linear_schedule_that_ends_at_0_is_told_and_no_delay(carry):
    """Compiled, it ends at 2e-8."""
    tx = optax.chain(uclip(Norm(optax.linear_schedule(1.0, 0.0, 20)), carry, metrics_every=10), optax.sgd(0.1))
    state = run(tx, 60)[1]
    with pytest.warns(CarryClipWarning) as seen:
        check(state)
    assert len(seen) == 1
    assert "the radius was 0 at step 59" in str(seen[0].message)
    assert float(metrics(state)["delay"]) == 0.0


def test_the_default_is_not_told_to_leave_carry_out():
    course = Course(0.0, 1.0, 50.0, 0.0)
    for hasty in (True, False):
        ((kind, said),) = dangers(1.0, course, 0.0, look="", unbounded=False, optimizer="Adam", hasty=hasty)
        assert kind == "delay"
        assert ("leave carry= out" in said) == hasty
        assert "larger radius" in said


def test_one_replica_does_not_hide_the_wind_up_of_another():
    tx = uclip(Norm(1.0), carry=True, metrics_every=1)
    state = jax.vmap(tx.init)(jnp.ones((3, 2)))
    g, update = jnp.full((3, 2), 5.0).at[0, 0].set(NAN), jax.jit(jax.vmap(tx.update))
    for _ in range(20):
        _, state = update(g, state)
    with pytest.warns(CarryClipWarning) as seen:
        check(state)
    assert ["skipped" in str(w.message) for w in seen] == [True, False]
    assert "winding up" in str(seen[1].message)
    assert metrics(jax.vmap(uclip(Norm(1.0), False).init)(jnp.ones((3, 2))))["carry_norm"].shape == (3,)


# ---------------------------------------------------------------- composition


def test_chain():
    (first, *_), state = run(optax.chain(uclip(Norm(1.0), carry=True), optax.sgd(0.5)))
    assert float(optax.tree.norm(first)) == pytest.approx(0.5, rel=1e-6)
    assert isinstance(state[0], UClipState)


def test_masked_leaves_others_alone():
    tx = optax.masked(uclip(Norm(1.0), carry=True), {"w": True, "b": False})
    (first, *_), state = run(tx)
    same(first["b"], gradients(0)["b"])
    assert float(jnp.linalg.norm(first["w"])) == pytest.approx(1.0, rel=1e-6)  # the norm spans what is not masked
    assert isinstance(state.inner_state.carry["b"], optax.MaskedNode)


def test_partition_has_one_norm_per_label():
    tx = optax.partition({"x": uclip(Norm(1.0), carry=True), "y": uclip(Norm(0.5), carry=True)}, {"w": "x", "b": "y"})
    (first, *_), state = run(tx)
    assert float(jnp.linalg.norm(first["w"])) == pytest.approx(1.0, rel=1e-6)
    assert float(jnp.linalg.norm(first["b"])) == pytest.approx(0.5, rel=1e-6)
    assert float(metrics(state.inner_states["x"])["carry_norm"]) > 0


def test_groups_share_the_skip_decision_where_partition_does_not():
    labels = lambda tree: {name: "dense" if name == "w" else "bias" for name in tree}  # noqa: E731
    bad = {"w": jnp.full((2, 3), NAN), "b": jnp.full(3, 3.0)}
    one = uclip({"dense": Norm(1.0), "bias": Component(0.5)}, carry=True, groups=labels)
    updates, state = jax.jit(one.update)(bad, one.init(params()))
    assert not updates["b"].any()
    assert int(metrics(state)["skipped_steps"]) == 1
    two = optax.partition({"dense": uclip(Norm(1.0), carry=True), "bias": uclip(Component(0.5), carry=True)}, labels)
    updates, _ = jax.jit(two.update)(bad, two.init(params()))
    assert (updates["b"] == 0.5).all()


def test_groups_leave_alone_and_span():
    tx = uclip({"x": Norm(1.0), "y": None}, carry=True, groups={"w": "x", "b": "y"})
    (first, *_), state = run(tx)
    same(first["b"], gradients(0)["b"])
    assert isinstance(state.carry["b"], optax.MaskedNode)
    spans, _ = run(uclip(Norm(1.0, over="group"), carry=True, groups={"w": 0, "b": 1}))
    alone, _ = run(uclip(Norm(1.0, over="tensor"), carry=True))
    same(spans, alone)


def test_multisteps_outside_clips_the_accumulated_gradient():
    many = optax.MultiSteps(uclip(Norm(1.0), carry=True), 3)
    seen, _ = run(many, 6)
    means = [jax.tree.map(lambda *g: sum(g) / 3, *(gradients(3 * k + j) for j in range(3))) for k in range(2)]
    once, _ = run(uclip(Norm(1.0), carry=True), 2, lambda k: means[k])
    same([seen[2], seen[5]], once, rtol=1e-5, atol=1e-6)


def test_multisteps_inside_clips_each_micro_batch():
    tx = optax.chain(uclip(Norm(1.0), carry=True), optax.MultiSteps(optax.sgd(1.0), 3).gradient_transformation())
    seen, _ = run(tx, 6)
    each, _ = run(uclip(Norm(1.0), carry=True), 6)
    same(seen[5], jax.tree.map(lambda *u: -sum(u) / 3, *each[3:]), rtol=1e-5, atol=1e-6)


def test_a_bad_micro_batch_spoils_multisteps_unless_told_to_skip():
    feed = lambda step: {"w": jnp.full((2, 3), NAN if step == 0 else 1.0), "b": jnp.ones(3)}  # noqa: E731
    plain, _ = run(optax.MultiSteps(optax.chain(uclip(Norm(1.0), carry=True), optax.sgd(1.0)), 2), 8, feed)
    assert not any(np.any(u["w"]) for u in plain), "the accumulator no longer stays NaN: the documentation may go"
    guarded = optax.MultiSteps(uclip(Norm(1.0), carry=True), 2, should_skip_update_fn=optax.skip_not_finite)
    assert sum(bool(np.any(u["w"])) for u in run(guarded, 9, feed)[0]) == 4


def test_inject_hyperparams_can_set_the_radius():
    tx = optax.inject_hyperparams(lambda radius: uclip(Norm(radius), carry=True))(radius=1.0)
    state = tx.init(params())
    first, state = jax.jit(tx.update)(gradients(0), state, params())
    state.hyperparams["radius"] = jnp.asarray(0.25)
    second, state = jax.jit(tx.update)(gradients(1), state, params())
    assert float(optax.tree.norm(first)) == pytest.approx(1.0, rel=1e-6)
    assert float(optax.tree.norm(second)) == pytest.approx(0.25, rel=1e-6)


def test_inject_hyperparams_of_uclip_itself():
    for options in ({}, {"metrics_every": 2}):
        tx = optax.inject_hyperparams(uclip)(Component(0.5), Gated(), **options)
        seen, state = run(tx)
        same(seen, run(uclip(Component(0.5), Gated()))[0], rtol=1e-6, atol=1e-6)
        assert np.isnan(metrics(state)["grad_norm"]) == (not options)


def test_apply_if_finite_around_the_chain():
    tx = optax.apply_if_finite(optax.chain(uclip(Norm(1.0), carry=True, nonfinite="propagate"), optax.sgd(1.0)), 5)
    state = tx.init(params())
    updates, after = jax.jit(tx.update)({"w": jnp.full((2, 3), NAN), "b": jnp.ones(3)}, state)
    assert not np.any(updates["b"])
    assert float(metrics(after)["carry_norm"]) == 0.0


def test_a_guard_behind_a_clip_that_lets_nan_through_is_refused():
    tx = optax.chain(uclip(Norm(1.0), carry=True, nonfinite="propagate"), optax.apply_if_finite(optax.sgd(1.0), 5))
    for look in (metrics, check):
        with pytest.raises(ValueError, match=r"Put the guard outside"):
            look(tx.init(params()))
    through = uclip(Norm(1.0), carry=True, nonfinite="propagate")
    for harmless in (
        optax.chain(uclip(Norm(1.0), carry=True), optax.apply_if_finite(optax.sgd(1.0), 5)),
        optax.chain(optax.apply_if_finite(optax.identity(), 5), through),
        optax.partition({"x": through, "y": optax.apply_if_finite(optax.adam(0.1), 5)}, {"w": "x", "b": "y"}),
    ):
        metrics(harmless.init(params()))


def test_tree_map_params_sees_the_carry_and_nothing_else():
    tx = optax.chain(uclip(Adaptive(mean=1, std=1), Gated(), metrics_every=10), optax.adam(1e-3))
    state = tx.init(params())
    specs = {"w": "sharded", "b": "replicated"}
    mapped = optax.tree_map_params(tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: "scalar")
    own = mapped[0]
    assert own.carry == own.mean == own.second == own.feed == specs
    assert own.samples == own.step == own.watch.last == "scalar"
    labelled = uclip({"x": Norm(1.0), "y": Norm(2.0)}, Gated(), groups={"w": "x", "b": "y"})
    mapped = optax.tree_map_params(labelled, lambda _, spec: spec, labelled.init(params()), specs)
    assert mapped.carry == specs
    assert len(mapped.gate) == 2


def test_donation():
    tx = optax.chain(uclip(Adaptive(mean=1, std=1), Gated(), metrics_every=2), optax.sgd(0.1))
    state = tx.init(params())
    step = jax.jit(tx.update, donate_argnums=(0, 1))
    kept, _ = run(tx)
    for k in range(5):
        old = state[0].carry["w"]
        updates, state = step(gradients(k), state)
        assert old.is_deleted()
        same(updates, kept[k])


def test_scan_and_vmap():
    tx = uclip(Norm(1.0), Gated(), metrics_every=2)
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *(gradients(k) for k in range(6)))

    def body(state, g):
        updates, state = tx.update(g, state)
        return state, updates

    final, scanned = jax.jit(lambda g: jax.lax.scan(body, tx.init(params()), g))(stacked)
    looped, state = run(tx, 6)
    same(jax.tree.map(lambda u: u[-1], scanned), looped[-1], rtol=1e-5, atol=1e-6)
    same(final, state, rtol=1e-5, atol=1e-6)
    states = jax.vmap(lambda _: tx.init(params()))(jnp.arange(6))
    updates, states = jax.jit(jax.vmap(tx.update))(stacked, states)
    for k in range(6):
        same(jax.tree.map(lambda u, k=k: u[k], updates), tx.update(gradients(k), tx.init(params()))[0], rtol=1e-5)
    assert metrics(states)["skipped_steps"].shape == (6,)


DIFFERENTIABLE = [(region, size) for region in (Component(0.5), Norm(1.0)) for size in (0.0, 0.01, 3.0)]
DIFFERENTIABLE += [(Adaptive(mean=1, std=1, moments=EWMA()), size) for size in (0.01, 3.0)]  # a kink at 0


@functools.cache
def weighted_total(region):
    """What three steps send, as a function of the size of the gradients, and its derivative; compiled for all sizes."""
    tx = uclip(region, Gated())
    start = jax.tree.map(lambda p: p.astype(jnp.float64), params())

    def sent(scale):
        state = tx.init(start)
        total = 0.0
        for step in range(3):
            g = jax.tree.map(lambda x: scale * x.astype(jnp.float64), gradients(step, 1.0))
            updates, state = tx.update(g, state)
            total = total + sum(jnp.sum(u * (k + 1)) for k, u in enumerate(jax.tree.leaves(updates)))
        return total

    return jax.jit(sent), jax.jit(jax.grad(sent))


@pytest.mark.parametrize(("region", "size"), DIFFERENTIABLE, ids=repr)
def test_the_update_can_be_differentiated(region, size):
    with jax.enable_x64(True):
        value, derivative = weighted_total(region)
        slope = derivative(size)
        numeric = (value(size + 1e-6) - value(size - 1e-6)) / 2e-6
        assert float(slope) == pytest.approx(float(numeric), rel=1e-4, abs=1e-6)


def test_metrics_do_not_stand_in_the_way_of_derivatives():
    for every in (1, 10):
        tx = uclip(Norm(1.0), carry=True, metrics_every=every)
        slope = jax.grad(lambda g, tx=tx: tx.update(g, tx.init(g))[0].sum())(jnp.full((2, 2), 0.1))
        np.testing.assert_array_equal(slope, np.ones((2, 2)))


@pytest.mark.parametrize("region", [Norm(1.0), Component(0.5)], ids=repr)
@pytest.mark.parametrize("bad", [INF, NAN])
def test_the_derivative_of_a_skipped_step_is_zero(region, bad):
    tx = uclip(region, carry=True)
    slope = jax.grad(lambda g: tx.update(g, tx.init(g))[0].sum())(jnp.array([1.0, bad]))
    np.testing.assert_array_equal(slope, np.zeros(2))


def test_at_a_gradient_of_zero_the_derivative_is_that_of_the_identity():
    tx = uclip(Norm(1.0), Gated())
    slope = jax.grad(lambda g: tx.update(g, tx.init(g))[0].sum())(jnp.zeros(3))
    np.testing.assert_array_equal(slope, np.ones(3))


# ---------------------------------------------------------------- leaves of every kind


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_goes_into_the_carry(dtype):
    """Compiled too: XLA may drop a round trip through a narrow type."""
    tx = uclip(Component(0.3), carry=True)
    state = tx.init(jnp.zeros(1000, dtype))
    step = jax.jit(tx.update)
    given = sent = np.zeros(1000)
    for k in range(50):
        g = (0.2 * jax.random.normal(jax.random.key(k), (1000,))).astype(dtype)
        u, state = step(g, state)
        assert u.dtype == dtype
        given, sent = given + np.asarray(g, float), sent + np.asarray(u, float)
    np.testing.assert_allclose(given - sent, state.carry, rtol=1e-5, atol=1e-6)
    assert np.abs(state.carry).max() > 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rounding_to_a_narrow_type_is_that_of_numpy(dtype):
    rng = np.random.default_rng(0)
    values = rng.standard_normal(20000) * 10.0 ** rng.uniform(-9, 4, 20000)
    ties = np.arange(1, 200) * float(jnp.finfo(jnp.float16).smallest_subnormal) / 2  # float16's subnormals and halves
    values = np.concatenate([values, ties, -ties, [0.0, 65504.0, 2.0**-14]]).astype(np.float32)
    rounded = jax.jit(lambda x: xp.astype(xp.astype(x, dtype), jnp.float32))(values)
    np.testing.assert_array_equal(rounded, values.astype(dtype).astype(np.float32))


def test_none_and_integer_leaves_pass_through():
    tree = {"w": jnp.full(2, 3.0), "n": None, "i": jnp.arange(3)}
    tx = uclip(Norm(1.0), carry=True)
    updates, state = jax.jit(tx.update)(tree, tx.init(tree))
    assert updates["n"] is None
    same(updates["i"], tree["i"])
    assert float(jnp.linalg.norm(updates["w"])) == pytest.approx(1.0, rel=1e-6)
    assert float(metrics(state)["carry_norm"]) > 0


def test_a_missing_gradient_holds_the_carry_and_stays_out_of_the_norm():
    tx = uclip(Norm(1.0), Gated())
    state = tx.init(params())
    judge = Reference(Norm(1.0), Gated())
    for step in range(6):
        g = gradients(step)
        if step % 2:
            g["b"] = None
        updates, state = jax.jit(tx.update)(g, state)
        expected = judge.step([None if g["b"] is None else np.asarray(g["b"]), np.asarray(g["w"])])
        np.testing.assert_allclose(updates["w"], expected[1], rtol=1e-5)
        np.testing.assert_allclose(state.carry["b"], judge.carry[0], rtol=1e-5)
    counted = uclip(Adaptive(mean=1, std=1), carry=False)
    state = counted.init(params())
    for g in ({"w": jnp.ones((2, 3)), "b": None}, gradients(0)):
        _, state = counted.update(g, state)
    assert state.samples.tolist() == [1, 2]


@pytest.mark.parametrize(
    "labels", [[0, 1, 0], lambda tree: jax.tree.map(lambda x: int(x.ndim == 2), tree)], ids=["tree", "function"]
)
def test_gates_stay_with_their_vectors_when_a_gradient_is_missing(labels):
    region, policy = Norm(1.0, over="group"), Gated(decay=0.5, threshold=0.9)
    tx, judge = uclip(region, policy, groups=labels), Reference(region, policy, groups=[0, 1, 0])
    one = [np.ones(2, np.float32), np.ones((1, 2), np.float32), np.ones(2, np.float32)]
    state = tx.init([jnp.zeros_like(x) for x in one])
    for step in range(8):
        sign = 3 if step % 2 else -3
        row = [5 * one[0] if step != 4 else None, sign * one[1] if step != 6 else None, 5 * one[2]]
        sent, state = jax.jit(tx.update)([None if g is None else jnp.asarray(g) for g in row], state)
        for u, v in zip(sent, judge.step(row), strict=True):
            assert (u is None) == (v is None)
        for c, d in zip(state.carry, judge.carry, strict=True):
            np.testing.assert_allclose(c, d, rtol=1e-5, atol=1e-6)


def test_a_mapping_of_regions_with_a_missing_gradient():
    tx = uclip({"x": Norm(1.0), "y": Component(1.0)}, carry=True, groups={"w": "x", "b": "y"})
    _, state = run(tx, 3)
    updates, after = jax.jit(tx.update)({**gradients(3), "b": None}, state)
    assert updates["b"] is None
    same(after.carry["b"], state.carry["b"])


def test_traced_radii_do_not_change_which_groups_share_a_norm():
    build = lambda one, two: uclip({"a": Norm(one), "b": Norm(two)}, Gated(), groups={"w": "a", "b": "b"})  # noqa: E731
    tx = optax.inject_hyperparams(build)(one=1.0, two=1.0)
    state = tx.init(params())
    same(tx.update(gradients(0), state, params())[0], jax.jit(tx.update)(gradients(0), state, params())[0], rtol=1e-6)


def test_a_wide_schedule_does_not_widen_the_state():
    with jax.enable_x64(True):
        g = jnp.ones(3, jnp.float32)
        tx = uclip(Adaptive(mean=1, std=lambda step: jnp.asarray(2.0, jnp.float64)), Gated())
        final, _ = jax.lax.scan(lambda s, _: (tx.update(g, s)[1], 0), tx.init(g), None, length=3)
        assert final.carry.dtype == final.feed.dtype == jnp.float32


def test_counts_do_not_overflow():
    tx = uclip(Adaptive(mean=1, std=1, moments=EWMA()), carry=True)
    state = run(tx, 3)[1]._replace(samples=jnp.full(2, 2**31 - 1, jnp.int32), step=jnp.asarray(2**31 - 1, jnp.int32))
    for _ in range(2):
        _, state = tx.update(gradients(0), state)
    assert state.samples.tolist() == [2**31 - 1] * 2
    assert int(state.step) == 2**31 - 1


def test_float8_leaves():
    g = jnp.full(3, 5.0, jnp.float8_e4m3fn)
    tx = uclip(Component(1.0), carry=True)
    updates, state = jax.jit(tx.update)(g, tx.init(g))
    assert updates.dtype == g.dtype
    assert np.asarray(updates, float).tolist() == [1.0] * 3
    assert state.carry.tolist() == [4.0] * 3


def test_the_state_hides_no_other_count():
    tx = optax.chain(uclip(Adaptive(mean=1, std=1), Gated()), uclip(Norm(1.0), Gated()), optax.adam(1e-3))
    assert int(optax.tree.get(tx.init(params()), "count")) == 0


def test_complex_leaves_are_pairs_of_numbers():
    g = jnp.array([3.0 + 0.2j, -0.1 - 4.0j])
    tx = uclip(Component(1.0), carry=True)
    updates, state = jax.jit(tx.update)(g, tx.init(g))
    np.testing.assert_allclose(updates, [1.0 + 0.2j, -0.1 - 1.0j], rtol=1e-6)
    np.testing.assert_allclose(state.carry, [2.0, -3.0j], rtol=1e-6)
    per = uclip(Component([np.array([0.5, 2.0])]), carry=True)
    np.testing.assert_allclose(per.update([g], per.init([g]))[0][0], [0.5 + 0.2j, -0.1 - 2.0j], rtol=1e-6)
    norm = uclip(Norm(1.0), carry=True)
    assert float(jnp.linalg.norm(norm.update(g, norm.init(g))[0])) == pytest.approx(1.0, rel=1e-6)


def test_empty_trees_and_leaves():
    tx = uclip(Norm(1.0), carry=True, metrics_every=1)
    updates, state = jax.jit(tx.update)({}, tx.init({}))
    assert updates == {}
    assert int(state.step) == 1
    tree = {"none": jnp.zeros((0, 3)), "w": jnp.full(2, 3.0)}
    updates, state = jax.jit(tx.update)(tree, tx.init(tree))
    assert updates["none"].shape == (0, 3)
    assert float(metrics(state)["update_norm"]) == pytest.approx(1.0, rel=1e-6)


def test_radii_per_leaf_in_every_form():
    forms = ([0.5, 0.1], {"b": 0.5, "w": 0.1}, {"['b']": 0.5, "['w']": 0.1}, {"b": np.full(3, 0.5), "w": 0.1})
    for radii in forms:
        (first, *_), _ = run(uclip(Component(radii), carry=True))
        assert float(jnp.abs(first["b"]).max()) == 0.5, radii
        assert float(jnp.abs(first["w"]).max()) <= 0.1, radii
    nested = {"layer": {"w": 0.1, "b": 0.5}}
    tx = uclip(Component(nested), carry=True)
    state = tx.init({"layer": params()})
    updates, _ = jax.jit(tx.update)({"layer": gradients(0)}, state)
    assert float(jnp.abs(updates["layer"]["b"]).max()) == 0.5


def test_schedules_see_every_step():
    seen, _ = run(uclip(Norm(optax.linear_schedule(1.0, 0.0, 4)), carry=True), 6)
    assert [round(float(optax.tree.norm(u)), 5) for u in seen] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


# ---------------------------------------------------------------- neighbours


def loss_of(prediction, target):
    return jnp.mean((prediction - target) ** 2)


DATA = jnp.linspace(-2, 2, 24).reshape(8, 3), jnp.linspace(0, 50, 8).reshape(8, 1)
TX = optax.chain(uclip(Norm(0.5), Gated()), optax.adam(0.05))


def test_flax_train_state():
    model = linen.Dense(1)
    state = train_state.TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), DATA[0]), tx=TX)

    @jax.jit
    def step(state):
        value, grads = jax.value_and_grad(lambda p: loss_of(state.apply_fn(p, DATA[0]), DATA[1]))(state.params)
        return state.apply_gradients(grads=grads), value

    values = []
    for _ in range(20):
        state, value = step(state)
        values.append(float(value))
    assert values[-1] < values[0]
    assert float(metrics(state.opt_state)["carry_norm"]) > 0


def test_flax_nnx_optimizer():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda m: loss_of(m(DATA[0]), DATA[1]))(model)
        optimizer.update(model, grads)
        return value

    values = [float(step(model, optimizer)) for _ in range(20)]
    assert values[-1] < values[0]
    assert float(metrics(nnx.as_pure(optimizer.opt_state))["carry_norm"]) > 0


def test_equinox():
    model = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))
    state = TX.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        value, grads = eqx.filter_value_and_grad(lambda m: loss_of(jax.vmap(m)(DATA[0]), DATA[1]))(model)
        updates, state = TX.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    values = []
    for _ in range(20):
        model, state, value = step(model, state)
        values.append(float(value))
    assert values[-1] < values[0]
    assert float(metrics(state)["carry_norm"]) > 0


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: uclip(1.0, carry=True), r"Norm\(1.0\) or Component\(1.0\)"),
        (lambda: uclip(Norm, carry=True), "Norm is the class"),
        (lambda: uclip(Norm(1.0), carry="full"), "Unknown carry policy"),
        (lambda: uclip(Norm(1.0), carry=True, nonfinite="ignore"), "nonfinite must be"),
        (lambda: uclip(Norm(1.0), carry=True, metrics_every=-1), "whole number of steps"),
        (lambda: uclip(Norm(1.0, over="group"), carry=True), "needs groups"),
        (lambda: uclip({"a": Norm(1.0)}, carry=True), "needs groups"),
        (lambda: uclip({}, carry=True, groups=0), "empty"),
        (lambda: uclip({"a": None}, carry=True, groups="a"), "nothing to clip"),
        (
            lambda: uclip({"a": Norm(1.0)}, carry=True, groups={"w": "a", "b": "z"}).init(params()),
            r"\['b'\] has the label 'z'",
        ),
        (
            lambda: uclip({"a": Norm(1.0)}, carry=True, groups={"w": "a", "c": "a"}).init(params()),
            "structure of the parameters",
        ),
        (lambda: uclip(Component(eqx.nn.Linear(2, 2, key=jax.random.key(0))), carry=True), "a tree that can be called"),
        (lambda: uclip(Component([0.1, 0.2, 0.3]), carry=True).init(params()), r"2 values.*\['b'\], \['w'\]"),
        (lambda: uclip(Component({"['b']": 1.0}), carry=True).init(params()), r"\['w'\] is missing"),
        (lambda: uclip(Component([0.1, np.ones((3, 2))]), carry=True).init(params()), r"\['w'\] has shape \(3, 2\)"),
    ],
)
def test_errors_at_construction(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g: {**g, "extra": jnp.ones(2)}, r"have \['extra'\], which the parameters had not"),
        (lambda g: {"w": g["w"]}, r"lack \['b'\]"),
        (lambda g: {**g, "b": jnp.ones(4)}, r"\['b'\] has shape \(4,\).*\(3,\)"),
        (lambda g: {**g, "b": jnp.ones(3, jnp.complex64)}, r"\['b'\] is complex64"),
        (lambda g: {**g, "b": jnp.ones(3, jnp.int32)}, r"\['b'\] is int32"),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_errors_at_update_name_the_leaf(wrap, spoil, message):
    tx = uclip(Norm(1.0), carry=True)
    state = tx.init(params())
    with pytest.raises((TypeError, ValueError), match=message):
        wrap(tx.update)(spoil(gradients(0)), state)


def test_a_leaf_that_was_none_at_init_is_named():
    tx = uclip(Sign(), carry=True)
    with pytest.raises(ValueError, match=r"\['b'\] has a gradient, but was None"):
        tx.update(gradients(0), tx.init({**params(), "b": None}))


def test_a_wider_gradient_than_the_state_is_refused():
    tx = uclip(Norm(1.0), carry=True)
    with jax.enable_x64(True):
        state = tx.init(jnp.zeros(2, jnp.float32))
        with pytest.raises(TypeError, match="float64"):
            tx.update(jnp.zeros(2, jnp.float64), state)


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (uclip(Norm(1.0), carry=True), uclip(Norm(1.0), Gated())),
        (uclip(Norm(1.0), False), uclip(Norm(1.0), carry=True)),
        (uclip(Component(1.0), carry=True), uclip(Adaptive(mean=1, std=1), carry=True)),
        (uclip(Norm(1.0), carry=True, nonfinite="propagate"), uclip(Norm(1.0), carry=True)),
        (uclip(Norm(1.0), Gated()), uclip(Norm(1.0, over="tensor"), Gated())),
    ],
)
def test_a_state_of_another_rule_points_to_graft(made, used):
    with pytest.raises(ValueError, match="graft"):
        used.update(gradients(0), made.init(params()))


def test_schedules_that_give_nonsense_are_named():
    with pytest.raises(TypeError, match="one radius holds for the whole vector"):
        run(uclip(Norm(lambda step: [1.0, 100.0], over="tensor"), carry=True))
    with pytest.raises(ValueError, match=r"\['w'\] is nan"):
        run(uclip(Component(lambda step: [1.0, NAN]), carry=True))


def test_equinox_modules_as_labels_are_trees_not_functions():
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    labels = jax.tree.map(lambda p: "bias" if p.ndim == 1 else "kernel", model)
    tx = uclip({"bias": None, "kernel": Norm(1.0)}, carry=True, groups=labels)
    updates, _ = tx.update(model, tx.init(model))
    same(updates.bias, model.bias)


def test_a_schedule_that_cannot_be_traced_says_so():
    tx = uclip(Norm(lambda step: 1.0 if step < 10 else 0.5), carry=True)
    state = tx.init(params())
    with pytest.raises(TypeError, match=r"jnp.where instead of if"):
        jax.jit(tx.update)(gradients(0), state)
    assert float(optax.tree.norm(tx.update(gradients(0), state)[0])) == pytest.approx(1.0, rel=1e-6)


def test_the_state_says_which_kind_of_carry_it_has():
    kinds = {
        "FullCarry": (True, Leaky(0.9)),
        "BoundedCarry": (Capped(3),),
        "GatedCarry": (Gated(),),
        "MixedCarry": (Drip(), Shrunk()),
        "NoCarry": (False, Leaky(0.0)),
    }
    for name, carries in kinds.items():
        for carry in carries:
            assert type(uclip(Norm(1.0), carry).init(params()).policy).__name__ == name


@pytest.mark.parametrize("base", [optax.adamw(1e-3), optax.sgd(0.1, momentum=0.9)], ids=["AdamW", "momentum"])
def test_check_warns_of_a_hasty_carry_before_an_optimizer_that_averages(base):
    for carry in (True, Gated(), Capped(3)):
        tx = optax.chain(uclip(Norm(1.0), carry, metrics_every=10), base)
        with pytest.warns(CarryClipWarning, match="pays at once.* in front of .*default carry is safe"):
            check(tx.init(params()))
    for safe in (
        optax.chain(uclip(Norm(1.0)), base),
        optax.chain(uclip(Norm(1.0), True, metrics_every=5), optax.sgd(1.0)),
    ):
        check(safe.init(params()))


def test_check_without_metrics_tells_what_can_be_told():
    tx = optax.chain(uclip(Norm(1.0), carry=True), optax.sgd(0.1))
    state = tx.init(jnp.zeros(1))
    for _ in range(3):
        _, state = tx.update(jnp.full(1, 100.0), state)
    with pytest.raises(ValueError, match=r"norm 297, and 0 steps were skipped\. Before momentum or Adam"):
        check(state)
