"""The store: every run is taken by one, accepted once, and survives whatever happens to whoever works on it."""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from carryclip_lab.grid import Study
from carryclip_lab.spec import Spec
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.export import export
from carryclip_lab.store.records import FAULTS, OUTCOMES, Epoch
from carryclip_lab.store.store import Store

GIVEN = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 16, "epochs": 3}


def study(runs, name="study"):
    return Study(name, f"All of {name}", "smoke", tuple(runs))


def specs(count, first=0):
    return [Spec(**GIVEN, seed=seed) for seed in range(first, first + count)]


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "runs.sqlite") as opened:
        yield opened


def test_a_run_from_waiting_to_done(store):
    assert store.add(study(specs(2), "study")) == 2
    assert store.add(study(specs(3), "study")) == 1  # those that are there stay
    (spec,) = store.take("study", "me")
    assert spec == specs(1)[0]
    assert store.progress("study") == {"waiting": 2, "running": 1}
    assert store.begin(spec.id, "me")
    epochs = [Epoch(epoch=1, loss=2.0, train_accuracy=0.5, seconds=0.1), Epoch(epoch=2, loss=1.0, train_accuracy=0.995)]
    assert all(store.record(spec.id, "me", epoch) for epoch in epochs)
    assert store.finish(spec.id, "me", "reached", reached=2, environment={"torch": "2"})
    assert store.epochs(spec.id) == epochs
    record = next(iter(store.records("study")))
    assert (record.spec, record.outcome, record.reached, record.environment) == (spec, "reached", 2, {"torch": "2"})
    assert store.progress("study") == {"waiting": 2, "reached": 1}


def test_a_run_belongs_to_one_and_is_accepted_once(store):
    store.add(study(specs(1), "study"))
    (spec,) = store.take("study", "first", lease=-1.0)  # its lease has passed already
    assert [taken.id for taken in store.take("study", "second")] == [spec.id]
    assert store.take("study", "third") == []
    assert not store.begin(spec.id, "first")
    assert not store.record(spec.id, "first", Epoch(epoch=1, loss=9.0))
    assert not store.finish(spec.id, "first", "crashed")
    assert store.record(spec.id, "second", Epoch(epoch=1, loss=1.0))
    assert store.finish(spec.id, "second", "not_reached")
    assert not store.finish(spec.id, "second", "crashed")  # final
    assert store.epochs(spec.id) == [Epoch(epoch=1, loss=1.0)]
    assert store.take("study", "third") == []


def test_leases_are_renewed_and_given_back(store):
    store.add(study(specs(2), "study"))
    store.take("study", "me", limit=2, lease=-1.0)
    assert store.renew("me") == 2
    assert store.take("study", "other", limit=2) == []
    assert store.give_back("me") == 2
    assert len(store.take("study", "other", limit=2)) == 2


@pytest.mark.parametrize("jump", [25 * 3600.0, -25 * 3600.0])
def test_a_clock_that_jumps_ends_no_lease(store, monkeypatch, jump):
    store.add(study(specs(1), "study"))
    store.take("study", "me")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert store.take("study", "other") == []


@pytest.mark.parametrize("later", [61.0, -1000.0])
def test_a_lease_passes_with_time_and_with_a_restart_of_the_machine(store, monkeypatch, later):
    store.add(study(specs(1), "study"))
    store.take("study", "me")
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    assert len(store.take("study", "other")) == 1


def test_claims_of_one_owner_are_kept_and_given_back_together(store):
    store.add(study(specs(3)))
    for number in range(2):
        store.take("study", f"me/{number}")
    store.take("study", "meander/0")
    assert store.renew("me") == 2
    assert store.give_back("me/1") == 1
    assert store.give_back("me") == 1
    assert store.owners() == ["meander/0"]


