"""Environments for reinforcement learning: rare large rewards, an ordinary one, and noise as a control."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space


class Rooms(VectorEnv):
    """Numbered rooms, shown as unit vectors, in which all copies of the environment step at once.

    ``infos["expected"]`` is the mean of each reward, for Monte Carlo returns without the lottery's noise.
    """

    rooms = 1

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space = Box(0.0, 1.0, (self.rooms,), np.float32)
        self.single_action_space = Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.room = np.zeros(num_envs, int)
        self.pulls = np.zeros(num_envs, int)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """The first rooms of new episodes."""
        super().reset(seed=seed)
        self.begin(np.ones(self.num_envs, bool))
        return self.seen(), {}

    def step(self, actions: Any) -> Any:
        """One step; episodes that end begin again at once."""
        rewards, expected, ends = self.act(np.asarray(actions))
        self.begin(ends)
        return self.seen(), rewards, ends, np.zeros(self.num_envs, bool), {"expected": expected}

    def seen(self) -> np.ndarray:
        """Unit vectors."""
        return np.eye(self.rooms, dtype=np.float32)[self.room]

    def begin(self, which: np.ndarray) -> None:
        """Put new episodes into their first room."""
        raise NotImplementedError

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rewards, their means, and which episodes end; moves on."""
        raise NotImplementedError


class Bandit(Rooms):
    """Four pulls of one of two arms: the right one pays 0.5, and any pull pays 200 once in 400 times, a mean of 0.5.

    There are two rooms, drawn anew for each pull: in one the first arm is right, in the other the second.
    """

    rooms = 2
    length = 4

    def begin(self, which: np.ndarray) -> None:
        """Any room."""
        self.pulls[which] = 0
        self.room[which] = self.np_random.integers(2, size=which.sum())

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One pull."""
        sure = np.where(actions == self.room, 0.5, 0.0)
        lucky = self.np_random.random(self.num_envs) < 0.0025
        self.pulls += 1
        self.room = self.np_random.integers(2, size=self.num_envs)
        return sure + 200.0 * lucky, sure + 0.5, self.pulls == self.length


class Lottery(Bandit):
    """The bandit with episodes of one pull: the environment of ``examples/sb3_ppo.py``."""

    length = 1


class Chain(Rooms):
    """Four rooms in a row, each with a right door and a wrong one, which costs 0.1; behind the last is a prize."""

    rooms = 4

    def begin(self, which: np.ndarray) -> None:
        """The first room."""
        self.room[which] = 0

    def act(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Through a door; which one is right changes from room to room."""
        costs = np.where(actions == self.room % 2, 0.0, -0.1)
        arrives = self.room == self.rooms - 1
        prize, mean = self.prize()
        self.room = np.minimum(self.room + 1, self.rooms - 1)
        return costs + np.where(arrives, prize, 0.0), costs + np.where(arrives, mean, 0.0), arrives

    def prize(self) -> tuple[np.ndarray, float]:
        """200 once in 100 times, and its mean."""
        return np.where(self.np_random.random(self.num_envs) < 0.01, 200.0, 0.0), 2.0


class Noise(Chain):
    """The chain with a prize of 0.8 and noise that says nothing: 3 times Student's law, 1.5 degrees of freedom."""

    def prize(self) -> tuple[np.ndarray, float]:
        """The noisy prize, and its mean."""
        return 0.8 + 3.0 * self.np_random.standard_t(1.5, size=self.num_envs), 0.8


class OneHot(gymnasium.ObservationWrapper):
    """Numbered states as unit vectors."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        numbers: Any = env.observation_space
        self.count = int(numbers.n)
        self.observation_space = Box(0.0, 1.0, (self.count,), np.float32)

    def observation(self, observation: int) -> np.ndarray:
        """The unit vector."""
        return np.eye(self.count, dtype=np.float32)[observation]


class Noted(VectorWrapper):
    """Keeps the rewards as they were, for those who measure behind a wrapper that clips them."""

    def step(self, actions: Any) -> Any:
        """As before, and the rewards."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        return observations, rewards, terminated, truncated, infos | {"expected": rewards.copy()}


def gym(name: str, num_envs: int, **options: Any) -> VectorEnv:
    """One of Gymnasium's own."""
    vector = {"autoreset_mode": AutoresetMode.SAME_STEP}
    return Noted(gymnasium.make_vec(name, num_envs, "sync", vector_kwargs=vector, **options))


def lake(num_envs: int) -> VectorEnv:
    """Gymnasium's slippery FrozenLake with 100 for the goal, where about one random walk in seventy arrives."""
    options = {"reward_schedule": (100, 0, 0), "max_episode_steps": 200, "wrappers": [OneHot]}
    return gym("FrozenLake-v1", num_envs, **options)


def cart_pole(num_envs: int) -> VectorEnv:
    """Gymnasium's CartPole as it is."""
    return gym("CartPole-v1", num_envs)


MAKE: dict[str, Callable[[int], VectorEnv]] = {
    "bandit": Bandit,
    "chain": Chain,
    "lake": lake,
    "cartpole": cart_pole,
    "noise": Noise,
}
"""By name: how many side by side, to the environments."""
