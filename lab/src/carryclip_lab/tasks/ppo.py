"""Policy and critic by PPO, where rewards are rare and large, ordinary, or noise: does the critic learn the truth?"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from carryclip_lab.checks import check_choice, check_whole, make_float
from carryclip_lab.problem import Problem
from carryclip_lab.spec import Spec
from carryclip_lab.task import Judged, Kind, Place, Task, load

ENVS, STEPS, PASSES = 32, 32, 4
"""Environments side by side, steps of each in a round, and how often a round is gone through."""
RATIO, TRACE, ENTROPY = 0.2, 0.95, 0.01
"""PPO's usual: how far the policy may move in a round, the decay of advantages, the weight of the entropy."""
EPSILON = 1e-5
"""Of Adam, as in every PPO."""
TITLES: dict[str, tuple[str, str, Kind]] = {
    "bandit": ("PPO, bandit", "four pulls of one of two arms, 200 once in 400 times", "signal"),
    "chain": ("PPO, chain", "four rooms in a row, and behind the last 200 once in 100 times", "signal"),
    "lake": ("PPO, FrozenLake", "slippery, 100 for the goal", "signal"),
    "cartpole": ("PPO, CartPole", "as it is", "ordinary"),
    "noise": ("PPO, noise", "the chain with a prize of 0.8 and symmetric heavy-tailed noise", "corruption"),
}


@dataclass(frozen=True, kw_only=True)
class Ppo(Task):
    """A policy and its critic, trained by PPO. An epoch begins with fresh episodes.

    Args:
        environment: ``"bandit"``, ``"chain"``, ``"lake"``, ``"cartpole"`` or ``"noise"``.
        discount: of the returns.
        measured: steps of each of 100 environments by which the critic is judged.
        steps: of the optimizer in an epoch, in whole rounds of collecting and learning.
    """

    environment: str = "chain"
    discount: float = 0.99
    measured: int = 600
    steps: int = 1280

    def __post_init__(self) -> None:
        check_choice("environment", self.environment, tuple(TITLES))
        make_float(self, "discount", above=0.0, below=1.0)
        check_whole(self, measured=2, steps=1)

    def judged(self) -> Judged:
        """By the error of the critic; an ordinary environment by the return."""
        title, setting, kind = TITLES[self.environment]
        calibration = ("calibration", "mean value / mean return")
        if kind == "ordinary":
            shown = (("error", "error of the value"), calibration)
            return Judged(title, setting, "return", "return", higher=True, little=25.0, kind=kind, also=shown)
        return Judged(
            title,
            setting,
            "error",
            "error of the value (RMS, relative)",
            higher=False,
            little=0.02,
            kind=kind,
            bias="calibration",
            unbiased=1.0,
            also=(calibration, ("return", "return")),
        )

    def check(self, spec: Spec, processes: int) -> None:
        """Rounds are not cut short."""
        super().check(spec, processes)
        if spec.optimizer != "adam":
            raise ValueError(f"{spec.task} is trained with adam, as every PPO, not with {spec.optimizer}.")
        if ENVS * STEPS % spec.batch or self.steps % _steps_of_round(spec):
            raise ValueError(
                f"{spec.task} collects {ENVS * STEPS:,} steps a round and goes through them {PASSES} times: batch must "
                f"divide the first, and steps be a multiple of {PASSES} * {ENVS * STEPS:,} / batch; got batch "
                f"{spec.batch} and steps {self.steps}."
            )

    def problem(self, spec: Spec, place: Place) -> Problem:
        """Environments and networks; what is done to rewards is the method's."""
        return _Ppo(spec, self)


class Agent(nn.Module):
    """Policy and value, two small networks."""

    def __init__(self, inputs: int, actions: int, width: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, actions))
        self.critic = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithms of the actions' probabilities, and values."""
        return self.actor(observations).log_softmax(-1), self.critic(observations).squeeze(-1)


