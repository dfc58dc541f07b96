"""JAX under the names the algorithm uses: array functions, and sums over arrays."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


class JaxNamespace:
    """The array functions ``carryclip.algorithm`` needs: traceable, and all but ``sums`` differentiable."""

    where = staticmethod(jnp.where)
    clip = staticmethod(jnp.clip)
    abs = staticmethod(jnp.abs)
    floor = staticmethod(jnp.floor)
    sort = staticmethod(jnp.sort)
    sign = staticmethod(jnp.sign)
    expm1 = staticmethod(jnp.expm1)
    sum = staticmethod(jnp.sum)
    isfinite = staticmethod(jnp.isfinite)
    finfo = staticmethod(jnp.finfo)
    float32 = jnp.float32
    maximum = staticmethod(jnp.maximum)
    max = staticmethod(jnp.max)

    @staticmethod
    def vector(values: list[Any], like: Any) -> jax.Array:
        """Scalars as a vector, in the type ``like`` has or is."""
        dtype = getattr(like, "dtype", like)
        return jnp.stack([jnp.asarray(_fitted(value, dtype), dtype) for value in values])

    @staticmethod
    def full(count: int, value: Any, like: Any) -> jax.Array:
        """A vector of equal numbers, in the type ``like`` has or is."""
        dtype = getattr(like, "dtype", like)
        return jnp.full(count, _fitted(value, dtype), dtype)

    @staticmethod
    def concat(values: list[Any], like: Any) -> jax.Array:
        """Vectors end to end, in the type ``like`` has or is."""
        return jnp.concatenate([jnp.asarray(value, getattr(like, "dtype", like)) for value in values])

    @staticmethod
    def total(values: list[Any]) -> jax.Array:
        """The sum of a list of scalars, in one operation."""
        return jnp.sum(jnp.stack(values))

    @staticmethod
    def sqrt(values: jax.Array) -> jax.Array:
        """The root, with derivative 0 instead of infinity at 0, so that 0·inf cannot turn a gradient into NaN."""
        zero = values == 0
        return jnp.where(zero, 0.0, jnp.sqrt(jnp.where(zero, 1.0, values)))

    @staticmethod
    def arange(count: int, like: jax.Array) -> jax.Array:
        """The numbers from 0 on, in the type of ``like``."""
        return jnp.arange(count, dtype=like.dtype)

    @staticmethod
    def size(values: jax.Array) -> float:
        """The number of entries."""
        return float(values.size)

    @staticmethod
    def lerp(start: jax.Array, end: jax.Array, weight: float) -> jax.Array:
        """The point at ``weight`` of the way from ``start`` to ``end``."""
        return start + weight * (end - start)

    @staticmethod
    def plus(x: jax.Array, y: jax.Array, factor: Any) -> jax.Array:
        """The sum x + factor·y."""
        return x + factor * y

    @staticmethod
    def weighted(x: jax.Array, a: Any, y: jax.Array, b: Any) -> jax.Array:
        """The sum x·a + y·b."""
        return x * a + y * b

    @classmethod
    def between(cls, x: jax.Array, a: Any, y: jax.Array, weight: float, scale: Any) -> jax.Array:
        """The vector (1 - weight)·a·x + weight·y, times ``scale``; where all else is 1 and x is y, that is x."""
        return cls.lerp(x * a, y, weight) * scale

    @staticmethod
    def allfinite(values: jax.Array) -> jax.Array:
        """Whether every entry is finite."""
        return jnp.all(jnp.isfinite(values))

    @staticmethod
    def inner(x: jax.Array, y: jax.Array) -> jax.Array:
        """The sum of x·y."""
        return jnp.sum(x * y)

    @staticmethod
    def sums(terms: Iterable[Any], *, largest: bool) -> list[jax.Array]:
        """The sum of each array or product of two, or of the last its maximum if ``largest``; for metrics only.

        One pass over all: columns first, then their sums, as one long chain of float32 additions would lose digits.
        """
        arrays = [term[0] * term[1] if isinstance(term, tuple) else term for term in terms]
        listed = [lax.stop_gradient(array) for array in arrays]  # XLA's joint reduction has no derivative
        first = [jnp.max if largest and k == len(listed) - 1 else jnp.sum for k in range(len(listed))]
        if listed[0].ndim > 1:
            start = [jnp.asarray(-jnp.inf if f is jnp.max else 0, a.dtype) for f, a in zip(first, listed, strict=True)]
            combine = [jnp.maximum if f is jnp.max else jnp.add for f in first]

            def merge(one: Any, other: Any) -> tuple[jax.Array, ...]:
                return tuple(f(x, y) for f, x, y in zip(combine, one, other, strict=True))

            listed = lax.reduce(tuple(listed), tuple(start), merge, tuple(range(listed[0].ndim - 1)))
        return [f(array) for f, array in zip(first, listed, strict=True)]

    @staticmethod
    def as_bits(values: jax.Array) -> jax.Array:
        """The bits of float32 numbers, as integers."""
        return lax.bitcast_convert_type(values, jnp.int32)

    @staticmethod
    def from_bits(bits: jax.Array) -> jax.Array:
        """The float32 numbers that have these bits."""
        return lax.bitcast_convert_type(bits, jnp.float32)

    @staticmethod
    def positions(values: jax.Array) -> jax.Array:
        """Each entry's number."""
        return lax.iota(jnp.int32, values.size).reshape(values.shape)

    @staticmethod
    def astype(values: jax.Array, dtype: Any) -> jax.Array:
        """``values`` in ``dtype``, truly rounded.

        XLA may drop a round trip through a narrower type as excess precision, and what rounding loses would then be
        missing from the carry. It never drops an explicit rounding.
        """
        if dtype in (jnp.bfloat16, jnp.float16) and values.dtype in (jnp.float32, jnp.float64):
            values = _representable(values, jnp.finfo(dtype))
        return values.astype(dtype)


