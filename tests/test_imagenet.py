"""Training on images: the loss that is minimised, the schedule, stopping and going on, two processes as one."""

import dataclasses
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest
import torch

from carryclip.experiments import checkpoints
from carryclip.experiments.data.unpack import DataError
from carryclip.experiments.database import StoreError
from carryclip.experiments.imagenet.folder import look_through
from carryclip.experiments.imagenet.images import MEAN, STD
from carryclip.experiments.imagenet.schedule import peak, rate, steps_of
from carryclip.experiments.imagenet.stream import Cut, Order, Reader, training
from carryclip.experiments.imagenet.train import Run, train, weights_of
from carryclip.experiments.records import End, Epoch, Progress, StoppedError
from carryclip.experiments.spec import Spec
from carryclip.experiments.store import Store
from carryclip.experiments.team import Team
from pictures import SPEC, folder, spec_of

CLIPPED = {"region": "Norm(0.5)", "carry": "full"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("images") / "data")


def stream(root, spec, rank=0, size=1):
    part = look_through(root).train
    reader, order = Reader(part, spec.recipe.image, strict=True), Order(len(part), spec.batch, spec.epochs, spec.seed)
    return training(reader, order, Cut(spec.batch, spec.recipe.micro, rank, size), first=0, threads=1)


# ---------------------------------------------------------------------- what is minimised


