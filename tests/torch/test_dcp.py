"""Distributed checkpoints: the carry is saved, sharded and resharded like the optimizer's own state."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from carryclip import EWMA, Adaptive, Component, Gated, Norm, Welford
from carryclip.torch import LocalUClip, UClip
from seam import ledger
from spread import KINDS, STEPS, batches, check_same, full, model

HALF = STEPS // 2
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*:UserWarning:torch")


def build(region, carry, optimizer, *, shard, clip=True):
    net = model()
    if shard:
        from torch.distributed.fsdp import fully_shard

        net = fully_shard(net)
    opt = optimizer(net.parameters(), lr=0.05)
    return net, opt, UClip(opt, region, carry, metrics_every=1) if clip else None


def train(net, opt, ranks, steps):
    """On what ``ranks`` train on, with the gradients added up as they do it."""
    for parts in list(zip(*(batches(rank) for rank in ranks), strict=True))[steps]:
        opt.zero_grad()
        for inputs, targets in parts:
            ((net(inputs) - targets).square().mean() / len(parts)).backward()
        opt.step()


def save(net, opt, path):
    weights, state = get_state_dict(net, opt)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=path)


def load(net, opt, path, **how):
    weights, state = get_state_dict(net, opt)
    found = {"model": weights, "optim": state}
    dcp.load(found, checkpoint_id=path, **how)
    set_state_dict(net, opt, model_state_dict=found["model"], optim_state_dict=found["optim"])


def outcome(net, clipper):
    params = [full(p.detach()).clone() for p in net.parameters()]
    return params, [full(clipper.carry(p)).clone() for p in net.parameters()], ledger(clipper).steps


def on_two(rank, path, what, kind, optimizer):
    warnings.simplefilter("ignore")
    net, opt, clipper = build(*KINDS[kind], optimizer, shard=True)
    if "load" in what:
        load(net, opt, path)
        train(net, opt, [rank], slice(HALF, None))
    else:
        train(net, opt, [rank], slice(HALF))
        save(net, opt, path)
        train(net, opt, [rank], slice(HALF, None))
    return outcome(net, clipper)


def on_one(path, what, kind, optimizer):
    net, opt, clipper = build(*KINDS[kind], optimizer, shard=False)
    if what == "load":
        load(net, opt, path)
        train(net, opt, [0, 1], slice(HALF, None))
    else:
        train(net, opt, [0, 1], slice(HALF))
        save(net, opt, path)
        train(net, opt, [0, 1], slice(HALF, None))
    return outcome(net, clipper)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["component gated", "norm gated", "adaptive"])
def test_two_ranks_go_on_bit_equal(ranks, tmp_path, kind, optimizer):
    first = ranks.run(on_two, str(tmp_path), "save", kind, optimizer)
    second = ranks.run(on_two, str(tmp_path), "load", kind, optimizer)
    for one, other in zip(first, second, strict=True):
        check_same(other[0], one[0], exact=True)
        check_same(other[1], one[1], exact=True)
        assert one[2] == other[2] == STEPS


@pytest.mark.parametrize("kind", ["component gated", "norm gated", "adaptive"])
def test_from_two_ranks_to_one_and_back(ranks, tmp_path, kind):
    exact = not isinstance(KINDS[kind][0], Norm)
    two = ranks.run(on_two, str(tmp_path / "two"), "save", kind, torch.optim.AdamW)[0]
    one = on_one(tmp_path / "two", "load", kind, torch.optim.AdamW)
    for found, wanted in zip(one[:2], two[:2], strict=True):
        check_same(found, wanted, exact=exact)
    assert one[2] == two[2]
    one = on_one(tmp_path / "one", "save", kind, torch.optim.AdamW)
    for two in ranks.run(on_two, str(tmp_path / "one"), "load", kind, torch.optim.AdamW):
        for found, wanted in zip(two[:2], one[:2], strict=True):
            check_same(found, wanted, exact=exact)
        assert one[2] == two[2]


def whole(rank, path, what, kind):
    """The full state on rank 0, as for torch.save, and from there to all ranks."""
    warnings.simplefilter("ignore")
    net, opt, clipper = build(*KINDS[kind], torch.optim.AdamW, shard=True)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if what == "save":
        train(net, opt, [rank], slice(HALF))
        saved = get_state_dict(net, opt, options=options)
        if rank == 0:
            torch.save(saved, path)
    else:
        weights, state = torch.load(path) if rank == 0 else ({}, {})
        options.broadcast_from_rank0 = True
        set_model_state_dict(net, weights, options=options)
        set_optimizer_state_dict(net, opt, state, options=options)
    train(net, opt, [rank], slice(HALF, None))
    return outcome(net, clipper)


@pytest.mark.parametrize("kind", ["component gated", "norm gated", "adaptive"])
def test_a_full_state_dict_comes_back(ranks, tmp_path, kind):
    first = ranks.run(whole, str(tmp_path / "all.pt"), "save", kind)
    second = ranks.run(whole, str(tmp_path / "all.pt"), "load", kind)
    for one, other in zip(first, second, strict=True):
        check_same(other[0], one[0], exact=True)
        check_same(other[1], one[1], exact=True)
        assert one[2] == other[2] == STEPS


def from_old(rank, path, partly):
    """A checkpoint that was written without U-Clip."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    warnings.simplefilter("ignore")
    net, opt, _ = build(Norm(0.3), True, torch.optim.AdamW, shard=True, clip=False)
    train(net, opt, [rank], slice(HALF))
    save(net, opt, path)
    moments = [full(opt.state[p]["exp_avg"]) for p in net.parameters()]
    net, opt, clipper = build(Norm(0.3), True, torch.optim.AdamW, shard=True)
    try:
        load(net, opt, path, planner=DefaultLoadPlanner(allow_partial_load=partly))
    except CheckpointException:
        return "refused"
    check_same([full(opt.state[p]["exp_avg"]) for p in net.parameters()], moments, exact=True)
    assert not any(full(clipper.carry(p)).any() for p in net.parameters())
    train(net, opt, [rank], slice(HALF, None))
    return "loaded"


