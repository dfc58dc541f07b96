"""``Drip`` and ``Shrunk``: what they promise, through the shipped algorithm and the front ends."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import carryclip.optax
from carryclip import Capped, Component, Drip, Norm, Shrunk, Sign, reference
from carryclip._numpy import NumpyNamespace
from carryclip.algorithm import Buffers, Rule, apply, decide, decide_coordinates, measure
from carryclip.policy import Memory
from carryclip.torch import UClip
from seam import force

MIXING = [Drip(), Drip(0.3, decay=0.8), Drip(0.2, centred=False), Shrunk(), Shrunk(5)]
ENTRIES = st.floats(-1e3, 1e3, allow_nan=False, width=32)


class Walk:
    """The pure functions step by step, with the scalars of each step left to look at."""

    def __init__(self, region, policy, size):
        self.rule = Rule(region, policy)
        self.buffers = Buffers(carry=np.zeros(size))
        noise = np.zeros(1) if self.rule.policy.noisy else None
        self.memory = Memory(np.zeros(1), np.zeros(1, np.int64), noise) if self.rule.remembers else None

    def step(self, gradient):
        """The update; ``scaling`` holds what was decided."""
        xp, rule = NumpyNamespace, self.rule
        self.scaling = None
        sizes = rule.region.sizes(0)
        if rule.has_scope:
            sums = measure(xp, rule, gradient, self.buffers, gradient.dtype, sizes=sizes)
            if rule.region.joint:
                self.scaling, self.memory = decide(xp, rule.policy, sums, sizes[0], self.memory)
            else:
                self.scaling, self.memory = decide_coordinates(xp, rule.policy, sums, self.memory)
        outcome = apply(xp, rule, gradient, self.buffers, sizes, self.scaling, None, gradient.dtype)
        self.buffers = outcome.buffers
        return outcome.update


def rare(rng, size):
    """Small noise; now and then something large, always in one direction."""
    gradient = 0.3 * rng.standard_normal(size)
    if rng.random() < 0.05:
        gradient[0] += 10.0
    return gradient


@pytest.mark.parametrize("region", [Norm(1.0), Component(0.5)], ids=["norm", "component"])
def test_drip_owes_the_usual_part_of_every_gradient_and_nothing_else(region):
    """sum(usual·g) - sum(u) == carry, exactly what was promised, as long as the cap cuts nothing."""
    rng = np.random.default_rng(0)
    walk = Walk(region, Drip(cap=math.inf), 6)
    owed = np.zeros(6)
    for _ in range(400):
        gradient = rng.standard_t(2, 6)
        update = walk.step(gradient)
        owed += walk.scaling.taken * gradient - update
    np.testing.assert_allclose(walk.buffers.carry, owed, rtol=0, atol=1e-10)
    assert np.abs(owed).max() > 1.0


def test_what_the_cap_of_drip_takes_is_told_as_dropped():
    rng = np.random.default_rng(0)
    walk = Walk(Norm(1.0), Drip(), 6)
    owed, dropped = np.zeros(6), 0.0
    for _ in range(400):
        gradient = rare(rng, 6) + (rng.random() < 0.02) * 200.0
        owed += -walk.step(gradient) + walk.scaling.taken * gradient
        dropped += float(walk.scaling.dropped[0])
    lost = np.linalg.norm(owed - walk.buffers.carry)
    assert 0.0 < lost <= dropped * (1 + 1e-9)
    assert np.linalg.norm(walk.buffers.carry) <= (1 + 1e-12) / 0.03


@given(rows=st.lists(st.lists(ENTRIES, min_size=3, max_size=3), min_size=1, max_size=30), radius=st.floats(1e-3, 1e3))
@pytest.mark.parametrize("policy", MIXING, ids=repr)
def test_updates_stay_within_the_radius(policy, rows, radius):
    for region in (Norm(radius), Component(radius)):
        walk = Walk(region, policy, 3)
        for row in rows:
            update = walk.step(np.array(row))
            size = np.linalg.norm(update) if isinstance(region, Norm) else np.abs(update).max()
            assert size <= radius * (1 + 1e-12)


@given(rows=st.lists(st.lists(ENTRIES, min_size=3, max_size=3), min_size=1, max_size=30))
@pytest.mark.parametrize("region", [Norm(1e4), Component(1e3)], ids=["norm", "component"])
@pytest.mark.parametrize("policy", MIXING, ids=repr)
def test_nothing_clipped_means_nothing_changed(policy, region, rows):
    walk = Walk(region, policy, 3)
    for row in rows:
        gradient = np.array(row)
        assert np.array_equal(walk.step(gradient), gradient)
        assert not walk.buffers.carry.any()


@pytest.mark.parametrize("policy", MIXING, ids=repr)
@pytest.mark.parametrize("host", [None, False], ids=["host", "as on a device"])
@pytest.mark.parametrize("region", [Norm(1e4), Component(1e3)], ids=["norm", "component"])
def test_nothing_clipped_means_nothing_changed_in_torch(region, host, policy):
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(40, 30)), nn.Parameter(torch.zeros(7))]
    clipper = UClip(params, region, carry=policy, metrics_every=3)
    force(clipper, host=host)
    for _ in range(10):
        given = [torch.randn_like(p) for p in params]
        for p, g in zip(params, given, strict=True):
            p.grad = g.clone()
        clipper.clip_()
        for p, g in zip(params, given, strict=True):
            assert torch.equal(p.grad, g)
            assert not clipper.carry(p).any()


@pytest.mark.parametrize(
    ("policy", "same"),
    [(Drip(1.0, centred=False, cap=math.inf), True), (Drip(1.0, centred=False, cap=3.0), Capped(3.0))],
    ids=["full", "capped"],
)
@pytest.mark.parametrize("region", [Norm(1.0), Component(0.3), Sign(0.5), Norm(0.5, over="tensor")], ids=repr)
def test_all_at_once_and_all_of_it_is_the_papers_rule_bit_for_bit(region, policy, same):
    rng = np.random.default_rng(0)
    rows = [[rng.standard_t(1.5, (5, 3)), rng.standard_t(1.5, 4)] for _ in range(200)]
    judges = [reference.UClip(region, carry) for carry in (policy, same)]
    params = [[nn.Parameter(torch.zeros(g.shape, dtype=torch.float32)) for g in rows[0]] for _ in range(2)]
    clippers = [
        UClip(own, region, carry=carry, metrics_every=0) for own, carry in zip(params, (policy, same), strict=True)
    ]
    chains = [carryclip.optax.uclip(region, carry) for carry in (policy, same)]
    states = [tx.init([jnp.zeros(g.shape) for g in rows[0]]) for tx in chains]
    for row in rows:
        one, other = (judge.step(row) for judge in judges)
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        for own, clipper in zip(params, clippers, strict=True):
            for p, g in zip(own, row, strict=True):
                p.grad = torch.tensor(g, dtype=torch.float32)
            clipper.clip_()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(*params, strict=True))
    for row in rows[:20]:
        sent = []
        for k, tx in enumerate(chains):
            updates, states[k] = tx.update([jnp.asarray(g, jnp.float32) for g in row], states[k])
            sent.append(updates)
        assert all(np.array_equal(a, b) for a, b in zip(*sent, strict=True))


def drift(region, policy, draw, steps=6000, size=8):
    """Mean update and mean gradient in the later half of a run whose gradients do not depend on it."""
    rng = np.random.default_rng(3)
    walk = Walk(region, policy, size)
    gradients, updates = np.zeros(size), np.zeros(size)
    for k in range(steps):
        gradient = draw(rng, size)
        update = walk.step(gradient)
        if k >= steps // 2:
            gradients, updates = gradients + gradient, updates + update
    return updates / (steps // 2), gradients / (steps // 2), walk


@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=["norm", "component"])
def test_rare_large_gradients_are_given_back(region):
    """Plain clipping sends about a tenth of their sum; both policies most of it."""
    plain, mean, _ = drift(region, False, rare)
    part = [drift(region, policy, rare)[0][0] / mean[0] for policy in (Drip(), Shrunk())]
    assert plain[0] / mean[0] < 0.25
    assert part[0] > 0.85
    assert part[1] > 0.6


def test_nothing_that_shrunk_lacks_goes_uncounted():
    """Updates leave out the usual share of each gradient, the part of the carry that is noise, and nothing else.

    That holds with updates that are clipped a second time, as most are here.
    """
    rng = np.random.default_rng(5)
    radius, policy = 1.0, Shrunk()
    walk = Walk(Norm(radius), policy, 8)
    lacking, again, deficit, noise_sq = np.zeros(8), 0, 0.0, 0.0
    for step in range(4000):
        gradient, carry = rare(rng, 8) * 2.0, walk.buffers.carry.copy()
        size, carried = np.linalg.norm(gradient), float(carry @ carry)
        factor = min(1.0, radius / size)
        usual = 1.0 - deficit / (1.0 - policy.decay**step) if step else factor
        deficit += (1.0 - factor - deficit) / policy.memory
        share = max(0.0, 1.0 - noise_sq / carried) if carried > 0.0 else 0.0
        update = walk.step(gradient)
        again += np.linalg.norm(factor * gradient + share * carry) > radius * (1.0 + 1e-9)
        cut = usual * gradient + share * carry - update
        noise_sq = policy.decay**2 * noise_sq + (np.linalg.norm(cut) / policy.memory) ** 2
        lacking += usual * gradient - (1.0 - share) * carry - update
    assert again > 1000
    # All cuts have gone into the carry, a memory-th part of each, and have left it again but for what is there.
    np.testing.assert_allclose(lacking, policy.memory * walk.buffers.carry, rtol=1e-6, atol=1e-6)


def test_shrunk_does_not_wind_up_where_every_gradient_is_cut():
    """Not even if large gradients all lean one way; and its carry is within three radii whatever comes."""
    rng = np.random.default_rng(6)
    for spread, most in ((0.3, 1.0), (3.0, 3.0)):
        walk, largest = Walk(Norm(0.1), Shrunk(), 8), 0.0
        for _ in range(5000):
            gradient = 1.0 + np.exp(spread * rng.standard_normal()) * np.abs(rng.standard_normal(8))
            walk.step(gradient)
            largest = max(largest, float(np.linalg.norm(walk.buffers.carry)) / 0.1)
        assert largest <= most * (1.0 + 1e-12), (spread, largest)


def test_shrunk_forgets_one_spike_and_drip_pays_no_more_than_its_cap():
    rng = np.random.default_rng(1)
    spike = np.full(8, 1e3)
    for policy in (Drip(), Shrunk()):
        walk = Walk(Norm(1.0), policy, 8)
        for _ in range(300):
            walk.step(0.2 * rng.standard_normal(8))
        walk.step(spike)
        paid = sum(float(walk.step(0.2 * rng.standard_normal(8)).sum()) for _ in range(300)) / math.sqrt(8)
        assert paid < (40.0 if isinstance(policy, Drip) else 10.0), policy


@pytest.mark.parametrize("policy", [Drip(), Shrunk()], ids=repr)
def test_what_every_gradient_loses_alike_is_not_owed(policy):
    """A radius far below all gradients is a smaller learning rate and nothing else; the full carry winds up."""
    rng = np.random.default_rng(2)
    walk = Walk(Norm(0.1), policy, 8)
    for _ in range(2000):
        gradient = rng.standard_normal(8)
        walk.step(gradient / np.linalg.norm(gradient) + 0.5)
    assert np.linalg.norm(walk.buffers.carry) <= 0.1 * 10


def test_a_first_gradient_is_all_there_is_to_go_by():
    """Nothing is owed for it, however much is cut."""
    for policy in (Drip(), Shrunk()):
        for region in (Norm(1.0), Component(1.0)):
            walk = Walk(region, policy, 2)
            np.testing.assert_array_equal(walk.step(np.array([30.0, 0.0])), [1.0, 0.0])
            np.testing.assert_allclose(walk.buffers.carry, 0.0, atol=1e-15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Drip(0.0), r"Drip: rate must be in \(0, 1\]"),
        (lambda: Drip(1.5), r"Drip: rate must be in \(0, 1\]"),
        (lambda: Drip(decay=1.0), r"Drip: decay must be in \[0, 1\)"),
        (lambda: Drip(cap=0), "Drip: cap must be above 0"),
        (lambda: Shrunk(1), "Shrunk: memory must be above 1 and finite"),
        (lambda: Shrunk(math.inf), "Shrunk: memory must be above 1 and finite"),
    ],
)
def test_bad_numbers_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_skipped_step_leaves_the_memory_alone():
    for policy in (Drip(), Shrunk()):
        tx = optax.chain(carryclip.optax.uclip(Component(0.5), policy), optax.sgd(1.0))
        state = tx.init(jnp.zeros(3))
        for k in range(5):
            _, state = tx.update(jnp.full(3, float(k)), state)
        _, after = tx.update(jnp.array([1.0, math.nan, 1.0]), state)
        for old, new in zip(state[0].gate[0], after[0].gate[0], strict=True):
            np.testing.assert_array_equal(old, new)


def test_the_default_is_what_the_trials_decide_and_the_page_shows_them():
    import carries

    from carryclip.carry import DEFAULT

    results = carries._read()
    found = carries.lines(results)
    assert not carries.harms(found, type(DEFAULT).__name__)
    safe = [name for name in carries.METHODS if name not in ("none", "clip") and not carries.harms(found, name)]
    assert max(safe, key=lambda name: carries.won_back(found, name)) == type(DEFAULT).__name__
    assert carries.METHODS[type(DEFAULT).__name__] == DEFAULT
    assert carries.write_page(results) == carries.PAGE.read_text(encoding="utf-8")
    assert len(results) == len(carries._runs(list(carries.TRIALS)))


def test_a_trial_can_be_run_again():
    """One short run, to the figure that was kept; floating-point sums may differ a little elsewhere."""
    import carries

    key = ("zipf", "SGD", 0.03, "Shrunk", 0)
    assert carries.run(*key)["error"] == pytest.approx(carries._read()[key]["error"], rel=0.05)


@pytest.mark.parametrize(
    ("base", "other", "worse"), [([1, 1.1, 0.9], [2, 2.2, 1.9], True), ([1, 2, 3], [1.1, 1.8, 3.1], False)]
)
def test_surely_worse_means_the_whole_interval(base, other, worse):
    import carries

    assert carries.difference(np.array(base), np.array(other)).worse == worse
