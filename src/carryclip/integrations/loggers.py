"""Metrics under names that cannot be confused, for whatever draws curves."""

import math
from collections.abc import Mapping
from typing import Any

from carryclip.diagnosis import RUNNING

NAMES = {
    "grad_norm": "before_clip/gradient_norm",
    "sum_norm": "before_clip/sum_norm",
    "update_norm": "after_clip/update_norm",
    "carry_norm": "carry/norm",
    "carry_ratio": "carry/largest_in_radii",
    "carry_feed": "carry/feed",
    "delay": "carry/delay_in_steps",
    "dropped_norm": "carry/dropped_norm",
    "radius_norm": "clip/radius_norm",
    "clipped_fraction": "clip/clipped_fraction",
    "skipped_steps": "clip/skipped_steps",
}
"""What each metric of a clipper is called in a log: where in the step it is taken, then what it is."""


def scalars(metrics: Mapping[str, float], prefix: str = "uclip") -> dict[str, float]:
    """The metrics of a clipper for a logger; nothing of a step that was not measured yet. Waits for the device.

    >>> scalars({"grad_norm": 3.0, "update_norm": 1.0})
    {'uclip/before_clip/gradient_norm': 3.0, 'uclip/after_clip/update_norm': 1.0}
    """
    found = {f"{prefix}/{NAMES[name]}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if not math.isnan(value)}


class News:
    """What a clipper has to tell since the last time: a measurement is told once, running totals always."""

    def __init__(self, clipper: Any, prefix: str = "uclip") -> None:
        self._clipper = clipper
        self._prefix = prefix
        self._told = -1

    def scalars(self) -> dict[str, float]:
        """As the function; a figure that is logged again and again would look like a measurement of each step."""
        metrics = self._clipper.metrics()
        known, self._told = metrics.step == self._told, metrics.step
        return scalars({name: metrics[name] for name in RUNNING} if known else metrics, self._prefix)


def log_to(writer: Any, clipper: Any, step: int, prefix: str = "uclip") -> None:
    """Write a clipper's metrics to TensorBoard's ``SummaryWriter``, or anything that has its ``add_scalar``."""
    for name, value in scalars(clipper.metrics(), prefix).items():
        writer.add_scalar(name, value, step)
