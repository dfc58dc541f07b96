"""The full carry's two dangers, wind-up and a finite spike, and what each policy makes of them."""

import numpy as np
import pytest
import torch
from torch import nn, optim

from carryclip import Capped, CarryClipWarning, Component, Drip, Gated, Leaky, Norm, Shrunk
from carryclip.torch import UClip

BOTH = pytest.mark.parametrize("region", [Component(1.0), Norm(1.0)], ids=repr)


def descend(region, carry, start, steps=2000, spike_at=None, spike=1e4):
    """SGD with lr 0.1 on x²/2; returns the whole path."""
    x = nn.Parameter(torch.tensor([start], dtype=torch.float64))
    optimizer = optim.SGD([x], lr=0.1)
    UClip(optimizer, region, carry=carry)
    path = []
    for step in range(steps):
        x.grad = x.detach().clone() if step != spike_at else torch.tensor([spike], dtype=torch.float64)
        optimizer.step()
        path.append(x.item())
    return np.array(path)


@BOTH
@pytest.mark.filterwarnings("ignore:.*a very large gradient")
def test_windup_full_carry_overshoots_and_warns(region):
    with pytest.warns(CarryClipWarning, match=r"winding up.*With SGD, leave carry= out.*larger radius"):
        path = descend(region, True, 100.0)
    assert path.min() == pytest.approx(-98, abs=1)


@BOTH
def test_windup_gated_stays_near_and_ends_as_close_as_sgd(region):
    path = descend(region, Gated(), 100.0)
    assert path.min() >= -5
    assert abs(path[-1]) <= 1e-10
    assert abs(descend(region, False, 100.0)[-1]) <= 1e-10


@BOTH
@pytest.mark.filterwarnings("ignore:U-Clip on")
def test_spike_is_paid_out_for_long_by_the_full_carry_only(region):
    full = descend(region, True, 0.0, spike_at=10)
    assert full.min() == pytest.approx(-44, abs=1)
    assert descend(region, Gated(), 0.0, spike_at=10).min() >= -5
    assert descend(region, Capped(10), 0.0, spike_at=10).min() >= -1.5
    assert descend(region, Leaky(0.9), 0.0, spike_at=10).min() >= -25


@pytest.mark.filterwarnings("ignore:U-Clip on")
@pytest.mark.parametrize("kind", [Component, Norm])
def test_under_skewed_noise_gated_keeps_the_full_carrys_bias_and_capped_does_not(kind):
    """Distance of the mean iterate from the optimum of x²/2 with centred lognormal(1.2) noise, radius 1."""
    lanes, steps = 200, 4000 if kind is Component else 400
    bias = {}
    for name, carry in {"full": True, "gated": Gated(), "capped": Capped(10), "none": False}.items():
        rng = np.random.default_rng(0)
        x = nn.Parameter(torch.zeros(lanes, 1, dtype=torch.float64))
        optimizer = optim.SGD([x], lr=0.1)
        UClip(optimizer, Component(1.0) if kind is Component else Norm(1.0, over="row"), carry=carry, metrics_every=0)
        total = 0.0
        for step in range(steps):
            noise = torch.tensor(rng.lognormal(0, 1.2, lanes) - np.exp(1.2**2 / 2))
            x.grad = x.detach() + noise[:, None]
            optimizer.step()
            if step >= steps // 2:
                total += x.mean().item() / (steps - steps // 2)
        bias[name] = abs(total)
    noise_floor = 0.02
    assert bias["full"] <= noise_floor
    assert abs(bias["gated"] - bias["full"]) <= noise_floor
    assert bias["capped"] >= 7 * noise_floor
    assert bias["none"] >= 40 * noise_floor


@pytest.mark.parametrize("size", [50, 1000])
def test_one_coordinate_winding_up_does_not_disturb_the_rest(size):
    """One coordinate has twice the radius as its mean, the rest skewed noise around zero."""
    rng = np.random.default_rng(1)
    p = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    clipper = UClip([p], Component(1.0), carry=Gated(), metrics_every=0)
    given = sent = 0.0
    steps = 4000
    for _ in range(steps):
        g = rng.lognormal(0, 1.0, size) - np.exp(0.5)
        g[0] = 2.0
        p.grad = torch.tensor(g)
        clipper.clip_()
        given, sent = given + g, sent + p.grad.numpy()
    assert clipper.carry(p)[0].abs().item() <= 100, "the cap"
    assert clipper.carry(p)[0].abs().item() <= 5, "the gate closes long before the cap"
    bias = (given - sent)[1:] / steps
    assert abs(bias.mean()) <= 0.02
    plain = np.mean(np.maximum(rng.lognormal(0, 1.0, 10**6) - np.exp(0.5) - 1.0, 0.0))
    assert plain >= 0.3, "plain clipping would be far off here"


def test_radius_zero_and_infinity_inside_a_step_give_no_nan():
    for carry in (True, False, Capped(3), Leaky(0.5), Gated()):
        for kind in (Component, Norm):
            p = nn.Parameter(torch.zeros(2))
            clipper = UClip([p], kind([0.0, float("inf"), 1.0, 0.0, 1.0].__getitem__), carry=carry, metrics_every=1)
            for g in (3.0, -2.0, 5.0, 1.0, 0.0):
                p.grad = torch.full((2,), g)
                clipper.clip_()
                assert torch.isfinite(p.grad).all()
                assert torch.isfinite(clipper.carry(p)).all()
                metrics = clipper.metrics()
                assert all(np.isfinite(metrics[k]) for k in metrics if k != "radius_norm")


def test_a_spike_warns():
    p = nn.Parameter(torch.zeros(1))
    clipper = UClip([p], Component(1.0), carry=True, metrics_every=1)
    p.grad = torch.tensor([1e4])
    clipper.clip_()
    with pytest.warns(
        CarryClipWarning,
        match=r"1e\+04 of which came at once.*Look for the batch.*Leave carry= out",
    ):
        assert clipper.metrics()["carry_ratio"] == pytest.approx(9999)


@pytest.mark.filterwarnings("ignore:.*a very large gradient")
def test_undrainable_carry_warns():
    p = nn.Parameter(torch.zeros(1))
    clipper = UClip([p], Component(1e-3), carry=True, metrics_every=1)
    p.grad = torch.tensor([1e5])
    clipper.clip_()
    with pytest.warns(CarryClipWarning, match=r"1e\+08 radii; a float32 buffer cannot pay that back.*Leave carry= out"):
        assert clipper.metrics()["carry_ratio"] == pytest.approx(1e8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 100])
