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

from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine import training as trainer
from carryclip_lab.engine.team import Team
from carryclip_lab.grid import read
from carryclip_lab.imagenet.folder import look_through
from carryclip_lab.imagenet.stream import Cut, Order, Reader, training
from carryclip_lab.spec import Spec
from carryclip_lab.store import checkpoints
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.records import End, Epoch, Progress, StoppedError
from carryclip_lab.store.store import Store
from carryclip_lab.task import Place
from carryclip_lab.tasks.imagenet import rate, weights_of
from pictures import SPEC, STUDY, folder, spec_of

CLIPPED = {"region": "Norm(0.5)", "carry": "full"}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("images") / "data")


def stream(root, spec, rank=0, size=1):
    part = look_through(root).train
    reader, order = Reader(part, spec.recipe.image, strict=True), Order(len(part), spec.batch, spec.epochs, spec.seed)
    return training(reader, order, Cut(spec.batch, spec.recipe.micro, rank, size), first=0, threads=1)


def started(root, spec, rank=0, size=1):
    return trainer.Run(spec, Place(data=str(root), team=Team(rank, size)))


def step(run, batches):
    """One step on given batches."""
    run.problem.read = lambda: batches
    run.train(run.position)
    run.step += 1
    run.problem.agree(pause=False)


def train(spec, file=None, *, data=None, strict=False, team=None, **more):
    return trainer.train(spec, file, place=Place(data=data, strict=strict, team=team), **more)


# ---------------------------------------------------------------------- what is minimised


def test_the_learning_rate_rises_and_falls():
    spec = Spec.read({**SPEC, "lr": 0.1, "batch": 4096, "epochs": 90, "warmup": 5, "micro": 128, "net": "resnet50"})
    steps, _ = spec.recipe.epoch(spec)
    assert steps == 1_281_167 // 4096 == 312
    assert rate(spec, 0) == 0.0
    assert rate(spec, steps) == pytest.approx(1.6 / 5)
    assert rate(spec, 5 * steps) == pytest.approx(1.6)
    assert rate(spec, 5 * steps + 85 * steps // 2) == pytest.approx(0.8)
    assert rate(spec, 90 * steps - 1) == pytest.approx(0.0, abs=1e-6)


def gradients_by_formula(run, batches):
    """Of cross-entropy with smoothed labels and the L2 term, written out as one loss."""
    smoothing, classes = run.spec.recipe.smoothing, run.spec.recipe.classes
    loss = 0.0
    for batch in batches:
        images = torch.from_numpy(batch["image"]).permute(0, 3, 1, 2) / 255.0
        mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
        images = (images - mean) / std
        wanted = torch.full((len(images), classes), smoothing / classes)
        wanted[range(len(images)), torch.from_numpy(batch["label"])] += 1.0 - smoothing
        loss = loss - (wanted * run.net(images).log_softmax(1)).sum() / run.spec.batch
    loss = loss + 0.5 * run.spec.recipe.decay * sum((weight**2).sum() for weight in weights_of(run.net))
    return torch.autograd.grad(loss, list(run.net.parameters()))


def test_the_l2_term_reaches_the_clip(root):
    """A radius so small that everything is carried: update and carry together are the gradient of the whole loss."""
    spec = spec_of(root, region="Component(1e-3)", carry="full", decay=0.3)
    run = started(root, spec)
    batches = [next(feed) for feed in [stream(root, spec)] for _ in range(2)]
    wanted = gradients_by_formula(run, batches)
    step(run, batches)
    for parameter, gradient in zip(run.net.parameters(), wanted, strict=True):
        whole = parameter.grad + run.clipper.carry(parameter)
        torch.testing.assert_close(whole, gradient, rtol=1e-3, atol=1e-5)
        assert parameter.grad.abs().max() <= 1e-3 * (1 + 1e-6)
    norms = {id(p) for p in run.net.parameters()} - {id(p) for p in run.problem.decayed}
    assert len(norms) == 2 * sum(isinstance(layer, torch.nn.BatchNorm2d) for layer in run.net.modules())


def test_bfloat16_changes_the_network_and_not_the_weights(root):
    run = started(root, spec_of(root, precision="bfloat16", **CLIPPED))
    feed = stream(root, run.spec)
    kinds = []
    run.net.groups[0].register_forward_hook(lambda _, given, out: kinds.append(out.dtype))
    for _ in range(2):
        step(run, [next(feed) for _ in range(2)])
    assert set(kinds) == {torch.bfloat16}
    assert {p.dtype for p in run.net.parameters()} == {p.grad.dtype for p in run.net.parameters()} == {torch.float32}
    assert run.clipper.carry(0).dtype == torch.float32


def test_a_nesterov_step_is_taken_at_the_rate_of_its_step(root):
    run = started(root, spec_of(root))
    feed, rates = stream(root, run.spec), []
    for _ in range(4):
        step(run, [next(feed) for _ in range(2)])
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


def test_a_run_says_how_fast_it_is_and_what_is_left(root, monkeypatch):
    """Two steps of eight images in five seconds, then four in two: of nine steps, the last pace holds for the rest."""
    run, now = started(root, spec_of(root)), 100.0
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now)
    clock = trainer._Clock(run, 0.0)
    run.step, now = 2, now + 5.0
    assert not clock.wants_to_speak()
    word = clock.word()
    assert (word.epoch, word.step, word.steps) == (1, 2, 3)
    assert (word.rate, word.left) == pytest.approx((16 / 5, 7 * 2.5))
    run.history, run.step, now = [Epoch(1), Epoch(2)], 0, now + 2.0
    run.problem.broken = {"a.jpeg"}
    assert str(clock.word()) == "step 0 of 3, 16/s, 2 s left, 1 files unreadable"
    now += trainer.SPEAK
    assert clock.wants_to_speak()


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
    run = started(root, spec_of(root))
    feed = stream(root, run.spec)
    with torch.profiler.profile() as seen:
        for k in range(2):
            run.problem.statistics.before(k)
            run.problem._forward(run.net.train(), next(feed))
    assert not [event.key for event in seen.key_averages() if event.key == "aten::_local_scalar_dense"]


