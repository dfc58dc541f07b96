"""The Python in README and docs runs, every example runs, and every public name is documented."""

import csv
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import figures
import gallery
import published
import pyarrow.parquet
import pytest
import radii
import table
import torch
import torch.distributed as dist

import carryclip
import carryclip.optax
import carryclip.theory
import carryclip.torch
from carryclip import CarryClipWarning
from carryclip_lab import grid
from carryclip_lab.analysis.shifts import shifts
from carryclip_lab.analysis.summary import summarise
from carryclip_lab.store.export import export
from carryclip_lab.store.store import Store
from snippets import snippets

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
APART = ("parallel.md", "frameworks.md")
"""Pages whose snippets need a process group or a trainer; each has a test of its own. Those of docs/howto are whole
scripts, and run by themselves in test_howto too."""
SNIPPETS = [page for page in PAGES if snippets(page) and page.name not in APART]


def surroundings():
    """What a reader of the documentation has at hand."""
    torch.manual_seed(0)
    model, other_model = (torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.01)
    loss_fn = torch.nn.functional.cross_entropy
    inputs, targets = torch.randn(16, 4), torch.randint(2, (16,))

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_fn(model(torch.randn(16, 4)), targets).backward()
            optimizer.step()

    second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    return {
        "model": model,
        "other_model": other_model,
        "optimizer": optimizer,
        "loss_fn": loss_fn,
        "inputs": inputs,
        "targets": targets,
        "loader": [(inputs, targets)] * 3,
        "train": train,
        "device": "cpu",
        "extra": torch.nn.Parameter(torch.zeros(2)),
        "sgd": torch.optim.SGD(second[0].parameters(), lr=0.1),
        "muon": torch.optim.SGD(second[0].parameters(), lr=0.1),
        "adamw": torch.optim.AdamW(second[1].parameters()),
        "writer": SimpleNamespace(add_scalar=lambda name, value, step: float(value)),
        "make": lambda: (model, torch.optim.SGD([{"params": part.parameters()} for part in model], lr=0.01)),
        "saved": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    }


@pytest.mark.parametrize("page", SNIPPETS, ids=lambda page: page.name)
def test_snippets_run(page, monkeypatch, tmp_path):
    """Blocks of a page share their names; a page may attach again and again, which a program may not."""
    monkeypatch.chdir(tmp_path)  # what they save
    monkeypatch.setattr("carryclip.torch._foreign.claim", lambda clipper, params, watch_only: None)
    names = surroundings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CarryClipWarning)
        for block in snippets(page):
            exec(compile(block, str(page), "exec"), names)


def test_no_page_with_snippets_is_left_out():
    written = {page for page in PAGES if "```python" in page.read_text(encoding="utf-8")}
    assert written == {*SNIPPETS, *(page for page in PAGES if page.name in APART)}
    assert sum(page.read_text(encoding="utf-8").count("```python") for page in PAGES) == sum(
        len(snippets(page)) for page in PAGES
    )


def test_the_page_on_radii_has_the_table_of_its_runs_and_its_sentences_agree_with_it():
    page = radii.PAGE.read_text(encoding="utf-8")
    assert radii.write_page(radii.read()) == page
    (said,) = re.findall(r"^As good as the best constant: (.*)$", page, re.MULTILINE)
    counts = {name: int(count) for name, count in re.findall(r"`(.*?)` in (\d+)", said)}
    starts = re.findall(r"`Norm\((\w+\([\d.]+\))\)` \|.*best of five constants in (\d+) of 12 lines", page)
    (agc,) = re.findall(r"`agc\(\)` was as good as the best constant in (\d+) lines", page)
    assert starts == [("ZScore(2.5)", str(counts["ZScore(2.5)"]))]
    assert int(agc) == counts["agc()"]


def test_snippets_about_trainers_run(tmp_path):
    """Each is a whole script; one process for all, because trainers take long to import and change global settings."""
    blocks = snippets(ROOT / "docs" / "frameworks.md")
    assert len(blocks) == 4
    script = "import json, sys\nfor block in json.load(sys.stdin):\n    exec(block, {'__name__': '__main__'})\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps(blocks),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CarryClipWarning" not in done.stderr


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_snippets_about_many_processes_run(alone, tmp_path, monkeypatch):
    """All but DeepSpeed's, whose engine test_deepspeed starts. What makes an optimizer starts from a fresh model."""
    monkeypatch.chdir(tmp_path)
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", CarryClipWarning)
        for block in snippets(ROOT / "docs" / "parallel.md"):
            if "model.parameters()" in block:
                names["model"] = torch.nn.Linear(4, 2)
            if "import deepspeed" not in block:
                exec(compile(block, "parallel.md", "exec"), names)
    assert "zero" in names


