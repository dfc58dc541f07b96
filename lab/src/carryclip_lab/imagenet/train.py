"""One run: train a ResNet as its spec says, alone or in a team, and go on at the very step where it was stopped."""

import contextlib
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from carryclip_lab.data.unpack import DataError
from carryclip_lab.engine.methods import (
    Samples,
    attach,
    gradient_norm,
    measure_next,
    optimizer_of,
    own_state,
    sampling,
    unwarned,
)
from carryclip_lab.engine.team import Team, Votes
from carryclip_lab.imagenet.folder import WHERE, Folder, look_through
from carryclip_lab.imagenet.images import MEAN, STD
from carryclip_lab.imagenet.resnet import ResNet, Statistics
from carryclip_lab.imagenet.schedule import rate, steps_of
from carryclip_lab.imagenet.stream import Batch, Cut, Order, Reader, evaluation, training
from carryclip_lab.spec import Spec
from carryclip_lab.store import checkpoints
from carryclip_lab.store.records import End, Epoch, Progress, StoppedError
from carryclip_lab.tasks.recipes import NETS

NORM_DECAY = 0.9
"""Of the averages that batch norm uses in evaluation."""
SPEAK = 10.0
"""Seconds between two words about how far a run is."""


class Run:
    """Everything that changes while a run goes on."""

    def __init__(self, spec: Spec, device: str, team: Team) -> None:
        self.spec, self.recipe, self.team = spec, spec.recipe, team
        self.device = torch.device(device)
        torch.manual_seed(spec.seed)  # nothing here draws from it, but a method of one's own may
        weights = torch.Generator().manual_seed(2 * spec.seed)
        net = ResNet(NETS[self.recipe.net], self.recipe.classes, weights)
        self.net = net.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.statistics = Statistics(self.net, NORM_DECAY)
        self.optimizer = optimizer_of(spec, self.net.parameters())
        self.every = sampling(steps_of(spec))
        self.clipper = attach(spec, self.optimizer, self.every)
        self.weights = weights_of(self.net)
        self.history: list[Epoch] = []
        self.step = 0
        """Steps done in this epoch."""
        self.seconds = 0.0
        """Spent on this epoch before the run was stopped."""
        self.samples = Samples()
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        """Of this epoch and rank: losses, and right answers."""
        self.broken: set[str] = set()
        """Files that could not be read."""
        mean, std = (torch.tensor(values, device=self.device).view(3, 1, 1) * 255.0 for values in (MEAN, STD))
        self._mean, self._std = mean, std
        self._votes = Votes(self.device)
        self._model: Any = self.net
        if team.size > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            # Batch statistics are those of each micro-batch, and the averages of them are ours.
            known = inspect.signature(DistributedDataParallel).parameters
            word = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
            options: dict[str, Any] = {word: False}
            self._model = DistributedDataParallel(self.net, device_ids=ids, **options)

    @property
    def position(self) -> int:
        """Steps done in all."""
        return len(self.history) * steps_of(self.spec) + self.step

    # ------------------------------------------------------------------ one step

    @unwarned()
    def train(self, batches: list[Batch], *, pause: bool) -> bool:
        """One step on this rank's micro-batches; whether someone in the team wants a pause after it."""
        spec, number = self.spec, self.position
        self.net.train()
        self.optimizer.zero_grad()
        share = spec.batch // self.team.size
        for k, batch in enumerate(batches):
            last = k == len(batches) - 1
            self.statistics.before(k)
            with contextlib.nullcontext() if last or self.team.size == 1 else self._model.no_sync():
                loss, right = self._forward(self._model, batch)
                (loss / share).backward()
            self.sums += torch.stack((loss.detach(), right))
        self._add_decay()
        norm = gradient_norm(self.net.parameters()) if number % self.every == 0 else None
        measure_next(self.clipper, wanted=norm is not None)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(spec, number)
        self.optimizer.step()
        if norm is not None:
            self.samples.take(norm, self.clipper)
        self.step += 1
        return self._meet(pause)

    def _forward(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and number of right answers; examples with label -1 do not count."""
        images, labels = self._moved(batch["image"]), self._moved(batch["label"])
        values = images.permute(0, 3, 1, 2).float().sub_(self._mean).div_(self._std)  # channels last in memory
        half = self.recipe.precision == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            out = model(values)
        smoothing = self.recipe.smoothing
        loss = cross_entropy(out.float(), labels, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
        return loss, (out.argmax(1) == labels).sum()

    def _moved(self, array: Any) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _add_decay(self) -> None:
        """The gradient of the L2 term: part of the loss, so that it is clipped with the rest."""
        gradients = [weight.grad for weight in self.weights if weight.grad is not None]
        with torch.no_grad():
            torch._foreach_add_(gradients, list(self.weights), alpha=self.recipe.decay)

    @torch.no_grad()
    def _meet(self, pause: bool) -> bool:
        """Agree on the batch statistics of the step, and on whether to pause, in one word."""
        if self.team.size == 1:
            self.statistics.take(self.statistics.seen())
            return pause
        vote = torch.full((1,), float(pause), device=self.device)
        vector = self.team.add(torch.cat((self.statistics.seen(), vote)))
        self.statistics.take(vector[:-1] / self.team.size)
        return self._votes.heard(vector[-1])

    # ------------------------------------------------------------------ the end of an epoch

    @unwarned()
    def close(self, accuracy: float, seconds: float) -> Epoch:
        """An epoch is over."""
        loss, right = (self.team.add(self.sums) / (steps_of(self.spec) * self.spec.batch)).tolist()
        epoch = Epoch(
            epoch=len(self.history) + 1,
            loss=loss if math.isfinite(loss) else None,
            running_accuracy=right,
            test_accuracy=accuracy,
            **self.samples.means(),
            seconds=self.seconds + seconds,
        )
        self.history.append(epoch)
        self.broken = set().union(*self.team.gathered(self.broken))
        self.step, self.seconds, self.samples = 0, 0.0, Samples()
        self.sums = torch.zeros_like(self.sums)
        return epoch

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], names: tuple[str, ...]) -> tuple[float, int]:
        """Share of right answers among all images that can be read, and how many these are."""
        self.net.eval()
        self.statistics.show()
        found = torch.zeros(2, dtype=torch.float64, device=self.device)
        for batch in batches:
            found[0] += self._forward(self.net, batch)[1]
            found[1] += int((batch["label"] >= 0).sum())
            self.note(batch, names)
        right, seen = self.team.add(found).tolist()
        return right / seen if seen else math.nan, int(seen)

    def note(self, batch: Batch, names: tuple[str, ...]) -> None:
        """Remember files that could not be read."""
        self.broken.update(names[number] for number in batch["broken"].tolist() if number >= 0)

    # ------------------------------------------------------------------ checkpoints

    @unwarned()
    def state(self, seconds: float) -> dict[str, Any]:
        """All of it, the same on every rank; ``seconds`` were spent on this epoch since it began here."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "statistics": self.statistics.state(),
            "history": [asdict(epoch) for epoch in self.history],
            "step": self.step,
            "seconds": self.seconds + seconds,
            "samples": self.samples.values(),
            "sums": self.team.add(self.sums.clone()),
            "broken": sorted(set().union(*self.team.gathered(self.broken))),
            "random": torch.get_rng_state(),
            **own_state(self.clipper),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.statistics.restore(state["statistics"])
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.step, self.seconds, self.broken = state["step"], state["seconds"], set(state["broken"])
        self.samples = Samples(state["samples"])
        torch.set_rng_state(state["random"])
        if "clipper" in state:
            self.clipper.load_state_dict(state["clipper"])
        # Sums are over all ranks in the file, and over one rank here.
        self.sums = state["sums"].to(self.device) * (1.0 if self.team.leads else 0.0)


def weights_of(net: nn.Module) -> list[nn.Parameter]:
    """Parameters that the L2 term counts: all but batch norm's."""
    norms = {id(p) for layer in net.modules() if isinstance(layer, nn.BatchNorm2d) for p in layer.parameters()}
    return [parameter for parameter in net.parameters() if id(parameter) not in norms]


def open_folder(spec: Spec, data: str | None) -> Folder:
    """The folder that a spec is about."""
    if data is None:
        raise DataError(WHERE)
    folder = look_through(data)
    if folder.fingerprint != spec.recipe.data:
        raise DataError(f"{folder} is not the folder that this run was planned for ({spec.recipe.data}).")
    return folder


def train(
    spec: Spec,
    checkpoint: Path | None = None,
    *,
    data: str | None,
    every: float = 0.0,
    device: str = "cpu",
    team: Team | None = None,
    threads: int = 1,
    strict: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Epoch | Progress | End]:
    """Train, yielding each epoch when it is over, words on the way, and the end at last.

    Args:
        spec: what to train.
        checkpoint: file to go on from, written after each epoch, every so often, and when asked to stop.
        data: folder of images.
        every: seconds between two checkpoints within an epoch; 0 for none.
        device: where to train.
        team: the processes that train this run together, each of which calls this.
        threads: that read ahead.
        strict: whether a file that cannot be read is an error.
        stop: asked after every step whether to save and stop.
    """
    team = team or Team()
    cut = Cut(spec.batch, spec.recipe.micro, team.rank, team.size)
    folder = open_folder(spec, data)
    # The leading process alone reads the file, and tells the others, which need not see it.
    found = checkpoints.read(checkpoint, spec, device) if checkpoint is not None and team.leads else None
    run = checkpoints.resumed(lambda: Run(spec, device, team), checkpoint, team.told(found))
    yield from run.history
    order = Order(len(folder.train), spec.batch, spec.epochs, spec.seed)
    reader = Reader(folder.train, spec.recipe.image, strict=strict)
    stream = training(reader, order, cut, first=run.position, threads=threads)
    tests = Reader(folder.val, spec.recipe.image, strict=strict)
    clock = _Clock(run, every)

    def save() -> None:
        if checkpoint is not None:
            state = run.state(clock.spent())
            if team.leads:
                checkpoints.save(checkpoint, spec, device, state)
        clock.saved()

    clock.begin()
    while (end := _end(spec, run)) is None:
        while run.step < steps_of(spec):
            batches = [next(stream) for _ in range(cut.passes)]
            for batch in batches:
                run.note(batch, folder.train.names)
            if run.train(batches, pause=stop() or clock.wants_to_save()):
                save()
                if any(team.gathered(stop())):
                    raise StoppedError(f"Stopped at step {run.step} of epoch {len(run.history) + 1}.")
            if clock.wants_to_speak():
                yield clock.word()
        accuracy, _ = run.evaluate(evaluation(tests, cut, threads=threads), folder.val.names)
        yield run.close(accuracy, clock.spent())
        clock.begin()
        save()
    yield end


def _end(spec: Spec, run: Run) -> End | None:
    if run.history and run.history[-1].loss is None:
        return End("diverged", message=f"The loss was not finite in epoch {len(run.history)}.")
    if len(run.history) < spec.epochs:
        return None
    return End("reached", reached=len(run.history), message=told_of(run.broken))


def told_of(broken: set[str]) -> str | None:
    """Which files could not be read."""
    if not broken:
        return None
    names = sorted(broken)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} images could not be read, and were left out: {', '.join(names[:5])}{more}."


