"""Promises at the edges of the torch front end: odd gradients, several optimizers, small radii, and who holds whom."""

import contextlib
import copy
import gc
import math
import warnings
import weakref
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from carryclip import Adaptive, Capped, Component, Gated, Norm
from carryclip.torch import LocalUClip, UClip, uclipped
from compilers import needs_compiler
from seam import as_on_a_device

REGIONS = [Norm(1.0), Norm(1.0, over="tensor"), Component(1.0)]


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


# ---------------------------------------------------------------------- a skipped step


def sparse(bad):
    """Uncoalesced: row 1 occurs twice."""
    rows = torch.tensor([[1, 1, 3]])
    values = torch.tensor([[bad, 1.0], [2.0, 3.0], [40.0, 50.0]])
    return torch.sparse_coo_tensor(rows, values, (5, 2), check_invariants=False)


def expanded(bad):
    return torch.tensor([[bad], [100.0]]).expand(2, 3)


def conjugated(bad):
    return torch.tensor([complex(bad, 2.0), 30.0 + 40.0j]).conj()


ODD = {
    "sparse": (sparse, (5, 2), torch.float32),
    "expanded": (expanded, (2, 3), torch.float32),
    "conjugated": (conjugated, (2,), torch.complex64),
}


def has_only_zeros(gradient):
    return not (gradient.to_dense() if gradient.is_sparse else gradient).resolve_conj().any()


@pytest.mark.pairwise
@pytest.mark.parametrize("region", REGIONS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ODD)
def test_a_skipped_step_sends_nothing_of_an_odd_gradient(kind, bad, region):
    make, shape, dtype = ODD[kind]
    p = parameter(*shape, dtype=dtype)
    optimizer = optim.SGD([p], lr=1.0)
    clipper = UClip(optimizer, region, carry=True)
    p.grad = make(5.0)
    optimizer.step()
    weights, owed = p.detach().clone(), clipper.carry(p).clone()
    assert owed.any()
    p.grad = make(bad)
    optimizer.step()
    assert has_only_zeros(p.grad)
    assert torch.equal(p, weights)
    assert torch.equal(clipper.carry(p), owed)
    assert clipper.metrics()["skipped_steps"] == 1
    assert list(clipper.nonfinite_parameters().values()) == [1]


@pytest.mark.parametrize("region", REGIONS, ids=repr)
@pytest.mark.parametrize("kind", ODD)
def test_a_neighbours_bad_gradient_keeps_an_odd_one_back(kind, region):
    make, shape, dtype = ODD[kind]
    p, q = parameter(*shape, dtype=dtype), parameter(2)
    optimizer = optim.SGD([p, q], lr=1.0)
    clipper = UClip(optimizer, region, carry=True)
    p.grad, q.grad = make(100.0), torch.tensor([math.inf, 1.0])
    optimizer.step()
    assert has_only_zeros(p.grad)
    assert not p.any()
    assert not q.any()
    assert not clipper.carry(p).any()


@pytest.mark.parametrize("kind", ODD)
def test_a_skipped_step_sends_nothing_in_the_explicit_form(kind):
    make, shape, dtype = ODD[kind]
    p = parameter(*shape, dtype=dtype)
    clipper = UClip([p], Norm(1.0), carry=True)
    p.grad = make(math.nan)
    clipper.clip_()
    assert has_only_zeros(p.grad)


# ---------------------------------------------------------------------- optimizers that take turns


def pulsing(step):
    return 0.5 + step % 3


TURNS = [Norm(1.0), Norm(pulsing), Norm(pulsing, over="group"), Component(pulsing)]


def own_pass(params, size, generator):
    """A backward pass that brings gradients to these parameters and no others; returns those."""
    given = [size * torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in params]
    sum((p * g).sum() for p, g in zip(params, given, strict=True)).backward()
    return given


