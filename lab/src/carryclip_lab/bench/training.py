"""End to end: the step time of whole training loops, with the clipping people have and with U-Clip."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from carryclip import Component, Norm
from carryclip.regions import Region
from carryclip.torch import UClip
from carryclip_lab.tasks import cifar10
from carryclip_lab.tasks._decoder import Decoder


def conv_net() -> tuple[nn.Module, Tensor, Tensor]:
    """The paper's CIFAR-10 net and a batch of 100 random images."""
    images = torch.randn(100, 3, 32, 32).to(memory_format=torch.channels_last)
    return cifar10.conv_net(torch.Generator().manual_seed(0)), images, torch.randint(10, (100,))


def transformer() -> tuple[nn.Module, Tensor, Tensor]:
    """A small language model (3.7 million parameters) and a batch of 8 random sequences of 128 tokens."""
    words = 1000
    net = nn.Sequential(Decoder(words, 128, 256, heads=4, layers=4), nn.Flatten(0, 1))
    tokens = torch.randint(words, (8, 129))
    return net, tokens[:, :-1], tokens[:, 1:].flatten()


LOOPS = {"conv-net, batch 100": conv_net, "transformer, 3.7 M": transformer}
CLIPPING: dict[str, Any] = {
    "no clipping": None,
    "clip_grad_norm_": "torch",
    "U-Clip Norm": Norm(1.0),
    "U-Clip Component": Component(0.01),
    "U-Clip Norm, compiled": Norm(1.0),
    "floor": "floor",
}
"""The floor: ``clip_grad_norm_``, and one pass that adds gradients to arrays of their size. No carry costs less."""


def loop(model: str, method: str) -> Callable[[], Any]:
    """One training step: forward, backward, clipping, AdamW; U-Clip as it is by default."""
    torch.manual_seed(0)
    net, inputs, targets = LOOPS[model]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    clipping = CLIPPING[method]
    if isinstance(clipping, Region):
        UClip(optimizer, clipping, compile="compiled" in method)
    carries = [torch.zeros_like(p) for p in net.parameters()] if clipping == "floor" else []

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        if clipping in ("torch", "floor"):
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if carries:
            torch._foreach_add_(carries, [p.grad for p in net.parameters() if p.grad is not None])
        optimizer.step()

    return step
