"""End to end: the step time of whole training loops, with the clipping people have and with U-Clip."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from carryclip import Component, Norm
from carryclip.torch import UClip


class Block(nn.Module):
    """A transformer block, pre-norm, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same."""
        batch, time, width = x.shape
        parts = self.attend(self.before(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.think(self.after(x))


def conv_net() -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's CIFAR-10 net and a batch of 100 random images."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 250),
        nn.ReLU(),
        nn.Linear(250, 250),
        nn.ReLU(),
        nn.Linear(250, 10),
    )
    net = cast(Any, net).to(memory_format=torch.channels_last)
    images = torch.randn(100, 3, 32, 32).to(memory_format=torch.channels_last)
    return net, images, torch.randint(10, (100,))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """A small language model (3.6 million parameters) and a batch of 8 random sequences of 128 tokens."""
    width, words = 256, 1000

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(128, width)
            self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(4)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
            return self.head(self.norm(self.blocks(x))).flatten(0, 1)

    tokens = torch.randint(words, (8, 129))
    return Model(), tokens[:, :-1], tokens[:, 1:].flatten()


LOOPS = {"conv-net, batch 100": conv_net, "transformer, 3.6 M": transformer}
CLIPPING: dict[str, Any] = {
    "no clipping": None,
    "clip_grad_norm_": "torch",
    "U-Clip Norm": Norm(1.0),
    "U-Clip Component": Component(0.01),
    "U-Clip Norm, compiled": Norm(1.0),
}


def loop(model: str, method: str) -> Callable[[], Any]:
    """One training step: forward, backward, clipping, AdamW; U-Clip with its default of metrics every 10 steps."""
    torch.manual_seed(0)
    net, inputs, targets = LOOPS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    clipping = CLIPPING[method]
    if clipping not in (None, "torch"):
        UClip(optimizer, clipping, compile="compiled" in method)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        if clipping == "torch":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    return step
