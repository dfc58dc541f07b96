"""Argument checks shared by the public classes: each error says what is wrong and what to write instead."""

import math
from typing import Any


def number(owner: str, name: str, value: Any, *, low: float = 0.0, high: float = math.inf, low_open: bool = False, high_open: bool = False) -> None:
    """Raise unless ``value`` is a real number between ``low`` and ``high``.

    Bounds belong to the range unless the matching ``*_open`` flag is set. NaN is never inside.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{owner}: {name} must be a number, got {value!r} of type {type(value).__name__}.")
    above = value > low if low_open else value >= low
    below = value < high if high_open else value <= high
    if not (above and below):
        if low == -math.inf and high == math.inf:
            wanted = "a number, not NaN"
        elif high == math.inf:
            wanted = f"{'above' if low_open else 'at least'} {low:g}" + (" and finite" if high_open else "")
        else:
            wanted = f"in {'(' if low_open else '['}{low:g}, {high:g}{')' if high_open else ']'}"
        raise ValueError(f"{owner}: {name} must be {wanted}, got {value!r}.")


def size(owner: str, name: str, value: Any, *, zero_ok: bool = False, hint: str = "") -> None:
    """Check a radius or a multiple: a number, a schedule, or one value per parameter (checked entry by entry)."""
    if callable(value):
        return
    if isinstance(value, bool) or value is None or isinstance(value, str):
        raise TypeError(f"{owner}: {name} must be a number, a schedule step -> number, or one value per parameter; got {value!r}.")
    if isinstance(value, (int, float)):
        if math.isnan(value) or value < 0 or (value == 0 and not zero_ok):
            wanted = "at least 0" if zero_ok else "above 0"
            raise ValueError(f"{owner}: {name} must be {wanted}, got {value!r}.{' ' + hint if hint else ''}")
        return
    entries = value.values() if hasattr(value, "values") and callable(value.values) else value
    if isinstance(value, (list, tuple, dict)):
        for entry in entries:
            size(owner, name, entry, zero_ok=zero_ok, hint=hint)
