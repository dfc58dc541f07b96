"""DeepSpeed's ZeRO: coordinates are clipped exactly, norms exactly or not at all."""

import fcntl
import os
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from carryclip import Norm
from carryclip.torch import UClip
from ranks import running
from seam import ledger
from spread import KINDS, STEPS, alone, batches, check_same, model

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "gradient_clipping": 0.0,
}


def settle_in(rank):
    import warnings

    warnings.simplefilter("ignore")
    place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    os.environ.update({name: str(value) for name, value in place.items()})


def build(rank):
    """What DeepSpeed compiles where it has not been used before, which takes minutes on a slow machine."""
    settle_in(rank)
    from deepspeed.comm.torch import build_shm_op

    return build_shm_op() is not None


@pytest.fixture(scope="module")
def ranks():
    """Processes of our own: DeepSpeed keeps a process group of its own."""
    with running() as made:
        yield made


@pytest.fixture(scope="module", autouse=True)
def built(ranks):
    """Built once, whoever else runs these tests.

    Whoever builds holds torch's lock, which is a file. It outlives a builder that was killed, and then everybody waits
    for it for ever. Ours is lifted by the kernel: who holds it knows that none of these tests is building.
    """
    place = Path(cpp_extension._get_build_directory("deepspeed_shm_comm", False))
    with (place / "carryclip.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (place / "lock").unlink(missing_ok=True)
        ranks.run(build, patience=900.0)


def start(rank, stage, region, carry, groups, **changes):
    """A model under DeepSpeed, and its clipper."""
    import logging

    settle_in(rank)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    net = model()
    params = list(net.parameters())
    parts = [params] if groups == 1 else [params[:3], params[3:]]
    opt = torch.optim.AdamW([{"params": part} for part in parts], lr=0.05)
    clipper = UClip(opt, region, carry, metrics_every=1)
    config = {**CONFIG, "zero_optimization": {"stage": stage}, **changes}
    engine, *_ = deepspeed.initialize(model=net, optimizer=opt, config=config, dist_init_required=False)
    return net, engine, clipper


def train(engine, steps):
    for inputs, targets in steps:
        engine.backward((engine(inputs) - targets).square().mean())
        engine.step()


def weights(net, stage):
    if stage < 3:
        return [p.detach().clone() for p in net.parameters()]
    import deepspeed

    found = []
    for p in net.parameters():
        with deepspeed.zero.GatheredParameters([p]):
            found.append(p.detach().clone())
    return found


def run(rank, stage, region, carry, groups):
    net, engine, clipper = start(rank, stage, region, carry, groups)
    try:
        train(engine, batches(rank))
    except TypeError as error:
        return str(error)
    return weights(net, stage), ledger(clipper).steps


@pytest.mark.pairwise
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["component gated", "adaptive"])
def test_coordinates_are_clipped_exactly(ranks, kind, stage, groups):
    region, carry = KINDS[kind]
    params, _, _ = alone(region, carry, torch.optim.AdamW)
    for found, steps in ranks.run(run, stage, region, carry, groups):
        check_same(found, params, exact=True)
        assert steps == STEPS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_norm_spans_the_ranks(ranks, stage):
    params, _, _ = alone(Norm(0.3), True, torch.optim.AdamW)
    for found, steps in ranks.run(run, stage, Norm(0.3), True, 1):
        check_same(found, params, exact=False)
        assert steps == STEPS


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_norm_that_cannot_be_measured_is_refused(ranks, stage):
    for said in ranks.run(run, stage, Norm(0.3), True, 2):
        assert "stepped once for each group" in said
    for said in ranks.run(run, stage, Norm(0.3, over="tensor"), True, 1):
        assert "each tensor is cut up" in said


def halved(rank, region, carry):
    """In bfloat16 stage 0 DeepSpeed takes a step while it is being set up."""
    _, engine, clipper = start(rank, 0, region, carry, 1, bf16={"enabled": True})
    states = clipper.optimizers[0].state
    before = ledger(clipper).steps, {int(state["uclip_count"]) for state in states.values()}
    train(engine, [(inputs.bfloat16(), targets.bfloat16()) for inputs, targets in batches(rank)])
    return before, (ledger(clipper).steps, {int(state["uclip_count"]) for state in states.values()})


@pytest.mark.parametrize("kind", ["component gated", "adaptive"])
def test_being_set_up_is_no_step(ranks, kind):
    assert ranks.run(halved, *KINDS[kind]) == [((0, {0}), (STEPS, {STEPS}))] * 2


def clipping_too(rank, stage):
    import warnings

    _, engine, _ = start(rank, stage, Norm(0.3), True, 1, gradient_clipping=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(engine, batches(rank))
    return [str(warning.message) for warning in caught if "carry" in str(warning.message)]


@pytest.mark.parametrize("stage", [0, 1])
def test_clipping_twice_is_reported_once(ranks, stage):
    for said in ranks.run(clipping_too, stage):
        assert len(said) == 1
        assert '"gradient_clipping": 0' in said[0]


def resumed(rank, stage, kind, folder):
    steps = list(batches(rank))
    net, engine, _ = start(rank, stage, *KINDS[kind], 1)
    train(engine, steps[:6])
    engine.save_checkpoint(folder)
    train(engine, steps[6:])
    other, again, clipper = start(rank, stage, *KINDS[kind], 1)
    again.load_checkpoint(folder)
    train(again, steps[6:])
    return weights(net, stage), weights(other, stage), ledger(clipper).steps


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("kind", ["component gated", "norm gated"])
def test_resuming_is_bit_equal(ranks, tmp_path, stage, kind):
    for one, other, steps in ranks.run(resumed, stage, kind, str(tmp_path)):
        check_same(other, one, exact=True)
        assert steps == STEPS
