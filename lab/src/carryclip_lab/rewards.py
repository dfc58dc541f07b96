"""What may be done to rewards: ways that a study of reinforcement learning names by module:function, as it names peers.

Gradients are left alone by all of them. ``wrapped`` goes around the environments in which a policy is trained.
"""

from typing import Any

import numpy as np
from gymnasium.spaces import Box
from gymnasium.vector import VectorEnv
from gymnasium.wrappers.vector import ClipReward

from carryclip.integrations.gymnasium import VectorClipRewardWithCarry

RADIUS = 1.0
"""Rewards are clipped to [-1, 1], as they have been since Atari."""


class Clipped:
    """Plainly clipped."""

    shows_carry = False
    """Whether the last column of observations is what is owed."""

    def __init__(self, optimizer: Any, spec: Any) -> None:
        """As any method; it has nothing to do with the optimizer."""

    @staticmethod
    def wrapped(envs: VectorEnv) -> VectorEnv:
        """The environments with their rewards clipped."""
        return ClipReward(envs, -RADIUS, RADIUS)


class Carried(Clipped):
    """Clipped with a carry, which pays within the episode."""

    @staticmethod
    def wrapped(envs: VectorEnv) -> VectorEnv:
        """The environments with the carry between them and the learner."""
        return VectorClipRewardWithCarry(envs, RADIUS)


class Seen(Clipped):
    """Clipped with a carry that policy and critic see."""

    shows_carry = True

    @staticmethod
    def wrapped(envs: VectorEnv) -> VectorEnv:
        """The same with the carry in the observations."""
        return SeenCarry(envs, RADIUS)


class SeenCarry(VectorClipRewardWithCarry):
    """Rewards with carry, and the carry as one more column of the observations."""

    def __init__(self, env: VectorEnv, radius: float, **options: Any) -> None:
        super().__init__(env, radius, **options)
        seen: Any = env.single_observation_space
        self.single_observation_space = Box(-np.inf, np.inf, (seen.shape[0] + 1,), np.float32)

    def reset(self, **given: Any) -> Any:
        """As before, and the carry."""
        observations, infos = super().reset(**given)
        return self._with_carry(observations), infos

    def step(self, actions: Any) -> Any:
        """As before, and the carry."""
        observations, *others = super().step(actions)
        return self._with_carry(observations), *others

    def _with_carry(self, observations: np.ndarray) -> np.ndarray:
        return np.column_stack([observations, self.rewards.carry]).astype(np.float32)
