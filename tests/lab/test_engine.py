"""The engine: whatever happens to workers and supervisors, every run is done once and the study finishes."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from carryclip_lab import grid
from carryclip_lab.engine import local, owners
from carryclip_lab.engine.settings import Options
from carryclip_lab.engine.supervise import supervise
from carryclip_lab.engine.team import Team
from carryclip_lab.store.records import FAULTS
from carryclip_lab.store.store import Store

HERE = Path(__file__).parents[1]
KILLS = int(os.environ.get("CARRYCLIP_KILLS", "4"))
"""50 in a long test; a few are enough to see that nothing has broken."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "200",
}
SUPERVISE = """
import signal
import sys
from pathlib import Path
from rich.console import Console
from carryclip_lab import grid
from carryclip_lab.engine.settings import Setting
from carryclip_lab.engine.supervise import supervise

if __name__ == "__main__":
    # A shell that starts these tests in the background lets them, and all they start, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = Setting(**eval(sys.argv[3]))
    sys.exit(supervise([grid.load(sys.argv[1])], Path(sys.argv[2]), options, Console()))
"""


def study_file(folder, text, name="study"):
    head = 'task = "digits"\noptimizer = "sgd"\nlr = 0.1\nbatch = 64\n'
    path = folder / f"{name}.toml"
    path.write_text(f'name = "{name}"\ntier = "smoke"\n[defaults]\n{head}{text}', encoding="utf-8")
    return path


SMALL = 'seed = [0, 1]\nepochs = 4\n[[grid]]\n[[grid]]\nregion = "Norm(0.5)"\ncarry = ["none", "full", "Gated()"]\n'
"""Eight runs of a few seconds in all."""


@pytest.fixture
def small(tmp_path):
    return study_file(tmp_path, SMALL)


def supervisor(folder, study, store, *, before="", **options):
    """A supervisor in a process of its own, in a session of its own."""
    script = folder / "supervise.py"
    script.write_text(before + SUPERVISE, encoding="utf-8")
    arguments = [sys.executable, str(script), str(study), str(store), repr(options)]
    return subprocess.Popen(
        arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    )


def run_study(folder, study, store, **options):
    process = supervisor(folder, study, store, **options)
    try:
        out, _ = process.communicate(timeout=900)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out


