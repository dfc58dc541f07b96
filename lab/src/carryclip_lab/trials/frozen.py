"""What a method makes of gradients at weights that stay where they are: the mean of its updates less theirs."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Held:
    """Takes every step of plain SGD back, and adds up what it was and what the gradient was."""

    def __init__(self, net: nn.Module) -> None:
        self._parameters = list(net.parameters())
        self._place = parameters_to_vector(self._parameters).detach().clone()
        self._updates, self._gradients = (torch.zeros_like(self._place, dtype=torch.float64) for _ in range(2))
        self._steps = 0

    def before(self) -> None:
        """The step: its gradient is as it came."""
        self._gradients += _flat(self._parameters)

    @torch.no_grad()
    def after(self, lr: float) -> None:
        """The step: how far it went, by its learning rate, is what the optimizer was given."""
        self._updates += (self._place - parameters_to_vector(self._parameters)).double() / lr
        vector_to_parameters(self._place.clone(), self._parameters)  # which become views of what they are given
        self._steps += 1

    def measured(self) -> dict[str, Any]:
        """Of this epoch: means of gradients and of updates less gradients."""
        bias = (self._updates - self._gradients) / self._steps
        mean = self._gradients / self._steps
        return {
            "bias": bias.tolist(),
            "gradient": mean.tolist(),
            "bias_norm": float(bias.norm()),
            "bias_along": float(bias @ mean / mean.norm()),
        }


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]).double()
