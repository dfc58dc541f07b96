"""Several optimizers under one norm: clipped once a round, whoever steps, skips or fails."""

import copy
import math

import pytest
import torch
from torch import nn, optim

from carryclip import Component, Gated, Norm
from carryclip.torch import NonFiniteGradientError, UClip


def param(*values):
    return nn.Parameter(torch.tensor(values))


def pair(region=None, **options):
    a, b = param(0.0), param(0.0)
    first, second = optim.SGD([a], lr=1.0), optim.SGD([b], lr=1.0)
    return a, b, first, second, UClip([first, second], region or Norm(1.0), **{"carry": True, **options})


def set_grads(a, b, size=100.0):
    a.grad, b.grad = torch.tensor([size]), torch.tensor([size])


def test_several_optimizers_share_one_norm():
    a, b = param(0.0), param(0.0)
    first, second = optim.SGD([a], lr=1.0), optim.Adam([b], lr=1.0)
    clipper = UClip([first, second], Norm(5.0), carry=True, metrics_every=1)
    a.grad, b.grad = torch.tensor([30.0]), torch.tensor([40.0])
    first.step()
    assert (a.grad.item(), b.grad.item()) == pytest.approx((3.0, 4.0))
    second.step()
    assert (a.grad.item(), b.grad.item()) == pytest.approx((3.0, 4.0)), "clipped once per round"
    assert set(second.state[b]) == {"step", "exp_avg", "exp_avg_sq", "uclip_carry"}
    a.grad, b.grad = torch.tensor([0.0]), torch.tensor([0.0])
    second.step()
    first.step()
    assert clipper.carry(a).item() == pytest.approx(24.0)
    assert first.param_groups[0]["uclip_steps"] == second.param_groups[0]["uclip_steps"] == 2


def test_several_optimizers_resume_bit_equal():
    def run(saved=None, start=0, stop=6):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        opts = [optim.SGD(net[0].parameters(), lr=0.1), optim.Adam(net[1].parameters(), lr=0.1)]
        UClip(opts, Norm(0.1), carry=Gated())
        if saved:
            for part, state in zip((net, *opts), saved, strict=True):
                part.load_state_dict(state)
        for k in range(start, stop):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
            for o in opts:
                o.zero_grad()
            net(x).square().mean().backward()
            for o in opts:
                o.step()
        return [copy.deepcopy(part.state_dict()) for part in (net, *opts)]

    whole, half = run(), run(stop=3)
    resumed = run(half, 3)
    for one, other in zip(whole[0].values(), resumed[0].values(), strict=True):
        assert torch.equal(one, other)
    feeds = [state["param_groups"][0]["uclip_feed"] for state in (*whole[1:], *resumed[1:])]
    assert all(torch.equal(f, feeds[0]) for f in feeds)


def test_an_optimizer_that_sits_out_a_round_is_clipped_in_the_next():
    a, b, first, second, _ = pair()
    for k in range(6):
        set_grads(a, b)
        before = a.item(), b.item()
        if k != 1:
            first.step()
        second.step()
        assert abs(a.item() - before[0]) <= 1.0
        assert abs(b.item() - before[1]) <= 1.0


@pytest.mark.parametrize("bad", [0, 1])
def test_an_overflow_in_one_skips_both_and_the_next_round_is_clipped(bad):
    a, b, first, second, clipper = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for k in range(4):
        (scaler.scale(100 * a) + scaler.scale(100 * b)).sum().backward()
        if k == 1:
            (a, b)[bad].grad.fill_(math.inf)
        carry, before = clipper.carry(a).clone(), (a.item(), b.item())
        for o in (first, second):
            scaler.unscale_(o)
        for o in (first, second):
            scaler.step(o)
        scaler.update()
        assert max(abs(a.item() - before[0]), abs(b.item() - before[1])) <= 1.0
        if k == 1:
            assert torch.equal(clipper.carry(a), carry)
            assert (a.item(), b.item()) == before
        for o in (first, second):
            o.zero_grad()


def test_each_with_its_own_closure_is_clipped():
    a, b, first, second, _ = pair()
    for _ in range(3):
        before = a.item(), b.item()
        first.step(lambda: set_grads(a, b))
        second.step(lambda: set_grads(a, b))
        assert abs(a.item() - before[0]) <= 1.0
        assert abs(b.item() - before[1]) <= 1.0


def test_after_an_error_the_other_one_is_still_clipped():
    a, b, first, second, _ = pair(nonfinite="raise")
    a.grad, b.grad = torch.tensor([math.nan]), torch.tensor([100.0])
    with pytest.raises(NonFiniteGradientError):
        first.step()
    first.zero_grad()
    second.step()
    assert b.item() == -1.0


def test_groups_added_to_the_first_keep_everything_in_place():
    a, b, first, second, clipper = pair(Norm(1.0, over="group"), carry=Gated())
    set_grads(a, b, 10.0)
    first.step(), second.step()
    b.grad = torch.tensor([math.nan])
    second.step()
    feed = second.param_groups[0]["uclip_feed"].clone()
    second.param_groups[0]["uclip"] = None
    c = param(0.0)
    first.add_param_group({"params": [c], "uclip": Component(2.0)})
    second.param_groups[0].pop("uclip")
    clipper._session.refresh()
    assert torch.equal(second.param_groups[0]["uclip_feed"], feed)
    assert clipper.nonfinite_parameters() == {"group 2, parameter 0": 1}
    set_grads(a, b)
    c.grad = torch.tensor([100.0])
    first.step(), second.step()
    assert c.item() == -2.0


def test_loading_one_of_them_leaves_the_other():
    a, b, first, second, clipper = pair()
    set_grads(a, b)
    first.step(), second.step()
    saved = copy.deepcopy(first.state_dict())
    owed = clipper.carry(b).clone()
    first.load_state_dict(saved)
    assert torch.equal(clipper.carry(b), owed)
    assert first.param_groups[0]["uclip_steps"] == 1
