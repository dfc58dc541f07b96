"""Best top-1 accuracy by way of clipping, as the paper's table of ImageNet has it: median and range over seeds."""

import statistics
from dataclasses import dataclass

from carryclip_lab.analysis.claims import Claim
from carryclip_lab.analysis.naming import CLIP, FULL, NONE, Method, RegionName
from carryclip_lab.analysis.summary import Cell, Summary, runs_of
from carryclip_lab.analysis.tables import Table
from carryclip_lab.analysis.verdicts import same_table
from carryclip_lab.store.records import FAULTS
from carryclip_lab.tasks.imagenet import ImageNet

PAPER: dict[tuple[RegionName, Method], tuple[float, float]] = {
    (RegionName("none"), NONE): (77.1, 0.1),
    (RegionName("component", (0.25,)), FULL): (77.2, 0.2),
    (RegionName("component", (0.25,)), CLIP): (77.1, 0.2),
    (RegionName("norm", (0.25,)), FULL): (75.6, 0.3),
    (RegionName("norm", (0.25,)), CLIP): (76.2, 0.1),
    (RegionName("EWMA", (1.0, 2.0)), FULL): (77.2, 0.1),
    (RegionName("EWMA", (1.0, 2.0)), CLIP): (77.1, 0.3),
    (RegionName("EWMA", (10.0, 0.0)), FULL): (76.8, 0.2),
    (RegionName("EWMA", (10.0, 0.0)), CLIP): (77.0, 0.1),
    (RegionName("Welford", (1.0, 2.0)), FULL): (77.2, 0.2),
    (RegionName("Welford", (1.0, 2.0)), CLIP): (76.9, 0.3),
    (RegionName("Welford", (10.0, 0.0)), FULL): (61.2, 1.2),
    (RegionName("Welford", (10.0, 0.0)), CLIP): (72.7, 0.4),
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
    def method(self) -> Method:
        """What is done to the gradients."""
        return self.cell.setting.method

    @property
    def paper(self) -> tuple[float, float] | None:
        """The paper's median and range, if it has them."""
        return PAPER.get((self.cell.setting.name, self.method))

    @property
    def where(self) -> str:
        """The region in words, or the method if there is none; batch and learning rate if there are others."""
        region = self.cell.setting.name
        words = self.method.words if region.kind == "none" else region.label
        return words + (f" (batch {self.cell.batch}, lr {self.lr:g})" if self.several else "")

    @property
    def name(self) -> str:
        """Method and region in words."""
        return self.where if self.cell.setting.region is None else f"{self.method.label}, {self.where}"

    @property
    def median(self) -> float | None:
        """Over seeds; None if none is done."""
        return statistics.median(self.best) if self.best else None

    @property
    def rank(self) -> float:
        """For sorting: the better the higher, the lowest without a result."""
        return -1.0 if self.median is None else self.median


def rows_of(summary: Summary) -> list[Row]:
    """Every way of clipping, the best first, those without a result last."""
    several = len(summary.batches) > 1 or any(len(cell.runs) > 1 for cell in summary.cells)
    rows = []
    for cell in summary.cells:
        found = [Row(cell, lr, tuple(_bests(summary, cell, lr)), several) for lr in cell.runs]
        rows.append(max(found, key=lambda row: row.rank))
    return sorted(rows, key=lambda row: row.rank, reverse=True)


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
    specs = [record.spec for cell in summary.cells for record in cell.records]
    own = {(spec.optimizer, spec.lr, spec.batch, spec.epochs) for spec in specs}
    counts = {"data": dict(summary.settings).get("data")}
    same = own == {("nesterov", 0.1, 4096, 90)} and dict(summary.settings) == {**vars(ImageNet()), **counts}
    return same and summary.tier == "paper"


def table(summary: Summary) -> Table:
    """Every way of clipping; the paper's numbers stand beside ours only if the runs are the paper's."""
    own = is_papers(summary)
    heads = ["region", "carry", "best top-1 (%)", "seeds"] + (["the paper"] if own else [])
    lines = []
    for row in rows_of(summary):
        line = [row.where, _CARRY.get(row.method, row.method.label), *_numbers(row)]
        if own:
            line.append(" ± ".join(f"{number:.1f}" for number in row.paper or ()))
        lines.append(line)
    return Table(heads, lines)


_CARRY = {NONE: "", CLIP: "no", FULL: "yes"}


def _numbers(row: Row) -> list[str]:
    if row.median is None:
        return ["no run done", "0"]
    half = (max(row.best) - min(row.best)) / 2
    return [f"{row.median:.1f} ± {half:.1f}" if len(row.best) > 1 else f"{row.median:.1f}", str(len(row.best))]


def judged(summary: Summary) -> list[Claim]:
    """The paper's table as one claim; runs of another size show their numbers but no verdict."""
    rows = rows_of(summary)
    done, planned = runs_of(summary.cells)
    seen = [f"{row.name} {row.median:.1f}" for row in rows if row.median is not None]
    pairs = [(row.median, *row.paper) for row in rows if row.median is not None and row.paper]
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
