"""Buffers in bfloat16: half the memory, unbiased by rounding at random, repeatable, and saved as they are."""

import copy
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn, optim

import carryclip.optax
from carryclip import EWMA, Adaptive, Component, Gated, Norm
from carryclip.optax._namespace import xp as jax_namespace
from carryclip.precision import stochastic
from carryclip.torch import UClip
from carryclip.torch._namespace import xp as torch_namespace
from compilers import needs_compiler
from seam import force


def rounded(values, seed):
    return stochastic(torch_namespace, torch.tensor(values), torch.bfloat16, seed).double().numpy()


@pytest.mark.parametrize("value", [1.001, -0.3, 1023.7, 3e-39, 1e30])
def test_rounding_at_random_is_unbiased_and_to_a_neighbour(value):
    values = np.full(200_000, value, np.float32)
    found = rounded(values, seed=1)
    low, high = found.min(), found.max()
    assert low <= values[0] <= high
    assert len(np.unique(found)) <= 2
    assert high - low <= abs(value) * 2**-7 + 2.0**-133
    error = (high - low) / 2 / np.sqrt(len(values))
    assert abs(found.mean() - float(values[0])) <= 5 * error


def test_exact_numbers_stay_and_the_largest_does_not_overflow():
    exact = np.array([0.0, -0.0, 1.0, -2.5, 2.0**-126], np.float32)
    assert np.array_equal(rounded(exact, 3), exact)
    huge = rounded(np.array([3.4e38, -3.4e38], np.float32), 3)
    assert np.isfinite(huge).all()


def test_seeds_and_positions_give_independent_roundings():
    values = np.full(100_000, 1.00390625, np.float32)  # half way
    a, b = rounded(values, 1) > 1.004, rounded(values, 2) > 1.004
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02


def test_both_frameworks_round_alike():
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    theirs = stochastic(jax_namespace, jnp.asarray(values), jnp.bfloat16, 7).astype(jnp.float32)
    assert np.array_equal(rounded(values, 7), np.asarray(theirs, float))


def clip_torch(narrow, gradients, region, **options):
    p = nn.Parameter(torch.zeros(gradients.shape[1:]))
    clipper = UClip(
        [p], region, carry_dtype=narrow, moments_dtype=narrow, metrics_every=0, **{"carry": True, **options}
    )
    force(clipper, small=2, worth=2)
    sent = []
    for gradient in gradients:
        p.grad = torch.tensor(gradient)
        clipper.clip_()
        sent.append(p.grad.double().numpy().copy())
    return np.array(sent), clipper.carry(p).double().numpy()


def clip_optax(narrow, gradients, region):
    tx = carryclip.optax.uclip(region, carry=True, carry_dtype=narrow, moments_dtype=narrow)
    state, update = tx.init(jnp.zeros(gradients.shape[1:])), jax.jit(tx.update)
    sent = []
    for gradient in gradients:
        u, state = update(jnp.asarray(gradient), state)
        sent.append(np.asarray(u, float))
    return np.array(sent), np.asarray(state.carry.astype(jnp.float32), float)


WAYS = {
    "torch": clip_torch,
    "torch compiled": lambda *case: clip_torch(*case, compile=True),
    "optax": clip_optax,
}


@pytest.mark.parametrize("way", ["torch", pytest.param("torch compiled", marks=needs_compiler), "optax"])
def test_a_large_debt_is_paid_in_full_on_average(way):
    """Trap: rounded to nearest, 1024 - 1 is 1024, and the radius is sent for ever."""
    gradients = np.zeros((1300, 500), np.float32)
    gradients[0] = 1024.0
    sent, carry = WAYS[way]("bfloat16", gradients, Component(1.0))
    assert np.abs(carry).max() == 0.0
    totals = sent.sum(0)
    assert abs(totals.mean() - 1024) < 5 * totals.std() / np.sqrt(totals.size)
    assert 0 < totals.std() < 60


@pytest.mark.parametrize("way", ["torch", "optax"])
@pytest.mark.parametrize("region", [Norm(1.0), Adaptive(1, 1, EWMA())], ids=repr)
def test_what_is_sent_agrees_with_float32_up_to_noise_without_bias(way, region):
    gradients = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    exact, _ = WAYS[way](None, gradients, region)
    narrow, carry = WAYS[way]("bfloat16", gradients, region)
    lost = gradients.sum(0) - narrow.sum(0) - carry
    assert np.abs(lost).max() < 3.0
    assert abs(lost.mean()) < 5 * lost.std() / np.sqrt(lost.size)
    assert np.abs(narrow - exact).mean() < 0.1 * np.abs(exact).mean()


