"""The commands of the laboratory. They start fast: each imports what it needs when it runs."""

import errno
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter

from carryclip import __version__
from carryclip import cli as library
from carryclip_lab.engine.settings import REPORT, STORE, Options

app = App(
    name="carryclip",
    version=__version__,
    help="Gradient clipping that does not bias training, and the studies behind it.\n\nStart with: carryclip demo",
    default_parameter=Parameter(negative=(), show_default=lambda value: str(value) if value else None),
)
_Json = Annotated[bool, Parameter(name="--json")]


@app.command
def demo(*, quick: bool = False, out: str = "carryclip-demo") -> int:
    """Go through it all in a few minutes, with nothing to download: theory, training, and a report to open.

    Draws the figures of the theory, trains scikit-learn's digits with and without clipping and carry, and puts both
    into one HTML file with the paper's claims judged.

    Args:
        quick: a first look: one seed, one batch size, small simulations; judges nothing.
        out: folder for report, figures and results; a demo that was stopped goes on from there.
    """
    from carryclip_lab.commands.demo import main

    return main(quick=quick, out=out)


BenchPart = Literal["clipping", "overhead", "scaling", "end-to-end", "optax", "theory"]


@app.command
def bench(
    *,
    quick: bool = False,
    part: list[BenchPart] | None = None,
    model: list[str] | None = None,
    repeats: int | None = None,
    compile: Annotated[bool, Parameter(negative="--no-compile")] = True,
    jax: Annotated[bool, Parameter(negative="--no-jax")] = True,
    out: str = "carryclip-bench",
) -> int:
    """Measure what clipping costs on this machine, beside the clipping you have and bare optimizers.

    Everything is timed by turns in one run, so that ratios mean something on a noisy machine. It takes about twenty
    minutes, and GPT-2 small needs a machine with 24 GB of memory; --quick takes a minute or two.

    Args:
        quick: measure two small models only, and compile nothing.
        part: measure only this part; give it several times for several parts. Everything by default.
        model: measure only models of this shape: "conv-net", "ResNet50", "GPT-2 small" or "600 tiny tensors". All of
            them by default.
        repeats: how often everything is timed; the tables show medians and quartiles.
        compile: also time the steps that torch.compile makes.
        jax: also time optax.
        out: folder for the figures as JSON and for the picture.
    """
    from carryclip_lab.bench.main import main

    return main(quick=quick, part=part, model=model, repeats=repeats, compile=compile, jax=jax, out=out)


USUAL = Options()
_Theory = Group("Figures of the theory", sort_key=2)
_Studies = Group("Studies", sort_key=1)
FULL = 2**20
"""Bytes below which a disk counts as full."""


@app.command
def reproduce(
    *what: str,
    tier: Annotated[Literal["smoke", "small", "paper"] | None, Parameter(group=_Studies)] = None,
    only: Annotated[list[str] | None, Parameter(group=_Studies)] = None,
    options: Annotated[Options, Parameter(name="*", group=_Studies)] = USUAL,
    store: Annotated[str, Parameter(group=_Studies)] = STORE,
    resume: Annotated[bool, Parameter(group=_Studies, negative="--no-resume")] = True,
    retry: Annotated[bool, Parameter(group=_Studies)] = False,
    theory: Annotated[str | None, Parameter(group=_Studies)] = None,
    steps: Annotated[int, Parameter(group=_Theory)] = 10_000,
    seeds: Annotated[int, Parameter(group=_Theory)] = 1000,
    points: Annotated[int, Parameter(group=_Theory)] = 20,
    seed: Annotated[int, Parameter(group=_Theory)] = 0,
    reading: Annotated[Literal["noise", "gradient"], Parameter(group=_Theory)] = "noise",
    pooled: Annotated[bool, Parameter(group=_Theory)] = False,
    out: str | None = None,
) -> int:
    """Reproduce a study of training runs, or the figures of the theory.

    A study goes on where it was stopped, and ends in a report: one HTML file. Figures of the theory are saved as PNG,
    SVG and PDF with a caption and their data, and shown together on one page. Both judge the paper's claims by what
    they see. "carryclip studies" lists everything, and "carryclip plan" says how long studies take.

    Args:
        what: a figure: aliasing, quadratics, bias, carry-bounds, adaptive-bounds, regret, norm-carry, wind-up,
            non-convex, recorded, or "theory" for all of these (a minute and a half); corrupted-rank; or studies:
            digits-smoke, cifar10-small, cifar10-slice, cifar10-claims, cifar10-paper, evidence-smoke, evidence-small,
            evidence-lm, rl-smoke, rl-small, imagenet-smoke, imagenet-mini, imagenet-paper, or a .toml file of your own.
        tier: all studies of this size, or those of the families named: digits, cifar10, evidence, rl, imagenet.
        only: run a part of a study: field=value, or field=value,value. Give it once for each field to restrict.
        options: how to run it.
        store: file that holds the results.
        resume: go on from the results in the store; --no-resume renames the old store and begins anew.
        retry: repeat runs that crashed, ran out of memory or took too long.
        theory: folder with the theory's figures ("carryclip reproduce theory" writes it), to be shown in the report.
        steps: steps of each simulation, unless the figure fixes them (aliasing has 1500).
        seeds: simulations at each point.
        points: points of each sweep.
        seed: seed of the simulations' random numbers.
        reading: what the paper's G bounds: the noise, which its sweep from 0.1 implies, or the gradient.
        pooled: also show the percentile over all times, not only at the last step.
        out: folder for figures and report.
    """
    if len(what) == 1 and what[0] in FIGURES:
        from carryclip_lab.theory_figures.main import main as draw
        from carryclip_lab.theory_figures.study import Scale

        return draw(what[0], Scale(steps, seeds, points, seed, reading, pooled), out or "carryclip-theory")
    from carryclip_lab.commands.reproduce import main

    return main(
        what,
        tier=tier,
        only=only or [],
        options=options,
        store=store,
        resume=resume,
        retry=retry,
        out=out or REPORT,
        theory=theory,
    )


