"""Studies from the command line, and what the commands say of bad input."""

import contextlib
import csv
import errno
import io
import json
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import replace

import pyarrow.parquet
import pytest

from carryclip.cli import main
from carryclip_lab import cli, grid
from carryclip_lab.grid import Study
from carryclip_lab.spec import Spec
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.store import Store

STUDY = """
name = "tiny"
title = "A study for tests"
tier = "smoke"
[defaults]
task = "digits"
optimizer = "sgd"
lr = [0.1, 0.01]
batch = 128
seed = [0, 1]
epochs = 3
typical = 2.5
[[grid]]
[[grid]]
region = "Norm(0.5)"
carry = "full"
"""


SPEC = Spec(task="digits", optimizer="sgd", lr=0.1, batch=16, epochs=3, seed=0)


def run(*arguments, cwd):
    command = [sys.executable, "-c", "from carryclip.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, env=None)
    return done.returncode, done.stdout + done.stderr


def say(*arguments, cwd, errors=True):
    """As ``run``, in this process, which has imported by now what a new one would take seconds to."""
    heard = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(heard),
        contextlib.redirect_stderr(heard if errors else io.StringIO()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        warnings.filterwarnings("ignore", "Cyclopts application invoked without tokens")  # it wonders at pytest
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["carryclip", *map(str, arguments)])
        try:
            main()
        except SystemExit as ended:
            return ended.code, heard.getvalue()
    raise AssertionError("main always exits")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder where the study has been run."""
    folder = tmp_path_factory.mktemp("study")
    (folder / "tiny.toml").write_text(STUDY, encoding="utf-8")
    code, out = run("reproduce", "tiny.toml", "--store", "a.sqlite", "--out", "report", "--workers", 1, cwd=folder)
    assert code == 0, out
    assert "8 of 8 runs" in out
    assert "report.html" in out
    return folder


def test_a_part_of_a_study_then_the_rest(tmp_path):
    (tmp_path / "tiny.toml").write_text(STUDY, encoding="utf-8")
    chosen = ("reproduce", "tiny.toml", "--store", "a.sqlite", "--only", "lr=0.1", "--only", "region=Norm(0.5)")
    code, out = run(*chosen, "--workers", 1, cwd=tmp_path)
    assert code == 0, out
    with Store(tmp_path / "a.sqlite") as store:
        done = [record.spec for record in store.records("tiny") if record.state == "done"]
        assert store.progress("tiny")["waiting"] == 6
    assert {(spec.lr, spec.label) for spec in done} == {(0.1, "U-Clip")}
    assert "2 of 2 runs" in out
    assert "(the study has 6 more)" in out
    assert len(done) == 2
    page = (tmp_path / "carryclip-report" / "report.html").read_text(encoding="utf-8")
    (command,) = re.findall(r"Go on with <code>carryclip (.*)</code>", page)
    assert command == "reproduce tiny.toml --store a.sqlite"
    assert ">no run done<" in page  # whether it was left out or is yet to come
    code, out = run(*shlex.split(command), "--workers", 1, cwd=tmp_path)
    assert code == 0, out
    with Store(tmp_path / "a.sqlite") as store:
        assert len(store.done()) == 8


def test_status_counts_and_is_light(place):
    code, out = say("status", "--store", "a.sqlite", cwd=place)
    assert code == 0
    assert "8 of 8" in out
    code = (
        "import sys; import carryclip_lab.commands.status; print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


def test_studies_are_listed_with_what_only_can_choose(place):
    code, out = say("studies", cwd=place)
    assert code == 0
    assert all(name in out for name in (*grid.names(), "aliasing", "corrupted-rank"))
    code, out = say("studies", "tiny.toml", cwd=place)
    assert code == 0
    assert re.search(r"lr +0\.1, 0\.01", out)
    assert "task" not in out  # the same in all runs
    assert "carryclip reproduce tiny.toml --only field=value" in out


def test_programs_read_the_same_as_json(place):
    said = {}
    plan = "plan tiny.toml --store a.sqlite --workers 1"
    for words in ("studies tiny.toml", "status --store a.sqlite", plan, "doctor"):
        code, out = say(*words.split(), "--json", cwd=place, errors=False)
        assert code == 0, out
        said[words.split()[0]] = json.loads(out)
    assert said["studies"]["studies"][0]["choices"]["lr"] == [0.1, 0.01]
    assert (
        said["status"]["studies"][0]["counts"]["reached"] + said["status"]["studies"][0]["counts"]["not_reached"] == 8
    )
    assert [said["plan"]["studies"][0][key] for key in ("study", "runs", "done")] == ["tiny", 8, 8]
    assert said["doctor"]["checks"]["torch"]["outcome"] == "works"


def test_status_says_that_nothing_failed(place):
    code, out = say("status", "--failed", "--store", "a.sqlite", cwd=place)
    assert code == 0
    assert "No run of a.sqlite has failed." in out


def test_a_full_disk_is_named(place, tmp_path, monkeypatch, capsys):
    """SQLite's own error, as it comes when no page can be added to the file."""
    (copy := tmp_path / "b.sqlite").write_bytes((place / "a.sqlite").read_bytes())
    study = Study("big", "for tests", "smoke", tuple(replace(SPEC, seed=seed) for seed in range(2000)))

    def add():
        with Store(copy) as store:
            store._db.execute("PRAGMA max_page_count = 10")
            store.add(study)

    with pytest.raises(StoreError, match=f"the disk that holds {tmp_path} is full .* MB free") as caught:
        add()
    assert "the same command again" in str(caught.value)

    def full(*arguments, **given):
        try:
            raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "report" / "x.pdf"))
        except OSError:
            raise AttributeError("of a file that cannot be closed")  # noqa: B904 (as Matplotlib does)

    monkeypatch.setattr(cli, "app", full)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert f"The disk that holds {tmp_path / 'report' / 'x.pdf'} is full." in capsys.readouterr().err


