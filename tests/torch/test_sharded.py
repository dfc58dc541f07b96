"""Parameters spread over ranks: FSDP2, tensor parallel and ZeRO give what one process gives."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from carryclip import Component, Gated, Norm
from carryclip.torch import UClip
from seam import force
from spread import KINDS, STEPS, alone, batches, check_same, full, is_exact, model


def sharded(rank, region, carry, optimizer, options):
    """The same model under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    opt = optimizer(net.parameters(), lr=0.05)
    device_path = options.pop("device_path", False)
    clipper = UClip(opt, region, carry, metrics_every=1, **options)
    if device_path:
        force(clipper, host=False)
    told = []
    for inputs, targets in batches(rank):
        opt.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        opt.step()
        told.append((clipper.metrics().step, dict(clipper.metrics())))
    params = [full(p.detach()) for p in net.parameters()]
    return params, [full(clipper.carry(p)) for p in net.parameters()], told


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(torch.optim.SGD, {}), (torch.optim.AdamW, {}), (torch.optim.AdamW, {"device_path": True})],
    ids=["SGD", "AdamW", "as on a GPU"],
)
def test_fsdp2_gives_what_one_process_gives(ranks, kind, optimizer, options):
    region, carry = KINDS[kind]
    params, carries, told = alone(region, carry, optimizer)
    for rank, (found, kept, metrics) in enumerate(ranks.run(sharded, region, carry, optimizer, options)):
        exact = is_exact(region, carry)
        check_same(found, params, exact=exact)
        check_same(kept, carries, exact=exact)
        assert [step for step, _ in metrics] == [-1, *range(STEPS - 1)]
        for step, values in metrics[1:]:
            for name, value in values.items():
                assert value == pytest.approx(told[step][name], rel=1e-5, abs=1e-6), (rank, step, name)


def measured_steps(rank, every):
    """After each step, which one the metrics are of."""
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    clipper = UClip(opt, Norm(0.3), carry=True, metrics_every=every)
    told = []
    for _, (inputs, _) in zip(range(2 * every + 1), batches(rank), strict=False):
        net(inputs).square().mean().backward()
        opt.step()
        told.append(clipper.metrics().step)
    return told


def test_metrics_of_ranks_are_one_step_old_when_people_log(ranks):
    for told in ranks.run(measured_steps, 4):
        assert told == [-1, 0, 1, 2, 2, 2, 2, 6, 6]  # after the 4th step those of the 3rd


def changing(rank, how):
    """A run whose region changes in the middle; ``how`` is whether it is spread over ranks."""
    net = model()
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    clipper = UClip(opt, Norm(0.3), Gated(decay=0.5), metrics_every=1)
    for step, given in enumerate(zip(batches(0), batches(1), strict=True)):
        if step in (4, 8):
            clipper.change(Norm(0.1, over="tensor") if step == 4 else Component(0.02), carry=Gated(decay=0.9))
        opt.zero_grad()
        inputs, targets = given[rank]
        loss = (net(inputs) - targets).square().mean()
        if how == "alone":
            inputs, targets = given[1]
            loss = (loss + (net(inputs) - targets).square().mean()) / 2
        loss.backward()
        opt.step()
    return [full(p.detach()) for p in net.parameters()], [full(clipper.carry(p)) for p in net.parameters()]


def test_a_region_changes_in_the_middle_of_a_run(ranks):
    params, carries = changing(0, "alone")
    for found, kept in ranks.run(changing, "fsdp2"):
        check_same(found, params, exact=False)
        check_same(kept, carries, exact=False)


def growing(rank):
    """Norms of tensors, of which some come later: what the ranks tell of the step before is of fewer vectors."""
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net)
    first, *others = net.parameters()
    opt = torch.optim.SGD([first], lr=0.05)
    clipper = UClip(opt, Norm(0.1, over="tensor"), carry=True, metrics_every=1)
    for step, (inputs, targets) in enumerate(batches(rank)):
        if step == 3:
            opt.add_param_group({"params": others})
        net.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        opt.step()
    return clipper.metrics()["update_norm"], len(others)


def test_tensors_may_be_added_in_the_middle_of_a_run(ranks):
    for norm, others in ranks.run(growing):
        assert 0.1 < norm <= 0.1 * (1 + others) ** 0.5 * (1 + 1e-6)


# ---------------------------------------------------------------------- other placements


