"""Objectives to simulate on: the paper's, and any of your own.

A point is the last axis of ``x``; the axes before it are runs side by side (sweep points, then seeds).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Points = np.ndarray


class Problem:
    """What is asked of a problem."""

    start: Any = 0.0
    """Where runs begin: a number or one per coordinate."""
    best: float = 0.0
    """The smallest value of the objective; regret is measured from here."""
    sweep: tuple[int, ...] = ()
    """Shape of the sweep it makes by itself."""

    def value(self, x: Points) -> np.ndarray:
        """The expected objective, without the last axis."""
        raise NotImplementedError

    def slope(self, x: Points) -> Points:
        """The expected (sub)gradient."""
        raise NotImplementedError

    def gradient(self, x: Points, slope: Points, rng: np.random.Generator) -> Points:
        """One stochastic gradient per run, before additive noise; by default the expected one."""
        return slope


@dataclass(frozen=True)
class Absolute(Problem):
    """f(x) = sum of |x_i|: the paper's validation starts at 100."""

    start: Any = 100.0

    def value(self, x: Points) -> np.ndarray:
        """The 1-norm."""
        return np.abs(x).sum(-1) if x.shape[-1] > 1 else np.abs(x[..., 0])

    def slope(self, x: Points) -> Points:
        """The signs, 0 at 0."""
        return np.sign(x)


@dataclass(frozen=True)
class Quadratic(Problem):
    """f(x) = curvature·||x||²/2."""

    start: Any = 0.0
    curvature: float = 1.0

    def value(self, x: Points) -> np.ndarray:
        """curvature·||x||²/2."""
        return self.curvature * np.einsum("...i,...i->...", x, x) / 2.0

    def slope(self, x: Points) -> Points:
        """curvature·x."""
        return self.curvature * x


@dataclass(frozen=True)
class Linear(Problem):
    """A gradient that never changes, ``tilt`` in every coordinate: where carry bounds are tightest.

    An array of tilts is a sweep. It has no minimum, so its regret means nothing.
    """

    tilt: Any = 0.0
    start: Any = 0.0

    @property
    def sweep(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The shape of its tilts."""
        return np.shape(self.tilt)

    def value(self, x: Points) -> np.ndarray:
        """tilt·sum of x."""
        return np.asarray(self.tilt)[..., None] * x.sum(-1)

    def slope(self, x: Points) -> Points:
        """The constant."""
        return np.broadcast_to(np.asarray(self.tilt, float)[..., None, None], x.shape)


@dataclass(frozen=True)
class Aliasing(Problem):
    """|4x - 1| with probability 1/4, |x + 1| with 3/4: the paper's first figure. Optimum at 1/4, value 15/16.

    Clipped to 2, the gradients are those of a problem whose optimum is -1.
    """

    start: Any = 2.0
    best: float = 15.0 / 16.0

    def value(self, x: Points) -> np.ndarray:
        """|4x - 1|/4 + 3|x + 1|/4."""
        return (np.abs(4.0 * x - 1.0) / 4.0 + 0.75 * np.abs(x + 1.0)).sum(-1)

    def slope(self, x: Points) -> Points:
        """sign(4x - 1) + 3·sign(x + 1)/4."""
        return np.sign(4.0 * x - 1.0) + 0.75 * np.sign(x + 1.0)

    def gradient(self, x: Points, slope: Points, rng: np.random.Generator) -> Points:
        """Of one of the two functions."""
        return np.where(_coins(x, rng) < 0.25, 4.0 * np.sign(4.0 * x - 1.0), np.sign(x + 1.0))


@dataclass(frozen=True)
class TwoQuadratics(Problem):
    """(x - 3)²/2 or (x + 3)²/2, evenly (Chen et al., 2020). Optimum at 0, value 9/2.

    Clipped to 1, both gradients are ±1 anywhere in [-2, 2], and nothing pulls to 0.
    """

    start: Any = 1.5
    best: float = 4.5

    def value(self, x: Points) -> np.ndarray:
        """(x² + 9)/2."""
        return (np.square(x) + 9.0).sum(-1) / 2.0

    def slope(self, x: Points) -> Points:
        """The mean gradient, x."""
        return x

    def gradient(self, x: Points, slope: Points, rng: np.random.Generator) -> Points:
        """Of one of the two: x - 3 or x + 3."""
        return x + np.where(_coins(x, rng) < 0.5, 3.0, -3.0)


@dataclass(frozen=True)
class Custom(Problem):
    """An objective of your own.

    Args:
        function: x -> value, without the last axis, for points along the last axis of x.
        derivative: x -> expected (sub)gradient, in the shape of x.
        start: where runs begin: a number or one per coordinate.
        best: smallest value of the objective, for regrets.

    >>> Custom(lambda x: np.cosh(x).sum(-1), np.sinh, start=3.0, best=1.0).value(np.zeros((5, 1)))
    array([1., 1., 1., 1., 1.])
    """

    function: Callable[[Points], np.ndarray]
    derivative: Callable[[Points], Points]
    start: Any = 0.0
    best: float = 0.0

    def __post_init__(self) -> None:
        for name in ("function", "derivative"):
            if not callable(getattr(self, name)):
                raise TypeError(f"Custom: {name} must be a function of an array of points.")

    def value(self, x: Points) -> np.ndarray:
        """What the function gives."""
        return _shaped("function", self.function(x), x.shape[:-1])

    def slope(self, x: Points) -> Points:
        """What the derivative gives."""
        return _shaped("derivative", self.derivative(x), x.shape)


def _coins(x: Points, rng: np.random.Generator) -> np.ndarray:
    """One draw per seed, the same at every point of a sweep and for every coordinate."""
    return rng.random((x.shape[-2], 1))


def _shaped(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    values = np.asarray(values, float)
    if values.shape != shape:
        raise ValueError(
            f"Custom: {name} gave shape {values.shape} where {shape} was due. Points lie along the last axis of x; "
            "write it for any number of axes before that."
        )
    return values