def test_watching_ends_when_all_is_done(place):
    assert say("status", "--watch", "--store", "a.sqlite", cwd=place)[0] == 0


def test_plan_counts_runs_and_says_what_to_type(place):
    code, out = say("plan", "tiny.toml", "--store", "none.sqlite", "--workers", 1, cwd=place)
    assert code == 0, out
    line = next(line for line in out.splitlines() if "tiny" in line and "smoke" in line)
    assert re.findall(r"[\d,.]+", line)[:2] == ["8", "0"]
    assert "carryclip reproduce tiny.toml" in out
    assert "Timing 1 of " in out


def test_replay_is_the_same_and_notices_what_is_not(place, tmp_path):
    with Store(place / "a.sqlite") as store:
        run_id = next(iter(store.records("tiny"))).spec.id
        (copy := tmp_path / "b.sqlite").write_bytes((place / "a.sqlite").read_bytes())
        first = store.epochs(run_id)[0]
    code, out = say("replay", run_id[:8], "--store", place / "a.sqlite", cwd=place)
    assert code == 0, out
    assert "3 epochs is the same" in out
    with Store(copy) as store:
        store._db.execute("UPDATE epochs SET loss = loss + 1e-12 WHERE run = ? AND epoch = 1", (run_id,))
        store._db.execute("DELETE FROM digests")  # without which it would be found before it is done again
    code, out = say("replay", run_id, "--store", copy, cwd=place)
    assert code == 1
    assert repr(first.loss) in out


def test_export_has_every_run_and_epoch(place):
    code, out = say("export", "--store", "a.sqlite", "--out", "tables", cwd=place)
    assert code == 0, out
    with (place / "tables" / "runs.csv").open(encoding="utf-8") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 8
    assert {run["label"] for run in runs} == {"none", "U-Clip"}
    epochs = pyarrow.parquet.read_table(place / "tables" / "epochs.parquet")
    assert epochs.num_rows == 24
    assert str(epochs.schema.field("loss").type) == "double"
    assert epochs.column("carry_norm").null_count == 12  # the runs without clipping
    table = pyarrow.parquet.read_table(place / "tables" / "runs.parquet")
    assert table.column("run").to_pylist() == [run["run"] for run in runs]
    assert str(table.schema.field("reached").type) == "int64"


def test_merging_two_stores(place, tmp_path):
    code, out = say("merge", tmp_path / "all.sqlite", place / "a.sqlite", cwd=place)
    assert code == 0
    assert "8 runs and 8 results" in out
    code, out = say("merge", tmp_path / "all.sqlite", place / "a.sqlite", cwd=place)
    assert "0 runs and 0 results" in out
    with Store(tmp_path / "all.sqlite") as store:
        assert store.title("tiny") == ("A study for tests", "smoke")
        assert store.files() == {"tiny": "tiny.toml"}


def test_beginning_anew_sets_the_old_store_aside(place, tmp_path):
    (tmp_path / "a.sqlite").write_bytes((place / "a.sqlite").read_bytes())
    gone = [sys.executable, "-c", "from carryclip_lab.engine.owners import new_owner; print(new_owner(), end='')"]
    dead = subprocess.run(gone, capture_output=True, text=True, check=True).stdout
    with Store(tmp_path / "a.sqlite") as store:  # one that was killed
        store.add(Study("more", "More", "smoke", (replace(next(store.records("tiny")).spec, seed=7),)))
        assert store.take("more", dead)
    (tmp_path / "tiny.toml").write_text(STUDY, encoding="utf-8")
    code, out = run("reproduce", "tiny.toml", "--store", "a.sqlite", "--no-resume", "--only", "lr=0.1",
                    "--only", "seed=0", "--workers", 1, cwd=tmp_path)  # fmt: skip
    assert code == 0, out
    (aside,) = tmp_path.glob("a-until-*.sqlite")
    with Store(aside) as store:
        assert len(store.done()) == 8
    with Store(tmp_path / "a.sqlite") as store:
        assert len(store.done()) == 2


