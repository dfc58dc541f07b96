"""The studies that ask when to turn the carry on: what they hold, the commands that run them, the texts they need."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from carryclip_lab import grid
from carryclip_lab.analysis.naming import CLIP, METHODS, SHRUNK, method_of
from carryclip_lab.analysis.summary import summarise
from carryclip_lab.commands.plan import ask
from carryclip_lab.commands.reproduce import main
from carryclip_lab.data import text
from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine.settings import Options
from carryclip_lab.spec import OPTIMIZERS
from carryclip_lab.store.records import Record
from carryclip_lab.store.store import Store

STUDIES = ("evidence-smoke", "evidence-small")


def parts(name):
    study = grid.load(name)
    records = [Record(spec, "waiting", None, None, None, None, {}) for spec in study.specs]
    return summarise(study.name, study.title, study.tier, records, lambda run: [])


@pytest.mark.parametrize("name", STUDIES)
def test_there_are_trials_of_every_kind(name):
    found = parts(name)
    titles = [part.subject.title for part in found]
    assert len(set(titles)) == len(titles)  # each has figures and a table of its own
    assert {part.subject.kind for part in found} == {"signal", "ordinary", "corruption", "frozen"}
    assert sum(part.subject.kind == "signal" for part in found) >= (4 if name == "evidence-small" else 3)
    assert sum(part.subject.kind == "corruption" for part in found) >= 2


@pytest.mark.parametrize("name", STUDIES)
def test_every_trial_has_every_optimizer(name):
    for part in parts(name):
        found = {OPTIMIZERS[cell.setting.optimizer] for cell in part.cells}
        assert found == {"SGD", "momentum", "AdamW"}, part.subject.title


@pytest.mark.parametrize("name", STUDIES)
def test_all_methods_of_a_trial_have_the_same_seeds_and_plain_clippings_learning_rates(name):
    for part in parts(name):
        for cell in part.cells:
            plain = part.find(cell.setting.optimizer, part.main_region, CLIP, cell.batch)
            assert set(plain.runs) <= set(cell.runs), (part.subject.title, cell.setting)
            assert {frozenset(seeds) for seeds in cell.runs.values()} == {frozenset(plain.runs[min(plain.runs)])}


def test_the_small_tier_has_every_method_and_seeds_enough():
    for part in parts("evidence-small"):
        methods = {cell.setting.method for cell in part.cells}
        if part.subject.kind == "frozen":
            assert set(METHODS[1:]) <= methods
            continue
        assert set(METHODS) <= methods
        radii = {(method.radius, bool(method.carry)) for method in methods if method.radius}
        assert radii == {(rule, carry) for rule in ("Quantile(0.9)", "RMS(1.0)") for carry in (False, True)}
        net = part.task in ("text", "classify", "people")
        assert {cell.seeds for cell in part.cells} == {5 if net else 8}


def test_what_decides_most_is_run_first():
    specs = grid.load("evidence-small").specs
    late = [place for place, spec in enumerate(specs) if method_of(spec).radius]
    early = [place for place, spec in enumerate(specs) if spec.task == "amounts" and method_of(spec) in (CLIP, SHRUNK)]
    assert max(early[:300]) < min(late)


def test_other_remedies_cost_as_many_examples():
    for part in parts("evidence-small"):
        if len(part.batches) < 2:
            continue
        examples = {record.spec.batch * record.spec.recipe.steps for cell in part.cells for record in cell.records}
        assert len(examples) == 1  # a larger batch takes as many fewer steps
    (visits,) = (part for part in parts("evidence-small") if part.subject.title == "Visits to the doctor")
    assert {"Huber loss", "Poisson loss"} <= {method.label for method in visits.methods}


def test_a_trial_runs_to_its_answers(tmp_path):
    code = main(
        ["evidence"],
        tier="smoke",
        only=["task=critic", "optimizer=sgd"],
        options=Options(),
        store=str(tmp_path / "store.sqlite"),
        resume=True,
        out=str(tmp_path / "report"),
    )
    assert code == 0
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "Should I turn the carry on?" in page
    told = json.loads((tmp_path / "report" / "claims.json").read_text(encoding="utf-8"))
    (policies,) = told["together"]["policies"]["table"]
    gain = dict(zip(told["together"]["policies"]["heads"], policies, strict=True))["Shrunk (default)"]
    assert gain.startswith("▲ +0.")  # rare rewards are what the carry is for
    (answers,) = told["together"]["answers"]["table"]
    assert answers[:3] == ["signal", "Critic with rare rewards", "SGD"]
    (family,) = told["rules"]["evidence-smoke"]["families"]
    assert family[:2] == ["Regression of skewed amounts, and critics", "wins"]
    assert (tmp_path / "report" / "figures" / "evidence-smoke-critic-with-rare-rewards" / "worth.svg").is_file()


def test_a_language_model_on_a_text_of_ones_own(tmp_path):
    file = tmp_path / "mine.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 300)
    given = {"tier": None, "resume": True, "out": str(tmp_path / "report"), "store": str(tmp_path / "store.sqlite")}
    only = ["task=text", "seed=0", "lr=0.003", "carry=full"]
    assert main(["evidence-smoke"], only=only, options=Options(data=str(file)), **given) == 0
    with Store(given["store"]) as store:
        (record,) = (record for record in store.records("evidence-smoke") if record.state == "done")
    assert record.spec.recipe.text == f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}"
    assert record.spec.recipe.judged().title == "Language model, a text"


SHAKESPEARE = """
name = "shakespeare"
tier = "small"
[[grid]]
task = "text"
optimizer = "adamw"
lr = 0.001
batch = 4
epochs = 1
seed = 0
"""


def test_what_is_not_here_is_said_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path / "empty"))
    study = str(tmp_path / "shakespeare.toml")
    Path(study).write_text(SHAKESPEARE, encoding="utf-8")
    given = {"tier": None, "only": ["task=text"], "resume": True, "out": str(tmp_path / "r")}
    assert main([study], options=Options(), store=str(tmp_path / "s.sqlite"), **given) == 2
    assert "carryclip data tinyshakespeare" in capsys.readouterr().out
    assert not (tmp_path / "s.sqlite").exists()
    options = {
        "tier": None,
        "store": "s.sqlite",
        "workers": 1,
        "threads": 1,
        "device": "cpu",
        "images_per_second": None,
    }
    assert ask([study], data=None, **options) == 2
    said = capsys.readouterr().out
    assert "shakespeare is left out" in said
    assert "carryclip data" in said


def test_the_text_is_fetched_once_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CARRYCLIP_DATA", str(tmp_path / "cache"))
    file = tmp_path / "input.txt"
    file.write_bytes(b"not what it should be " * 1000)
    assert text.main(str(file)) == 2
    assert "is not the official file" in capsys.readouterr().out
    with pytest.raises(DataError, match="Fetch it with: carryclip data tinyshakespeare"):
        text.load_text("tinyshakespeare")
    assert text.main(str(tmp_path / "nowhere.txt")) == 2
    assert "cannot be read" in capsys.readouterr().out
    right = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
    monkeypatch.setattr(text, "SHAKESPEARE", replace(text.SHAKESPEARE, files={"input.txt": right}, size=22_000))
    assert text.main(str(tmp_path)) == 0  # the folder that it is in will do
    assert len(text.load_text("tinyshakespeare")) == 22_000
    (tmp_path / "cache" / "tinyshakespeare" / "input.txt").write_bytes(b"spoilt")
    with pytest.raises(DataError, match="is not the official file"):
        text.load_text("tinyshakespeare")


BAD = """
name = "bad"
tier = "smoke"
[defaults]
task = "bandit"
optimizer = "sgd"
lr = 0.1
batch = 4
epochs = 1
seed = 0
region = "Norm(0.1)"
[methods.alone]
region = ""
[methods.policies]
carry = ["none", "full"]
[[grid]]
methods = {}
"""


def test_sets_of_methods():
    study = grid.read(BAD.format('["alone", "policies"]'), "bad.toml")
    assert [spec.label for spec in study.specs] == ["none", "clip", "U-Clip"]
    staged = grid.read(BAD.format('["alone", "policies"]').replace('region = ""', 'region = ""\nstage = 1'), "bad.toml")
    assert [spec.label for spec in staged.specs] == ["clip", "U-Clip", "none"]
    with pytest.raises(ValueError, match="did you mean 'policies'"):
        grid.read(BAD.format('["alone", "policy"]'), "bad.toml")
    with pytest.raises(ValueError, match="stage must be a whole number"):
        grid.read(BAD.format('["alone"]\nstage = "late"'), "bad.toml")
    with pytest.raises(ValueError, match="methods must be a list of names"):
        grid.read(BAD.format('"alone"'), "bad.toml")
