"""What is trained: data in memory once per process, and the network with the paper's initial weights."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """Standardised images in memory, labels, and a maker of networks."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    build: Callable[[torch.Generator], nn.Module]
    """A network with fresh weights; the same generator state gives the same weights."""
    chunk: int
    """Examples that go through the network together on a CPU: more would fall out of its cache."""


GPU_CHUNK = 2048
"""The same on a GPU, where more would only take memory."""


@functools.lru_cache(maxsize=2)
def load(name: str, examples: int | None = None, device: str = "cpu") -> Task:
    """The data and network of a task.

    Args:
        name: ``"digits"`` or ``"cifar10"``.
        examples: size of a stratified subset of the training set, always the same one; None for all.
        device: where the data should live.
    """
    task = {"digits": _digits, "cifar10": _cifar10}[name]()
    if examples is not None:
        chosen = stratified(task.labels, examples)
        task = replace(task, images=task.images[chosen], labels=task.labels[chosen])
    if device == "cpu":
        return task
    names = ("images", "labels", "test_images", "test_labels")
    return replace(task, **{name: getattr(task, name).to(device) for name in names}, chunk=GPU_CHUNK)


def stratified(labels: Tensor, count: int) -> Tensor:
    """Places of ``count`` examples with all classes in equal shares, up to one."""
    if count > len(labels):
        raise ValueError(f"examples is {count}, but the training set has only {len(labels)}.")
    generator = np.random.default_rng(0)
    known = labels.numpy()
    shuffled = generator.permutation(len(known))
    rank = np.empty(len(known), dtype=np.int64)
    for label in np.unique(known):
        mine = shuffled[known[shuffled] == label]
        rank[mine] = np.arange(len(mine))
    # By rank within the class first: the first `count` have as many of each class as there are to be had.
    order = np.lexsort((known, rank))[:count]
    return torch.from_numpy(np.sort(order))


def _digits() -> Task:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32)
    images = (images - images.mean()) / images.std()
    labels = torch.tensor(digits)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]

    def build(generator: torch.Generator) -> nn.Module:
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        return _initialised(net, generator)

    return Task(images[train], labels[train], images[test], labels[test], build, chunk=512)


def _cifar10() -> Task:
    from carryclip_lab.data.cifar10 import load_cifar10

    images, labels, test_images, test_labels = load_cifar10()
    # By the whole training set, whatever part of it is used.
    counts = [np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(3)]
    levels = np.arange(256)
    mean = np.array([count @ levels / count.sum() for count in counts])
    square = np.array([count @ levels**2 / count.sum() for count in counts])

    def ready(pixels: np.ndarray) -> Tensor:
        # Channels last: on a CPU 1.5 times as fast at batch 100 and 10 times at batch 1.
        values = torch.from_numpy(pixels).contiguous(memory_format=torch.channels_last).float()
        centre, width = (torch.tensor(v, dtype=torch.float32).view(3, 1, 1) for v in (mean, np.sqrt(square - mean**2)))
        return values.sub_(centre).div_(width)

    return Task(
        ready(images), torch.from_numpy(labels), ready(test_images), torch.from_numpy(test_labels), conv_net, chunk=50
    )


class _FlatChannelsLast(nn.Module):
    """All features of an image in a row, channels last, as the paper's framework has them: here no copy is needed."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 2, 3, 1).flatten(1)


def conv_net(generator: torch.Generator) -> nn.Module:
    """The paper's network for CIFAR-10: two convolutions, three dense layers, 1.1 million weights."""
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        _FlatChannelsLast(),
        nn.Linear(64 * 8 * 8, 250),
        nn.ReLU(),
        nn.Linear(250, 250),
        nn.ReLU(),
        nn.Linear(250, 10),
    )
    return _initialised(net, generator).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


_TRUNCATED = 0.87962566103423978
"""Standard deviation of a standard normal variable cut off at 2."""


@torch.no_grad()
def _initialised(net: nn.Sequential, generator: torch.Generator) -> nn.Module:
    """Convolutions LeCun (truncated) normal with bias 0, dense layers Glorot normal with bias 0.01."""
    for layer in net:
        if isinstance(layer, nn.Conv2d):
            fan_in = layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]
            std = 1.0 / math.sqrt(fan_in) / _TRUNCATED
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std, generator=generator)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        elif isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight, generator=generator)
            nn.init.constant_(layer.bias, 0.01)
    return net
