"""From runs to cells: epochs to the target, the chosen learning rate, and how two cells are compared."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carryclip_lab.analysis.compare import compare, interval, pooled
from carryclip_lab.analysis.kinds import KINDS, kind_of
from carryclip_lab.analysis.naming import CAPPED, CLIP, FULL, NONE, Method, method_of, region_name
from carryclip_lab.analysis.summary import epochs_of, runs_of, summarise
from carryclip_lab.analysis.tables import of_epochs
from carryclip_lab.commands.terminal import table
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import OUTCOMES
from made import METHODS, cell, record, seeds, summary

INF = math.inf


# ---------------------------------------------------------------------- cells


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_epochs_are_infinite_for_every_outcome_but_reached(outcome):
    assert epochs_of(record(7, outcome=outcome)) == (7 if outcome == "reached" else INF)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({0.1: (9, 9, 9), 0.01: (8, 8, 20)}, 0.01),  # the smallest median
        ({0.1: (3, INF, INF), 0.01: (50, 60, 70)}, 0.01),  # a median takes infinity
        ({0.1: (8, 8, INF), 0.01: (8, 8, 9)}, 0.01),  # more seeds reached
        ({0.1: (7, 8, 12), 0.01: (8, 8, 9)}, 0.01),  # the smaller maximum
        ({0.1: (8, 8, 9), 0.01: (7, 8, 9)}, 0.01),  # the smaller mean
        ({0.1: (8, 8, 9), 0.01: (8, 8, 9)}, 0.1),  # the larger rate
        ({0.1: (INF, INF, INF), 0.01: (INF, INF, 200)}, 0.01),
        ({0.1: (INF, INF, INF), 0.01: (INF, INF, INF)}, 0.1),
    ],
)
def test_the_learning_rate_is_that_of_the_smallest_median(rates, best):
    runs = [run for lr, needed in rates.items() for run in seeds(*needed, lr=lr)]
    assert cell(*runs).lr == best


def test_one_early_seed_does_not_win_against_all_others():
    found = cell(*seeds(20, 21, 22, lr=0.1), *seeds(5, None, None, lr=0.01))
    assert found.lr == 0.1
    assert found.partial
    assert found.drawn


def test_a_rate_with_more_seeds_to_come_is_not_behind_for_it():
    one, three = seeds(30, lr=0.1), seeds(20, None, None, lr=0.2)
    found = cell(*one, *three, *seeds(None, lr=0.3))
    assert (found.lr, found.median) == (0.2, 20.0)
    assert found.table[1].tolist() == [[20.0]]
    done = cell(*one, *seeds(20, 40, 50, lr=0.2))
    assert (done.lr, done.median) == (0.1, 30.0)


def test_a_point_is_drawn_only_if_all_seeds_reached():
    assert cell(*seeds(8, 9, 10)).drawn
    missed = cell(*seeds(8, 9, INF))
    assert not missed.drawn
    assert (missed.missed, missed.seeds, missed.median) == (1, 3, 9)
    waiting = cell(*seeds(8, 9, None))
    assert not waiting.drawn
    assert waiting.partial
    assert (waiting.missed, waiting.done, waiting.planned) == (0, 2, 3)


def test_a_cell_before_its_first_run():
    found = cell(*seeds(None, None))
    assert found.lr is None
    assert found.chosen == {}
    assert math.isnan(found.median)
    assert (found.done, found.seeds, found.drawn) == (0, 2, False)


def test_of_two_runs_the_one_that_was_allowed_more_epochs_counts():
    found = cell(record(INF, epochs=10), record(25, epochs=30))
    assert found.chosen == {0: 25}
    assert found.limit == 30


def test_each_data_set_is_a_summary_of_its_own():
    runs = [record(5), record(5, examples=2000), record(5, target=0.9), record(5, task="digits")]
    parts = summarise("study", "", "small", runs, lambda run: [])
    assert [(part.task, part.examples, part.target) for part in parts] == [
        ("cifar10", None, 0.99),
        ("cifar10", 2000, 0.99),
        ("cifar10", None, 0.9),
        ("digits", None, 0.99),
    ]


def test_a_summary_knows_its_parts():
    runs = [
        run
        for given in METHODS.values()
        for optimizer in ("adam", "sgd")
        for batch in (500, 5)
        for run in seeds(9, 10, None, optimizer=optimizer, batch=batch, **given)
    ]
    found = summary(runs)
    assert found.optimizers == ["sgd", "adam"]
    assert found.batches == [5, 500]
    assert found.methods == [NONE, CLIP, FULL]
    assert found.main_region == "Norm(radius=0.5, over='all')"
    assert found.outcomes == {"reached": 24, "waiting": 12}
    assert runs_of(found.cells) == (24, 36)
    assert found.command == "carryclip reproduce study"
    carried = found.find("adam", found.main_region, FULL, 5)
    base = found.base(carried)
    assert base.setting.method == NONE
    assert (base.setting.optimizer, base.batch) == ("adam", 5)
    assert found.find("adam", found.main_region, FULL, 7) is None


def test_epochs_to_the_target_are_a_table():
    found = summary(seeds(9, 10, batch=5) + seeds(9, INF, batch=5, **METHODS["clip"]) + seeds(None, None, batch=1000))
    assert kind_of(found) is KINDS["epochs"]
    assert of_epochs(found)[:2] == (
        ["optimizer", "clipping", "batch 5", "batch 1,000"],
        [["SGD", "none", "9.5 (9-10)", "no run done"], ["SGD", "clip, norm 0.5", "1 of 2 reached", ""]],
    )
    assert list(table(found).columns[2].cells) == ["9.5 (9-10)", "1 of 2"]  # the note below says of what


def test_without_norm_one_half_the_first_region_is_the_main_one():
    runs = [record(5, region=region) for region in ("Component(0.25)", "Norm(5.0)", "Adaptive(1, 2)")]
    assert summary(runs).main_region == "Norm(radius=5.0, over='all')"
    assert summary([record(5)]).main_region is None


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("region", "label"),
    [
        (None, "none"),
        ("Norm(0.5)", "norm 0.5"),
        ("Norm(1, over='tensor')", "norm 1 per tensor"),
        ("Component(0.25)", "component 0.25"),
        ("Adaptive(2, 0)", "Welford (2, 0)"),
        ("Adaptive(1, 2, moments=EWMA(0.95))", "EWMA (1, 2)"),
        ("Adaptive(1, 2, moments=EWMA(0.9))", "EWMA (1, 2), decay=0.9"),
        ("Adaptive(1, 2, include_current=True)", "Welford (1, 2), include_current=True"),
        ("Sign(1.0)", "Sign(1.0)"),
    ],
)
def test_regions_have_short_names(region, label):
    assert region_name(region).label == label


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "none"),
        ({"region": "Norm(1.0)"}, "clip"),
        ({"region": "Norm(1.0)", "carry": "full"}, "U-Clip"),
        ({"region": "Norm(1.0)", "carry": "Gated()"}, "Gated"),
        ({"region": "Norm(1.0)", "carry": "Gated(threshold=0.4)"}, "Gated(threshold=0.4)"),
        ({"region": "Norm(1.0)", "carry": "Capped(10)"}, "Capped(10)"),
        ({"method": "mine:clip"}, "mine:clip"),
    ],
)
def test_methods_that_differ_have_names_that_differ(given, name):
    assert method_of(Spec(task="digits", optimizer="sgd", lr=0.1, batch=8, epochs=1, seed=0, **given)).label == name


def test_methods_are_told_apart_by_what_they_do_and_not_by_their_labels(monkeypatch):
    given = {"task": "digits", "optimizer": "sgd", "lr": 0.1, "batch": 8, "epochs": 1, "seed": 0, "region": "Norm(1.0)"}
    whole, real = (method_of(Spec(**given, carry=carry)) for carry in ("Capped(10)", "Capped(10.0)"))
    assert whole == real == CAPPED
    monkeypatch.setattr(Method, "label", property(lambda self: "the same for all"))
    runs = [run for way in METHODS.values() for run in seeds(9, 10, **way)]
    found = summary(runs)
    assert found.methods == [NONE, CLIP, FULL]
    assert found.base(found.find("sgd", found.main_region, FULL, 50)).setting.method == NONE


# ---------------------------------------------------------------------- comparisons

some_epochs = st.lists(st.one_of(st.integers(1, 300).map(float), st.just(INF)), min_size=1, max_size=6)


def against(ours, theirs, **given):
    return compare(cell(*seeds(*ours, **given)), cell(*seeds(*theirs)))


def test_the_ratio_is_that_of_the_medians():
    found = against((8, 9, 10), (16, 18, 20))
    assert found.effect.value == 0.5
    assert found.effect.seeds == 3
    assert (
        found.effect.as_ratio == "0.50 [0.50, 0.50]"
    )  # seed by seed the ratio is the same, and seeds are drawn in pairs


def test_seeds_that_differ_are_drawn_apart():
    paired = against((8, 9, 10), (16, 18, 20))
    apart = compare(
        cell(*seeds(8, 9, 10)), cell(*(record(each, seed) for seed, each in enumerate((16, 18, 20), start=5)))
    )
    assert apart.effect.low < paired.effect.low
    assert apart.effect.high > paired.effect.high


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio"),
    [((8, 9, 10), (INF, INF, 7), 0.0), ((INF, INF, 7), (8, 9, 10), INF)],
)
def test_reaching_where_the_other_does_not_is_a_ratio_of_zero(ours, theirs, ratio):
    assert against(ours, theirs).effect.value == ratio


def test_where_neither_reached_there_is_no_ratio():
    found = against((INF, INF), (INF, INF))
    assert math.isnan(found.effect.value)
    assert (found.effect.low, found.effect.high) == (1.0, 1.0)
    assert found.fewer == (0.5, 0.5, 0.5)
    assert found.effect.as_ratio == "neither reached"
    assert math.isnan(pooled([found]).value)


@given(some_epochs, some_epochs)
def test_intervals_are_ordered_and_never_nan(ours, theirs):
    found = against(ours, theirs)
    assert found.effect.low <= found.effect.high
    value, low, high = found.fewer
    assert 0 <= low <= high <= 1
    assert 0 <= value <= 1


@given(some_epochs, some_epochs)
def test_the_other_way_round_everything_is_turned_round(ours, theirs):
    one, other = against(ours, theirs), against(theirs, ours)
    assert one.fewer[0] + other.fewer[0] == pytest.approx(1.0)
    if 0 < one.effect.value < INF:
        assert one.effect.value * other.effect.value == pytest.approx(1.0)


def test_ties_count_half():
    assert against((5, 5), (5, 5)).fewer[0] == 0.5
    assert against((4, 5), (5, 5)).fewer[0] == 0.75
    assert against((INF, 5), (INF, INF)).fewer[0] == 0.75


def test_resampling_agrees_with_going_through_all_resamples():
    ours, theirs = np.array([5.0, 8.0, 20.0]), np.array([10.0, 9.0, 11.0])
    ratios = [
        np.median(ours[list(drawn)]) / np.median(theirs[list(drawn)]) for drawn in itertools.product(range(3), repeat=3)
    ]
    found = against(ours, theirs)
    assert set(np.round(found.draws, 9)) == set(np.round(ratios, 9))
    assert np.mean(found.draws) == pytest.approx(np.mean(ratios), rel=0.02)


def test_the_learning_rate_is_chosen_anew_in_every_resample():
    tuned = cell(*seeds(10, 10, 30, lr=0.1), *seeds(30, 30, 5, lr=0.01))
    assert tuned.lr == 0.1
    draws = compare(tuned, cell(*seeds(10, 10, 10))).draws
    assert draws.max() == 1.0  # with the third seed drawn twice the other rate is better
    assert draws.min() == 0.5


def test_a_rate_that_is_not_done_takes_no_part():
    partial = cell(*seeds(10, 10, 10, lr=0.1), *seeds(5, None, None, lr=0.01))
    assert partial.table[1].tolist() == [[10.0, 10.0, 10.0]]
    assert cell(*seeds(10, None, 12)).table[1].tolist() == [[10.0, 12.0]]


def test_there_is_nothing_to_compare_before_runs_are_done():
    assert compare(cell(*seeds(None)), cell(*seeds(5))) is None
    assert compare(None, cell(*seeds(5))) is None
    assert pooled([]) is None


def test_cells_together_have_the_median_ratio():
    found = [against((8, 8, 8), (10, 10, 10)), against((9, 9, 9), (10, 10, 10)), against((INF,) * 3, (10, 10, 10))]
    effect = pooled(found)
    assert (effect.value, effect.low, effect.high, effect.seeds) == (0.9, 0.9, 0.9, 3)


def test_the_same_numbers_every_time():
    one, other = (against((5, 8, 20), (10, 9, 11)) for _ in range(2))
    assert (one.effect, one.fewer) == (other.effect, other.fewer)


def test_an_interval_takes_infinity():
    assert interval(np.array([1.0] * 50 + [INF] * 50)) == (1.0, INF)
