"""What the torch engine of version 0.1 computed, so that later engines can be held to it.

``python tests/engine_traces.py`` writes two files. ``engine_traces.npz`` holds gradients and, for every cell, what
came of them; ``engine_checkpoints.pt`` holds checkpoints after five steps and how those runs went on. Both were
written by the engine of version 0.1: written anew by a later one they would prove nothing, so that is a thing to do
only with that version checked out.

Only what users can reach is looked at: gradients after ``optimizer.step()``, ``clipper.carry()``,
``clipper.metrics()``, and the entries ``uclip_...`` of the optimizer's state and param groups.
"""

import copy
import functools
import hashlib
import json
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carryclip import EWMA, Adaptive, Capped, Component, Gated, Leaky, Norm, Sign, Symmetric, Welford
from carryclip.torch import UClip
from cases import CELLS as BATTERY
from cases import GROUPS, POLICIES, REGIONS, SHAPES, heavy_tailed

FILE = Path(__file__).with_name("engine_traces.npz")
CHECKPOINTS_FILE = Path(__file__).with_name("engine_checkpoints.pt")
PREFIX = "uclip_"
Row = list[Tensor | None]
"""One step's gradients; None where a parameter has none."""
Arrays = dict[str, Tensor]

SEEDS, STEPS, LARGE_STEPS = (1, 3, 4, 5), 12, 5
KEPT_STEPS, KEPT_LARGE_STEPS = 3, 2
"""Last steps whose updates are kept; of exact cells a digest of all steps is kept besides."""
LATER_METRICS = ("delay",)
"""What that engine did not tell."""
SAMPLE = 50
"""Entries that are kept of a large array."""

LARGE_SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (200, 200),
    "long": (300_000,),
    "short": (7,),
    "number": (),
    "empty": (0, 3),
    "channels last": (8, 16, 5, 5),
    "channels last, gradient as usual": (4, 6, 3, 3),
    "transposed": (64, 96),
    "gradient transposed": (48, 80),
    "bias": (64,),
}
LARGE_GROUPS = (0, 0, 0, 1, 1, 1, 1, 2, 2, 2)
LARGE_REGIONS: dict[str, Any] = {
    "component": Component(0.15),
    "sign": Sign(0.2),
    "adaptive welford": Adaptive(mean=1, std=1, moments=Welford()),
    "adaptive ewma": Adaptive(mean=1, std=0.5, moments=EWMA()),
    "symmetric": Symmetric(std=1.0, moments=EWMA()),
    "norm": Norm(30.0),
    "norm per group": Norm(9.0, over="group"),
    "norm per tensor": Norm(2.0, over="tensor"),
}
LARGE_POLICIES: dict[str, Any] = {
    "full": True,
    "none": False,
    "gated": Gated(),
    "capped": Capped(3),
    "leaky": Leaky(0.5),
}


@dataclass(frozen=True)
class Cell:
    """A region, a policy and a type; a large one has tensors that are cut, packed and oddly laid out."""

    region: str
    policy: str
    dtype: str
    large: bool = False

    @property
    def name(self) -> str:
        return f"{'large, ' if self.large else ''}{self.region}, {self.policy}, {self.dtype}"

    @property
    def rule(self) -> tuple[Any, Any]:
        """The region and the policy themselves."""
        if self.large:
            return LARGE_REGIONS[self.region], LARGE_POLICIES[self.policy]
        return REGIONS[self.region], POLICIES[self.policy]

    @property
    def exact(self) -> bool:
        """Whether each coordinate is clipped by itself, so that no order of adding up can show in the bits."""
        return not isinstance(self.rule[0], Norm)

    @property
    def steps(self) -> int:
        return LARGE_STEPS if self.large else STEPS

    def rows(self) -> list[Row]:
        """The gradients, in the cell's type."""
        if self.large:
            return large_rows(getattr(torch, self.dtype))
        return small_rows((len(self.region) + len(self.policy)) % len(SEEDS), getattr(torch, self.dtype))

    def params(self) -> list[torch.nn.Parameter]:
        if self.large:
            kind = getattr(torch, self.dtype)
            return [torch.nn.Parameter(laid_out(n, torch.zeros(s, dtype=kind))) for n, s in LARGE_SHAPES.items()]
        return small_params(self.dtype)


CELLS = [Cell(*cell) for cell in BATTERY]
CELLS += [Cell(region, policy, "float32", large=True) for region in LARGE_REGIONS for policy in LARGE_POLICIES]
CELLS += [
    Cell(region, policy, "bfloat16", large=True)
    for region in ("component", "adaptive welford", "norm per group")
    for policy in ("full", "gated")
]


def nothing(clipper: UClip) -> None:
    """Leave the clipper as it is."""


