"""ImageNet, or any folder of images: a ResNet v2 trained by one process or by many, as the paper did."""

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from carryclip_lab.checks import check_choice, check_whole, make_float
from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine.team import Team, Votes
from carryclip_lab.imagenet import made
from carryclip_lab.imagenet.folder import WHERE, Folder, look_through
from carryclip_lab.imagenet.images import MEAN, STD
from carryclip_lab.imagenet.resnet import NETS, ResNet, Statistics
from carryclip_lab.imagenet.stream import Batch, Cut, Order, Reader, evaluation, training
from carryclip_lab.problem import Problem, Run, Timing
from carryclip_lab.spec import Spec
from carryclip_lab.task import Place, Task

BASE = 256
"""Examples for which a spec states its learning rate."""
NORM_DECAY = 0.9
"""Of the averages that batch norm uses in evaluation."""


@dataclass(frozen=True, kw_only=True)
class ImageNet(Task):
    """A ResNet on a folder of images; the defaults are the paper's.

    Args:
        net: name of the network.
        image: side of the images, in pixels.
        micro: images that go through the network together, and so share their batch statistics.
        warmup: epochs in which the learning rate rises.
        decay: factor of the L2 term in the loss, on all weights but batch norm's.
        smoothing: of labels.
        precision: in which the network computes; weights and carry stay in float32.
        data: fingerprint of the folder; with the next three it is filled in from the folder that is used.
        classes: of images.
        images: in the training set.
        tests: images in the validation set.
    """

    name = "ImageNet"
    shown_as = "accuracy"
    lasting = True
    joint = True
    needs = "--data DIR"
    missing = WHERE
    weights = (1e-3, 1e-2)

    net: str = "resnet50"
    image: int = 224
    micro: int = 128
    warmup: int = 5
    decay: float = 1e-4
    smoothing: float = 0.1
    precision: str = "float32"
    data: str = "imagenet"
    classes: int = 1000
    images: int = 1_281_167
    tests: int = 50_000

    def __post_init__(self) -> None:
        check_whole(self, image=8, micro=2, warmup=0, classes=2, images=1, tests=1)
        make_float(self, "decay", below=1.0)
        make_float(self, "smoothing", below=1.0)
        check_choice("precision", self.precision, ("float32", "bfloat16"))
        check_choice("net", self.net, tuple(NETS))

    def problem(self, spec: Spec, place: Place) -> "Images":
        """The folder must be the one that the run was planned for."""
        return Images(spec, self, place, opened(self, place.data))

    def epoch(self, spec: Spec) -> tuple[int, int]:
        """The last partial batch is left out."""
        return self.images // spec.batch, self.images

    def check(self, spec: Spec, processes: int) -> None:
        """Can batches be divided among the processes, and the epochs into warm-up and the rest?"""
        super().check(spec, processes)
        Cut(spec.batch, self.micro, size=processes)
        Order(self.images, spec.batch, spec.epochs, spec.seed)
        if self.warmup >= spec.epochs:
            raise ValueError(f"A warm-up of {self.warmup} epochs leaves none of {spec.epochs}.")

    @classmethod
    def found(cls, data: str | None, tier: str, *, make: bool) -> Mapping[str, Any] | None:
        """From the folder; the smoke tier makes one of its own, and the paper's counts are those of the defaults."""
        own = data == cls.own_data()
        if data is not None and not own and not Path(data).is_file():
            return look_through(data).settings
        if tier == "smoke":
            return look_through(made.make()).settings if make else made.settings()
        return {} if tier == "paper" and not make else None

    @classmethod
    def own_data(cls) -> str:
        """Patterns of ten kinds."""
        return str(made.made_folder())

    def described(self, specs: Sequence[Spec]) -> str:
        """The data, and how many epochs."""
        return f"{self.data_name(None)}, {max(spec.epochs for spec in specs)} epochs"

    def data_name(self, examples: int | None) -> str:
        """The folder in numbers."""
        whole = self.data == "imagenet" or self.images > 1_000_000
        counted = f"{self.classes:,} classes, {self.images:,} images of {self.image} pixels, {self.net} v2"
        return f"{self.name if whole else 'a folder'}: {counted}"

    def timing(self, spec: Spec, place: Place) -> Timing:
        """Steps on pixels that cost nothing to read; an image that is only evaluated takes a third."""
        count = self.micro if place.device != "cpu" else min(self.micro, 8)
        pixels = np.random.default_rng(0).integers(256, size=(count, self.image, self.image, 3))
        labels = np.zeros(count, dtype=np.int64)
        batch = {"image": pixels.astype(np.uint8), "label": labels, "broken": labels - 1}
        problem = Images(spec, self, place, None)
        problem.read = lambda: [batch]
        run = Run(spec, problem, place.device)

        def step() -> None:
            run.train(0)
            if place.device != "cpu":
                torch.cuda.synchronize()

        return Timing(step, count, None, share=self.tests)