def test_a_store_can_be_read_where_it_cannot_be_written():
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        path = Path(place) / "a.sqlite"
        with Store(path) as store:
            store.add(study(specs(2)))
        path.chmod(0o444)
        os.chmod(place, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # root may write everywhere, nobody may not
        try:
            with Store(path, create=False) as again:
                assert again.progress("study") == {"waiting": 2}
                with pytest.raises(sqlite3.OperationalError, match="readonly"):
                    again.take("study", "me")
        finally:
            if root:
                os.seteuid(0)
            os.chmod(place, 0o700)


def test_only_what_may_be_taken_is_tried_again(store):
    store.add(study(specs(3)))
    for spec in store.take("study", "me", limit=3):
        store.finish(spec.id, "me", "crashed")
    store.restrict([specs(1)[0].id])
    assert store.retry("study", FAULTS) == 1
    assert store.progress("study") == {"waiting": 1, "crashed": 2}


def test_a_database_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    for create in (True, False):
        with pytest.raises(StoreError, match="something else"):
            Store(path, create=create)
    assert path.read_bytes() == before


def test_a_run_that_is_told_anew_forgets_what_was_told_before(store):
    store.add(study(specs(1), "study"))
    (spec,) = store.take("study", "me")
    for epoch in (1, 2, 3):
        store.record(spec.id, "me", Epoch(epoch=epoch, loss=1.0))
    assert store.begin(spec.id, "me")
    assert store.epochs(spec.id) == []


def test_what_is_no_number_is_not_known(store):
    store.add(study(specs(1), "study"))
    (spec,) = store.take("study", "me")
    store.record(spec.id, "me", Epoch(epoch=1, loss=math.nan, grad_norm=math.inf))
    store.finish(spec.id, "me", "diverged", message="The loss is nan at step 7.")
    assert store.epochs(spec.id) == [Epoch(epoch=1)]
    assert next(iter(store.records("study"))).outcome == "diverged"


def test_a_study_is_what_its_file_says_now(store):
    store.add(study(specs(3)))
    (spec,) = store.take("study", "me")
    store.finish(spec.id, "me", "not_reached")
    assert store.add(study(specs(3, first=1))) == 1
    assert [record.spec for record in store.records("study")] == specs(3, first=1)
    assert store.add(study(specs(3))) == 0
    assert store.progress("study") == {"not_reached": 1, "waiting": 2}  # the result was kept


def test_studies_share_runs(store):
    store.add(study(specs(3), "one"))
    store.add(study(specs(3, first=1), "other"))
    (spec,) = store.take("other", "me")
    store.finish(spec.id, "me", "reached", reached=1)
    assert store.progress("one") == {"waiting": 2, "reached": 1}
    assert store.progress("other") == {"waiting": 2, "reached": 1}
    assert store.studies() == ["one", "other"]


def test_every_outcome_and_no_other(store):
    store.add(study(specs(len(OUTCOMES) + 1), "study"))
    for outcome in OUTCOMES:
        (spec,) = store.take("study", "me")
        assert store.finish(spec.id, "me", outcome)
    (spec,) = store.take("study", "me")
    with pytest.raises(sqlite3.IntegrityError):
        store.finish(spec.id, "me", "abandoned")
    assert store.progress("study")["running"] == 1  # nothing of it was written


def test_merging_takes_over_what_is_new(store, tmp_path):
    store.add(study(specs(3), "study"))
    with Store(tmp_path / "other.sqlite") as other:
        other.add(study(specs(3, first=1), "study"))
        for name, seed in (("here", 1), ("there", 2)):
            opened = store if name == "here" else other
            wanted = specs(1, first=seed)[0]
            taken = {spec.id: spec for spec in opened.take("study", name, limit=3)}
            opened.record(wanted.id, name, Epoch(epoch=1, loss=float(seed)))
            assert opened.finish(taken[wanted.id].id, name, "reached", reached=1)
            opened.give_back(name)
        assert store.merge(other) == (1, 1)
        assert store.merge(other) == (0, 0)
    assert store.progress("study") == {"waiting": 2, "reached": 2}
    assert store.epochs(specs(1, first=2)[0].id) == [Epoch(epoch=1, loss=2.0)]


def test_what_is_no_store_is_refused(tmp_path):
    text = tmp_path / "text.sqlite"
    text.write_text("no database at all, whatever its name may say")
    with pytest.raises(StoreError, match="cannot be opened as a store"):
        Store(text)
    with pytest.raises(StoreError, match="There is no store"):
        Store(tmp_path / "none.sqlite", create=False)
    Store(tmp_path / "old.sqlite").close()
    with sqlite3.connect(tmp_path / "old.sqlite") as db:
        db.execute("UPDATE meta SET value = '0'")
    db.close()
    with pytest.raises(StoreError, match="another version"):
        Store(tmp_path / "old.sqlite")


WORKER = """
import sys
import tempfile
import time
from carryclip_lab.store.records import Epoch
from carryclip_lab.store.store import Store
path, owner = sys.argv[1:]
store = Store(path)
while taken := store.take("study", owner, lease=0.5):
    for spec in taken:
        store.begin(spec.id, owner)
        for epoch in range(1, 6):
            time.sleep(0.003)
            store.record(spec.id, owner, Epoch(epoch=epoch, loss=spec.seed + epoch / 10))
        store.finish(spec.id, owner, "reached", reached=spec.seed % 5 + 1)
"""


def work(path, owner):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(path), owner])


