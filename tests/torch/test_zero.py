"""ZeroRedundancyOptimizer: ranks step different parameters, yet norms, skips and checkpoints are the whole model's."""

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from carryclip import Component, Gated, Norm
from carryclip.torch import NonFiniteGradientError, UClip, uclipped
from seam import ledger
from spread import KINDS, STEPS, alone, batches, check_same, model


def attach(net, region, carry, optimizer, form):
    """Both ways to clip inside ZeRO."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if form == "attached":
        zero = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=optimizer, lr=0.05)
        return zero, UClip(zero, region, carry, metrics_every=1)
    made = uclipped(optimizer, region, carry=carry, metrics_every=1)
    zero = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=made, lr=0.05)
    return zero, zero.optim.uclip


def train(net, zero, steps):
    for inputs, targets in steps:
        zero.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        zero.step()


def zeroed(rank, region, carry, optimizer, form):
    net = DistributedDataParallel(model())
    zero, clipper = attach(net, region, carry, optimizer, form)
    train(net, zero, batches(rank))
    return [p.detach() for p in net.parameters()], dict(clipper.metrics()), clipper.metrics().step


@pytest.mark.parametrize("kind", ["component", "norm", "norm gated", "norm by tensor", "component gated", "adaptive"])
@pytest.mark.parametrize("form", ["attached", "class"])
def test_zero_gives_what_one_process_gives(ranks, kind, form):
    region, carry = KINDS[kind]
    params, _, told = alone(region, carry, torch.optim.AdamW)
    for found, metrics, step in ranks.run(zeroed, region, carry, torch.optim.AdamW, form):
        check_same(found, params, exact=not isinstance(region, Norm))
        assert step == STEPS - 2
        for name, value in metrics.items():
            assert value == pytest.approx(told[step][name], rel=1e-5, abs=1e-6), name


def resumed(rank, region, carry, form):
    """Train on from a consolidated checkpoint, in a new model."""
    steps = list(batches(rank))
    net = DistributedDataParallel(model())
    zero, clipper = attach(net, region, carry, torch.optim.AdamW, form)
    train(net, zero, steps[:6])
    saved = []
    for to in range(2):
        zero.consolidate_state_dict(to)
        if rank == to:
            saved = copy.deepcopy([zero.state_dict(), net.module.state_dict()])
    train(net, zero, steps[6:])
    other = DistributedDataParallel(model())
    other.module.load_state_dict(saved[1])
    again, twin = attach(other, region, carry, torch.optim.AdamW, form)
    again.load_state_dict(saved[0])
    train(other, again, steps[6:])
    left = [ledger(clipper).steps, float(ledger(clipper).skipped)], [ledger(twin).steps, float(ledger(twin).skipped)]
    return [p.detach() for p in net.parameters()], [p.detach() for p in other.parameters()], left


@pytest.mark.parametrize("kind", ["component gated", "norm gated", "adaptive"])
@pytest.mark.parametrize("form", ["attached", "class"])
def test_resuming_is_bit_equal(ranks, kind, form):
    for params, others, (one, other) in ranks.run(resumed, *KINDS[kind], form):
        check_same(others, params, exact=True)
        assert one == other == [STEPS, 0.0]


def spoiled(rank, region):
    """Of one tensor, which only one rank steps, the gradient is not finite once, on both ranks as after DDP."""
    net = DistributedDataParallel(model())
    zero, clipper = attach(net, region, True, torch.optim.SGD, "attached")
    same = []
    for step, (inputs, targets) in enumerate(batches(rank)):
        zero.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        before = [p.detach().clone() for p in net.parameters()]
        if step == 4:
            next(iter(net.parameters())).grad[0, 0] = torch.nan
        zero.step()
        same.append(all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True)))
    return same, clipper.metrics()["skipped_steps"]


@pytest.mark.parametrize("region", [Component(0.05), Norm(0.3), Norm(0.3, over="tensor")], ids=repr)
def test_all_ranks_skip_together(ranks, region):
    for same, skipped in ranks.run(spoiled, region):
        assert same == [step == 4 for step in range(STEPS)]
        assert skipped == 1


def overlapping(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(model())
    zero = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    try:
        UClip(zero, Norm(1.0), carry=True)
    except TypeError as error:
        return str(error)


def test_steps_inside_the_backward_pass_are_refused(ranks):
    assert all("overlap_with_ddp" in said for said in ranks.run(overlapping))


# ---------------------------------------------------------------------- ranks with parameters of their own


def owned(step, rank):
    """Gradients of the parameters a rank owns, in two groups; of the second there are none in every other step."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    first, second = torch.randn(2, 3, generator=generator) + 0.5
    return first, second if step % 2 else None


def gated(params, gradients, group=None):
    opt = torch.optim.SGD([{"params": column} for column in params], lr=0.1)
    clipper = UClip(opt, Norm(0.6, over="group"), Gated(), process_group=group)
    for step in range(16):
        for k, column in enumerate(params):
            for param, found in zip(column, gradients(step), strict=True):
                param.grad = None if found[k] is None else found[k].clone()
        opt.step()
    return [clipper.carry(p) for column in params for p in column], [x.clone() for x in ledger(clipper).memory.known()]


def gated_apart(rank):
    params = [[torch.nn.Parameter(torch.zeros(3))] for _ in range(2)]
    return gated(params, lambda step: [owned(step, rank)], torch.distributed.group.WORLD)


def test_a_gate_of_a_group_without_gradients_does_not_age(ranks):
    params = [[torch.nn.Parameter(torch.zeros(3)) for _ in range(2)] for _ in range(2)]
    carries, feeds = gated(params, lambda step: [owned(step, rank) for rank in range(2)])
    for rank, (found, memory) in enumerate(ranks.run(gated_apart)):
        torch.testing.assert_close(found, [carries[rank], carries[2 + rank]], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(memory, feeds, rtol=1e-5, atol=1e-6)


def raising(rank):
    weight = torch.nn.Parameter(torch.zeros(2))
    opt = torch.optim.SGD([weight], lr=0.1)
    group = torch.distributed.group.WORLD
    clipper = UClip(opt, Norm(1.0), carry=False, nonfinite="raise", metrics_every=1, process_group=group)
    said = []
    for step in range(4):
        weight.grad = torch.full((2,), torch.nan if step == 2 and rank == 1 else 1.0 + step)
        try:
            opt.step()
        except NonFiniteGradientError as error:
            said.append(str(error))
        opt.zero_grad()
    return said, clipper.metrics()["dropped_norm"]


def test_what_was_dropped_before_an_error_is_counted(ranks):
    # Before the last step, of which the ranks tell each other at the next: 2 numbers on each of 2 ranks.
    wanted = (2.0 * 1.0 - 1.0) + (2.0 * 2.0 - 1.0)
    for rank, (said, dropped) in enumerate(ranks.run(raising)):
        assert len(said) == 1
        assert ("group 0" if rank else "another rank") in said[0]
        assert dropped == pytest.approx(wanted, rel=1e-6)