def test_the_report_judges_and_records(place):
    told = json.loads((place / "report" / "claims.json").read_text(encoding="utf-8"))
    assert {claim["verdict"] for claim in told["claims"]} == {"not run at this size"}
    assert {claim["command"] for claim in told["claims"]} == {"carryclip reproduce tiny.toml"}
    captions = [path.read_text(encoding="utf-8") for path in (place / "report" / "figures" / "tiny").glob("*.txt")]
    assert captions
    assert all(caption.endswith("Command: carryclip reproduce tiny.toml\n") for caption in captions)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["reproduce"], "Which study?"),
        (["reproduce", "cifar10-smal"], "There is no study 'cifar10-smal'"),
        (["reproduce", "nowhere.toml"], "There is no study file nowhere.toml"),
        (["reproduce", "bad.toml"], "there is no 'optimiser'; did you mean 'optimizer'?"),
        (["reproduce", "tiny.toml", "--only", "batchsize=3"], "there is no 'batchsize'; did you mean 'batch'?"),
        (["reproduce", "tiny.toml", "--only", "batch"], "--only wants field=value"),
        (["reproduce", "tiny.toml", "--only", "batch=3"], "No run is left by --only: none has batch 3; there are 128."),
        (["reproduce", "tiny.toml", "--only", "optimizer=sgdd"], "did you mean 'sgd'?"),
        (["reproduce", "tiny.toml", "--only", "carry=full", "--only", "region=None"], "none with all of them"),
        (["reproduce", "theroy"], "did you mean 'theory'?"),
        (["reproduce", "tiny.toml", "bias"], "bias is a figure of the theory"),
        (["studies", "evidence-smal"], "did you mean 'evidence-small'?"),
        (["reproduce", "tiny.toml", "--only", "region=Nrom(0.5)"], "did you mean 'Norm'?"),
        (["reproduce", "tiny.toml", "--store", "tiny.toml"], "cannot be opened as a store"),
        (["reproduce", "tiny.toml", "--workers", "0"], "--workers must be at least 1"),
        (["reproduce", "tiny.toml", "--threads", "0"], "--threads must be at least 1"),
        (["reproduce", "tiny.toml", "--timeout", "-1"], "--timeout must be above 0"),
        (["reproduce", "tiny.toml", "--device", "cuda"], "Cannot train on 'cuda' here"),
        (["reproduce", "tiny.toml", "--engine", "ray", "--device", "cuda"], "--gpus 0.25"),
        (["reproduce", "tiny.toml", "--theory", "nowhere"], "nowhere has no figures of the theory"),
        (["reproduce", "[/x].toml"], "There is no study file [/x].toml"),
        (["reproduce", "method.toml"], "The method 'nowhere:nothing' cannot be loaded"),
        (["reproduce", "large.toml"], "digits has 1,438 training examples, not 5,000"),
        (["reproduce", "brackets.toml"], "a grid begins with [[grid]]"),
        (["plan", "tiny.toml", "--threads", "0"], "--threads must be at least 1"),
        (["plan", "nothing"], "There is no study 'nothing'"),
        (["status", "--store", "none.sqlite"], "There is no store none.sqlite"),
        (["report", "--store", "none.sqlite"], "There is no store none.sqlite"),
        (["report", "other", "--store", "a.sqlite"], "has no study 'other'"),
        (["replay", "zz", "--store", "a.sqlite"], "No run in a.sqlite with an id that starts with 'zz'"),
        (["replay", "", "--store", "a.sqlite"], "8 runs in a.sqlite"),
        (["export", "--store", "none.sqlite"], "There is no store none.sqlite"),
        (["merge", "all.sqlite", "none.sqlite"], "There is no store none.sqlite"),
    ],
)
def test_bad_input_says_what_is_wrong(place, arguments, message):
    (place / "bad.toml").write_text(STUDY.replace("optimizer", "optimiser"), encoding="utf-8")
    (place / "method.toml").write_text(STUDY + '[[grid]]\nmethod = "nowhere:nothing"\n', encoding="utf-8")
    (place / "large.toml").write_text(STUDY.replace("epochs", "examples = 5000\nepochs"), encoding="utf-8")
    (place / "brackets.toml").write_text(STUDY.partition("[[grid]]")[0] + "[grid]\n", encoding="utf-8")
    code, out = say(*arguments, cwd=place)
    assert code == 2, out
    assert message in " ".join(out.split()), out
    assert "Traceback" not in out
