"""From the cells of a study to a line for each of the paper's claims about training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from carryclip_lab.analysis import evidence
from carryclip_lab.analysis.claims import Claim
from carryclip_lab.analysis.evidence import Evidence
from carryclip_lab.analysis.naming import CLIP, FULL
from carryclip_lab.analysis.summary import Cell, Summary, runs_of
from carryclip_lab.spec import OPTIMIZERS


@dataclass(frozen=True)
class Question:
    """A claim, and where to look."""

    statement: str
    paper: str
    look: Callable[[Summary], Evidence | None]
    """None if the study lacks cells that the claim is about."""


def judge(summary: Summary) -> list[Claim]:
    """One line per claim.

    Runs of the smoke tier, other data than CIFAR-10, and a part of its images show their numbers but no verdict: with
    fewer steps an epoch lasts no longer than a gradient waits in the carry.
    """
    return [_claim(summary, name, question) for name, question in QUESTIONS.items()]


def _claim(summary: Summary, name: str, question: Question) -> Claim:
    found = question.look(summary)
    done, planned = runs_of(found.cells) if found else (0, 0)
    said = (name, question.statement, question.paper)
    silent = Claim(*said, "", "not run at this size", tier=summary.tier, command=summary.command)
    if found is None:
        return silent
    if not done:
        return replace(silent, ours=f"{summary.data}: none of {planned:,} runs is done")
    so_far = "" if done == planned else f"; so far {done:,} of {planned:,} runs (left: {_left(found.cells)})"
    seeds = min((len(cell.chosen) for cell in found.cells if cell.chosen), default=None)
    size = summary.recipe.size
    part = "" if summary.examples in (None, size) else f" of {size:,}, another size than the paper's"
    told = replace(silent, ours=f"{summary.data}{part}: {found.ours}{so_far}", seeds=seeds)
    if summary.tier == "smoke" or not summary.recipe.in_paper or part:
        return told
    return replace(told, verdict=found.verdict if done == planned else "inconclusive")


def _left(cells: Sequence[Cell]) -> str:
    """What has still to run, by name: ``"SGD, batch 50: 2 none, 4 U-Clip; Adam, batch 50: 1 none"``."""
    left: dict[tuple[str, int], dict[str, int]] = {}
    for cell in cells:
        if cell.partial:
            names = left.setdefault((OPTIMIZERS[cell.setting.optimizer], cell.batch), {})
            name = cell.setting.method.label + ("" if cell.setting.name.kind in ("none", "norm") else ", adaptive")
            names[name] = names.get(name, 0) + cell.planned - cell.done
    return "; ".join(
        f"{optimizer}, batch {batch:,}: " + ", ".join(f"{count} {name}" for name, count in names.items())
        for (optimizer, batch), names in left.items()
    )


QUESTIONS: dict[str, Question] = {
    "C1": Question(
        "Norm radius 0.5, small batches: clipping and U-Clip speed up SGD and momentum",
        "an improvement with both (figure 5, no number given)",
        lambda summary: evidence.speed(summary, ["sgd", "momentum"], [CLIP, FULL]),
    ),
    "C2": Question(
        "Norm radius 0.5, small batches: U-Clip speeds up Adam clearly",
        "a significant improvement (figure 5, no number given)",
        lambda summary: evidence.speed(summary, ["adam"], [FULL]),
    ),
    "C3": Question(
        "U-Clip rarely slows the optimizer for batch ≤ 100", "rarely (text, no number given)", evidence.rarely_slows
    ),
    "C4": Question(
        "For large batches the carry slows training or makes it less stable",
        "slower or less stable (text, no number given)",
        evidence.harms_large,
    ),
    "C5": Question(
        "Norm U-Clip with a small radius helps at small batches, over all constant radii",
        "a benefit with small radii (appendix, no number given)",
        evidence.small_radii,
    ),
    "C6": Question(
        "Adaptive regions add little to SGD and are better with carry; Welford (2, 0) with carry never reaches 99 %",
        "not much; better with carry; never (appendix)",
        evidence.adaptive_sgd,
    ),
    "C7": Question(
        "Adaptive U-Clip does not beat momentum alone",
        "does not outperform it overall (appendix)",
        lambda summary: evidence.adaptive(summary, "momentum"),
    ),
    "C8": Question(
        "Adaptive U-Clip gives Adam no clear benefit",
        "no clear benefit (appendix)",
        lambda summary: evidence.adaptive(summary, "adam"),
    ),
}
