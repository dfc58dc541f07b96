"""Batches of images in an order that any step can be reached in: the same on one device and on many, resumed or not.

Grain does the work: it gives each example a random generator of its own by its place in the stream, reads ahead in
threads, and can start anywhere at no cost.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from carryclip_lab.imagenet.folder import Part
from carryclip_lab.imagenet.images import BrokenImageError, decoded, for_evaluation, for_training

Batch = dict[str, np.ndarray]
"""``image`` (bytes, channels last), ``label``, ``broken`` (number of a file that could not be read, else -1)."""


@dataclass(frozen=True)
class Cut:
    """How a batch is divided: into micro-batches, which ranks take in turn."""

    batch: int
    micro: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.batch % (self.micro * self.size):
            raise ValueError(
                f"A batch of {self.batch} cannot be cut into micro-batches of {self.micro} on {self.size} processes: "
                "choose a micro-batch that divides it."
            )

    @property
    def passes(self) -> int:
        """Micro-batches of a step that this rank has."""
        return self.batch // (self.micro * self.size)


class Order:
    """Which image comes when: each epoch a new order, of which the last partial batch is left out."""

    def __init__(self, images: int, batch: int, epochs: int, seed: int) -> None:
        self.images, self.seed = images, seed
        self.used = images // batch * batch
        """Images of an epoch."""
        if not self.used:
            raise ValueError(f"A batch of {batch:,} is more than the {images:,} training images.")
        self.epochs = epochs
        self._of_epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.images)

    def __len__(self) -> int:
        return self.used * self.epochs

    def __getitem__(self, place: Any) -> int:
        epoch, k = divmod(int(place), self.used)
        return int(self._of_epoch(epoch)[k])


class Reader:
    """Turns the number of an image into what a batch has of it."""

    def __init__(self, part: Part, size: int, *, strict: bool) -> None:
        self.part, self.size, self.strict = part, size, strict

    def for_training(self, number: int, generator: np.random.Generator) -> Batch:
        """A random crop; where a file cannot be read, of the next one that can."""
        broken = -1
        for k in range(len(self.part)):
            chosen = (number + k) % len(self.part)
            try:
                image = decoded(self.part.path(chosen))
            except BrokenImageError:
                if self.strict:
                    raise
                broken = number
                continue
            return self._example(for_training(image, self.size, generator), self.part.labels[chosen], broken)
        raise BrokenImageError(f"Not one image of {self.part.root} can be read.")

    def for_evaluation(self, number: int) -> Batch:
        """The middle crop; a file that cannot be read has label -1."""
        try:
            image = decoded(self.part.path(number))
        except BrokenImageError:
            if self.strict:
                raise
            return self._example(np.zeros((self.size, self.size, 3), np.uint8), -1, number)
        return self._example(for_evaluation(image, self.size), self.part.labels[number], -1)

    @staticmethod
    def _example(image: np.ndarray, label: int, broken: int) -> Batch:
        return {"image": image, "label": np.int64(label), "broken": np.int64(broken)}  # type: ignore[dict-item]


def training(reader: Reader, order: Order, cut: Cut, *, first: int, threads: int) -> Iterator[Batch]:
    """This rank's micro-batches from step ``first`` on, to the end of the last epoch."""
    import grain

    data = grain.MapDataset.source(order).seed(order.seed % 2**32)  # type: ignore[arg-type]
    data = data.random_map(reader.for_training).batch(cut.micro)
    start = first * cut.passes * cut.size + cut.rank
    return iter(data[start :: cut.size].to_iter_dataset(_ahead(threads)))


def evaluation(reader: Reader, cut: Cut, *, threads: int) -> Iterator[Batch]:
    """This rank's share of all images, in order; the last batch may be smaller."""
    import grain

    data = grain.MapDataset.range(len(reader.part))[cut.rank :: cut.size].map(reader.for_evaluation)
    return iter(data.batch(cut.micro, drop_remainder=False).to_iter_dataset(_ahead(threads)))


def _ahead(threads: int) -> Any:
    import grain

    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads + 1)
