"""Checks of what a study chooses: each error names the field, what it should be and what it is."""

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any


class UserError(Exception):
    """Something that whoever types a command can put right; the message says what, and how."""


def check_choice(name: str, value: Any, known: Sequence[str]) -> None:
    """One of some words."""
    if value not in known:
        near = hint(str(value), known, f"choose from {', '.join(known)}.")
        raise ValueError(f"there is no {name} {value!r}; {near}")


def check_keys(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Complain about a key that is not known, with the nearest that is."""
    for key in given:
        if key not in known:
            near = hint(key, known, f"known are {', '.join(known)}.")
            raise ValueError(f"{where}: there is no {key!r}; {near}")


def hint(word: str, known: Sequence[str], otherwise: str) -> str:
    """The nearest known word as a question."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


def check_whole(thing: Any, **least: int) -> None:
    """Fields that must be whole numbers, each with the least it may be."""
    for name, bound in least.items():
        value = getattr(thing, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            raise ValueError(f"{name} must be a whole number, at least {bound}; got {value!r}.")


def make_float(thing: Any, name: str, *, least: float = 0.0, above: float = -1.0, below: float = math.inf) -> None:
    """Make a field a finite number, in bounds."""
    value = getattr(thing, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not least <= value < below or not value > above:
        low = f"above {above:g}" if above >= 0.0 else f"at least {least:g}"
        high = "" if below == math.inf else f" and below {below:g}"
        raise ValueError(f"{name} must be a number {low}{high}, got {value!r}.")
    object.__setattr__(thing, name, float(value))
