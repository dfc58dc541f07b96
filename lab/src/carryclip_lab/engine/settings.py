"""How studies are run, as far as that can change nothing about their results. Imports nothing heavy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from carryclip_lab.spec import Spec

STORE, REPORT = "carryclip-store.sqlite", "carryclip-report"
"""Where results and the report go unless something else is said."""
CHECKPOINT_SECONDS = 60.0
USUAL_LIMIT = 24.0


def limit_of(spec: "Spec", timeout: float | None) -> float | None:
    """Seconds that a run may take: hours as given, or a day, or as long as it wants if its task takes days."""
    if timeout is None and spec.recipe.lasting:
        return None
    return 3600.0 * (USUAL_LIMIT if timeout is None else timeout)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``carryclip reproduce`` is told of how to run studies; its help is made of this.

    Attributes:
        engine: where runs are trained: "local" for processes on this machine, "ray" for a cluster.
        address: address of the Ray cluster; "auto" for one that runs on this machine.
        workers: how many runs are trained at a time; by default one for each core, or as many as fit on the cluster.
        threads: threads of each worker; another number may change the last bits of results.
        device: device to train on, such as "cuda".
        gpus: GPUs for each worker on a cluster; 0.25 lets four share one.
        timeout: hours after which a run is given up; 24 by default, and unlimited for imagenet.
        memory: gigabytes that a worker may use before its run is given up.
        data: folder of images for imagenet, with train and val and in each a folder per class; the smoke tier makes its
            own images. Or a text file for the language model of evidence, instead of the text it fetches.
        strict: stop a run at an image that cannot be read, instead of counting such images.
        keep: keep the last checkpoint of every ImageNet run, beside the store.
    """

    engine: Literal["local", "ray"] = "local"
    address: str | None = None
    workers: int | None = None
    threads: int = 1
    device: str = "cpu"
    gpus: float = 0.0
    timeout: float | None = None
    memory: float | None = None
    data: str | None = None
    strict: bool = False
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting(Options):
    """The same with what nobody types: what workers are told besides the spec."""

    store: str | None = None
    """Path of the store, beside which checkpoints are kept; None for none."""
    every: float = CHECKPOINT_SECONDS
    """Seconds between two of them."""
    commit: str | None = None
    paths: tuple[str, ...] = ()
    """Where else to look for tasks and methods of one's own."""
