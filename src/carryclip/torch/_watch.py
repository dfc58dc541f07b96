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
from carryclip.diagnosis import (
    LAST_STEP,
    NORMS_REMEMBERED,
    RUNNING,
    Course,
    clipped_before,
    dangers,
    followed,
    is_shut,
    warn_user,
)
from carryclip.groups import describe
from carryclip.judgement import Traits
from carryclip.regions import Region
from carryclip.torch._namespace import xp
from carryclip.torch._state import Ledger

COPY_EVERY = 10
"""Measured steps between two copies to the host."""
_UNNAMED = ("streak", *Course._fields, "step")
"""What the vector holds beside the metrics: for the warnings, and which step was measured. Gradient norms follow."""
CLIPPED = "clipped before"
"""Kind of the warning that gradients arrive clipped."""
SLOW = {"wind-up", "delay"}
"""Kinds of warnings that name the cause and the remedy which that of haste has named."""


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
            self._values = _named(values)[0]
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


def _named(values: list[float]) -> tuple[dict[str, float], list[float]]:
    """The figures of a vector by name, and the gradient norms after them."""
    names = (*LAST_STEP, *RUNNING, *_UNNAMED)
    return dict(zip(names, values, strict=False)), values[len(names) :]


def has_values(vector: Tensor) -> bool:
    """False for traced, fake and meta tensors."""
    return type(vector) is Tensor and not vector.is_meta


class Watch:
    """Keeps the last measured vector, and warns once of each danger."""

    def __init__(self, ledger: Ledger, where: str, carry: CarryPolicy, traits: Traits, *, quiet: bool) -> None:
        self.ledger = ledger
        self.where = where
        self.quiet = quiet
        self.policy = policy_of(carry)
        self.traits = traits
        self.one_vector = False
        """Whether a single norm is clipped, so that ``radius_norm`` is its radius."""
        self.hasty = False
        """Whether it was warned of the carry when the clipper was attached."""
        self.warned: set[str] = set()
        self._shut_at = -2
        """The last step at which a schedule gave a radius of 0."""
        self.reset()

    def reset(self) -> None:
        """Forget what was measured, because a checkpoint was loaded or the rule has changed."""
        self.measured = False
        """Whether a step was measured, skipped or not."""
        self._last: Tensor | None = None
        """The metrics of the last step that was measured and counted, and its number."""
        self._course: Tensor | None = None
        """``Course``, as a vector."""
        self._norms: Tensor | None = None
        """The gradient norms measured last; NaN where there is none."""
        self._measured = 0
        self._mail: tuple[Tensor, Any] | None = None

    def begin_anew(self, where: str, carry: CarryPolicy) -> None:
        """The rule is another one, of which everything is to be said again but who clips before it."""
        self.where, self.policy = where, policy_of(carry)
        self.warned &= {CLIPPED}
        self.reset()

    def record(self, vector: Tensor, skip: Tensor | None, step: int) -> None:
        """Take in a measured step; a skipped one leaves the figures of the one before."""
        if skip is not None and skip.is_cpu and has_values(skip) and bool(skip):
            return
        last, course, norms = self._figures()
        vector = torch.cat([vector.to(last.dtype), torch.full_like(last[:1], step)])
        moved = followed(xp, course, last, vector)
        self._last = vector if skip is None else torch.where(skip, last, vector)
        self._course = moved if skip is None else torch.where(skip, course, moved)
        norm = vector[:1] if skip is None else torch.where(skip, math.nan, vector[:1])
        self._norms = torch.cat([norms[1:], norm])
        self.measured = True
        self._measured += 1
        self._collect()

    def _figures(self) -> tuple[Tensor, Tensor, Tensor]:
        """(metrics and number of the last measured step, the carry's course, norms); NaN and 0 before the first."""
        if self._last is not None and self._course is not None and self._norms is not None:
            return self._last, self._course, self._norms
        dropped = self.ledger.dropped
        last = torch.full((len(LAST_STEP) + 1,), math.nan, device=dropped.device, dtype=dropped.dtype)
        last[-1] = -1.0
        return last, torch.zeros_like(last[: len(Course._fields)]), dropped.new_full((NORMS_REMEMBERED,), math.nan)

    def vector(self) -> Tensor:
        """Metrics, then the figures only the warnings use, the step, and gradient norms; a new tensor on the device."""
        ledger = self.ledger
        last, course, norms = self._figures()
        extra = [ledger.skipped, ledger.dropped, ledger.streak, *course]
        return torch.cat([last[:-1], torch.stack([x.to(last.dtype) for x in extra]), last[-1:], norms])

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
        """Warn of what the figures show; each warning comes once.

        After that of haste, a second one of the same cause is enough.
        """
        named, norms = _named(values)
        self._check_norms(named, norms)
        if self.quiet:
            return
        course = Course(*(named[name] for name in Course._fields))
        how = {"unbounded": not self.policy.bounded, "smooth": self.traits.smooths, "hasty": self.policy.hasty}
        how["shut"] = is_shut(named["radius_norm"], named["grad_norm"])
        look = "clipper.nonfinite_parameters() names the parameters"
        for kind, message in dangers(
            named["carry_ratio"], course, named["streak"], look=look, optimizer=self.traits.in_words(), **how
        ):
            if not (self.hasty and kind in SLOW and self.warned & SLOW):
                self.warn(kind, message)

    def _check_norms(self, named: dict[str, float], norms: list[float]) -> None:
        """Warn of gradients that somebody has clipped before."""
        limit = clipped_before(norms, named["radius_norm"] if self.one_vector else None)
        if limit is None:
            return
        if self.quiet:
            self.warn(
                CLIPPED,
                f"gradients arrive already clipped to a norm of {limit:g}, and advise() sees only what that leaves. "
                "Take the clip_grad_norm_ call out of the training loop while you watch, or set the trainer's "
                "max_grad_norm or gradient_clip_val to 0.",
            )
        else:
            lost = "never reaches the carry" if self.policy.carries else "is lost before this clipper sees it"
            self.warn(
                CLIPPED,
                f"gradients arrive already clipped to a norm of {limit:g}, and what was cut there {lost}. Delete the "
                "clip_grad_norm_ call in the training loop, or set the trainer's max_grad_norm to 0.",
            )

    def note_shut(self, step: int, region: Region) -> None:
        """A schedule gives a radius of 0 at this step; one such step alone may be meant, as where a warm-up begins."""
        if step == self._shut_at + 1 and not self.quiet:
            fate = "is lost" if self.policy.bounded else "waits in the carry"
            self.warn(
                "shut",
                f"the radius of {describe(region)} is 0 since step {self._shut_at}: every update is 0, and what is cut "
                f"{fate}. End the schedule at a small positive radius, or call clipper.remove() where clipping is to "
                "end.",
            )
        self._shut_at = step

    def warn(self, kind: str, message: str) -> None:
        """Issue a warning of this kind unless it was given before."""
        if kind not in self.warned:
            self.warned.add(kind)
            warn_user(f"U-Clip on {self.where}: {message}")
