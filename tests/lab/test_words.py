"""The result of a study in sentences: every method of it is named."""

from carryclip_lab.analysis.words import HOW, of_epochs
from made import METHODS, seeds, summary

OWN = {"method": "mine:median"}
COMPONENT = {"region": "Component(0.1)"}


def test_a_method_of_ones_own_is_compared_with_plain_clipping():
    runs = seeds(14, 14) + seeds(20, 22, **METHODS["clip"]) + seeds(13, 12, **OWN)
    assert of_epochs(summary(runs)) == [
        "No clipping: ahead of plain clipping in 1 of 1 comparison, behind in 0.",
        "mine:median: ahead of plain clipping in 1 of 1 comparison, behind in 0.",
        HOW,
    ]


def test_without_plain_clipping_all_are_compared_with_no_clipping():
    runs = seeds(14, 15) + seeds(20, 22, **METHODS["U-Clip"]) + seeds(13, 14, **OWN)
    *told, how = of_epochs(summary(runs))
    assert told == [
        "U-Clip: ahead of no clipping in 0 of 1 comparison, behind in 1.",
        "mine:median: ahead of no clipping in 0 of 1 comparison, behind in 0; no clear difference in 1.",
    ]
    assert how.startswith("Compared at the same optimizer and batch size")


def test_with_several_regions_it_is_said_which_one_stands_for_them():
    runs = seeds(20, 22, **METHODS["clip"]) + seeds(1, 1, **COMPONENT) + seeds(13, 12, **OWN)
    assert of_epochs(summary(runs)) == [
        "mine:median: ahead of plain clipping in 1 of 1 comparison, behind in 0.",
        f"{HOW} What has no region is compared with plain clipping at norm 0.5.",
    ]


def test_what_cannot_be_compared_is_named():
    runs = seeds(20, 22, **METHODS["clip"]) + seeds(13, 12, batch=64, **OWN)
    assert of_epochs(summary(runs))[0] == "mine:median: not compared, as plain clipping was not run beside it."


def test_nothing_is_said_while_runs_wait():
    runs = seeds(20, 22, **METHODS["clip"]) + seeds(13, None, **OWN)
    assert of_epochs(summary(runs)) == []
