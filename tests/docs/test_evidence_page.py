"""The published trials: small, whole, of committed code, and with plain clipping's best rate inside its list."""

import json

import evidence
import published
import pytest

from carryclip_lab import grid
from carryclip_lab.analysis import rule
from carryclip_lab.analysis.answers import DEFAULT
from carryclip_lab.analysis.naming import CLIP
from carryclip_lab.analysis.worth import blocks

FOLDER = published.FOLDERS["evidence"]
AT_AN_END = {
    f"{trial} ({optimizer})"
    for trial in ("Bandit with rare rewards", "Bandit with steady rewards", "Even softmax")
    for optimizer in ("SGD", "momentum", "AdamW")
}
"""Trials with their optimizers where plain clipping's best learning rate is the first or the last that was tried."""


@pytest.fixture(scope="module")
def parts():
    return evidence.parts(FOLDER)


def test_they_are_small():
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 2_000_000


def test_they_are_runs_of_the_study_by_committed_code():
    import pyarrow.parquet

    planned = {spec.id for spec in grid.load(evidence.STUDY).specs}
    found, ends = evidence.records(FOLDER)
    assert found
    assert {record.spec.id for record in found} <= planned
    assert set(ends) == {record.spec.id for record in found}
    told = pyarrow.parquet.read_table(FOLDER / evidence.FILE, columns=["environment"]).column(0).unique().to_pylist()
    commits = {json.loads(each)["commit"] for each in told}
    assert all(commit and not commit.endswith("+") for commit in commits)


def test_cells_are_whole(parts):
    study = grid.load(evidence.STUDY)
    planned = {}
    for spec in study.specs:
        key = (spec.task, spec.optimizer, spec.region, spec.carry, spec.batch, spec.settings)
        planned.setdefault(key, set()).add(spec.id)
    here = {record.spec.id for part in parts for cell in part.cells for record in cell.records}
    assert all(ids <= here or not ids & here for ids in planned.values())


def test_the_rates_of_plain_clipping_do_not_end_at_its_best(parts):
    ends = {edge.line for edge in rule.edges(parts) if edge.method == CLIP.label}
    assert ends == AT_AN_END


def test_each_line_has_plain_clipping_and_the_default(parts):
    found = [block for part in parts for block in blocks(part)]
    assert found
    for block in found:
        assert block.drop_in(DEFAULT) is not None


def test_the_default_is_what_the_rule_picks(parts):
    assert rule.default(rule.lines(parts, rule.read("evidence")), rule.read("evidence")) == DEFAULT
