"""Small problems with a known optimum: that it is one, that methods see the same data, and that runs go on."""

import dataclasses

import pytest
import torch

from carryclip.experiments.analysis.judge import judge
from carryclip.experiments.analysis.summary import summarise
from carryclip.experiments.calibration import calibrate
from carryclip.experiments.figures import figures_of
from carryclip.experiments.plan import estimate
from carryclip.experiments.records import End, Epoch, Record
from carryclip.experiments.spec import Spec
from carryclip.experiments.terminal import table
from carryclip.experiments.trials.trial import generator_of, made, train

GIVEN = {"optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 3, "seed": 0, "steps": 40}
CLIPPED = {"region": "Norm(0.2)", "carry": "full"}
TASKS = {
    "softmax": {"task": "softmax", "classes": 20},
    "skewed": {"task": "regression", "law": "skewed"},
    "heavy": {"task": "regression", "law": "heavy"},
    "bandit": {"task": "bandit", "rare": 0.1},
}


def spec_of(name, **other):
    return Spec.read({**GIVEN, **TASKS[name], **other})


def mean_gradient(trial, net, steps=4000):
    total, squares = torch.zeros_like(net.values), torch.zeros_like(net.values)
    for step in range(steps):
        (gradient,) = torch.autograd.grad(trial.loss(net, generator_of(7, step), step), [net.values])
        total += gradient
        squares += gradient**2
    mean = total / steps
    return mean, ((squares / steps - mean**2) / steps).sqrt()


def test_the_optimum_of_zipfs_law_is_one():
    trial = made(spec_of("softmax"))
    net = trial.build(torch.Generator())
    net.values.data = trial.optimum.float()
    mean, error = mean_gradient(trial, net)
    assert (mean.abs() <= 5 * error).all()
    with torch.no_grad():
        found = trial.measure(net)
    assert found["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert found["rare_share"] == pytest.approx(1.0, abs=1e-5)


def test_the_true_line_is_the_optimum_under_skewed_noise():
    trial = made(spec_of("skewed"))
    net = trial.build(torch.Generator())
    net.values.data = trial.truth.clone()
    mean, error = mean_gradient(trial, net)
    assert (mean.abs() <= 5 * error).all()
    with torch.no_grad():
        assert trial.measure(net)["distance"] == 0.0


def test_the_best_arm_pulls_the_policy_towards_it():
    trial = made(spec_of("bandit"))
    net = trial.build(torch.Generator())
    mean, error = mean_gradient(trial, net)
    assert mean[0] < -5 * error[0]
    with torch.no_grad():
        assert trial.measure(net)["reward"] == pytest.approx(1.1)


def test_methods_see_the_same_data_in_the_same_order():
    trial = made(spec_of("heavy"))
    net = trial.build(torch.Generator().manual_seed(0))
    losses = [[trial.loss(net, generator_of(seed, step), step).item() for step in range(3)] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize("name", TASKS)
def test_a_run_goes_on_bit_by_bit(name, tmp_path):
    spec = spec_of(name, **CLIPPED)
    whole = [dataclasses.replace(e, seconds=None) for e in train(spec) if not isinstance(e, End)]
    events = train(spec, tmp_path / "run.pt")
    next(events)
    next(events)
    events.close()
    *again, end = train(spec, tmp_path / "run.pt")
    assert [dataclasses.replace(e, seconds=None) for e in again] == whole
    assert end == End("reached", reached=3)
    assert whole[-1].metrics
    assert whole[-1].carry_norm is not None


def test_a_spike_is_one_batch():
    trial = made(spec_of("skewed", spike=5))
    net = trial.build(torch.Generator())
    losses = [trial.loss(net, generator_of(0, step), step).item() for step in range(8)]
    assert [loss > 1e5 for loss in losses] == [step == 5 for step in range(8)]


def test_a_run_that_diverges_says_so():
    *_, end = train(spec_of("skewed", lr=1e20))
    assert end.outcome == "diverged"


def test_trials_can_be_planned():
    specs = [spec_of("softmax"), spec_of("bandit", **CLIPPED)]
    rates = calibrate(specs, workers=1)
    assert estimate([(spec, 3.0) for spec in specs], rates, 1) > 0.0


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="there is no law 'skew'; did you mean 'skewed'"):
        spec_of("skewed", law="skew")
    with pytest.raises(ValueError, match="rare must be a chance above 0"):
        spec_of("bandit", rare=0.0)


def test_a_study_of_trials_shows_what_was_measured():
    """And neither epochs to a target that there is not, nor claims that the paper does not make."""
    specs = [spec_of("bandit", seed=seed, **clipped) for clipped in ({}, CLIPPED) for seed in range(3)]
    ends = {spec.id: {"reward": 1.0 + spec.seed, "iterate": [0.0]} for spec in specs}
    records = [Record(spec, "done", "reached", 3, 1.0, None, {}) for spec in specs]
    (summary,) = summarise("study", "A study", "smoke", records, lambda run: [Epoch(1, metrics=ends[run])])
    shown = table(summary)
    assert [column.header for column in shown.columns] == ["optimizer", "clipping", "batch", "lr", "reward"]
    assert list(shown.columns[-1].cells) == ["2", "2"]
    assert judge(summary) == []
    assert set(figures_of(summary)) == {"carry", "outcomes"}
