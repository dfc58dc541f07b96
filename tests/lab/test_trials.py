"""Trials: that known optima are, that data are as they should be and the same for all methods, that runs go on."""

import dataclasses
import itertools
import math

import pytest
import torch

from carryclip_lab import grid
from carryclip_lab.commands.plan import estimate
from carryclip_lab.data.text import load_text, own_text
from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine.calibration import calibrate
from carryclip_lab.engine.training import train
from carryclip_lab.problem import generator_of
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import End, Epoch
from carryclip_lab.task import Place

GIVEN = {"optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 3, "seed": 0, "steps": 40}
CLIPPED = {"region": "Norm(0.2)", "carry": "full"}
TASKS = {
    "softmax": {"task": "softmax", "classes": 20},
    "skewed": {"task": "regression", "law": "skewed"},
    "heavy": {"task": "regression", "law": "heavy"},
    "bandit": {"task": "bandit", "rare": 0.1},
    "critic": {"task": "critic", "rare": 0.1},
    "amounts": {"task": "amounts"},
    "visits": {"task": "people"},
    "drift": {"task": "drift", "optimizer": "adamw-torch"},
}


def made(spec):
    return spec.recipe.problem(spec, Place())


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


@pytest.mark.parametrize("rare", [0.1, 1.0])
def test_the_true_values_of_the_critic_are_where_it_stays(rare):
    trial = made(spec_of("critic", rare=rare))
    net = trial.build(torch.Generator())
    net.values.data = trial.truth.float()
    mean, error = mean_gradient(trial, net)
    assert (mean.abs() <= 5 * error).all()
    with torch.no_grad():
        assert trial.measure(net) == pytest.approx({"relative_rmse": 0.0, "calibration": 1.0}, abs=1e-6)


class Constant(torch.nn.Module):
    """The same for all."""

    def __init__(self, value):
        super().__init__()
        self.values = torch.nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return self.values.expand(len(x))


@pytest.mark.parametrize("law", ["claims", "symmetric"])
def test_the_expected_amounts_are_what_they_are_said_to_be(law):
    trial = made(spec_of("amounts", law=law, batch=2000))
    loss = torch.stack([trial.loss(Constant(0.0), generator_of(1, step), step) for step in range(200)])
    less = torch.stack([trial.loss(Constant(1.0), generator_of(1, step), step) for step in range(200)])
    means = (loss - less + 1.0).double() / 2  # of (a - 0)² and (a - 1)²
    assert abs(means.mean() - trial.wanted.mean()) <= 5 * means.std() / 200**0.5 + 0.05
    with torch.no_grad():
        assert trial.measure(Constant(0.0)) == {"relative_rmse": 1.0, "calibration": 0.0}


def test_visits_are_of_real_people_and_blocks_of_them_are_held_out():
    trial = made(spec_of("visits"))
    assert len(trial.y) + len(trial.test_y) == 20_190
    assert 0.19 < len(trial.test_y) / 20_190 < 0.21
    both = torch.cat([trial.y, trial.test_y]).double()
    assert both.mean().item() == pytest.approx(2.860426, abs=1e-5)
    assert (both == 0).double().mean().item() == pytest.approx(0.31243, abs=1e-4)
    with torch.no_grad():
        found = trial.measure(Constant(trial.test_y.mean().item()))
    assert found["total_error"] == pytest.approx(0.0, abs=1e-5)
    assert found["relative_rmse"] == pytest.approx(1.0, abs=1e-3)


def test_made_up_visits_have_the_means_of_the_real_ones_and_symmetric_noise():
    real, made_up = made(spec_of("visits")), made(spec_of("visits", made=True))
    assert torch.equal(real.x, made_up.x)
    assert made_up.y.mean().item() == pytest.approx(real.y.mean().item(), abs=0.1)
    assert made_up.y.std().item() == pytest.approx(real.y.std().item(), rel=0.05)

    def skew(values):
        return ((values - values.mean()) / values.std()).pow(3).mean().item()

    assert skew(real.y) > 3.0
    assert abs(skew(made_up.y)) < 0.2


def test_a_loss_for_counts_is_told_by_its_mean_count():
    trial = made(spec_of("visits", loss="Poisson"))
    with torch.no_grad():
        found = trial.measure(Constant(math.log(trial.test_y.mean().item())))
    assert found["calibration"] == pytest.approx(1.0, abs=1e-5)


def test_diabetes_is_judged_by_its_error():
    trial = made(spec_of("visits", source="diabetes"))
    assert len(trial.y) + len(trial.test_y) == 442
    assert trial.task.judged().metric == "relative_rmse"


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
    told = []
    rates = calibrate(specs, workers=1, tell=lambda *given: told.append(given))
    assert estimate([(spec, 3.0) for spec in specs], rates, 1) > 0.0
    assert told[0][0] == 1
    assert {among for _, among, _ in told} == {4}  # a step and a method of each
    assert all(name.startswith(("softmax, ", "bandit, ")) for *_, name in told)
    assert [number for number, *_ in told] == sorted(number for number, *_ in told)


EACH = {spec.task: spec for spec in grid.load("evidence-smoke").specs}


@pytest.mark.parametrize("task", EACH)
def test_each_trial_can_be_timed(task):
    timing = EACH[task].recipe.timing(EACH[task], Place())
    timing.step()
    timing.step()
    if timing.evaluate is not None:
        timing.evaluate()


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match="there is no law 'skew'; did you mean 'skewed'"):
        spec_of("skewed", law="skew")
    with pytest.raises(ValueError, match="rare must be a number above 0 and below 1"):
        spec_of("bandit", rare=0.0)


