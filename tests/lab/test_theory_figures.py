"""The figures of the theory: their files, their captions, and the rules by which claims are judged."""

import csv
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from carryclip.theory import calculator
from carryclip_lab import cli
from carryclip_lab.theory_figures import claims, regret, sweeps
from carryclip_lab.theory_figures.main import ALONE, STUDIES, main
from carryclip_lab.theory_figures.study import Scale, side_by_side, slope

SMALL = Scale(steps=400, seeds=40, points=5)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_leaves_figure_caption_and_numbers(name, tmp_path, capsys):
    assert main(name, SMALL, str(tmp_path)) == 0
    files = {path.suffix: path for path in tmp_path.iterdir()}
    judged = json.loads(files.pop(".json").read_text(encoding="utf-8"))
    assert judged["setting"]["seeds"] == 40
    page = files.pop(".html").read_text(encoding="utf-8")
    assert files[".txt"].read_text(encoding="utf-8").split()[0] in page
    assert set(files) == {".png", ".svg", ".pdf", ".csv", ".txt"}
    assert all(path.stem == name and path.stat().st_size > 500 for path in files.values() if path.suffix != ".txt")
    caption = files[".txt"].read_text(encoding="utf-8")
    assert re.search(r"40 seeds|8 seeds|dimensions 1 to 1000", caption)
    with files[".csv"].open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 10
    assert not any(value in ("nan", "inf") for row in rows for value in row.values())
    said = capsys.readouterr().out
    assert "Open" in said
    if name in ("aliasing", "quadratics", "bias", "carry-bounds", "adaptive-bounds", "regret"):
        assert "not run at this" in said


def test_figures_that_were_stopped_go_on(tmp_path):
    small = ["--steps", "400", "--seeds", "40", "--points", "5", "--out", "figures"]
    # A shell lets what it starts in the background ignore Ctrl-C, tests among them.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    start = f"{heed}; from carryclip.cli import main; main()"
    line = [sys.executable, "-c", start, "reproduce", "theory", *small]
    going = subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (tmp_path / "figures" / "unfinished.json").exists():
        assert going.poll() is None, going.communicate()[0]
        time.sleep(0.02)
    going.send_signal(signal.SIGINT)
    said, _ = going.communicate()
    assert going.returncode == 130, said
    assert "Traceback" not in said
    assert "To go on: the same command again." in said
    assert "of 10 figures" in said
    again = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "done before" in again.stdout
    page = (tmp_path / "figures" / "figures.html").read_text(encoding="utf-8")
    assert page.count("<figure") == len(STUDIES)
    judged = json.loads((tmp_path / "figures" / "claims.json").read_text(encoding="utf-8"))["claims"]
    assert {claim["id"] for claim in judged} >= {"T1", "T2", "T3", "T4"}
    assert not (tmp_path / "figures" / "unfinished.json").exists()