class _Clock:
    """When to save, when to speak, and what to say about the time."""

    def __init__(self, run: Run, every: float) -> None:
        self._run, self._every = run, every
        self._saved = self._spoke = self._begun = time.monotonic()
        self._first = run.position

    def begin(self) -> None:
        """An epoch begins, or goes on."""
        self._begun = time.monotonic()

    def spent(self) -> float:
        """Seconds of this epoch."""
        return time.monotonic() - self._begun

    def saved(self) -> None:
        """A checkpoint is written."""
        self._saved = time.monotonic()

    def wants_to_save(self) -> bool:
        """Whether it is time for one."""
        return self._every > 0 and time.monotonic() - self._saved >= self._every

    def wants_to_speak(self) -> bool:
        """Whether it is time to say how far it is."""
        return time.monotonic() - self._spoke >= SPEAK

    def word(self) -> Progress:
        """How far it is."""
        run, now = self._run, time.monotonic()
        done = run.position - self._first
        seconds, self._first, self._spoke = now - self._spoke, run.position, now
        per_step = seconds / max(1, done)
        left = run.spec.epochs * steps_of(run.spec) - run.position
        return Progress(
            epoch=len(run.history) + 1,
            step=run.step,
            steps=steps_of(run.spec),
            rate=run.spec.batch / per_step,
            left=left * per_step,
            broken=len(run.broken),
        )
