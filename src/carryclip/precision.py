"""Rounding toward zero, so that a stored update never exceeds the radius the user asked for.

A radius such as 0.1 has no exact float32, and rounding it to nearest may round it up. Everything here rounds
magnitudes down instead, for Python numbers and for arrays. An infinite radius stays infinite.
"""

import math
from typing import Any


def _significant_bits(info: Any) -> int:
    return 1 - round(math.log2(float(info.eps)))


def truncate(value: float, info: Any) -> float:
    """The largest number of a float type that is not above ``value`` (>= 0); inf stays inf.

    ``info`` is what ``torch.finfo`` or ``jax.numpy.finfo`` return.

    >>> from types import SimpleNamespace
    >>> bfloat16 = SimpleNamespace(eps=2**-7, tiny=2.0**-126, max=3.3895e38)
    >>> truncate(0.1, bfloat16)
    0.099609375
    """
    if value == math.inf or value <= 0.0:
        return max(value, 0.0)
    if value >= float(info.max):
        return float(info.max)
    mantissa, exponent = math.frexp(value)
    _, smallest_exponent = math.frexp(float(info.tiny))
    spacing = max(exponent, smallest_exponent) - _significant_bits(info)
    return math.ldexp(math.floor(math.ldexp(mantissa, exponent - spacing)), spacing)


def toward_zero(xp: Any, values: Any, dtype: Any) -> Any:
    """An array of radii rounded toward zero to ``dtype`` but kept in its own, wider type; inf stays inf.

    Where rounding to nearest went up, one step down is taken: multiplying a normal number of p significant bits by
    1 - 2^-p and rounding again lands exactly on its predecessor; among subnormals that is one spacing below.
    """
    if values.dtype == dtype:
        return values
    info = xp.finfo(dtype)
    held = xp.clip(values, 0.0, float(info.max))
    nearest = xp.astype(xp.astype(held, dtype), values.dtype)
    shrunk = nearest * (1.0 - 2.0 ** -_significant_bits(info))
    below = xp.astype(xp.astype(shrunk, dtype), values.dtype)
    below = xp.where(below < nearest, below, nearest - float(info.tiny) * float(info.eps))
    return xp.where(xp.isfinite(values), xp.where(nearest > held, below, nearest), values)


def held(xp: Any, value: Any, dtype: Any) -> Any:
    """A number of at most the largest of ``dtype``, where frameworks refuse larger ones; inf and arrays as they are."""
    if isinstance(value, (int, float)) and value != math.inf:
        return min(value, float(xp.finfo(dtype).max))
    return value


def ratio(xp: Any, numerator: Any, denominator: Any) -> Any:
    """numerator/denominator, but 0 where the denominator (a number or an array) is 0 or infinite."""
    if isinstance(denominator, (int, float)):
        return numerator / denominator if 0.0 < denominator < math.inf else numerator * 0.0
    usable = (denominator > 0.0) & xp.isfinite(denominator)
    return xp.where(usable, numerator / xp.where(usable, denominator, 1.0), 0.0)


def fit_for_squares(xp: Any, values: Any) -> Any:
    """``values`` held where their squares, and the square of a difference of two, are finite."""
    bound = float(xp.finfo(values.dtype).max) ** 0.5 / 4
    return xp.clip(values, -bound, bound)


def debias_weight(xp: Any, decay: float, count: Any) -> Any:
    """1 - decay^count for an array of counts >= 1, without the cancellation that a decay near 1 brings."""
    return -xp.expm1(count * math.log(decay)) if decay > 0.0 else xp.sign(count)


def stochastic(xp: Any, values: Any, dtype: Any, seed: Any) -> Any:
    """``values`` rounded to bfloat16, up or down by chance, so that the expectation is the value itself.

    Rounding to nearest would lose every addend below half a unit in the last place: 1024 - 1 stays 1024. The chance
    comes from a hash of ``seed`` and the position, so that a run can be repeated and resumed on any device.
    """
    values = xp.astype(values, xp.float32)
    largest = float(xp.finfo(dtype).max)
    bits = xp.as_bits(xp.clip(values, -largest, largest))
    noise = _mixed(xp.positions(values) * _signed(_STRIDE) + seed) & 0xFFFF
    # bfloat16 is the upper half of a float32: what the addition carries over is the rounding up.
    return xp.astype(xp.from_bits((bits + noise) & _signed(0xFFFF0000)), dtype)


_STRIDE = 0x9E3779B1
"""What the hash moves by from one entry to the next."""


def wrapped_seed(step: int, array: int, start: int) -> int:
    """A seed for the entries of an array from ``start`` on: the same numbers, however the array is cut.

    A little room is left at the top, because each buffer adds its own number.
    """
    seed = (seed_of(step, array, 0) + start * _STRIDE) & 0xFFFFFFFF
    return min(_signed(seed), 0x7FFFFFF0)


def seed_of(*numbers: int) -> int:
    """One 31-bit seed from several whole numbers."""
    seed = 0
    for number in numbers:
        seed = (seed ^ number) * 0x85EBCA6B + 0x165667B1 & 0x7FFFFFFF
        seed ^= seed >> 15
    return seed


def _mixed(x: Any) -> Any:
    """A 32-bit hash on wrapping signed integers, whose shifts to the right keep the sign."""
    x = x ^ (x >> 16 & 0xFFFF)
    x = x * 0x21F0AAAD
    x = x ^ (x >> 15 & 0x1FFFF)
    x = x * 0x735A2D97
    return x ^ (x >> 15 & 0x1FFFF)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
