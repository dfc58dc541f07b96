"""Metrics to read without waiting, and warnings that name a remedy.

The step leaves one small vector on the device. It is brought to the host only when a number is asked for, or by a copy
that runs beside the training and is looked at when it has arrived.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from carryclip.carry import CarryPolicy, policy_of
from carryclip.diagnosis import FEED_MEMORY, LAST_STEP, RUNNING, dangers, warn_user
from carryclip.torch._state import Ledger

COPY_EVERY = 10
"""Measured steps between two copies to the host."""
_UNNAMED = ("streak", "feed", "weight", "step")
"""What the vector holds beside the metrics: for the warnings, and which step was measured."""


class Metrics(Mapping[str, float]):
    """The metrics of the last measured step and the running ones, as a read-only mapping of floats.

    The numbers are fetched from the device together, when the first of them is used.
    """

    def __init__(self, vector: Tensor, watch: "Watch | None" = None) -> None:
        self._vector = vector
        self._watch = watch
        self._values: dict[str, float] | None = None

    @property
    def step(self) -> int:
        """Number of the measured step, counted from 0; -1 if none was measured yet, and then its figures are NaN."""
        return int(self._fetched()["step"])

    def _fetched(self) -> dict[str, float]:
        if self._values is None:
            values = self._vector.tolist()
            self._values = dict(zip((*LAST_STEP, *RUNNING, *_UNNAMED), values, strict=True))
            if self._watch is not None:
                self._watch.check(values)
        return self._values

    def __getitem__(self, name: str) -> float:
        if name not in LAST_STEP + RUNNING:
            raise KeyError(f"{name!r} is not a metric; there are {', '.join(LAST_STEP + RUNNING)}.")
        return self._fetched()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(LAST_STEP + RUNNING)

    def __len__(self) -> int:
        return len(LAST_STEP + RUNNING)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value:.4g}" for name, value in self.items())
        return f"Metrics(step={self.step}, {inside})"


def has_values(vector: Tensor) -> bool:
    """False for traced, fake and meta tensors."""
    return type(vector) is Tensor and not vector.is_meta


class Watch:
    """Keeps the last measured vector, and warns once of each danger."""

    def __init__(self, ledger: Ledger, where: str, carry: CarryPolicy, *, quiet: bool) -> None:
        self.ledger = ledger
        self.where = where
        self.quiet = quiet
        self.bounded = policy_of(carry).bounded
        self.warned: set[str] = set()
        self.reset()

    def reset(self) -> None:
        """Forget what was measured, because a checkpoint was loaded."""
        self.measured = False
        """Whether a step was measured, skipped or not."""
        self._last: Tensor | None = None
        """The metrics of the last step that was measured and counted, and its number."""
        self._feed: Tensor | None = None
        """Exponential averages of the feed and of 1; their quotient is free of the bias toward the first zeros."""
        self._measured = 0
        self._mail: tuple[Tensor, Any] | None = None

    def record(self, vector: Tensor, skip: Tensor | None, step: int) -> None:
        """Take in a measured step; a skipped one leaves the figures of the one before."""
        if skip is not None and skip.is_cpu and has_values(skip) and bool(skip):
            return
        last, feed = self._figures()
        vector = torch.cat([vector.to(last.dtype), torch.full_like(last[:1], step)])
        fed = torch.stack([vector[LAST_STEP.index("carry_feed")], torch.ones_like(vector[0])])
        moved = FEED_MEMORY * feed + (1.0 - FEED_MEMORY) * fed
        self._last = vector if skip is None else torch.where(skip, last, vector)
        self._feed = moved if skip is None else torch.where(skip, feed, moved)
        self.measured = True
        self._measured += 1
        self._collect()

    def _figures(self) -> tuple[Tensor, Tensor]:
        """(metrics and number of the last measured step, averages of the feed), NaN and 0 before the first."""
        if self._last is not None and self._feed is not None:
            return self._last, self._feed
        dropped = self.ledger.dropped
        last = torch.full((len(LAST_STEP) + 1,), math.nan, device=dropped.device, dtype=dropped.dtype)
        last[-1] = -1.0
        return last, torch.zeros_like(last[:2])

    def vector(self) -> Tensor:
        """Metrics, then the figures only the warnings use, then the step; a new tensor on the device."""
        ledger = self.ledger
        last, feed = self._figures()
        extra = [ledger.skipped, ledger.dropped, ledger.streak, *feed]
        return torch.cat([last[:-1], torch.stack([x.to(last.dtype) for x in extra]), last[-1:]])

    def metrics(self) -> Metrics:
        """A snapshot; it waits for the device only when a number is used."""
        return Metrics(self.vector(), self)

    def _collect(self) -> None:
        """Look at the copy sent last if it is here, and send another now and then."""
        if self._mail is not None and (self._mail[1] is None or self._mail[1].query()):
            values, self._mail = self._mail[0].tolist(), None
            self.check(values)
        if self._mail is None and self._measured % COPY_EVERY == 0:
            vector = self.vector()
            if not has_values(vector):
                return
            if vector.device.type == "cpu":
                self._mail = (vector, None)
                return
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            arrived = torch.Event(vector.device)
            arrived.record()
            self._mail = (host, arrived)

    def check(self, values: list[float]) -> None:
        """Warn of what the figures show; each warning comes once."""
        if self.quiet:
            return
        named = dict(zip((*LAST_STEP, *RUNNING, *_UNNAMED), values, strict=True))
        carried = 0.0 if self.bounded else named["carry_ratio"]
        look = "clipper.nonfinite_parameters() names the parameters"
        for kind, message in dangers(carried, named["feed"], named["weight"], named["streak"], look):
            self.warn(kind, message)

    def warn(self, kind: str, message: str) -> None:
        """Issue a warning of this kind unless it was given before."""
        if kind not in self.warned:
            self.warned.add(kind)
            warn_user(f"U-Clip on {self.where}: {message}")
