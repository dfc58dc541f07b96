"""Rewards clipped without losing the return: what is cut off is carried, and paid before the episode ends.

``RewardCarry`` has one carry per trajectory, for returns and policy gradients. ``RewardCarryByKey`` has one per key,
for tables of values. A carry must be indexed by what the estimate is indexed by: one carry shared by all actions pays
one action's reward to another.
"""

import math
import warnings
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from carryclip import _checks
from carryclip.diagnosis import CarryClipWarning

Array = np.ndarray[Any, Any]


class RewardCarry:
    """Clip the rewards of trajectories, and carry what was cut to later rewards of the same trajectory.

        u_t         = clip(r_t + carry_t, radius)            the learner receives u_t
        carry_{t+1} = (r_t + carry_t - u_t)/discount         what was cut waits, and earns interest
        u_T         = r_T + carry_T                          the last reward of an episode pays the rest

    The sum of discount^t·u_t over an episode equals the sum of discount^t·r_t: the return is unchanged, and the
    return from step t on is larger by exactly carry_t. That is known before the action of step t, so it acts as a
    baseline, and policy gradients from whole returns stay unbiased. Two limits:

    - The last reward is as large as what is owed, so it may exceed the radius. ``flush=False`` keeps it within the
      radius and forgets the rest, which biases the return.
    - A critic that bootstraps learns V(s) + carry. If it does not see the carry, it is biased.

    With a discount below 1 the carry earns interest, which rewards can pay only while the carry is below
    (radius - |mean reward|)/(1 - discount). Beyond that it would grow by itself, so ``cap`` bounds it. What exceeds the
    cap is dropped, with one warning, and ``dropped`` counts it: the return is then no longer exact.

    Args:
        radius: largest absolute reward.
        num_envs: number of trajectories that run side by side.
        discount: the discount of the return to be kept: pass the learner's own. 1 keeps the plain sum.
        cap: largest carry. By default radius/(2·(1 - discount)), which mean rewards up to half the radius can pay, and
            no cap without discount.
        flush: whether the last reward of an episode pays the rest.

    >>> carry = RewardCarry(1.0)
    >>> [float(carry.step([r], [last])[0]) for r, last in [(2.5, False), (0.0, False), (0.0, True)]]
    [1.0, 1.0, 0.5]
    """

    def __init__(
        self,
        radius: float,
        num_envs: int = 1,
        *,
        discount: float = 1.0,
        cap: float | None = None,
        flush: bool = True,
    ) -> None:
        _checks.number("RewardCarry", "radius", radius, low_open=True, high_open=True)
        _checks.number("RewardCarry", "discount", discount, high=1.0, low_open=True)
        if isinstance(num_envs, bool) or not isinstance(num_envs, (int, np.integer)) or num_envs < 1:
            raise ValueError(f"RewardCarry: num_envs must be a whole number of at least 1, got {num_envs!r}.")
        self.radius = float(radius)
        self.discount = float(discount)
        self.flush = bool(flush)
        self.cap = _cap(self.radius, self.discount, cap)
        self.carry: Array = np.zeros(num_envs)
        """What each trajectory is owed before its next reward."""
        self.dropped: Array = np.zeros(num_envs)
        """Sum of absolute amounts that were owed and never paid: beyond the cap, or when an episode was abandoned."""
        self._warned = False

    @property
    def num_envs(self) -> int:
        """Number of trajectories."""
        return len(self.carry)

    def step(self, rewards: Any, ended: Any) -> Array:
        """The clipped rewards of one step of all trajectories.

        Args:
            rewards: one per trajectory; finite. Floating-point types are kept.
            ended: whether this is the last reward of its episode: ``terminated | truncated``. A truncated episode pays
                the rest as well, because its rewards end there, whatever value the learner puts behind them.
        """
        given = np.asarray(rewards)
        last = np.asarray(ended)
        if given.shape != self.carry.shape or last.shape != self.carry.shape:
            raise ValueError(
                f"RewardCarry: expected {self.num_envs} rewards and {self.num_envs} flags, got shapes {given.shape} "
                f"and {last.shape}. Pass num_envs={given.size} when you make it."
            )
        if last.dtype != bool:
            raise TypeError(f"RewardCarry: ended must be an array of bool, got {last.dtype}: terminated | truncated.")
        _check_finite("RewardCarry", given)
        owed = given.astype(np.float64) + self.carry
        paid = np.clip(owed, -self.radius, self.radius)
        if self.flush:
            paid = np.where(last, owed, paid)
        if given.dtype.kind == "f":
            paid = paid.astype(given.dtype)
        # The rounded reward is what the learner gets, so the carry keeps the rounding error, too.
        rest = owed - paid.astype(np.float64)
        forgotten = np.where(last, rest, 0.0)
        grown = np.where(last, 0.0, rest / self.discount)
        self.carry = np.clip(grown, -self.cap, self.cap)
        beyond = np.abs(grown - self.carry)
        self.dropped += beyond if self.flush else beyond + np.abs(forgotten)
        if beyond.any() and not self._warned:
            self._warn(float(beyond.max()))
        return paid

    def reset(self, mask: Any = None) -> None:
        """Begin new trajectories, all or those in ``mask``; what unfinished ones were owed is dropped."""
        chosen = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        if chosen.shape != self.carry.shape or chosen.dtype != bool:
            raise ValueError(f"RewardCarry: mask must be {self.num_envs} bools, got {chosen.dtype} {chosen.shape}.")
        self.dropped += np.where(chosen, np.abs(self.carry), 0.0)
        self.carry = np.where(chosen, 0.0, self.carry)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: plain numbers and lists, so JSON holds it exactly.

        >>> carry = RewardCarry(1.0)
        >>> _ = carry.step([3.0], [False])
        >>> carry.state_dict()["carry"]
        [2.0]
        """
        return {
            "radius": self.radius,
            "discount": self.discount,
            "cap": None if math.isinf(self.cap) else self.cap,
            "flush": self.flush,
            "carry": self.carry.tolist(),
            "dropped": self.dropped.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; raise if it belongs to other settings."""
        mine = self.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"RewardCarry: a state has the entries {sorted(mine)}, got {sorted(state)}.")
        for name in ("radius", "discount", "cap", "flush"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"RewardCarry: the state was saved with {name}={state[name]!r}, this one has "
                    f"{name}={mine[name]!r}. Make it with {name}={state[name]!r}, or start without the state."
                )
        carry, dropped = np.array(state["carry"], np.float64), np.array(state["dropped"], np.float64)
        if carry.shape != self.carry.shape or dropped.shape != self.carry.shape:
            raise ValueError(f"RewardCarry: the state is for {carry.size} trajectories, this one has {self.num_envs}.")
        if not np.isfinite(carry).all():
            raise ValueError("RewardCarry: the state has a carry that is not finite.")
        self.carry, self.dropped = carry, dropped

    def _warn(self, amount: float) -> None:
        self._warned = True
        warnings.warn(
            f"RewardCarry: a carry exceeded the cap of {self.cap:g} by {amount:g}, which is dropped: returns are no "
            "longer exact. Use a larger radius, or discount=1.0 without a cap. This is said once; `dropped` counts on.",
            CarryClipWarning,
            stacklevel=3,
        )


