"""Noise laws of mean zero: how to draw from them, and what the bounds need to know of them.

A scale may be a number or an array; an array is a sweep (see ``carryclip.theory.simulate``), and all its points see the
same standard draws.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from carryclip import _checks

Array = Any
"""A number or an array of numbers."""


class Noise:
    """What is asked of a noise law. What a law does not have is infinite."""

    scale: Array

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Independent draws for a scale of 1."""
        raise NotImplementedError

    @property
    def bound(self) -> Array:
        """The largest absolute value."""
        return np.full(np.shape(self.scale), math.inf)[()]

    @property
    def variance(self) -> Array:
        """The variance."""
        raise NotImplementedError

    @property
    def proxy(self) -> Array:
        """The smallest s² known with E exp(θξ) <= exp(θ²s²/2) for every θ."""
        return np.full(np.shape(self.scale), math.inf)[()]

    def log_mgf(self, theta: Array) -> Array:
        """The larger of log E exp(θξ) and log E exp(-θξ), for θ >= 0."""
        raise NotImplementedError(f"{type(self).__name__} has no moment generating function in closed form.")

    def _check(self) -> None:
        _positive(type(self).__name__, "scale", self.scale)


@dataclass(frozen=True)
class Uniform(Noise):
    """Uniform on [-scale, scale]: the noise of the paper's validation.

    >>> Uniform(0.5).bound, float(round(Uniform(0.5).variance, 4))
    (0.5, 0.0833)
    """

    scale: Array = 1.0

    def __post_init__(self) -> None:
        self._check()

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Uniform on [-1, 1)."""
        return 2.0 * rng.random(shape) - 1.0

    @property
    def bound(self) -> Array:
        """Its half width."""
        return self.scale

    @property
    def variance(self) -> Array:
        """scale²/3."""
        return np.square(self.scale) / 3.0

    @property
    def proxy(self) -> Array:
        """Its variance, for which sinh(x)/x <= exp(x²/6) is the proof. The paper takes scale², three times that."""
        return self.variance

    def log_mgf(self, theta: Array) -> Array:
        """log(sinh(θ·scale)/(θ·scale))."""
        z = np.abs(np.multiply(theta, self.scale))
        small, large = np.minimum(z, 0.03), np.maximum(z, 0.03)
        # sinh(z)/z - 1 by its series where the quotient would cancel.
        series = np.log1p(small**2 / 6.0 * (1.0 + small**2 / 20.0 * (1.0 + small**2 / 42.0)))
        return np.where(z < 0.03, series, large + np.log(-np.expm1(-2.0 * large) / (2.0 * large)))


@dataclass(frozen=True)
class TwoPoint(Noise):
    """A fair coin: -scale or scale. Among all noise within a bound its carry's tail decays slowest.

    >>> float(TwoPoint(2.0).variance)
    4.0
    """

    scale: Array = 1.0

    def __post_init__(self) -> None:
        self._check()

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """-1 or 1."""
        return np.where(rng.random(shape) < 0.5, -1.0, 1.0)

    @property
    def bound(self) -> Array:
        """The size of both values."""
        return self.scale

    @property
    def variance(self) -> Array:
        """scale²."""
        return np.square(self.scale)

    @property
    def proxy(self) -> Array:
        """Its variance, since cosh(x) <= exp(x²/2)."""
        return self.variance

    def log_mgf(self, theta: Array) -> Array:
        """Log cosh(θ·scale)."""
        z = np.abs(np.multiply(theta, self.scale))
        # log1p(sinh²)/2 keeps its digits where z is small, the other where it is large.
        return np.where(
            z < 1.0, np.log1p(np.sinh(np.minimum(z, 1.0)) ** 2) / 2.0, z + np.log1p(np.exp(-2.0 * z)) - math.log(2.0)
        )


@dataclass(frozen=True)
class Rare(Noise):
    """Bounded and skewed: scale·(1 - p) with probability p, otherwise -scale·p.

    What a rare class, a rare reward or a rare token looks like to one coordinate of the gradient.

    Args:
        scale: distance between the two values.
        p: probability of the large one, in (0, 1/2).
    """

    scale: Array = 1.0
    p: float = 0.05

    def __post_init__(self) -> None:
        self._check()
        _checks.number("Rare", "p", self.p, high=0.5, low_open=True, high_open=True)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """1 - p or -p."""
        return (rng.random(shape) < self.p) - self.p

    @property
    def bound(self) -> Array:
        """The size of the rare value."""
        return np.multiply(self.scale, 1.0 - self.p)

    @property
    def variance(self) -> Array:
        """scale²·p·(1 - p)."""
        return np.square(self.scale) * self.p * (1.0 - self.p)

    @property
    def proxy(self) -> Array:
        """scale²·(1 - 2p)/(2·log((1 - p)/p)), by Kearns and Saul."""
        return np.square(self.scale) * (1.0 - 2.0 * self.p) / (2.0 * math.log((1.0 - self.p) / self.p))

    def log_mgf(self, theta: Array) -> Array:
        """Of the side of the rare value, which is the heavier."""
        z, p = np.abs(np.multiply(theta, self.scale)), self.p
        small = np.minimum(z, 1.0)
        # log(1 + E[exp(θξ) - 1 - θξ]): both terms are positive, so that nothing cancels where z is small.
        near = np.log1p(p * _beyond_linear(small * (1.0 - p)) + (1.0 - p) * _beyond_linear(-small * p))
        return np.where(z < 1.0, near, z * (1.0 - p) + np.log(p + (1.0 - p) * np.exp(-z)))


@dataclass(frozen=True)
class Gaussian(Noise):
    """Normal with standard deviation ``scale``."""

    scale: Array = 1.0

    def __post_init__(self) -> None:
        self._check()

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Standard normal."""
        return rng.standard_normal(shape)

    @property
    def variance(self) -> Array:
        """scale²."""
        return np.square(self.scale)

    @property
    def proxy(self) -> Array:
        """Its variance."""
        return self.variance

    def log_mgf(self, theta: Array) -> Array:
        """θ²·scale²/2."""
        return np.square(np.multiply(theta, self.scale)) / 2.0


