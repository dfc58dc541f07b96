"""The command line. It starts fast: every command imports what it needs when it runs."""

import sys

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


@app.command
def bench(
    *,
    quick: bool = False,
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
        model: which shapes: "conv-net", "ResNet50", "GPT-2 small", "600 tiny tensors"; all of them by default.
        repeats: rounds; the tables show medians and quartiles.
        compile: also time the steps that torch.compile makes.
        jax: also time optax.
        out: folder for the JSON and the figure.
    """
    from carryclip.experiments.bench.main import main

    return main(quick=quick, model=model, repeats=repeats, compile=compile, jax=jax, out=out)


@app.command
def doctor() -> int:
    """Say what is installed here and what works with it: the first thing to paste into a bug report."""
    from carryclip.doctor import main

    return main()


def main() -> None:
    """Entry point of the ``carryclip`` command."""
    result = app()
    sys.exit(result if isinstance(result, int) else 0)