def rows(store, study="study"):
    """All that must not depend on luck: specs, outcomes, metrics."""
    with Store(store, create=False) as opened:
        found = {}
        for record in opened.records(study):
            epochs = [{**vars(epoch), "seconds": None} for epoch in opened.epochs(record.spec.id)]
            found[record.spec.id] = (record.spec, record.outcome, record.reached, epochs)
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The small study, its store, and what was said when nothing came in between."""
    folder = tmp_path_factory.mktemp("undisturbed")
    study, store = study_file(folder, SMALL), folder / "a.sqlite"
    return study, store, run_study(folder, study, store)


def test_a_study_runs_to_its_end_and_a_second_time_has_nothing_to_do(tmp_path, undisturbed):
    small, path, (code, out) = undisturbed
    assert code == 0, out
    found = rows(path)
    assert len(found) == len(grid.load(small).specs) == 8
    assert all(outcome in ("reached", "not_reached") and len(epochs) == 4 for _, outcome, _, epochs in found.values())
    assert all(epochs[-1]["test_accuracy"] > 0.5 for *_, epochs in found.values())
    with Store(path) as store:
        record = next(iter(store.records("study")))
    assert record.environment["threads"] == 1
    assert {"torch", "numpy", "carryclip", "python", "cpu", "commit"} <= set(record.environment)
    assert not list(path.parent.glob("a.sqlite.checkpoints/*"))
    code, out = run_study(tmp_path, small, path)
    assert code == 0
    assert "8 of 8 runs" in out
    assert rows(path) == found


WRONG = {
    "fail": ("crashed", "LookupError: no such <radius>"),
    "segfault": ("crashed", "SIGSEGV"),
    "leave": ("crashed", "SystemExit: usage"),
    "devour": ("oom", "allocate"),
}


def faulty(folder, methods, **options):
    """Exit code, output and, by method and seed, what became of a study in which seed 1 of each method goes wrong."""
    grids = "".join(f'[[grid]]\nmethod = "faulty_methods:{name}"\n' for name in methods)
    study = study_file(folder, f"seed = [0, 1, 2]\nepochs = 2\n{grids}")
    code, out = run_study(folder, study, folder / "a.sqlite", **options)
    with Store(folder / "a.sqlite") as store:
        return code, out, {(record.spec.label, record.spec.seed): record for record in store.records("study")}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory):
    return faulty(tmp_path_factory.mktemp("wrong"), WRONG, memory=3.0)


@pytest.mark.parametrize("method", WRONG)
def test_what_goes_wrong_is_an_outcome_and_the_rest_finishes(wrong, method):
    code, out, records = wrong
    outcome, told = WRONG[method]
    assert [records[method, seed].outcome for seed in range(3)] == ["not_reached", outcome, "not_reached"], out
    message = records[method, 1].message
    assert told in message
    assert code == 1
    if method == "fail":
        assert "Traceback" in message
        assert 'File "faulty_methods.py", line' in message
        assert str(Path.cwd()) not in message


def test_a_result_is_no_failure(tmp_path):
    code, out, records = faulty(tmp_path, ["nan"], workers=1)
    assert [records["nan", seed].outcome for seed in range(3)] == ["not_reached", "diverged", "not_reached"], out
    assert "not finite" in records["nan", 1].message
    assert code == 0, out


def test_running_out_of_time_is_a_failure(tmp_path):
    hang, store = 'epochs = 2\n[[grid]]\nmethod = "faulty_methods:hang"\n', tmp_path / "a.sqlite"
    # Only what hangs may know of the limit: how long the others take depends on what else the machine does.
    code, out = run_study(tmp_path, study_file(tmp_path, f"seed = [0, 2]\n{hang}"), store)
    assert code == 0, out
    code, out = run_study(tmp_path, study_file(tmp_path, f"seed = [0, 1, 2]\n{hang}"), store, timeout=6 / 3600)
    assert code == 1, out
    with Store(store) as opened:
        ends = {record.spec.seed: record for record in opened.records("study")}
    assert [ends[seed].outcome for seed in range(3)] == ["not_reached", "timeout", "not_reached"], out
    assert "Stopped after 6 s" in ends[1].message


def test_no_method_stops_the_others(tmp_path):
    """Whatever it raises, which workers and pools may take for something said to themselves; even by vanishing."""
    wrong = {"cancel": "CancelledError", "close": "GeneratorExit", "interrupt": "KeyboardInterrupt"}
    wrong["vanish"] = "The worker process died of exit code 0."
    grids = "".join(f'[[grid]]\nmethod = "faulty_methods:{name}"\n' for name in wrong)
    study = study_file(tmp_path, f"seed = [0, 1]\nepochs = 1\n{grids}")
    code, out = run_study(tmp_path, study, tmp_path / "a.sqlite", timeout=120 / 3600, workers=1)
    with Store(tmp_path / "a.sqlite") as store:
        ends = {(record.spec.label, record.spec.seed): record for record in store.records("study")}
    for name, told in wrong.items():
        assert ends[name, 0].outcome == "not_reached", out
        assert ends[name, 1].outcome == "crashed", out
        assert told in ends[name, 1].message
    assert code == 1


JUMPS = """
import itertools
import time
days = itertools.count(1)
time.time = lambda: 25 * 3600.0 * next(days)
"""


def test_a_clock_that_jumps_ends_no_run(tmp_path):
    """Each time that it is asked, by more than the usual limit of 24 hours."""
    study = study_file(tmp_path, "seed = [0, 1]\nepochs = 3\n[[grid]]\n")
    code, out = run_study(tmp_path, study, tmp_path / "a.sqlite", before=JUMPS, workers=1)
    assert code == 0, out
    assert {outcome for _, outcome, _, _ in rows(tmp_path / "a.sqlite").values()} == {"not_reached"}


def test_checkpoints_bring_a_run_back_to_the_bit(tmp_path):
    from carryclip_lab.engine.training import train
    from carryclip_lab.spec import Spec
    from carryclip_lab.store.records import End

    settings = [
        {"region": "Norm(0.5)", "carry": "full", "optimizer": "adam"},
        {"region": "Adaptive(1, 2)", "carry": "Gated()", "optimizer": "momentum"},
        {"region": "Component(0.01)", "carry": "full", "optimizer": "sgd"},
        {"optimizer": "adam"},
    ]
    for number, setting in enumerate(settings):
        spec = Spec(task="digits", lr=0.01, batch=100, epochs=5, seed=3, **setting)
        whole = [_timeless(event) for event in train(spec)]
        checkpoint = tmp_path / f"{number}.pt"
        for stopped_after in (2, 4):
            for event in train(spec, checkpoint, every=0.0):
                if not isinstance(event, End) and event.epoch == stopped_after + 1:
                    break
        again = [_timeless(event) for event in train(spec, checkpoint, every=0.0)]
        assert again == whole, setting


def _timeless(event):
    return {**vars(event), "seconds": None}


@pytest.mark.parametrize("method", ["restless", "slow"])
def test_methods_of_ones_own_go_on_to_the_bit_too(tmp_path, monkeypatch, method):
    from carryclip_lab.engine.training import train
    from carryclip_lab.spec import Spec

    monkeypatch.syspath_prepend(str(HERE))
    spec = Spec(task="digits", optimizer="sgd", lr=0.1, batch=64, epochs=4, seed=1, method=f"faulty_methods:{method}")
    whole = [_timeless(event) for event in train(spec)]
    for event in train(spec, tmp_path / "run.pt"):
        if event.epoch == 3:
            break
    assert [_timeless(event) for event in train(spec, tmp_path / "run.pt")] == whole


def test_a_checkpoint_that_cannot_be_written_is_no_obstacle(tmp_path):
    from carryclip_lab.engine.training import train
    from carryclip_lab.spec import Spec

    (tmp_path / "file").write_text("")
    spec = Spec(task="digits", optimizer="sgd", lr=0.1, batch=200, epochs=2, seed=0)
    with pytest.warns(UserWarning, match="cannot be written"):
        *_, end = train(spec, tmp_path / "file" / "run.pt")
    assert end.outcome == "not_reached"


def test_a_broken_checkpoint_is_no_obstacle(tmp_path):
    from carryclip_lab.engine.training import train
    from carryclip_lab.spec import Spec

    spec = Spec(task="digits", optimizer="sgd", lr=0.1, batch=200, epochs=2, seed=0)
    whole = [_timeless(event) for event in train(spec)]
    checkpoint = tmp_path / "run.pt"
    checkpoint.write_bytes(b"half a checkpoint")
    with pytest.warns(UserWarning, match="starts anew"):
        assert [_timeless(event) for event in train(spec, checkpoint)] == whole


def wait_for_an_epoch(process, path):
    """Until training is under way."""
    while process.poll() is None:
        if path.exists():
            with Store(path) as store:
                if any(epochs for epochs, _ in store.under_way().values()):
                    return
        time.sleep(0.1)
    raise AssertionError("the supervisor ended before a run was under way")


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def workers_of(process, least=1):
    """Worker processes, once there are some; a supervisor that is through has none."""
    while process.poll() is None:
        # The first child is multiprocessing's own, which only cleans up.
        if len(found := children(process.pid)) > least:
            return found[1:]
        time.sleep(0.05)
    return []


def test_kills_at_random_times_change_nothing(tmp_path):
    text = (
        f"seed = {list(range(max(2, KILLS // 2)))}\nepochs = 30\ntarget = 1.0\n"
        '[[grid]]\nmethod = "faulty_methods:slow"\n[[grid]]\nregion = "Norm(0.5)"\ncarry = "Gated()"\n'
    )
    study = study_file(tmp_path, text)
    code, out = run_study(tmp_path, study, tmp_path / "quiet.sqlite", workers=1)
    assert code == 0, out
    store, luck, kills = tmp_path / "killed.sqlite", random.Random(0), Counter()
    while kills.total() < KILLS:
        process = supervisor(tmp_path, study, store, workers=2, every=0.0)
        try:
            while process.poll() is None and kills.total() < KILLS:
                at_worker = luck.random() < 0.75
                workers = workers_of(process) if at_worker else [process.pid]
                time.sleep(luck.uniform(0.0, 3.0))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(luck.choice(workers or [process.pid]), signal.SIGKILL)
                    kills["worker" if at_worker and workers else "supervisor"] += 1
            if process.returncode is None and kills["supervisor"] < KILLS:
                process.kill()
        finally:
            out, _ = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGKILL), out
    code, out = run_study(tmp_path, study, store)
    assert code == 0, out
    assert min(kills["worker"], kills["supervisor"]) > 0
    assert rows(store) == rows(tmp_path / "quiet.sqlite")
    print(dict(kills))


def test_a_worker_that_is_stopped_politely_costs_its_run_a_new_start(tmp_path):
    text = 'seed = [0, 1]\nepochs = 40\ntarget = 1.0\n[[grid]]\nmethod = "faulty_methods:slow"\n'
    store = tmp_path / "a.sqlite"
    process = supervisor(tmp_path, study_file(tmp_path, text), store, workers=1, every=0.0)
    wait_for_an_epoch(process, store)
    os.kill(workers_of(process)[0], signal.SIGTERM)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert {outcome for _, outcome, _, _ in rows(store).values()} <= {"reached", "not_reached"}


def test_nohup_is_respected(tmp_path, small):
    script = tmp_path / "supervise.py"
    script.write_text(SUPERVISE, encoding="utf-8")
    arguments = ["nohup", sys.executable, str(script), str(small), str(tmp_path / "a.sqlite"), "{'workers': 1}"]
    with subprocess.Popen(arguments, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        wait_for_an_epoch(process, tmp_path / "a.sqlite")
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=300)
    assert process.returncode == 0


def test_a_failure_can_be_tried_again(tmp_path):
    text = 'seed = [0, 1]\nepochs = 1\n[[grid]]\nmethod = "faulty_methods:fail"\n'
    code, _ = run_study(tmp_path, study_file(tmp_path, text), tmp_path / "a.sqlite", workers=1)
    assert code == 1
    with Store(tmp_path / "a.sqlite") as store:
        assert store.retry("study", FAULTS) == 1
        assert store.progress("study") == {"waiting": 1, "not_reached": 1}


USURPER = """
from carryclip_lab import grid
from carryclip_lab.store.store import Store

