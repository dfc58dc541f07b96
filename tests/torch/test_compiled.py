"""The compiled step: the same numbers, one loop over memory, no compiling anew, and a way on without a compiler."""

import copy
import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn, optim
from torch._dynamo.utils import counters

from carryclip import EWMA, Adaptive, Component, Gated, Norm
from carryclip.algorithm import Age, Buffers, Rule, age
from carryclip.torch import UClip, _compiled
from carryclip.torch._namespace import xp
from compilers import needs_compiler
from seam import as_on_a_device, force, stepper


@pytest.fixture(autouse=True)
def _truly_compiled():
    """Falling back would make these tests say nothing."""
    yield
    assert not _compiled._broken


REGIONS = [Component(0.05), Norm(0.1), Adaptive(1, 1, EWMA())]


def pair(region, **options):
    """Two clippers on equal parameters, the second compiled even for tiny tensors."""
    made = []
    for compile in (False, True):
        params = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 4), (7,), (2, 3, 4))]
        optimizer = optim.AdamW(params, lr=0.1, fused=True)
        clipper = UClip(optimizer, region, compile=compile, metrics_every=2, **{"carry": True, **options})
        force(clipper, small=2, worth=2)
        made.append((params, optimizer, clipper))
    return made


def walk(made, steps, spoil=(), seed=0):
    torch.manual_seed(seed)
    for k in range(steps):
        gradients = [torch.randn(p.shape) for p in made[0][0]]
        if k in spoil:
            gradients[1][3] = math.nan
        for params, optimizer, _ in made:
            for p, g in zip(params, gradients, strict=True):
                p.grad = g.clone()
            optimizer.step()


@needs_compiler
@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("device", [False, True], ids=["host", "as on a device"])
@pytest.mark.parametrize("region", REGIONS, ids=repr)
def test_skips_metrics_and_state_are_those_of_the_eager_step(region, device):
    made = pair(region, carry=Gated())
    for _, _, clipper in made:
        if device:
            as_on_a_device(clipper)
    walk(made, 12, spoil=(0, 5))
    (params, eager, a), (twins, compiled, b) = made
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        assert set(eager.state[p]) == set(compiled.state[q])
        for key in eager.state[p]:
            torch.testing.assert_close(eager.state[p][key], compiled.state[q][key], rtol=1e-5, atol=1e-6)
    assert dict(a.metrics()) == pytest.approx(dict(b.metrics()), rel=1e-4, abs=1e-6)
    assert a.metrics()["skipped_steps"] == 2
    assert b.nonfinite_parameters() == {"group 0, parameter 1": 2}


@needs_compiler
def test_neither_schedules_nor_other_models_compile_anew():
    def train(region, sizes, steps):
        params = [nn.Parameter(torch.zeros(size)) for size in sizes]
        clipper = UClip(params, region, carry=True, compile=True, metrics_every=0)
        force(clipper, small=2, worth=2)
        for _ in range(steps):
            for p in params:
                p.grad = torch.randn_like(p)
            clipper.clip_()

    train(Component(0.5), (5, 8), 2)
    train(Norm(0.5), (5, 8), 2)
    before = counters["stats"]["unique_graphs"]
    train(Component(lambda step: 1.0 / (1 + step)), (5, 8), 5)
    train(Component(0.25), (11, 3, 400), 2)
    train(Norm(lambda step: 1.0 / (1 + step)), (6, 9), 5)
    assert before > 0
    assert counters["stats"]["unique_graphs"] == before
    assert not _compiled._broken


