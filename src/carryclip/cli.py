"""The command line. It starts fast: every command imports what it needs when it runs."""

import sys
from typing import Literal

try:
    from cyclopts import App
except ModuleNotFoundError:  # the library itself does not need it
    sys.exit('The command line needs a few more packages:\n\n    pip install "carryclip[experiments]"\n')

from carryclip import __version__

app = App(
    name="carryclip",
    version=__version__,
    help="U-Clip: gradient clipping that keeps what it cuts off and gives it back.\n\nStart with: carryclip demo",
)


@app.command
def demo(
    *,
    epochs: int = 30,
    seeds: int = 3,
    out: str = "carryclip-demo",
) -> int:
    """Train scikit-learn's digits three ways (no clipping, plain clipping, U-Clip) and compare them.

    Takes about a minute, downloads nothing, and ends with a table and a figure.

    Args:
        epochs: passes over the training set.
        seeds: runs per method; the table shows medians.
        out: folder for the figure and the numbers.
    """
    from carryclip.experiments.demo import main

    return main(epochs=epochs, seeds=seeds, out=out)


BenchPart = Literal["clipping", "overhead", "scaling", "end-to-end", "optax", "theory"]


@app.command
def bench(
    *,
    quick: bool = False,
    part: list[BenchPart] | None = None,
    model: list[str] | None = None,
    repeats: int | None = None,
    compile: bool = True,
    jax: bool = True,
    out: str = "carryclip-bench",
) -> int:
    """Measure what clipping costs on this machine: U-Clip, the clipping you have, bare optimizers, memory's own floor.

    Everything is timed by turns in one run, so that ratios mean something on a noisy machine. Takes about twenty
    minutes, and GPT-2 small wants a machine with 24 GB of memory; --quick takes less than a minute.

    Args:
        quick: two small models, nothing compiled.
        part: only this, several times for several; everything by default.
        model: which shapes: "conv-net", "ResNet50", "GPT-2 small", "600 tiny tensors"; all of them by default.
        repeats: rounds; the tables show medians and quartiles.
        compile: also time the steps that torch.compile makes.
        jax: also time optax.
        out: folder for the JSON and the figure.
    """
    from carryclip.experiments.bench.main import main

    return main(quick=quick, part=part, model=model, repeats=repeats, compile=compile, jax=jax, out=out)


Figure = Literal[
    "theory", "aliasing", "quadratics", "bias", "carry-bounds", "adaptive-bounds", "regret", "norm-carry", "wind-up"
]


@app.command
def reproduce(
    figure: Figure,
    /,
    *,
    steps: int = 10_000,
    seeds: int = 1000,
    points: int = 20,
    seed: int = 0,
    reading: Literal["noise", "gradient"] = "noise",
    pooled: bool = False,
    out: str = "carryclip-theory",
) -> int:
    """Redraw a figure of the paper's theory, or one it has no figure for; "theory" draws all of them.

    Each is saved as PNG, SVG and PDF with a caption and its data as CSV, and the paper's claims are judged by it. The
    defaults are the paper's size; all figures take about a minute and a half.

    Args:
        figure: which one.
        steps: steps of each run, where the figure does not fix them (aliasing: 1500).
        seeds: runs at each point.
        points: points of each sweep.
        seed: of everything drawn at random.
        reading: what G bounds: the noise, as the paper's sweep from 0.1 can only mean, or the gradient.
        pooled: also show the percentile over all times, not only at the last step.
        out: folder for the figures.
    """
    from carryclip.experiments.theory.main import main
    from carryclip.experiments.theory.study import Scale

    return main(figure, Scale(steps, seeds, points, seed, reading, pooled), out)


@app.command
def bounds(
    *,
    noise: float = 1.0,
    law: Literal["uniform", "two-point", "gaussian"] = "uniform",
    mean_gradient: float = 1.0,
    radius: float | None = None,
    alpha: float | None = None,
    dimension: int = 1,
    horizon: int = 10_000,
    distance: float = 1.0,
    delta: float = 0.01,
    norm: bool = False,
    carry: float | None = None,
    regret: float | None = None,
) -> int:
    """Calculate how large the carry can get, what it costs in regret, and which radius to take.

    Sizes are per coordinate for component clipping (the default) and of the whole vector with --norm.

    Args:
        noise: size of the gradient's noise: half width (uniform), size (two-point), deviation (gaussian).
        law: of the noise; with --norm only its size counts, as a bound on its length.
        mean_gradient: bound on the size of the mean gradient.
        radius: clipping radius.
        alpha: margin of the radius above the mean gradient, instead of --radius; a tenth of the noise by default.
        dimension: number of coordinates.
        horizon: number of steps.
        distance: from the start to the optimum.
        delta: probability with which the carry may exceed its level.
        norm: norm clipping.
        carry: find the radius for this mean carry.
        regret: find the radius for this average regret.
    """
    from carryclip.experiments.calculator import ask

    return ask(
        noise=noise,
        law=law,
        mean_gradient=mean_gradient,
        radius=radius,
        alpha=alpha,
        dimension=dimension,
        horizon=horizon,
        distance=distance,
        delta=delta,
        norm=norm,
        carry=carry,
        regret=regret,
    )


@app.command
def doctor() -> int:
    """Say what is installed here and what works with it: the first thing to paste into a bug report."""
    from carryclip.doctor import main

    return main()


def main() -> None:
    """Entry point of the ``carryclip`` command."""
    result = app()
    sys.exit(result if isinstance(result, int) else 0)
