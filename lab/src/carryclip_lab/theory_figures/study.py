"""What every study of the theory has in common: its size, its result, lines that can be told apart in print."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from carryclip_lab.analysis.claims import Claim

Reading = Literal["noise", "gradient"]
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class Scale:
    """How much is computed; the defaults are the paper's."""

    steps: int = 10_000
    seeds: int = 1000
    points: int = 20
    seed: int = 0
    reading: Reading = "noise"
    """What G is: the bound on the noise, as the paper's sweep from 0.1 can only mean, or on the gradient, 1 more."""
    pooled: bool = False
    """Also show the percentile over all times, not only at the last."""

    @property
    def enough(self) -> bool:
        """Whether the paper's claims can be judged by runs of this size."""
        return self.steps >= 2000 and self.seeds >= 200 and self.points >= 10

    @property
    def tier(self) -> str:
        """``"paper"`` at the paper's size or above it, ``"small"`` below."""
        whole = Scale()
        enough = self.steps >= whole.steps and self.seeds >= whole.seeds and self.points >= whole.points
        return "paper" if enough else "small"

    def bound(self, noise: Any) -> Any:
        """G for f(x) = |x| with noise of this size."""
        return noise if self.reading == "noise" else 1.0 + np.asarray(noise)

    @property
    def said(self) -> str:
        """The reading of G, for captions."""
        return (
            "G is the bound on the noise"
            if self.reading == "noise"
            else "G is the bound on the gradient, 1 more than on the noise"
        )


@dataclass
class Result:
    """A study's figure, the sentence below it, the numbers behind it, and what they say of the paper's claims."""

    figure: Any
    caption: str
    rows: list[dict[str, Any]]
    claims: list[Claim] = field(default_factory=list)


@dataclass(frozen=True)
class Study:
    """One figure of the theory."""

    title: str
    compute: Callable[[Scale, Tick], Any]
    """The simulations; may take long."""
    present: Callable[[Scale, Any], Result]
    """The figure and what it says; fast."""
    in_paper: bool = True


LINES: dict[str, dict[str, Any]] = {
    "seen": {"color": "black", "linestyle": "-", "marker": "o", "markersize": 3.5},
    "pooled": {"color": "0.45", "linestyle": "-", "marker": "x", "markersize": 4},
    "printed": {"color": "C3", "linestyle": "--"},
    "corrected": {"color": "C0", "linestyle": "-."},
    "sharp": {"color": "C2", "linestyle": ":", "linewidth": 2.2},
}
"""By kind: told apart by dash and marker as well as by colour."""


def side_by_side(functions: Sequence[Callable[[Tick], Any]], tick: Tick) -> list[Any]:
    """Run simulations in threads, two at a time (NumPy lets go of the interpreter); ``tick`` gets their sum."""
    done = [0] * len(functions)
    totals = [0] * len(functions)
    stopped = threading.Event()

    def part(place: int) -> Any:
        def mine(now: int, total: int) -> None:
            if stopped.is_set():
                raise InterruptedError
            done[place], totals[place] = now, total
            tick(sum(done), max(sum(totals), total * len(functions)))

        return functions[place](mine)

    with ThreadPoolExecutor(2) as pool:
        try:
            return list(pool.map(part, range(len(functions))))
        except BaseException:
            stopped.set()  # the pool waits for its threads: after Ctrl-C they have nothing to finish
            raise


def panels(count: int, width: float = 5.2, height: float = 3.8) -> tuple[Any, Any]:
    """A figure with panels beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(1, count, figsize=(width * count, height), layout="constrained", squeeze=False)


def mark_no_op(axis: Any, start: float, end: float, text: str) -> None:
    """Shade the part of an axis where clipping does nothing."""
    axis.axvspan(start, end, color="0.9", zorder=0)
    axis.text(
        (start + end) / 2, 0.03, text, transform=axis.get_xaxis_transform(), ha="center", fontsize=8, color="0.25"
    )


def slope(times: np.ndarray, values: np.ndarray, start: float) -> float:
    """The slope of values against times on logarithmic axes, from ``start`` on."""
    late = (times >= start) & (values > 0)
    return float(np.polyfit(np.log(times[late]), np.log(values[late]), 1)[0]) if late.sum() > 1 else float("nan")