# ---------------------------------------------------------------------- weights that stay where they are


@pytest.mark.parametrize("carry", ["none", "full"])
def test_frozen_weights_do_not_move_and_all_of_the_bias_is_seen(carry):
    spec = spec_of("skewed", frozen=True, start=1.0, region="Norm(0.8)", carry=carry, batch=8, epochs=2, steps=100)
    epochs = [each for each in train(spec) if isinstance(each, Epoch)]
    assert [epoch.metrics["distance"] for epoch in epochs] == [1.0, 1.0]
    gradient = torch.tensor(epochs[0].metrics["gradient"])
    assert gradient[0] == pytest.approx(-1.0, abs=0.3)  # the mean gradient is the way back
    for epoch in epochs:
        updates = torch.tensor(epoch.metrics["gradient"]) + torch.tensor(epoch.metrics["bias"])
        assert updates.norm() <= 0.8 + 1e-6
    if carry == "none":
        assert all(epoch.metrics["bias_along"] < -0.1 for epoch in epochs)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw-torch"])
def test_steps_do_not_drift_where_nothing_is_clipped(optimizer):
    given = {"optimizer": optimizer, "batch": 8, "epochs": 2, "steps": 60}
    *epochs, _ = train(spec_of("drift", region="Norm(1e9)", carry="Shrunk()", **given))
    for epoch in epochs:
        assert epoch.metrics["bias_along"] == pytest.approx(0.0, abs=1e-6)
        assert epoch.metrics["bias_across"] == pytest.approx(0.0, abs=1e-6)
    *epochs, _ = train(spec_of("drift", region="Norm(0.5)", carry="none", **given))
    assert all(epoch.metrics["bias_across"] > 0.01 for epoch in epochs)


def test_steps_of_sgd_drift_as_far_as_its_gradients_are_biased():
    given = {"optimizer": "sgd", "batch": 8, "epochs": 1, "steps": 100, "region": "Norm(0.8)", "carry": "none"}
    (steps, _), (updates, _) = train(spec_of("drift", **given)), train(spec_of("skewed", frozen=True, **given))
    length = torch.tensor(updates.metrics["gradient"]).norm().item()
    assert steps.metrics["bias_along"] == pytest.approx(updates.metrics["bias_along"] / length, rel=1e-3)


def test_at_frozen_weights_the_carry_is_what_updates_lack():
    spec = spec_of("skewed", frozen=True, region="Norm(0.8)", carry="full", batch=8, epochs=1, steps=50)
    (epoch, _) = train(spec)
    trial = made(spec)
    net = trial.build(torch.Generator().manual_seed(0))
    carry = torch.zeros_like(net.values)
    for step in range(50):
        (gradient,) = torch.autograd.grad(trial.loss(net, generator_of(0, step), step), [net.values])
        total = gradient + carry
        carry = total - total * min(1.0, 0.8 / float(total.norm()))
    torch.testing.assert_close(
        torch.tensor(epoch.metrics["bias"]), -carry / 50, atol=1e-5, rtol=1e-3, check_dtype=False
    )


# ---------------------------------------------------------------------- images


def classify(**other):
    return Spec.read({**GIVEN, "task": "classify", "source": "digits", **other})


def test_a_long_tail_has_the_shares_it_should():
    trial = made(classify(imbalance=100.0))
    counts = torch.bincount(trial.labels, minlength=10)
    assert counts[0] / counts[-1] >= 70
    assert (counts[:-1] >= counts[1:]).all()
    assert counts[-1] >= 1
    assert (trial.labels == trial.data.labels[trial.places]).all()


def test_wrong_labels_are_wrong_and_as_many_as_asked_for():
    trial = made(classify(noise=0.3))
    wrong = (trial.labels != trial.data.labels[trial.places]).double().mean()
    assert wrong == pytest.approx(0.3, abs=0.04)
    again = made(classify(noise=0.3, seed=5))
    assert (trial.labels == again.labels).all()


def test_a_broken_batch_is_one():
    trial = made(classify(spike=2))
    net = trial.build(torch.Generator().manual_seed(0))
    losses = [trial.loss(net, generator_of(0, step), step).item() for step in range(5)]
    assert max(losses) == losses[2] > 5 * max(losses[:2] + losses[3:])


