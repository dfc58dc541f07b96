"""A language model: a small transformer that learns to foretell the next byte of a text."""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from carryclip_lab.data.text import load_text
from carryclip_lab.data.unpack import DataError
from carryclip_lab.spec import Spec
from carryclip_lab.tasks.decoder import Decoder
from carryclip_lab.trials import rates

HELD_OUT = 0.1
"""Share of the text, at its end, that is not trained on."""
RARE = 0.05
"""Bytes are rare that together make up at most this share of the text."""


@functools.lru_cache(maxsize=2)
def _encoded(name: str, file: str | None) -> tuple[Tensor, Tensor]:
    """The text as places in the list of the bytes it has, and how often each occurs in the part that is trained on."""
    content = load_text(name, file)
    known, places = np.unique(content, return_inverse=True)
    train = places[: round(len(places) * (1.0 - HELD_OUT))]
    return torch.from_numpy(places), torch.from_numpy(np.bincount(train, minlength=len(known)))


class Text:
    """Windows of the text, drawn at random; what is held out is measured in windows side by side."""

    def __init__(self, spec: Spec, file: str | None = None) -> None:
        self.recipe, self.batch, self.steps = spec.recipe, spec.batch, spec.recipe.steps
        self.total = spec.epochs * self.steps
        content, self.counts = _encoded(self.recipe.text, file)
        held = round(len(content) * (1.0 - HELD_OUT))
        self.train, rest = content[:held], content[held:]
        size = self.recipe.context + 1
        if len(rest) < size:
            raise DataError(f"The text has {len(content):,} bytes, too few for a context of {self.recipe.context}.")
        windows = rest[: len(rest) // size * size].view(-1, size)
        chosen = torch.linspace(0, len(windows) - 1, min(self.recipe.windows, len(windows))).long()
        self.test = windows[chosen]
        order = self.counts.argsort()
        below = self.counts[order].cumsum(0) <= RARE * self.counts.sum()
        self.rare = torch.zeros(len(self.counts), dtype=torch.bool)
        self.rare[order[below]] = True

    def build(self, generator: torch.Generator) -> Decoder:
        """A network with fresh weights."""
        shape = self.recipe
        return Decoder(
            len(self.counts),
            shape.context,
            shape.width,
            heads=shape.heads,
            layers=shape.layers,
            generator=generator,
        )

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Cross-entropy of the next byte at every place of a batch of windows."""
        size = self.recipe.context + 1
        starts = torch.randint(len(self.train) - size + 1, (self.batch, 1), generator=generator)
        windows = self.train[starts + torch.arange(size)]
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

    def rate(self, step: int) -> float:
        """A warm-up, then a cosine down to a tenth."""
        return rates.cosine(step, self.total, warmup=0.05, floor=0.1)
