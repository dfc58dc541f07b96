"""A small model that several ranks train, and the one process they are compared with."""

import torch
from torch import nn

from carryclip import (
    EWMA,
    RMS,
    Adaptive,
    Average,
    Capped,
    Component,
    Drip,
    Gated,
    Leaky,
    Norm,
    OfWeights,
    Quantile,
    Shrunk,
    Sign,
)
from carryclip.torch import UClip

STEPS = 12


def model():
    """Some tensors that two ranks share unevenly, one that fits on one of them only."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def batches(rank, size=2):
    """What a rank trains on; now and then there is a large one."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        scale = 30.0 if step % 5 == 2 else 1.0
        yield scale * torch.randn(4, 6, generator=generator), torch.randn(4, 1, generator=generator)


def alone(region, carry=True, optimizer=torch.optim.SGD, without=(), **options):
    """One process that adds up the ranks' gradients in their order, ``without`` some steps."""
    net = model()
    opt = optimizer(net.parameters(), lr=0.05)
    clipper = UClip(opt, region, carry, metrics_every=1, **options)
    told = []
    for step, parts in enumerate(zip(*(batches(rank) for rank in range(2)), strict=True)):
        if step in without:
            continue
        opt.zero_grad()
        sums = [torch.zeros_like(p) for p in net.parameters()]
        for inputs, targets in parts:
            loss = (net(inputs) - targets).square().mean()
            for total, gradient in zip(sums, torch.autograd.grad(loss, list(net.parameters())), strict=True):
                total += gradient
        for p, total in zip(net.parameters(), sums, strict=True):
            p.grad = total / 2
        opt.step()
        told.append(dict(clipper.metrics()))
    return [p.detach() for p in net.parameters()], [clipper.carry(p) for p in net.parameters()], told


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


KINDS = {
    "component": (Component(0.05), True),
    "norm": (Norm(0.3), True),
    "norm gated": (Norm(0.3), Gated()),
    "norm capped": (Norm(0.3), Capped(2)),
    "norm by tensor": (Norm(0.2, over="tensor"), Leaky(0.9)),
    "plain": (Norm(0.3), False),
    "component gated": (Component(0.05), Gated()),
    "component plain": (Component(0.05), False),
    "adaptive": (Adaptive(1, 2, EWMA(0.9)), True),
    "sign": (Sign(0.01), True),
    "norm drip": (Norm(0.3), Drip()),
    "norm by tensor, shrunk": (Norm(0.2, over="tensor"), Shrunk(5)),
    "component drip": (Component(0.05), Drip(rate=0.2, decay=0.9)),
    "adaptive, shrunk": (Adaptive(1, 2, EWMA(0.9)), Shrunk(5)),
    "norm by row": (Norm(0.1, over="row"), True),
    "norm by column, shrunk": (Norm(0.1, over="column"), Shrunk(5)),
    "norm by rms": (Norm(RMS(0.7, warmup=2)), True),
    "norm of each tensor by average": (Norm(Average(1.05, warmup=4, before=0.3), over="tensor"), False),
    "norm of each row by quantile": (Norm(Quantile(0.5, window=5, warmup=2), over="row"), Drip()),
    "norm of each row of weights": (Norm(OfWeights(0.1), over="row"), Gated()),
}


def is_exact(region, carry):
    """Whether each coordinate is clipped by itself, so that it does not matter in which order sums are made."""
    return not isinstance(region, Norm) and not isinstance(carry, (Drip, Shrunk))


def check_same(found, wanted, *, exact):
    """Bit for bit, or to 1e-6 of the whole vector where a norm is added up in another order."""
    if exact:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    else:
        one, other = (torch.cat([x.flatten() for x in tensors]) for tensors in (found, wanted))
        assert (one - other).norm() <= 1e-6 * other.norm()
