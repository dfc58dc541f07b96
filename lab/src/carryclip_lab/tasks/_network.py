"""A small dense network for numbers in a table."""

import math

import torch
from torch import Tensor, nn


class Dense(nn.Module):
    """One hidden layer with ReLU, one output: an expected amount."""

    def __init__(self, features: int, hidden: int, generator: torch.Generator) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(features, hidden), nn.Linear(hidden, 1)
        with torch.no_grad():
            for layer in (self.inner, self.outer):
                layer.weight.normal_(std=1.0 / math.sqrt(layer.in_features), generator=generator)
                layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """(examples, features) -> (examples,)."""
        return self.outer(self.inner(x).relu())[:, 0]
