"""What is trained: the paper's network and initial weights, the data, and a step that does not depend on its parts."""

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from sklearn.datasets import load_digits

from carryclip_lab.data.cifar10 import DataError, load_cifar10
from carryclip_lab.engine import training
from carryclip_lab.grid import load
from carryclip_lab.problem import Run
from carryclip_lab.spec import Spec, floors_of
from carryclip_lab.task import Place
from carryclip_lab.tasks import _images, cifar10, digits
from carryclip_lab.tasks.digits import Digits

EXPERIMENTS = Path(__file__).parents[2] / "docs" / "experiments"
GIVEN = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 100, "epochs": 3, "seed": 0}


def events(spec, **options):
    return [{**vars(event), "seconds": None} for event in training.train(spec, **options)]


def test_the_conv_net_is_the_papers():
    net = cifar10.conv_net(torch.Generator().manual_seed(0))
    assert (
        sum(p.numel() for p in net.parameters()) == 3 * 9 * 32 + 32 + 32 * 9 * 64 + 64 + 4096 * 250 + 250 + 62750 + 2510
    )
    assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    kinds = [type(layer).__name__ for layer in net]
    assert kinds[:6] == ["Conv2d", "ReLU", "AvgPool2d"] * 2
    assert kinds[7:] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_initial_weights_are_the_papers():
    net = cifar10.conv_net(torch.Generator().manual_seed(0))
    first, second, dense = net[0], net[3], net[7]
    for conv, fan_in in ((first, 27), (second, 288)):
        assert conv.weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.08)  # LeCun
        assert conv.weight.abs().max().item() <= 2 * fan_in**-0.5 / 0.8796  # truncated
        assert not conv.bias.any()
    assert dense.weight.std().item() == pytest.approx((2 / (4096 + 250)) ** 0.5, rel=0.01)  # Glorot
    assert dense.weight.abs().max().item() > 3 * dense.weight.std().item()  # and not truncated
    assert (dense.bias == 0.01).all()


@pytest.mark.parametrize("moved", [False, True])
def test_digits_are_as_scikit_learn_reads_them(monkeypatch, moved):
    if moved:  # as if another version kept its file elsewhere
        monkeypatch.setattr(digits, "find_spec", lambda name: None)
    pixels, labels = digits._table()
    wanted, theirs = load_digits(return_X_y=True)
    np.testing.assert_array_equal(pixels, wanted)
    np.testing.assert_array_equal(labels, theirs)


def test_a_seed_decides_weights_and_order():
    one, again, other = (events(Spec(**{**GIVEN, "seed": seed})) for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_a_subset_is_stratified_and_always_the_same():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 5)
    chosen = _images.stratified(labels, 30)
    assert torch.bincount(labels[chosen]).tolist() == [13, 12, 5]  # as even as the classes allow
    assert torch.equal(chosen, _images.stratified(labels, 30))
    assert len(set(chosen.tolist())) == 30
    assert torch.bincount(labels[_images.stratified(labels, 9)]).tolist() == [3, 3, 3]
    with pytest.raises(ValueError, match="only 85"):
        _images.stratified(labels, 86)


def test_a_batch_in_parts_gives_the_same_step():
    spec = Spec(**{**GIVEN, "region": "Norm(0.5)", "carry": "full", "epochs": 1})
    whole = _images.loaded(Digits.read)
    results = []
    for chunk in (1000, 30):
        run = Run(spec, _images.ToTarget(spec, dataclasses.replace(whole, chunk=chunk)))
        run.problem.begin(0)
        for step in range(3):
            run.train(step)
        results.append(torch.cat([p.detach().flatten() for p in run.net.parameters()]))
    torch.testing.assert_close(*results)


def test_the_last_partial_batch_is_kept():
    spec = Spec(**{**GIVEN, "batch": 1000, "epochs": 1})
    assert spec.recipe.epoch(spec) == (2, 1438)  # 1000 and 438
    problem = spec.recipe.problem(spec, Place())
    problem.begin(0)
    assert [len(batch) for batch in problem._batches] == [1000, 438]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_optimizers_are_the_papers(optimizer):
    run = training.Run(Spec(**{**GIVEN, "optimizer": optimizer}), Place())
    group = run.optimizer.param_groups[0]
    assert type(run.optimizer).__name__ == ("Adam" if optimizer == "adam" else "SGD")
    assert group["lr"] == 0.1
    assert group["weight_decay"] == 0
    if optimizer == "adam":
        assert group["betas"] == (0.9, 0.999)
    else:
        assert (group["momentum"], group["dampening"], group["nesterov"]) == (0.9 * (optimizer == "momentum"), 0, False)


def test_metrics_of_an_epoch():
    bare, clipped = (
        list(training.train(Spec(**GIVEN, **more))) for more in ({}, {"region": "Norm(0.5)", "carry": "full"})
    )
    assert bare[0].grad_norm > 0.1
    assert bare[0].carry_norm is None
    assert clipped[0].radius_norm == pytest.approx(0.5)
    assert 0.0 < clipped[0].clipped_fraction <= 1.0
    assert clipped[0].carry_norm > 0.0
    assert [event.test_accuracy is not None for event in bare[:-1]] == [False, False, True]  # only the last epoch's
    assert bare[-1].outcome == "not_reached"