FIGURES = (
    "theory", "aliasing", "quadratics", "bias", "carry-bounds", "adaptive-bounds", "regret", "norm-carry", "wind-up",
    "non-convex", "recorded", "corrupted-rank",
)  # fmt: skip


@app.command
def studies(*what: str, as_json: _Json = False) -> int:
    """List the studies and figures that can be reproduced, or what the named studies consist of.

    Args:
        what: studies by name, or .toml files, to show what --only can choose of them.
        as_json: print JSON, for programs.
    """
    from carryclip_lab.commands.studies import main

    return main(what, as_json=as_json)


@app.command
def plan(
    *what: str,
    tier: Literal["smoke", "small", "paper"] | None = None,
    store: str = STORE,
    workers: int | None = None,
    threads: int = 1,
    device: str = "cpu",
    data: str | None = None,
    images_per_second: float | None = None,
    as_json: _Json = False,
) -> int:
    """Say how long studies take on this machine, after timing a few steps of each kind.

    Without a name it times all studies, for about ten minutes.

    Args:
        what: studies by name, or .toml files.
        tier: all studies of this size.
        store: file with results; runs that are done in it do not count.
        workers: how many runs are trained at a time; by default one for each core.
        threads: threads of each worker.
        device: device to train on.
        data: folder of images for imagenet, whose files are counted (otherwise ImageNet's are taken); or a text.
        images_per_second: speed of training on another machine, to estimate ImageNet there instead of measuring here.
        as_json: print JSON, for programs.
    """
    from carryclip_lab.commands.plan import ask

    return ask(
        what,
        tier=tier,
        store=store,
        workers=workers,
        threads=threads,
        device=device,
        data=data,
        images_per_second=images_per_second,
        as_json=as_json,
    )


@app.command
def status(
    *, store: str = STORE, watch: bool = False, failed: bool = False, check: bool = False, as_json: _Json = False
) -> int:
    """Show the progress of studies: how many of their runs are done, running, waiting or failed.

    Args:
        store: file with the results.
        watch: keep showing it until everything is done.
        failed: list the runs that failed instead, and why.
        check: check instead that no finished run has been altered or damaged.
        as_json: print JSON, for programs.
    """
    from carryclip_lab.commands.status import main

    return main(store, watch=watch, failed=failed, check=check, as_json=as_json)


@app.command
def report(*study: str, store: str = STORE, theory: str | None = None, out: str = REPORT) -> int:
    """Draw the figures of studies and put them into one HTML file, with the paper's claims judged.

    Args:
        study: names of studies; all that the store has by default.
        store: file with the results, finished or not.
        theory: folder that "carryclip reproduce theory" has written, to be shown as well.
        out: folder for the report and its figures.
    """
    from carryclip_lab.report.build import main

    return main(store, list(study), out, theory)