@pytest.mark.pairwise
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("region", TURNS, ids=["norm", "scheduled norm", "norm by group", "component"])
@pytest.mark.parametrize("turns", [(1, 1), (3, 1)])
def test_each_gradient_is_taken_in_once_when_optimizers_take_turns(region, to_none, turns):
    generator = torch.Generator().manual_seed(0)
    made = [[parameter(3, dtype=torch.float64), parameter(2, 2, dtype=torch.float64)] for _ in range(2)]
    optimizers = [optim.SGD(made[0], lr=0.1), optim.SGD(made[1], lr=0.1, momentum=0.9)]
    clipper = UClip(optimizers, region, carry=True)
    owed = {p: torch.zeros_like(p) for params in made for p in params}
    for _ in range(40):
        for optimizer, params, times in zip(optimizers, made, turns, strict=True):
            for _ in range(times):
                optimizer.zero_grad(set_to_none=to_none)
                for p, g in zip(params, own_pass(params, 2.0, generator), strict=True):
                    owed[p] += g
                optimizer.step()
                for p in params:
                    owed[p] -= p.grad
    for p, left in owed.items():
        torch.testing.assert_close(clipper.carry(p), left.detach(), rtol=0, atol=1e-9)


def test_a_gradient_that_waits_for_its_step_is_left_as_it_was_clipped():
    a, b = parameter(2), parameter(2)
    first, second = optim.SGD([a], lr=1.0), optim.SGD([b], lr=1.0)
    clipper = UClip([first, second], Norm(1.0), carry=True)
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    first.step()
    waiting, owed = b.grad.clone(), clipper.carry(b).clone()
    for _ in range(3):
        a.grad = torch.tensor([30.0, 0.0])
        first.step()
        assert torch.equal(b.grad, waiting)
        assert torch.equal(clipper.carry(b), owed)
    second.step()
    assert torch.equal(b.detach(), -waiting)
    assert torch.equal(clipper.carry(b), owed)


def test_a_gradient_that_was_stepped_with_is_out_of_the_next_norm():
    a, b = parameter(1), parameter(1)
    first, second = optim.SGD([a], lr=1.0), optim.SGD([b], lr=1.0)
    UClip([first, second], Norm(1.0), carry=True)
    b.grad = torch.tensor([100.0])
    second.step()
    a.grad = torch.tensor([100.0])
    first.step()
    assert a.item() == -1.0


