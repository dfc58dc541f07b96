"""What happens in a worker: train one run, and make an outcome of whatever goes wrong."""

import ctypes
import functools
import os
import platform
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from carryclip.experiments.engine.settings import Setting
from carryclip.experiments.records import End, Epoch
from carryclip.experiments.spec import Spec
from carryclip.experiments.store import Store

MESSAGE_LENGTH = 8000


def prepare(setting: Setting) -> None:
    """Get this process ready; may be called again."""
    import torch

    torch.set_num_threads(setting.threads)
    if setting.device.startswith("cuda"):
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    sys.path.extend(path for path in setting.paths if path not in sys.path)
    if setting.memory is not None:
        limit = int(setting.memory * 1e9)
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def die_with_parent(parent: int) -> None:
    """Leave no worker behind when the supervisor is killed (on Linux; elsewhere it ends at its next write)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def events(spec: Spec, setting: Setting) -> Iterator[Epoch | End]:
    """What a run has to tell, its end in any case."""
    try:
        prepare(setting)
        from carryclip.experiments.training import train

        yield from train(spec, checkpoint_of(spec, setting), every=setting.every, device=setting.device)
    except (Exception, SystemExit) as error:  # a module of the user's may well try to exit
        told = "".join(traceback.format_exception(error))[-MESSAGE_LENGTH:]
        yield End("oom" if _out_of_memory(error) else "crashed", message=told)


def checkpoint_of(spec: Spec, setting: Setting) -> Path | None:
    """The file in which a run may be half done."""
    return None if setting.checkpoints is None else Path(setting.checkpoints) / f"{spec.id}.pt"


def write(store: Store, owner: str, spec: Spec, event: Epoch | End, environment: dict[str, Any]) -> bool:
    """Put an event in the store; False if the run is no longer ours."""
    if isinstance(event, Epoch):
        return (event.epoch > 1 or store.begin(spec.id, owner)) and store.record(spec.id, owner, event)
    return store.finish(
        spec.id, owner, event.outcome, reached=event.reached, message=event.message, environment=environment
    )


def run(canonical: str, path: str, owner: str, setting: Setting) -> None:
    """One run from the store and back to it."""
    spec = Spec.from_canonical(canonical)
    with Store(path, create=False) as store:
        for event in events(spec, setting):
            if not write(store, owner, spec, event, environment(setting)):
                return
    clear(spec, setting)


def clear(spec: Spec, setting: Setting) -> None:
    """Remove what a run that is done leaves on disk."""
    if (checkpoint := checkpoint_of(spec, setting)) is not None and checkpoint.parent.is_dir():
        for leftover in checkpoint.parent.glob(f"{checkpoint.name}*"):
            leftover.unlink(missing_ok=True)


def environment(setting: Setting) -> dict[str, Any]:
    """What else may decide the last bits of a result."""
    return {**_machine(), "threads": setting.threads, "device": setting.device, "commit": setting.commit}


@functools.cache
def _machine() -> dict[str, str]:
    packages = {name: version(name) for name in ("carryclip", "torch", "numpy")}
    return {"python": platform.python_version(), "cpu": _cpu(), "system": platform.system(), **packages}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """The commit of a checkout that this is run from, marked if files differ from it; None for an installed package."""
    here = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words], capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        tracked = git("ls-files", str(Path(__file__)))
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", ".") else "") if tracked else None
    except (OSError, subprocess.SubprocessError):
        return None


def _out_of_memory(error: BaseException) -> bool:
    import torch

    said = str(error)
    signs = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory", "Cannot allocate memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, (RuntimeError, OSError)) and any(sign in said for sign in signs)
    )
