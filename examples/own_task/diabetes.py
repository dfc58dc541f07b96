"""A task of your own in a study: scikit-learn's diabetes set, linear regression by squared error.

From this folder: carryclip reproduce study.toml --store own.sqlite --out own-report
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from carryclip_lab.problem import Problem
from carryclip_lab.task import Judged, Task


@dataclass(frozen=True, kw_only=True)
class Diabetes(Task):
    steps: int = 100  # of an epoch
    tests: int = 100  # patients that are held out

    def judged(self):
        """What counts, in which unit, in which direction, and which difference is too small to matter."""
        setting = f"{442 - self.tests} patients, ten measurements each"
        return Judged("Diabetes", setting, "error", "error on held-out patients (points)", higher=False, little=0.5)

    def problem(self, spec, place):
        return Patients(spec, self)


class Patients(Problem):
    def __init__(self, spec, task):
        super().__init__(spec, task.steps)
        inputs, targets = load_diabetes(return_X_y=True)
        inputs = torch.tensor(inputs / inputs.std(axis=0), dtype=torch.float32)
        self.width = targets.std()
        targets = torch.tensor((targets[:, None] - targets.mean()) / self.width, dtype=torch.float32)
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))
        held, train = order[: task.tests], order[task.tests :]
        self.train, self.held = (inputs[train], targets[train]), (inputs[held], targets[held])

    def build(self, generator):
        """A network with fresh weights, drawn from the generator alone: a seed decides them."""
        net = nn.Linear(10, 1)
        nn.init.normal_(net.weight, std=0.1, generator=generator)
        nn.init.zeros_(net.bias)
        return net

    def loss(self, net, generator, step):
        """Of a batch that the generator draws: methods see the same data in the same order."""
        inputs, targets = self.train
        chosen = torch.randint(len(targets), (self.spec.batch,), generator=generator)
        return (net(inputs[chosen]) - targets[chosen]).square().mean() / 2

    def measure(self, net):
        """After each epoch; what counts is the value after the last."""
        inputs, targets = self.held
        return {"error": float((net(inputs) - targets).square().mean().sqrt() * self.width)}