class RewardCarryByKey:
    """Clip rewards with one carry for each key: for tables of values, where the key is (state, action) or an arm.

        u          = clip(r + carry[key], radius)
        carry[key] = r + carry[key] - u

    The mean of the clipped rewards of a key tends to the mean of its rewards if that is below the radius. So tabular
    Q-learning with the keys (state, action), bounded rewards and the usual step sizes converges to the optimal values.
    A key whose mean reward exceeds the radius is owed more and more: look at ``carry``.

    Args:
        radius: largest absolute reward.

    >>> arms = RewardCarryByKey(1.0)
    >>> [arms.step("left", 2.5), arms.step("right", 0.5), arms.step("left", 0.0)]
    [1.0, 0.5, 1.0]
    >>> arms.carry["left"]
    0.5
    """

    def __init__(self, radius: float) -> None:
        _checks.number("RewardCarryByKey", "radius", radius, low_open=True, high_open=True)
        self.radius = float(radius)
        self.carry: dict[Hashable, float] = {}
        """What each key is owed."""

    def step(self, key: Hashable, reward: float) -> float:
        """The clipped reward of one visit."""
        if not math.isfinite(reward):
            raise ValueError(f"RewardCarryByKey: the reward of {key!r} is {reward!r}; rewards must be finite.")
        owed = float(reward) + self.carry.get(key, 0.0)
        paid = min(self.radius, max(-self.radius, owed))
        self.carry[key] = owed - paid
        return paid

    def state_dict(self) -> dict[str, Any]:
        """The radius and the carry of each key."""
        return {"radius": self.radius, "carry": dict(self.carry)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; raise if it belongs to another radius."""
        if set(state) != {"radius", "carry"}:
            raise ValueError(f"RewardCarryByKey: a state has the entries radius and carry, got {sorted(state)}.")
        if state["radius"] != self.radius:
            raise ValueError(
                f"RewardCarryByKey: the state was saved with radius={state['radius']!r}, this one has {self.radius!r}."
            )
        self.carry = dict(state["carry"])


def _cap(radius: float, discount: float, cap: float | None) -> float:
    """The largest carry; raise if its interest could never be paid."""
    unpayable = radius / (1.0 - discount) if discount < 1.0 else math.inf
    if cap is None:
        return unpayable / 2
    _checks.number("RewardCarry", "cap", cap, low_open=True)
    if discount < 1.0 and cap >= unpayable * (1.0 - 1e-9):  # 1/(1 - 0.9) is a little above 10
        raise ValueError(
            f"RewardCarry: cap must be below radius/(1 - discount) = {unpayable:g}, got {cap:g}: the interest on a "
            "larger carry exceeds the radius, so it would grow without end. Use a larger radius, or discount=1.0."
        )
    return float(cap)


def _check_finite(owner: str, rewards: Array) -> None:
    """Raise, with the number of the environment, before anything is changed."""
    if rewards.dtype.kind not in "fiub":
        raise TypeError(f"{owner}: rewards must be real numbers, got {rewards.dtype}.")
    bad = np.flatnonzero(~np.isfinite(rewards))
    if bad.size:
        where, value = int(bad[0]), rewards[bad[0]]
        raise ValueError(
            f"{owner}: the reward of environment {where} is {value}; rewards must be finite. The carry is as it was "
            "before this step. Correct the environment, or replace the reward before it gets here."
        )