@dataclass(frozen=True)
class StudentT(Noise):
    """Student's t: symmetric, tails like x^-degrees.

    Args:
        scale: factor before the standard t.
        degrees: of freedom, above 1; the variance is finite above 2.
    """

    scale: Array = 1.0
    degrees: float = 3.0

    def __post_init__(self) -> None:
        self._check()
        _checks.number("StudentT", "degrees", self.degrees, low=1.0, low_open=True)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Standard t."""
        return rng.standard_t(self.degrees, shape)

    @property
    def variance(self) -> Array:
        """scale²·n/(n - 2), infinite for n <= 2."""
        return np.square(self.scale) * (self.degrees / (self.degrees - 2.0) if self.degrees > 2.0 else math.inf)


@dataclass(frozen=True)
class Pareto(Noise):
    """One-sided heavy tail: scale·(X - E X) with P(X > x) = x^-tail from 1 on.

    Args:
        scale: factor.
        tail: exponent, above 1; the variance is finite above 2.
    """

    scale: Array = 1.0
    tail: float = 2.5

    def __post_init__(self) -> None:
        self._check()
        _checks.number("Pareto", "tail", self.tail, low=1.0, low_open=True)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Centred, from the standard Pareto law."""
        return rng.pareto(self.tail, shape) - 1.0 / (self.tail - 1.0)

    @property
    def variance(self) -> Array:
        """scale²·a/((a - 1)²(a - 2)), infinite for a <= 2."""
        a = self.tail
        return np.square(self.scale) * (a / ((a - 1.0) ** 2 * (a - 2.0)) if a > 2.0 else math.inf)


@dataclass(frozen=True)
class Skewed(Noise):
    """Lognormal less its mean: scale·(exp(shape·N) - exp(shape²/2)); heavily skewed from a shape of about 1."""

    scale: Array = 1.0
    shape: float = 1.5

    def __post_init__(self) -> None:
        self._check()
        _checks.number("Skewed", "shape", self.shape, low_open=True, high=10.0)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Centred lognormal."""
        return np.exp(self.shape * rng.standard_normal(shape)) - math.exp(self.shape**2 / 2.0)

    @property
    def variance(self) -> Array:
        """scale²·(exp(shape²) - 1)·exp(shape²)."""
        return np.square(self.scale) * math.expm1(self.shape**2) * math.exp(self.shape**2)


@dataclass(frozen=True)
class Sphere(Noise):
    """A direction chosen evenly, of length ``scale``, in any dimension: the bounded noise of norm clipping."""

    scale: Array = 1.0

    def __post_init__(self) -> None:
        self._check()

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """Points of the unit sphere along the last axis."""
        normal = rng.standard_normal(shape)
        return normal / np.sqrt(np.einsum("...i,...i->...", normal, normal))[..., None]

    @property
    def bound(self) -> Array:
        """The length of every draw."""
        return self.scale

    @property
    def variance(self) -> Array:
        """Of the whole vector: scale²."""
        return np.square(self.scale)


@dataclass(frozen=True)
class Given(Noise):
    """Noise of your own.

    Args:
        function: (rng, shape) -> array of that shape, of mean zero; shape is (seeds, dimension).
        scale: factor.

    >>> Given(lambda rng, shape: rng.laplace(size=shape)).draw(np.random.default_rng(0), (2, 1)).shape
    (2, 1)
    """

    function: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    scale: Array = 1.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Given: function must be callable as (rng, shape) -> array, got {self.function!r}.")
        self._check()

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """What the function gives."""
        values = np.asarray(self.function(rng, shape), float)
        if values.shape != shape:
            raise ValueError(f"Given: the function was asked for shape {shape} and gave {values.shape}.")
        return values

    @property
    def variance(self) -> Array:
        """Not known."""
        return np.full(np.shape(self.scale), math.nan)[()]


def _beyond_linear(x: Array) -> Array:
    """exp(x) - 1 - x for |x| <= 1."""
    tiny = np.where(np.abs(x) < 0.02, x, 0.0)
    series = tiny**2 / 2.0 * (1.0 + tiny / 3.0 * (1.0 + tiny / 4.0 * (1.0 + tiny / 5.0 * (1.0 + tiny / 6.0))))
    return np.where(np.abs(x) < 0.02, series, np.expm1(x) - x)


def _positive(owner: str, name: str, values: Array) -> None:
    array = np.asarray(values, float)
    if not np.all((array >= 0.0) & np.isfinite(array)):
        raise ValueError(f"{owner}: {name} must be at least 0 and finite, got {values!r}.")
