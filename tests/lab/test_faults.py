"""Disks that lie, fill up or lose files: what was seen is kept, or its loss is noticed and said."""

import contextlib
import itertools
import os
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from carryclip_lab.cli import app
from carryclip_lab.grid import Study
from carryclip_lab.spec import Spec
from carryclip_lab.store import checkpoints
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.records import FAULTS, Epoch
from carryclip_lab.store.store import Store

GIVEN = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 3}


def spec(seed=0):
    return Spec(**GIVEN, seed=seed)


def flip(path, where, bit=0):
    content = bytearray(path.read_bytes())
    content[where] ^= 1 << bit
    path.write_bytes(content)


# ---------------------------------------------------------------------- checkpoints


def saved(path, number):
    state = {"weights": torch.full((50, 20), float(number)), "epoch": number}
    checkpoints.save(path, spec(), "cpu", state)


def test_no_flipped_bit_of_a_checkpoint_gives_other_numbers(tmp_path):
    path, luck, back = tmp_path / "run.pt", random.Random(0), 0
    saved(path, 1)
    saved(path, 2)
    whole = path.read_bytes()
    for _ in range(300):
        path.write_bytes(whole)
        flip(path, luck.randrange(len(whole)), luck.randrange(8))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = checkpoints.read(path, spec(), "cpu")
        assert state is not None
        assert torch.equal(state["weights"], torch.full((50, 20), float(state["epoch"])))
        back += state["epoch"] == 1
        (path.with_name("run.pt.aside")).unlink(missing_ok=True)
    assert back > 100  # not all of it is numbers: names, padding


def test_a_damaged_checkpoint_costs_one_generation(tmp_path):
    path = tmp_path / "run.pt"
    for number in (1, 2, 3):
        saved(path, number)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cannot be used"):
        assert checkpoints.read(path, spec(), "cpu")["epoch"] == 2
    path.unlink()  # a kill between putting the old one away and the new one in its place
    assert checkpoints.read(path, spec(), "cpu")["epoch"] == 2
    checkpoints.before(path).write_bytes(b"")
    with pytest.warns(UserWarning, match="cannot be used"):
        assert checkpoints.read(path, spec(), "cpu") is None


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_place_of_another(tmp_path, monkeypatch):
    done = []
    fsync, replace = checkpoints.os.fsync, checkpoints.os.replace
    monkeypatch.setattr(checkpoints.os, "fsync", lambda file: (done.append("fsync"), fsync(file))[1])
    monkeypatch.setattr(checkpoints.os, "replace", lambda *names: (done.append("replace"), replace(*names))[1])
    saved(tmp_path / "run.pt", 1)
    saved(tmp_path / "run.pt", 2)
    assert done == ["fsync", "replace", "fsync", "fsync", "replace", "replace", "fsync"]


# ---------------------------------------------------------------------- stores


def filled(path, runs=6, done=5, name="study"):
    """A store with some runs done."""
    with Store(path) as store:
        store.add(Study(name, "All", "smoke", tuple(spec(seed) for seed in range(runs))))
        for run in store.take(name, "me", limit=done):
            for epoch in (1, 2, 3):
                seen = Epoch(epoch, loss=run.seed + 1 / epoch, train_accuracy=0.3, seconds=0.1, metrics={"x": [epoch]})
                store.record(run.id, "me", seen)
            store.finish(run.id, "me", "reached", reached=2, message="all well", environment={"torch": "2"})
    return path


def contents(store):
    return [(record, store.epochs(record.spec.id)) for record in store.records("study")]


def edit(path, *statement):
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(*statement)


def said(capsys, *arguments):
    """What a command says, and its exit code."""
    try:
        code = app(list(arguments), exit_on_error=False, result_action="return_value")
    except SystemExit as error:
        code = error.code
    return code, " ".join(capsys.readouterr().out.split())


