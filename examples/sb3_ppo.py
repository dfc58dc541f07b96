"""Stable-Baselines3's PPO with UClip: its own clipping off, ours attached to its optimizer.

    pip install ".[rl]"            # from a clone
    python examples/sb3_ppo.py

The environment pays 200 once in 400 steps, whatever is done. Clipped at PPO's usual 0.5, the critic misses most of it.
"""

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv

from carryclip.torch import Norm, Quantile, UClip


class Lottery(gymnasium.Env):
    """One step: the right of two actions pays 0.5, and either pays 200 with probability 1/400, a mean of 0.5."""

    observation_space = Box(0.0, 1.0, (2,), np.float32)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Show which action is right."""
        super().reset(seed=seed)
        self.right = int(self.np_random.integers(2))
        return np.eye(2, dtype=np.float32)[self.right], {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Pay, and end."""
        sure = 0.5 if int(action) == self.right else 0.0
        lucky = 200.0 if self.np_random.random() < 1 / 400 else 0.0
        return np.eye(2, dtype=np.float32)[self.right], sure + lucky, True, False, {}


def agent(max_grad_norm: float, seed: int = 0) -> PPO:
    """PPO as usual, but for the limit of the gradient's norm."""
    envs = DummyVecEnv([Lottery for _ in range(32)])
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=128,
        n_epochs=4,
        learning_rate=lambda left: 2.5e-3 * left,
        max_grad_norm=max_grad_norm,
        seed=seed,
        device="cpu",
    )


def shares(model: PPO) -> tuple[float, float]:
    """(critic's mean value over the true one, share of right actions)."""
    rooms = torch.eye(2)
    with torch.no_grad():
        values = model.policy.predict_values(rooms)[:, 0]
        right = model.policy.get_distribution(rooms).distribution.probs.diagonal()
    true = 0.5 * right + 0.5
    return float(values.mean() / true.mean()), float(right.mean())


def main() -> None:
    torch.set_num_threads(1)
    usual = agent(max_grad_norm=0.5)

    ours = agent(max_grad_norm=math.inf)  # Stable-Baselines3 clips no more
    UClip(ours.policy.optimizer, Norm(Quantile(0.9)))  # and this does

    for name, model in {"max_grad_norm=0.5": usual, "UClip, Norm(Quantile(0.9))": ours}.items():
        model.learn(40 * 1024)
        value, right = shares(model)
        print(f"{name}: the critic says {value:.0%} of the true value; {right:.0%} of the actions are right")


if __name__ == "__main__":
    main()
