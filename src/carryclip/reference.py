"""The judge: U-Clip in plain NumPy, one line per equation, sharing no arithmetic with the other backends.

It reads regions and policies as data and works everything out by itself, slowly. Gradients may be float64, float32 or
float16 arrays; for bfloat16, which NumPy lacks, pass float32 arrays and ``dtype="bfloat16"``.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carryclip.algorithm import Rule
from carryclip.carry import DEFAULT, Capped, Drip, Gated, Leaky, Shrunk
from carryclip.moments import Welford
from carryclip.radius import RMS, Average, OfWeights, Quantile, Radius, ZScore
from carryclip.regions import Adaptive, Component, Norm, Sign, Symmetric

Array = np.ndarray[Any, Any]


class UClip:
    """Clip lists of arrays step by step.

    Args:
        region: where updates must lie, or a mapping from group number to region or None (left alone).
        carry: True (the full carry), False (plain clipping), or a policy.
        nonfinite: ``"skip"``, ``"zero"``, ``"raise"`` or ``"propagate"``.
        groups: group number of each array; all are in group 0 by default.
        dtype: the gradients' type if it is not that of the arrays: ``"bfloat16"``.

    >>> clipper = UClip(Component(1.0), carry=True)
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
        carry: Any = DEFAULT,
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
        self.factors: dict[Any, _Average] = {}
        self.noise_sq: dict[Any, float] = {}
        self.pasts: dict[Any, _Past] = {}
        self.radii: dict[Any, float] = {}
        self._rows: UClip | None = None

    def step(self, gradients: Sequence[Array | None], weights: Sequence[Array] | None = None) -> list[Array | None]:
        """The updates for ``gradients``; None stands for a parameter without a gradient this step.

        ``weights`` are those before the step, for radii that look at them.
        """
        if any(isinstance(region, Norm) and region.split for region in self._all_regions()):
            return self._by_rows(gradients, weights)
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
        self._set_radii(scopes, clean, weights, t)
        for key, members in scopes.items():
            region = self._region(members[0])
            if isinstance(region, Norm):
                mixes = self._mix_norm if self._mixes() else self._step_norm
                dropped_sq += mixes(region, key, members, clean, updates, t)
            elif self._mixes():
                dropped_sq += self._mix_coordinates(region, key, members, clean, updates, t)
            else:
                dropped_sq += self._step_coordinates(region, members[0], clean, updates, t)
        self.dropped_norm += math.sqrt(dropped_sq)
        return updates

    # ------------------------------------------------------------------ one region

    def _step_norm(self, region: Norm, key: Any, members: list[int], clean: list, updates: list, t: int) -> float:
        gamma = self.radii[key]
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
        elif self._cap() < math.inf:
            keep = min(1.0, self._cap() * gamma / rest) if rest > 0 else 1.0
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
        u = self._rounded(_into(region, s, gamma, centre), g.dtype)
        rest = s - u  #                                                        Delta_{t+1} = g_t + Delta_t - u_t
        if self.policy is False:
            kept = np.zeros_like(rest)
        elif isinstance(self.policy, Leaky):
            kept = rest * g.dtype.type(self.policy.kappa)
        elif self._cap() < math.inf:
            limit = self._cap() * gamma
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

    # ------------------------------------------------------------------ radii

    def _set_radii(self, scopes: dict[Any, list[int]], clean: list, weights: Any, t: int) -> None:
        """The radius of every norm at this step; rules then learn of this step's norms."""
        norms = {key: _norm(clean[i] for i in members) for key, members in scopes.items()}
        joint = {key: r for key, members in scopes.items() if isinstance(r := self._region(members[0]), Norm)}
        for key, region in joint.items():
            rule = region.radius
            if not isinstance(rule, Radius):
                self.radii[key] = _at(rule, t)
                continue
            if isinstance(rule, OfWeights):
                weight = _norm(weights[i] for i in scopes[key])
                found = _at(rule.multiple, t) * max(weight, rule.floor)
                self.radii[key] = min(max(found, rule.least), rule.most)
                continue
            past = self.pasts.setdefault(key, _Past())
            together = math.sqrt(sum(norms[other] ** 2 for other, own in joint.items() if own == region))
            self.radii[key] = past.radius(rule, norms[key], together, t)
        for key, region in joint.items():
            rule = region.radius
            if isinstance(rule, Radius) and key in self.pasts and 0.0 < norms[key] < math.inf:
                past = self.pasts[key]
                if rule.frozen_after is None or len(past.norms) < rule.frozen_after:
                    past.learn(rule, norms[key], self.radii[key], t)

    def _all_regions(self) -> list[Any]:
        return list(self.regions.values()) if isinstance(self.regions, Mapping) else [self.regions]

    def _by_rows(self, gradients: Sequence[Array | None], weights: Any) -> list[Array | None]:
        """Take each row, or column, for a tensor of its own. The first step must have all gradients."""
        if self._rows is None:
            self._shapes = [None if g is None else g.shape for g in gradients]
            counts = [1 if g is None else len(_parts(self._region(i), g)) for i, g in enumerate(gradients)]
            self._owner = [i for i, count in enumerate(counts) for _ in range(count)]
            regions = self.regions if isinstance(self.regions, Mapping) else {0: self.regions}
            whole = {k: _over_tensors(region) for k, region in regions.items()}
            groups = [self._group(i) if isinstance(self.regions, Mapping) else 0 for i in self._owner]
            self._rows = UClip(whole, self.policy, self.nonfinite, groups, self.dtype)
        parts: list[Any] = []
        for i, g in enumerate(gradients):
            found = [None] * self._owner.count(i) if g is None else _parts(self._region(i), g)
            parts += found
        split = None if weights is None else [p for i, w in enumerate(weights) for p in _parts(self._region(i), w)]
        sent = self._rows.step(parts, split)
        self.skipped_steps, self.dropped_norm = self._rows.skipped_steps, self._rows.dropped_norm
        self.carry = [self._joined(i, self._rows.carry) for i in range(len(gradients))]
        return [None if g is None else self._joined(i, sent) for i, g in enumerate(gradients)]

    def _joined(self, i: int, parts: list[Any]) -> Any:
        own = [part for part, owner in zip(parts, self._owner, strict=True) if owner == i]
        if own[0] is None:
            return None
        region = self._region(i)
        if not (isinstance(region, Norm) and region.split) or len(self._shapes[i] or ()) < 2:
            return own[0]
        return np.stack(own, axis=0 if region.over == "row" else -1)

    # ------------------------------------------------------------------ Drip and Shrunk

    def _cap(self) -> float:
        """The largest carry, in radii, of Capped and Drip."""
        if isinstance(self.policy, Drip):
            return 1.0 / self.policy.rate if self.policy.cap is None else self.policy.cap
        return self.policy.radii if isinstance(self.policy, Capped) else math.inf

    def _mixes(self) -> bool:
        """Whether gradients are clipped by themselves; all at once and all of it is the paper's rule."""
        if isinstance(self.policy, Drip):
            return self.policy.centred or self.policy.rate < 1.0
        return isinstance(self.policy, Shrunk)

    def _usual(self, key: Any, a: float) -> float:
        """The average of past factors, 1 - that of what was cut; then this one counts as well."""
        if isinstance(self.policy, Drip) and not self.policy.centred:
            return 1.0
        decay = self.policy.decay if isinstance(self.policy, Drip) else 1.0 - 1.0 / self.policy.memory
        past = self.factors.setdefault(key, _Average())
        usual = 1.0 - past.value / (1.0 - decay**past.n) if past.n else a
        past.add(1.0 - a, decay)
        return usual

    def _share(self, key: Any, carry: dict) -> float:
        """How much of the carry Shrunk adds: what stands out of its noise."""
        square = _norm(carry.values()) ** 2
        return max(0.0, 1.0 - self.noise_sq.get(key, 0.0) / square) if square > 0 else 0.0

    def _estimate(self, key: Any, carry: dict, cut: dict, gamma: float) -> dict:
        """Shrunk's next carry: the average of the cuts, each within memory radii; all of it within three radii."""
        rho = 1.0 / self.policy.memory
        length = _norm(cut.values())
        within = gamma / rho / length if length > gamma / rho else 1.0
        moved = {i: (1 - rho) * carry[i] + rho * within * cut[i] for i in carry}
        noise_sq = (1 - rho) ** 2 * self.noise_sq.get(key, 0.0) + (rho * within * length) ** 2
        size = _norm(moved.values())
        keep = 3.0 * gamma / size if size > 3.0 * gamma else 1.0
        self.noise_sq[key] = keep**2 * noise_sq
        return {i: keep * moved[i] for i in moved}

    def _mix_norm(self, region: Norm, key: Any, members: list[int], clean: list, updates: list, t: int) -> float:
        gamma = self.radii[key]
        wide = np.float64
        g = {i: clean[i].astype(wide) for i in members}
        carry = {i: self._carry_of(i, clean[i]).astype(wide) for i in members}
        size = _norm(g.values())
        a = gamma / size if size > gamma else 1.0  #                            clip(g, gamma) = a g
        usual = self._usual(key, a)
        cap, share = self._cap(), 0.0
        if isinstance(self.policy, Drip):
            rate = self.policy.rate
            owed = {i: carry[i] + usual * g[i] for i in members}
            v = {i: a * g[i] + rate * (owed[i] - a * g[i]) for i in members}
        else:
            owed, share = {}, self._share(key, carry)
            v = {i: a * g[i] + share * carry[i] for i in members}
        length = _norm(v.values())
        scale = gamma / length if length > gamma else 1.0
        if math.isnan(length):
            scale = math.nan
        if isinstance(self.policy, Shrunk):
            lacking = {i: usual * g[i] + share * carry[i] - scale * v[i] for i in members}
            owed = self._estimate(key, carry, lacking, gamma)
        u, rest = {}, {}
        for i in members:
            kind = clean[i].dtype
            u[i] = self._rounded((v[i] * scale).astype(kind), kind)
            updates[i] = self._as_gradient(u[i], updates[i])
            rest[i] = owed[i] - u[i] if isinstance(self.policy, Drip) else owed[i]
        if isinstance(self.policy, Shrunk):
            for i in members:
                self.carry[i] = owed[i].astype(clean[i].dtype)
            return _norm(usual * g[i] - v[i] * scale for i in members) ** 2
        exact = _norm(owed[i] - v[i] * scale for i in members)
        left = exact + self._half_epsilon({i: clean[i] for i in members}) * min(length, gamma)
        keep = cap * gamma / left if left > cap * gamma else 1.0
        for i in members:
            self.carry[i] = (rest[i] * keep).astype(clean[i].dtype)
        return (exact * (1.0 - keep)) ** 2

    def _mix_coordinates(self, region: Any, key: Any, members: list[int], clean: list, updates: list, t: int) -> float:
        base, gamma, centre = {}, {}, {}
        for i in members:
            if getattr(region, "include_current", False):
                self.moments[i].add(region.moments, clean[i])
            gamma[i], centre[i] = self._radius(region, i, clean[i], self.moments[i], t)
            base[i] = _into(region, clean[i], gamma[i], centre[i])
        # What counts of a coordinate is bounded, so that one spike does not speak for all.
        reach = self._cap() if isinstance(self.policy, Drip) else self.policy.memory
        wide, near = {}, {}
        for i in members:
            limit = reach * gamma[i].astype(np.float64) if reach < math.inf else np.inf
            wide[i] = np.clip(clean[i].astype(np.float64), -limit, limit)
            near[i] = _into(region, wide[i], gamma[i], centre[i])
        square = sum(float(np.sum(wide[i] ** 2)) for i in members)
        inner = sum(float(np.sum(wide[i] * near[i])) for i in members)
        known = 0.0 < square < math.inf
        usual = self._usual(key, min(1.0, max(0.0, inner / square)) if known else 1.0)
        cap, rho, h = self._cap(), 0.0, 0.0
        if isinstance(self.policy, Shrunk):
            rho = 1.0 / self.policy.memory
            carried = sum(float(np.sum(self._carry_of(i, clean[i]).astype(np.float64) ** 2)) for i in members)
            noise = self.noise_sq.get(key, 0.0)
            h = max(0.0, 1.0 - noise / carried) if carried > 0 else 0.0  #      as the steps before have left it
            cut_sq = sum(float(np.sum((usual * wide[i] - near[i]) ** 2)) for i in members)
            self.noise_sq[key] = (1 - rho) ** 2 * noise + (rho**2 * cut_sq if math.isfinite(cut_sq) else 0.0)
        dropped_sq = 0.0
        for i in members:
            g, kind = clean[i], clean[i].dtype
            carry, largest = self._carry_of(i, g), np.finfo(g.dtype).max
            if self.nonfinite == "propagate":
                largest = np.inf
            if isinstance(self.policy, Drip):
                owed = np.clip(carry + kind.type(usual) * g, -largest, largest)
                v = base[i] + kind.type(self.policy.rate) * (owed - base[i])
            else:
                limit = gamma[i] / rho
                e = np.clip(np.clip(kind.type(usual) * g - base[i], -largest, largest), -limit, limit)
                owed = carry + kind.type(rho) * (e - carry)
                v = np.clip(base[i] + kind.type(h) * owed, -largest, largest)
            u = self._rounded(_into(region, v, gamma[i], centre[i]), kind)
            updates[i] = self._as_gradient(u, updates[i])
            kept, lost = owed, kind.type(usual) * g - u
            if isinstance(self.policy, Drip):
                kept = np.clip(owed - u, -cap * gamma[i], cap * gamma[i])
                lost = owed - u - kept
            self.carry[i] = kept.astype(kind)
            if isinstance(region, (Adaptive, Symmetric)) and not region.include_current:
                self.moments[i].add(region.moments, g)
            dropped_sq += float(np.sum(lost.astype(np.float64) ** 2))
        return dropped_sq

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
                    s = [clean[i] if self._mixes() else clean[i] + self._carry_of(i, clean[i]) for i in members]
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
            over = region.over if isinstance(region, Norm) else "all" if self._mixes() else "tensor"
            key = {"all": ("all", repr(region)), "group": ("group", self._group(i)), "tensor": ("tensor", i)}[over]
            scopes.setdefault(key, []).append(i)
        return scopes

    def _carry_of(self, i: int, g: Array) -> Array:
        found = self.carry[i]
        return np.zeros_like(g) if found is None else found

    def _as_gradient(self, u: Array, like: Array) -> Array:
        return u.astype(like.dtype)


