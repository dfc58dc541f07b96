"""What every study of the theory has in common: its size, its simulations, its result."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from carryclip.theory.simulate import Simulation, run
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


def simulations(settings: Iterable[dict[str, Any]], tick: Tick) -> list[Simulation]:
    """Each with its own arguments of ``carryclip.theory.simulate.run``."""

    def simulation(setting: dict[str, Any]) -> Callable[[Tick], Simulation]:
        return lambda mine: run(**setting, progress=mine)

    return side_by_side([simulation(setting) for setting in settings], tick)


def rows_of(columns: dict[str, Any]) -> list[dict[str, Any]]:
    """The numbers behind a line: from arrays of one length, and what is the same in every row."""
    lists = [value.tolist() for value in np.broadcast_arrays(*columns.values())]
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def slope(times: np.ndarray, values: np.ndarray, start: float) -> float:
    """The slope of values against times on logarithmic axes, from ``start`` on."""
    late = (times >= start) & (values > 0)
    return float(np.polyfit(np.log(times[late]), np.log(values[late]), 1)[0]) if late.sum() > 1 else float("nan")
