"""Gradients as they really come: missing, sparse, complex, expanded, shared, accumulated, from closures."""

import copy

import numpy as np
import pytest
import torch
from torch import nn, optim

from carryclip import Adaptive, Component, Gated, Norm, Sign
from carryclip.torch import UClip


def sgd(*params, lr=1.0):
    return optim.SGD(list(params), lr=lr)


def param(*values, dtype=torch.float32):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def set_grad(p, *values):
    p.grad = torch.tensor(values, dtype=p.dtype)


def test_a_closure_is_clipped_after_it_ran():
    """Trap: the pre-hook runs before the closure has computed the gradients."""
    for call in (lambda o, c: o.step(c), lambda o, c: o.step(closure=c)):
        p = param(0.0)
        optimizer = sgd(p)
        clipper = UClip(optimizer, Component(1.0), carry=True)

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            (3.0 * p).sum().backward()
            return 42.0

        assert call(optimizer, closure) == 42.0
        assert (p.item(), clipper.carry(p).item()) == (-1.0, 2.0)


def test_closure_none_given_by_position():
    p = param(0.0)
    optimizer = sgd(p)
    UClip(optimizer, Component(1.0), carry=True)
    set_grad(p, 3.0)
    optimizer.step(None)
    assert p.item() == -1.0


def test_a_second_closure_call_in_one_step_is_refused():
    class Twice(optim.SGD):
        def step(self, closure):
            closure()
            closure()

    p = param(0.0)
    optimizer = Twice([p], lr=1.0)
    UClip(optimizer, Component(1.0), carry=True)
    with pytest.raises(RuntimeError, match="evaluated its closure twice"):
        optimizer.step(lambda: (3.0 * p).sum().backward())


def test_accumulated_gradients_are_clipped_once_per_step():
    p = param(0.0)
    optimizer = sgd(p)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    for _ in range(2):
        (2.0 * p).sum().backward()
    optimizer.step()
    assert (p.item(), clipper.carry(p).item()) == (-1.0, 3.0)


def test_none_holds_the_carry_and_zero_drains_it():
    a, b = param(0.0), param(0.0)
    optimizer = sgd(a, b)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    set_grad(a, 3.0), set_grad(b, 3.0)
    optimizer.step()
    a.grad = None
    set_grad(b, 0.0)
    optimizer.step()
    assert (clipper.carry(a).item(), clipper.carry(b).item()) == (2.0, 1.0)


def test_a_parameter_without_gradient_stays_out_of_the_norm():
    a, b = param(0.0), param(0.0)
    optimizer = sgd(a, b)
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    set_grad(a, 30.0), set_grad(b, 40.0)
    optimizer.step()
    a.grad = None
    set_grad(b, 0.0)
    optimizer.step()
    assert clipper.carry(a).item() == pytest.approx(29.4)
    assert clipper.carry(b).item() == pytest.approx(38.2)


def test_moments_are_counted_per_parameter():
    a, b = param(0.0), param(0.0)
    optimizer = sgd(a, b)
    clipper = UClip(optimizer, Adaptive(1, 0), carry=True)
    for step in range(3):
        set_grad(a, 5.0 if step < 2 else 100.0)
        b.grad = torch.tensor([100.0]) if step == 2 else None
        optimizer.step()
    assert clipper.carry(a).item() == 95.0
    assert clipper.carry(b).item() == 0.0, "the first sample of b has no radius yet"


