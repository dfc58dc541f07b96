"""In place, in pieces, as on a device: whichever way a gradient takes, the numbers are the same."""

import copy
import math

import pytest
import torch
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode

from carryclip import EWMA, Adaptive, Capped, Component, Drip, Gated, Leaky, Norm, Shrunk, Sign
from carryclip.torch import UClip
from seam import as_on_a_device, force, ledger

REGIONS = [Component(0.5), Norm(3.0), Norm(1.0, over="tensor"), Adaptive(1, 1, EWMA()), Sign(0.5)]


def in_pieces(clipper):
    """Only the pure functions."""
    force(clipper, way="pure", chunk=10**9)


def whole(clipper):
    """Nothing special."""


def shapes():
    """Large and small by turns, of several layouts."""
    conv = torch.zeros(6, 4, 3, 3).to(memory_format=torch.channels_last)
    return [
        torch.zeros(9),
        conv,
        torch.zeros(7),
        torch.zeros(12, 11).t(),
        torch.zeros(9, 20),
        torch.zeros(()),
        torch.zeros(0, 3),
    ]


def trace(region, carry, prepare, dtype=torch.float32, small=30, steps=8, **options):
    torch.manual_seed(0)
    # Without the empty one all vectors of a norm per tensor take part, and no gate is looked up by its number.
    params = [nn.Parameter(x.to(dtype)) for x in shapes() if x.numel() or getattr(region, "over", "") != "tensor"]
    clipper = UClip(params, region, carry=carry, metrics_every=1, **options)
    force(clipper, small=small, chunk=50)
    prepare(clipper)
    rows = []
    for k in range(steps):
        for p in params:
            scale = 0.01 if k % 4 == 3 else 1.0  # now and then everything is inside
            p.grad = None if k == 2 and p.shape == (7,) else scale * torch.randn_like(p)
        if k == 5:
            params[1].grad[0, 0, 0, 0] = math.nan
        clipper.clip_()
        memory = ledger(clipper).memory
        gates = memory.known() if memory else ()
        rows.append([x.clone() for p in params for x in (p.grad, clipper.carry(p), *gates) if x is not None])
    return rows, dict(clipper.metrics()), clipper.nonfinite_parameters()


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "carry", [True, False, Capped(3), Leaky(0.5), Gated(decay=0.5), Drip(0.2), Shrunk(5)], ids=repr
)
@pytest.mark.parametrize("region", REGIONS, ids=repr)
@pytest.mark.parametrize("way", [whole, as_on_a_device], ids=lambda f: f.__name__)
def test_all_ways_lead_to_the_same(way, region, carry, dtype):
    expected, figures, bad = trace(region, carry, in_pieces, dtype, small=0)
    actual, mine, blamed = trace(region, carry, way, dtype)
    narrow = dtype == torch.bfloat16
    tolerance = {"rtol": 0.0, "atol": 0.0}  # coordinates are clipped each by itself
    if isinstance(region, Norm) or isinstance(carry, (Drip, Shrunk)):  # or share sums
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if narrow else {"rtol": 1e-5, "atol": 1e-6}
    for want, have in zip(expected, actual, strict=True):
        for a, b in zip(want, have, strict=True):
            torch.testing.assert_close(b, a, **tolerance)
    assert mine == pytest.approx(figures, rel=1e-2 if narrow else 1e-5, abs=1e-6)
    assert blamed == bad
    assert figures["skipped_steps"] == 1


@pytest.mark.parametrize("region", [Component(0.5), Norm(3.0), Norm(1.0, over="tensor")], ids=repr)
def test_measuring_changes_no_bit(region):
    """A resumed run measures at other steps than the first one did."""
    results = []
    for every in (0, 1, 3):
        torch.manual_seed(0)
        params = [nn.Parameter(x) for x in shapes()]
        clipper = UClip(params, region, carry=True, metrics_every=every)
        force(clipper, small=30, chunk=50)
        for _ in range(6):
            for p in params:
                p.grad = torch.randn_like(p)
            clipper.clip_()
        results.append([x.clone() for p in params for x in (p.grad, clipper.carry(p))])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_norm_inside_its_radius_writes_nothing_and_forgets_nothing():
    """Once the carry is 0 and the gradients are inside, neither is touched; a carry from elsewhere is seen."""
    p = nn.Parameter(torch.zeros(4))
    clipper = UClip([p], Norm(1.0), carry=True, metrics_every=0)
    for gradient, sent in [(3.0, 0.5), *[(0.0, 0.5)] * 5, (0.1, 0.1), (0.2, 0.2)]:
        p.grad = torch.full((4,), gradient)
        clipper.clip_()
        torch.testing.assert_close(p.grad, torch.full((4,), sent))
    before = clipper.carry(p)._version
    p.grad = torch.full((4,), 0.2)
    clipper.clip_()
    assert clipper.carry(p)._version == before
    clipper.carry(p).fill_(0.1)
    p.grad = torch.full((4,), 0.2)
    clipper.clip_()
    torch.testing.assert_close(p.grad, torch.full((4,), 0.3))
    state = clipper.state_dict()
    state["state"][0]["uclip_carry"] = torch.full((4,), 0.25)
    clipper.load_state_dict(state)
    p.grad = torch.full((4,), 0.1)
    clipper.clip_()
    torch.testing.assert_close(p.grad, torch.full((4,), 0.35))