# ---------------------------------------------------------------------- several optimizers and a scaler


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [[], [0]], ids=["none", "one"])
def test_several_optimizers_refuse_gradients_that_are_still_scaled(unscaled, fused):
    a, b = parameter(1), parameter(1)
    optimizers = [optim.SGD([a], lr=1.0, fused=fused), optim.Adam([b], lr=1.0, fused=fused)]
    clipper = UClip(optimizers, Norm(1.0), carry=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(a + b).sum().backward()
    for k in unscaled:
        scaler.unscale_(optimizers[k])
    with pytest.raises(RuntimeError, match="unscale_"):
        scaler.step(optimizers[0])
    assert not clipper.carry(a).any()
    assert not clipper.carry(b).any()


# ---------------------------------------------------------------------- who holds whom


@contextlib.contextmanager
def no_collector():
    """Nothing is freed but what nobody holds. Torch leaves a cycle behind when the first optimizer is made."""
    optim.SGD([parameter(1)], lr=0.1)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def train(model, optimizers, clipper=None):
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (10 * model(torch.ones(4, 3))).square().mean().backward()
        if clipper is not None:
            clipper.clip_()
        for optimizer in optimizers:
            optimizer.step()


def alone(model):
    optimizers = [optim.Adam(model.parameters())]
    train(model, optimizers)
    return optimizers, None


def attached(model):
    optimizers = [optim.Adam(model.parameters())]
    clipper = UClip(optimizers[0], Norm(1.0), carry=True)
    train(model, optimizers)
    return optimizers, clipper


def gated(model):
    optimizers = [optim.SGD(model.parameters(), lr=0.1)]
    clipper = UClip(optimizers[0], Component(0.1), carry=Gated(), metrics_every=1)
    train(model, optimizers)
    clipper.metrics()
    return optimizers, clipper


def several(model):
    optimizers = [optim.SGD([model.weight], lr=0.1), optim.Adam([model.bias])]
    clipper = UClip(optimizers, Norm(1.0), carry=True)
    train(model, optimizers)
    return optimizers, clipper


def explicit(model):
    optimizers = [optim.SGD(model.parameters(), lr=0.1)]
    clipper = UClip(model.parameters(), Norm(1.0), carry=True)
    train(model, optimizers, clipper)
    return optimizers, clipper


def by_class(model):
    optimizers = [uclipped(optim.Adam, Norm(1.0), carry=True)(model.parameters())]
    train(model, optimizers)
    return optimizers, optimizers[0].uclip


def local(model):
    optimizers = [optim.SGD(model.parameters(), lr=0.1)]
    clipper = LocalUClip(model, optimizers[0], Norm(1.0), carry=True)
    train(model, optimizers)
    return optimizers, clipper


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("make", [alone, attached, gated, several, explicit, by_class, local])
def test_a_model_is_gone_as_soon_as_nobody_holds_it(make, removed):
    with no_collector():
        model = nn.Linear(3, 2)
        optimizers, clipper = make(model)
        if removed and clipper is not None:
            clipper.remove()
        held = {name: weakref.ref(p) for name, p in model.named_parameters()}
        held |= {f"optimizer {k}": weakref.ref(optimizer) for k, optimizer in enumerate(optimizers)}
        held |= {} if clipper is None else {"clipper": weakref.ref(clipper)}
        del model, optimizers, clipper
        assert [name for name, ref in held.items() if ref() is not None] == []


def test_a_clipper_that_only_its_optimizer_holds_goes_on():
    with no_collector():
        p = parameter(1)
        optimizer = optim.SGD([p], lr=1.0)
        UClip(optimizer, Norm(1.0), carry=True)
        gc.collect()
        p.grad = torch.tensor([5.0])
        optimizer.step()
        assert p.item() == -1.0


# ---------------------------------------------------------------------- each backward pass by itself


def test_a_parameter_unfrozen_after_attaching_is_clipped():
    net = nn.Module()
    net.a, net.b = parameter(1), parameter(1)
    net.b.requires_grad_(False)
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    clipper = LocalUClip(net, optimizer, Component(1.0), carry=True)
    (3 * net.a).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    net.b.requires_grad_(True)
    (3 * net.a + 50 * net.b).sum().backward()
    optimizer.step()
    assert net.b.item() == -1.0
    assert clipper.carry(net.b).item() == 49.0


class Pair(nn.Module):
    """Two numbers, the second of which may take no part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = parameter(1), parameter(1)

    def forward(self, one, other):
        return (one * self.a if other is None else one * self.a + other * self.b).sum()


def with_unused(rank, region, cap, absent):
    """Move of each number at each of three steps, in the second of which these ranks leave the second out."""
    net = DistributedDataParallel(
        Pair(), find_unused_parameters=True, **({} if cap is None else {"bucket_cap_mb": cap})
    )
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    clipper = LocalUClip(net, optimizer, region, carry=True, metrics_every=0)
    moves, owed = [], []
    for one, other in ((0.0, 100.0), (0.5, None if rank in absent else 0.0), (0.0, 0.0)):
        before = [p.item() for p in net.parameters()]
        optimizer.zero_grad()
        net(one, other).backward()
        optimizer.step()
        moves.append([was - p.item() for was, p in zip(before, net.parameters(), strict=True)])
        owed.append([clipper.carry(p).item() for p in net.parameters()])
    return moves, owed


@pytest.mark.parametrize("cap", [None, 1 / 2**20])
def test_a_parameter_that_took_no_part_is_out_of_each_ranks_norm(ranks, cap):
    for moves, owed in ranks.run(with_unused, Norm(1.0), cap, (0, 1)):
        assert moves[0] == pytest.approx([0.0, 1.0])
        assert owed[0] == pytest.approx([0.0, 99.0])
        assert moves[1] == pytest.approx([0.5, 0.0])
        assert owed[1] == pytest.approx([0.0, 99.0])
        assert moves[2] == pytest.approx([0.0, 1.0])


def test_a_parameter_that_took_no_part_on_one_rank_is_out_of_that_ranks_norm(ranks):
    (moves, owed), (_, others) = ranks.run(with_unused, Norm(1.0), None, (0,))
    share = 0.5 / math.hypot(0.5, 99.0)  # of the rank on which both take part
    assert moves[1] == pytest.approx([(0.5 + share) / 2, math.sqrt(1 - share**2) / 2])
    assert owed[1] == pytest.approx([0.0, 99.0])
    assert others[1] == pytest.approx([0.5 - share, 99.0 - math.sqrt(1 - share**2)])


@pytest.mark.pairwise
@pytest.mark.parametrize("region", REGIONS, ids=repr)
@pytest.mark.parametrize("shape", [(0,), (0, 3)])
@pytest.mark.parametrize("every", [0, 1])
def test_a_pass_may_bring_a_gradient_without_entries(region, shape, every):
    net = nn.Module()
    net.empty, net.a = parameter(*shape), parameter(1)
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    clipper = LocalUClip(net, optimizer, region, carry=True, metrics_every=every)
    for _ in range(2):
        optimizer.zero_grad()
        (net.empty.sum() + 3 * net.a.sum()).backward()
        optimizer.step()
    assert net.a.item() == -2.0
    assert clipper.carry(net.a).item() == 4.0


def test_a_pass_may_bring_nothing_but_gradients_without_entries():
    net = nn.Module()
    net.empty, net.a = parameter(0), parameter(1)
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    LocalUClip(net, optimizer, Norm(1.0), carry=True)
    net.empty.sum().backward()
    optimizer.step()
    (3 * net.a).sum().backward()
    optimizer.step()
    assert net.a.item() == -1.0


# ---------------------------------------------------------------------- parameters without entries


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(
    ("region", "options"),
    [
        (Norm(1.0, over="tensor"), {"carry_dtype": "bfloat16"}),
        (Norm(lambda step: torch.tensor(1.0), over="tensor"), {}),
        (Norm(lambda step: torch.tensor(1.0), over="tensor"), {"carry": Gated()}),
    ],
    ids=["carry in bfloat16", "radius as a tensor", "gated"],
)
def test_a_vector_of_its_own_may_be_without_entries(region, options, every):
    empty, p = parameter(0, 3), parameter(2)
    clipper = UClip([empty, p], region, metrics_every=every, **{"carry": True, **options})
    for _ in range(2):
        empty.grad, p.grad = torch.zeros(0, 3), torch.tensor([3.0, 0.0])
        clipper.clip_()
    assert p.grad.tolist() == [1.0, 0.0]
    assert clipper.carry(empty).shape == (0, 3)


# ---------------------------------------------------------------------- optimizers that torch has not set up


class Bare(Optimizer):
    """Derives from torch's optimizer and does without its ``__init__``, as wrappers do."""

    def __init__(self, params):
        self.defaults, self.state, self.param_groups = {}, defaultdict(dict), [{"params": list(params)}]

    def step(self, closure=None):
        pass


class HalfBare(Bare):
    """Has torch's hooks on steps, and none on loading and saving."""

    def __init__(self, params):
        super().__init__(params)
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


@pytest.mark.parametrize("kind", [Bare, HalfBare])
def test_an_optimizer_without_hooks_is_refused_with_a_way_out(kind):
    p = parameter(1)
    optimizer = kind([p])
    with pytest.raises(TypeError, match=r"hooks.*explicit form"):
        UClip(optimizer, Norm(1.0), carry=True)
    clipper = UClip([p], Norm(1.0), carry=True)
    p.grad = torch.tensor([3.0])
    clipper.clip_()
    assert p.grad.item() == 1.0


# ---------------------------------------------------------------------- a step that is compiled


BACKENDS = ["eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.pairwise
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize("carry", [True, False])
def test_a_function_that_steps_may_be_compiled(make, backend, carry):
    def run(transform):
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        optimizer = make(net.parameters(), lr=0.01)
        clipper = UClip(optimizer, Norm(0.1), carry=carry)

        def step(x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = transform(step)
        for k in range(4):
            step(torch.full((3, 4), 1.0 + k))
        return [p.detach().clone() for p in net.parameters()], [clipper.carry(p).clone() for p in net.parameters()]

    torch.compiler.reset()
    plain, compiled = run(lambda step: step), run(lambda step: torch.compile(step, backend=backend))
    torch.compiler.reset()
    for one, other in zip(plain[0] + plain[1], compiled[0] + compiled[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert plain[1][0].any() == carry


GATED = {"carry": Gated(), "carry_dtype": "bfloat16", "moments_dtype": "bfloat16"}
NARROW = [
    pytest.param(Component(0.1), GATED, id="gated"),
    pytest.param(Component(0.1), {"carry_dtype": "bfloat16"}, id="component", marks=pytest.mark.exhaustive),
    pytest.param(Adaptive(0.5, 0.5), {"moments_dtype": "bfloat16"}, id="adaptive", marks=pytest.mark.exhaustive),
]
"""Each takes seconds to compile; the first has all that is narrow in the others."""
COUNT = 524_288 + 1_000


def compiled_run(region, options, start=0, stop=4, saved=None, every=0):
    """Weights and state of a run with a tensor that is worked on in stretches when it is measured."""
    p = parameter(COUNT)
    optimizer = optim.SGD([p], lr=1.0)
    UClip(optimizer, region, compile=True, metrics_every=every, **{"carry": True, **options})
    if saved is not None:
        p.data.copy_(saved[0])
        optimizer.load_state_dict(saved[1])
    for step in range(start, stop):
        p.grad = torch.randn(COUNT, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return p.detach().clone(), copy.deepcopy(optimizer.state_dict())


def same(one, other):
    pairs = [(one[0], other[0]), *((x, other[1]["state"][0][name]) for name, x in one[1]["state"][0].items())]
    return all(x is y is None or torch.equal(x, y) for x, y in pairs)


@needs_compiler
@pytest.mark.parametrize(("region", "options"), NARROW)
def test_measuring_does_not_change_a_compiled_run_in_bfloat16(region, options):
    plain = compiled_run(region, options)
    assert same(plain, compiled_run(region, options, every=1))
    assert same(plain, compiled_run(region, options, every=3))


@needs_compiler
@pytest.mark.parametrize(("region", "options"), NARROW)
def test_a_compiled_run_in_bfloat16_resumes_bit_equal(region, options):
    whole = compiled_run(region, options, every=10)
    half = compiled_run(region, options, stop=2, every=10)
    assert same(whole, compiled_run(region, options, start=2, saved=half, every=10))


# ---------------------------------------------------------------------- very small and very large radii


def tiny_steps(region, count, size, where=lambda clipper: None, **options):
    """Updates and carry of ten steps with gradients of about this size in each coordinate, as float64."""
    p = parameter(count)
    clipper = UClip([p], region, **{"carry": True, **options})
    where(clipper)
    generator = torch.Generator().manual_seed(0)
    given, sent = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    norms = []
    for _ in range(10):
        g = size * (1 + 0.1 * torch.randn(count, generator=generator))
        given += g
        p.grad = g.clone()
        clipper.clip_()
        sent += p.grad
        norms.append(p.grad.double().norm().item())
    return norms, (given - sent - clipper.carry(p).double()).norm().item(), given.norm().item()


PLACES = {"host": lambda clipper: None, "device": as_on_a_device}


@pytest.mark.pairwise
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("radius", [1e-21, 1e-25, 1e-30])
@pytest.mark.parametrize("over", [0.3, 2.0, 1000.0])
def test_a_tiny_radius_holds(radius, over, place):
    norms, lost, size = tiny_steps(Norm(radius), 100, over * radius / 10, PLACES[place], metrics_every=1)
    assert max(norms) <= radius * (1 + 1e-6)
    assert lost <= 1e-5 * size
    if over > 1:
        assert min(norms) >= radius * (1 - 1e-6)


def test_a_tiny_radius_holds_in_pieces():
    norms, lost, size = tiny_steps(Norm(lambda step: torch.tensor(1e-25)), 2000, 1e-24)
    assert max(norms) <= 1e-25 * (1 + 1e-6)
    assert lost <= 1e-5 * size


@pytest.mark.pairwise
@pytest.mark.parametrize("carry", [Gated(), Capped(100)], ids=["gated", "capped"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("radius", [1e37, 3e38])
@pytest.mark.parametrize("every", [0, 1])
def test_a_huge_radius_of_coordinates_leaves_gradients_alone(carry, place, radius, every):
    p = parameter(3)
    clipper = UClip([p], Component(radius), carry=carry, metrics_every=every)
    PLACES[place](clipper)
    for _ in range(3):
        p.grad = torch.tensor([1.0, -2e36, 0.0])
        clipper.clip_()
        assert torch.equal(p.grad, torch.tensor([1.0, -2e36, 0.0]))
    assert not clipper.carry(p).any()


# ---------------------------------------------------------------------- metrics


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=repr)
def test_metrics_are_of_no_step_until_one_counts(region, place):
    p = parameter(2)
    clipper = UClip([p], region, carry=True, metrics_every=1)
    PLACES[place](clipper)
    p.grad = torch.tensor([math.nan, 1.0])
    clipper.clip_()
    metrics = clipper.metrics()
    assert metrics.step == -1
    assert math.isnan(metrics["grad_norm"])
    assert math.isnan(metrics["carry_ratio"])
    assert metrics["skipped_steps"] == 1
    p.grad = torch.tensor([3.0, 4.0])
    clipper.clip_()
    assert clipper.metrics().step == 1
    assert clipper.metrics()["grad_norm"] == 5.0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=repr)
def test_a_skipped_step_does_not_give_its_number_to_older_figures(region, place):
    p = parameter(2)
    clipper = UClip([p], region, carry=True, metrics_every=1)
    PLACES[place](clipper)
    p.grad = torch.tensor([3.0, 4.0])
    clipper.clip_()
    p.grad = torch.tensor([math.nan, 1.0])
    clipper.clip_()
    assert clipper.metrics().step == 0
    assert clipper.metrics()["grad_norm"] == 5.0
    assert clipper.metrics()["skipped_steps"] == 1


def test_a_measured_step_that_is_skipped_is_made_up_for():
    p = parameter(2)
    clipper = UClip([p], Norm(1.0), carry=True, metrics_every=10)
    for k in range(3):
        p.grad = torch.tensor([math.nan if k == 0 else 3.0, 4.0])
        clipper.clip_()
    assert clipper.metrics().step == 1
    assert clipper.metrics()["grad_norm"] == 5.0


def test_metrics_of_passes_are_of_no_step_until_one_counts():
    net = nn.Linear(1, 1, bias=False)
    optimizer = optim.SGD(net.parameters(), lr=0.0)
    clipper = LocalUClip(net, optimizer, Norm(1.0), carry=True, metrics_every=1)
    for size, step in ((math.nan, -1), (5.0, 1), (math.nan, 1)):
        optimizer.zero_grad()
        net(torch.full((1, 1), size)).sum().backward()
        optimizer.step()
        assert clipper.metrics().step == step
    assert clipper.metrics()["grad_norm"] == 5.0


def slow_drops(steps):
    """What a small drop adds to the total after a large one; each is below half a unit of float32 there."""
    yield 1e8
    for _ in range(steps):
        yield 3.5


@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=repr)
def test_small_drops_are_not_lost_behind_a_large_one(region):
    p = parameter(1)
    clipper = UClip([p], region, carry=False, metrics_every=1000)
    total = 0.0
    for drop in slow_drops(5000):
        p.grad = torch.tensor([1.0 + drop])
        total += p.grad.item() - 1.0
        clipper.clip_()
    assert clipper.metrics()["dropped_norm"] == pytest.approx(total, rel=1e-5)


# ---------------------------------------------------------------------- a carry that was stored in bfloat16


def narrow_run():
    p = parameter(3)
    optimizer = optim.SGD([p], lr=0.1)
    clipper = UClip(optimizer, Norm(1.0), carry=True, carry_dtype="bfloat16")
    for _ in range(3):
        p.grad = torch.tensor([3.0, 4.0, 5.0])
        optimizer.step()
    return p, optimizer, clipper


def test_a_carry_in_bfloat16_is_taken_over_by_a_clipper_that_stores_all_of_it():
    p, optimizer, clipper = narrow_run()
    owed = clipper.carry(p).clone()
    clipper.remove()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clipper = UClip(optimizer, Norm(1.0), carry=True)
    assert not [str(one.message) for one in said if "load without U-Clip" in str(one.message)]
    assert clipper.carry(p).dtype == torch.float32
    assert torch.equal(clipper.carry(p), owed.float())


@pytest.mark.parametrize("before", [False, True], ids=["attached after", "attached before"])
def test_a_carry_in_bfloat16_is_loaded_by_a_clipper_that_stores_all_of_it(before):
    p, optimizer, clipper = narrow_run()
    owed, saved = clipper.carry(p).clone(), copy.deepcopy(optimizer.state_dict())
    q = parameter(3)
    twin = optim.SGD([q], lr=0.1)
    if not before:
        twin.load_state_dict(saved)  # to the type of the parameters, which is wider
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        clipper = UClip(twin, Norm(1.0), carry=True)
        if before:
            twin.load_state_dict(saved)
    assert not [str(one.message) for one in said if "load without U-Clip" in str(one.message)]
    assert torch.equal(clipper.carry(q), owed.float())


# ---------------------------------------------------------------------- how exact a norm is


def constant(count):
    return torch.full((count,), 1 / 3, dtype=torch.float64)


def lognormal(count):
    return torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul_(2.0).exp_()


def one_huge(count):
    values = torch.full((count,), 0.7, dtype=torch.float64)
    values[count // 2] = 1e4
    return values


def growing(count):
    return torch.linspace(0.1, 1.0, count, dtype=torch.float64)


def units_off(update, radius):
    """How far the norm is from the radius, in units in the last place of the update's type."""
    norm = math.sqrt(math.fsum(x * x for x in update.double().reshape(-1).tolist()))
    return abs(norm - radius) / (radius * torch.finfo(update.dtype).eps)


PATTERNS = [constant, lognormal, one_huge, growing]


@pytest.mark.parametrize("make", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_clipped_vectors_norm_is_the_radius_to_a_few_units(make, dtype):
    off = {}
    for count in (10, 1000, 1023, 4097, 100_000, 1_000_000):
        p = parameter(count, dtype=dtype)
        clipper = UClip([p], Norm(1.0), carry=True, metrics_every=0)
        p.grad = make(count).to(dtype)
        clipper.clip_()
        off[count] = units_off(p.grad, 1.0)
    assert max(off.values()) <= 4, off


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_norm_of_many_tensors_is_the_radius_to_a_few_units(dtype):
    for sizes in ([7] * 300, [1000] * 50, [1, 300_000, 77, 200_000]):
        params = [parameter(size, dtype=dtype) for size in sizes]
        clipper = UClip(params, Norm(1.0), carry=True, metrics_every=0)
        for p, g in zip(params, lognormal(sum(sizes)).to(dtype).split(sizes), strict=True):
            p.grad = g.clone()
        clipper.clip_()
        assert units_off(torch.cat([p.grad for p in params]), 1.0) <= 4