def test_the_types_are_kept_in_checkpoints_and_a_resumed_run_repeats_every_bit():
    def make():
        torch.manual_seed(0)
        p = nn.Parameter(torch.zeros(50))
        optimizer = optim.Adam([p], lr=0.1)
        options = {"carry_dtype": "bfloat16", "moments_dtype": "bfloat16"}
        return p, optimizer, UClip(optimizer, Adaptive(1, 1), carry=Gated(), **options)

    def train(p, optimizer, start, stop):
        for k in range(start, stop):
            p.grad = torch.randn(50, generator=torch.Generator().manual_seed(k))
            optimizer.step()

    p, optimizer, clipper = make()
    train(p, optimizer, 0, 5)
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "weight": p.data}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    q, again, other = make()
    again.load_state_dict(saved["optimizer"])
    q.data.copy_(saved["weight"])
    train(p, optimizer, 5, 10)
    train(q, again, 5, 10)
    assert torch.equal(p, q)
    assert torch.equal(clipper.carry(p), other.carry(q))
    kinds = {key: x.dtype for key, x in again.state[q].items() if key.startswith("uclip_")}
    assert kinds == {
        "uclip_carry": torch.bfloat16,
        "uclip_mean": torch.bfloat16,
        "uclip_second": torch.bfloat16,
        "uclip_feed": torch.bfloat16,
        "uclip_count": torch.int64,
    }


def test_a_float32_checkpoint_goes_on_in_bfloat16_and_back():
    p = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([p], lr=0.1)
    UClip(optimizer, Component(1.0), carry=True)
    p.grad = torch.full((3,), 3.0)
    optimizer.step()
    for narrow, kind in (("bfloat16", torch.bfloat16), (None, torch.float32)):
        q = nn.Parameter(torch.zeros(3))
        twin = optim.SGD([q], lr=0.1)
        clipper = UClip(twin, Component(1.0), carry=True, carry_dtype=narrow)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        q.grad = torch.zeros(3)
        twin.step()
        assert clipper.carry(q).dtype == kind
        assert clipper.carry(q).tolist() == [1.0, 1.0, 1.0]


def test_wrong_types_are_named():
    for wrong in ("float16", torch.float64, "int8"):
        with pytest.raises(ValueError, match=r'carry_dtype must be None .* or "bfloat16"'):
            UClip([nn.Parameter(torch.zeros(2))], Norm(1.0), carry=True, carry_dtype=wrong)
        with pytest.raises(ValueError, match=r'moments_dtype must be None .* or "bfloat16"'):
            carryclip.optax.uclip(Norm(1.0), carry=True, moments_dtype=wrong)
    with pytest.raises(ValueError, match="no complex bfloat16"):
        UClip([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], Norm(1.0), carry=True, carry_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no complex bfloat16"):
        carryclip.optax.uclip(Norm(1.0), carry=True, carry_dtype="bfloat16").init(jnp.zeros(2, jnp.complex64))


def test_optax_stores_what_is_asked_for_also_under_inject_hyperparams():
    make = optax.inject_hyperparams(
        lambda radius: carryclip.optax.uclip(Component(radius), carry=True, carry_dtype="bfloat16")
    )
    tx = make(radius=1.0)
    state = tx.init(jnp.zeros(4))
    updates, state = jax.jit(tx.update)(jnp.full(4, 3.0), state)
    assert state.inner_state.carry.dtype == jnp.bfloat16
    assert updates.tolist() == [1.0] * 4
    assert float(carryclip.optax.metrics(state)["carry_norm"]) == 4.0


def test_rounding_at_random_does_not_depend_on_packs():
    """A resumed run may lay small tensors end to end in another way."""
    results = []
    for small in (0, 1 << 15):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 3), (7,), (4,))]
        clipper = UClip(params, Component(0.3), carry=Gated(), carry_dtype="bfloat16", moments_dtype="bfloat16")
        force(clipper, small=small)
        for k in range(6):
            for p in params:
                p.grad = None if k == 3 and p.shape == (7,) else torch.randn_like(p)
            clipper.clip_()
        results.append([clipper.carry(p).clone() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert any(carry.any() for carry in results[0])
