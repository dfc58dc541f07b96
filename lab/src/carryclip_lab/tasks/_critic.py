"""Does the critic tell the truth? Its values against Monte Carlo returns of the policy that it belongs to."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

Agents = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Observations to logarithms of the actions' probabilities, and values."""


def measure(
    agent: Agents, envs: VectorEnv, discount: float, seed: int, *, seen: bool, steps: int = 600
) -> dict[str, float]:
    """Values against Monte Carlo returns of the trained policy, and its mean undiscounted return.

    Args:
        agent: policy and critic.
        envs: whose ``infos["expected"]`` has the means of rewards before they were clipped.
        discount: of the returns.
        seed: of actions and environments; torch's own generator is left at another place.
        seen: whether the last column of observations is a carry of rewards.
        steps: of each environment.
    """
    torch.manual_seed(10_000 + seed)
    observation, _ = envs.reset(seed=10_000 + seed)
    values, rewards, ends, cuts = ([] for _ in range(4))
    for _ in range(steps):
        with torch.no_grad():
            logits, value = agent(torch.as_tensor(observation, dtype=torch.float32))
        # A critic that sees the carry has to say the value and what is owed; only the value is compared.
        values.append(value.numpy().astype(float) - (observation[:, -1] if seen else 0.0))
        action = torch.multinomial(logits.exp(), 1)[:, 0].numpy()
        observation, _, terminated, truncated, infos = envs.step(action)
        rewards.append(infos["expected"])
        ends.append(terminated | truncated)
        cuts.append(truncated)
    told, true, sums = returns(np.array(values), np.array(rewards), np.array(ends), np.array(cuts), discount)
    return {
        "calibration": float(told.mean() / true.mean()),
        "error": float(np.sqrt(np.square(told - true).mean() / np.square(true).mean())),
        "return": float(sums.mean()),
    }


def returns(values: Any, rewards: Any, ends: Any, cuts: Any, discount: float) -> tuple[Any, Any, Any]:
    """(values, discounted returns) where the rest of the return is known to 2 %, and sums of whole episodes."""
    later, total, unknown = np.zeros(values.shape[1]), np.zeros(values.shape[1]), np.ones(values.shape[1])
    finished = np.zeros(values.shape[1], bool)
    starts = np.vstack([np.ones((1, values.shape[1]), bool), ends[:-1]])
    told, true, sums = [], [], []
    for t in reversed(range(len(values))):
        later = rewards[t] + discount * np.where(ends[t], 0.0, later)
        total = rewards[t] + np.where(ends[t], 0.0, total)
        unknown = np.where(cuts[t], 1.0, np.where(ends[t], 0.0, discount * unknown))
        finished |= ends[t]
        known = unknown < 0.02
        told.append(values[t][known])
        true.append(later[known])
        sums.append(total[starts[t] & finished])
    return np.concatenate(told), np.concatenate(true), np.concatenate(sums)
