"""Steps that a review found wrong: each is the smallest one that went wrong."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import carryclip.optax
from carryclip import EWMA, Adaptive, Capped, Component, Gated, Norm
from carryclip.torch import UClip
from compilers import needs_compiler
from seam import as_on_a_device, force


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


@pytest.mark.parametrize("carry", [True, False, Capped(3)], ids=str)
def test_bad_entries_are_removed_where_the_rest_is_inside_the_radius(carry):
    p = parameter(3)
    clipper = UClip([p], Norm(10.0), carry=carry, nonfinite="zero", metrics_every=0)
    for bad in (0.0, math.nan, math.inf):
        p.grad = torch.tensor([1.0, 2.0, bad])
        clipper.clip_()
        assert p.grad.tolist() == [1.0, 2.0, 0.0]


@pytest.mark.parametrize("before", [torch.float32, torch.float64])
def test_a_model_converted_while_nothing_is_carried_keeps_what_is_cut_then(before):
    after = torch.float64 if before == torch.float32 else torch.float32
    p = parameter(3, dtype=before)
    clipper = UClip([p], Norm(1.0), carry=True)
    for _ in range(2):
        p.grad = torch.full((3,), 0.1, dtype=before)
        clipper.clip_()
    p.grad = None
    p.data = p.data.to(after)
    p.grad = torch.tensor([3.0, 4.0, 0.0], dtype=after)
    clipper.clip_()
    assert clipper.carry(p).dtype == after
    assert clipper.carry(p).tolist() == pytest.approx([2.4, 3.2, 0.0], rel=1e-6)


def test_a_parameter_that_took_no_part_is_still_set_up_by_its_optimizer():
    a, b = parameter(2), parameter(2)
    optimizer = torch.optim.Adam([a, b])
    UClip(optimizer, Norm(1.0), carry=True, nonfinite="raise")
    a.grad, b.grad = torch.ones(2), torch.full((2,), math.nan)
    with pytest.raises(FloatingPointError):
        optimizer.step()
    b.grad = None
    optimizer.step()
    b.grad = torch.ones(2)
    optimizer.step()
    assert "exp_avg" in optimizer.state[b]
    assert "uclip_carry" in optimizer.state[b]


def test_several_adams_whose_gradients_come_and_go():
    a, b, d = parameter(2), parameter(2), parameter(2)
    first, second = torch.optim.Adam([a]), torch.optim.Adam([b, d])
    UClip([first, second], Norm(1.0), carry=True)
    for p in (a, b, d):
        p.grad = torch.ones(2)
    first.step()
    second.zero_grad()
    b.grad = torch.ones(2)
    second.step()
    d.grad = torch.ones(2)
    second.step()
    assert "exp_avg" in second.state[d]


LONG = [(10_000, 0.1), (1 << 20, 0.3), (1 << 20, 1 / 3), ((1 << 20) + 77, 0.7)]


def far(update):
    """How far a norm is from 1, in units in the last place."""
    return abs(np.linalg.norm(np.asarray(update, np.float64)) - 1.0) / np.finfo(np.float32).eps


@pytest.mark.parametrize(("count", "value"), LONG)
@pytest.mark.parametrize("pieces", [False, True])
def test_a_long_vectors_norm_holds_to_a_few_ulps(count, value, pieces):
    p = parameter(count)
    clipper = UClip([p], Norm(1.0), carry=True, metrics_every=0)
    if pieces:
        force(clipper, way="pure")
    p.grad = torch.full((count,), value)
    clipper.clip_()
    assert far(p.grad) <= 4


@needs_compiler
def test_a_long_vectors_norm_holds_when_compiled():
    for count, value in LONG[1:]:
        p = parameter(count)
        clipper = UClip([p], Norm(1.0), carry=True, metrics_every=0, compile=True)
        p.grad = torch.full((count,), value)
        clipper.clip_()
        assert far(p.grad) <= 4


@pytest.mark.parametrize(("count", "value"), LONG)
def test_a_long_vectors_norm_holds_in_optax(count, value):
    tx = carryclip.optax.uclip(Norm(1.0), carry=True)
    gradients = {"w": jnp.full((count,), value)}
    updates, _ = jax.jit(tx.update)(gradients, tx.init(gradients))
    assert far(updates["w"]) <= 4


def test_gradients_that_autograd_leaves_conjugated():
    p = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p], lr=0.1)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    (p.conj() * torch.tensor([3 + 4j, 0.5j, -2.0])).real.sum().backward()
    assert p.grad.is_conj()
    raw = p.grad.resolve_conj().clone()
    optimizer.step()
    assert torch.view_as_real(p.grad).abs().max() <= 1.0
    assert (p.grad + clipper.carry(p)).tolist() == pytest.approx(raw.tolist())


@pytest.mark.parametrize("every", [0, 1])
def test_a_radius_may_be_numpys_array_without_shape(every):
    for region in (Norm(lambda step: np.array(1.0)), Norm(np.array(1.0)), Component(np.array(1.0))):
        p = parameter(3)
        clipper = UClip([p], region, carry=True, metrics_every=every)
        p.grad = torch.full((3,), 5.0)
        clipper.clip_()
        assert p.grad.norm() <= 1.8


def test_another_kind_of_moments_starts_anew():
    p = parameter(1)
    optimizer = torch.optim.SGD([{"params": [p], "uclip": Adaptive(0, 1)}], lr=0.0)
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    for k in range(5):
        p.grad = torch.tensor([100.0 * k])
        optimizer.step()
    owed = clipper.carry(p).clone()
    optimizer.param_groups[0]["uclip"] = Adaptive(0, 1, moments=EWMA(0.9))
    p.grad = torch.tensor([1e6])
    optimizer.step()
    assert p.grad.item() == pytest.approx(1e6 + owed.item())  # nothing is clipped before there are moments


def test_a_new_region_is_noticed_even_where_the_old_ones_memory_was():
    a, b = parameter(1), parameter(1)
    optimizer = torch.optim.SGD([{"params": [a], "uclip": Norm(1.0)}, {"params": [b], "uclip": Norm(1.0)}], lr=0.0)
    UClip(optimizer, Norm(1.0), carry=True)
    a.grad, b.grad = torch.zeros(1), torch.full((1,), 3.0)
    optimizer.step()
    group = optimizer.param_groups[1]
    del group["uclip"]
    group["uclip"] = Norm(100.0)
    a.grad, b.grad = torch.zeros(1), torch.full((1,), 3.0)
    optimizer.step()
    assert b.grad.item() == 5.0


def test_a_vectors_limit_does_not_depend_on_its_neighbours_type():
    kept = []
    for extra in (False, True):
        params = [parameter(4), *([parameter(1, dtype=torch.bfloat16)] if extra else [])]
        clipper = UClip(params, Norm(1.0, over="tensor"), carry=Capped(1.0), metrics_every=1)
        for p in params:
            p.grad = torch.ones_like(p)
        params[0].grad = torch.full((4,), 0.999)
        clipper.clip_()
        kept.append(clipper.carry(params[0])[0].item())
    assert kept[0] == kept[1]


def test_the_same_in_optax():
    kept = []
    for extra in (False, True):
        tx = carryclip.optax.uclip(Norm(1.0, over="tensor"), carry=Capped(1.0))
        gradients = {"a": jnp.full((4,), 0.999), **({"b": jnp.ones(1, jnp.bfloat16)} if extra else {})}
        _, state = tx.update(gradients, tx.init(gradients))
        kept.append(float(state.carry["a"][0]))
    assert kept[0] == kept[1]


def test_a_parameter_taken_out_of_its_optimizer_is_free():
    a, b = parameter(2), parameter(2)
    optimizer = torch.optim.SGD([{"params": [a]}, {"params": [b]}], lr=0.1)
    UClip(optimizer, Norm(1.0), carry=True)
    a.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups.pop()
    optimizer.step()
    UClip(torch.optim.SGD([b], lr=0.1), Norm(1.0), carry=True)


@pytest.mark.parametrize("region", [Component(math.inf), Norm(math.inf)], ids=str)
def test_infinite_numbers_propagate_where_nothing_is_clipped(region):
    p = parameter(2)
    clipper = UClip([p], region, carry=True, nonfinite="propagate", metrics_every=0)
    p.grad = torch.tensor([math.inf, 1.0])
    clipper.clip_()
    assert p.grad[0].item() == math.inf or math.isnan(p.grad[0].item())
    assert not math.isfinite(clipper.carry(p)[0].item())
    p.grad = torch.ones(2)
    clipper.clip_()
    assert math.isnan(p.grad[0].item())


def test_a_copy_of_a_removed_clipper_is_removed():
    clipper = UClip([parameter(2)], Norm(1.0), carry=True)
    clipper.remove()
    twin = copy.deepcopy(clipper)
    assert "removed" in repr(twin) or twin._removed


def test_on_a_device_the_limits_are_each_vectors_own_too():
    params = [parameter(4), parameter(1, dtype=torch.bfloat16)]
    clipper = UClip(params, Norm(1.0, over="tensor"), carry=Capped(1.0), metrics_every=1)
    for p in params:
        p.grad = torch.full_like(p, 0.999)
    as_on_a_device(clipper)
    clipper.clip_()
    assert clipper.carry(params[0])[0].item() == pytest.approx(0.499, abs=1e-6)


@pytest.mark.parametrize("number", [1, 3])
def test_buffers_whose_memory_was_replaced_are_seen(number):
    """``value.data = value.data.to(...)`` keeps the tensor and gives it other memory, alone or in a pack."""
    params = [parameter(3) for _ in range(number)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    clipper = UClip(optimizer, Component(1.0), carry=True, metrics_every=0)
    for k in range(2):
        for p in params:
            p.grad = torch.full((3,), 3.0)
        optimizer.step()
        if k == 0:
            for entries in optimizer.state.values():
                for value in entries.values():
                    value.data = value.data.clone()
    assert all(clipper.carry(p).tolist() == [4.0] * 3 for p in params)


def test_numbers_of_numpy_are_numbers():
    for region, carry in [
        (Component(np.float64(0.5)), Capped(np.float64(3.0))),
        (Component(0.5), Gated(cap=np.float64(5.0))),
        (Adaptive(1, 1, EWMA(decay=np.float64(0.9)), min_radius=np.float64(0.1)), True),
    ]:
        p = parameter(3)
        clipper = UClip([p], region, carry=carry)
        for _ in range(3):
            p.grad = torch.full((3,), 2.0)
            clipper.clip_()
        assert torch.isfinite(p.grad).all()


def test_a_parameter_may_get_another_shape_under_plain_clipping():
    p, q = parameter(3), parameter(2)
    optimizer = torch.optim.SGD([p, q], lr=1.0)
    UClip(optimizer, Component(1.0), carry=False)
    for count in (3, 5):
        p.data = torch.zeros(count)
        p.grad, q.grad = torch.full((count,), 4.0), torch.ones(2)
        optimizer.step()
        assert p.tolist() == [-1.0] * count


def test_inference_mode_comes_and_goes_under_plain_clipping():
    p, q = parameter(3), parameter(2)
    clipper = UClip([p, q], Component(1.0), carry=False)
    for mode in (True, False):
        with torch.inference_mode(mode):
            p.grad, q.grad = torch.full((3,), 4.0), torch.ones(2)
            clipper.clip_()
            assert p.grad.tolist() == [1.0] * 3


def test_a_gradient_whose_minus_is_left_to_whoever_reads_it():
    p = nn.Parameter(torch.zeros(()))
    clipper = UClip([p], Component(1.0), carry=True)
    z = torch.tensor(3.0 + 2.0j)
    (torch.complex(torch.zeros(()), p).conj() * z).real.backward()
    raw = p.grad.resolve_neg().item()
    clipper.clip_()
    assert p.grad.item() + clipper.carry(p).item() == raw
    assert abs(p.grad.item()) <= 1.0
