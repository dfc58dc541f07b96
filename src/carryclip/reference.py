"""The judge: U-Clip in plain NumPy, one line per equation, sharing no arithmetic with the other backends.

It reads regions and policies as data and works everything out by itself, slowly. Gradients may be float64, float32 or
float16 arrays; for bfloat16, which NumPy lacks, pass float32 arrays and ``dtype="bfloat16"``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carryclip.algorithm import Rule
from carryclip.carry import Capped, Gated, Leaky
from carryclip.moments import Welford
from carryclip.regions import Adaptive, Component, Norm, Sign, Symmetric

Array = np.ndarray[Any, Any]


class UClip:
    """Clip lists of arrays step by step.

    Args:
        region: where updates must lie, or a mapping from group number to region or None (left alone).
        carry: True, False, or a policy.
        nonfinite: ``"skip"``, ``"zero"``, ``"raise"`` or ``"propagate"``.
        groups: group number of each array; all are in group 0 by default.
        dtype: the gradients' type if it is not that of the arrays: ``"bfloat16"``.

    >>> clipper = UClip(Component(1.0))
    >>> for g in (3.0, 0.0, 0.0, 0.0):
    ...     print(clipper.step([np.array([g])])[0], clipper.carry[0])
    [1.] [2.]
    [1.] [1.]
    [1.] [0.]
    [0.] [0.]
    """

    def __init__(
        self,
        region: Any,
        carry: Any = True,
        nonfinite: Any = "skip",
        groups: Sequence[int] | None = None,
        dtype: str | None = None,
    ) -> None:
        self.regions = region
        self.policy = carry
        self.nonfinite = nonfinite
        self.groups = groups
        self.dtype = dtype
        for each in region.values() if isinstance(region, Mapping) else [region]:
            if each is not None:
                Rule(each, carry, nonfinite)  # complains about bad arguments as every backend does
        self.t = 0
        self.skipped_steps = 0
        self.dropped_norm = 0.0
        self.carry: list[Array | None] = []
        self.moments: list[_Moments] = []
        self.coordinate_feed: list[_Average] = []
        self.scope_feed: dict[Any, _Average] = {}

    def step(self, gradients: Sequence[Array | None]) -> list[Array | None]:
        """The updates for ``gradients``; None stands for a parameter without a gradient this step."""
        if not self.carry:
            self.carry = [None] * len(gradients)
            self.moments = [_Moments() for _ in gradients]
            self.coordinate_feed = [_Average() for _ in gradients]
        t, self.t = self.t, self.t + 1
        clean = [self._clean(g) for g in gradients]
        scopes = self._scopes(gradients)
        if self._rejected(clean, scopes):
            self.skipped_steps += 1
            return [
                None if g is None else (np.zeros_like(g) if self._region(i) else g) for i, g in enumerate(gradients)
            ]
        updates: list[Array | None] = list(gradients)
        dropped_sq = 0.0
        for key, members in scopes.items():
            region = self._region(members[0])
            if isinstance(region, Norm):
                dropped_sq += self._step_norm(region, key, members, clean, updates, t)
            else:
                dropped_sq += self._step_coordinates(region, members[0], clean, updates, t)
        self.dropped_norm += math.sqrt(dropped_sq)
        return updates

    # ------------------------------------------------------------------ one region

    def _step_norm(self, region: Norm, key: Any, members: list[int], clean: list, updates: list, t: int) -> float:
        gamma = _at(region.radius, t)
        carry = {i: self._carry_of(i, clean[i]) for i in members}
        s = {i: clean[i] + carry[i] for i in members}  #                       g_t + Delta_t
        size = _norm(s.values())
        scale = 1.0 if size <= gamma else gamma / size  #                      clip(x, gamma) = min{1, gamma/||x||} x
        cut = 0.0 if size <= gamma else size - gamma
        # Rounding the update moves the carry by up to half an epsilon of the update: limits allow for it.
        rest = cut + self._half_epsilon(s) * min(size, gamma)
        if self.policy is False:
            keep = 0.0
        elif isinstance(self.policy, Leaky):
            keep = self.policy.kappa
        elif isinstance(self.policy, Capped):
            keep = min(1.0, self.policy.radii * gamma / rest) if rest > 0 else 1.0
        elif isinstance(self.policy, Gated):
            owed = _norm(carry.values())
            inner = sum(float(np.sum(clean[i].astype(np.float64) * carry[i])) for i in members)
            usable = 0.0 < gamma * owed < math.inf
            f = min(1.0, max(-1.0, inner / (gamma * owed))) if usable else 0.0
            average = self.scope_feed.setdefault(key, _Average()).add(f, self.policy.decay)
            limit = self.policy.cap * gamma
            if average >= self.policy.threshold:
                limit = min(limit, owed)
            keep = min(1.0, limit / rest) if rest > 0 else 1.0
        else:
            keep = 1.0
        for i in members:
            u = self._rounded(s[i] * s[i].dtype.type(scale), s[i].dtype)  #    u_t = clip(g_t + Delta_t, gamma_t)
            updates[i] = self._as_gradient(u, updates[i])
            rest = np.zeros_like(u) if self.policy is False else (s[i] - u)  # Delta_{t+1} = g_t + Delta_t - u_t
            self.carry[i] = rest * s[i].dtype.type(keep)
        return (cut * (1.0 - keep)) ** 2

    def _step_coordinates(self, region: Any, i: int, clean: list, updates: list, t: int) -> float:
        g, carry, moments = clean[i], self._carry_of(i, clean[i]), self.moments[i]
        if getattr(region, "include_current", False):
            moments.add(region.moments, g)
        gamma, centre = self._radius(region, i, g, moments, t)
        largest = np.finfo(g.dtype).max
        s = g + carry  #                                                       g_t + Delta_t
        if self.nonfinite != "propagate":
            s = np.clip(s, -largest, largest)
        if isinstance(region, Sign):
            aim = np.minimum(gamma, largest) * np.sign(s)
        else:  #                                                             clip(x, gamma) = max{min{x, gamma}, -gamma}
            aim = np.maximum(np.minimum(s, centre + gamma), centre - gamma)
        u = self._rounded(aim, g.dtype)
        rest = s - u  #                                                        Delta_{t+1} = g_t + Delta_t - u_t
        if self.policy is False:
            kept = np.zeros_like(rest)
        elif isinstance(self.policy, Leaky):
            kept = rest * g.dtype.type(self.policy.kappa)
        elif isinstance(self.policy, Capped):
            limit = self.policy.radii * gamma
            kept = np.minimum(np.abs(rest), limit) * np.sign(rest)
        elif isinstance(self.policy, Gated):
            usable = (gamma > 0) & np.isfinite(gamma)
            f = np.where(usable, g * np.sign(carry) / np.where(usable, gamma, 1), 0)
            average = self.coordinate_feed[i].add(np.minimum(1, np.maximum(-1, f)), self.policy.decay)
            limit = self.policy.cap * gamma
            limit = np.where(average >= self.policy.threshold, np.minimum(limit, np.abs(carry)), limit)
            kept = np.minimum(np.abs(rest), limit) * np.sign(rest)
        else:
            kept = rest
        updates[i] = self._as_gradient(u, updates[i])
        self.carry[i] = kept.astype(g.dtype)
        if isinstance(region, (Adaptive, Symmetric)) and not region.include_current:
            moments.add(region.moments, g)
        return float(np.sum((rest - kept).astype(np.float64) ** 2))

    def _radius(self, region: Any, i: int, g: Array, moments: "_Moments", t: int) -> tuple[Array, Array]:
        """(gamma_t as an array of g's shape, the interval's centre)."""
        centre = np.zeros_like(g)
        if isinstance(region, (Component, Sign)):
            value = _at(region.radius if isinstance(region, Component) else region.scale, t)
            value = value[i] if isinstance(value, (list, tuple, Mapping)) else value
            gamma = np.broadcast_to(np.asarray(value, dtype=np.float64), g.shape)
        elif moments.n < (2 if isinstance(region.moments, Welford) else 1):
            gamma = np.full(g.shape, np.inf)
        else:
            m, s = moments.mean_and_std(region.moments)
            with np.errstate(invalid="ignore"):  # an infinite multiple of 0 sets no limit
                if isinstance(region, Adaptive):
                    a, b = _at(region.mean, t), _at(region.std, t)
                    gamma = np.maximum(a * np.abs(m) + b * s, region.min_radius)  # gamma_t = a |m_t| + b s_t
                else:
                    gamma, centre = _at(region.std, t) * s, m
            gamma = np.where(np.isnan(gamma), np.inf, gamma)
        if isinstance(region, Symmetric):
            return gamma.astype(g.dtype), centre
        return self._down(gamma, g.dtype), centre

    # ------------------------------------------------------------------ numbers

    def _clean(self, g: Array | None) -> Array | None:
        """The gradient in the carry's precision; with ``"zero"`` without its bad entries."""
        if g is None:
            return None
        if g.dtype.kind != "f":
            raise TypeError(f"Gradients must be floating-point arrays, got {g.dtype}.")
        g = g.astype(np.float64 if g.dtype == np.float64 else np.float32)
        return np.where(np.isfinite(g), g, 0).astype(g.dtype) if self.nonfinite == "zero" else g

    def _rejected(self, clean: list[Any], scopes: dict[Any, list[int]]) -> bool:
        if self.nonfinite == "propagate":
            return False
        bad = []
        for members in scopes.values():
            finite = all(np.isfinite(clean[i]).all() for i in members)
            if isinstance(self._region(members[0]), Norm) and finite:
                with np.errstate(over="ignore"):
                    s = [clean[i] + self._carry_of(i, clean[i]) for i in members]
                    total = sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in s)
                finite = total <= max(float(np.finfo(x.dtype).max) for x in s)
            if not finite:
                bad.append(members)
        if bad and self.nonfinite == "raise":
            raise FloatingPointError(f"non-finite gradient at step {self.t - 1} in arrays {bad}")
        return bool(bad)

    def _half_epsilon(self, s: dict[int, Array]) -> float:
        """0 where gradients have the carry's own type."""
        name = self.dtype or self._narrow
        wide = any(str(x.dtype) == name for x in s.values())
        return 2.0**-8 if name == "bfloat16" else 0.0 if wide else float(np.finfo(name).eps) / 2

    def _rounded(self, x: Array, wide: Any) -> Array:
        """Round to the gradients' type, within its finite range, and come back to the carry's."""
        name = self.dtype or self._narrow
        if name == "bfloat16":
            return _to_bfloat16(np.clip(x, -_BFLOAT16_MAX, _BFLOAT16_MAX).astype(np.float32)).astype(wide)
        largest = np.finfo(name).max
        return np.clip(x, -largest, largest).astype(name).astype(wide) if np.dtype(name) != wide else x.astype(wide)

    def _down(self, gamma: Array, wide: Any) -> Array:
        """Round a radius toward zero in the gradients' type."""
        name = self.dtype or self._narrow
        if name == "bfloat16":
            held = np.minimum(gamma, _BFLOAT16_MAX).astype(np.float64)
            near = held.astype(np.float32)
            near = np.where(near > held, np.nextafter(near, np.float32(0)), near).astype(np.float32)
            down = (near.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        else:
            held = np.minimum(gamma, np.finfo(name).max)
            down = held.astype(name)
            down = np.where(down > held, np.nextafter(down, np.zeros_like(down)), down)
        return np.where(np.isinf(gamma), np.inf, down).astype(wide)

    # ------------------------------------------------------------------ bookkeeping

    def _region(self, i: int) -> Any:
        return self.regions[self._group(i)] if isinstance(self.regions, Mapping) else self.regions

    def _group(self, i: int) -> int:
        return 0 if self.groups is None else self.groups[i]

    def _scopes(self, gradients: Sequence[Array | None]) -> dict[Any, list[int]]:
        """Arrays clipped as one vector: those under one norm; otherwise each by itself."""
        scopes: dict[Any, list[int]] = {}
        for i, g in enumerate(gradients):
            region = self._region(i)
            if g is None or region is None:
                continue
            self._narrow = str(g.dtype)
            over = region.over if isinstance(region, Norm) else "tensor"
            key = {"all": ("all", repr(region)), "group": ("group", self._group(i)), "tensor": ("tensor", i)}[over]
            scopes.setdefault(key, []).append(i)
        return scopes

    def _carry_of(self, i: int, g: Array) -> Array:
        found = self.carry[i]
        return np.zeros_like(g) if found is None else found

    def _as_gradient(self, u: Array, like: Array) -> Array:
        return u.astype(like.dtype)


class _Moments:
    """Running moments of one array, by the recursions as they are usually printed."""

    def __init__(self) -> None:
        self.n = 0
        self.m: Any = 0.0
        self.second: Any = 0.0

    def add(self, kind: Any, g: Array) -> None:
        bound = np.sqrt(np.finfo(g.dtype).max) / 4
        g = np.clip(g, -bound, bound).astype(g.dtype)
        zero = np.zeros_like(g)
        self.n += 1
        if isinstance(kind, Welford):
            d = g - (self.m + zero)
            self.m = (self.m + zero) + d / g.dtype.type(self.n)
            with np.errstate(over="ignore"):
                self.second = np.minimum((self.second + zero) + d * (g - self.m), np.finfo(g.dtype).max)
        else:
            old, new = g.dtype.type(kind.decay), g.dtype.type(1.0 - kind.decay)
            self.m = old * (self.m + zero) + new * g
            self.second = old * (self.second + zero) + new * (g * g)

    def mean_and_std(self, kind: Any) -> tuple[Array, Array]:
        if isinstance(kind, Welford):
            return self.m, np.sqrt(self.second / self.m.dtype.type(self.n - 1))
        weight = self.m.dtype.type(1.0 - kind.decay**self.n if kind.debias else 1.0)
        return self.m / weight, np.sqrt(self.second / weight)


class _Average:
    """A debiased exponential average."""

    def __init__(self) -> None:
        self.n = 0
        self.value: Any = 0.0

    def add(self, x: Any, decay: float) -> Any:
        self.n += 1
        self.value = decay * self.value + (1.0 - decay) * x
        return self.value / (1.0 - decay**self.n)


_BFLOAT16_MAX = float(np.array(0x7F7F0000, np.uint32).view(np.float32))


def _to_bfloat16(x: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even; the result is still stored as float32."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)


def _at(value: Any, t: int) -> Any:
    return value(t) if callable(value) else value


def _norm(arrays: Any) -> float:
    return math.sqrt(sum(float(np.sum(np.asarray(x, np.float64) ** 2)) for x in arrays))
