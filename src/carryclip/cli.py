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
def doctor() -> int:
    """Say what is installed here and what works with it: the first thing to paste into a bug report."""
    from carryclip.doctor import main

    return main()


def main() -> None:
    """Entry point of the ``carryclip`` command."""
    result = app()
    sys.exit(result if isinstance(result, int) else 0)