def test_no_flipped_bit_of_a_store_gives_other_numbers(tmp_path):
    path, luck = filled(tmp_path / "a.sqlite", 40, 40), random.Random(0)
    with Store(path) as store:
        whole = contents(store)
        store.check()
    content, noticed = path.read_bytes(), 0
    for _ in range(300):
        path.write_bytes(content)
        flip(path, luck.randrange(len(content)), luck.randrange(8))
        try:
            with Store(path, create=False) as store:
                store.check("study")
                found = contents(store)
            # A study that has lost a run, or its order, shows it; a number must not change.
            assert all(each in whole for each in found)
        except StoreError:
            noticed += 1
    assert noticed > 50  # much of it is empty


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE epochs SET loss = loss + 1e-9 WHERE epoch = 2",
        "UPDATE measures SET metrics = replace(metrics, '1', '2')",
        "UPDATE runs SET reached = 3",
        "UPDATE runs SET outcome = 'not_reached'",
        "UPDATE runs SET spec = replace(spec, '16', '17')",
        "UPDATE runs SET spec = 'null'",
        "DELETE FROM epochs WHERE epoch = 3",
    ],
)
def test_what_was_altered_is_named_and_done_again(tmp_path, capsys, change):
    path = filled(tmp_path / "a.sqlite")
    run = spec(2).id
    assert said(capsys, "status", "--check", "--store", str(path)) == (
        0,
        "Every run that is done is as it was written.",
    )
    edit(path, f"{change}{' AND' if 'WHERE' in change else ' WHERE'} {'id' if 'runs' in change else 'run'} = ?", (run,))
    for command in (["status", "--check"], ["report", "--out", str(tmp_path / "out")], ["replay", run]):
        code, told = said(capsys, *command, "--store", str(path))
        assert code == 2
        assert f"is damaged; no longer what was written: run {run}." in told
    with Store(path) as store, Store(tmp_path / "b.sqlite") as other:
        with pytest.raises(StoreError, match=run):
            other.merge(store)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            store.add(Study("study", "All", "smoke", tuple(spec(seed) for seed in range(6))))
        assert any(run in str(each.message) for each in seen) == ("SET spec" in change)
        assert store.retry("study", FAULTS) == (0 if "SET spec" in change else 1)
        store.check()


def test_an_altered_spec_ends_its_run_alone(tmp_path):
    with Store(filled(tmp_path / "a.sqlite", 3, 0)) as store:
        edit(store.path, "UPDATE runs SET spec = replace(spec, '16', '17') WHERE id = ?", (spec(0).id,))
        assert store.take("study", "me") == [spec(1)]
        assert store.progress("study") == {"crashed": 1, "running": 1, "waiting": 1}
        with pytest.warns(UserWarning, match=spec(0).id):
            store.add(Study("study", "All", "smoke", tuple(spec(seed) for seed in range(3))))
        assert store.retry("study", FAULTS) == 1
        assert store.take("study", "me") == [spec(0)]


def test_a_store_from_before_digests_is_read_as_it_is(tmp_path):
    path = filled(tmp_path / "a.sqlite")
    with Store(path) as store:
        whole = contents(store)
    edit(path, "DROP TABLE digests")
    edit(path, "UPDATE epochs SET seconds = 0.1")
    with Store(path) as store:
        store.check()
        assert contents(store) == whole


def test_a_result_beats_a_fault(tmp_path):
    path, other = tmp_path / "a.sqlite", filled(tmp_path / "b.sqlite", 1, 1)
    with Store(path) as store, Store(other) as found:
        store.add(Study("study", "All", "smoke", (spec(0),)))
        store.take("study", "me")
        store.finish(spec(0).id, "me", "crashed", message="no luck")
        assert found.merge(store) == (0, 0)
        assert store.merge(found) == (0, 1)
        store.check()
        assert contents(store) == contents(found)


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
def test_files_that_are_removed_while_in_use_are_missed(tmp_path, ending):
    path = filled(tmp_path / "a.sqlite", 6, 2)
    with Store(path) as store:
        assert store.take("study", "me")
        path.with_name(path.name + ending).unlink()
        with pytest.raises(StoreError, match="removed or replaced"):
            store.take("study", "me")


