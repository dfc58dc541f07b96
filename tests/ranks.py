"""Two real processes with a process group over gloo, which run the functions they are sent."""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from datetime import timedelta

SIZE = 2
PATIENCE = 120.0
"""Seconds after which a call is taken to hang."""


class Ranks:
    """Processes that wait for work; each call runs on all of them, in the order of the calls."""

    def __init__(self, size=SIZE):
        self.size = size
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, f"{self.folder.name}/meet", there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function, *args):
        """``function(rank, *args)`` on every rank; the results by rank, or the first error."""
        for pipe in self.pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(PATIENCE):
                self.close()
                raise TimeoutError(f"Rank {rank} did not answer within {PATIENCE:.0f} s.")
            answers.append(pipe.recv())
        errors = [f"Rank {rank}:\n{answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if errors:
            raise AssertionError("\n".join(errors))
        return [answer for _, answer in answers]

    def close(self):
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(rank, size, meeting, pipe):
    import torch
    import torch.distributed as dist

    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
