"""What happens in a worker: train one run, and make an outcome of whatever goes wrong."""

import contextlib
import functools
import os
import platform
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from carryclip_lab.engine.settings import Setting
from carryclip_lab.spec import Spec, check_code
from carryclip_lab.store.records import FAULTS, End, Epoch, Progress, StoppedError
from carryclip_lab.store.store import Store
from carryclip_lab.task import Place

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
    """Leave no worker behind when the supervisor is killed.

    The kernel could do it, but by the thread that has started the worker: that of a pool ends before its workers.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def trained(
    spec: Spec, setting: Setting, *, team: Any = None, stop: Callable[[], bool] = lambda: False
) -> Iterator[Epoch | Progress | End]:
    """What a run has to tell, if nothing goes wrong.

    Args:
        spec: what to train.
        setting: where and how.
        team: processes that train it together.
        stop: whether to save and stop; only long runs ask.
    """
    prepare(setting)
    from carryclip_lab.engine.training import train

    check_code(spec)
    place = Place(setting.device, setting.data, 2 * setting.threads, setting.strict, team)
    yield from train(spec, checkpoint_of(spec, setting), place=place, every=setting.every, stop=stop)


def events(spec: Spec, setting: Setting, stop: Callable[[], bool] = lambda: False) -> Iterator[Epoch | Progress | End]:
    """What a run has to tell, its end in any case but a stop."""
    told: Iterator[Epoch | Progress | End] = trained(spec, setting, stop=stop)
    while True:
        try:
            event = next(told)
        except StopIteration:
            return
        except StoppedError:
            raise
        except BaseException as error:  # a method of the user's may raise whatever there is
            if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                raise  # by someone at a keyboard; workers do not listen to it
            event = failure(error)
        yield event  # out here, since being closed is no error of the run


def failure(error: BaseException) -> End:
    """How a run ends of an error, told with the paths of modules, and not of the folders that someone has them in."""
    told = "".join(traceback.format_exception(error))
    for folder in sorted({*map(os.path.abspath, sys.path), os.getcwd()}, key=len, reverse=True):
        told = told.replace(f"{folder.rstrip(os.sep)}{os.sep}", "")
    told = told.replace(str(Path.home()), "~") if len(Path.home().parts) > 1 else told
    return End("oom" if _out_of_memory(error) else "crashed", message=told[-MESSAGE_LENGTH:])


def checkpoint_of(spec: Spec, setting: Setting) -> Path | None:
    """The file in which a run may be half done."""
    from carryclip_lab.store import checkpoints

    return None if setting.store is None else checkpoints.place(Path(setting.store), spec)


def write(store: Store, owner: str, spec: Spec, event: Epoch | Progress | End, environment: dict[str, Any]) -> bool:
    """Put an event in the store; False if the run is no longer ours."""
    if isinstance(event, Epoch):
        return (event.epoch > 1 or store.begin(spec.id, owner)) and store.record(spec.id, owner, event)
    if isinstance(event, Progress):
        return store.note(spec.id, owner, str(event))
    return store.finish(
        spec.id, owner, event.outcome, reached=event.reached, message=event.message, environment=environment
    )


def run(canonical: str, path: str, owner: str, setting: Setting) -> None:
    """One run from the store and back to it."""
    spec = Spec.from_canonical(canonical)
    # Others start their epoch anew anyway, and are better stopped at once.
    waits = asked_to_stop() if spec.recipe.lasting else contextlib.nullcontext(lambda: False)
    with Store(path, create=False) as store, waits as stop:
        try:
            for event in events(spec, setting, stop):
                if not write(store, owner, spec, event, environment(setting)):
                    return
                if isinstance(event, End):
                    clear(spec, setting, event)
        except StoppedError:
            store.close()
            os._exit(signal.SIGTERM)  # as who asked for it expects


@contextlib.contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Let a polite kill, or Ctrl-C, only ask for a stop, so that a run can save itself first."""
    asked = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: asked.set()) for number in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def clear(spec: Spec, setting: Setting, end: End) -> None:
    """Remove what a run that is done leaves on disk; one that failed may go on from there when its cause is gone."""
    if end.outcome in FAULTS:
        return
    from carryclip_lab.store import checkpoints

    if (checkpoint := checkpoint_of(spec, setting)) is not None and checkpoint.parent.is_dir():
        if setting.keep and setting.store is not None and checkpoint.is_file():
            goal = checkpoints.kept(Path(setting.store), spec)
            goal.parent.mkdir(exist_ok=True)
            checkpoint.replace(goal)
        for leftover in checkpoint.parent.glob(f"{checkpoint.name}*"):
            leftover.unlink(missing_ok=True)


def environment(setting: Setting, processes: int = 1) -> dict[str, Any]:
    """What else may decide the last bits of a result."""
    together = {} if processes == 1 else {"processes": processes}
    return {**_machine(), "threads": setting.threads, "device": setting.device, "commit": setting.commit, **together}


@functools.cache
def _machine() -> dict[str, str]:
    packages = {name: version(name) for name in ("carryclip", "torch", "numpy")}
    return {"python": platform.python_version(), "cpu": processor(), "system": platform.system(), **packages}


def processor() -> str:
    """Name, family and model: a virtual machine may hide which of two kinds of the same name it is."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")
        lines = [line.partition(":") for line in first.splitlines()]
        told = {name.strip(): value.strip() for name, _, value in lines}
        return f"{told['model name']}, family {told['cpu family']}, model {told['model']}"
    except (OSError, UnicodeDecodeError, KeyError):
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