def test_frozen_parameters_are_left_out():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    optimizer = optim.Adam(net.parameters(), lr=0.1)
    clipper = UClip(optimizer, Norm(0.1), carry=True)
    net(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert not clipper.carry(net[0].weight).any()
    assert list(optimizer.state) == list(net[1].parameters())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_duplicated_parameters_count_once():
    """Trap: torch only warns of them."""
    p = param(0.0)
    optimizer = sgd(p, p)
    clipper = UClip(optimizer, Norm(5.0), carry=True, metrics_every=1)
    set_grad(p, 3.0)
    optimizer.step()
    assert clipper.metrics()["grad_norm"] == 3.0
    assert clipper.carry(p).item() == 0.0


def test_shared_parameters():
    shared = nn.Linear(2, 2, bias=False)
    net = nn.Sequential(shared, shared)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    clipper = UClip(optimizer, Norm(0.1), carry=True, metrics_every=1)
    net(torch.ones(3, 2)).sum().backward()
    size = shared.weight.grad.norm().item()
    optimizer.step()
    assert clipper.metrics()["grad_norm"] == pytest.approx(size)


def test_expanded_gradients_are_cloned():
    """Trap: a gradient with stride 0 cannot be written in place."""
    p = nn.Parameter(torch.zeros(3))
    optimizer = sgd(p)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    p.grad = torch.tensor(2.0).expand(3)
    optimizer.step()
    assert torch.equal(p, torch.full((3,), -1.0))
    assert torch.equal(clipper.carry(p), torch.ones(3))


@pytest.mark.parametrize("region", [Component(1.0), Norm(1.0), Adaptive(1, 1), Sign(1.0)], ids=repr)
def test_complex_equals_its_real_view(region):
    torch.manual_seed(0)
    z = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    x = nn.Parameter(torch.zeros(4, 2))
    clippers = []
    for p in (z, x):
        optimizer = sgd(p)
        clippers.append((optimizer, UClip(optimizer, region, carry=Gated())))
    for _ in range(5):
        g = 3 * torch.randn(4, dtype=torch.complex64)
        z.grad, x.grad = g.clone(), torch.view_as_real(g).clone()
        for optimizer, _ in clippers:
            optimizer.step()
    assert clippers[0][1].carry(z).dtype == torch.complex64
    torch.testing.assert_close(torch.view_as_real(z.data), x.data)
    torch.testing.assert_close(torch.view_as_real(clippers[0][1].carry(z)), clippers[1][1].carry(x))


@pytest.mark.parametrize("region", [Component(0.5), Norm(0.5), Sign(0.5)], ids=repr)
@pytest.mark.parametrize(
    "maker", [lambda p: optim.SGD(p, lr=0.1), lambda p: optim.SparseAdam(list(p), lr=0.1)], ids=["SGD", "SparseAdam"]
)
def test_sparse_rows_equal_dense_rows(region, maker):
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 3, sparse=True)
    optimizer = maker(embedding.parameters())
    clipper = UClip(optimizer, region, carry=True)
    weight = embedding.weight
    dense = torch.zeros(6, 3)
    for rows in ([1, 3, 3], [3, 4], [1]):
        optimizer.zero_grad()
        (2.0 * embedding(torch.tensor(rows))).sum().backward()
        g = weight.grad.to_dense()
        optimizer.step()
        present = sorted(set(rows))
        s = g[present] + dense[present]
        if isinstance(region, Component):
            u = s.clamp(-0.5, 0.5)
        elif isinstance(region, Sign):
            u = 0.5 * s.sign()
        else:
            u = s * min(1.0, 0.5 / s.norm().item())
        dense[present] = s - u
        torch.testing.assert_close(weight.grad.to_dense()[present], u)
        torch.testing.assert_close(clipper.carry(weight), dense)


def test_sparse_gradients_are_refused_where_rows_would_spoil_the_moments():
    for region, carry in ((Adaptive(1, 1), True), (Component(1.0), Gated())):
        embedding = nn.Embedding(6, 3, sparse=True)
        optimizer = optim.SGD(embedding.parameters(), lr=0.1)
        UClip(optimizer, region, carry=carry)
        embedding(torch.tensor([1])).sum().backward()
        with pytest.raises(TypeError, match=r"group 0, parameter 0 is sparse.*sparse=False"):
            optimizer.step()


def test_an_empty_sparse_gradient_and_an_empty_parameter():
    embedding = nn.Embedding(6, 3, sparse=True)
    nothing = nn.Parameter(torch.zeros(0))
    optimizer = optim.SGD([embedding.weight, nothing], lr=0.1)
    clipper = UClip(optimizer, Component(1.0), carry=True, metrics_every=1)
    embedding(torch.tensor([], dtype=torch.long)).sum().backward()
    nothing.grad = torch.zeros(0)
    optimizer.step()
    assert clipper.metrics().step == -1, "there was nothing to measure"
    assert optimizer.param_groups[0]["uclip_steps"] == 1


