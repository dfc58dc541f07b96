"""The demo: digits trained three ways, with a table, a figure, and what the carry did."""

import csv
import functools
import itertools
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

from carryclip import Norm
from carryclip.experiments.output import make_folder, save_figure
from carryclip.torch import UClip

RADIUS = 0.5
LEARNING_RATE = 0.1
BATCH = 16
TARGET = 0.99
METHODS: dict[str, dict[str, Any] | None] = {
    "SGD": None,
    "SGD + clipping": {"carry": False},
    "SGD + U-Clip": {"carry": True},
}


@dataclass
class Run:
    """One training run: curves by epoch, and the clipper's metrics at the steps where they were taken."""

    method: str
    seed: int
    loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def epochs_to_target(self) -> float:
        """First epoch with the target train accuracy; infinite if there is none."""
        return next((k + 1 for k, accuracy in enumerate(self.train_accuracy) if accuracy >= TARGET), float("inf"))

    def mean(self, name: str) -> float:
        """Mean of a metric over the measured steps; 0 without a clipper."""
        return statistics.fmean(m[name] for m in self.metrics) if self.metrics else 0.0


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images and labels, test images and labels; a fixed fifth is the test set."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32) / 16.0
    labels = torch.tensor(digits)
    order = torch.tensor(np.random.default_rng(0).permutation(len(labels)))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return images[train], labels[train], images[test], labels[test]


def train(method: str, seed: int, epochs: int, data: tuple[Tensor, Tensor, Tensor, Tensor], tick: Any) -> Run:
    """Train a small net by one method; all methods see the same initial weights and batches for a seed."""
    x_train, y_train, x_test, y_test = data
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    options = METHODS[method]
    clipper = None if options is None else UClip(optimizer, Norm(RADIUS), **options)
    shuffle = torch.Generator().manual_seed(seed)
    run = Run(method, seed)
    step = 0
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(y_train), generator=shuffle).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x_train[batch]), y_train[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            if clipper is not None and step % 10 == 0:
                run.steps.append(step)
                run.metrics.append(dict(clipper.metrics()))
            step += 1
        with torch.no_grad():
            run.loss.append(torch.stack(losses).mean().item())
            run.train_accuracy.append((net(x_train).argmax(1) == y_train).float().mean().item())
            run.test_accuracy.append((net(x_test).argmax(1) == y_test).float().mean().item())
        tick()
    return run


def table(runs: list[Run], epochs: int) -> Table:
    """The comparison: medians over seeds."""
    shown = Table(
        title=f"digits: batch {BATCH}, lr {LEARNING_RATE}, norm radius {RADIUS}, {epochs} epochs, medians over seeds"
    )
    shown.add_column("method", no_wrap=True)
    for column in (
        "epochs\nto 99 %",
        "final\nloss",
        "test\naccuracy",
        "clipped\nsteps",
        "largest\ncarry",
        "carry\nfeed",
    ):
        shown.add_column(column, justify="right", no_wrap=True)
    for method, options in METHODS.items():
        mine = [run for run in runs if run.method == method]

        def middle(values: Any) -> float:
            return statistics.median(values)

        reached = middle(run.epochs_to_target() for run in mine)
        clips, carries = options is not None, options is not None and options["carry"]
        shown.add_row(
            method,
            f"{reached:g}" if reached < float("inf") else "never",
            f"{middle(run.loss[-1] for run in mine):.2g}",
            f"{middle(run.test_accuracy[-1] for run in mine):.1%}",
            f"{middle(run.mean('clipped_fraction') for run in mine):.0%}" if clips else "-",
            f"{middle(max(m['carry_ratio'] for m in run.metrics) for run in mine):.1f} radii" if carries else "-",
            f"{middle(run.mean('carry_feed') for run in mine):+.2f}" if carries else "-",
        )
    return shown


def draw(runs: list[Run], folder: Path) -> list[Path]:
    """Training loss of the three methods, and the carry beside the gradient and the radius."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for method, style in zip(METHODS, (("0.55", ":"), ("C0", "--"), ("C3", "-")), strict=True):
        curves = np.array([run.loss for run in runs if run.method == method])
        epochs = np.arange(1, curves.shape[1] + 1)
        left.plot(epochs, np.median(curves, 0), color=style[0], linestyle=style[1], linewidth=2, label=method)
        left.fill_between(epochs, curves.min(0), curves.max(0), color=style[0], alpha=0.15, linewidth=0)
    left.set(yscale="log", xlabel="epoch", ylabel="training loss", title="Training loss: median and range over seeds")
    left.legend(frameon=False)
    shown = next(run for run in runs if run.method == "SGD + U-Clip")
    lines = {
        "gradient": ("grad_norm", "0.6", "-", 0.8),
        "carry": ("carry_norm", "C3", "-", 1.6),
        "update": ("update_norm", "C0", "-", 1.0),
    }
    for label, (name, colour, line, width) in lines.items():
        right.plot(
            shown.steps, [m[name] for m in shown.metrics], color=colour, linestyle=line, linewidth=width, label=label
        )
    right.axhline(RADIUS, color="black", linewidth=1, linestyle="--", label="radius")
    right.set(xlabel="step", ylabel="Euclidean norm", title=f"What U-Clip did (seed {shown.seed})")
    right.legend(frameon=False, ncols=2)
    return save_figure(figure, folder, "demo")


def write_csv(runs: list[Run], path: Path) -> None:
    """The curves, one row per run and epoch."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "epoch", "loss", "train_accuracy", "test_accuracy"])
        for run in runs:
            rows = zip(run.loss, run.train_accuracy, run.test_accuracy, strict=True)
            writer.writerows([run.method, run.seed, k + 1, *row] for k, row in enumerate(rows))


def main(*, epochs: int, seeds: int, out: str) -> int:
    """Run the demo and say where to look."""
    console = Console()
    if epochs < 1 or seeds < 1:
        console.print(f"[red]epochs and seeds must be at least 1; got epochs={epochs}, seeds={seeds}.")
        return 2
    folder = make_folder(out, console)
    if folder is None:
        return 2
    torch.set_num_threads(1)  # so small a net is faster on one
    data, runs, start = load(), [], time.perf_counter()
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("training", total=len(METHODS) * seeds * epochs)
        for seed, method in itertools.product(range(seeds), METHODS):
            tick = functools.partial(progress.update, task, advance=1, description=method)
            runs.append(train(method, seed, epochs, data, tick))
    console.print(table(runs, epochs))
    console.print(
        "Clipped steps: share of steps where gradient plus carry was too long. Carry feed: how much of a radius each "
        "gradient adds in the carry's direction (near +1 for long would mean that the carry winds up)."
    )
    figures = draw(runs, folder)
    write_csv(runs, folder / "demo.csv")
    console.print(
        f"\nDone in {time.perf_counter() - start:.0f} s. Open [bold]{figures[0]}[/bold]; "
        f"the curves are in {folder / 'demo.csv'}."
    )
    return 0
