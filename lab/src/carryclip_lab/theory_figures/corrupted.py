"""Two ranks, one of them with corrupted gradients: clip before averaging, or after?

Real processes train softmax regression on the digits under DDP. Each method is run clean and corrupted, with the same
data in the same order, and the error is the distance between the two runs.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from carryclip_lab.analysis.claims import Claim, Verdict
from carryclip_lab.theory_figures.drawing import panels
from carryclip_lab.theory_figures.study import Result, Scale, Study, Tick, rows_of

RANKS, SEEDS, STEPS, BATCH = 2, 5, 300, 16
RADIUS, RATE = 0.5, 0.1
CORRUPTED_SHARE, CORRUPTION = 0.05, 100.0
"""In so many steps the second rank's gradient is another one's, this many times as large."""
METHODS = {
    "SGD": ("none", None),
    "average, then clip": ("after", False),
    "average, then U-Clip": ("after", True),
    "average, then U-Clip (gated)": ("after", "gated"),
    "clip, then average": ("before", False),
    "U-Clip, then average": ("before", True),
    "U-Clip (gated), then average": ("before", "gated"),
}
LOOKS = {"none": "0.5", "after": "C3", "before": "C0"}
DASHES = {None: ":", False: "-", True: "--", "gated": "-."}


def compute(scale: Scale, tick: Tick) -> dict[str, np.ndarray]:
    """Distances over time, by method, seed and step: between corrupted and clean, and between clean and plain SGD."""
    import torch.multiprocessing as processes

    with tempfile.TemporaryDirectory() as folder:
        running: Any = processes.spawn(_work, (folder, scale.seed), nprocs=RANKS, join=False)
        total = SEEDS * len(METHODS) * 2
        while not running.join(timeout=0.5):
            tick(len(list(Path(folder).glob("done-*"))), total)
        with np.load(Path(folder) / "found.npz") as found:
            return dict(found)


def _work(rank: int, folder: str, seed: int) -> None:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    errors = np.zeros((len(METHODS), SEEDS, STEPS))
    noise = np.zeros((len(METHODS), SEEDS, STEPS))
    for each in range(SEEDS):
        base: Any = None
        for place, (order, carry) in enumerate(METHODS.values()):
            paths = []
            for corrupted in (False, True):
                paths.append(_train(rank, order, carry, corrupted, RANKS * (seed + each), data))
                if rank == 0:
                    (Path(folder) / f"done-{each}-{place}-{corrupted}").touch()
            clean, spoiled = paths
            base = clean if base is None else base
            errors[place, each] = np.linalg.norm(spoiled - clean, axis=1)
            noise[place, each] = np.linalg.norm(clean - base, axis=1)
    if rank == 0:
        np.savez(Path(folder) / "found.npz", errors=errors, noise=noise)
    dist.destroy_process_group()


def _train(rank: int, order: str, carry: Any, corrupted: bool, seed: int, data: Any) -> np.ndarray:
    """The weights after each step."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from carryclip import Gated, Norm
    from carryclip.torch import LocalUClip, UClip

    inputs, targets = data
    torch.manual_seed(seed)
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    policy = Gated() if carry == "gated" else carry
    if order == "after":
        UClip(optimizer, Norm(RADIUS), policy, metrics_every=0)
    elif order == "before":
        LocalUClip(model, optimizer, Norm(RADIUS), policy, metrics_every=0)
    dice = np.random.default_rng([seed, rank])
    weights = []
    for _ in range(STEPS):
        mine = dice.integers(len(targets), size=BATCH)
        wrong = dice.random() < CORRUPTED_SHARE
        chosen, scale = targets[mine], 1.0
        if corrupted and rank == 1 and wrong:
            chosen, scale = (chosen + 1) % 10, CORRUPTION
        optimizer.zero_grad()
        (scale * nn.functional.cross_entropy(model(inputs[mine]), chosen)).backward()
        optimizer.step()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy().copy())
    return np.stack(weights)


def limits_one_rank(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether clipping before averaging ends nearer to the clean run, seed by seed, in most of them and on average."""
    return bool((before < after).mean() > 0.75 and before.mean() < after.mean())


def verdict(limited: list[bool], cancels: list[bool]) -> Verdict:
    """P1: for clipping with and without carry, that clipping first limits one bad rank, and averaging first noise."""
    parts = [*limited, *cancels]
    return "holds" if all(parts) else "holds in part" if any(parts) else "contradicted"


def present(scale: Scale, found: dict[str, np.ndarray]) -> Result:
    """Errors by corruption on the left, by clipping itself on the right."""
    figure, left, right = panels()
    names = list(METHODS)
    rows = []
    titles = {"errors": "One rank corrupted: distance to the clean run", "noise": "No corruption: distance to SGD"}
    for axis, (key, title) in zip((left, right), titles.items(), strict=True):
        for place, (name, (order, carry)) in enumerate(METHODS.items()):
            if key == "noise" and order == "none":
                continue
            middle = np.median(found[key][place], axis=0)
            axis.plot(np.arange(1, STEPS + 1), middle, label=name, color=LOOKS[order], linestyle=DASHES[carry])
        axis.set(yscale="log", xlabel="step", ylabel="distance of the weights", title=title)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    for place, name in enumerate(names):
        ended = {"to_clean_run": found["errors"][place, :, -1], "clean_run_to_sgd": found["noise"][place, :, -1]}
        rows += rows_of({"method": name, "seed": np.arange(len(ended["to_clean_run"])), **ended})
    ends = {key: {name: found[key][place, :, -1] for place, name in enumerate(names)} for key in ("errors", "noise")}
    pairs = {
        "clip": ("clip, then average", "average, then clip"),
        "U-Clip": ("U-Clip, then average", "average, then U-Clip"),
    }
    limited = {kind: limits_one_rank(*(ends["errors"][name] for name in pair)) for kind, pair in pairs.items()}
    cancels = {kind: limits_one_rank(*(ends["noise"][name] for name in pair[::-1])) for kind, pair in pairs.items()}
    ours = "; ".join(
        f"{kind}: one bad rank {np.median(ends['errors'][first]):.2f} before averaging, "
        f"{np.median(ends['errors'][second]):.2f} after; noise alone {np.median(ends['noise'][first]):.2f} and "
        f"{np.median(ends['noise'][second]):.2f}"
        for kind, (first, second) in pairs.items()
    )
    claim = Claim(
        "P1",
        "Clip-then-aggregate limits one bad device; aggregate-then-clip lets noise cancel first",
        "text, no number given",
        ours,
        verdict(list(limited.values()), list(cancels.values())),
    )
    caption = (
        f"Two ranks, softmax regression on the digits, SGD with learning rate {RATE}, {BATCH} examples a rank, norm "
        f"{RADIUS}, {SEEDS} seeds (medians). Left: in {CORRUPTED_SHARE:.0%} of the steps the second rank's labels are "
        f"wrong and its gradient is {CORRUPTION:g} times as large; distance of the weights to the same method's clean "
        f"run. Right: no corruption, distance to SGD's run. At the end: {ours}. In either order the carry pays "
        f"corruption back, and a gate changes little of that ({np.median(ends['errors'][names[6]]):.2f} and "
        f"{np.median(ends['errors'][names[3]]):.2f}): where a rank may be corrupted, clip without a carry."
    )
    return Result(figure, caption, rows, [claim])


STUDY = Study("One corrupted rank of two", compute, present, in_paper=False)