def test_an_old_checkpoint_loads_in_part(ranks, tmp_path):
    assert ranks.run(from_old, str(tmp_path / "a"), False) == ["refused", "refused"]
    assert ranks.run(from_old, str(tmp_path / "b"), True) == ["loaded", "loaded"]


# ---------------------------------------------------------------------- steps that are none of the training


def shrinking(step):
    return 0.3 / (1 + step)


def asked(form, region, carry, often):
    """Train, and ask for the state before each step: an optimizer without one steps with gradients of zero for it."""
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    clipper = UClip(opt, region, carry) if form == "UClip" else LocalUClip(net, opt, region, carry)
    for step in range(STEPS):
        opt.zero_grad()
        for _ in range(often):
            get_state_dict(net, opt)
        train(net, opt, [0], slice(step, step + 1))
    kept = ledger(clipper)
    found = [x.detach().clone() for p in net.parameters() for x in (p, clipper.carry(p))]
    return [*found, *(kept.memory.known() if kept.memory else ())], kept.steps, dict(clipper.metrics())


@pytest.mark.parametrize("form", ["UClip", "LocalUClip"])
@pytest.mark.parametrize(
    ("region", "carry"),
    [
        (Norm(shrinking), False),
        (Norm(shrinking), Gated()),
        (Component(shrinking), Gated()),
        (Adaptive(1, 2, Welford()), True),
        (Adaptive(1, 2, EWMA(0.9)), False),
    ],
    ids=["plain", "norm", "component", "Welford", "EWMA"],
)
def test_asking_for_a_state_is_no_step(form, region, carry):
    often, never = asked(form, region, carry, 2), asked(form, region, carry, 0)
    check_same(often[0], never[0], exact=True)
    assert often[1:] == never[1:]
    assert often[1] == STEPS


@pytest.mark.parametrize("observe", [False, True])
def test_a_state_that_is_asked_for_has_the_carry_and_no_samples(observe):
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    clipper = UClip(opt, Adaptive(1, 2, Welford()), Gated(), observe=observe)
    get_state_dict(net, opt)
    assert ledger(clipper).steps == 0
    assert clipper.metrics().step == -1
    for p in net.parameters():
        ours = {name: entry for name, entry in opt.state[p].items() if name.startswith("uclip_")}
        assert set(ours) == (set() if observe else {f"uclip_{n}" for n in ("carry", "mean", "second", "feed", "count")})
        assert not any(entry.any() for entry in ours.values())
