"""The rule of the default and the words about it: on made-up effects, and that what was fixed agrees with the tasks."""

import math

import pytest

from carryclip.carry import DEFAULT as LIBRARY
from carryclip_lab import grid
from carryclip_lab.analysis import answers, rule
from carryclip_lab.analysis.compare import Effect
from carryclip_lab.analysis.naming import DRIP, FULL, GATED, SHRUNK, Method
from carryclip_lab.analysis.rule import Rules, Verdict, word_of

STUDIES = [name for name in grid.names() if grid.rules_of(name)]


def test_the_default_is_the_librarys():
    assert Method(LIBRARY) == answers.DEFAULT


@pytest.mark.parametrize("name", STUDIES)
def test_what_was_fixed_agrees_with_the_study(name):
    study, rules = grid.load(name), rule.read(grid.rules_of(name))
    subjects = {spec.settings: spec.recipe.judged() for spec in study.specs}.values()
    learnt = {subject.title: subject for subject in subjects if subject.kind != "frozen"}
    assert {subject.metric for subject in learnt.values()} <= rules.margins.keys()
    spoken = {title for titles in rules.families.values() for title in titles}
    if study.tier != "smoke":  # which has a few of them
        assert spoken | set(rules.controls.values()) == set(learnt)
        assert rules.exempt <= spoken
    kinds = {title: subject.kind for title, subject in learnt.items()}
    assert all(kinds.get(control, "ordinary") == "ordinary" for control in rules.controls.values())


def test_margins_are_those_of_the_tasks():
    rules = rule.read("evidence")
    for spec in grid.load("evidence-small").specs:
        subject = spec.recipe.judged()
        assert subject.kind == "frozen" or rules.margins[subject.metric] == subject.little
    assert rule.read("evidence-lm").margins["validation_loss"] == 0.005


def test_every_trial_where_something_can_be_won_has_a_control():
    rules = rule.read("evidence")
    subjects = {
        subject.title: subject.kind for subject in (spec.recipe.judged() for spec in grid.load("evidence-small").specs)
    }
    assert {title for title, kind in subjects.items() if kind == "signal"} <= rules.controls.keys()


class Line:
    """What the rule asks of a line, with effects that are given."""

    def __init__(self, title, kind, effects, *, plain=1.0, margin=0.01, optimizer="sgd"):
        self.subject = type("Subject", (), {"title": title, "kind": kind, "metric": "error"})
        self.name, self.effects, self.plain, self.margin = f"{title} ({optimizer})", effects, plain, margin
        self.block = type("Block", (), {"optimizer": optimizer, "over": lambda self, method, other: None})()

    def same(self, method):
        return self.effects.get(method)

    better, worse = rule.Line.better, rule.Line.worse

    def won_back(self, method, perfect):
        effect = self.same(method)
        return None if effect is None else max(effect.value / (self.plain - perfect), -1.0)


def effect(value, half=0.02):
    return Effect(value, value - half, value + half, 8)


RULES = Rules(
    candidates=(FULL, DRIP, SHRUNK),
    exempt=frozenset({"tails"}),
    margins={"error": 0.01},
    perfect={"error": 0.0},
    families={"amounts": ("skewed",), "tails": ("tails",), "others": ("plain",)},
    controls={"skewed": "plain"},
)


def test_who_is_surely_worse_is_out_and_the_rest_are_ranked_by_what_they_win_back():
    assert rule.default([], RULES) is None
    skewed = Line("skewed", "signal", {FULL: effect(0.9), DRIP: effect(0.5), SHRUNK: effect(0.4)})
    plain = Line("plain", "ordinary", {FULL: effect(-0.1), DRIP: effect(0.0), SHRUNK: effect(0.0)})
    assert rule.default([skewed, plain], RULES) == DRIP
    assert rule.default([skewed], RULES) == FULL
    half = Line("skewed", "signal", {FULL: effect(0.9), SHRUNK: effect(0.9)})  # where one was not tried
    assert rule.common([skewed, plain, half], RULES) == [skewed, plain]
    assert rule.default([half, skewed, plain], RULES) == DRIP
    spike = Line("spike", "corruption", {method: effect(-0.1) for method in (FULL, DRIP)})
    assert rule.default([skewed, plain, spike], RULES) == SHRUNK
    assert [line.name for line in rule.harms([skewed, plain, spike], RULES, FULL)] == ["plain (sgd)", "spike (sgd)"]
    assert rule.default([Line("spike", "corruption", dict.fromkeys(RULES.candidates, effect(-0.1)))], RULES) is None