@pytest.mark.parametrize(
    "region", [Norm(1.0), Norm(1.0, over="group"), Norm(1.0, over="tensor"), Component(0.5)], ids=repr
)
def test_groups_added_later_are_clipped_and_saved(region):
    a, b = param(0.0), param(0.0)
    optimizer = sgd(a)
    clipper = UClip(optimizer, region, carry=Gated(), metrics_every=1)
    set_grad(a, 3.0)
    optimizer.step()
    owed = clipper.carry(a).clone()
    optimizer.add_param_group({"params": [b]})
    set_grad(a, 0.0), set_grad(b, 4.0)
    optimizer.step()
    assert clipper.carry(b).item() > 0
    assert clipper.carry(a).item() < owed.item()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[1]["uclip_steps"] == 2


def test_a_group_added_later_can_bring_its_own_region():
    a, b, c = param(0.0), param(0.0), param(0.0)
    optimizer = sgd(a)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    optimizer.add_param_group({"params": [b], "uclip": Component(2.0)})
    optimizer.add_param_group({"params": [c], "uclip": None})
    for p in (a, b, c):
        set_grad(p, 5.0)
    optimizer.step()
    assert [p.item() for p in (a, b, c)] == [-1.0, -2.0, -5.0]
    with pytest.raises(KeyError, match="not among the 2 parameters"):
        clipper.carry(c)


def test_a_norm_spans_the_groups_that_share_its_region():
    a, b, c = param(0.0), param(0.0), param(0.0)
    optimizer = optim.SGD([{"params": [a]}, {"params": [b], "name": "head"}, {"params": [c]}], lr=1.0)
    UClip(optimizer, {0: Norm(5.0), "head": Norm(5.0), 2: None}, carry=True)
    for p, g in ((a, 30.0), (b, 40.0), (c, 7.0)):
        set_grad(p, g)
    optimizer.step()
    assert [p.item() for p in (a, b, c)] == pytest.approx([-3.0, -4.0, -7.0])


def test_radii_by_parameter_or_name():
    a, b = param(0.0), param(0.0, 0.0)
    for radius in ({a: 1.0, b: torch.tensor([2.0, 3.0])}, [1.0, torch.tensor([2.0, 3.0])]):
        optimizer = sgd(a, b)
        clipper = UClip(optimizer, Component(radius), carry=True)
        set_grad(a, 9.0), set_grad(b, 9.0, -9.0)
        optimizer.step()
        assert a.grad.tolist() == [1.0]
        assert b.grad.tolist() == [2.0, -3.0]
        clipper.remove()
        optimizer.state.clear()
    named = optim.SGD([("first", a), ("second", b)], lr=1.0)
    UClip(named, Component({"first": 1.0, "second": 2.0}), carry=True)
    set_grad(a, 9.0), set_grad(b, 9.0, -9.0)
    named.step()
    assert b.grad.tolist() == [2.0, -2.0]


def test_weight_decay_is_added_after_the_clip():
    """Trap: the L2 term of torch's optimizers is neither clipped nor carried."""
    p = param(10.0)
    optimizer = optim.SGD([p], lr=1.0, weight_decay=0.5)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    set_grad(p, 0.5)
    optimizer.step()
    assert p.item() == 10.0 - 0.5 - 5.0
    assert clipper.carry(p).item() == 0.0