def placed(rank, how, region, carry):
    """Train with parameters that lie in other ways; gradients are made by hand, the same on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    plane = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (2,))
    lie = {
        "replicated": lambda k, x: distribute_tensor(x, line, [Replicate()]),
        "columns": lambda k, x: distribute_tensor(x, line, [Shard(x.dim() - 1)]),
        "copies of shards": lambda k, x: distribute_tensor(x, plane, [Replicate(), Shard(0)]),
        "shards of copies": lambda k, x: distribute_tensor(x, plane, [Shard(0), Replicate()]),
        "sub-meshes": lambda k, x: distribute_tensor(
            x, [plane, plane["dp"], plane["tp"]][k % 3], [[Shard(0), Shard(0)], [Shard(0)], [Shard(0)]][k % 3]
        ),
        "some plain": lambda k, x: x if k % 2 else distribute_tensor(x, line, [Shard(0)]),
    }[how]
    values = [p.detach() for p in model().parameters()]
    params = [nn.Parameter(lie(k, x)) for k, x in enumerate(values)]
    opt = torch.optim.SGD(params, lr=0.05)
    clipper = UClip(opt, region, carry, metrics_every=1)
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = lie(k, noise(step, k, values[k].shape))
        opt.step()
    assert all(isinstance(clipper.carry(p), DTensor) == isinstance(p, DTensor) for p in params)
    return [full(p.detach()) for p in params], [full(clipper.carry(p)) for p in params], dict(clipper.metrics())


def noise(step, k, shape):
    generator = torch.Generator().manual_seed(1000 * step + k)
    return (20.0 if step == 3 else 1.0) * torch.randn(shape, generator=generator)


def unplaced(region, carry):
    params = [nn.Parameter(p.detach()) for p in model().parameters()]
    opt = torch.optim.SGD(params, lr=0.05)
    clipper = UClip(opt, region, carry, metrics_every=1)
    for step in range(STEPS):
        for k, p in enumerate(params):
            p.grad = noise(step, k, p.shape)
        if step == STEPS - 1:
            told = dict(clipper.metrics())
        opt.step()
    return [p.detach() for p in params], [clipper.carry(p) for p in params], told


@pytest.mark.parametrize("kind", ["component gated", "norm gated", "norm by tensor"])
@pytest.mark.parametrize(
    "how", ["replicated", "columns", "copies of shards", "shards of copies", "sub-meshes", "some plain"]
)
def test_every_entry_counts_once_however_it_is_placed(ranks, how, kind):
    region, carry = KINDS[kind]
    params, carries, told = unplaced(region, carry)
    for found, kept, metrics in ranks.run(placed, how, region, carry):
        check_same(found, params, exact=is_exact(region, carry))
        check_same(kept, carries, exact=is_exact(region, carry))
        for name, value in metrics.items():
            assert value == pytest.approx(told[name], rel=1e-5, abs=1e-6), name


# ---------------------------------------------------------------------- bad gradients on one rank


def spoiled(rank, region, nonfinite, optimizer, fused, device_path=False):
    """FSDP2; in one step only rank 1's shard has a gradient that is not finite."""
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model())
    opt = optimizer(net.parameters(), lr=0.05, **({"fused": True} if fused else {}))
    clipper = UClip(opt, region, carry=True, nonfinite=nonfinite, metrics_every=1)
    if device_path:
        force(clipper, host=False)
    before, after, errors = [], [], []
    for step, (inputs, targets) in enumerate(batches(rank)):
        opt.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        if step == 4:
            if rank == 1:
                next(iter(net.parameters())).grad.to_local()[0, 0] = torch.inf
            before = [full(x).clone() for p in net.parameters() for x in (p.detach(), clipper.carry(p))]
        try:
            opt.step()
        except FloatingPointError as error:
            errors.append(str(error))
        if step == 4:
            after = [full(x).clone() for p in net.parameters() for x in (p.detach(), clipper.carry(p))]
    final = [full(p.detach()) for p in net.parameters()]
    return before, after, errors, final, clipper.metrics()["skipped_steps"], clipper.nonfinite_parameters()


@pytest.mark.parametrize("region", [Component(0.05), Norm(3.0)], ids=repr)
@pytest.mark.parametrize(("fused", "device_path"), [(False, False), (True, False), (True, True), (False, True)])
def test_all_ranks_skip_when_one_is_bad(ranks, region, fused, device_path):
    results = ranks.run(spoiled, region, "skip", torch.optim.Adam if fused else torch.optim.SGD, fused, device_path)
    for before, after, _, final, skipped, _ in results:
        check_same(after, before, exact=True)  # plain SGD with a zero gradient stands still too
        check_same(final, results[0][3], exact=True)
        assert skipped == 1
        assert all(x.isfinite().all() for x in final)
    assert [bool(bad) for *_, bad in results] == [False, True]


