"""The figures: what is drawn, what is left out, and what every one of them says of itself."""

import csv
import math
import re
from dataclasses import replace

import matplotlib
import pytest

from carryclip_lab.analysis.naming import CLIP, FULL, NONE, Method
from carryclip_lab.commands.output import save_figure, save_rows
from carryclip_lab.figures import FIGURES, draw
from carryclip_lab.figures.lines import thousands
from carryclip_lab.figures.style import RC, looks
from made import METHODS, TRACE, seeds, summary

NOTHING_AT_THIS_SIZE = {"constant", "constant-small", "adaptive-sgd", "adaptive-momentum", "adaptive-adam"}
REGIONS = (
    *(f"{kind}({radius})" for kind in ("Norm", "Component") for radius in (0.25, 0.5)),
    *(f"Adaptive({sizes}{moments})" for sizes in ("2, 0", "1, 2") for moments in ("", ", moments=EWMA(0.95)")),
)


def small(**given):
    """Two optimizers, three batch sizes, two learning rates, three seeds."""
    return [
        run
        for optimizer in ("sgd", "adam")
        for batch in (5, 50, 500)
        for setting in (*METHODS.values(), {**METHODS["U-Clip"], "carry": "Gated()"})
        for lr in (0.1, 0.01)
        for run in seeds(20, 22, 30, optimizer=optimizer, batch=batch, lr=lr, **setting, **given)
    ]


def large():
    """All kinds of regions, three optimizers, small and large batches."""
    settings = [{}, *({"region": region, "carry": carry} for region in REGIONS for carry in ("none", "full"))]
    return [
        run
        for optimizer in ("sgd", "momentum", "adam")
        for batch in (1, 10, 100, 1000)
        for setting in settings
        for run in seeds(20 + batch, 30 + batch, optimizer=optimizer, batch=batch, **setting)
    ]


def texts(figure):
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def points(panel, color):
    """The places of a method's markers in a panel."""
    found = [line for line in panel.get_lines() if line.get_color() == color and line.get_marker() not in ("_", "None")]
    return {round(y, 6) for line in found for y in line.get_ydata() if not math.isnan(y)}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_a_small_study(name, tmp_path):
    drawn = draw(name, summary(small(examples=2000)))
    if name in NOTHING_AT_THIS_SIZE:
        assert drawn is None
        return
    for said in ("CIFAR-10, 2,000 examples", "tier small, not the paper's size", "study study", "target 99 %"):
        assert said in drawn.caption
    assert re.search(r"; (\d+) of \1 runs\. Command: carryclip reproduce study$", drawn.caption)
    assert any("tier small (not the paper's size)" in text for text in texts(drawn.figure))
    with matplotlib.rc_context(RC):
        paths = save_figure(drawn.figure, tmp_path, name, ("png", "svg", "pdf"))
    assert all(path.stat().st_size > 5000 for path in paths)
    with save_rows(drawn.rows, tmp_path, name).open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 6
    assert not any(value in ("nan", "inf") for row in rows for value in row.values())


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_of_a_large_study(name):
    drawn = draw(name, summary(large(), tier="paper"))
    if name == "rates":  # one learning rate
        assert drawn is None
        return
    assert "tier paper;" in drawn.caption
    assert "not the paper's size" not in drawn.caption
    width, height = drawn.figure.get_size_inches()
    assert width < 13
    assert height < 20


@pytest.mark.parametrize("name", FIGURES)
def test_partial_results_are_marked(name):
    waiting = {"state": "waiting", "outcome": None, "reached": None}
    records = [replace(run, **waiting) if number % 7 == 0 else run for number, run in enumerate(small())]
    drawn = draw(name, summary(records))
    if drawn is None:
        assert name in NOTHING_AT_THIS_SIZE
        return
    assert "partial, so all of it may still change" in drawn.caption
    assert any(text.endswith("PARTIAL") for text in texts(drawn.figure))


@pytest.mark.parametrize("name", FIGURES)
def test_before_the_first_run_nothing_breaks(name):
    records = [
        run
        for setting in METHODS.values()
        for lr in (0.1, 0.01)
        for batch in (5, 50)
        for run in seeds(None, None, batch=batch, lr=lr, **setting)
    ]
    drawn = draw(name, summary(records))
    assert drawn is None or "0 of" in drawn.caption