def test_gradients_in_half_precision_parameters_mixed_with_float32():
    a, b = param(0.0, dtype=torch.bfloat16), param(0.0)
    optimizer = sgd(a, b)
    clipper = UClip(optimizer, Norm(5.0), carry=True, metrics_every=1)
    set_grad(a, 30.0), set_grad(b, 40.0)
    optimizer.step()
    assert (a.grad.dtype, b.grad.dtype) == (torch.bfloat16, torch.float32)
    assert a.grad.item() == pytest.approx(3.0, rel=1e-2)
    assert b.grad.item() == pytest.approx(4.0)
    assert clipper.carry(a).dtype == torch.float32
    assert a.grad.item() + clipper.carry(a).item() == 30.0


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_higher_order_gradients_can_be_clipped():
    p = param(2.0)
    optimizer = sgd(p)
    UClip(optimizer, Component(1.0), carry=True)
    (p**3).sum().backward(create_graph=True)
    optimizer.step()
    assert p.item() == 1.0
    p.grad = None


class Failing(optim.Adam):
    """Raises once, after its own state exists."""

    fail = False

    def step(self, closure=None):
        super().step(closure)
        if Failing.fail:
            Failing.fail = False
            raise RuntimeError("out of memory")


def test_a_step_that_raises_does_not_lose_the_carry(monkeypatch):
    p = param(0.0)
    optimizer = Failing([p], lr=0.1)
    clipper = UClip(optimizer, Component(1.0), carry=True)
    monkeypatch.setattr(Failing, "fail", True)
    set_grad(p, 5.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert clipper.carry(p).item() == 4.0
    set_grad(p, 0.0)
    optimizer.step()
    assert clipper.carry(p).item() == 3.0
    assert optimizer.state[p]["uclip_carry"].item() == 3.0


def test_a_step_that_raises_leaves_no_verdict_behind(monkeypatch):
    p = param(0.0)
    optimizer = Failing([p], lr=0.1, fused=True)
    UClip(optimizer, Component(1.0), carry=True)
    monkeypatch.setattr(Failing, "fail", True)
    set_grad(p, 5.0)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(3 * p).sum().backward()
    scaler.step(optimizer)
    assert not hasattr(optimizer, "found_inf")


def test_one_group_that_is_not_fused_makes_skipping_the_others_way():
    a, b = param(0.0), param(0.0)
    optimizer = optim.Adam([{"params": [a]}, {"params": [b], "fused": False}], lr=0.1, fused=True)
    clipper = UClip(optimizer, Component(1.0), carry=True, metrics_every=1)
    set_grad(a, float("nan")), set_grad(b, 1.0)
    optimizer.step()
    assert clipper.metrics()["skipped_steps"] == 1
    assert (a.grad.item(), b.grad.item()) == (0.0, 0.0)


def test_numpy_numbers_and_tensors_as_radii():
    for radius in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float16)):
        for region in (
            Component(radius),
            Norm(radius),
            Component(lambda step, r=radius: r),
            Norm(lambda step, r=radius: r),
        ):
            for dtype in (torch.bfloat16, torch.float32, torch.float64):
                p = param(0.0, dtype=dtype)
                clipper = UClip([p], region, carry=Gated(), metrics_every=1)
                set_grad(p, 5.0)
                clipper.clip_()
                assert p.grad.item() == 0.5
                assert clipper.metrics()["carry_ratio"] == pytest.approx(9.0)
    for moments in (torch.ones(2), np.float32(1.0)):
        p = param(0.0, 0.0)
        UClip([p], Adaptive(mean=moments, std=1.0), carry=True)


def test_a_tensor_radius_below_zero_counts_as_zero():
    for bad in (-1.0, float("nan")):
        for kind in (Component, Norm):
            p = param(0.0)
            clipper = UClip([p], kind(lambda step, bad=bad: torch.tensor(bad)), carry=True)
            set_grad(p, 5.0)
            clipper.clip_()
            assert p.grad.item() == 0.0
            assert clipper.carry(p).item() == 5.0


def test_replacing_a_parameter_or_a_groups_region_is_noticed():
    a, b = param(0.0), param(0.0)
    optimizer = sgd(a)
    UClip(optimizer, Component(1.0), carry=True)
    optimizer.param_groups[0]["params"][0] = b
    set_grad(b, 5.0)
    optimizer.step()
    assert b.item() == -1.0
    optimizer.param_groups[0]["uclip"] = Component(2.0)
    set_grad(b, 5.0)
    optimizer.step()
    assert b.item() == -3.0