class _Ppo(Problem):
    """The loop of ``examples/ppo_loop.py``, cut into steps of the optimizer: a test has both give the same weights.

    Actions and order are drawn from torch's own generator, and environments have one each, so that a run can go on only
    where an epoch begins.
    """

    def __init__(self, spec: Spec, task: Ppo) -> None:
        super().__init__(spec, task.steps)
        self.task, self.round = task, _steps_of_round(spec)
        self.method: Any = None if spec.method is None else load(spec.method, "method")
        self.envs = self._environments(ENVS)
        self.observation: Any = None
        self.data: dict[str, Tensor] = {}
        self.parts: list[Tensor] = []

    def _environments(self, count: int) -> Any:
        from carryclip_lab.tasks import _rooms

        envs = _rooms.MAKE[self.task.environment](count)
        return self.method.wrapped(envs) if hasattr(self.method, "wrapped") else envs

    def build(self, generator: torch.Generator) -> Agent:
        """Fresh networks."""
        torch.manual_seed(self._seed)
        return Agent(self.envs.single_observation_space.shape[0], int(self.envs.single_action_space.n))

    @property
    def _seed(self) -> int:
        """Environments side by side take the seeds from this one on: those of different runs must not overlap."""
        return 1000 * self.spec.seed

    def rate(self, step: int) -> float:
        """It falls from round to round, to nothing."""
        rounds = self.spec.epochs * self.steps // self.round
        return self.spec.lr * (1 - step // self.round / rounds)

    def begin(self, step: int) -> None:
        """Fresh episodes, which are the same whether or not the run comes from a checkpoint."""
        super().begin(step)
        seed = self._seed + ENVS * (step // self.steps)
        torch.manual_seed(seed)
        self.observation, _ = self.envs.reset(seed=seed)

    def around(self, optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        """Adam as PPO has it."""
        for group in optimizer.param_groups:
            group["eps"] = EPSILON
        return contextlib.nullcontext()

    def loss(self, net: Any, generator: torch.Generator, step: int) -> Tensor:
        """Of a minibatch of the round."""
        if self.observation is None:
            self.begin(step)  # a plan times steps alone
        if step % self.round == 0:
            weights = nn.utils.parameters_to_vector(net.parameters())
            if not weights.isfinite().all():
                return weights.sum() * torch.nan  # nothing can be drawn from such a policy: the run has diverged
            self._collect(net)
        if not self.parts:
            self.parts = list(torch.randperm(ENVS * STEPS).split(self.spec.batch))[::-1]
        chosen = self.parts.pop()
        return loss_of(net, {name: value[chosen] for name, value in self.data.items()})

    def _collect(self, net: Agent) -> None:
        """A round of all environments, with advantages."""
        names = ("observations", "actions", "chosen", "rewards", "ends")
        rows: dict[str, list[Tensor]] = {name: [] for name in names}
        for _ in range(STEPS):
            seen = torch.as_tensor(self.observation, dtype=torch.float32)
            with torch.no_grad():
                logits, _ = net(seen)
            action = torch.multinomial(logits.exp(), 1)
            self.observation, reward, terminated, truncated, _ = self.envs.step(action[:, 0].numpy())
            found = (seen, action[:, 0], logits.gather(1, action)[:, 0], reward, terminated | truncated)
            for name, value in zip(names, found, strict=True):
                rows[name].append(torch.as_tensor(value) if name == "actions" else _float(value))
        data = {name: torch.stack(row) for name, row in rows.items()}
        with torch.no_grad():
            values = net(torch.cat([data["observations"], _float(self.observation)[None]]))[1]
        data["advantages"] = advantages_of(data["rewards"], data["ends"], values, self.task.discount)
        data["returns"] = data["advantages"] + values[:-1]
        self.data, self.parts = {name: value.flatten(0, 1) for name, value in data.items()}, []

    def measure(self, net: Any) -> dict[str, Any]:
        """On environments of its own, without a trace in the training."""
        from carryclip_lab.tasks._critic import measure

        seen = bool(getattr(self.method, "shows_carry", False))
        with torch.random.fork_rng(devices=[]):
            envs = self._environments(100)
            return measure(net, envs, self.task.discount, self.spec.seed, seen=seen, steps=self.task.measured)


def _steps_of_round(spec: Spec) -> int:
    """Of the optimizer."""
    return max(1, PASSES * ENVS * STEPS // spec.batch)


def _float(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32)


def advantages_of(rewards: Tensor, ends: Tensor, values: Tensor, discount: float) -> Tensor:
    """Generalised advantage estimation; ``values`` has one row more, for what comes after the last step."""
    found, later = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        goes_on = 1.0 - ends[t]
        surprise = rewards[t] + discount * goes_on * values[t + 1] - values[t]
        later = surprise + discount * TRACE * goes_on * later
        found[t] = later
    return found


def loss_of(agent: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """PPO's: the clipped surrogate, half the squared error of the value, a little entropy."""
    logits, values = agent(part["observations"])
    chosen = logits.gather(1, part["actions"][:, None]).squeeze(1)
    ratio = (chosen - part["chosen"]).exp()
    advantage = part["advantages"]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - RATIO, 1 + RATIO) * advantage).mean()
    entropy = -(logits.exp() * logits).sum(-1).mean()
    return 0.5 * (values - part["returns"]).square().mean() - surrogate - ENTROPY * entropy