@app.command
def replay(run: str, /, *, store: str = STORE, data: str | None = None) -> int:
    """Repeat one run and compare every number with its record.

    Args:
        run: id of the run, or the beginning of it; the report lists ids.
        store: file with the record.
        data: folder of images for a run of imagenet, or the text file for a run on a text of your own.
    """
    from carryclip_lab.commands.replay import main

    return main(run, store, data)


@app.command
def evaluate(run: str, /, *, data: str, store: str = STORE, device: str = "cpu") -> int:
    """Measure the validation accuracy of an ImageNet run's weights, whether the run is finished or not.

    Args:
        run: id of the run, or the beginning of it.
        data: folder of images.
        store: file with the run; its checkpoints are beside it.
        device: device to compute on.
    """
    from carryclip_lab.imagenet.inspect import evaluate as main

    return main(run, store, data, device)


@app.command
def export(
    *, store: str = STORE, out: str = "carryclip-export", format: list[Literal["csv", "parquet"]] | None = None
) -> int:
    """Write runs and epochs of a store as tables for other tools.

    Args:
        store: file with the results.
        out: folder for the tables.
        format: "csv" or "parquet"; both by default.
    """
    from carryclip_lab.store.export import main

    return main(store, out, format or ["csv", "parquet"])


@app.command
def merge(into: str, /, *others: str) -> int:
    """Copy the studies and results of several stores, such as those of several machines, into one.

    Args:
        into: store to add to; it is made if it does not exist.
        others: stores to copy from; they stay as they are.
    """
    from carryclip_lab.store.export import merge as main

    return main(into, others)


@app.command
def backup(store: str, to: str, /) -> int:
    """Copy a store to one file, safely even while it is in use, when a plain copy would miss the latest runs.

    Args:
        store: file with the results.
        to: file for the copy; it must not exist yet.
    """
    from carryclip_lab.store.export import backup as main

    return main(store, to)


@app.command
def data(
    name: Literal["cifar10", "tinyshakespeare", "imagenet"],
    /,
    *,
    source: Annotated[str | None, Parameter(name="--from")] = None,
) -> int:
    """Download a data set and check it, so that studies find it. Of ImageNet, only check the folder that you have.

    Args:
        name: name of the data set.
        source: folder or archive to take instead of a download.
    """
    if name == "imagenet":
        from carryclip_lab.imagenet.inspect import check

        return check(source)
    if name == "tinyshakespeare":
        from carryclip_lab.data.text import main as get_text

        return get_text(source)
    from carryclip_lab.data.cifar10 import main

    return main(name, source=source)


@app.command(help_flags=(), version_flags=())
def bounds(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Calculate how large the carry can get, what it costs in regret, and which radius to take."""
    return library.run(["bounds", *arguments])


@app.command(help_flags=(), version_flags=())
def playground(*arguments: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Open the playground: one offline page with sliders for radius, noise, learning rate and policy."""
    return library.run(["playground", *arguments])


@app.command
def doctor(*, as_json: _Json = False) -> int:
    """Say what is installed here and what works with it: the first thing to paste into a bug report.

    Args:
        as_json: print JSON, for programs.
    """
    from carryclip_lab.commands.doctor import main

    return main(as_json=as_json)


def main() -> None:
    """All commands, those of the library among them."""
    try:
        result = app()
    except BrokenPipeError:  # who reads what we print has seen enough, as "head" has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result = 1
    except Exception as error:
        full = _disk_full(error)
        if full is None:
            raise
        print(full, file=sys.stderr)
        result = 2
    sys.exit(result if isinstance(result, int) else 0)


def _disk_full(error: BaseException | None) -> str | None:
    """Which disk is full, and how to go on; None if something else is wrong.

    Files that cannot be closed for lack of room may hide that behind an error of their own, as Matplotlib's PDFs do.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            places = _full_places() if error.filename is None else [str(error.filename)]
            return (
                f"The disk that holds {' or '.join(places)} is full. Make room, then give the same command again: it "
                "goes on from what is done. Or choose another disk with --out and --store."
            )
        error = error.__cause__ or error.__context__
    return None


def _full_places() -> list[str]:
    """Where this command may write and nothing is left: an error of a write does not say in which file."""
    named = [Path(word) for word in sys.argv[1:] if not word.startswith("-")]
    found = []
    for path in (*named, Path.cwd(), Path(tempfile.gettempdir())):
        place = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if shutil.disk_usage(place).free < FULL and str(place) not in found:
            found.append(str(place))
    return found or ["the results"]
