"""Best top-1 accuracy by way of clipping, as the paper's table of ImageNet has it: median and range over seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from carryclip_lab.analysis.claims import Claim
from carryclip_lab.analysis.naming import RegionName, region_name
from carryclip_lab.analysis.summary import Cell, Summary, runs_of
from carryclip_lab.analysis.verdicts import same_table
from carryclip_lab.store.records import FAULTS, Record
from carryclip_lab.tasks.imagenet import ImageNet

PAPER: dict[tuple[RegionName, str], tuple[float, float]] = {
    (RegionName("none"), "none"): (77.1, 0.1),
    (RegionName("component", (0.25,)), "U-Clip"): (77.2, 0.2),
    (RegionName("component", (0.25,)), "clip"): (77.1, 0.2),
    (RegionName("norm", (0.25,)), "U-Clip"): (75.6, 0.3),
    (RegionName("norm", (0.25,)), "clip"): (76.2, 0.1),
    (RegionName("EWMA", (1.0, 2.0)), "U-Clip"): (77.2, 0.1),
    (RegionName("EWMA", (1.0, 2.0)), "clip"): (77.1, 0.3),
    (RegionName("EWMA", (10.0, 0.0)), "U-Clip"): (76.8, 0.2),
    (RegionName("EWMA", (10.0, 0.0)), "clip"): (77.0, 0.1),
    (RegionName("Welford", (1.0, 2.0)), "U-Clip"): (77.2, 0.2),
    (RegionName("Welford", (1.0, 2.0)), "clip"): (76.9, 0.3),
    (RegionName("Welford", (10.0, 0.0)), "U-Clip"): (61.2, 1.2),
    (RegionName("Welford", (10.0, 0.0)), "clip"): (72.7, 0.4),
}
"""The paper's table: median and range, in percent."""


@dataclass(frozen=True, eq=False)
class Row:
    """One way of clipping at one batch size, with the learning rate that suits it best."""

    cell: Cell
    lr: float
    best: tuple[float, ...]
    """The best accuracy over the epochs, in percent, of each seed that is done."""
    several: bool = False
    """Whether there are other batch sizes or learning rates."""

    @property
    def key(self) -> tuple[RegionName, str]:
        """Region and method."""
        return region_name(self.cell.setting.region), self.cell.setting.method

    @property
    def name(self) -> str:
        """In words."""
        region, method = self.key
        bare = "no clipping" if method == "none" else method
        words = [bare] if region.kind == "none" else [method, region.label]
        return ", ".join(words) + (f" (batch {self.cell.batch}, lr {self.lr:g})" if self.several else "")

    @property
    def median(self) -> float | None:
        """Over seeds; None if none is done."""
        return statistics.median(self.best) if self.best else None

    @property
    def range(self) -> float | None:
        """Half of the distance from the worst to the best seed."""
        return (max(self.best) - min(self.best)) / 2 if self.best else None


def rows_of(summary: Summary) -> list[Row]:
    """Every way of clipping, the best first, those without a result last."""
    several = len(summary.batches) > 1 or any(len(cell.runs) > 1 for cell in summary.cells)
    rows = []
    for cell in summary.cells:
        found = [Row(cell, lr, tuple(_bests(summary, cell, lr)), several) for lr in cell.runs]
        rows.append(max(found, key=_rank))
    return sorted(rows, key=_rank, reverse=True)


def _rank(row: Row) -> float:
    return -1.0 if row.median is None else row.median


def _bests(summary: Summary, cell: Cell, lr: float) -> list[float]:
    """Of all seeds that are done; one that has diverged counts with what it had, one that failed does not."""
    found = []
    for record in cell.runs[lr].values():
        if record.state == "done" and record.outcome not in FAULTS:
            seen = [epoch.test_accuracy for epoch in summary.epochs(record.spec.id) if epoch.test_accuracy is not None]
            found.append(100.0 * max(seen, default=0.0))
    return found


def is_papers(summary: Summary) -> bool:
    """Whether these runs are the paper's in all but the numbers: only then are they compared."""
    own = {(record.spec.optimizer, record.spec.lr, record.spec.batch, record.spec.epochs) for record in _all(summary)}
    counts = {"data": dict(summary.settings).get("data")}
    same = own == {("nesterov", 0.1, 4096, 90)} and dict(summary.settings) == {**vars(ImageNet()), **counts}
    return same and summary.tier == "paper"


def _all(summary: Summary) -> list[Record]:
    return [record for cell in summary.cells for record in cell.records]


def words(summary: Summary, rows: Sequence[Row]) -> list[list[str]]:
    """The table: the paper's numbers stand beside ours only if the runs are the paper's."""
    table = []
    for row in rows:
        method = row.cell.setting.method
        carry = {"none": "", "clip": "no"}.get(method, "yes" if method == "U-Clip" else method)
        cells = [row.name.removeprefix(f"{method}, "), carry, *_numbers(row.median, row.range, len(row.best))]
        if is_papers(summary):
            cells.append(" ± ".join(f"{x:.1f}" for x in PAPER[row.key]) if row.key in PAPER else "")
        table.append(cells)
    return table


def heads(summary: Summary) -> list[str]:
    """Names of its columns."""
    return ["region", "carry", "best top-1 (%)", "seeds", *(["the paper"] if is_papers(summary) else [])]


def _numbers(median: float | None, spread: float | None, seeds: int) -> list[str]:
    if median is None or spread is None:
        return ["not yet", "0"]
    return [f"{median:.1f} ± {spread:.1f}" if seeds > 1 else f"{median:.1f}", str(seeds)]


def judged(summary: Summary) -> list[Claim]:
    """The paper's table as one claim; runs of another size show their numbers but no verdict."""
    rows = rows_of(summary)
    done, planned = runs_of(summary.cells)
    seen = [f"{row.name} {row.median:.1f}" for row in rows if row.median is not None]
    pairs = [(row.median, *PAPER[row.key]) for row in rows if row.median is not None and row.key in PAPER]
    own = is_papers(summary) and done == planned
    return [
        Claim(
            "I1",
            "ResNet50 v2 on ImageNet: U-Clip is on a par with no clipping, but for norm 0.25 and Welford (10, 0)",
            "best top-1 from 61.2 (Welford (10, 0) with carry) to 77.2 (three rows with carry); none 77.1 (table)",
            f"{summary.data}: {', '.join(seen)} (%)" if seen else "",
            same_table(pairs, len(PAPER)) if own else "not run at this size",
            tier=summary.tier,
            seeds=min((len(row.best) for row in rows), default=None),
            command=summary.command,
        )
    ]
