"""The tutorial's notebook runs from top to bottom, shows what it says, and is what the site shows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOK = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))

RUN = """
import json, sys
names = {}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
kept = {name: names["settled"](path) for name, path in names["paths"].items()}
kept |= {"symmetric " + name: total for name, total in names["symmetric"].items()}
kept |= {"jax plain": names["train_jax"](names["plain"])[0], "jax carried": names["total"]}
kept["delay"] = names["hasty"].metrics()["delay"]
kept["sent at once"] = float(names["jax_metrics"](names["state"])["delay"])
print("KEPT", json.dumps(kept))
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What the notebook prints, and the totals it ends with."""
    folder = tmp_path_factory.mktemp("tutorial")
    command = [sys.executable, "-W", "error", "-c", RUN, str(DOCS / "tutorial.ipynb")]
    surroundings = {**os.environ, "MPLBACKEND": "Agg"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=surroundings)
    assert done.returncode == 0, done.stderr
    assert list(folder.iterdir()) == []  # it leaves nothing behind
    printed, kept = done.stdout.split("KEPT ")
    return printed, json.loads(kept)


def test_plain_clipping_loses_much_of_the_total_and_the_default_wins_most_of_it_back(run):
    _, total = run
    assert total["no clipping"] == pytest.approx(1.0, abs=0.15)
    assert total["clip_grad_norm_(1.0)"] < 0.65
    assert total["UClip(optimizer, Norm(1.0))"] > 0.8
    assert total["jax plain"] < 0.65
    assert total["jax carried"] > 0.8


def test_where_noise_is_symmetric_there_is_nothing_to_repair(run):
    _, total = run
    plain, default = total["symmetric carry=False"], total["symmetric the default"]
    assert plain == pytest.approx(total["symmetric no clipping"], abs=0.1)
    assert default == pytest.approx(plain, abs=0.05)


def test_the_hasty_carry_is_seen_to_wait_and_warned_of(run):
    printed, kept = run
    assert kept["delay"] > 100
    assert kept["sent at once"] < 2
    assert "often trains far worse" in printed
    assert "winding up" in printed


def test_it_resumes_to_the_last_bit(run):
    assert "the same to the last bit: True" in run[0]


def test_the_notebook_is_kept_without_outputs():
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_the_notebook_follows_its_format():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)


def test_the_page_has_the_cells_of_the_notebook():
    command = [sys.executable, DOCS / "_tutorial.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
