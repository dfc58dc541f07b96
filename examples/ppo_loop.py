"""PPO in one file, with UClip in the place of clip_grad_norm_.

    pip install ".[rl]"            # from a clone
    python examples/ppo_loop.py

The loop is of the kind people copy and change: one network for policy and value, vector environments of Gymnasium,
GAE, Adam. Two lines differ from the usual one: UClip is attached to the optimizer, and nothing is clipped by hand.
"""

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

from carryclip.torch import Norm, UClip


class Agent(nn.Module):
    """Policy and value, two small networks."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, actions))
        self.critic = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the actions' probabilities, and values."""
        return self.actor(observations).log_softmax(-1), self.critic(observations).squeeze(-1)


def advantages_of(rewards: Tensor, ends: Tensor, values: Tensor, discount: float, trace: float) -> Tensor:
    """Generalised advantage estimation; ``values`` has one row more, for what comes after the last step."""
    found, later = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - ends[t]
        surprise = rewards[t] + discount * goes_on * values[t + 1] - values[t]
        later = surprise + discount * trace * goes_on * later
        found[t] = later
    return found


def loss_of(agent: Agent, part: dict[str, Tensor], clip: float = 0.2) -> Tensor:
    """PPO's loss of a minibatch: the clipped surrogate, half the squared error of the value, a little entropy."""
    logits, values = agent(part["observations"])
    chosen = logits.gather(1, part["actions"][:, None]).squeeze(1)
    ratio = (chosen - part["chosen"]).exp()
    advantage = part["advantages"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    return 0.5 * (values - part["returns"]).square().mean() - surrogate - 0.01 * entropy


def collect(agent: Agent, envs: gymnasium.vector.VectorEnv, observation: np.ndarray, steps: int) -> tuple:
    """``steps`` steps of all environments: what was seen and done, and the observation to go on from."""
    rows: dict[str, list[Tensor]] = {name: [] for name in ("observations", "actions", "chosen", "rewards", "ends")}
    for _ in range(steps):
        seen = torch.as_tensor(observation, dtype=torch.float32)
        with torch.no_grad():
            logits, _ = agent(seen)
        action = torch.multinomial(logits.exp(), 1)
        observation, reward, terminated, truncated, _ = envs.step(action[:, 0].numpy())
        rows["observations"].append(seen)
        rows["actions"].append(action[:, 0])
        rows["chosen"].append(logits.gather(1, action)[:, 0])
        rows["rewards"].append(torch.as_tensor(reward, dtype=torch.float32))
        rows["ends"].append(torch.as_tensor(terminated | truncated, dtype=torch.float32))
    return {name: torch.stack(row) for name, row in rows.items()}, observation


def train(agent, optimizer, envs, rounds, *, steps=128, epochs=4, batch=128, discount=0.99, trace=0.95, seed=0):
    """Train, and return the mean length of an episode in each round."""
    torch.manual_seed(seed)
    observation, _ = envs.reset(seed=seed)
    rates, lengths = [group["lr"] for group in optimizer.param_groups], []
    for number in range(rounds):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - number / rounds)
        data, observation = collect(agent, envs, observation, steps)
        with torch.no_grad():
            after = torch.as_tensor(observation, dtype=torch.float32)[None]
            values = agent(torch.cat([data["observations"], after]))[1]
        data["advantages"] = advantages_of(data["rewards"], data["ends"], values, discount, trace)
        data["returns"] = data["advantages"] + values[:-1]
        flat = {name: value.flatten(0, 1) for name, value in data.items()}
        for _ in range(epochs):
            for chosen in torch.randperm(len(flat["rewards"])).split(batch):
                optimizer.zero_grad()
                loss_of(agent, {name: value[chosen] for name, value in flat.items()}).backward()
                optimizer.step()  # UClip acts in here; the usual clip_grad_norm_(agent.parameters(), 0.5) is gone
        lengths.append(data["ends"].numel() / max(1.0, float(data["ends"].sum())))
    return lengths


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    envs = gymnasium.make_vec(
        "CartPole-v1", num_envs=8, vectorization_mode="sync", vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP}
    )
    agent = Agent(4, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    clipper = UClip(optimizer, Norm(0.5))  # the line that matters
    lengths = train(agent, optimizer, envs, rounds=30)
    print(f"steps per episode: {lengths[0]:.0f} at first, {max(lengths[-5:]):.0f} at the end")
    print(
        f"share of gradients that were clipped in the last step measured: {clipper.metrics()['clipped_fraction']:.0%}"
    )


if __name__ == "__main__":
    main()