@pytest.mark.parametrize("name", FIGURES)
def test_optimizers_alone_are_a_study_too(name):
    drawn = draw(name, summary([run for lr in (0.1, 0.01) for run in seeds(20, 30, lr=lr)]))
    assert (drawn is not None) == (name in ("rates", "outcomes"))


@pytest.mark.parametrize("name", ["epochs", "ratios", "carry"])
def test_the_same_runs_draw_the_same_figure(name, tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        drawn = draw(name, summary(small()))
        with matplotlib.rc_context(RC):
            save_figure(drawn.figure, tmp_path / folder, name, ("svg", "pdf"))
    for kind in ("svg", "pdf"):
        one, other = ((tmp_path / folder / f"{name}.{kind}").read_bytes() for folder in ("a", "b"))
        assert one == other


def test_a_point_is_missing_where_a_seed_did_not_reach_and_the_strip_counts_it():
    records = seeds(10, 12, 14, batch=5) + seeds(11, math.inf, math.inf, batch=50) + seeds(13, 15, None, batch=500)
    records += [run for batch in (5, 50, 500) for run in seeds(7, 8, 9, batch=batch, **METHODS["clip"])]
    drawn = draw("epochs", summary(records))
    panel, strip = drawn.figure.axes[:2]
    given = looks([NONE, CLIP])
    assert points(panel, given[NONE]["color"]) == {12}
    assert points(panel, given[CLIP]["color"]) == {8}
    assert [text.get_text() for text in strip.texts] == ["2", "?", "missed the target:"]
    rows = {row["batch"]: row for row in drawn.rows if row["method"] == "none"}
    assert (rows[5]["median"], rows[5]["drawn"]) == (12, True)
    assert (rows[50]["median"], rows[50]["reached"], rows[50]["drawn"]) == ("", 1, False)
    assert (rows[500]["done"], rows[500]["partial"]) == (2, True)


def test_bars_go_from_the_smallest_seed_to_the_largest():
    records = seeds(14, 10, 12, batch=5) + seeds(30, 22, 20, batch=50) + seeds(9, 8, math.inf, batch=500)
    records += [run for batch in (5, 50, 500) for run in seeds(7, 8, 6, batch=batch, **METHODS["clip"])]
    panel = draw("epochs", summary(records)).figure.axes[0]
    none, clip = ([[y for _, y in bar] for bar in bars.get_segments()] for bars in panel.collections)
    assert none == [[10, 14], [20, 30]]
    assert clip == [[6, 8]] * 3


def batches(panel):
    """Where a panel has points, without the small shifts that keep methods apart."""
    drawn = {x for line in panel.get_lines() for x in line.get_xdata()}
    return {batch for batch in (1, 10, 100, 1000) if any(0.7 < x / batch < 1.4 for x in drawn)}


def test_small_batches_are_looked_at_alone():
    made = summary(large())
    panels = {panel.get_title(): batches(panel) for panel in draw("epochs", made).figure.axes if panel.get_title()}
    zoomed = {name: name.endswith(", small batches") for name in panels}
    assert sum(zoomed.values()) == len(zoomed) / 2 == 3
    assert panels == {name: {1, 10, 100} if zoomed[name] else {1, 10, 100, 1000} for name in panels}
    drawn = draw("constant-small", made)
    assert {row["batch"] for row in drawn.rows} == {1, 10, 100}
    assert all(batches(panel) == {1, 10, 100} for panel in drawn.figure.axes if panel.get_title())


def test_panels_are_named_after_the_regions_that_they_show():
    needed = {region: 20 + 10 * place for place, region in enumerate(REGIONS)}
    clipped = {"carry": "full", "batch": 10}
    records = [run for region in REGIONS for run in seeds(*[needed[region]] * 2, region=region, **clipped)]
    made = summary(records + seeds(5, 5, batch=10))

    def shown(name):
        found = {panel.get_title(): panel.get_lines() for panel in draw(name, made).figure.axes if panel.get_title()}
        return {title: {y for line in lines for y in line.get_ydata()} - {5} for title, lines in found.items()}

    assert shown("constant") == {
        f"SGD, radius {radius}": {needed[f"{kind}({radius})"] for kind in ("Norm", "Component")}
        for radius in (0.25, 0.5)
    }
    assert shown("adaptive-sgd") == {
        f"{kind} ({sizes})": {needed[f"Adaptive({sizes}{moments})"]}
        for sizes in ("2, 0", "1, 2")
        for kind, moments in (("Welford", ""), ("EWMA", ", moments=EWMA(0.95)"))
    }


def test_rows_of_learning_rates_count_the_seeds():
    records = seeds(10, 14, 12, lr=0.1) + seeds(20, math.inf, None, lr=0.01) + seeds(None, None, None, lr=0.001)
    rows = {row["lr"]: row for row in draw("rates", summary(records)).rows}
    same = {"optimizer": "sgd", "region": "", "method": "none", "batch": 50, "seeds": 3}
    assert rows == {
        0.1: {**same, "lr": 0.1, "median": 12.0, "reached": 3, "done": 3, "chosen": True},
        0.01: {**same, "lr": 0.01, "median": "", "reached": 1, "done": 2, "chosen": False},
        0.001: {**same, "lr": 0.001, "median": "", "reached": 0, "done": 0, "chosen": False},
    }


def test_a_hollow_point_has_learning_rates_to_come():
    records = seeds(10, 12, 14, batch=5) + seeds(None, None, None, batch=5, lr=0.01)
    records += seeds(7, 8, 9, batch=5, **METHODS["clip"])
    panel = draw("epochs", summary(records)).figure.axes[0]
    hollow = [line for line in panel.get_lines() if line.get_markerfacecolor() == "white"]
    assert [list(line.get_ydata()) for line in hollow] == [[12]]


def test_methods_look_alike_in_all_figures_and_unlike_each_other():
    own = [Method(False, "mine:own"), Method(False, "yours:own")]
    one, other = looks([NONE, CLIP, FULL, *own]), looks([NONE, FULL])
    assert one[FULL] == other[FULL]
    for what in ("color", "marker"):
        assert len({look[what] for look in one.values()}) == len(one)
    assert one[CLIP]["linestyle"] != one[FULL]["linestyle"]


def test_a_method_of_your_own_is_one_more_line():
    records = small() + [run for batch in (5, 50) for run in seeds(5, 6, 7, batch=batch, method="mine:faster")]
    drawn = draw("epochs", summary(records))
    assert "mine:faster" in texts(drawn.figure)
    assert "mine:faster" in {row["method"] for row in drawn.rows}


def test_names_are_text_and_not_formulas(tmp_path):
    odd = r"a$\frac$_b:<img src=x>" + "\x07" + "x" * 80
    drawn = draw("epochs", summary(small() + seeds(5, 6, 7, batch=5, method=odd), study="$x_{$"))
    with matplotlib.rc_context(RC):
        (path,) = save_figure(drawn.figure, tmp_path, "odd", ("svg",))
    assert b"<img" not in path.read_bytes()


def test_the_carry_is_drawn_for_methods_that_have_one():
    drawn = draw("carry", summary(small()))
    assert {row["method"] for row in drawn.rows} == {"U-Clip", "Gated"}
    assert len(drawn.rows) == 2 * 3 * 2 * len(TRACE)
    assert draw("carry", summary(small(), epochs=lambda run: [])) is None


def test_ratios_have_signs_where_one_side_did_not_reach():
    records = seeds(20, 22) + seeds(10, 11, **METHODS["clip"]) + seeds(math.inf, math.inf, **METHODS["U-Clip"])
    records += seeds(math.inf, math.inf, batch=5) + seeds(10, 11, batch=5, **METHODS["clip"])
    records += seeds(math.inf, math.inf, batch=5, **METHODS["U-Clip"])
    signs = {(row["method"], row["batch"]): row["sign"] for row in draw("ratios", summary(records)).rows}
    assert signs == {("clip", 50): "0.50", ("U-Clip", 50): "×", ("clip", 5): "+", ("U-Clip", 5): "–"}


def test_large_batches_are_written_short():
    assert [thousands(value) for value in (500, 1000, 1500, 15000)] == ["500", "1k", "1.5k", "15k"]
