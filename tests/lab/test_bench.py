"""The benchmark itself: its shapes, its clocks and scales, and what it prints, saves and draws."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from carryclip.theory.noise import Given
from carryclip.theory.problems import Absolute
from carryclip.theory.simulate import Above, run
from carryclip_lab.bench import contestants, jax_side, meters, models, report, runner, theory_side, training
from carryclip_lab.bench.main import main

THRICE = runner.Options(models=[], repeats=3)


@pytest.mark.parametrize(
    ("model", "parameters", "tensors"),
    [
        ("conv-net", 1_108_902, 10),
        ("ResNet50", 25_557_032, 161),
        ("GPT-2 small", 124_439_808, 148),
        ("600 tiny tensors", 17_600, 600),
    ],
)
def test_models_have_the_sizes_of_the_real_ones(model, parameters, tensors):
    shapes = models.MODELS[model]()
    assert (sum(math.prod(shape) for shape in shapes), len(shapes)) == (parameters, tensors)


@pytest.mark.parametrize("size", [*runner.SIZES])
def test_models_of_a_given_size_have_about_that_size(size):
    assert sum(math.prod(shape) for shape in models.of_size(size)) == pytest.approx(size, rel=0.1)


def test_peak_sees_what_is_allocated_at_a_time():
    def step():
        for _ in range(3):
            first = torch.zeros(1000, 1000)
            second = first + 1
            del first, second

    assert 8_000_000 <= meters.peak(step) < 8_100_000
    values = torch.zeros(1000, 1000)
    assert meters.peak(lambda: values.add_(1)) < 1000


def test_kernels_counts_lists_once_and_views_not_at_all():
    values = [torch.zeros(3) for _ in range(50)]
    assert meters.kernels(lambda: torch._foreach_add_(values, 1.0)) == 1
    assert meters.kernels(lambda: [x.add_(1).view(-1) for x in values]) == 50


def test_quartiles_hold_the_median_between_them():
    found = meters.quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)


def test_a_contest_prints_saves_and_draws(tmp_path):
    shapes = [(40, 30), (30,), ()]
    makers = contestants.baselines() | contestants.optimizers() | contestants.modes(False)
    rows = runner.contest("clipping", "little", shapes, makers, THRICE)
    named = {row.name: row for row in rows}
    assert list(named) == list(makers)
    assert named["clip_grad_norm_"].ratio == 1.0
    assert named["eager Norm"].held_per_parameter == 4.0
    assert named["eager Component, bfloat16 carry"].held_per_parameter == 2.0
    assert all(row.low <= row.milliseconds <= row.high for row in rows)
    growth = runner.contest("scaling", "1e2 parameters", [(10, 10)], runner.baseline(), THRICE)
    results = json.loads(json.dumps(runner.as_json(rows + growth, "a test")))
    report.save(results, tmp_path / "bench.json")
    assert json.loads((tmp_path / "bench.json").read_text()) == results
    console = Console(record=True, width=90, file=io.StringIO())
    report.show(results, console)
    text = console.export_text()
    assert "eager Component, metrics every 10" in text
    assert "…" not in text, "a table does not fit"
    assert all(path.stat().st_size > 5_000 for path in report.draw(results, tmp_path))


def test_the_rules_we_compare_with_clip():
    arena = runner.Arena([(20, 10), (10,)])
    for name, make in contestants.baselines().items():
        arena.restore()
        torch._foreach_mul_(arena.gradients, 100.0)  # large even against the weights, which is what AGC looks at
        before = torch.cat([g.flatten() for g in arena.gradients]).norm()
        arena.enter(make).step()
        after = torch.cat([g.flatten() for g in arena.gradients]).norm()
        assert 0 < after < before / 2, name


def test_optax_is_measured_and_its_traffic_told():
    found = jax_side.measure([(64, 64)] * 4, 3)
    moved = {name: bytes_moved for name, (_, bytes_moved) in found.items()}
    assert moved["optax.clip"] < moved["uclip Component, propagate"] < moved["uclip Component"]
    assert all(times.low <= times.median <= times.high for times, _ in found.values())


@pytest.mark.parametrize("method", [name for name in training.CLIPPING if "compiled" not in name])
@pytest.mark.parametrize("model", training.LOOPS)
def test_whole_training_steps_run(model, method):
    training.loop(model, method)()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": ["GPT-5"]}, "There is no model 'GPT-5'; choose from: conv-net"),
        ({"repeats": 1}, "repeats must be at least 3"),
        ({"out": __file__}, "Cannot write to"),
    ],
    ids=["model", "repeats", "out"],
)
def test_bad_arguments_say_what_is_wrong(options, message, capsys):
    given = {"quick": True, "part": None, "model": None, "repeats": None, "compile": False, "jax": False}
    given |= {"out": "unused"} | options
    assert main(**given) == 2
    assert message in " ".join(capsys.readouterr().out.split())


def test_the_command_line_has_it():
    command = [Path(sys.executable).with_name("carryclip"), "bench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--quick" in done.stdout


def test_the_loop_over_seeds_does_what_the_simulator_does():
    alphas, seeds, steps = theory_side.margins(3), 4, 1500
    draws = [np.random.default_rng(seed).uniform(-theory_side.NOISE, theory_side.NOISE, steps) for seed in range(seeds)]
    given = iter(np.stack(draws, axis=1)[:, :, None])
    seen = run(
        Absolute(theory_side.START),
        Above(alphas),
        noise=Given(lambda rng, shape: next(given)),
        lr=theory_side.RATE,
        steps=steps,
        seeds=seeds,
        times=1,
    )
    assert theory_side.plain_loop(alphas, seeds, steps) == pytest.approx(seen.carry[-1], rel=1e-9, abs=1e-12)


def test_the_theorys_part(tmp_path, capsys):
    options = {"quick": True, "part": ["theory"], "model": None, "repeats": 3, "compile": True, "jax": False}
    assert main(**options, out=str(tmp_path)) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [theory_side.LOOP, theory_side.MANY]
    assert "20,000 runs side by side" in capsys.readouterr().out.replace("\n", " ")