def test_a_loss_counts_if_it_is_sure_and_more_than_the_margin_and_not_exempt():
    unsure = Line("plain", "ordinary", {SHRUNK: effect(-0.1, half=0.2)})
    small = Line("plain", "ordinary", {SHRUNK: effect(-0.005, half=0.001)})
    exempt = Line("tails", "corruption", {SHRUNK: effect(-0.5)})
    lost = Line("plain", "ordinary", {SHRUNK: Effect(-math.inf, -math.inf, -math.inf, 8)})
    assert rule.harms([unsure, small, exempt], RULES, SHRUNK) == []
    assert rule.harms([lost], RULES, SHRUNK) == [lost]


def test_what_is_won_back_is_a_part_of_clippings_error_where_it_is_signal():
    half = Line("skewed", "signal", {SHRUNK: effect(0.2)}, plain=0.4)
    ruined = Line("skewed", "signal", {SHRUNK: effect(-9.0)}, plain=0.4)
    other = Line("plain", "ordinary", {SHRUNK: effect(0.4)}, plain=0.4)
    assert rule.won_back([half, other], RULES, SHRUNK) == pytest.approx(0.5)
    assert rule.won_back([half, ruined], RULES, SHRUNK) == pytest.approx(-0.25)
    assert math.isnan(rule.won_back([other], RULES, SHRUNK))


@pytest.mark.parametrize(
    ("lines", "better", "worse", "safe", "word"),
    [
        (3, 3, 0, True, "wins"),
        (4, 2, 0, False, "wins"),
        (4, 1, 0, True, "wins in part"),
        (4, 0, 1, False, "costs"),
        (4, 2, 1, False, "mixed"),
        (4, 0, 0, True, "keeps up"),
        (4, 0, 0, False, "nothing seen"),
    ],
)
def test_words(lines, better, worse, safe, word):
    assert word_of(lines, better, worse, safe=safe) == word
    said = rule.sentence(Verdict("family", ("a trial",), word, lines, better, worse, 0.42, (1, 2)))
    assert said.startswith(rule.PHRASES[word])
    assert f"surely better in {better} and surely worse in {worse} of {lines} comparisons" in said
    assert ("42% of plain clipping's error gone" in said) == (better > 0), "elsewhere it is noise"


def test_families_are_told_by_their_lines():
    found = [
        Line("skewed", "signal", {SHRUNK: effect(0.4)}),
        Line("tails", "corruption", {SHRUNK: effect(-0.4)}),
        Line("plain", "ordinary", {SHRUNK: effect(0.0, half=0.005)}),
    ]
    words = {each.family: each.word for each in rule.verdicts(found, RULES, SHRUNK)}
    assert words == {"amounts": "wins", "tails": "costs", "others": "keeps up"}
    assert rule.verdicts(found, RULES, GATED) == []


def test_a_win_without_a_control_is_named():
    won = Line("skewed", "signal", {SHRUNK: effect(0.4)})
    assert rule.controlled([won], RULES) == [("skewed (sgd)", SHRUNK.label, "no control")]
    twin = Line("plain", "ordinary", {SHRUNK: effect(0.0)})
    assert rule.controlled([won, twin], RULES) == []
    blank = Line("plain", "ordinary", {DRIP: effect(0.0)})
    assert rule.controlled([won, blank], RULES) == [("skewed (sgd)", SHRUNK.label, "not run in plain")]
    too = Line("plain", "ordinary", {SHRUNK: effect(0.3)})
    left = rule.controlled([won, too], RULES)
    assert (won.name, SHRUNK.label, "wins in plain as well") in left