def test_a_frozen_parameter_keeps_its_carry_while_the_others_are_inside():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    clipper = UClip([a, b], Norm(1.0), carry=True, metrics_every=0)
    a.grad, b.grad = torch.zeros(2), torch.tensor([0.0, 3.0])
    clipper.clip_()
    for _ in range(3):
        a.grad, b.grad = torch.tensor([0.1, 0.0]), None
        clipper.clip_()
        torch.testing.assert_close(a.grad, torch.tensor([0.1, 0.0]))
    a.grad, b.grad = torch.zeros(2), torch.zeros(2)
    clipper.clip_()
    torch.testing.assert_close(b.grad, torch.tensor([0.0, 1.0]))


class Launches(TorchDispatchMode):
    """Counts calls into torch that compute something: each is a kernel, or a few for a list of any length."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not (func.is_view or "empty" in str(func) or "detach" in str(func))
        return func(*args, **(kwargs or {}))


def launches_of_a_step(region, carry, number, size):
    params = [nn.Parameter(torch.zeros(size)) for _ in range(number)]
    clipper = UClip(params, region, carry=carry, metrics_every=0)
    as_on_a_device(clipper)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        with Launches() as launches:
            clipper.clip_()
    return launches.count


@pytest.mark.parametrize(
    ("region", "carry", "most"),
    [
        (Component(0.5), True, 60),
        (Component(0.5), False, 60),
        (Norm(3.0), True, 60),
        (Norm(3.0), False, 60),
        (Norm(3.0), Capped(3), 80),
        (Norm(3.0), Leaky(0.5), 80),
    ],
    ids=repr,
)
@pytest.mark.parametrize(("size", "numbers"), [(5, (30, 300)), (40_000, (50, 200, 1000))])
def test_on_a_device_the_launches_do_not_grow_with_the_model(region, carry, most, size, numbers):
    counts = {launches_of_a_step(region, carry, number, size) for number in numbers}
    assert len(counts) == 1
    assert counts.pop() < most


@pytest.mark.parametrize(
    ("region", "carry"), [(Component(0.5), Gated()), (Adaptive(1, 1, EWMA()), True), (Norm(3.0), Gated())], ids=repr
)
@pytest.mark.parametrize("number", [300, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_on_a_device_the_launches_of_other_rules_stay_below_a_bound(region, carry, number):
    """Tensors are laid end to end until there are a score of arrays, whatever their number."""
    one = launches_of_a_step(region, carry, 1, 40_000)
    many = launches_of_a_step(region, carry, number, 40_000)
    assert many <= 25 * one


@pytest.mark.parametrize(
    ("region", "carry", "floats"),
    [
        (Component(0.5), True, 1),
        (Component(0.5), False, 0),
        (Component(0.5), Gated(), 2),
        (Norm(1.0), True, 1),
        (Norm(1.0), Gated(), 1),
        (Adaptive(1, 1), True, 3),
        (Adaptive(1, 1), Gated(), 4),
        (Norm(1.0), Drip(), 1),
        (Norm(1.0), Shrunk(), 1),
        (Component(0.5), Drip(), 1),
        (Component(0.5), Shrunk(), 1),
        (Adaptive(1, 1), Shrunk(), 3),
    ],
    ids=str,
)
@pytest.mark.parametrize("narrow", [None, "bfloat16"])
def test_steady_memory_is_what_is_promised(region, carry, floats, narrow):
    params = [nn.Parameter(torch.zeros(300, 100)), nn.Parameter(torch.zeros(100))]
    optimizer = optim.SGD(params, lr=0.1)
    UClip(optimizer, region, carry=carry, carry_dtype=narrow, moments_dtype=narrow)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    held = [x for p in params for key, x in optimizer.state[p].items() if key != "uclip_count"]
    assert sum(x.nbytes for x in held) == floats * sum(p.numel() for p in params) * (4 if narrow is None else 2)


def largest_temporary(region, prepare, carry=True, **options):
    """Peak of what one step has allocated at a time, in bytes."""
    from carryclip_lab.bench.meters import peak

    params = [nn.Parameter(torch.zeros(2000, 2000)) for _ in range(4)] + [nn.Parameter(torch.zeros(1000))]
    clipper = UClip(params, region, carry=carry, metrics_every=0, **options)
    prepare(clipper)

    def step():
        for p in params:
            p.grad.normal_()
        clipper.clip_()

    for p in params:
        p.grad = torch.zeros_like(p)
    step()
    return peak(step)


IN_PLACE = [
    (Component(0.5), True),
    (Component(0.5), False),
    *((Norm(1.0), carry) for carry in (True, False, Gated(), Drip(), Shrunk())),
]
IN_PIECES = [(Component(0.5), Gated()), (Adaptive(1, 1, EWMA()), True), (Component(0.5), Shrunk())]


@pytest.mark.parametrize(
    ("prepare", "region", "carry"),
    [(whole, *case) for case in IN_PLACE + IN_PIECES] + [(as_on_a_device, *case) for case in IN_PLACE],
    ids=lambda x: x.__name__ if callable(x) else repr(x),
)
def test_temporaries_are_small(prepare, region, carry):
    most = largest_temporary(region, prepare, carry)
    assert most <= 16_000_000 * 1.01  # the largest tensor


def test_the_default_survives_a_deep_copy():
    p = nn.Parameter(torch.zeros(4))
    clipper = UClip([p], Norm(1.0), carry=True)
    p.grad = torch.ones(4)
    clipper.clip_()
    assert torch.equal(copy.deepcopy(clipper).carry(0), clipper.carry(0))