@needs_compiler
@pytest.mark.parametrize("region", [Component(0.05), Norm(0.1), Adaptive(1, 1, EWMA())], ids=repr)
def test_nothing_is_lost_in_bfloat16(region):
    """Trap: the compiler drops the rounding to bfloat16, and what rounding cuts off is lost (errors of 1e-2)."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(257, dtype=torch.bfloat16))
    clipper = UClip([p], region, carry=True, compile=True, metrics_every=0)
    force(clipper, small=2, worth=2)
    given, sent = torch.zeros(257, dtype=torch.float64), torch.zeros(257, dtype=torch.float64)
    for _ in range(200):
        p.grad = (0.1 * torch.randn(257)).bfloat16()
        given += p.grad
        clipper.clip_()
        sent += p.grad
    assert (given - sent - clipper.carry(p)).abs().max() < 1e-5


@needs_compiler
@pytest.mark.parametrize("region", REGIONS, ids=repr)
def test_one_kernel_for_each_array(region):
    """One loop that reads and writes each array once: the count does not depend on the machine."""
    from torch._inductor import metrics

    rule = Rule(region)
    gradient = torch.randn(100)
    buffers = Buffers(**{name: torch.tensor(3) if name == "count" else torch.zeros(100) for name in rule.buffers})
    verdict = None
    if region.joint:
        from carryclip.algorithm import Scaling

        verdict = Scaling(scale=torch.tensor(0.5))
    clock = age(xp, rule, buffers.count, torch.float32) if buffers.count is not None else Age()
    torch.compiler.reset()
    _compiled._apply.cache_clear()
    metrics.reset()
    inductor, functorch = torch._inductor.config, torch._functorch.config
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        _compiled.applied(
            rule,
            gradient,
            buffers,
            region.sizes(0),
            verdict,
            None,
            torch.float32,
            clock=clock,
            seed=None,
            tally=False,
            inspect=False,
            write=True,
        )
    assert metrics.generated_kernel_count == 1


@needs_compiler
def test_loops_run_on_all_cores_whatever_the_length_of_the_first_array():
    """The compiler's cache on disk hands a loop that was made for a short array to whoever has a long one."""
    from torch._inductor.utils import run_and_get_code

    gradient, carry = torch.randn(64), torch.randn(64)
    given = Rule(Norm(1.0), True), gradient, Buffers(carry=carry), torch.float32, (1.0,), Age()
    inductor, functorch, threads = torch._inductor.config, torch._functorch.config, torch.get_num_threads()
    torch.compiler.reset()
    _compiled._measure.cache_clear()
    torch.set_num_threads(2)
    try:
        with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
            _, code = run_and_get_code(_compiled.measured, *given)
    finally:
        torch.set_num_threads(threads)
        _compiled._measure.cache_clear()
    assert "omp parallel" in "".join(code)


PROGRAM = """
import torch
from carryclip import Component
from carryclip.torch import UClip
p = torch.nn.Parameter(torch.zeros(3, 100_000))
clipper = UClip([p], Component(1.0), carry=True, compile=True)
for _ in range(3):
    p.grad = torch.full_like(p, 3.0)
    clipper.clip_()
assert (clipper.carry(p) == 6.0).all() and (p.grad == 1.0).all()
"""


def test_without_a_compiler_it_goes_on_and_says_so_once(tmp_path):
    environment = os.environ | {"CXX": str(tmp_path / "missing"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "U-Clip" in line]
    assert len(lines) == 1
    assert "goes on uncompiled" in lines[0]


def test_auto_leaves_small_models_alone(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("compiled")

    monkeypatch.setattr(_compiled, "applied", fail)
    p = nn.Parameter(torch.zeros(1000, 300))
    clipper = UClip([p], Component(1.0), carry=True, compile="auto")
    p.grad = torch.full_like(p, 3.0)
    clipper.clip_()
    assert (p.grad == 1.0).all()
    monkeypatch.setattr(_compiled, "WORTHWHILE", 1000)
    with pytest.raises(AssertionError, match="compiled"):
        clipper.clip_()


def test_the_choice_survives_a_copy_and_is_checked():
    p = nn.Parameter(torch.zeros(3))
    clipper = UClip([p], Component(1.0), carry=True, compile="auto", carry_dtype="bfloat16")
    p.grad = torch.full_like(p, 3.0)
    clipper.clip_()
    twin = copy.deepcopy(clipper)
    assert stepper(twin).planner.compile == "auto"
    assert twin.carry(0).dtype == torch.bfloat16
    for wrong in ("yes", 1, None):
        with pytest.raises(ValueError, match='compile must be True, False or "auto"'):
            UClip([nn.Parameter(torch.zeros(3))], Component(1.0), carry=True, compile=wrong)