def test_another_folder_is_refused(root, tmp_path):
    spec = spec_of(root)
    with pytest.raises(DataError, match="--data DIR"):
        next(train(spec, data=None))
    other = folder(tmp_path / "data", train=10)
    with pytest.raises(DataError, match="not the folder that this run was planned for"):
        next(train(spec, data=str(other)))


# ---------------------------------------------------------------------- two processes


def tensors(value):
    """All that a checkpoint has, by where they are."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = {f"{key}/{name}": found for key, part in pairs for name, found in tensors(part).items()}
    return {"": value} if isinstance(value, torch.Tensor) else inner


def shared(rank, root, spec, place, steps):
    """Two micro-batches of each step on each of two ranks, saved before every step and after the last."""
    run, feed = started(root, spec, rank, 2), stream(root, spec, rank, 2)
    for k in range(steps + 1):
        state = run.state(0.0)
        if run.problem.team.leads:
            torch.save(state, place / f"{k}.pt")
        if k < steps:
            step(run, [next(feed) for _ in range(2)])
    return [p.detach().clone() for p in run.net.parameters()], run.problem.statistics.average


@pytest.mark.parametrize("clipped", [{}, CLIPPED, {"region": "Adaptive(1, 2, EWMA(0.95))", "carry": "full"}])
def test_two_processes_are_one_that_accumulates(ranks, tmp_path, clipped):
    """Each step, from where the two were before it: all that is saved, up to the rounding of sums.

    Over several steps rounding may switch a ReLU, and that is no longer rounding.
    """
    root = folder(tmp_path / "data", train=27)
    spec = spec_of(root, batch=32, micro=8, image=32, lr=0.05, epochs=10, **clipped)
    ends = ranks.run(shared, root, spec, tmp_path, 10)
    run, feed = started(root, spec), stream(root, spec)
    before, *after = (torch.load(tmp_path / f"{k}.pt", weights_only=True) for k in range(11))
    for state in after:
        run.restore(before)
        step(run, [next(feed) for _ in range(4)])
        found, wanted = tensors(run.state(0.0)), tensors(state)
        assert found.keys() == wanted.keys()
        for name in wanted:
            if "running_" not in name and "num_batches" not in name:  # those of a process
                one, other = found[name].double(), wanted[name].double()
                assert (one - other).norm() <= 1e-6 * other.norm() + 1e-7, name
        before = state
    (params, average), others = ends[0], ends[1]
    assert all(map(torch.equal, [*params, average], [*others[0], others[1]]))


def drifted(rank, root, spec, steps):
    run, feed = started(root, spec, rank, 2), stream(root, spec, rank, 2)
    for _ in range(steps):
        step(run, [next(feed) for _ in range(2)])
    problem = run.problem
    return (
        [p.detach().clone() for p in run.net.parameters()],
        problem.statistics.average,
        problem.team.add(problem.sums),
    )


@pytest.mark.parametrize("clipped", [{}, CLIPPED])
def test_two_processes_stay_with_one_over_twenty_steps(ranks, tmp_path, clipped):
    root = folder(tmp_path / "data", train=27)
    spec = spec_of(root, batch=32, micro=8, image=32, lr=0.05, epochs=10, **clipped)
    run, feed = started(root, spec), stream(root, spec)
    for _ in range(20):
        step(run, [next(feed) for _ in range(4)])
    for params, average, sums in ranks.run(drifted, root, spec, 20):
        for found, wanted in zip(params, run.net.parameters(), strict=True):
            assert (found - wanted.detach()).norm() <= 1e-5 * max(1.0, wanted.detach().norm())
        torch.testing.assert_close(average, run.problem.statistics.average, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(sums, run.problem.sums, rtol=1e-5, atol=1e-5)


def command(*words, processes=1):
    start = [sys.executable, "-m"]
    if processes > 1:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [*start, "carryclip", *map(str, words)]


def reproduce(folder, study, data, processes, *more):
    words = ("reproduce", study, "--data", data, "--store", folder / "s.sqlite", "--out", folder / "report", *more)
    return command(*words, "--workers", "1", processes=processes)


LEARNING = (
    STUDY.removesuffix("[[grid]]\n").replace("Norm(0.5)", "Adaptive(1, 2, EWMA(0.95))").replace("= 16", "= 10", 1)
)
"""A region that learns its radius, so that there is more to lose than a carry."""


def rows(path):
    with Store(path, create=False) as store:
        return {
            record.spec.id: (record.outcome, told(store.epochs(record.spec.id))) for record in store.records("pair")
        }


def progress(path):
    """How many epochs have been written."""
    try:
        with Store(path, create=False) as store:
            return sum(len(store.epochs(record.spec.id)) for record in store.records("pair"))
    except (StoreError, sqlite3.Error):  # not there yet
        return 0


def alive(*which):
    """Processes that ``ps`` finds so, without those that only wait to be asked how they ended."""
    found = subprocess.run(["ps", "-o", "pid=,stat=", *map(str, which)], capture_output=True, text=True).stdout
    pairs = (line.split() for line in found.splitlines())
    return [int(pid) for pid, state in pairs if not state.startswith("Z")]


def interrupt(words, store, number, pause):
    """Start, and send a signal to what was started alone, some time after the first epoch that was not there before.

    It leaves nothing behind that goes on, and the work undone.
    """
    before, workers = progress(store), []
    started = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while progress(store) <= before:
            assert started.poll() is None
            time.sleep(0.05)
        workers = alive("--ppid", started.pid)
        time.sleep(pause)
        started.send_signal(number)
        started.wait(60)
        end = time.monotonic() + 10
        while left := alive("-p", ",".join(map(str, workers))):
            assert time.monotonic() < end, f"{left} go on alone"
            time.sleep(0.1)
        assert {outcome for outcome, _ in rows(store).values()} == {None}
    finally:
        for pid in alive("-p", ",".join(map(str, [started.pid, *workers]))):
            os.kill(pid, signal.SIGKILL)
        started.wait(60)


def calmly(rank, spec, data, file, size):
    """A run that nothing disturbs."""
    return told(train(spec, file, data=data, team=Team(rank, size)))[:-1]


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_a_study_that_is_killed_goes_on(ranks, tmp_path, processes):
    """Killed at a random time, then stopped politely, then left in peace: it ends as if nothing had been."""
    data, store = folder(tmp_path / "data", train=40), tmp_path / "s.sqlite"
    study = tmp_path / "pair.toml"
    study.write_text(LEARNING)
    (spec,) = read(LEARNING, "pair.toml").with_data(str(data), make=False).specs
    words = [*reproduce(tmp_path, study, data, processes), "--keep"]
    pause = random.Random(processes).uniform
    interrupt(words, store, signal.SIGKILL, pause(0.0, 0.1))
    interrupt(words, store, signal.SIGTERM, pause(0.0, 0.1))
    state = checkpoints.read(checkpoints.place(store, spec), spec)
    assert state["step"] > 0  # in the middle of an epoch
    done = subprocess.run(words, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    calm = tmp_path / "calm.pt"
    given = spec, str(data), calm, processes
    epochs = calmly(0, *given) if processes == 1 else ranks.run(calmly, *given)[0]
    assert rows(store) == {spec.id: ("reached", epochs)}
    found, wanted = (tensors(checkpoints.read(path, spec)) for path in (checkpoints.kept(store, spec), calm))
    assert found.keys() == wanted.keys()
    assert any("uclip_second" in name for name in wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


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
