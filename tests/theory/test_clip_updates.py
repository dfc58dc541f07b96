"""Clipping of the optimizer's step in both front ends: the shadow follows the optimizer, any schedule, any policy."""

import copy

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from carryclip import EWMA, RMS, Adaptive, Capped, Component, Drip, Gated, Leaky, Norm, Shrunk
from carryclip.optax import clip_updates as optax_clip_updates
from carryclip.torch import clip_updates

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def parameters():
    return [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)), torch.nn.Parameter(torch.ones(2, 2).double())]


def gradients(seed=0, steps=60):
    rng = np.random.default_rng(seed)
    return [[torch.tensor(3.0 * rng.standard_t(2.5, p.shape)) for p in parameters()] for _ in range(steps)]


def give(weights, values):
    for weight, value in zip(weights, values, strict=True):
        weight.grad = value.clone()


@pytest.mark.parametrize("region", [Component(0.5), Norm(0.7), Norm(0.4, over="tensor")], ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_less_carry_move_by_what_the_optimizer_wanted(name, region):
    """With the full carry, while the learning rate warms up and falls: to 1e-12. And steps stay in the region."""
    weights = parameters()
    optimizer = OPTIMIZERS[name](weights)
    clipped = clip_updates(optimizer, region, carry=True)
    base, waited = optimizer.param_groups[0]["lr"], 0.0
    for n, row in enumerate(gradients()):
        rate = base * (0.1 + abs(np.sin(n / 5.0)))
        optimizer.param_groups[0]["lr"] = rate
        twin_weights = [torch.nn.Parameter(w.detach().clone()) for w in weights]
        twin = OPTIMIZERS[name](twin_weights)
        if n:
            twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        twin.param_groups[0]["lr"] = rate
        give(weights, row)
        give(twin_weights, row)
        before = [w.detach().clone() for w in weights]
        shadow = [w.detach() - clipped.carry(w) for w in weights]
        optimizer.step()
        twin.step()
        wanted = [b - t.detach() for b, t in zip(before, twin_weights, strict=True)]
        moves = [s - (w.detach() - clipped.carry(w)) for s, w in zip(shadow, weights, strict=True)]
        # x - e moves by the optimizer's own step.
        shifted = [s - m for s, m in zip(shadow, moves, strict=True)]
        for b, want, now, old in zip(before, wanted, shifted, shadow, strict=True):
            assert torch.allclose(old - want, now, atol=1e-12, rtol=0.0), (b, want)
        sent = torch.cat([(b - w.detach()).ravel() for b, w in zip(before, weights, strict=True)])
        if isinstance(region, Component):
            assert sent.abs().max() <= 0.5 * rate * (1 + 1e-9)
        elif region.over == "all":
            assert sent.norm() <= 0.7 * rate * (1 + 1e-9)
        waited = max([waited, *(clipped.carry(w).abs().max().item() for w in weights)])
    assert waited > 0


@pytest.mark.parametrize("policy", [False, True, Capped(2), Leaky(0.9), Gated(), Drip(), Shrunk()], ids=str)
@pytest.mark.parametrize("region", [Component(0.002), Norm(0.003)], ids=repr)
def test_every_policy_in_both_front_ends_alike(policy, region):
    """Plain SGD in torch and optax, radii in units of the weights."""
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.01)
    clip_updates(optimizer, region, carry=policy, units="weight")
    tx = optax.chain(optax.sgd(0.01), optax_clip_updates(None, region, carry=policy))
    tree = [jnp.ones(3), jnp.ones((2, 2))]
    state = tx.init(tree)
    for row in gradients(1, 30):
        give(weights, row)
        optimizer.step()
        updates, state = tx.update([jnp.asarray(g.numpy(), jnp.float32) for g in row], state, tree)
        tree = optax.apply_updates(tree, updates)
    for weight, leaf in zip(weights, tree, strict=True):
        assert np.asarray(leaf) == pytest.approx(weight.detach().numpy(), abs=2e-5)


