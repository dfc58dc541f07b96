"""How the learning rate changes over a trial: a factor for each step."""

import math


def constant(step: int) -> float:
    """It does not."""
    return 1.0


def cosine(step: int, steps: int, *, warmup: float = 0.0, floor: float = 0.0) -> float:
    """Rising linearly over a share of the steps, then falling by a cosine to a share of its peak.

    >>> [round(cosine(step, 101, warmup=0.1, floor=0.1), 3) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    warm = round(warmup * steps)
    if step < warm:
        return (step + 1) / warm
    done = (step - warm) / max(1, steps - 1 - warm)
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