def trace(cell: Cell, prepare: Callable[[UClip], None] = nothing) -> Arrays:
    """Run a cell and return what is kept of it, by name; ``prepare`` is given the clipper before the first step."""
    params = cell.params()
    optimizer = torch.optim.SGD(grouped(params, LARGE_GROUPS if cell.large else GROUPS), lr=0.01)
    region, policy = cell.rule
    # That engine measured the steps 0, 3, 6, ...; the last of them is measured here as well.
    clipper = UClip(optimizer, region, carry=policy, metrics_every=(cell.steps - 1) // 3 * 3 + 1)
    prepare(clipper)
    whole = not cell.large
    kept, first = {}, cell.steps - (KEPT_STEPS if whole else KEPT_LARGE_STEPS)
    digests: dict[str, list[bytes]] = {}
    for number, row in enumerate(cell.rows()):
        give(params, row)
        optimizer.step()
        if cell.exact:
            bytes_of_step(digests, params, optimizer)
        if number >= first and (whole or not cell.exact):
            kept |= {f"update {number} of {k}": p.grad.clone() for k, p in enumerate(params) if p.grad is not None}
    for k, param in enumerate(params):
        entries = {key: value for key, value in optimizer.state[param].items() if key.startswith(PREFIX)}
        carry = entries.get("uclip_carry", torch.zeros_like(clipper.carry(param)))
        assert torch.equal(clipper.carry(param), carry)
        if whole or not cell.exact:
            kept |= {f"{key} of {k}": entries[key] for key in sorted(entries)}
    for k, group in enumerate(optimizer.param_groups):
        numbers = {key: value for key, value in group.items() if key.startswith(PREFIX) and not isinstance(value, str)}
        kept |= {f"{key} of group {k}": torch.as_tensor(numbers[key]) for key in sorted(numbers)}
    metrics = clipper.metrics()
    kept["metrics"] = torch.tensor([metrics[name] for name in metrics if name not in LATER_METRICS])
    kept["measured step"] = torch.tensor(metrics.step)
    if not whole:
        kept = {name: sample(values) for name, values in kept.items()}
    for name, found in digests.items():
        # A whole array is in the file as well, so for small cells one digest of all steps is enough.
        found = found if cell.large else [hashlib.sha256(b"".join(found)).digest()]
        kept[f"digest of {name}"] = torch.from_numpy(np.frombuffer(b"".join(found), np.uint8).reshape(-1, 32).copy())
    clipper.remove()
    return {name: values.detach().clone() for name, values in kept.items()}


def bytes_of_step(digests: dict[str, list[bytes]], params: list[Any], optimizer: torch.optim.Optimizer) -> None:
    """Append SHA-256 over the bytes of all updates, and of each kind of buffer."""
    updates = [p.grad for p in params]
    if not any(u.any() for u in updates if u is not None):
        # A skipped step sends zeros, and away from the host some of them are -0, which makes no difference.
        updates = [None if u is None else torch.zeros_like(u) for u in updates]
    digests.setdefault("updates", []).append(digest(updates))
    names = {key for p in params for key in optimizer.state[p] if key.startswith(PREFIX)}
    for key in sorted(names):
        digests.setdefault(key, []).append(digest(optimizer.state[p].get(key) for p in params))


def digest(arrays: Iterable[Tensor | None]) -> bytes:
    """SHA-256 over the bytes in the order of the coordinates, however they lie in memory."""
    found = hashlib.sha256()
    for values in arrays:
        found.update(b"none" if values is None else bits(values).reshape(-1).numpy().data)
    return found.digest()


def bits(values: Tensor) -> Tensor:
    """The numbers as integers of the same width, so that NaN equals itself; -0 counts as 0, whose sign is nobody's."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = values + 0.0 if values.is_floating_point() else values
    return values.detach().contiguous().view(kinds[values.element_size()])


def sample(values: Tensor) -> Tensor:
    """About ``SAMPLE`` entries, evenly spaced; the odd stride meets every column of the usual widths."""
    return values.reshape(-1)[:: values.numel() // SAMPLE | 1] if values.numel() > SAMPLE else values


def grouped(params: list[Any], groups: Iterable[int]) -> list[dict[str, Any]]:
    numbered = list(zip(params, groups, strict=True))
    return [{"params": [p for p, group in numbered if group == k]} for k in sorted({group for _, group in numbered})]


def give(params: list[Any], row: Row) -> None:
    for param, gradient in zip(params, row, strict=True):
        # clone() keeps the layout, and the engine writes into what it is given.
        param.grad = None if gradient is None else gradient.clone()


# ------------------------------------------------------------------ gradients


def small_params(dtype: str) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape in SHAPES]


def draw() -> tuple[np.ndarray, np.ndarray]:
    """Gradients end to end for each seed and step, and which of the parameters have one; one step has a NaN."""
    values = np.zeros((len(SEEDS), STEPS, sum(int(np.prod(shape)) for shape in SHAPES)))
    given = np.ones((len(SEEDS), STEPS, len(SHAPES)), bool)
    for k, seed in enumerate(SEEDS):
        for step, row in enumerate(heavy_tailed(seed, STEPS, missing=0.3)):
            given[k, step] = [gradient is not None for gradient in row]
            full = [np.zeros(s) if g is None else g for s, g in zip(SHAPES, row, strict=True)]
            values[k, step] = np.concatenate([np.ravel(g) for g in full])
        bad = 3 + k % 2  # step 3 would be measured, step 4 is the last before the checkpoints
        given[k, bad] = True
        values[k, bad, 5 * k] = np.nan
        # Something comes and goes, or the cells would not show what becomes of the rest.
        assert 0 < (~given[k]).any(axis=1).sum() < STEPS // 2
    return values, given


@functools.cache
def drawn() -> tuple[np.ndarray, np.ndarray]:
    """The gradients of the file: another release of NumPy may draw others."""
    with np.load(FILE) as file:
        return file["gradients"], file["given"]


@functools.cache
def small_rows(k: int, dtype: torch.dtype) -> list[Row]:
    values, given = (found[k] for found in drawn())
    ends = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
    return [
        [
            torch.tensor(part.reshape(shape)).to(dtype) if here else None
            for part, shape, here in zip(np.split(row, ends), SHAPES, present, strict=True)
        ]
        for row, present in zip(values, given, strict=True)
    ]


@functools.cache
def large_rows(dtype: torch.dtype) -> list[Row]:
    """Heavy tails out of whole numbers and one division, which come out the same on every machine."""
    rows: list[Row] = []
    for step in range(LARGE_STEPS):
        row: Row = []
        for k, (name, shape) in enumerate(LARGE_SHAPES.items()):
            count = int(np.prod(shape))
            one, two = (hashed(np.arange(count), 1000 * step + 10 * k + j) for j in range(2))
            size = 2.0**24 / (np.maximum(one % 2**24, two % 2**24) + 1) - 1.0
            values = 0.1 * np.where(one & 2**30, size, -size) + 0.02
            gradient = torch.tensor(values.reshape(shape)).to(dtype)
            row.append(laid_out(name, gradient, gradient=True))
        rows.append(row)
    rows[1][1] = rows[1][8] = rows[4][3] = None
    rows[2][5][0, 0, 0, 0] = torch.nan
    return rows


def hashed(numbers: np.ndarray, seed: int) -> np.ndarray:
    """31 bits of splitmix64."""
    with np.errstate(over="ignore"):
        x = (numbers.astype(np.uint64) + np.uint64(1 + (seed << 32))) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x >> np.uint64(33)).astype(np.int64)


def laid_out(name: str, values: Tensor, *, gradient: bool = False) -> Tensor:
    """The same numbers, in memory as the name says."""
    if name == "channels last" or (name.startswith("channels last,") and not gradient):
        return values.contiguous(memory_format=torch.channels_last)
    if name == "transposed" or (name == "gradient transposed" and gradient):
        return values.t().contiguous().t()
    return values


# ------------------------------------------------------------------ checkpoints


@dataclass(frozen=True)
class Setup:
    """A run that is saved after ``SAVED`` steps and goes on to ``END``."""

    region: Any
    policy: Any = True
    dtype: str = "float32"
    # By powers of two, so that the optimizer's own rounding is the same on every machine.
    maker: Callable[[Any], torch.optim.Optimizer] = lambda groups: torch.optim.SGD(groups, lr=0.125, momentum=0.5)
    explicit: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        return not isinstance(self.region, Norm)


SAVED, END = 5, 10
SETUPS = {
    "component": Setup(Component(0.3)),
    "norm per group, gated": Setup(Norm(0.9, over="group"), Gated()),
    "norm per tensor": Setup(Norm(0.6, over="tensor")),
    "adaptive welford, gated": Setup(Adaptive(mean=1, std=1, moments=Welford()), Gated()),
    "adaptive ewma of bfloat16": Setup(Adaptive(mean=1, std=0.5, moments=EWMA()), dtype="bfloat16"),
    "component, carry in bfloat16": Setup(Component(0.3), options={"carry_dtype": "bfloat16"}),
    "norm with AdamW": Setup(Norm(1.0), maker=lambda groups: torch.optim.AdamW(groups, lr=0.01)),
    "explicit, component gated": Setup(Component(0.3), Gated(), explicit=True),
    "explicit, norm gated": Setup(Norm(1.1), Gated(), explicit=True),
}


class Run:
    """A setup's parameters, optimizer and clipper."""

    def __init__(self, setup: Setup, prepare: Callable[[UClip], None] = nothing) -> None:
        self.setup = setup
        self.params = small_params(setup.dtype)
        self.optimizer = setup.maker(grouped(self.params, GROUPS))
        target = self.params if setup.explicit else self.optimizer
        self.clipper = UClip(target, setup.region, carry=setup.policy, **setup.options)
        prepare(self.clipper)

    def train(self, start: int, stop: int) -> None:
        for row in small_rows(0, getattr(torch, self.setup.dtype))[start:stop]:
            give(self.params, row)
            if self.setup.explicit:
                self.clipper.clip_()
            self.optimizer.step()

    def save(self) -> dict[str, Any]:
        """What users save: the parameters, the optimizer's state, and in the explicit form the clipper's."""
        saved = {"params": [p.detach() for p in self.params], "optimizer": self.optimizer.state_dict()}
        return copy.deepcopy(saved | ({"clipper": self.clipper.state_dict()} if self.setup.explicit else {}))

    def load(self, saved: dict[str, Any]) -> None:
        saved = copy.deepcopy(saved)
        for param, values in zip(self.params, saved["params"], strict=True):
            param.data.copy_(values)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.setup.explicit:
            self.clipper.load_state_dict(saved["clipper"])

    def result(self) -> Arrays:
        """Parameters and carries."""
        found = {f"parameter {k}": p.detach() for k, p in enumerate(self.params)}
        found |= {f"uclip_carry of {k}": self.clipper.carry(p) for k, p in enumerate(self.params)}
        return {name: values.clone() for name, values in found.items()}


def entries_of(saved: dict[str, Any]) -> dict[str, Any]:
    """All of U-Clip's entries in a checkpoint, by place: tensors, numbers and words."""
    inner = saved.get("clipper", saved["optimizer"])
    groups = inner["groups"] if "clipper" in saved else inner["param_groups"]
    places = {f"of group {k}": entries for k, entries in enumerate(groups)}
    places |= {f"of {k}": entries for k, entries in inner["state"].items()}
    return {
        f"{key} {place}": value
        for place, entries in places.items()
        for key, value in entries.items()
        if key.startswith(PREFIX)
    }


@functools.cache
def checkpoints() -> dict[str, dict[str, Any]]:
    """For each setup what was ``saved`` and, as ``end``, the ``result()`` of going on."""
    return torch.load(CHECKPOINTS_FILE, weights_only=True)


# ------------------------------------------------------------------ files


def pack(cells: dict[str, Arrays]) -> dict[str, np.ndarray]:
    """One vector for each type and an index: hundreds of small files in the archive would be mostly headers."""
    index = [
        (cell, name, str(values.dtype).removeprefix("torch."), list(values.shape))
        for cell, arrays in cells.items()
        for name, values in arrays.items()
    ]
    columns: dict[str, list[np.ndarray]] = {}
    for cell, name, dtype, _ in index:
        columns.setdefault(dtype, []).append(bits(cells[cell][name]).reshape(-1).numpy())
    packed = {dtype: np.concatenate(parts) for dtype, parts in columns.items()}
    return packed | {"index": np.frombuffer(json.dumps(index).encode(), np.uint8)}


@functools.cache
def stored() -> dict[str, Arrays]:
    """What the engine of version 0.1 left, by the name of the cell."""
    with np.load(FILE) as file:
        columns = {name: torch.from_numpy(file[name]) for name in file.files if hasattr(torch, name)}
        index = json.loads(file["index"].tobytes())
    cells: dict[str, Arrays] = {}
    starts = dict.fromkeys(columns, 0)
    for cell, name, dtype, shape in index:
        stop = starts[dtype] + int(np.prod(shape))
        cells.setdefault(cell, {})[name] = columns[dtype][starts[dtype] : stop].view(getattr(torch, dtype)).view(shape)
        starts[dtype] = stop
    return cells


def write() -> None:
    """Let the present engine write both files."""
    torch.set_num_threads(1)  # as in the tests
    gradients = dict(zip(("gradients", "given"), draw(), strict=True))
    np.savez_compressed(FILE, **gradients)
    np.savez_compressed(FILE, **gradients, **pack({cell.name: trace(cell) for cell in CELLS}))
    found = {}
    for name, setup in SETUPS.items():
        run = Run(setup)
        run.train(0, SAVED)
        saved = run.save()
        run.train(SAVED, END)
        found[name] = {"saved": saved, "end": run.result()}
    torch.save(found, CHECKPOINTS_FILE)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "U-Clip on")  # tails this heavy bring spikes, and the warning says so
    write()
