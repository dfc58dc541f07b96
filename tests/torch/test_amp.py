"""GradScaler on CPU: fused and not, unscaled by the user or not, with overflow in between."""

import copy
import math

import pytest
import torch
from torch import nn, optim

from carryclip import Adaptive, Component, Drip, Gated, Norm, Shrunk
from carryclip.torch import UClip

MAKERS = {
    "SGD": lambda p, **k: optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "Adam": lambda p, **k: optim.Adam(p, lr=0.01, **k),
    "AdamW": lambda p, **k: optim.AdamW(p, lr=0.01, **k),
    "Adagrad": lambda p, **k: optim.Adagrad(p, lr=0.05, **k),
}


def problem():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(9, 6, 4), torch.randint(2, (9, 6))


def train(net, optimizer, x, y, unscale, overflow=()):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    for k, (inputs, labels) in enumerate(zip(x, y, strict=True)):
        optimizer.zero_grad()
        scaler.scale(5 * nn.functional.cross_entropy(net(inputs), labels)).backward()
        if k in overflow:
            net[0].weight.grad[0, 0] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler


@pytest.mark.pairwise
@pytest.mark.parametrize("region", [Component(0.05), Norm(0.1), Adaptive(1, 0.5)], ids=repr)
@pytest.mark.parametrize("overflow", [(), (0,), (3,), (2, 3)], ids=repr)
@pytest.mark.parametrize("unscale", [False, True], ids=["step only", "unscale_ first"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("carry", [Gated(), Drip(), Shrunk()], ids=["gated", "drip", "shrunk"])
@pytest.mark.parametrize("name", MAKERS)
def test_overflow_leaves_the_run_as_if_the_batch_had_not_been(name, carry, fused, unscale, overflow, region):
    net, x, y = problem()
    twin = copy.deepcopy(net)
    optimizer = MAKERS[name](net.parameters(), fused=fused)
    clipper = UClip(optimizer, region, carry=carry)
    scaler = train(net, optimizer, x, y, unscale, overflow)
    assert scaler.get_scale() == 2.0**10 / 2 ** len(overflow)
    keep = [k for k in range(len(x)) if k not in overflow]
    bare = MAKERS[name](twin.parameters(), fused=fused)
    plain = UClip(bare, region, carry=carry, metrics_every=1)
    for inputs, labels in zip(x[keep], y[keep], strict=True):
        bare.zero_grad()
        (5 * nn.functional.cross_entropy(twin(inputs), labels)).backward()
        bare.step()
    assert any(plain.carry(q).any() for q in twin.parameters())
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        # The loss scale is a power of two: scaling and unscaling lose nothing.
        assert torch.equal(p, q)
        assert torch.equal(clipper.carry(p), plain.carry(q))


def test_left_alone_groups_are_unscaled_too():
    net, x, y = problem()
    twin = copy.deepcopy(net)
    regions = {0: Norm(0.1), 1: None}

    def make(net):
        optimizer = optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters()}], lr=0.01, fused=True)
        return optimizer, UClip(optimizer, regions, carry=True)

    optimizer, _ = make(net)
    train(net, optimizer, x, y, unscale=False)
    bare, _ = make(twin)
    for inputs, labels in zip(x, y, strict=True):
        bare.zero_grad()
        (5 * nn.functional.cross_entropy(twin(inputs), labels)).backward()
        bare.step()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


def test_explicit_form_survives_an_overflow_between_unscale_and_step():
    """Trap: clipping between ``unscale_`` and ``scaler.step`` runs even though the optimizer will skip."""
    net, x, y = problem()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    clipper = UClip(net.parameters(), Component(0.05), carry=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = None
    for k in range(4):
        optimizer.zero_grad()
        scaler.scale(5 * nn.functional.cross_entropy(net(x[k]), y[k])).backward()
        if k == 3:
            net[0].weight.grad[0, 0] = math.inf
            before = [clipper.carry(p).clone() for p in net.parameters()]
        scaler.unscale_(optimizer)
        clipper.clip_()
        scaler.step(optimizer)
        scaler.update()
    assert all(torch.equal(clipper.carry(p), c) for p, c in zip(net.parameters(), before, strict=True))


def test_autocast_bfloat16_trains():
    net, x, y = problem()
    optimizer = optim.AdamW(net.parameters(), lr=0.01)
    clipper = UClip(optimizer, Norm(0.1), carry=True, metrics_every=1)
    for inputs, labels in zip(x, y, strict=True):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
    assert clipper.metrics()["update_norm"] <= 0.1 * (1 + 1e-6)


def test_several_fused_optimizers_ask_for_unscaled_gradients():
    net, x, y = problem()
    first = optim.SGD(net[0].parameters(), lr=0.1, fused=True)
    second = optim.SGD(net[2].parameters(), lr=0.1, fused=True)
    UClip([first, second], Norm(0.1), carry=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(nn.functional.cross_entropy(net(x[0]), y[0])).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\) for each"):
        scaler.step(first)
