"""The commands behind ``carryclip data imagenet`` and ``carryclip evaluate``: look at images, look at weights."""

import itertools
import math
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from carryclip_lab.commands.output import complain, tells_errors
from carryclip_lab.data.unpack import DataError
from carryclip_lab.imagenet.folder import Part, look_through
from carryclip_lab.imagenet.images import BrokenImageError, decoded, for_training
from carryclip_lab.store.database import StoreError

SIZE = 224
"""Side of the images that reading is timed with, the paper's."""
WANTED = 1000
"""Images per second for which it is said how many cores they need."""


@tells_errors
def check(source: str | None) -> int:
    """Read every image of a folder as training would: 0 if all can be, 1 if some cannot, 2 if the folder is amiss."""
    console = Console()
    if source is None:
        raise DataError(
            "ImageNet cannot be fetched for you: ask for it at https://image-net.org, unpack it into train and val "
            "with a folder per class, and check it with: carryclip data imagenet --from DIR"
        )
    folder = look_through(source)
    console.print(f"{folder}.", highlight=False)
    begun, busy = time.perf_counter(), time.process_time()
    broken = [name for part in (folder.train, folder.val) for name in _broken(part, console)]
    count = len(folder.train) + len(folder.val)
    console.print(_speed(count, time.perf_counter() - begun, time.process_time() - busy), highlight=False)
    for name in broken:
        complain(console, name)
    if broken:
        console.print(f"{len(broken)} images cannot be read. Training goes on without them; --strict would stop.")
        return 1
    console.print(f"Every image can be read. Try: carryclip reproduce imagenet --tier smoke --data {folder.root}")
    return 0


def _speed(count: int, seconds: float, busy: float) -> str:
    """What reading has taken, and by the time that cores were busy with it, what training would need."""
    cores = math.ceil(WANTED * busy / count)
    return (
        f"Decoded, cropped and resized to {SIZE} pixels: {count / seconds:,.0f} images/s here, {count / busy:,.0f} per "
        f"core. {WANTED:,} images/s would take {cores} core{'' if cores == 1 else 's'}."
    )


def _broken(part: Part, console: Console) -> list[str]:
    def look(number: int) -> str | None:
        try:
            for_training(decoded(part.path(number)), SIZE, np.random.default_rng(number))
        except (BrokenImageError, OSError) as error:
            return str(error)
        return None

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        # Some at a time: a pool takes in all it is given at once.
        parts = (range(first, min(first + 1024, len(part))) for first in range(0, len(part), 1024))
        found = itertools.chain.from_iterable(pool.map(look, some) for some in parts)
        told = track(found, part.root.name, len(part), console=console, transient=True)
        return [said for said in told if said is not None]


@tells_errors
def evaluate(start: str, path: str, data: str | None, device: str) -> int:
    """How many of the validation images a run's weights get right, as far as it has been trained."""
    import torch

    from carryclip_lab.commands.reproduce import check_device
    from carryclip_lab.commands.status import find
    from carryclip_lab.engine.training import Run
    from carryclip_lab.store import checkpoints
    from carryclip_lab.store.store import Store
    from carryclip_lab.task import Place

    console = Console()
    sys.path.append(os.getcwd())  # for methods of one's own
    check_device(device)
    with Store(path, create=False) as store:
        spec = store.record_of(find(store, start)).spec
    if not spec.recipe.lasting:
        raise StoreError(f"Run {spec.id} is of {spec.task}, whose accuracy is in the store.")
    places = [checkpoints.kept(Path(path), spec), checkpoints.place(Path(path), spec)]
    file = next((place for place in places if place.is_file()), None)
    state = None if file is None else checkpoints.read(file, spec)
    if state is None:
        raise StoreError(
            f"There are no weights of run {spec.id} ({places[0]}, {places[1]}). A run that is done leaves them if "
            "it was started with --keep."
        )
    run = Run(spec, Place(device, data, threads=2 * (os.cpu_count() or 1)))
    run.restore(state)
    torch.set_num_threads(os.cpu_count() or 1)
    with console.status("Evaluating ..."):
        accuracy, seen = run.problem.evaluate(run.net)
    console.print(
        f"{spec.id} after {run.position:,} steps ({len(run.history)} of {spec.epochs} epochs): top-1 accuracy "
        f"{100 * accuracy:.2f} % on {seen:,} images.",
        highlight=False,
    )
    if said := run.problem.message():
        console.print(said, highlight=False)
    return 0
