"""The trainer, one for all tasks: train as a spec says, tell of every epoch, and go on where a checkpoint left off."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from carryclip_lab import problem
from carryclip_lab.engine.methods import Samples, own_state, unwarned
from carryclip_lab.engine.team import Team
from carryclip_lab.spec import Spec, floors_of
from carryclip_lab.store import checkpoints
from carryclip_lab.store.records import End, Epoch, Progress, StoppedError
from carryclip_lab.task import Place

SPEAK = 10.0
"""Seconds between two words about how far a run is."""


class Run(problem.Run):
    """A run with its history: everything that a checkpoint keeps."""

    def __init__(self, spec: Spec, place: Place) -> None:
        super().__init__(spec, spec.recipe.problem(spec, place), place.device)
        self.spec = spec
        self.history: list[Epoch] = []
        self.step = 0
        """Steps done in this epoch."""
        self.seconds = 0.0
        """Spent on this epoch before the run was stopped."""

    @property
    def position(self) -> int:
        """Steps done in all."""
        return len(self.history) * self.problem.steps + self.step

    def end(self) -> End | None:
        """How the run has ended, if it has."""
        if not self.history:
            return None
        last = self.history[-1]
        if last.loss is None:
            return End("diverged", message=f"The loss was not finite in epoch {last.epoch}.")
        if last.train_accuracy is not None and last.train_accuracy >= self.spec.goal:
            return End("reached", reached=last.epoch)
        if last.epoch < self.spec.epochs:
            return self._given_up(last)
        if self.spec.target is None:
            return End("reached", reached=last.epoch, message=self.problem.message())
        return End("not_reached")

    def _given_up(self, last: Epoch) -> End | None:
        """By the spec's floors."""
        floors = {} if self.spec.floors is None else floors_of(self.spec.floors)
        floor, accuracy = floors.get(last.epoch), last.running_accuracy
        if floor is None or accuracy is None or accuracy >= floor:
            return None
        said = f"running accuracy {accuracy:.3f} after epoch {last.epoch} is below {floor:g}"
        return End("not_reached", message=f"Given up: {said} (floors {self.spec.floors}).")

    @unwarned()
    def advance(self, pause: Callable[[], None] | None, until: Callable[[], bool]) -> None:
        """Steps to the end of the epoch, or until there is something to say; ``pause`` is called after each."""
        while self.step < self.problem.steps:
            self.train(self.position)
            self.step += 1
            if pause is not None:
                pause()
                if until():
                    return

    @unwarned()
    def close(self, spent: Callable[[], float]) -> Epoch:
        """An epoch is over."""
        number = len(self.history) + 1
        fields = self.problem.closed(self.net, last=number >= self.spec.epochs)
        seconds = self.seconds + spent()
        self.history.append(Epoch(epoch=number, **fields, **self.samples.means(), seconds=seconds))
        self.step, self.seconds, self.samples = 0, 0.0, Samples()
        return self.history[-1]

    @unwarned()
    def state(self, seconds: float) -> dict[str, Any]:
        """To be saved; ``seconds`` were spent on this epoch since it began here."""
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "history": [asdict(epoch) for epoch in self.history],
            "step": self.step,
            "seconds": self.seconds + seconds,
            "samples": self.samples.values(),
            "problem": self.problem.state(),
            **own_state(self.clipper),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.history = [Epoch(**epoch) for epoch in state["history"]]
        self.step, self.seconds = state["step"], state["seconds"]
        self.samples = Samples(state["samples"])
        self.problem.restore(state["problem"])
        if "clipper" in state:
            self.clipper.load_state_dict(state["clipper"])


def train(
    spec: Spec,
    checkpoint: Path | None = None,
    *,
    place: Place | None = None,
    every: float = 0.0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Epoch | Progress | End]:
    """Train, yielding each epoch when it is over, words on the way, and the end at last.

    Epochs that a checkpoint remembers come first, so that whoever listens always hears the whole run.

    Args:
        spec: what to train.
        checkpoint: file to go on from, removed by whoever has kept the result.
        place: where, with what data, and with whom.
        every: seconds between two checkpoints; 0 for one after each epoch.
        stop: asked after every step of a lasting run whether to save and stop.
    """
    place = place or Place()
    team: Team = place.team or Team()
    # The leading process alone reads the file, and tells the others, which need not see it.
    found = checkpoints.read(checkpoint, spec, place.device) if checkpoint is not None and team.leads else None
    run = checkpoints.resumed(lambda: Run(spec, place), checkpoint, team.told(found))
    yield from run.history
    clock = _Clock(run, every)

    def save() -> None:
        if checkpoint is not None:
            state = run.state(clock.spent())
            if team.leads:
                checkpoints.save(checkpoint, spec, place.device, state)
        clock.saved()

    def pause() -> None:
        """After a step of a lasting run: save, and stop if somebody wants it."""
        if run.problem.agree(pause=stop() or clock.wants_to_save(within=True)):
            save()
            if any(team.gathered(stop())):
                raise StoppedError(f"Stopped at step {run.step} of epoch {len(run.history) + 1}.")

    lasting = spec.recipe.lasting
    clock.begin()
    while (end := run.end()) is None:
        run.problem.begin(run.position)
        while run.step < run.problem.steps:
            run.advance(pause if lasting else None, until=clock.wants_to_speak)
            if lasting and clock.wants_to_speak():
                yield clock.word()
        yield run.close(clock.spent)
        clock.begin()
        if lasting or clock.wants_to_save():
            save()
    yield end


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

    def wants_to_save(self, *, within: bool = False) -> bool:
        """Whether it is time for one; none is written within an epoch where one comes after each."""
        return time.monotonic() - self._saved >= self._every and not (within and self._every <= 0)

    def wants_to_speak(self) -> bool:
        """Whether it is time to say how far it is."""
        return time.monotonic() - self._spoke >= SPEAK

    def word(self) -> Progress:
        """How far it is."""
        run, now = self._run, time.monotonic()
        done = run.position - self._first
        seconds, self._first, self._spoke = now - self._spoke, run.position, now
        per_step = seconds / max(1, done)
        return Progress(
            epoch=len(run.history) + 1,
            step=run.step,
            steps=run.problem.steps,
            rate=run.spec.batch / per_step,
            left=(run.spec.epochs * run.problem.steps - run.position) * per_step,
            broken=len(run.problem.broken),
        )