def usurp(optimizer, spec):
    with Store("a.sqlite") as store:
        store.add(grid.load("other.toml"))
"""


def test_runs_that_another_study_of_the_name_has_driven_out_are_missed(tmp_path):
    (tmp_path / "usurper.py").write_text(USURPER, encoding="utf-8")
    study = study_file(tmp_path, 'seed = [0, 1, 2]\nepochs = 1\n[[grid]]\nmethod = "usurper:usurp"\n')
    other = study.read_text().replace("[0, 1, 2]", "[7, 8]")
    (tmp_path / "other.toml").write_text(other, encoding="utf-8")
    code, out = run_study(tmp_path, study, tmp_path / "a.sqlite", workers=1)
    assert code == 1, out
    assert "2 runs are not done" in " ".join(out.split())


def test_processes_that_work_together_say_what_they_leave_to_others(tmp_path, small, capsys):
    with Store(tmp_path / "a.sqlite") as store:
        store.add(grid.load(small))
        assert len(store.take("study", "someone elsewhere", limit=8)) == 8
    assert supervise([grid.load(small)], tmp_path / "a.sqlite", Options(), Console(), team=Team()) == 1
    assert "8 runs are not done" in " ".join(capsys.readouterr().out.split())


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000))
"""


def test_a_full_disk_stops_a_study_and_changes_nothing(tmp_path, small, undisturbed):
    code, out = run_study(tmp_path, small, tmp_path / "full.sqlite", before=FULL, workers=1)
    assert code != 0
    assert "StoreError" in out
    code, out = run_study(tmp_path, small, tmp_path / "full.sqlite", workers=1)
    assert code == 0, out
    assert rows(tmp_path / "full.sqlite") == rows(undisturbed[1])