# The other examples have a test of their own below.
SHORT = ("one_line.py", "jax_digits.py", "which_radius.py", "lightning_digits.py", "hf_trainer.py")
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if path.name in SHORT]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example):
    assert gallery.printed(example.name)


def test_the_example_of_a_method_of_ones_own_runs(tmp_path):
    folder = shutil.copytree(ROOT / "examples" / "own_method", tmp_path / "own_method")
    chosen = ["--only", "seed=0", "--only", "batch=64", "--store", "own.sqlite", "--out", "own-report"]
    command = [sys.executable, "-m", "carryclip", "reproduce", "study.toml", *chosen, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    with Store(folder / "own.sqlite", create=False) as store:
        records = [record for record in store.records("shrinking-radius") if record.state == "done"]
        (own,) = [record for record in records if record.spec.method == "shrinking:shrinking"]
        radii = [epoch.radius_norm for epoch in store.epochs(own.spec.id)]
    assert {record.outcome for record in records} == {"reached"}
    assert len(records) == 4
    assert radii == sorted(radii, reverse=True)
    assert 2.0 > radii[0] > radii[-1] >= 0.5
    assert "shrinking:shrinking" in (folder / "own-report" / "report.html").read_text(encoding="utf-8")


def test_the_example_of_a_task_of_ones_own_runs(tmp_path):
    folder = shutil.copytree(ROOT / "examples" / "own_task", tmp_path / "own_task")
    assert len((folder / "diabetes.py").read_text().splitlines()) < 60
    chosen = ["--only", "seed=0", "--only", "lr=0.01", "--store", "own.sqlite", "--out", "own-report"]
    command = [sys.executable, "-m", "carryclip", "reproduce", str(folder / "study.toml"), *chosen, "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error on held-out patients" in (tmp_path / "own-report" / "report.html").read_text(encoding="utf-8")
    with Store(tmp_path / "own.sqlite", create=False) as store:
        before = [record for record in store.records("diabetes") if record.state == "done"]
    assert {record.outcome for record in before} == {"reached"}
    assert len(before) == 3
    assert all(record.spec.code for record in before)


def test_other_code_of_ones_own_is_another_run(tmp_path):
    """Nothing of the old numbers is shown for it."""
    folder = shutil.copytree(ROOT / "examples" / "own_task", tmp_path / "own_task")
    code = "from carryclip_lab.grid import load; print(load('study.toml').specs[0].id)"

    def first():
        return subprocess.run(
            [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
        ).stdout

    ids = [first(), first()]
    text = (folder / "diabetes.py").read_text()
    (folder / "diabetes.py").write_text(text.replace("std=0.1", "std=0.2"))
    assert ids[0] == ids[1] != first()


def test_the_docs_replay_a_run_of_a_study_that_ships():
    (shown,) = re.findall(r"carryclip replay ([0-9a-f]+)", (ROOT / "docs/experiments/index.md").read_text())
    assert len([spec for spec in grid.load("digits-smoke").specs if spec.id.startswith(shown)]) == 1


@pytest.mark.parametrize(
    ("example", "says"),
    [pytest.param("ddp.py", "", marks=pytest.mark.exhaustive), ("ddp.py", "--each-rank"), ("fsdp2.py", "")],
)
def test_examples_with_several_processes_run(example, says):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, str(ROOT / "examples" / example), *says.split()]
    # Sometimes gloo aborts when a process of FSDP2 ends, its work done; a bare model without carryclip does so too.
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    if example == "ddp.py":
        assert float(re.search(r"accuracy ([\d.]+)", done.stdout)[1]) > 0.9
    else:
        first, second = re.search(r"loss ([\d.]+), and ([\d.]+)", done.stdout).groups()
        assert first == second


def test_the_docs_show_what_the_watching_example_prints():
    command = [sys.executable, ROOT / "examples/watch_first.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = (ROOT / "docs/diagnostics.md").read_text().replace("\n    ", "\n")
    assert done.stdout.strip() in shown


def test_the_docs_show_what_the_dangers_example_prints():
    done = subprocess.run([sys.executable, ROOT / "examples/dangers.py"], capture_output=True, text=True, check=True)
    printed = [re.findall(r"-?\d+\.\d+", line)[-3:] for line in done.stdout.splitlines()[1:]]
    page = (ROOT / "docs" / "choosing.md").read_text().replace("−", "-")
    rows = re.findall(r"^\| `carry=\w.*$", page, re.MULTILINE)
    shown = [re.findall(r"-?\d+\.\d+", line)[-3:] for line in rows]
    assert [[float(x) for x in row] for row in shown] == [[float(x) for x in row] for row in printed]


@pytest.mark.parametrize("page", table.PAGES, ids=lambda page: page.name)
def test_tables_of_costs_come_from_the_committed_results(page):
    text = page.read_text()
    assert "<!-- bench: large -->" in text
    assert table.filled(text, json.loads(table.RESULTS.read_text())) == text, "run: python benchmarks/table.py --write"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_captions_and_tables_of_the_theory_come_from_its_figures(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- theory: " in text
    assert figures.filled(text) == text, "run: python benchmarks/figures.py --write"


@pytest.mark.parametrize("page", published.PAGES, ids=lambda page: page.name)
def test_results_come_from_the_published_runs(page):
    text = page.read_text(encoding="utf-8")
    assert "<!-- results: " in text
    assert published.filled(page) == text, "run: python benchmarks/published.py --write"


def test_a_store_with_the_published_runs_is_what_was_published(tmp_path):
    folder = published.FOLDERS["slice"]
    published.restore(folder, str(tmp_path / "again.sqlite"))
    with Store(tmp_path / "again.sqlite", create=False) as store:
        store.check()
        export(store, tmp_path)
    rows = [
        list(csv.DictReader((place / "runs.csv").read_text(encoding="utf-8").splitlines()))
        for place in (folder, tmp_path)
    ]
    assert len(rows[0]) == 8
    assert [{key: row[key] for key in rows[0][0]} for row in rows[1]] == rows[0]
    epochs = [pyarrow.parquet.read_table(place / "epochs.parquet").to_pylist() for place in (folder, tmp_path)]
    assert [{key: row[key] for key in epochs[0][0]} for row in epochs[1]] == epochs[0]


def test_the_readme_says_of_the_claims_what_the_published_runs_say():
    said = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    adam = {}
    for folder, study in (("claims", "cifar10-claims"), ("results", "cifar10-small")):
        found = published.records(published.FOLDERS[folder])[study]
        (summary,) = summarise(study, study, "paper", found, lambda run: [])
        (adam[folder],) = [
            shift for shift in shifts(summary) if (shift.cell.setting.optimizer, shift.cell.batch) == ("adam", 50)
        ]
    assert f"U-Clip with Adam at batch 50 is {adam['claims'].answer}, as the paper says" in said
    assert "it is slower" in said
    assert adam["results"].cell.median > adam["results"].base.median


def helper(name):
    """A module of the documentation's own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_doctests_become_code_and_stars_stay_stars():
    shown = helper("_doctests").rewritten("A x* and y*.\n\n>>> f(**a)\n[1.] [2.]\n\nArgs:\n    b: with `c*`.")
    assert shown == "A x\\* and y\\*.\n\n```pycon\n>>> f(**a)\n[1.] [2.]\n```\n\nArgs:\n    b: with `c*`."


def test_formulas_become_mathml():
    shown = helper("_mathml").on_page_content(
        '<p>A $<code>\\alpha &gt; 0</code>$ b</p><pre class="math"><code>x^2</code></pre>'
    )
    assert shown.count("<math") == 2
    assert "&#x003B1;" in shown
    assert "$" not in shown


BOUNDS = [carryclip.theory, carryclip.theory.bounds]


@pytest.mark.parametrize(
    "module", [carryclip, carryclip.torch, carryclip.optax, *BOUNDS], ids=lambda module: module.__name__
)
def test_every_public_name_is_documented(module):
    api = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    for name in module.__all__:
        if name != "__version__":
            assert re.search(rf"\b{name}\b", api), f"{name} is missing from docs/api"
            assert getattr(module, name).__doc__ or name == "Form", name  # a Literal has no docstring of its own


def test_local_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_map_in_contributing_is_the_house():
    """``python tests/house_map.py --write`` renews it."""
    import house_map

    assert (house_map.ROOT / "CONTRIBUTING.md").read_text() == house_map.written()
    assert all(house_map.first_line(path) for path in house_map.HOUSE.glob("**/*.py") if path.name != "__init__.py")