class RowsNamespace(JaxNamespace):
    """The same, but with a sum for each part of an array along ``axis``; None: one sum, as a vector of one."""

    def __init__(self, axis: int | None) -> None:
        self.axis = axis

    def inner(self, x: jax.Array, y: jax.Array) -> jax.Array:  # type: ignore[override]
        """The sum of x·y in each part."""
        if self.axis is None:
            return jnp.sum(x * y).reshape(1)
        return jnp.sum(x * y, tuple(k for k in range(x.ndim) if k != self.axis))

    def sums(self, terms: Iterable[Any], *, largest: bool) -> list[jax.Array]:  # type: ignore[override]
        """The sum of each product of two arrays, in each part."""
        assert not largest
        return [lax.stop_gradient(self.inner(*term)) for term in terms]

    def size(self, values: jax.Array) -> jax.Array:  # type: ignore[override]
        """The number of entries of each part."""
        parts = 1 if self.axis is None else values.shape[self.axis]
        return jnp.full(parts, values.size / max(parts, 1))


def _fitted(value: Any, dtype: Any) -> Any:
    """A number too large for the type as infinity, without a warning."""
    return jnp.inf if isinstance(value, float) and value > float(jnp.finfo(dtype).max) else value


def _representable(values: jax.Array, narrow: Any) -> jax.Array:
    """``values`` rounded to the numbers of a narrower type, still in their own."""
    rounded = lax.reduce_precision(values, exponent_bits=narrow.nexp, mantissa_bits=narrow.nmant)
    if narrow.nexp == jnp.finfo(values.dtype).nexp:
        return rounded
    # reduce_precision flushes the narrow type's subnormals, which are the multiples of its smallest one.
    spacing = float(narrow.smallest_subnormal)
    fine = lax.round(values / spacing, lax.RoundingMethod.TO_NEAREST_EVEN) * spacing
    return jnp.where(jnp.abs(values) < float(narrow.tiny), fine, rounded)


xp: Any = JaxNamespace