def test_before_sgd_it_is_a_carry_that_no_schedule_revalues():
    """One gradient of 10 at a rate of 0.01, then the rate is 0.1: ten radii are owed at the old rate, not the new."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    clipped = clip_updates(optimizer, Norm(1.0), carry=True)
    weight.grad = torch.full((1,), 10.0, dtype=torch.float64)
    optimizer.step()
    assert clipped.carry(weight).item() == pytest.approx(0.09)
    optimizer.param_groups[0]["lr"] = 0.1
    weight.grad = torch.zeros(1, dtype=torch.float64)
    optimizer.step()
    assert weight.item() == pytest.approx(-0.1)
    assert clipped.carry(weight).item() == pytest.approx(0.0)


def test_rates_follow_a_schedule_in_optax():
    schedule = optax.linear_schedule(0.01, 0.1, 9)
    tx = optax.chain(optax.sgd(schedule), optax_clip_updates(schedule, Component(1.0)))
    params = jnp.zeros(2)
    state = tx.init(params)
    for n in range(10):
        updates, state = tx.update(jnp.array([5.0, -0.5]), state, params)
        assert np.asarray(updates) == pytest.approx([-float(schedule(n)), 0.5 * float(schedule(n))], rel=1e-5)


def test_it_resumes_where_it_stopped():
    rows = gradients(2, 20)

    def train(split):
        weights = parameters()
        optimizer = torch.optim.AdamW(weights, lr=0.01)
        clipped = clip_updates(optimizer, Component(0.3), carry=Drip())
        for n, row in enumerate(rows):
            if n == split:
                saved = copy.deepcopy((optimizer.state_dict(), clipped.state_dict()))
                weights = [torch.nn.Parameter(w.detach().clone()) for w in weights]
                optimizer = torch.optim.AdamW(weights, lr=0.01)
                clipped = clip_updates(optimizer, Component(0.3), carry=Drip())
                optimizer.load_state_dict(saved[0])
                clipped.load_state_dict(saved[1])
            give(weights, row)
            optimizer.step()
        return weights

    for one, other in zip(train(None), train(10), strict=True):
        assert torch.equal(one, other)


def test_a_step_that_is_not_finite_leaves_the_weights_and_one_without_gradient_stays():
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    clip_updates(optimizer, Component(0.5))
    give(weights, [torch.full((3,), torch.inf, dtype=torch.float64), torch.ones(2, 2).double()])
    optimizer.step()
    assert all(torch.equal(w.detach(), torch.ones_like(w)) for w in weights)
    weights[0].grad, weights[1].grad = None, torch.full((2, 2), 9.0, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(weights[0].detach(), torch.ones(3).double())
    assert weights[1].detach().numpy() == pytest.approx(np.full((2, 2), 0.95))


def test_removed_it_clips_no_more():
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    clipped = clip_updates(optimizer, Component(0.5))
    give(weights, [torch.full((3,), 9.0).double(), torch.ones(2, 2).double()])
    optimizer.step()
    assert weights[0].detach().numpy() == pytest.approx(np.full(3, 0.95))
    assert clipped.metrics()["clipped_fraction"] > 0
    clipped.remove()
    optimizer.step()
    assert weights[0].detach().numpy() == pytest.approx(np.full(3, 0.05))


def test_bad_input_is_named():
    weights = parameters()
    optimizer = torch.optim.SGD([{"params": [w]} for w in weights], lr=0.1)
    with pytest.raises(ValueError, match='over="group"'):
        clip_updates(optimizer, Norm(1.0))
    with pytest.raises(TypeError, match="must be Component"):
        clip_updates(optimizer, Adaptive(mean=0, std=2, moments=EWMA()))
    with pytest.raises(TypeError, match='units="weight"'):
        clip_updates(optimizer, Norm(RMS(2.0), over="group"))
    with pytest.raises(ValueError, match="units must be"):
        clip_updates(optimizer, units="update")
    with pytest.raises(TypeError, match="LBFGS"):
        clip_updates(torch.optim.LBFGS(weights))
    with pytest.raises(TypeError, match=r"needs a torch\.optim\.Optimizer"):
        clip_updates(weights)
    with pytest.raises(TypeError, match="learning_rate=None"):
        optax_clip_updates(0.1, Norm(RMS(2.0)))
    clipped = clip_updates(optimizer, Norm(1.0, over="group"))
    with pytest.raises(KeyError, match="no parameter of the optimizer"):
        clipped.carry(torch.zeros(1))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="param group was added"):
        optimizer.step()