MEETING = """
import os
import time
from pathlib import Path

def meet(optimizer, spec):
    here = Path("here")
    (here / str(os.getppid())).touch()  # a worker's parent is its supervisor
    begun = time.monotonic()
    while len(list(here.iterdir())) < 2:
        assert time.monotonic() - begun < 240, "nobody else has come"
        time.sleep(0.05)
"""


def test_two_supervisors_share_one_store(tmp_path):
    """The first run of each waits for the other's, so that neither can be late and find all the work done."""
    text = 'seed = [0, 1]\nepochs = 4\n[[grid]]\nmethod = "meeting:meet"\n[[grid]]\nregion = "Norm(0.5)"\n'
    study = study_file(tmp_path, text + 'carry = ["none", "full", "Gated()"]\n')
    (tmp_path / "meeting.py").write_text(MEETING, encoding="utf-8")
    (here := tmp_path / "here").mkdir()
    (here / "company for the one that works alone").touch()
    code, out = run_study(tmp_path, study, tmp_path / "one.sqlite", workers=1)
    assert code == 0, out
    for mark in here.iterdir():
        mark.unlink()
    both = [supervisor(tmp_path, study, tmp_path / "two.sqlite", workers=1) for _ in range(2)]
    for process in both:
        out, _ = process.communicate(timeout=300)
        assert process.returncode == 0, out
    assert {mark.name for mark in here.iterdir()} == {str(process.pid) for process in both}
    assert rows(tmp_path / "two.sqlite") == rows(tmp_path / "one.sqlite")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_is_clean_and_says_how_to_go_on(tmp_path, number):
    text = 'seed = [0, 1]\nepochs = 500\ntarget = 1.0\n[[grid]]\nmethod = "faulty_methods:slow"\n'
    store = tmp_path / "a.sqlite"
    process = supervisor(tmp_path, study_file(tmp_path, text), store, workers=1, every=0.0)
    wait_for_an_epoch(process, store)
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "To go on" in out
    assert f"carryclip report --store {store}" in out.replace("\n", " ")
    assert "Traceback" not in out
    with Store(store) as opened:
        assert opened.progress("study") == {"waiting": 2}
    assert list(tmp_path.glob("a.sqlite.checkpoints/*.pt"))


