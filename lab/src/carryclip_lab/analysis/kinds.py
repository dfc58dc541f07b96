"""The kinds of study: which figures, table, claims and answers each has. Nothing else asks what a study is about."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from carryclip_lab import figures
from carryclip_lab.analysis import accuracy, judge, tables, words
from carryclip_lab.analysis.answers import Answer, answers
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.analysis.summary import Summary
from carryclip_lab.analysis.tables import Table
from carryclip_lab.figures.sheet import Figure


@dataclass(frozen=True)
class Kind:
    """What can be shown and said of a study.

    Attributes:
        figures: by name, in the order of the report.
        table: of results.
        judge: the paper's claims; none where the paper has no such runs.
        answers: to those who ask whether to turn the carry on.
        parts: a study's lines in the tables of all trials, by their names.
        words: the result in sentences; none where a table of all trials has them.
        trial: whether each data set of a study is a trial with a title of its own.
    """

    figures: Mapping[str, Figure]
    table: Callable[[Summary], Table]
    judge: Callable[[Summary], list[Claim]] = lambda summary: []
    answers: Callable[[Summary], list[Answer]] = lambda summary: []
    parts: Callable[[Summary], dict[str, list[list[str]]]] = lambda summary: {}
    words: Callable[[Summary], list[str]] = lambda summary: []
    trial: bool = False


KINDS: dict[str, Kind] = {
    "epochs": Kind(figures.FIGURES, tables.of_epochs, judge.judge, words=words.of_epochs),
    "accuracy": Kind(figures.IMAGES, accuracy.table, accuracy.judged),
    "trial": Kind(figures.TRIALS, tables.of_trial, answers=answers, parts=tables.parts, trial=True),
}


def kind_of(summary: Summary) -> Kind:
    """What a study can show, as its task says."""
    return KINDS[summary.recipe.shown_as]
