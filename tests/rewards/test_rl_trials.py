"""The trials behind the page on reinforcement learning: their rules, what they measure, and what the page quotes."""

import numpy as np
import pytest
import rl

from carryclip_lab.tasks._critic import returns


def test_the_tables_of_the_page_come_from_the_committed_runs():
    page = rl.PAGE.read_text(encoding="utf-8")
    assert rl.MARK in page
    assert rl.write_page(rl.read()) == page, "run: python benchmarks/rl.py --write"


def test_the_picture_of_the_page_comes_from_the_committed_runs(monkeypatch, tmp_path):
    committed = rl.PICTURE.read_text(encoding="utf-8")
    monkeypatch.setattr(rl, "PICTURE", tmp_path / "critics.svg")
    rl.draw(rl.read())
    assert rl.PICTURE.read_text(encoding="utf-8") == committed, "run: python benchmarks/rl.py --write"


def test_runs_are_those_of_the_plan_and_no_method_is_missing():
    found = rl.read()
    assert set(found) <= set(rl.runs())
    assert {key[:2] for key in found} == {key[:2] for key in rl.runs()}


def test_a_run_that_is_published_can_be_made_again():
    key = ("chain", "default", 0)
    assert rl.trial(*key) == pytest.approx(rl.read()[key], rel=0.02)  # other processors round otherwise


def test_returns_by_hand():
    values = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]])
    rewards = np.array([[1.0], [2.0], [4.0], [8.0], [16.0]])
    ends = np.array([[False], [True], [False], [True], [False]])
    cuts = np.array([[False], [False], [False], [True], [False]])
    told, true, sums = returns(values, rewards, ends, cuts, 0.5)
    assert told.tolist() == [2.0, 1.0], "neither what was cut off nor what has not ended"
    assert true.tolist() == [2.0, 2.0]
    assert sorted(sums) == [3.0, 12.0]


def results(calibration, returned):
    """The same figures for each seed, and a little spread."""
    return {
        (environment, method, seed): {
            "calibration": calibration.get(method, 1.0) + 0.01 * (seed - 2),
            "error": 0.0,
            "return": returned.get(method, 400.0) + seed,
        }
        for environment, method, seed in rl.runs()
    }


@pytest.mark.parametrize(
    ("plain", "ours", "verdict"), [(0.6, 0.95, "holds"), (0.8, 1.0, "does not hold"), (0.6, 0.8, "does not hold")]
)
def test_the_rule_about_critics(plain, ours, verdict):
    judge = rl.Judge(results({"clip 0.5": plain, "default": ours}, {}))
    assert judge.critic("bandit", "default").startswith(verdict)


@pytest.mark.parametrize(("ours", "verdict"), [(400, "trains as before"), (380, "trains as before"), (350, "does not")])
def test_the_rule_about_cart_pole(ours, verdict):
    assert f" {verdict}" in rl.Judge(results({}, {"default": float(ours)})).cart_pole()


def test_runs_that_are_missing_are_left_out_and_said():
    found = results({}, {})
    del found["lake", "none", 3]
    judge = rl.Judge(found)
    assert judge.seeds("lake", "none") == [0, 1, 2, 4]
    assert judge.seeds("lake", "default") == [0, 1, 2, 3, 4]
    assert judge.gain("lake", "default", "none").mean == 0, "compared seed by seed"
    assert "209 of 210 runs" in rl.table(found)
    assert rl.table({}) == "Some methods have not run yet."


def test_two_seeds_are_too_few_for_a_verdict():
    judge = rl.Judge({key: found for key, found in results({"clip 0.5": 0.5}, {}).items() if key[2] < 2})
    assert "is not judged" in judge.critic("bandit", "default")
    assert "is not judged" in judge.cart_pole()
    assert "too few seeds" in judge.rewards("bandit", "clipped")