def test_a_run_is_over_when_the_target_is_reached():
    *epochs, end = training.train(Spec(**{**GIVEN, "epochs": 30, "target": 0.9}))
    assert end.outcome == "reached"
    assert end.reached == len(epochs) == epochs[-1].epoch < 30
    assert epochs[-2].train_accuracy < 0.9 <= epochs[-1].train_accuracy


def test_a_brief_run_is_the_same_but_for_accuracies_that_miss_the_target():
    spec = Spec(**{**GIVEN, "epochs": 30, "target": 0.9})
    *whole, end = training.train(spec)
    *brief, other = training.train(dataclasses.replace(spec, brief=True))
    assert end == other
    assert len(whole) > 1
    assert [epoch.train_accuracy for epoch in brief] == [None] * (len(brief) - 1) + [whole[-1].train_accuracy]
    told = [dataclasses.replace(epoch, train_accuracy=None, seconds=None) for epoch in whole]
    assert [dataclasses.replace(epoch, train_accuracy=None, seconds=None) for epoch in brief] == told


def test_the_last_epoch_of_a_brief_run_is_measured_whole():
    *epochs, end = training.train(Spec(**GIVEN, brief=True))
    assert end.outcome == "not_reached"
    assert [epoch.train_accuracy is not None for epoch in epochs] == [False, False, True]


def test_measuring_ends_as_soon_as_the_target_is_out_of_reach():
    labels = torch.tensor([0, 0, 1, 0])  # a network that says 0 always is right on three of four
    seen = []

    class Zero(torch.nn.Module):
        def forward(self, images):
            seen.append(len(images))
            return torch.tensor([[1.0, 0.0]]).expand(len(images), -1)

    images = torch.zeros(4, 1)
    assert _images.accuracy_of(Zero(), images, labels, 1, 0.75) == 0.75
    assert len(seen) == 4
    assert _images.accuracy_of(Zero(), images, labels, 1, 0.76) is None
    assert len(seen) == 7


def test_a_run_below_its_floor_is_given_up():
    whole = list(training.train(Spec(**{**GIVEN, "epochs": 4})))
    second = whole[1].running_accuracy
    low, high = (f"2:{second + change:.6f}" for change in (-1e-3, 1e-3))
    assert list(training.train(Spec(**{**GIVEN, "epochs": 4}, floors=low)))[-1].message is None
    *epochs, end = training.train(Spec(**{**GIVEN, "epochs": 4}, floors=high))
    assert (end.outcome, len(epochs)) == ("not_reached", 2)
    assert end.message.startswith(f"Given up: running accuracy {second:.3f} after epoch 2 is below ")


def test_the_floors_of_the_claims_would_have_stopped_no_run_that_arrived():
    """Of the published runs on the same images, at the same share of the epochs that each had."""
    floors = floors_of(str(load("cifar10-claims").specs[0].floors))
    arrived = 0
    for folder in ("slice", "results"):
        runs = pyarrow.csv.read_csv(EXPERIMENTS / folder / "runs.csv").to_pylist()
        epochs = pyarrow.parquet.read_table(EXPERIMENTS / folder / "epochs.parquet").to_pylist()
        running = {(epoch["run"], epoch["epoch"]): epoch["running_accuracy"] for epoch in epochs}
        for run in runs:
            if run["outcome"] == "reached":
                arrived += 1
                for epoch, floor in floors.items():
                    at = epoch * run["epochs"] // 40
                    assert at >= run["reached"] or running[run["run"], at] > floor
    assert arrived > 100


def test_a_run_that_diverges_ends_there():
    *epochs, end = training.train(Spec(**{**GIVEN, "lr": 1e30, "epochs": 30}))
    assert end.outcome == "diverged"
    assert len(epochs) < 30
    assert epochs[-1].loss is None


def test_cifar10_is_standardised_by_channel():
    try:
        load_cifar10()
    except DataError as error:
        pytest.skip(f"CIFAR-10 is not here: {error}")
    task = _images.loaded(cifar10.Cifar10.read)
    assert task.images.shape == (50_000, 3, 32, 32)
    assert task.images.is_contiguous(memory_format=torch.channels_last)
    mean, std = task.images.double().mean((0, 2, 3)), task.images.double().std((0, 2, 3))
    np.testing.assert_allclose(mean, 0.0, atol=1e-5)
    np.testing.assert_allclose(std, 1.0, atol=1e-5)
    assert torch.bincount(_images.loaded(cifar10.Cifar10.read, 2000).labels).tolist() == [200] * 10
    *_, end = training.train(Spec(**{**GIVEN, "task": "cifar10", "examples": 100, "batch": 20, "epochs": 1}))
    assert end.outcome == "not_reached"
    _images.loaded.cache_clear()
