"""Training through UClip equals a hand-written loop that clips with the reference and calls the bare optimizer."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn, optim

from carryclip import EWMA, Adaptive, Component, Gated, Norm, reference
from carryclip.torch import UClip

OPTIMIZERS = {
    "SGD": functools.partial(optim.SGD, lr=0.05),
    "SGD momentum": functools.partial(optim.SGD, lr=0.05, momentum=0.9),
    "SGD nesterov": functools.partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": functools.partial(optim.Adam, lr=0.01),
    "AdamW": functools.partial(optim.AdamW, lr=0.01),
    "AdamW amsgrad": functools.partial(optim.AdamW, lr=0.01, amsgrad=True),
    "NAdam": functools.partial(optim.NAdam, lr=0.01),
    "RAdam": functools.partial(optim.RAdam, lr=0.01),
    "Adamax": functools.partial(optim.Adamax, lr=0.01),
    "Adadelta": functools.partial(optim.Adadelta, lr=0.5),
    "Adagrad": functools.partial(optim.Adagrad, lr=0.05),
    "RMSprop": functools.partial(optim.RMSprop, lr=0.01, momentum=0.5),
    "Rprop": functools.partial(optim.Rprop, lr=0.01),
    "ASGD": functools.partial(optim.ASGD, lr=0.05),
    "Adafactor": functools.partial(optim.Adafactor, lr=0.01),
    "Muon": functools.partial(optim.Muon, lr=0.01),
}
FUSED = {"SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW", "AdamW amsgrad", "Adagrad"}
KINDS = [
    (name, kind)
    for name in OPTIMIZERS
    for kind in ("loop", "foreach", "fused")
    if not (name == "Muon" and kind != "loop") and not (kind == "fused" and name not in FUSED)
]


def make(name, kind, params):
    options = (
        {}
        if name == "Muon"
        else {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[kind]
    )
    return OPTIMIZERS[name](params, **options)


def net_and_batches(name):
    torch.manual_seed(0)
    bias = name != "Muon"  # Muon takes matrices only
    net = nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), nn.Linear(8, 3, bias=bias)).double()
    x = 3 * torch.randn(12, 10, 6, dtype=torch.float64)
    return net, x, torch.randint(3, (12, 10))


def train(net, optimizer, x, y, clip=lambda: None):
    for inputs, labels in zip(x, y, strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        clip()
        optimizer.step()
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.pairwise
@pytest.mark.parametrize(
    "region", [Component(0.02), Norm(0.1), Adaptive(1, 0.5, EWMA())], ids=["component", "norm", "adaptive"]
)
@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_equals_a_hand_written_loop(name, kind, region):
    net, x, y = net_and_batches(name)
    twin = copy.deepcopy(net)
    by_hand = reference.UClip(region, Gated())
    params = list(twin.parameters())

    def clip():
        updates = by_hand.step([p.grad.numpy().copy() for p in params])
        for p, u in zip(params, updates, strict=True):
            p.grad.copy_(torch.from_numpy(np.asarray(u)))

    expected = train(twin, make(name, kind, params), x, y, clip)
    optimizer = make(name, kind, net.parameters())
    clipper = UClip(optimizer, region, carry=Gated())
    actual = train(net, optimizer, x, y)
    assert clipper.metrics()["carry_norm"] > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_lazy_initialisation_survives(name, kind):
    """Trap: optimizers set their state up when it is empty, so a carry must not be there first."""
    net, x, y = net_and_batches(name)
    bare = make(name, kind, copy.deepcopy(net).parameters())
    optimizer = make(name, kind, net.parameters())
    UClip(optimizer, Norm(0.1), carry=True)
    train(net, optimizer, x, y)
    for group in bare.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    bare.step()
    for p, twin in zip(net.parameters(), bare.param_groups[0]["params"], strict=True):
        assert set(optimizer.state[p]) == set(bare.state[twin]) | {"uclip_carry"}


@pytest.mark.parametrize("metrics_every", [0, 1, 3])
def test_sgd_without_clipping_is_untouched(metrics_every):
    net, x, y = net_and_batches("SGD")
    twin = copy.deepcopy(net)
    expected = train(twin, optim.SGD(twin.parameters(), lr=0.05), x, y)
    optimizer = optim.SGD(net.parameters(), lr=0.05)
    UClip(optimizer, Norm(1e9), carry=True, metrics_every=metrics_every)
    for a, e in zip(train(net, optimizer, x, y), expected, strict=True):
        assert torch.equal(a, e)
