"""The learning rate: as large as the batch, rising linearly through the warm-up, then falling by a cosine to 0."""

import math

from carryclip_lab.spec import Spec

BASE = 256
"""Examples for which a spec states its learning rate."""


def peak(spec: Spec) -> float:
    """The highest learning rate."""
    return spec.lr * spec.batch / BASE


def steps_of(spec: Spec) -> int:
    """Steps per epoch; the last partial batch is left out."""
    return spec.recipe.images // spec.batch


def rate(spec: Spec, step: int) -> float:
    """The learning rate of a step, counted from 0 over the whole run.

    >>> given = {"task": "imagenet", "optimizer": "nesterov", "lr": 0.1, "batch": 4096, "epochs": 90, "seed": 0}
    >>> spec = Spec.read(given)
    >>> steps = steps_of(spec)
    >>> steps, [round(rate(spec, epoch * steps), 4) for epoch in (0, 1, 5, 48, 90)]
    (312, [0.0, 0.32, 1.6, 0.7852, 0.0])
    """
    steps = steps_of(spec)
    warm, total = spec.recipe.warmup * steps, spec.epochs * steps
    if step < warm:
        return peak(spec) * step / warm
    return peak(spec) * 0.5 * (1.0 + math.cos(math.pi * (step - warm) / (total - warm)))