def test_killed_workers_lose_nothing_and_double_nothing(tmp_path):
    """Two at a time, killed at random moments, until all runs are done."""
    path, chance = tmp_path / "runs.sqlite", random.Random(0)
    with Store(path) as store:
        store.add(study(specs(200), "study"))
        kills = 0
        for round_ in range(60):
            workers = [work(path, f"{round_}-{n}") for n in range(2)]
            time.sleep(chance.uniform(0.15, 0.5))
            for worker in workers:
                if worker.poll() is None:
                    os.kill(worker.pid, signal.SIGKILL)
                    kills += 1
                worker.wait()
            if store.progress("study")["reached"] == 200:
                break
        time.sleep(0.6)
        assert work(path, "last").wait() == 0
        assert kills >= 4
        assert store.progress("study") == Counter(reached=200)
        for record in store.records("study"):
            seed = record.spec.seed
            assert record.reached == seed % 5 + 1
            assert store.epochs(record.spec.id) == [Epoch(epoch=e, loss=seed + e / 10) for e in range(1, 6)]


def _take_all(path, owner, results):
    with Store(path) as store:
        mine = []
        while taken := store.take("study", owner):
            mine += [spec.id for spec in taken]
            store.finish(taken[0].id, owner, "reached", reached=1)
        results.put(mine)


def test_no_run_is_taken_by_two(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        store.add(study(specs(200), "study"))
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=_take_all, args=(path, f"owner {n}", results)) for n in range(3)]
    for worker in workers:
        worker.start()
    taken = [run for _ in workers for run in results.get(timeout=60)]
    for worker in workers:
        worker.join()
    assert len(taken) == len(set(taken)) == 200


def test_a_records_fields_are_the_tables(store):
    columns = [name for _, name, *_ in sqlite3.connect(store.path).execute("PRAGMA table_info(epochs)")]
    assert columns == ["run", *(field.name for field in dataclasses.fields(Epoch) if field.name != "metrics")]


# ---------------------------------------------------------------------- what a task measures beyond the usual


def test_measures_of_a_task_are_kept_exported_and_merged(tmp_path):
    with Store(tmp_path / "a.sqlite") as store, Store(tmp_path / "b.sqlite") as other:
        store.add(study(specs(1)))
        (spec,) = store.take("study", "me")
        told = {"tail_recall": 0.25, "weights": [1.0, 2.0], "loss_of_rare": float("nan")}
        assert store.record(spec.id, "me", Epoch(1, loss=1.0, metrics=told))
        assert store.record(spec.id, "me", Epoch(2, loss=0.5))
        kept = [Epoch(1, loss=1.0, metrics={**told, "loss_of_rare": None}), Epoch(2, loss=0.5)]
        assert store.epochs(spec.id) == kept
        store.finish(spec.id, "me", "reached")
        other.merge(store)
        assert other.epochs(spec.id) == kept
        export(store, tmp_path, ["csv"])
    assert '""tail_recall"": 0.25' in (tmp_path / "epochs.csv").read_text()


def test_a_store_from_before_measures_gets_their_table(tmp_path):
    path = tmp_path / "a.sqlite"
    with Store(path) as store:
        store.add(study(specs(1)))
        (spec,) = store.take("study", "me")
        store.record(spec.id, "me", Epoch(1, loss=1.0))
    old = sqlite3.connect(path)
    old.execute("DROP TABLE measures")
    old.commit()
    old.close()
    with Store(path) as store:
        assert store.epochs(spec.id) == [Epoch(1, loss=1.0)]
        assert store.record(spec.id, "me", Epoch(2, metrics={"x": 1.0}))
        assert store.epochs(spec.id)[1].metrics == {"x": 1.0}


def test_a_store_knows_the_files_of_studies(tmp_path):
    own = dataclasses.replace(study(specs(1), "mine"), file="folder/mine.toml")
    with Store(tmp_path / "s.sqlite") as store:
        store.add(own)
        assert store.files() == {"mine": "folder/mine.toml"}
        store.add(dataclasses.replace(own, file=None))  # one of the same name that ships
        assert store.files() == {}
        store._db.execute("DROP TABLE files")  # as in a store from before there were any
        assert store.files() == {}
    with Store(tmp_path / "s.sqlite") as store:
        store.add(own)
        assert store.files() == {"mine": "folder/mine.toml"}
