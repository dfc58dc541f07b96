"""What holds for any gradients: conservation, bounds, oddness, direction, equivariance."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from carryclip import EWMA, Adaptive, Component, Norm, Sign, Symmetric, Welford
from carryclip.torch import UClip

finite = st.floats(-1e6, 1e6, allow_nan=False, width=32)
radii = st.floats(2**-10, 1e3, width=32)
sequences = arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 6)), elements=finite)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def clip_all(region, rows, dtype=torch.float64, **options):
    """(updates, carry after each step) of a sequence of gradients, through the explicit form."""
    param = torch.nn.Parameter(torch.zeros(rows.shape[1], dtype=dtype))
    clipper = UClip([param], region, **{"carry": True, **options})
    updates, carries = [], []
    for row in rows:
        param.grad = torch.as_tensor(row).to(dtype, copy=True)
        clipper.clip_()
        updates.append(param.grad.clone())
        carries.append(clipper.carry(param).clone())
    return torch.stack(updates), torch.stack(carries)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "region", [Component(0.5), Norm(2.0), Sign(0.5), Adaptive(1, 1, EWMA())], ids=lambda r: type(r).__name__
)
def test_mass_is_conserved_over_10000_steps(region, dtype):
    """sum(g) - sum(u) == carry, up to the carry's own rounding."""
    rng = np.random.default_rng(0)
    rows = torch.tensor(0.4 * rng.standard_normal((10_000, 8)) * rng.lognormal(0, 1, (10_000, 1))).to(DTYPES[dtype])
    param = torch.nn.Parameter(torch.zeros(8, dtype=DTYPES[dtype]))
    clipper = UClip([param], region, carry=True, metrics_every=0)
    given_, sent = torch.zeros(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for row in rows:
        given_ += row.double()
        param.grad = row.clone()
        clipper.clip_()
        sent += param.grad.double()
    carry = clipper.carry(param)
    assert carry.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    rounding = {"float64": 5e-12, "float32": 5e-5, "bfloat16": 1e-5}[dtype]
    assert (given_ - sent - carry.double()).abs().max() <= rounding
    assert (given_ - sent).abs().max() > 100 * rounding, "nothing was carried: the case tests nothing"


@given(sequences, radii, st.sampled_from(["float64", "float32", "bfloat16"]))
def test_mass_is_conserved(rows, radius, dtype):
    """Each step may round the carry once, by half an epsilon of the largest number in sight."""
    given_ = torch.as_tensor(rows).to(DTYPES[dtype]).double()
    epsilon = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps
    for region in (Component(radius), Norm(radius), Sign(radius), Adaptive(1, 1), Symmetric(1, EWMA())):
        updates, carries = clip_all(region, rows, DTYPES[dtype])
        largest = given_.abs().sum() + radius
        error = (given_.sum(0) - updates.double().sum(0) - carries[-1].double()).abs().max()
        assert error <= 2 * len(rows) * epsilon * largest


@given(sequences, radii, st.sampled_from(sorted(DTYPES)))
@example(np.full((3, 1), 1e6, np.float32), 0.1, "bfloat16")
def test_component_updates_stay_within_the_radius_as_stored(rows, radius, dtype):
    updates, _ = clip_all(Component(radius), np.clip(rows, -6e4, 6e4), DTYPES[dtype])
    assert updates.double().abs().max() <= radius


@given(sequences, st.sampled_from(sorted(DTYPES)))
def test_adaptive_updates_stay_within_the_radius_as_stored(rows, dtype):
    """The radius is recomputed here in exact arithmetic from the updates' own history."""
    rows = torch.as_tensor(np.clip(rows, -6e4, 6e4)).to(DTYPES[dtype])
    updates, _ = clip_all(Adaptive(1, 1, EWMA(decay=0.5)), rows, DTYPES[dtype])
    mean = second = torch.zeros(rows.shape[1], dtype=torch.float64)
    for t, (g, u) in enumerate(zip(rows.double(), updates.double(), strict=True)):
        if t:
            weight = 1 - 0.5**t
            radius = (mean / weight).abs() + (second / weight).sqrt()
            assert (u.abs() <= radius * (1 + 1e-6) + 1e-30).all()
        mean, second = 0.5 * mean + 0.5 * g, 0.5 * second + 0.5 * g * g


@given(sequences, radii, st.sampled_from(sorted(DTYPES)))
def test_norm_updates_stay_within_four_ulp(rows, radius, dtype):
    updates, _ = clip_all(Norm(radius), np.clip(rows, -6e4, 6e4), DTYPES[dtype])
    # Subnormal entries have an absolute spacing; everything else a relative one.
    info = torch.finfo(DTYPES[dtype])
    slack = 4 * info.eps * radius + 4 * info.smallest_normal * math.sqrt(rows.shape[1])
    assert updates.double().norm(dim=1).max() <= radius + slack


@given(sequences, st.sampled_from(["float64", "float32", "bfloat16", "float16"]))
def test_nothing_changes_inside_the_region(rows, dtype):
    rows = torch.as_tensor(np.clip(rows, -6e4, 6e4)).to(DTYPES[dtype])
    for region in (Component(2e6), Norm(2e7)):
        updates, carries = clip_all(region, rows, DTYPES[dtype])
        assert torch.equal(updates, rows)
        assert not carries.any()


@given(sequences, radii)
def test_odd(rows, radius):
    for region in (Component(radius), Norm(radius), Sign(radius), Adaptive(1, 1, Welford()), Symmetric(1, Welford())):
        updates, carries = clip_all(region, rows)
        mirrored, mirrored_carries = clip_all(region, -rows)
        assert torch.equal(mirrored, -updates)
        assert torch.equal(mirrored_carries, -carries)


@given(sequences, radii)
def test_norm_keeps_the_direction(rows, radius):
    updates, carries = clip_all(Norm(radius), rows)
    before = torch.cat([torch.zeros(1, rows.shape[1], dtype=torch.float64), carries[:-1]])
    totals = torch.as_tensor(rows).double() + before
    for u, s in zip(updates, totals, strict=True):
        assert torch.allclose(u * s.norm(), s * u.norm(), rtol=1e-12, atol=1e-12 * float(s.norm()) * radius)


@given(sequences, st.integers(-20, 20))
def test_adaptive_is_scale_equivariant(rows, power):
    """A power of two scales everything exactly, so the results must scale to the last bit."""
    for moments in (Welford(), EWMA()):
        updates, carries = clip_all(Adaptive(1, 2, moments), rows)
        scaled, scaled_carries = clip_all(Adaptive(1, 2, moments), rows.astype(np.float64) * 2.0**power)
        assert torch.equal(scaled, updates * 2.0**power)
        assert torch.equal(scaled_carries, carries * 2.0**power)


@given(sequences, radii)
def test_carry_is_the_soft_threshold(rows, radius):
    """The carry after a step is what sticks out: (|s| - radius)+ per coordinate, or of the norm."""
    _, carries = clip_all(Component(radius), rows)
    before = torch.cat([torch.zeros(1, rows.shape[1], dtype=torch.float64), carries[:-1]])
    totals = torch.as_tensor(rows).double() + before
    assert torch.equal(carries, torch.sign(totals) * (totals.abs() - radius).clamp(min=0))


@given(st.floats(0, 1e39), st.sampled_from(sorted(DTYPES)))
def test_radius_is_rounded_toward_zero(value, dtype):
    """Numbers and arrays round down alike: never above the value, and the next one up would be."""
    from carryclip.precision import toward_zero, truncate
    from carryclip.torch._namespace import xp

    info = torch.finfo(DTYPES[dtype])
    down = truncate(value, info)
    stored = torch.tensor(down, dtype=torch.float64).to(DTYPES[dtype])
    assert stored.double().item() == down <= value
    above = torch.nextafter(stored, torch.full_like(stored, math.inf)) if dtype != "float16" else None
    if above is not None and torch.isfinite(above):
        assert above.double().item() > value
    if dtype in ("bfloat16", "float16"):
        single = torch.tensor([value], dtype=torch.float64).clamp(max=3e38).float()
        if single.item() == 0 or single.item() >= info.tiny:
            expected = truncate(single.item(), info)
            assert toward_zero(xp, single, DTYPES[dtype]).item() == expected


def test_a_norm_over_groups_of_many_tensors_stays_within_four_ulp():
    torch.manual_seed(0)
    groups = [{"params": [nn.Parameter(torch.zeros(7)) for _ in range(n)]} for n in (3, 800)]
    clipper = UClip(groups, Norm(1.0, over="group"), carry=False, metrics_every=0)
    for group in groups:
        for p in group["params"]:
            p.grad = torch.randn(7)
    clipper.clip_()
    for group in groups:
        norm = torch.cat([p.grad.double() for p in group["params"]]).norm().item()
        assert norm <= 1 + 4 * torch.finfo(torch.float32).eps
        assert norm >= 1 - 4 * torch.finfo(torch.float32).eps
