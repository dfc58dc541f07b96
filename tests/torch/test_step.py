"""The shape of a torch step: how short its way is, and that what runs is the algorithm, recorded."""

import math
import sys
from collections import Counter

import pytest
import torch
from torch import nn, optim

from carryclip import EWMA, Adaptive, Component, Gated, Norm, Shrunk
from carryclip.torch import UClip
from cases import POLICIES, REGIONS, halving
from seam import stepper

MOST_FILES, MOST_CALLS = 9, 120
MORE_FILES, MORE_CALLS = 14, 170
"""Of the default carry, which decides more for each scope: policy, records and rounding are files of their own."""


def calls_of_a_step(region, **options):
    """Python calls into the library during one ordinary ``optimizer.step()``, by file and function."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    UClip(optimizer, region, **options)

    def backward():
        optimizer.zero_grad()
        net(torch.randn(8, 10)).pow(2).sum().mul(30).backward()

    for _ in range(4):
        backward()
        optimizer.step()
    backward()
    calls = Counter()

    def note(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and "carryclip" in name:
            calls[name.rsplit("carryclip", 1)[1], frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("region", [Norm(1.0), Component(0.5)], ids=repr)
@pytest.mark.filterwarnings("ignore:U-Clip on")
@pytest.mark.parametrize(
    ("options", "most_files", "most_calls"),
    [({"carry": True}, MOST_FILES, MOST_CALLS), ({}, MORE_FILES, MORE_CALLS)],
    ids=["full", "default"],
)
def test_the_plain_step_is_short(region, options, most_files, most_calls):
    calls = calls_of_a_step(region, **options)
    files = {file for file, _ in calls if file.endswith(".py")}  # a recorded program has none
    assert sum(calls.values()) <= most_calls, calls.most_common()
    assert len(files) <= most_files, files


def programs(region, carry, steps=4, **options):
    params = [nn.Parameter(torch.zeros(7, 3)), nn.Parameter(torch.zeros(5))]
    clipper = UClip(params, region, carry=carry, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        clipper.clip_()
    return stepper(clipper).planner.kernels.recorded._programs


@pytest.mark.pairwise
@pytest.mark.parametrize("nonfinite", ["skip", "zero", "propagate"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "region", [name for name, region in REGIONS.items() if not any(isinstance(x, list) for x in vars(region).values())]
)
def test_every_rule_is_recorded(region, policy, nonfinite):
    """None of them falls back to making a new array with every operation, whether it is measured or not."""
    found = programs(REGIONS[region], POLICIES[policy], nonfinite=nonfinite, metrics_every=2)
    assert found
    assert None not in found.values()


@pytest.mark.parametrize("region", [Component(0.5), Adaptive(1, 1)], ids=repr)
def test_rounding_at_random_is_recorded(region):
    found = programs(region, Gated(), carry_dtype="bfloat16", moments_dtype="bfloat16")
    assert found
    assert None not in found.values()


def test_a_program_is_the_three_lines_that_the_algorithm_is():
    (program, _), *_ = programs(Component(0.5), True, metrics_every=0).values()
    assert program.source.splitlines()[1:4] == [
        "    torch.add(gradient, carry, out=carry)",
        "    torch.clip(carry, -0.5, 0.5, out=gradient)",
        "    torch.sub(carry, gradient, out=carry)",
    ]
    assert program.scratch == []


def test_the_default_writes_in_two_passes_over_memory():
    """The full carry takes three; the default makes two sums more, and so must save elsewhere."""
    made = programs(Norm(1.0), Shrunk(), steps=40, metrics_every=0)
    writing = [program for program, _ in made.values() if "return ()" in program.source]
    assert any("torch.addr" in program.source for program in writing)
    for program in writing:
        assert program.source.count("out=") <= 2, program.source
        assert program.scratch == []


@pytest.mark.parametrize("nonfinite", ["zero", "propagate"])
def test_nothing_that_is_multiplied_by_0_hides_what_is_not_finite(nonfinite):
    """``torch.addr`` does not look at what 0 belongs to: an infinite entry must stay NaN under "propagate" only."""
    p = nn.Parameter(torch.zeros(3))
    clipper = UClip([p], Norm(1.0), carry=Shrunk(), nonfinite=nonfinite)
    for bad in (math.inf, math.nan):
        p.grad = torch.tensor([1.0, bad, 1.0])
        clipper.clip_()
        assert bool(p.grad[1].isnan()) == (nonfinite == "propagate")
        assert bool(clipper.carry(p).isfinite().all()) == (nonfinite == "zero")


def test_an_adaptive_program_needs_little_memory_beside_its_own():
    made = programs(Adaptive(1, 1, EWMA()), True, metrics_every=0)
    assert max(len(program.scratch) for program, _ in made.values()) <= 2


def test_a_schedule_does_not_pile_programs_up():
    assert len(programs(Component(lambda step: 1.0 / (1 + step)), True, steps=200, metrics_every=0)) <= 64
    assert len(programs(Norm(halving), True, steps=50, metrics_every=0)) <= 4  # its radius is not in the program
