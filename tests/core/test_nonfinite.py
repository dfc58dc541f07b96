"""Bad gradients: skipped, zeroed, raised or passed on; and never a wait for the device in the default step."""

import copy
import math

import pytest
import torch
from torch import nn, optim
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from carryclip import EWMA, Adaptive, Capped, CarryClipWarning, Component, Drip, Gated, Norm, Shrunk, Sign, Symmetric
from carryclip.torch import NonFiniteGradientError, UClip
from seam import ledger, stepper

REGIONS = [
    Component(0.05),
    Norm(0.1),
    Norm(0.1, over="tensor"),
    Adaptive(1, 1),
    Adaptive(1, 0.5, EWMA(), include_current=True),
    Sign(0.1),
    Symmetric(1),
]
FUSED = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, fused=True),
    "SGD momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.05, fused=True),
}


def problem():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(8, 6, 4), torch.randint(2, (8, 6))


def train(net, optimizer, x, y, spoil=None, bad=math.nan):
    for k, (inputs, labels) in enumerate(zip(x, y, strict=True)):
        optimizer.zero_grad()
        (5 * nn.functional.cross_entropy(net(inputs), labels)).backward()
        if k == spoil:
            net[0].weight.grad[1, 2] = bad
        optimizer.step()


def everything(net, optimizer, clipper):
    """Parameters and all state, ours included, but for the counters that tell skipped steps apart."""
    yield from net.parameters()
    for p in net.parameters():
        yield clipper.carry(p)
        for value in optimizer.state[p].values():
            if torch.is_tensor(value):
                yield value


@pytest.mark.pairwise
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spoil", [0, 3])
@pytest.mark.parametrize("region", REGIONS, ids=repr)
@pytest.mark.parametrize("carry", [Gated(), Drip(), Shrunk()], ids=["gated", "drip", "shrunk"])
@pytest.mark.parametrize("name", FUSED)
def test_skip_equals_the_run_without_that_batch(name, carry, region, spoil, bad):
    net, x, y = problem()
    twin = copy.deepcopy(net)
    optimizer = FUSED[name](net.parameters())
    clipper = UClip(optimizer, region, carry=carry, metrics_every=1)
    train(net, optimizer, x, y, spoil, bad)
    keep = [k for k in range(len(x)) if k != spoil]
    bare = FUSED[name](twin.parameters())
    shadow = UClip(bare, region, carry=carry, metrics_every=1)
    train(twin, bare, x[keep], y[keep])
    for a, b in zip(everything(net, optimizer, clipper), everything(twin, bare, shadow), strict=True):
        assert torch.equal(a, b)
    assert clipper.metrics()["skipped_steps"] == 1
    assert clipper.nonfinite_parameters() == {"group 0, parameter 0": 1}
    assert not hasattr(optimizer, "found_inf")


