"""How studies are run, as far as that can change nothing about their results. Imports nothing heavy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from carryclip_lab.spec import Spec

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
        engine: "local" for processes on this machine, "ray" for a cluster.
        address: of the Ray cluster; "auto" for one that runs here.
        workers: runs at a time; as many as there are cores, or as the cluster has room for.
        threads: of each worker; another number may change the last bits of results.
        device: where to train, such as "cuda".
        gpus: share of a GPU for each worker on a cluster.
        timeout: hours after which a run is given up; 24 by default, and as many as it needs for imagenet.
        memory: GB that a worker may take before its run is given up.
        data: folder of images for imagenet: train and val, in each a folder per class; the smoke tier makes its own.
            Or a text file for the language model of evidence, instead of the one it has.
        strict: let an image that cannot be read end its run, instead of counting it.
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