@pytest.mark.parametrize(
    ("group", "files", "kills"),
    [
        ("0::/mine", {"sys/fs/cgroup/mine/memory.events": 3, "sys/fs/cgroup/memory.events": 5}, 3),
        ("0::/", {"sys/fs/cgroup/memory.events": 5}, 5),
        ("0::/not/seen/here", {"sys/fs/cgroup/memory.events": 5}, 5),
        ("4:memory:/mine\n0::/", {"sys/fs/cgroup/memory/mine/memory.events": 3}, 7),
        ("0::/../../other", {"memory.events": 3}, 7),
        (None, {"sys/fs/cgroup/memory.events": 5}, 7),
    ],
)
def test_kills_for_want_of_memory_are_counted_where_we_are(tmp_path, group, files, kills):
    assert local._kernel_ooms(tmp_path) == 0
    for name, count in {**files, "proc/vmstat": 7}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"oom 90\noom_kill {count}\noom_group_kill 80\n", encoding="ascii")
    if group is not None:
        (tmp_path / "proc/self").mkdir()
        (tmp_path / "proc/self/cgroup").write_text(f"{group}\n", encoding="ascii")
    assert local._kernel_ooms(tmp_path) == kills


def test_the_dead_are_told_from_the_living():
    mine = owners.new_owner()
    assert not owners.is_dead(mine)
    where, _, luck = mine.rsplit("/", 2)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert owners.is_dead(f"{where}/{gone.pid}/{luck}")
    assert not owners.is_dead(f"elsewhere/pid:[1]/{gone.pid}/{luck}")


def test_specs_survive_the_way_to_a_worker():
    for spec in grid.load("digits-smoke").specs:
        assert type(spec).from_canonical(spec.canonical) == spec
        assert json.loads(spec.canonical)["seed"] == spec.seed


@pytest.mark.parametrize("batch", [20, 64])
def test_samples_are_of_the_steps_that_are_sampled(monkeypatch, batch):
    """Of which the clipper, left to itself, measures others."""
    from carryclip_lab.engine.methods import Samples
    from carryclip_lab.engine.training import train
    from carryclip_lab.spec import Spec

    seen = []
    take = Samples.take

    def spy(self, norm, clipper):
        seen.append((float(norm), clipper.metrics()["grad_norm"]))
        take(self, norm, clipper)

    monkeypatch.setattr(Samples, "take", spy)
    spec = Spec(task="digits", optimizer="sgd", lr=0.1, batch=batch, epochs=2, seed=3, region="Norm(0.5)", carry="full")
    list(train(spec))
    assert len(seen) >= 20
    for norm, told in seen:
        assert told == pytest.approx(norm, rel=1e-5)