def test_the_learning_rate_rises_and_falls():
    spec = Spec.read({**SPEC, "lr": 0.1, "batch": 4096, "epochs": 90, "warmup": 5, "micro": 128, "net": "resnet50"})
    steps = steps_of(spec)
    assert steps == 1_281_167 // 4096 == 312
    assert peak(spec) == pytest.approx(1.6)
    assert rate(spec, 0) == 0.0
    assert rate(spec, steps) == pytest.approx(1.6 / 5)
    assert rate(spec, 5 * steps) == pytest.approx(1.6)
    assert rate(spec, 5 * steps + 85 * steps // 2) == pytest.approx(0.8)
    assert rate(spec, 90 * steps - 1) == pytest.approx(0.0, abs=1e-6)


def gradients_by_formula(run, batches):
    """Of cross-entropy with smoothed labels and the L2 term, written out as one loss."""
    smoothing, classes = run.recipe.smoothing, run.recipe.classes
    loss = 0.0
    for batch in batches:
        images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2) / 255.0
        images = (images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
        wanted = torch.full((len(images), classes), smoothing / classes)
        wanted[range(len(images)), torch.from_numpy(batch["label"])] += 1.0 - smoothing
        loss = loss - (wanted * run.net(images).log_softmax(1)).sum() / run.spec.batch
    loss = loss + 0.5 * run.recipe.decay * sum((weight**2).sum() for weight in weights_of(run.net))
    return torch.autograd.grad(loss, list(run.net.parameters()))


def test_the_l2_term_reaches_the_clip(root):
    """A radius so small that everything is carried: update and carry together are the gradient of the whole loss."""
    spec = spec_of(root, region="Component(1e-3)", carry="full", decay=0.3)
    run = Run(spec, "cpu", Team())
    batches = [next(feed) for feed in [stream(root, spec)] for _ in range(2)]
    wanted = gradients_by_formula(run, batches)
    run.train(batches, pause=False)
    for parameter, gradient in zip(run.net.parameters(), wanted, strict=True):
        whole = parameter.grad + run.clipper.carry(parameter)
        torch.testing.assert_close(whole, gradient, rtol=1e-3, atol=1e-5)
        assert parameter.grad.abs().max() <= 1e-3 * (1 + 1e-6)
    norms = {id(p) for p in run.net.parameters()} - {id(p) for p in run.weights}
    assert len(norms) == 2 * sum(isinstance(layer, torch.nn.BatchNorm2d) for layer in run.net.modules())


def test_bfloat16_changes_the_network_and_not_the_weights(root):
    run = Run(spec_of(root, precision="bfloat16", **CLIPPED), "cpu", Team())
    feed = stream(root, run.spec)
    kinds = []
    run.net.groups[0].register_forward_hook(lambda _, given, out: kinds.append(out.dtype))
    for _ in range(2):
        run.train([next(feed) for _ in range(2)], pause=False)
    assert set(kinds) == {torch.bfloat16}
    assert {p.dtype for p in run.net.parameters()} == {p.grad.dtype for p in run.net.parameters()} == {torch.float32}
    assert run.clipper.carry(0).dtype == torch.float32


def test_a_nesterov_step_is_taken_at_the_rate_of_its_step(root):
    run = Run(spec_of(root), "cpu", Team())
    feed, rates = stream(root, run.spec), []
    for _ in range(4):
        run.train([next(feed) for _ in range(2)], pause=False)
        rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == [rate(run.spec, step) for step in range(4)]
    assert run.optimizer.param_groups[0]["nesterov"]
    assert run.optimizer.param_groups[0]["weight_decay"] == 0.0  # it would come after the clip


# ---------------------------------------------------------------------- stopping and going on


def told(events):
    """Everything but the time it took."""
    kept = [event for event in events if not isinstance(event, Progress)]
    return [dataclasses.replace(event, seconds=None) if isinstance(event, Epoch) else event for event in kept]


def test_a_run_trains_and_tells(root):
    events = list(train(spec_of(root), data=str(root)))
    assert [type(event) for event in events] == [Epoch] * 3 + [End]
    assert events[-1] == End("reached", reached=3)
    assert all(0.0 <= epoch.test_accuracy <= 1.0 and epoch.loss > 0 for epoch in events[:-1])
    assert events[2].running_accuracy is not None


@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_stopped_goes_on_bit_by_bit(root, tmp_path, seed):
    """At a random step, which may be the first or the last of an epoch, and again at another."""
    spec, file = spec_of(root, **CLIPPED), tmp_path / "run.pt"
    wanted = told(train(spec, data=str(root)))
    generator, stops = random.Random(seed), 0
    for _ in range(3):
        left = generator.randrange(1, 6)

        def stop():
            nonlocal left
            left -= 1
            return left < 0

        try:
            found = told(train(spec, file, data=str(root), stop=stop))
            break
        except StoppedError:
            stops += 1
    else:
        found = told(train(spec, file, data=str(root)))
    assert stops
    assert found == wanted


def test_a_diverged_run_says_so(root):
    *epochs, end = train(spec_of(root, lr=1e30), data=str(root))
    assert end.outcome == "diverged"
    assert epochs[-1].loss is None


def test_broken_files_are_counted_unless_they_must_not_be(tmp_path):
    data = folder(tmp_path / "data")
    (data / "train" / "class-1" / "3.jpeg").write_bytes(b"broken")
    (data / "val" / "class-2" / "1.jpeg").write_bytes(b"broken")
    spec = spec_of(data, epochs=4)
    end = list(train(spec, data=str(data)))[-1]
    assert end.outcome == "reached"
    assert "2 images could not be read" in end.message
    assert "class-1/3.jpeg, class-2/1.jpeg" in end.message
    with pytest.raises(Exception, match="cannot be read"):
        list(train(spec, data=str(data), strict=True))


def test_a_file_that_is_gone_is_not_a_broken_one(root, tmp_path):
    data = folder(tmp_path / "data")
    spec = spec_of(data)
    events = train(spec, data=str(data))
    next(events)
    (data / "val" / "class-0" / "0.jpeg").unlink()
    with pytest.raises(FileNotFoundError):
        list(events)


def test_a_checkpoint_of_another_version_is_set_aside(root, tmp_path, monkeypatch):
    spec, file = spec_of(root), tmp_path / "run.pt"
    events = train(spec, file, data=str(root))
    next(events)
    next(events)
    events.close()
    monkeypatch.setattr(checkpoints, "__version__", "0.0.0")
    with pytest.warns(UserWarning, match=r"made by another setup .* starts anew; it is kept as run\.pt\.aside"):
        assert len(list(train(spec, file, data=str(root)))) == 4
    assert (tmp_path / "run.pt.aside").is_file()


def test_batch_norm_does_not_ask_the_device_for_its_count(root):
    """That of each layer in each pass would have to be waited for."""
    run = Run(spec_of(root), "cpu", Team())
    feed = stream(root, run.spec)
    with torch.profiler.profile() as seen:
        for k in range(2):
            run.statistics.before(k)
            run._forward(run.net.train(), next(feed))
    assert not [event.key for event in seen.key_averages() if event.key == "aten::_local_scalar_dense"]


def test_another_folder_is_refused(root, tmp_path):
    spec = spec_of(root)
    with pytest.raises(DataError, match="--data DIR"):
        next(train(spec, data=None))
    other = folder(tmp_path / "data", train=10)
    with pytest.raises(DataError, match="not the folder that this run was planned for"):
        next(train(spec, data=str(other)))


# ---------------------------------------------------------------------- two processes


def shared(rank, root, spec, steps):
    run = Run(spec, "cpu", Team(rank, 2))
    feed = stream(root, spec, rank, 2)
    for _ in range(steps):
        run.train([next(feed) for _ in range(2)], pause=False)
    return [p.detach().clone() for p in run.net.parameters()], run.statistics.average, run.team.add(run.sums)


@pytest.mark.parametrize("clipped", [{}, CLIPPED, {"region": "Adaptive(1, 2, EWMA(0.95))", "carry": "full"}])
def test_two_processes_are_one_that_accumulates(ranks, tmp_path, clipped):
    """Twenty steps of four micro-batches, two on each of two ranks; batch norm sees each micro-batch by itself.

    With fewer pixels in a micro-batch, training would be so chaotic that the order of sums decided its course.
    """
    root = folder(tmp_path / "data", train=27)
    spec = spec_of(root, batch=32, micro=8, image=32, lr=0.05, epochs=10, **clipped)
    run, feed = Run(spec, "cpu", Team()), stream(root, spec)
    for _ in range(20):
        run.train([next(feed) for _ in range(4)], pause=False)
    for params, average, sums in ranks.run(shared, root, spec, 20):
        for found, wanted in zip(params, run.net.parameters(), strict=True):
            assert (found - wanted.detach()).norm() <= 1e-5 * max(1.0, wanted.detach().norm())
        torch.testing.assert_close(average, run.statistics.average, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sums, run.sums, rtol=1e-5, atol=1e-5)


def command(*words, processes=1):
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [*start, "carryclip", *map(str, words)]


def reproduce(folder, study, data, processes, *more):
    words = ("reproduce", study, "--data", data, "--store", folder / "s.sqlite", "--out", folder / "report", *more)
    return command(*words, "--workers", "1", processes=processes)


STUDY = """
name = "pair"
tier = "smoke"
[defaults]
task = "imagenet"
optimizer = "nesterov"
lr = 0.2
batch = 8
epochs = 16
seed = 0
net = "resnet10"
image = 16
micro = 4
warmup = 1
[[grid]]
region = "Norm(0.5)"
carry = "full"
[[grid]]
"""


def rows(path):
    with Store(path, create=False) as store:
        return {
            record.spec.id: (record.outcome, told(store.epochs(record.spec.id))) for record in store.records("pair")
        }


@pytest.mark.parametrize("processes", [1, 2])
def test_a_study_that_is_killed_goes_on(root, tmp_path, processes):
    """Killed at a random time, then stopped politely, then left in peace: what it finds is what it would have found."""
    study = tmp_path / "pair.toml"
    study.write_text(STUDY)
    calm, wild = tmp_path / "calm", tmp_path / "wild"
    for place in (calm, wild):
        place.mkdir()
    done = subprocess.run(reproduce(calm, study, root, processes), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    generator, unfinished = random.Random(processes), []
    for number in (signal.SIGKILL, signal.SIGTERM):
        started = subprocess.Popen(
            reproduce(wild, study, root, processes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        end = time.monotonic() + 120
        while time.monotonic() < end and started.poll() is None and not progress(wild / "s.sqlite"):
            time.sleep(0.05)
        time.sleep(generator.uniform(0.0, 1.0))
        if number == signal.SIGKILL:
            os.killpg(started.pid, number)
        elif started.poll() is None:
            started.send_signal(number)
        started.wait(60)
        unfinished.append(sum(outcome is None for outcome, _ in rows(wild / "s.sqlite").values()))
    assert unfinished[0]  # it did come in between
    done = subprocess.run(reproduce(wild, study, root, processes), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(wild / "s.sqlite") == rows(calm / "s.sqlite")
    assert len(rows(calm / "s.sqlite")) == 2


def test_a_run_that_fails_keeps_its_checkpoint_for_another_try(tmp_path):
    """A disk that loses a file, and finds it again."""
    data, study = folder(tmp_path / "data"), tmp_path / "pair.toml"
    study.write_text(STUDY.replace("epochs = 16", "epochs = 40"))
    words = reproduce(tmp_path, study, data, 1)
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not progress(tmp_path / "s.sqlite"):
        time.sleep(0.05)
    (data / "val" / "class-0" / "0.jpeg").rename(tmp_path / "gone.jpeg")
    assert started.wait(120) == 1
    (tmp_path / "gone.jpeg").rename(data / "val" / "class-0" / "0.jpeg")
    left = list((tmp_path / "s.sqlite.checkpoints").glob("*.pt"))
    assert left
    done = subprocess.run([*words, "--retry"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {outcome for outcome, _ in rows(tmp_path / "s.sqlite").values()} == {"reached"}


def test_a_run_that_cannot_work_ends_under_torchrun_too(tmp_path):
    data, study = folder(tmp_path / "data"), tmp_path / "pair.toml"
    study.write_text(STUDY)
    for k in range(9):
        (data / "train" / "class-1" / f"{k}.jpeg").write_bytes(b"broken")
    done = subprocess.run(reproduce(tmp_path, study, data, 2, "--strict"), capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    with Store(tmp_path / "s.sqlite", create=False) as store:
        found = [record for record in store.records("pair") if record.state == "done"]
    assert [record.outcome for record in found] == ["crashed"]
    assert "BrokenImageError" in found[0].message


def progress(path):
    """Whether a first epoch has been written."""
    try:
        with Store(path, create=False) as store:
            return any(epochs for epochs, _ in store.under_way().values()) or bool(store.done())
    except (StoreError, sqlite3.Error):  # not there yet
        return False
