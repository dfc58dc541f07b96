"""ResNets with pre-activation (v2), as in the framework the paper used: its padding, initial weights and shortcuts."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

EPSILON = 1e-5
"""Of batch norm."""


class Shape(NamedTuple):
    """What makes one ResNet differ from another."""

    blocks: tuple[int, int, int, int]
    bottleneck: bool
    width: int
    """Channels after the first convolution; each group doubles them."""


NETS = {
    "resnet50": Shape((3, 4, 6, 3), bottleneck=True, width=64),
    "resnet26": Shape((2, 2, 2, 2), bottleneck=True, width=64),
    "resnet18": Shape((2, 2, 2, 2), bottleneck=False, width=64),
    "resnet10": Shape((1, 1, 1, 1), bottleneck=False, width=16),
}
"""By name; the last is narrow, for trials on a CPU."""


class ResNet(nn.Module):
    """A network for images in channels-last memory; no convolution has a bias.

    >>> net = ResNet(NETS["resnet50"], classes=1000)
    >>> sum(p.numel() for p in net.parameters())
    25549352
    """

    def __init__(self, shape: Shape, classes: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.stem = Convolution(3, shape.width, 7, stride=2)
        self.groups = nn.ModuleList()
        channels = shape.width
        for number, count in enumerate(shape.blocks):
            out = shape.width * 2**number * (4 if shape.bottleneck else 1)
            # Without a bottleneck the first group keeps its channels and size, so that its shortcut is the identity.
            for k in range(count):
                stride = 2 if number and not k else 1
                self.groups.append(Block(channels, out, stride, bottleneck=shape.bottleneck))
                channels = out
        self.last = nn.BatchNorm2d(channels, eps=EPSILON)
        self.logits = nn.Linear(channels, classes)
        _initialise(self, generator)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        out = max_pool2d(_same(self.stem(images), 3, 2, value=-math.inf), 3, 2)
        for block in self.groups:
            out = block(out)
        return self.logits(relu(self.last(out)).mean((2, 3)))


class Block(nn.Module):
    """Batch norm, ReLU and convolution two or three times, added to the shortcut.

    A shortcut that must change size or channels does so by a convolution of the first activation.
    """

    def __init__(self, channels: int, out: int, stride: int, *, bottleneck: bool) -> None:
        super().__init__()
        inner = out // 4 if bottleneck else out
        sizes = [(channels, inner, 1, 1), (inner, inner, 3, stride), (inner, out, 1, 1)]
        if not bottleneck:
            sizes = [(channels, out, 3, stride), (out, out, 3, 1)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(size[0], eps=EPSILON) for size in sizes)
        self.convolutions = nn.ModuleList(Convolution(*size) for size in sizes)
        self.shortcut = Convolution(channels, out, 1, stride) if stride > 1 or channels != out else None

    def forward(self, images: Tensor) -> Tensor:
        """The block's output."""
        out = shortcut = images
        for number, (norm, convolution) in enumerate(zip(self.norms, self.convolutions, strict=True)):
            out = relu(norm(out))
            if number == 0 and self.shortcut is not None:
                shortcut = self.shortcut(out)
            out = convolution(out)
        return out + shortcut


class Convolution(nn.Conv2d):
    """Without bias; padded so that the output is the input divided by the stride, the odd pixel at the far end."""

    def __init__(self, channels: int, out: int, size: int, stride: int = 1) -> None:
        super().__init__(channels, out, size, stride, padding=size // 2 if stride == 1 else 0, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        """Pad, then convolve."""
        size, stride = self.kernel_size[0], self.stride[0]
        return super().forward(input if stride == 1 or size == 1 else _same(input, size, stride))


def _same(images: Tensor, size: int, stride: int, value: float = 0.0) -> Tensor:
    """Padded for a window of this size and stride."""
    margins: list[int] = []
    for length in reversed(images.shape[2:]):
        missing = max(0, (math.ceil(length / stride) - 1) * stride + size - length)
        margins += [missing // 2, missing - missing // 2]
    return pad(images, margins, value=value)


@torch.no_grad()
def _initialise(net: nn.Module, generator: torch.Generator | None) -> None:
    """Convolutions by a normal of variance 1 / fan-in that is cut off at two standard deviations, logits 0."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            std = 1.0 / math.sqrt(layer.in_channels * layer.kernel_size[0] ** 2)
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
        elif isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)


class Statistics:
    """The means and variances that batch norm uses in evaluation.

    They move once per step, a part of the way to the mean over all micro-batches of the step on all ranks: so they do
    not depend on how a batch is cut up among devices.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.layers = [layer for layer in net.modules() if isinstance(layer, nn.BatchNorm2d)]
        self.decay = decay
        self.average = torch.zeros_like(self.seen())
        self.steps = 0

    def before(self, number: int) -> None:
        """A pass is about to begin, counted from 0 within its step: let layers keep the plain mean over the passes.

        They could count themselves, but would ask the device for the number.
        """
        for layer in self.layers:
            layer.momentum = 1.0 / (number + 1)

    def seen(self) -> Tensor:
        """What the passes of this step have seen, on average."""
        return torch.cat(self._buffers())

    def take(self, seen: Tensor) -> None:
        """The step is over, and this is what all ranks have seen."""
        self.average.lerp_(seen, 1.0 - self.decay)
        self.steps += 1

    def show(self) -> None:
        """Put them where evaluation looks for them; averages start from zero and are made up for it."""
        found = self.average / (1.0 - self.decay ** max(1, self.steps))
        for buffer, part in zip(self._buffers(), found.split([b.numel() for b in self._buffers()]), strict=True):
            buffer.copy_(part)

    def _buffers(self) -> list[Tensor]:
        pairs = [(layer.running_mean, layer.running_var) for layer in self.layers]
        return [buffer for pair in pairs for buffer in pair if buffer is not None]

    def state(self) -> dict[str, Any]:
        """To be saved."""
        return {"average": self.average, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.average.copy_(state["average"])
        self.steps = state["steps"]