def test_recall_and_calibration_by_hand():
    trial = made(classify(imbalance=100.0))
    labels = trial.data.test_labels
    chances = torch.full((len(labels), 10), 0.02)
    said = torch.where(labels >= 5, 0, labels)  # the frequent half is right, the rare half is taken for class 0
    chances[torch.arange(len(labels)), said] = 0.82

    class Net(torch.nn.Module):
        place = 0

        def forward(self, images):
            part = chances[self.place : self.place + len(images)]
            self.place += len(images)
            return part.log()

    found = trial.measure(Net())
    right = float((labels < 5).double().mean())
    assert found["balanced_accuracy"] == pytest.approx(0.5)
    assert found["tail_recall"] == 0.0
    assert found["calibration_error"] == pytest.approx(abs(right - 0.82), abs=1e-6)
    rare = int((labels >= 5).sum())
    assert found["tail_share"] == pytest.approx(0.02 * 5 * len(labels) / rare, rel=1e-5)


def test_images_are_learnt():
    *_, last, _ = train(classify(lr=0.1, steps=100, epochs=3))
    assert last.metrics["balanced_accuracy"] > 0.8


# ---------------------------------------------------------------------- text

PYTHON = {"task": "text", "text": "python", "optimizer": "adamw", "lr": 1e-2, "batch": 8, "context": 16, "width": 16}
SHORT = {**PYTHON, "heads": 2, "layers": 1, "windows": 32, "epochs": 2, "seed": 0, "steps": 30}


def test_a_language_model_learns_and_is_measured():
    spec = Spec.read(SHORT)
    epochs = [each for each in train(spec) if isinstance(each, Epoch)]
    known = len(made(spec).counts)
    assert epochs[-1].metrics["validation_loss"] < epochs[0].metrics["validation_loss"] < math.log(known)
    assert epochs[-1].metrics["rare_loss"] > epochs[-1].metrics["validation_loss"]


def test_what_is_held_out_is_not_trained_on():
    trial = made(Spec.read(SHORT))
    content = torch.from_numpy(load_text("python").copy()).long()
    assert len(trial.text) == round(0.9 * len(content))
    _, places = content.unique(return_inverse=True)
    assert (places[: len(trial.text)] == trial.text).all()
    assert (trial.test[0] == places[len(trial.text) :][: len(trial.test[0])]).all()
    shares = trial.counts / trial.counts.sum()
    assert 0.02 < shares[trial.rare].sum() <= 0.05


def test_a_model_of_shares_is_calibrated():
    """One that foretells every byte by how often it occurs gives rare and frequent ones their due, by and large."""
    trial = made(Spec.read({**SHORT, "windows": 4000}))

    class Net(torch.nn.Module):
        def forward(self, tokens):
            return (trial.counts / trial.counts.sum()).clamp_min(1e-9).log().expand(*tokens.shape, -1)

    found = trial.measure(Net())
    assert found["rare_share"] == pytest.approx(1.0, abs=0.35)
    assert found["frequent_share"] == pytest.approx(1.0, abs=0.02)


def test_the_rate_warms_up_and_falls():
    trial = made(Spec.read({**SHORT, "steps": 100}))
    rates = [trial.rate(step) / trial.spec.lr for step in range(200)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))


def test_a_run_of_a_text_goes_on_bit_by_bit(tmp_path):
    spec = Spec.read({**SHORT, **CLIPPED})
    whole = [each.metrics for each in train(spec) if isinstance(each, Epoch)]
    events = train(spec, tmp_path / "run.pt")
    next(events)
    next(events)
    events.close()
    assert [each.metrics for each in train(spec, tmp_path / "run.pt") if isinstance(each, Epoch)] == whole


def test_a_text_of_ones_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("to be or not to be, that is the question; " * 400)
    name = own_text(str(file))
    spec = Spec.read({**SHORT, "text": name})
    assert isinstance(next(iter(train(spec, place=Place(data=str(file))))), Epoch)
    with pytest.raises(DataError, match="say --data FILE"):
        made(spec)
    file.write_text("something else; " * 1000)
    with pytest.raises(DataError, match="is not the text of this run"):
        load_text(name, str(file))
    file.write_text("short")
    with pytest.raises(DataError, match="has 5 bytes; a text needs 10,000"):
        own_text(str(file))
    with pytest.raises(DataError, match=r"no\.txt cannot be read"):
        own_text(str(tmp_path / "no.txt"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 10, "heads": 4}, "width must be a multiple of heads"),
        ({"context": 1}, "context must be a whole number, at least 2"),
        ({"text": ""}, "text must be a name"),
        ({"contxt": 9}, "did you mean 'context'"),
    ],
)
def test_bad_settings_of_a_text_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Spec.read({**SHORT, **given})