@pytest.mark.parametrize("region", [Component(0.05), Norm(0.3)], ids=repr)
def test_all_ranks_raise_when_one_is_bad(ranks, region):
    for rank, (before, after, errors, final, _, _) in enumerate(
        ranks.run(spoiled, region, "raise", torch.optim.SGD, False)
    ):
        assert len(errors) == 1
        assert ("group 0, parameter 0" if rank else "on another rank") in errors[0]
        check_same(after, before, exact=True)
        assert all(x.isfinite().all() for x in final)


def test_bad_entries_of_one_rank_become_zero(ranks):
    for before, after, _, final, skipped, _ in ranks.run(spoiled, Norm(0.3), "zero", torch.optim.SGD, False):
        assert skipped == 0
        assert all(x.isfinite().all() for x in final)
        assert any((one != other).any() for one, other in zip(before, after, strict=True))


def scaled(rank, region, carry, fused, where):
    """FSDP2 under a GradScaler; once rank 1's loss overflows, which all shards show, or only its own shard does."""
    from torch.distributed.fsdp import fully_shard

    net = fully_shard(model())
    opt = torch.optim.AdamW(net.parameters(), lr=0.05, fused=fused)
    clipper = UClip(opt, region, carry)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scales = []
    for step, (inputs, targets) in enumerate(batches(rank)):
        opt.zero_grad()
        spoilt = step == 4 and rank == 1
        factor = torch.inf if spoilt and where == "loss" else 1.0
        scaler.scale((net(inputs) - targets).square().mean() * factor).backward()
        if spoilt and where == "shard":
            next(iter(net.parameters())).grad.to_local()[0, 0] = torch.inf
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, [full(p.detach()) for p in net.parameters()], [full(clipper.carry(p)) for p in net.parameters()]


@pytest.mark.parametrize("kind", ["component gated", "norm gated"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["loss", "shard"])
def test_a_scaler_that_overflows_on_one_rank_skips_on_all(ranks, kind, fused, where):
    region, carry = KINDS[kind]
    params, carries, _ = alone(region, carry, functools.partial(torch.optim.AdamW, fused=fused), without=[4])
    # On shards a fused AdamW differs in the last digits by itself, without any clipping.
    exact = is_exact(region, carry) and not fused
    for scales, found, kept in ranks.run(scaled, region, carry, fused, where):
        assert scales == [2.0**8] * 4 + [2.0**7] * (STEPS - 4)
        check_same(found, params, exact=exact)
        check_same(kept, carries, exact=exact)


# ---------------------------------------------------------------------- how much is said


def counted_collectives(rank, region, carry, nonfinite, metrics_every):
    """How many collectives, and of how many numbers, each step of FSDP2 makes on behalf of the clipping."""
    from torch.distributed.fsdp import fully_shard

    from carryclip.torch import _agree

    net = fully_shard(model())
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    UClip(opt, region, carry, nonfinite, metrics_every=metrics_every)
    sizes = []
    plain = dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes[-1].append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    _agree.dist.all_reduce = counting
    try:
        for inputs, targets in batches(rank):
            opt.zero_grad()
            (net(inputs) - targets).square().mean().backward()
            sizes.append([])
            opt.step()
    finally:
        _agree.dist.all_reduce = plain
    return sizes


@pytest.mark.parametrize("kind", KINDS)
def test_one_small_vector_per_step(ranks, kind):
    vectors = 17 if KINDS[kind][0].split else 6  # rows or columns of the model's tensors, or the tensors
    for sizes in ranks.run(counted_collectives, *KINDS[kind], "skip", 1):
        assert all(len(each) == 1 and each[0] < 16 * (vectors + 1) for each in sizes)


def test_nothing_is_said_where_nothing_has_to_be(ranks):
    for sizes in ranks.run(counted_collectives, Component(0.05), True, "propagate", 0):
        assert sizes == [[]] * STEPS


def partial(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    line = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 2), line, [Replicate()]))
    opt = torch.optim.SGD([("weight", weight)], lr=0.1)
    UClip(opt, Norm(1.0), carry=True)
    said = []
    for placement in (Partial(), Shard(0)):
        rows = 4 if placement == Partial() else 2
        weight.grad = DTensor.from_local(torch.ones(rows, 2), line, [placement])
        try:
            opt.step()
        except TypeError as error:
            said.append(str(error))
    return said


def test_sums_that_are_still_to_be_taken_are_refused(ranks):
    for said in ranks.run(partial):
        assert len(said) == 2
        assert all("gradient of weight" in each and "redistribute" in each for each in said)
        assert "not been taken yet" in said[0]


def first_generation(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    try:
        UClip(torch.optim.SGD(net.parameters(), lr=0.1), Norm(1.0), carry=True)
    except TypeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
def test_the_first_fsdp_is_refused(ranks):
    assert all("fully_shard" in said for said in ranks.run(first_generation))
