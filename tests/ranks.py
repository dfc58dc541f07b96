"""Two real processes with a process group over gloo, which run the functions they are sent."""

import contextlib
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import wait

from carryclip import CarryClipWarning

SIZE = 2
PATIENCE = 120.0
"""Seconds after which a call is taken to hang."""


class Ranks:
    """Processes that wait for work; each call runs on all of them, in the order of the calls."""

    def __init__(self, size=SIZE):
        self.size = size
        self._start()

    def _start(self):
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            here, there = context.Pipe()
            given = rank, self.size, f"{self.folder.name}/meet", there
            process = context.Process(target=_serve, args=given, daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function, *args, patience=PATIENCE):
        """``function(rank, *args)`` on every rank; the results by rank, or what went wrong."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers, failed, end = {}, [], time.monotonic() + patience
        while len(answers) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                failed += [f"Rank {rank} did not answer." for rank in range(self.size) if rank not in answers]
                break
            for pipe in ready:
                rank = self.pipes.index(pipe)
                good, answers[rank] = pipe.recv()
                if not good:
                    failed.append(f"Rank {rank}:\n{answers[rank]}")
                    end = min(end, time.monotonic() + 5.0)  # the others may wait for it in vain
        if failed:
            self.close()
            self._start()
            raise AssertionError("\n".join(failed))
        return [answers[rank] for rank in range(self.size)]

    def close(self):
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


@contextlib.contextmanager
def running():
    """Processes for a fixture."""
    made = Ranks()
    try:
        yield made
    finally:
        made.close()


def _serve(rank, size, meeting, pipe):
    import torch
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    # As in pyproject.toml: most tests put every policy in front of every optimizer.
    warnings.filterwarnings("ignore", ".*(often trains far worse|gradients wait about)", CarryClipWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        before = dict(os.environ)
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        os.environ.clear()
        os.environ.update(before)