def opened(task: ImageNet, data: str | None) -> Folder:
    """The folder that a task is about."""
    if data is None:
        raise DataError(WHERE)
    folder = look_through(data)
    if folder.fingerprint != task.data:
        raise DataError(f"{folder} is not the folder that this run was planned for ({task.data}).")
    return folder


def rate(spec: Spec, step: int) -> float:
    """As large as the batch, rising linearly through the warm-up, then falling by a cosine to 0.

    >>> given = {"task": "imagenet", "optimizer": "nesterov", "lr": 0.1, "batch": 4096, "epochs": 90, "seed": 0}
    >>> [round(rate(Spec.read(given), epoch * 312), 4) for epoch in (0, 1, 5, 48, 90)]
    [0.0, 0.32, 1.6, 0.7852, 0.0]
    """
    steps, _ = spec.recipe.epoch(spec)
    peak = spec.lr * spec.batch / BASE
    warm, total = spec.recipe.warmup * steps, spec.epochs * steps
    if step < warm:
        return peak * step / warm
    return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm) / (total - warm)))


class Images(Problem):
    """This process's part of every batch, in micro-batches; without a folder there is nothing to read."""

    def __init__(self, spec: Spec, task: ImageNet, place: Place, folder: Folder | None) -> None:
        super().__init__(spec, task.epoch(spec)[0])
        self.task, self.folder, self.place = task, folder, place
        self.team: Team = place.team or Team()
        self.device = torch.device(place.device)
        self.cut = Cut(spec.batch, task.micro, self.team.rank, self.team.size)
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        """Of this epoch and rank: losses, and right answers."""
        self._mean, self._std = (
            torch.tensor(values, device=self.device).view(3, 1, 1) * 255.0 for values in (MEAN, STD)
        )
        self._votes = Votes(self.device)
        self._stream: Iterator[Batch] | None = None
        self._model: Any = None

    def build(self, generator: torch.Generator) -> nn.Module:
        """The network; what trains it together with others is kept aside."""
        net = ResNet(NETS[self.task.net], self.task.classes, generator)
        net = net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.statistics = Statistics(net, NORM_DECAY)
        self.decayed = weights_of(net)
        self._model = net
        if self.team.size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            # Batch statistics are those of each micro-batch, and the averages of them are ours.
            known = inspect.signature(DistributedDataParallel).parameters
            word = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: dict[str, Any] = {word: False}
            self._model = DistributedDataParallel(net, device_ids=ids, **options)
        return net

    def rate(self, step: int) -> float:
        """By a schedule."""
        return rate(self.spec, step)

    def begin(self, step: int) -> None:
        """Images from this step on; an epoch that goes on keeps what it has seen."""
        if self._stream is None and self.folder is not None:
            reader = Reader(self.folder.train, self.task.image, strict=self.place.strict)
            order = Order(len(self.folder.train), self.spec.batch, self.spec.epochs, self.spec.seed)
            self._stream = training(reader, order, self.cut, first=step, threads=self.place.threads)

    def read(self) -> list[Batch]:
        """This rank's micro-batches of a step."""
        assert self._stream is not None
        assert self.folder is not None
        batches = [next(self._stream) for _ in range(self.cut.passes)]
        for batch in batches:
            self._note(batch, self.folder.train.names)
        return batches

    def backward(self, net: nn.Module, step: int) -> None:
        """Micro-batches one after the other, gradients averaged over the team with the last."""
        batches = self.read()
        share = self.spec.batch // self.team.size
        for k, batch in enumerate(batches):
            last = k == len(batches) - 1
            self.statistics.before(k)
            with contextlib.nullcontext() if last or self.team.size == 1 else self._model.no_sync():
                loss, right = self._forward(self._model, batch)
                (loss / share).backward()
            self.sums += torch.stack((loss.detach(), right))
        self._add_decay()

    def _forward(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and number of right answers; examples with label -1 do not count."""
        images, labels = self._moved(batch["image"]), self._moved(batch["label"])
        values = images.permute(0, 3, 1, 2).float().sub_(self._mean).div_(self._std)  # channels last in memory
        half = self.task.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            out = model(values)
        smoothing = self.task.smoothing
        loss = cross_entropy(out.float(), labels, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
        return loss, (out.argmax(1) == labels).sum()

    def _moved(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _add_decay(self) -> None:
        """The gradient of the L2 term: part of the loss, so that it is clipped with the rest."""
        gradients = [weight.grad for weight in self.decayed if weight.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(gradients, list(self.decayed), alpha=self.task.decay)

    @torch.no_grad()
    def agree(self, *, pause: bool) -> bool:
        """On the batch statistics of the step, and on whether to pause, in one word."""
        if self.team.size == 1:
            self.statistics.take(self.statistics.seen())
            return pause
        vote = torch.full((1,), float(pause), device=self.device)
        vector = self.team.add(torch.cat((self.statistics.seen(), vote)))
        self.statistics.take(vector[:-1] / self.team.size)
        return self._votes.heard(vector[-1])

    def closed(self, net: nn.Module, *, last: bool) -> dict[str, Any]:
        """Loss and accuracy on the way, and accuracy on the validation images."""
        accuracy, _ = self.evaluate(net)
        loss, right = (self.team.add(self.sums) / (self.steps * self.spec.batch)).tolist()
        self.broken = set().union(*self.team.gathered(self.broken))
        self.sums = torch.zeros_like(self.sums)
        found = {"running_accuracy": right, "test_accuracy": accuracy}
        return {"loss": loss if math.isfinite(loss) else None, **found}

    @torch.no_grad()
    def evaluate(self, net: nn.Module) -> tuple[float, int]:
        """Share of right answers among all validation images that can be read, and how many these are."""
        assert self.folder is not None
        reader = Reader(self.folder.val, self.task.image, strict=self.place.strict)
        net.eval()
        self.statistics.show()
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in evaluation(reader, self.cut, threads=self.place.threads):
            found[0] += self._forward(net, batch)[1]
            found[1] += int((batch["label"] >= 0).sum())
            self._note(batch, self.folder.val.names)
        right, seen = self.team.add(found).tolist()
        return right / seen if seen else math.nan, int(seen)

    def _note(self, batch: Batch, names: tuple[str, ...]) -> None:
        """Remember files that could not be read."""
        self.broken.update(names[number] for number in batch["broken"].tolist() if number >= 0)

    def message(self) -> str | None:
        """Which files could not be read."""
        if not self.broken:
            return None
        names = sorted(self.broken)
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return f"{len(names)} images could not be read, and were left out: {', '.join(names[:5])}{more}."

    def state(self) -> dict[str, Any]:
        """The same on every rank."""
        return {
            "statistics": self.statistics.state(),
            "sums": self.team.add(self.sums.clone()),
            "broken": sorted(set().union(*self.team.gathered(self.broken))),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.statistics.restore(state["statistics"])
        self.broken = set(state["broken"])
        # Sums are over all ranks in the file, and over one rank here.
        self.sums = state["sums"].to(self.device) * (1.0 if self.team.leads else 0.0)


def weights_of(net: nn.Module) -> list[nn.Parameter]:
    """Parameters that the L2 term counts: all but batch norm's."""
    norms = {id(p) for layer in net.modules() if isinstance(layer, nn.BatchNorm2d) for p in layer.parameters()}
    return [parameter for parameter in net.parameters() if id(parameter) not in norms]
