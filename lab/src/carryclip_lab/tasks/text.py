"""A language model: a small transformer that learns to foretell the next byte of a text."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from carryclip_lab.checks import check_whole
from carryclip_lab.data.text import load_text, own_text
from carryclip_lab.data.unpack import DataError
from carryclip_lab.problem import Problem
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Place, Task
from carryclip_lab.tasks._decoder import Decoder

HELD_OUT = 0.1
"""Share of the text, at its end, that is not trained on."""
RARE = 0.05
"""Bytes are rare that together make up at most this share of the text."""
TITLES = {"tinyshakespeare": "Tiny Shakespeare", "python": "Python's help"}


@dataclass(frozen=True, kw_only=True)
class Text(Task):
    """A decoder-only transformer on the bytes of a text; warm-up over the first twentieth, then a cosine to a tenth.

    Args:
        text: ``"tinyshakespeare"``, which ``carryclip data`` fetches, ``"python"``, the help that comes with Python, or
            the checksum of a file of your own, filled in from ``--data``.
        context: bytes that go in together.
        width: of the network.
        layers: of the network.
        heads: of attention in each of them.
        windows: pieces of the held-out tenth that are measured.
        steps: of an epoch.
    """

    weights = (2e-4, 1e-3)

    text: str = "tinyshakespeare"
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    windows: int = 256
    steps: int = 250

    def __post_init__(self) -> None:
        check_whole(self, context=2, width=1, layers=1, heads=1, windows=1, steps=1)
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got {self.width} and {self.heads}.")
        if not isinstance(self.text, str) or not self.text:
            raise ValueError(f"text must be a name, got {self.text!r}.")

    def judged(self) -> Judged:
        """By the loss on what is held out."""
        return Judged(
            f"Language model, {TITLES.get(self.text, 'a text')}",
            f"{self.layers} layers of width {self.width}, {self.context} bytes of context",
            "validation_loss",
            "validation loss (nats per byte)",
            higher=False,
            little=0.01,
            bias="rare_share",
            unbiased=1.0,
            also=(
                ("rare_loss", "loss on rare bytes"),
                ("rare_share", "rare bytes are given, by their due"),
                ("frequent_share", "frequent bytes"),
            ),
        )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """Windows of the text, drawn at random; what is held out is measured in windows side by side."""
        return _Windows(spec, self, place.data)

    def at_hand(self, data: str | None) -> None:
        """The text is compared with its checksum."""
        load_text(self.text, data)

    @classmethod
    def found(cls, data: str | None, tier: str, *, make: bool) -> Mapping[str, Any]:
        """A file is a text of one's own; a folder is of images."""
        return {} if data is None or Path(data).is_dir() else {"text": own_text(data)}


@functools.lru_cache(maxsize=2)
def _encoded(name: str, file: str | None) -> tuple[Tensor, Tensor]:
    """The text as places in the list of the bytes it has, and how often each occurs in the part that is trained on."""
    content = load_text(name, file)
    known, places = np.unique(content, return_inverse=True)
    train = places[: round(len(places) * (1.0 - HELD_OUT))]
    return torch.from_numpy(places), torch.from_numpy(np.bincount(train, minlength=len(known)))


class _Windows(Problem):
    floor = 0.1
    warmup = 0.05

    def __init__(self, spec: Spec, task: Text, file: str | None) -> None:
        super().__init__(spec, task.steps)
        self.task, size = task, task.context + 1
        content, self.counts = _encoded(task.text, file)
        held = round(len(content) * (1.0 - HELD_OUT))
        self.text, rest = content[:held], content[held:]
        if len(rest) < size:
            raise DataError(f"The text has {len(content):,} bytes, too few for a context of {task.context}.")
        windows = rest[: len(rest) // size * size].view(-1, size)
        self.test = windows[torch.linspace(0, len(windows) - 1, min(task.windows, len(windows))).long()]
        order = self.counts.argsort()
        below = self.counts[order].cumsum(0) <= RARE * self.counts.sum()
        self.rare = torch.zeros(len(self.counts), dtype=torch.bool)
        self.rare[order[below]] = True

    def build(self, generator: torch.Generator) -> Decoder:
        """A network with fresh weights."""
        task = self.task
        given = {"heads": task.heads, "layers": task.layers}
        return Decoder(len(self.counts), task.context, task.width, **given, generator=generator)

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Cross-entropy of the next byte at every place of a batch of windows."""
        size = self.task.context + 1
        starts = torch.randint(len(self.text) - size + 1, (self.spec.batch, 1), generator=generator)
        windows = self.text[starts + torch.arange(size)]
        return cross_entropy(net(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def measure(self, net: Any) -> dict[str, Any]:
        """Loss on what is held out and on its rare bytes; what rare and frequent bytes are given, by their due."""
        losses, given = [], torch.zeros(len(self.counts), dtype=torch.float64)
        for windows in self.test.split(64):
            logits = net(windows[:, :-1]).flatten(0, 1)
            losses.append(cross_entropy(logits, windows[:, 1:].flatten(), reduction="none"))
            given += logits.softmax(1).double().sum(0)
        loss, targets = torch.cat(losses).double(), self.test[:, 1:].flatten()
        seen = torch.bincount(targets, minlength=len(self.counts)).double()
        rare = self.rare[targets]
        return {
            "validation_loss": float(loss.mean()),
            "rare_loss": float(loss[rare].mean()),
            "rare_share": float(given[self.rare].sum() / seen[self.rare].sum()),
            "frequent_share": float(given[~self.rare].sum() / seen[~self.rare].sum()),
        }