def test_what_was_begun_at_another_size_is_begun_anew(tmp_path):
    assert main("bias", SMALL, str(tmp_path)) == 0
    record = {"setting": {"seeds": 3}, "done": {"bias": []}}
    (tmp_path / "unfinished.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "bias.png").unlink()
    assert main("bias", SMALL, str(tmp_path)) == 0
    assert (tmp_path / "bias.png").exists()


def test_the_same_seed_draws_the_same_figure(tmp_path):
    for folder in ("a", "b"):
        main("carry-bounds", SMALL, str(tmp_path / folder))
    for kind in ("svg", "csv", "txt"):
        one, other = ((tmp_path / folder / f"carry-bounds.{kind}").read_bytes() for folder in ("a", "b"))
        assert one == other, kind


def test_readings_of_g_and_pooling():
    noise, gradient = (
        Scale(steps=300, seeds=30, points=5, reading=reading, pooled=True) for reading in ("noise", "gradient")
    )
    for scale in (noise, gradient):
        result = sweeps.CARRY_STUDY.present(scale, sweeps.CARRY_STUDY.compute(scale, lambda done, total: None))
        assert scale.said in result.caption
        labels = [text.get_text() for text in result.figure.axes[0].get_legend().get_texts()]
        assert "seen, pooled over 100 times" in labels
    low, high = (sweeps.levels(sweeps.CARRY[0], scale) for scale in (noise, gradient))
    assert (low["printed"] < high["printed"]).all()
    assert (low["sharp"] == high["sharp"]).all()  # it does not know G


def test_where_clipping_does_nothing_the_carry_is_zero():
    """Three quarters of the paper's sweep of alpha."""
    result = sweeps.CARRY_STUDY.present(SMALL, sweeps.CARRY_STUDY.compute(SMALL, lambda done, total: None))
    for row in result.rows:
        assert row["no_op"] == (row["margin"] >= row["noise"])
        assert (row["seen"] == 0.0) or not row["no_op"]
    share = np.mean(np.linspace(0.1, 1.0, 20) >= np.sqrt(0.1))
    assert share == 0.75


@pytest.mark.parametrize("study", [sweeps.CARRY_STUDY, sweeps.ADAPTIVE_STUDY], ids=["carry", "adaptive"])
def test_the_figures_bounds_lie_above_what_was_seen(study):
    result = study.present(SMALL, study.compute(SMALL, lambda done, total: None))
    for row in result.rows:
        assert row["seen"] <= min(
            row["printed"], row["corrected"], row["sharp"] + 1e-12 if not row["no_op"] else np.inf
        )


def test_the_regrets_bounds_lie_above_what_was_seen():
    (one, two) = regret.compute(SMALL, lambda done, total: None)
    for name, seen in zip(regret.CASES, (one, two), strict=True):
        lines = regret.curves(name, SMALL, seen)
        for kind in ("printed", "corrected", "observed", "sharp"):
            assert (lines[kind] >= 0.99 * lines["seen"]).all(), kind


def test_verdicts_follow_rules():
    near, far = (0.249, 0.001), (0.18, 0.001)
    assert claims.reaches_optimum(0.25, near, near, (-1.001, 0.001), -1.0) == "holds"
    assert claims.reaches_optimum(0.25, far, (0.181, 0.001), (-0.97, 0.001), -1.0) == "holds in part"
    assert claims.reaches_optimum(0.25, far, (0.1, 0.001), (-0.97, 0.001), -1.0) == "contradicted"
    assert claims.pulls_inside(0.01, 0.9) == "holds"
    assert claims.pulls_inside(0.3, 0.9) == "holds in part"
    assert claims.pulls_inside(0.3, 0.2) == "contradicted"
    assert claims.vanishes(0.02, -0.97) == "holds"
    assert claims.vanishes(0.5, -0.97) == "holds in part"
    assert claims.vanishes(0.5, -0.5) == "contradicted"
    assert claims.tracks([2.0, 3.0], [10.0, 12.0]) == "holds"
    assert claims.tracks([2.0, 3.0], [10.0, 90.0]) == "holds in part"
    assert claims.tracks([2.0, 9.0], [10.0, 45.0]) == "holds in part"
    assert claims.tracks([2.0, 19.0], [10.0, 90.0]) == "contradicted"
    assert claims.tracks([0.9, 1.0], [10.0, 12.0]) == "contradicted"
    assert claims.tracks([], [10.0, 12.0]) == "inconclusive"
    assert claims.nearly_tight([1.0, 1.2]) == "holds"
    assert claims.nearly_tight([5.0, 1.2]) == "holds in part"
    assert claims.nearly_tight([5.0, 2.0]) == "contradicted"
    assert claims.nearly_tight([0.9, 1.2]) == "contradicted"


def test_slopes_on_logarithmic_axes():
    times = np.arange(1, 1000)
    assert slope(times, 3.0 * times**-1.0, 10) == pytest.approx(-1.0)
    assert np.isnan(slope(times, np.zeros(999), 10))


def test_side_by_side_tells_the_sum_of_all():
    told = []

    def part(tick):
        tick(1, 2)
        tick(2, 2)
        return "done"

    assert side_by_side([part, part, part], lambda done, total: told.append((done, total))) == ["done"] * 3
    assert told[-1] == (6, 6)


@pytest.mark.parametrize("field", ["steps", "seeds", "points"])
def test_too_small_a_size_is_refused(field, capsys, tmp_path):
    assert main("bias", Scale(**{field: 3}), str(tmp_path)) == 2
    assert f"--{field} must be at least" in capsys.readouterr().out


def test_a_negative_seed_is_refused(capsys, tmp_path):
    assert main("bias", Scale(seed=-1), str(tmp_path)) == 2
    assert "--seed must be at least 0" in capsys.readouterr().out


def test_the_command_line_knows_all_figures():
    assert set(cli.FIGURES) == {"theory", *STUDIES, *ALONE}


def command(*arguments):
    program = Path(sys.executable).with_name("carryclip")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


def test_the_calculator_answers():
    done = command("bounds", "--noise", "2", "--mean-gradient", "0.5", "--radius", "1", "--carry", "1", "--regret", "1")
    assert done.returncode == 0, done.stderr
    for word in ("paper, printed", "Lundberg, sharp", "second moment", "through the shadow", "99 % below"):
        assert word in done.stdout
    assert len(re.findall(r"take the radius", done.stdout)) == 2


def test_the_radius_for_a_wanted_carry_achieves_it():
    q = calculator.Question(2.0, "uniform", 0.5, 0.2, 3, 10_000, 1.0, 0.01, False)
    margin = calculator.margin_for(lambda margin: calculator.mean_carry(q, margin), 1.0, 2.0)
    assert calculator.mean_carry(q, margin) == pytest.approx(1.0, rel=1e-6)
    margin = calculator.margin_for(lambda margin: calculator.regret_of(q, margin), 0.2, 2.0)
    assert calculator.regret_of(q, margin) == pytest.approx(0.2, rel=1e-6)
    assert calculator.margin_for(lambda margin: 5.0, 1.0, 2.0) is None


@pytest.mark.parametrize("law", calculator.LAWS)
@pytest.mark.parametrize("norm", [False, True])
def test_sharper_rows_are_smaller(law, norm):
    q = calculator.Question(2.0, law, 0.5, 0.2, 3, 10_000, 1.0, 0.01, norm)
    means = [mean for _, _, mean, _ in calculator.carry_rows(q)]
    assert means == sorted(means, reverse=True) or norm
    regrets = [value for _, value in calculator.regret_rows(q)]
    assert regrets == sorted(regrets, reverse=True)
    assert all(np.isfinite(means))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--radius", "0.5"), "The radius must exceed the mean gradient: the margin is -0.5"),
        (("--radius", "2", "--alpha", "1"), "Give --radius or --alpha, not both"),
        (("--noise", "0"), "--noise must be above 0"),
        (("--noise", "inf"), "--noise must be above 0"),
        (("--radius", "inf"), "--radius must be finite"),
        (("--mean-gradient", "inf"), "at least 0 and finite"),
        (("--delta", "1"), "--delta must lie between 0 and 1"),
        (("--carry", "-1"), "--carry must be above 0"),
        (("--dimension", "0"), "--dimension must be at least 1"),
    ],
)
def test_the_calculator_says_what_is_wrong(arguments, message):
    done = command("bounds", *arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_a_margin_above_the_noise_is_called_a_no_op():
    done = command("bounds", "--noise", "0.5", "--alpha", "0.6")
    assert "nothing is ever clipped" in " ".join(done.stdout.split())


def test_a_margin_is_not_rounded_away():
    done = command("bounds", "--mean-gradient", "100", "--noise", "0.01", "--carry", "0.05")
    radius = float(re.search(r"take the radius ([\d.]+)", done.stdout)[1])
    q = calculator.Question(0.01, "uniform", 100.0, radius - 100.0, 1, 10_000, 1.0, 0.01, False)
    assert calculator.mean_carry(q, q.margin) <= 0.05
    assert calculator.rounded_up(0.00056215) == 0.0005622
    assert calculator.rounded_up(3.0) == 3.0


def test_without_clipping_the_regret_is_plain_sgds():
    q = calculator.Question(1.0, "uniform", 1.0, 1.0, 1, 10_000, 1.0, 0.01, False)
    assert calculator.regret_of(q, 1.0) == calculator.regret_of(q, None)
    assert command("bounds", "--regret", "0.015").returncode == 0


def test_the_table_fits_eighty_columns():
    done = command("bounds")
    assert "…" not in done.stdout
    assert "6.4e+04" in done.stdout
    assert "99.999 % below" in command("bounds", "--delta", "1e-5").stdout


def test_a_wish_that_cannot_be_met_is_said():
    done = command("bounds", "--regret", "1e-9")
    assert done.returncode == 1
    assert "No radius is known" in done.stdout