@pytest.mark.parametrize("damage", ["", "text", "zeros", "half"])
def test_no_damage_makes_a_traceback(tmp_path, capsys, damage):
    path = filled(tmp_path / "a.sqlite", 60, 60)
    content = path.read_bytes()
    path.write_bytes(
        {
            "": b"",
            "text": b"SQLite format 3, or so it says" * 200,
            "zeros": content[:4096] + bytes(len(content) - 4096),
            "half": content[: len(content) // 2],
        }[damage]
    )
    out = ["--out", str(tmp_path / "out")]
    for command in (["status"], ["status", "--check"], ["report", *out], ["export", *out], ["replay", spec(0).id]):
        code, told = said(capsys, *command, "--store", str(path))
        assert code == 2
        assert "a.sqlite" in told
    assert said(capsys, "merge", str(tmp_path / "b.sqlite"), str(path))[0] == 2
    assert said(capsys, "backup", str(path), str(tmp_path / "c.sqlite"))[0] == 2


def test_a_copy_is_whole_while_runs_are_written(tmp_path, capsys):
    path, copy = tmp_path / "a.sqlite", tmp_path / "copy.sqlite"
    filled(path)
    with Store(path) as store:
        assert len(store.take("study", "me")) == 1  # now it is in the log alone
        assert said(capsys, "backup", str(path), str(copy)) == (0, f"Wrote {copy}.".replace("\n", " "))
        assert [each.name for each in tmp_path.glob("copy*")] == ["copy.sqlite"]
        with Store(copy, create=False) as again:
            assert contents(again) == contents(store)
            assert again.progress("study") == {"reached": 5, "running": 1}
        code, told = said(capsys, "backup", str(path), str(copy))
        assert (code, "is there already" in told) == (2, True)
        code, told = said(capsys, "backup", str(path), str(tmp_path / "no" / "copy.sqlite"))
        assert (code, "cannot be written" in told) == (2, True)


READER = """
import os
import sys
from carryclip_lab.store import database
from carryclip_lab.store.store import Store
database._writable = lambda path: False
if os.geteuid() == 0:
    os.seteuid(65534)
for _ in range(300):
    with Store(sys.argv[1], create=False) as store:
        store.check()
        assert store.progress("study").total() == 200
print("read")
"""


def test_who_may_only_read_reads_beside_who_writes():
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        path = filled(Path(place) / "a.sqlite", 200, 0)
        os.chmod(place, 0o755)
        reader = None
        while True:
            with Store(path) as store:
                if reader is None:
                    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                    reader = subprocess.Popen([sys.executable, "-c", READER, str(path)], **pipes)
                for run in store.take("study", "me", limit=5):
                    store.record(run.id, "me", Epoch(1, loss=1.0))
                store.give_back("me")
                if reader.poll() is not None:
                    break
        out, _ = reader.communicate(timeout=120)
        assert out == "read\n"


# ---------------------------------------------------------------------- disks that are full, and worse


FULL = """
import os
import resource
import sys
from carryclip_lab.store.records import Epoch
from carryclip_lab.store.store import Store
path, room = sys.argv[1], int(sys.argv[2])
size = max(os.path.getsize(path + ending) for ending in ("", "-wal", "-shm") if os.path.exists(path + ending))
resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, size + room))  # beyond it, writing fails as on a full disk
with Store(path) as store:
    while taken := store.take("study", "writer"):
        for epoch in range(1, 20):
            assert store.record(taken[0].id, "writer", Epoch(epoch, loss=taken[0].seed + 1 / epoch))
        assert store.finish(taken[0].id, "writer", "reached", reached=1)
        print(taken[0].id, flush=True)
"""


def test_a_full_disk_loses_nothing_that_was_accepted(tmp_path):
    path = filled(tmp_path / "a.sqlite", 200, 0)
    done = set()
    for room in (0, 5_000, 20_000, 60_000, 200_000):
        command = [sys.executable, "-c", FULL, str(path), str(room)]
        writer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert writer.returncode == 1
        assert "StoreError" in writer.stderr.splitlines()[-1]
        done |= set(writer.stdout.split())
        with Store(path) as store:
            store.check()
            assert done <= store.done()
            assert len(store.done()) - len(done) <= 1  # the one that was accepted, and not told of
            done = store.done()
            store.give_back("writer")
    assert 0 < len(done) < 200


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    path = tmp_path / "run.pt"
    saved(path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.warns(UserWarning, match="cannot be written"):
            saved(path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints.read(path, spec(), "cpu")["epoch"] == 1
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_last_checkpoint(tmp_path, monkeypatch, name):
    path = tmp_path / "run.pt"
    saved(path, 1)

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as failing:
        failing.setattr(checkpoints.os, name, fail)
        with pytest.warns(UserWarning, match=r"cannot be written.*Input/output error"):
            saved(path, 2)
    assert checkpoints.read(path, spec(), "cpu")["epoch"] == 1


# ---------------------------------------------------------------------- what people do


def test_a_name_that_no_folder_can_have_is_refused(tmp_path):
    with pytest.raises(StoreError, match="at most 100 letters"):
        filled(tmp_path / "a.sqlite", name="long" * 100)


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path, capsys):
    path = filled(tmp_path / "a.sqlite")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    for out in ("/proc", str(tmp_path / "link")):  # not even root can
        for command in ("report", "export"):
            code, told = said(capsys, command, "--store", str(path), "--out", out)
            assert (code, "Cannot write to" in told) == (2, True)
    code, told = said(capsys, "status", "--store", str(tmp_path / "link"))
    assert (code, "There is no store" in told) == (2, True)
    with pytest.raises(StoreError, match="cannot be opened as a store"):
        Store(tmp_path / "link")


# ---------------------------------------------------------------------- what is installed

HOLES = {
    "torch": "2.9.1",  # its weights_only loader runs code
    "ray": "2.51.0",  # whoever reaches the dashboard runs code
    "pillow": "11.2.1",  # an overflow in reading images
    "jinja2": "3.1.5",  # a way out of its sandbox
    "lightning": "2.6.2",  # published by an intruder
}


@pytest.mark.parametrize(("package", "version"), HOLES.items())
def test_versions_with_known_holes_are_not_installed(package, version):
    root = Path(__file__).parents[2]
    declared = []
    for file in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((root / file).read_text(encoding="utf-8"))["project"]
        declared += [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    floors = [found for found in map(Requirement, declared) if found.name == package]
    assert any(version not in found.specifier for found in floors)
    pinned = (root / "constraints.txt").read_text(encoding="utf-8").split()
    assert f"{package}=={version}" not in pinned
