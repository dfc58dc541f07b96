"""The commands of the laboratory. They start fast: each imports what it needs when it runs."""

import sys
from typing import Annotated, Literal

from cyclopts import App, Group, Parameter

from carryclip import __version__
from carryclip import cli as library

app = App(
    name="carryclip",
    version=__version__,
    help="U-Clip: gradient clipping that keeps what it cuts off and gives it back.\n\nStart with: carryclip demo",
)


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
    from carryclip_lab.bench.main import main

    return main(quick=quick, part=part, model=model, repeats=repeats, compile=compile, jax=jax, out=out)


_Theory = Group("Figures of the theory", sort_key=2)
_Studies = Group("Studies", sort_key=1)
STORE, REPORT = "carryclip-store.sqlite", "carryclip-report"


@app.command
def reproduce(
    *what: str,
    tier: Annotated[Literal["smoke", "small", "paper"] | None, Parameter(group=_Studies)] = None,
    only: Annotated[list[str] | None, Parameter(group=_Studies)] = None,
    engine: Annotated[Literal["local", "ray"], Parameter(group=_Studies)] = "local",
    address: Annotated[str | None, Parameter(group=_Studies)] = None,
    workers: Annotated[int | None, Parameter(group=_Studies)] = None,
    threads: Annotated[int, Parameter(group=_Studies)] = 1,
    device: Annotated[str, Parameter(group=_Studies)] = "cpu",
    gpus: Annotated[float, Parameter(group=_Studies)] = 0.0,
    timeout: Annotated[float | None, Parameter(group=_Studies)] = None,
    memory: Annotated[float | None, Parameter(group=_Studies)] = None,
    data: Annotated[str | None, Parameter(group=_Studies)] = None,
    strict: Annotated[bool, Parameter(group=_Studies)] = False,
    keep: Annotated[bool, Parameter(group=_Studies)] = False,
    store: Annotated[str, Parameter(group=_Studies)] = STORE,
    resume: Annotated[bool, Parameter(group=_Studies)] = True,
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
    """Do again what the paper did: a figure of its theory, or a study of training runs.

    A study goes on where it was stopped, and ends in a report: one HTML file. Figures of the theory are saved as PNG,
    SVG and PDF with a caption and their data. Both judge the paper's claims by what they see.

    Args:
        what: a figure: aliasing, quadratics, bias, carry-bounds, adaptive-bounds, regret, norm-carry, wind-up,
            non-convex, recorded, or "theory" for all of these (a minute and a half); corrupted-rank; or studies:
            digits-smoke, cifar10-small, cifar10-slice, cifar10-paper, evidence-smoke, evidence-small, evidence-lm,
            imagenet-smoke, imagenet-mini, imagenet-paper, or a .toml file of your own. "carryclip plan" says how long
            they take.
        tier: all studies of a tier, or those of the families that are named: digits, cifar10, evidence, imagenet.
        only: a part of a study: field=value or field=value,value; several times for several fields.
        engine: "local" for processes on this machine, "ray" for a cluster.
        address: of the Ray cluster; "auto" for one that runs here.
        workers: runs at a time; as many as there are cores, or as the cluster has room for.
        threads: of each worker; another number may change the last bits of results.
        device: where to train, such as "cuda".
        gpus: share of a GPU for each worker on a cluster.
        timeout: hours after which a run is given up; 24 by default, and as many as it needs for imagenet.
        memory: GB that a worker may take before its run is given up.
        data: folder of images for imagenet: train and val, in each a folder per class; the smoke tier makes its own.
            Or a text file for the language model of evidence, instead of the one it has.
        strict: let an image that cannot be read end its run, instead of counting it.
        keep: keep the last checkpoint of every ImageNet run, beside the store.
        store: file for the results.
        resume: go on with the store that is there; --no-resume sets it aside.
        retry: do runs again that crashed, ran out of memory or took too long.
        theory: folder of the theory's figures, to have them in the report.
        steps: steps of each simulation, where the figure does not fix them (aliasing: 1500).
        seeds: simulations at each point.
        points: points of each sweep.
        seed: of everything that a simulation draws at random.
        reading: what G bounds: the noise, as the paper's sweep from 0.1 can only mean, or the gradient.
        pooled: also show the percentile over all times, not only at the last step.
        out: folder for figures and report.
    """
    if len(what) == 1 and what[0] in FIGURES:
        from carryclip_lab.theory_figures.main import main as draw
        from carryclip_lab.theory_figures.study import Scale

        return draw(what[0], Scale(steps, seeds, points, seed, reading, pooled), out or "carryclip-theory")
    from carryclip_lab.commands.reproduce import main, options_from

    options = options_from(
        engine=engine,
        address=address,
        workers=workers,
        threads=threads,
        device=device,
        gpus=gpus,
        timeout=timeout,
        memory=memory,
        data=data,
        strict=strict,
        keep=keep,
    )
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
def plan(
    *what: str,
    tier: Literal["smoke", "small", "paper"] | None = None,
    store: str = STORE,
    workers: int | None = None,
    threads: int = 1,
    device: str = "cpu",
    data: str | None = None,
    images_per_second: float | None = None,
) -> int:
    """Say what studies cost on this machine, from timing a few steps of each kind; all studies by default.

    Args:
        what: studies by name, or .toml files.
        tier: all studies of a tier.
        store: runs that are done in it already do not count.
        workers: runs at a time; as many as there are cores.
        threads: of each worker.
        device: where to train.
        data: folder of images for imagenet, without which the paper's counts are taken; or a text of your own.
        images_per_second: price ImageNet at this speed of training, measured elsewhere, instead of measuring.
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
    )


@app.command
def status(*, store: str = STORE, watch: bool = False, failed: bool = False, check: bool = False) -> int:
    """Say how far the studies of a store are.

    Args:
        store: the file.
        watch: go on until all is done.
        failed: instead, list the runs that failed, and why.
        check: instead, see whether every run is still what was written when it was done.
    """
    from carryclip_lab.commands.status import main

    return main(store, watch=watch, failed=failed, check=check)


@app.command
def report(*study: str, store: str = STORE, theory: str | None = None, out: str = REPORT) -> int:
    """Draw the figures of studies and put them into one HTML file, with the paper's claims judged.

    Args:
        study: which; all that the store has by default.
        store: the file with the results, finished or not.
        theory: folder that "carryclip reproduce theory" has written.
        out: folder for the report and its figures.
    """
    from carryclip_lab.report.build import main

    return main(store, list(study), out, theory)


@app.command
def replay(run: str, /, *, store: str = STORE, data: str | None = None) -> int:
    """Do one run again and compare every number with its record.

    Args:
        run: its id, or the beginning of it.
        store: the file with the record.
        data: folder of images, for a run of imagenet; or the text, for one of a text of your own.
    """
    from carryclip_lab.commands.replay import main

    return main(run, store, data)


@app.command
def evaluate(run: str, /, *, data: str, store: str = STORE, device: str = "cpu") -> int:
    """Say how many validation images the weights of an ImageNet run get right, finished or not.

    Args:
        run: its id, or the beginning of it.
        data: folder of images.
        store: the file with the run; its checkpoints are beside it.
        device: where to compute.
    """
    from carryclip_lab.imagenet.inspect import evaluate as main

    return main(run, store, data, device)


@app.command
def export(
    *, store: str = STORE, out: str = "carryclip-export", format: list[Literal["csv", "parquet"]] | None = None
) -> int:
    """Write runs and epochs of a store as tables for other tools.

    Args:
        store: the file with the results.
        out: folder for the tables.
        format: "csv", "parquet"; both by default.
    """
    from carryclip_lab.store.export import main

    return main(store, out, format or ["csv", "parquet"])


@app.command
def merge(into: str, /, *others: str) -> int:
    """Add the studies and results of other stores to one: what several machines have done, together.

    Args:
        into: the store that grows; made if it is not there.
        others: the stores to take from; they stay as they are.
    """
    from carryclip_lab.store.export import merge as main

    return main(into, others)


@app.command
def backup(store: str, to: str, /) -> int:
    """Copy a store to one file, also while runs are being written to it, where a plain copy would miss most of them.

    Args:
        store: the file with the results.
        to: the copy; it must not be there yet.
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
    """Get a data set and check it, so that studies find it; of ImageNet, only check the folder that you have.

    Args:
        name: which.
        source: an existing copy: a folder, or the archive.
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
def doctor() -> int:
    """Say what is installed here and what works with it: the first thing to paste into a bug report."""
    from carryclip_lab.commands.doctor import main

    return main()


def main() -> None:
    """All commands, those of the library among them."""
    result = app()
    sys.exit(result if isinstance(result, int) else 0)