def test_without_fusion_a_skipped_step_is_a_step_with_zero_gradient():
    """The documented difference: momentum and weight decay still act."""
    net, x, y = problem()
    twin = copy.deepcopy(net)
    optimizer = optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    clipper = UClip(optimizer, Component(0.05), carry=True)
    train(net, optimizer, x, y, spoil=3)
    bare = optim.AdamW(twin.parameters(), lr=0.01, weight_decay=0.1)
    shadow = UClip(bare, Component(0.05), carry=True)
    train(twin, bare, x[:3], y[:3])
    carry = [shadow.carry(p).clone() for p in twin.parameters()]
    shadow.remove()
    for p in twin.parameters():
        p.grad = torch.zeros_like(p)
    bare.step()
    again = UClip(bare, Component(0.05), carry=True)
    assert all(torch.equal(again.carry(p), c) for p, c in zip(twin.parameters(), carry, strict=True))
    train(twin, bare, x[4:], y[4:])
    for a, b in zip(everything(net, optimizer, clipper), everything(twin, bare, again), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("region", [Component(1.0), Norm(1.0)], ids=repr)
def test_zero_removes_only_the_bad_entries(region):
    param = nn.Parameter(torch.zeros(4))
    clipper = UClip([param], region, carry=True, nonfinite="zero")
    param.grad = torch.tensor([math.nan, 3.0, -math.inf, 4.0])
    clipper.clip_()
    expected = (
        torch.tensor([0.0, 1.0, 0.0, 1.0]) if isinstance(region, Component) else torch.tensor([0.0, 0.6, 0.0, 0.8])
    )
    torch.testing.assert_close(param.grad, expected)
    torch.testing.assert_close(clipper.carry(param), torch.tensor([0.0, 3.0, 0.0, 4.0]) - expected)
    assert clipper.metrics()["skipped_steps"] == 0


@pytest.mark.parametrize("region", [Component(1.0), Norm(1.0), Adaptive(1, 1)], ids=repr)
def test_raise_names_the_parameter_and_changes_nothing(region):
    net, x, y = problem()
    optimizer = optim.Adam([{"params": dict(net.named_parameters()).items()}], lr=0.01)
    clipper = UClip(optimizer, region, carry=True, nonfinite="raise")
    train(net, optimizer, x[:3], y[:3])
    before = [t.clone() for t in everything(net, optimizer, clipper)]
    with pytest.raises(NonFiniteGradientError, match=r"Step 3: the gradient of 0\.weight is not finite.*zero_grad"):
        train(net, optimizer, x[3:4], y[3:4], spoil=0)
    for a, b in zip(everything(net, optimizer, clipper), before, strict=True):
        assert torch.equal(a, b)
    assert optimizer.param_groups[0]["uclip_steps"] == 3
    train(net, optimizer, x[4:], y[4:])


def test_propagate_lets_it_through():
    for region, update in ((Component(1.0), [math.nan, 0.5]), (Norm(1.0), [math.nan, math.nan])):
        param = nn.Parameter(torch.zeros(2))
        clipper = UClip([param], region, carry=True, nonfinite="propagate")
        param.grad = torch.tensor([math.nan, 0.5])
        clipper.clip_()
        torch.testing.assert_close(param.grad, torch.tensor(update), equal_nan=True)
        assert not torch.isfinite(clipper.carry(param)).all()


def test_a_norm_that_overflows_counts_as_non_finite():
    """Trap: 1e25 is finite, its square in float32 is not. Coordinates need no square and clip it."""
    for region, sent in ((Norm(1.0), 0.0), (Component(1.0), 1.0)):
        for policy in ("skip", "zero"):
            param = nn.Parameter(torch.zeros(1))
            clipper = UClip([param], region, carry=True, nonfinite=policy)
            param.grad = torch.tensor([1e25])
            clipper.clip_()
            assert param.grad.item() == sent
            assert ledger(clipper).skipped.item() == (1 if isinstance(region, Norm) else 0)
            assert torch.isfinite(clipper.carry(param)).all()


def test_a_norm_may_overflow_only_in_the_sum_over_tensors():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    clipper = UClip([a, b], Norm(1.0), carry=True)
    a.grad, b.grad = torch.tensor([1.5e19]), torch.tensor([1.5e19])
    clipper.clip_()
    assert ledger(clipper).skipped.item() == 1
    assert not clipper.carry(a).any()
    assert not a.grad.any()


def test_infinite_multiples_and_scales_give_no_nan():
    def later(step):
        return math.inf if step > 3 else 1.0

    for region in (
        Adaptive(1, later),
        Adaptive(later, 0),
        Symmetric(later),
        Sign(later),
        Component(later),
        Norm(later),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            p = nn.Parameter(torch.zeros(3, dtype=dtype))
            clipper = UClip([p], region, carry=True, metrics_every=0)
            for k in range(8):
                p.grad = torch.tensor([0.0, 1.0, -float(k)], dtype=dtype)
                clipper.clip_()
                assert torch.isfinite(p.grad).all(), region
                assert torch.isfinite(clipper.carry(p)).all(), region


def test_two_huge_gradients_do_not_overflow_the_carry():
    """Trap: an infinite carry would send the radius for ever with a finite loss."""
    for region in (Component(1.0), Sign(1.0)):
        param = nn.Parameter(torch.zeros(2))
        clipper = UClip([param], region, carry=True)
        for _ in range(3):
            param.grad = torch.tensor([3e38, -3e38])
            clipper.clip_()
        assert torch.isfinite(clipper.carry(param)).all()


@pytest.mark.parametrize("region", [Adaptive(1, 1), Adaptive(1, 1, EWMA()), Symmetric(1)], ids=repr)
def test_huge_finite_gradients_do_not_spoil_the_moments(region):
    param = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([param], lr=0.1)
    UClip(optimizer, region, carry=True)
    for value in (1.0, 3e38, -3e38, 3e38, 1.0, 2.0):
        param.grad = torch.tensor([value, 1.0])
        optimizer.step()
        for key in ("uclip_carry", "uclip_mean", "uclip_second"):
            assert torch.isfinite(optimizer.state[param][key]).all(), (key, value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_updates_are_held_in_their_finite_range(dtype):
    """The sum may exceed what the gradient's type can hold, even where nothing is clipped."""
    largest = torch.finfo(dtype).max
    for region in (Component(math.inf), Norm(1e30), Symmetric(1), Adaptive(1, 1)):
        param = nn.Parameter(torch.zeros(1, dtype=dtype))
        clipper = UClip([param], region, carry=True)
        param.grad = torch.tensor([largest], dtype=dtype)
        clipper.clip_()
        if dtype == torch.float16 or isinstance(region, Component):
            stepper(clipper).home.entries(param)["uclip_carry"].fill_(0.1 * largest)
            param.grad = torch.tensor([largest], dtype=dtype)
            clipper.clip_()
            assert param.grad.item() == largest


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("carry", [True, False, Capped(5), Gated(), Drip(), Shrunk()], ids=repr)
@pytest.mark.parametrize("region", [*REGIONS, Norm(0.1, over="group")], ids=repr)
@pytest.mark.parametrize("fused", [False, True])
def test_the_default_step_never_waits_for_the_device(region, carry, fused):
    """Under FakeTensorMode there are no values: whoever asks for one fails."""
    with FakeTensorMode():
        params = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 4), (5,), (2, 5), (2,))]
        optimizer = optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=0.1, fused=fused)
        clipper = UClip(optimizer, region, carry=carry, metrics_every=1)
        for k in range(12):
            for p in params:
                p.grad = None if k % 3 == 2 and p is params[1] else torch.randn(p.shape)
            optimizer.step()
        metrics = clipper.metrics()
        with pytest.raises(DataDependentOutputException):
            float(metrics["grad_norm"])


def test_repeated_skips_warn_once_and_name_the_remedy():
    net, _, _ = problem()
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    clipper = UClip(optimizer, Norm(1.0), carry=True, metrics_every=1)

    def bad_step():
        net[2].bias.grad = torch.full((2,), math.nan)
        optimizer.step()

    for _ in range(10):
        bad_step()
    with pytest.warns(CarryClipWarning, match=r"10 steps were all skipped.*nonfinite_parameters"):
        assert clipper.metrics()["skipped_steps"] == 10
    for _ in range(30):
        bad_step()
    assert clipper.metrics()["skipped_steps"] == 40  # warns no second time: warnings are errors here
    assert clipper.nonfinite_parameters() == {"group 0, parameter 3": 40}