def _into(region: Any, x: Array, gamma: Array, centre: Array) -> Array:
    """The point of the region that stands for x: clip(x, gamma) = max{min{x, gamma}, -gamma}, but for Sign."""
    if isinstance(region, Sign):
        return np.minimum(gamma, np.finfo(x.dtype).max) * np.sign(x)
    return np.maximum(np.minimum(x, centre + gamma), centre - gamma)


def _parts(region: Any, x: Array) -> list[Array]:
    """The vectors that a tensor falls into."""
    if not (isinstance(region, Norm) and region.split) or x.ndim < 2:
        return [x]
    return list(x) if region.over == "row" else [x[..., k] for k in range(x.shape[-1])]


def _over_tensors(region: Any) -> Any:
    return Norm(region.radius, over="tensor") if isinstance(region, Norm) and region.split else region


class _Past:
    """The norms of one vector so far, from which its radius is worked out anew at each step where that can be."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.average: Any = None
        self.variance: Any = None

    def radius(self, rule: Any, norm: float, together: float, t: int) -> float:
        """The radius for a gradient of norm ``norm``; ``together`` is that of all vectors of the region."""
        enough = max(rule.warmup, 0 if isinstance(rule, Quantile) and rule.include_current else 1)
        if len(self.norms) < enough:
            return norm * rule.before / together if together > rule.before else math.inf
        return min(max(self._limit(rule, norm, t), rule.least), rule.most)

    def _limit(self, rule: Any, norm: float, t: int) -> float:
        if isinstance(rule, RMS):
            weight = 1.0 - rule.decay ** len(self.norms)
            return _at(rule.multiple, t) * math.sqrt(self.average / weight)
        if isinstance(rule, Quantile):
            seen = [*self.norms, norm] if rule.include_current else self.norms
            return float(np.percentile(seen[-rule.window :], 100.0 * rule.share))
        if isinstance(rule, ZScore):
            std = math.sqrt(self.variance)
            z = (norm - self.average) / std if std > 0 else math.inf if norm > self.average else 0.0
            threshold = _at(rule.threshold, t)
            return self.average + (threshold if z <= threshold else threshold**2 / z) * std
        assert isinstance(rule, Average)
        return _at(rule.multiple, t) * self.average

    def learn(self, rule: Any, norm: float, radius: float, t: int) -> None:
        """Take in a norm."""
        n = len(self.norms)
        if isinstance(rule, RMS):
            most = rule.reach * self._limit(rule, norm, t) if n >= max(rule.warmup, 1) else math.inf
            x = min(norm, most) if most > 0 else norm
            self.average = rule.decay * (self.average or 0.0) + (1.0 - rule.decay) * x**2
        elif isinstance(rule, ZScore) and n < rule.warmup:
            self.average = float(np.mean([*self.norms, norm]))
            self.variance = float(np.var([*self.norms, norm]))
        elif isinstance(rule, ZScore):
            x = min(norm, self._limit(rule, norm, t))
            self.average = rule.decay * self.average + (1.0 - rule.decay) * x
            self.variance = rule.decay * self.variance + (1.0 - rule.decay) * (x - self.average) ** 2
        elif isinstance(rule, Average) and n < max(rule.warmup, 1):
            self.average = min(norm, radius) if self.average is None else min(self.average, norm, radius)
        elif isinstance(rule, Average):
            self.average = rule.decay * self.average + (1.0 - rule.decay) * min(norm, radius)
        self.norms.append(norm)


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
