"""DDP, averaged first and then clipped: UClip as it is, with no word between the ranks."""

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from carryclip.torch import UClip
from spread import KINDS, alone, batches, check_same, model


def averaged(rank, region, carry, optimizer):
    net = DistributedDataParallel(model())
    opt = optimizer(net.parameters(), lr=0.05)
    clipper = UClip(opt, region, carry, metrics_every=1)
    for inputs, targets in batches(rank):
        opt.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        opt.step()
    params = [p.detach() for p in net.parameters()]
    return params, [clipper.carry(p) for p in net.parameters()], dict(clipper.metrics())


@pytest.mark.parametrize("kind", KINDS)
def test_ddp_gives_what_one_process_gives(ranks, kind):
    region, carry = KINDS[kind]
    params, carries, told = alone(region, carry, torch.optim.AdamW)
    for found, kept, metrics in ranks.run(averaged, region, carry, torch.optim.AdamW):
        # All-reduce adds up two ranks in their order, so that even norms are the same.
        check_same(found, params, exact=True)
        check_same(kept, carries, exact=True)
        assert metrics == told[-1]


def scaled(rank, region, carry, fused, unscale):
    """One rank's loss overflows once."""
    net = DistributedDataParallel(model())
    opt = torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused)
    clipper = UClip(opt, region, carry)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    same = []
    for step, (inputs, targets) in enumerate(batches(rank)):
        opt.zero_grad()
        factor = torch.inf if step == 4 and rank == 1 else 1.0
        before = [x.clone() for p in net.parameters() for x in (p.detach(), clipper.carry(p))]
        scaler.scale((net(inputs) - targets).square().mean() * factor).backward()
        if unscale:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        after = [x for p in net.parameters() for x in (p.detach(), clipper.carry(p))]
        same.append(all(map(torch.equal, before, after)))
    params = [p.detach().clone() for p in net.parameters()]
    return same, scaler.get_scale(), params, [clipper.carry(p) for p in net.parameters()]


@pytest.mark.parametrize("kind", ["component gated", "norm gated"])
@pytest.mark.parametrize(("fused", "unscale"), [(False, False), (False, True), (True, False)])
def test_an_overflow_on_one_rank_is_skipped_on_all(ranks, kind, fused, unscale):
    region, carry = KINDS[kind]
    params, carries, _ = alone(region, carry, partial(torch.optim.AdamW, fused=fused), without=[4])
    for same, scale, found, kept in ranks.run(scaled, region, carry, fused, unscale):
        assert same == [step == 4 for step in range(len(same))]
        assert scale == 2.0**7
        # Scales are powers of two and change no digit; ranks are added up in their order, so that norms agree too.
        check_same(found, params, exact=True)
        check_same(kept, carries, exact=True)