@pytest.mark.parametrize("radius", [0.7, 1.0])
def test_a_closed_gate_and_a_cap_hold_in_narrow_types(dtype, size, radius):
    """Trap: rounding the update shortens it, and a carry that may not grow would creep up bit by bit."""
    slack = 1 + 1e-6
    for carry, bound in ((Gated(), 2.0), (Capped(3), 3.0)):
        p = nn.Parameter(torch.zeros(size, dtype=dtype))
        clipper = UClip([p], Norm(radius), carry=carry, metrics_every=0)
        gradient = torch.full((size,), 2 * radius / size**0.5, dtype=dtype)
        owed = None
        for step in range(400):
            p.grad = gradient.clone()
            clipper.clip_()
            now = clipper.carry(p).double().norm().item()
            if carry == Gated() and step > 1:
                assert now <= owed * slack
            owed = now
            assert owed <= bound * radius * slack


def test_the_feed_behind_the_warning_is_not_diluted_by_skipped_steps():
    p = nn.Parameter(torch.zeros(1))
    clipper = UClip([p], Component(1.0), carry=True, metrics_every=1)
    for g in [float("nan")] * 9 + [50.0] * 7:
        p.grad = torch.tensor([g])
        clipper.clip_()
    with pytest.warns(CarryClipWarning, match=r"winding up.*average feed 0\.90"):
        assert clipper.metrics()["carry_feed"] == 1.0


@pytest.mark.filterwarnings("default:.*often trains far worse")
@pytest.mark.parametrize("carry", [True, Gated(), Capped(10), Leaky(0.9)], ids=repr)
@pytest.mark.parametrize(
    ("maker", "name"),
    [
        (lambda p: optim.AdamW(p), "AdamW"),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), "SGD with momentum 0.9"),
        (lambda p: optim.RMSprop(p), "RMSprop"),
    ],
    ids=["AdamW", "momentum", "RMSprop"],
)
def test_a_hasty_carry_is_warned_of_where_it_is_attached(maker, name, carry):
    p = nn.Parameter(torch.zeros(1))
    with pytest.warns(CarryClipWarning, match=f"in front of {name} often trains.*UClip\\(optimizer, Norm") as seen:
        UClip(maker([p]), Norm(1.0), carry=carry)
    assert len(seen) == 1
    assert seen[0].filename == __file__


@pytest.mark.filterwarnings("error:.*often trains far worse")
def test_a_safe_carry_is_not_warned_of():
    for maker in (lambda p: optim.AdamW(p), lambda p: optim.SGD(p, lr=0.1, momentum=0.9)):
        for options in ({}, {"carry": False}, {"carry": Drip()}, {"carry": Shrunk()}):
            UClip(maker([nn.Parameter(torch.zeros(1))]), Norm(1.0), **options)
    UClip(optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), Norm(1.0), carry=True)
    UClip([nn.Parameter(torch.zeros(1))], Norm(1.0), carry=True)


@pytest.mark.filterwarnings("default:.*gradients wait about")
def test_a_long_delay_is_told_from_wind_up_and_from_a_spike():
    """Noise ten radii large: by the law gradients wait about 50 steps; nothing winds up, and nothing is a spike."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(1000))
    optimizer = optim.SGD([p], lr=0.0, momentum=0.9)
    clipper = UClip(optimizer, Norm(1.0), carry=True, metrics_every=1)

    def train():
        for _ in range(400):
            p.grad = torch.randn(1000) * 10 / 1000**0.5
            optimizer.step()

    with pytest.warns(CarryClipWarning) as seen:
        train()
    assert clipper.metrics()["delay"] == pytest.approx(50.5, rel=0.15)
    assert all("gradients wait about" in str(each.message) for each in seen)
    assert "With SGD with momentum 0.9, leave carry= out" in str(seen[0].message)


def test_the_default_never_waits():
    torch.manual_seed(0)
    for region in (Norm(1.0), Component(0.03)):
        p = nn.Parameter(torch.zeros(1000))
        clipper = UClip([p], region, metrics_every=1)
        for _ in range(200):
            p.grad = torch.randn(1000) * 10 / 1000**0.5
            clipper.clip_()
            assert clipper.metrics()["delay"] <= 2.0
