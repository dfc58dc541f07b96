"""Gymnasium: ``ClipRewardWithCarry(env, radius=1.0)``, and the same for vector environments."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from carryclip.rewards import RewardCarry

try:
    import gymnasium
    from gymnasium.spaces import Box
    from gymnasium.utils import RecordConstructorArgs
    from gymnasium.vector import VectorEnv, VectorWrapper
except ImportError as error:
    raise ImportError(
        "carryclip.integrations.gymnasium needs Gymnasium: pip install gymnasium. Without it, use "
        "carryclip.rewards.RewardCarry, which needs NumPy alone."
    ) from error


class ClipRewardWithCarry(gymnasium.Wrapper, RecordConstructorArgs):
    """Clip rewards to [-radius, radius] and pay what was cut by later rewards of the same episode.

    ``carryclip.rewards.RewardCarry`` has the formula. The last reward of an episode, terminated or truncated, pays what
    is still owed. ``info["reward_carry"]`` is what is owed before the next reward.

    Args:
        env: the environment.
        radius: as for ``RewardCarry``.
        discount: as for ``RewardCarry``; pass the learner's.
        cap: as for ``RewardCarry``.
        flush: as for ``RewardCarry``.
        observe: append the carry, in radii, to observations, which must be one-dimensional boxes of floats. A learner
            that bootstraps needs it, because the value of a state includes what is owed.

    >>> env = ClipRewardWithCarry(gymnasium.make("CartPole-v1"), radius=0.5)
    >>> _ = env.reset(seed=0)
    >>> _, reward, _, _, info = env.step(0)
    >>> reward, info["reward_carry"]
    (0.5, 0.5)
    """

    def __init__(
        self,
        env: gymnasium.Env,
        radius: float = 1.0,
        *,
        discount: float = 1.0,
        cap: float | None = None,
        flush: bool = True,
        observe: bool = False,
    ) -> None:
        RecordConstructorArgs.__init__(self, radius=radius, discount=discount, cap=cap, flush=flush, observe=observe)
        gymnasium.Wrapper.__init__(self, env)
        self.rewards = RewardCarry(radius, discount=discount, cap=cap, flush=flush)
        self.observe = observe
        if observe:
            self.observation_space = _with_carry(env.observation_space, self.rewards.cap / self.rewards.radius)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, which owes nothing; what an unfinished one was owed is dropped."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.rewards.reset()
        return self._observation(observation), info | {"reward_carry": 0.0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, with the clipped reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        paid = self.rewards.step([float(reward)], [bool(terminated or truncated)])
        owed = {"reward_carry": float(self.rewards.carry[0])}
        return self._observation(observation), float(paid[0]), terminated, truncated, info | owed

    def state_dict(self) -> dict[str, Any]:
        """The carry, to be saved beside the environment's own state."""
        return self.rewards.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of an episode; load after ``reset``, which begins an episode that owes nothing."""
        self.rewards.load_state_dict(state)

    def _observation(self, observation: Any) -> Any:
        if not self.observe:
            return observation
        owed = self.rewards.carry / self.rewards.radius
        return np.concatenate([observation, owed.astype(observation.dtype)])


class VectorClipRewardWithCarry(VectorWrapper, RecordConstructorArgs):
    """``ClipRewardWithCarry`` for vector environments: one carry for each environment.

    It works with each of Gymnasium's ways to reset: in the same step, in the next step (whose reward of 0 belongs to no
    episode) and by ``reset(options={"reset_mask": ...})``. To let the learner see the carry, wrap the environments one
    by one: ``gymnasium.make_vec(..., wrappers=[lambda env: ClipRewardWithCarry(env, observe=True)])``.

    Args:
        env: the vector environment.
        radius: as for ``RewardCarry``.
        discount: as for ``RewardCarry``; pass the learner's.
        cap: as for ``RewardCarry``.
        flush: as for ``RewardCarry``.

    >>> envs = VectorClipRewardWithCarry(gymnasium.make_vec("CartPole-v1", num_envs=2), radius=0.5)
    >>> _ = envs.reset(seed=0)
    >>> _, rewards, _, _, infos = envs.step(np.array([0, 1]))
    >>> rewards.tolist(), infos["reward_carry"].tolist()
    ([0.5, 0.5], [0.5, 0.5])
    """

    def __init__(
        self,
        env: VectorEnv,
        radius: float = 1.0,
        *,
        discount: float = 1.0,
        cap: float | None = None,
        flush: bool = True,
    ) -> None:
        RecordConstructorArgs.__init__(self, radius=radius, discount=discount, cap=cap, flush=flush)
        if not isinstance(env, VectorEnv):
            raise TypeError(
                f"VectorClipRewardWithCarry needs a vector environment, got {type(env).__name__}. Wrap a single one "
                "with ClipRewardWithCarry, and those of Stable-Baselines3 one by one before they are put together."
            )
        VectorWrapper.__init__(self, env)
        self.rewards = RewardCarry(radius, env.num_envs, discount=discount, cap=cap, flush=flush)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin episodes in all environments, or in those of ``options["reset_mask"]``."""
        mask = None if options is None else options.get("reset_mask")  # Gymnasium takes it out of the options
        observations, infos = self.env.reset(seed=seed, options=options)
        self.rewards.reset(mask)
        return observations, infos | {"reward_carry": self.rewards.carry.copy()}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of all environments, with the clipped rewards."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        paid = self.rewards.step(rewards, np.logical_or(terminated, truncated))
        return observations, paid, terminated, truncated, infos | {"reward_carry": self.rewards.carry.copy()}

    def state_dict(self) -> dict[str, Any]:
        """The carries, to be saved beside the environments' own state."""
        return self.rewards.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the middle of episodes; load after ``reset``, which begins episodes that owe nothing."""
        self.rewards.load_state_dict(state)


def _with_carry(space: Any, most: float) -> Box:
    """The space of observations with the carry appended, of at most ``most`` radii."""
    if not isinstance(space, Box) or len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(
            f"ClipRewardWithCarry: observe=True needs one-dimensional float observations, got {space}. Flatten them "
            "first (gymnasium.wrappers.FlattenObservation), or hand info['reward_carry'] to the learner yourself."
        )
    low, high = np.append(space.low, -most), np.append(space.high, most)
    return Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
