"""Images in memory, and a network that learns them to a target: the problem of the paper's studies."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from carryclip_lab.problem import Problem, Run, Timing
from carryclip_lab.spec import Spec
from carryclip_lab.task import Place, Task

GPU_CHUNK = 2048
"""Examples that go through the network together on a GPU, where more would only take memory."""


@dataclass(frozen=True)
class Images:
    """Standardised images, labels, and a maker of networks."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    build: Callable[[torch.Generator], nn.Module]
    """A network with fresh weights; the same generator state gives the same weights."""
    chunk: int
    """Examples that go through the network together on a CPU: more would fall out of its cache."""


@functools.lru_cache(maxsize=2)
def loaded(read: Callable[[], Images], examples: int | None = None, device: str = "cpu") -> Images:
    """Images on a device; of the training set a stratified part, always the same one, if a number is given."""
    data = read()
    if examples is not None:
        chosen = stratified(data.labels, examples)
        data = replace(data, images=data.images[chosen], labels=data.labels[chosen])
    if device == "cpu":
        return data
    names = ("images", "labels", "test_images", "test_labels")
    return replace(data, **{name: getattr(data, name).to(device) for name in names}, chunk=GPU_CHUNK)


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


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """Images in memory, a network, and a train accuracy at which a run is over. There is nothing else to choose."""

    target = 0.99
    shown_as = "epochs"

    @staticmethod
    def read() -> Images:
        """The data and the network."""
        raise NotImplementedError

    def problem(self, spec: Spec, place: Place) -> "ToTarget":
        """Batches in a new order every epoch."""
        return ToTarget(spec, loaded(self.read, spec.examples, place.device))

    def epoch(self, spec: Spec) -> tuple[int, int]:
        """The last partial batch is kept."""
        count = spec.examples or self.size or 0
        return math.ceil(count / spec.batch), count


class ToTarget(Problem):
    """Train on all images in a new order every epoch, then measure the accuracy on all of them."""

    def __init__(self, spec: Spec, data: Images) -> None:
        super().__init__(spec, steps=math.ceil(len(data.labels) / spec.batch))
        self.data = data
        self.order = torch.Generator().manual_seed(2 * spec.seed + 1)
        self._first, self._batches = 0, [torch.arange(0)]
        self.total = self.right = torch.zeros(0)

    def build(self, generator: torch.Generator) -> nn.Module:
        """The network that comes with the images."""
        return self.data.build(generator)

    def begin(self, step: int) -> None:
        """Draw the epoch's order."""
        self._first = step
        self._batches = list(torch.randperm(len(self.data.labels), generator=self.order).split(self.spec.batch))
        self.total, self.right = torch.zeros(2, device=self.data.images.device, dtype=torch.float64).unbind()

    def backward(self, net: nn.Module, step: int) -> None:
        """A batch in parts that fit the cache."""
        batch = self._batches[step - self._first]
        for part in batch.to(self.data.labels.device).split(self.data.chunk):
            out = net(self.data.images[part])
            summed = nn.functional.cross_entropy(out, self.data.labels[part], reduction="sum")
            (summed / len(batch)).backward()
            self.total += summed.detach()
            self.right += (out.detach().argmax(1) == self.data.labels[part]).sum()

    def closed(self, net: nn.Module, *, last: bool) -> dict[str, Any]:
        """Accuracies: on the way, on all training images, and of a run that is over on the test images."""
        count = len(self.data.labels)
        loss = self.total.item() / count
        told: dict[str, Any] = {"loss": None, "running_accuracy": self.right.item() / count}
        if not math.isfinite(loss):
            return told
        least = self.spec.goal if self.spec.brief and not last else 0.0
        accuracy = accuracy_of(net, self.data.images, self.data.labels, self.data.chunk, least)
        told |= {"loss": loss, "train_accuracy": accuracy}
        if last or (accuracy is not None and accuracy >= self.spec.goal):
            # Only the last is of interest, and on a subset the test set would take longer than the epoch.
            told["test_accuracy"] = accuracy_of(net, self.data.test_images, self.data.test_labels, self.data.chunk)
        return told

    def state(self) -> dict[str, Any]:
        """What draws the order."""
        return {"order": self.order.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.order.set_state(state["order"])

    def timing(self, spec: Spec, place: Place) -> Timing:
        """A step of one part of a batch; and a few parts evaluated."""
        chunk, count = self.data.chunk, len(self.data.labels)
        run = Run(spec, self, place.device)
        self.begin(0)
        self._batches = list(torch.arange(count).split(min(spec.batch, chunk)))
        steps = iter(range(1 << 60))
        some = min(5 * chunk, count)
        return Timing(
            step=lambda: run.train(next(steps) % len(self._batches)),
            examples=min(spec.batch, chunk),
            evaluate=lambda: accuracy_of(run.net, self.data.images[:some], self.data.labels[:some], chunk),
            # Of a brief run no more is measured than shows that the target is out of reach: about a tenth.
            share=(0.1 if spec.brief else 1.0) * count / some,
        )


@torch.no_grad()
def accuracy_of(net: nn.Module, images: Tensor, labels: Tensor, chunk: int, least: float = 0.0) -> float | None:
    """Share of images that the network classifies rightly; None as soon as it is sure to be less than ``least``."""
    net.eval()
    right, left = 0, len(labels)
    for x, y in zip(images.split(chunk), labels.split(chunk), strict=True):
        right += int((net(x).argmax(1) == y).sum())
        left -= len(y)
        if (right + left) / len(labels) < least:
            return None
    return right / len(labels)


_TRUNCATED = 0.87962566103423978
"""Standard deviation of a standard normal variable cut off at 2."""


@torch.no_grad()
def initialised(net: nn.Sequential, generator: torch.Generator) -> nn.Module:
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
