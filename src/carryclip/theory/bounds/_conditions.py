"""Where a bound holds: inputs outside its conditions raise, with the condition named."""

import math
from typing import Any, Literal

import numpy as np

Array = Any
"""A number or an array of numbers; all arguments of a bound broadcast against each other."""

Form = Literal["printed", "corrected"]
"""The paper's formula as it stands, so that its figures can be redrawn, or what its proof gives when mended."""


class OutsideConditionsError(ValueError):
    """A bound was asked for where it does not hold."""


def need(owner: str, condition: str, holds: Array, **given: Array) -> None:
    """Raise unless ``holds`` everywhere; the message names the condition and the first values that break it."""
    holds = np.asarray(holds)
    if holds.all():
        return
    first = np.unravel_index(int(np.argmin(holds)), holds.shape)
    shown = ", ".join(
        f"{name} = {float(np.broadcast_to(np.asarray(value, float), holds.shape)[first]):g}"
        for name, value in given.items()
    )
    raise OutsideConditionsError(f"{owner} needs {condition}; got {shown}.")


MAY_BE_INFINITE = ("t", "steps", "rate")


def numbers(owner: str, **given: Array) -> list[np.ndarray]:
    """The arguments as float arrays of one shape; NaN, infinity and what is no number are refused."""
    arrays = []
    for name, value in given.items():
        array = _array(owner, name, value)
        if name in MAY_BE_INFINITE:
            need(owner, f"a number for {name}", ~np.isnan(array), **{name: array})
        else:
            need(owner, f"a finite {name}", np.isfinite(array), **{name: array})
        arrays.append(array)
    try:
        return list(np.broadcast_arrays(*arrays))
    except ValueError:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in zip(given, arrays, strict=True))
        raise ValueError(f"{owner}: the arguments' shapes do not go together: {shapes}.") from None


def _array(owner: str, name: str, value: Array) -> np.ndarray:
    try:
        array = np.asarray(value)
        if array.dtype.kind in "iuf" or array.size == 0:
            return array.astype(float)
    except (TypeError, ValueError, OverflowError):
        pass
    raise TypeError(f"{owner}: {name} must be a number or an array of numbers, got {_short(value)}.")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def positive(owner: str, why: str = "", **given: Array) -> None:
    """Raise unless every argument is above 0."""
    for name, value in given.items():
        need(owner, f"{name} > 0" + (f" ({why})" if why else ""), np.asarray(value) > 0.0, **{name: value})


def nonnegative(owner: str, why: str = "", **given: Array) -> None:
    """Raise unless every argument is at least 0."""
    for name, value in given.items():
        need(owner, f"{name} >= 0" + (f" ({why})" if why else ""), np.asarray(value) >= 0.0, **{name: value})


def probability(owner: str, delta: Array) -> None:
    """Raise unless ``delta`` lies in (0, 1)."""
    need(owner, "0 < delta < 1", (np.asarray(delta) > 0.0) & (np.asarray(delta) < 1.0), delta=delta)


def step(owner: str, t: Array) -> None:
    """Raise unless ``t`` is a number of a step, from 1, or infinite for a bound that holds at every step."""
    t = np.asarray(t)
    need(owner, "t >= 1 (the carry is 0 at t = 1)", t >= 1.0, t=t)


def form_is(owner: str, form: str) -> bool:
    """True for the printed form, False for the corrected one."""
    if form not in ("printed", "corrected"):
        raise ValueError(f"{owner}: form must be 'printed' or 'corrected', got {form!r}.")
    return form == "printed"


def above_mean(owner: str, alpha: Array) -> None:
    """Raise unless the margin alpha is positive and finite."""
    alpha = np.asarray(alpha)
    why = "the radius must exceed the mean gradient by alpha; at 0 the carry is a random walk, below it winds up"
    need(owner, f"alpha > 0 ({why})", (alpha > 0.0) & (alpha < math.inf), alpha=alpha)
