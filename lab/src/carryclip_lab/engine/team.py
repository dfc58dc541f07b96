"""The processes that train one run together, as torchrun starts them; or this one alone."""

import json
import os
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from carryclip_lab.store.records import End

DELAY = 1
"""Steps after which a vote is read on a GPU: while the next one is under way, so that the device is never idle."""


@dataclass(frozen=True)
class Team:
    """Which of how many processes this is."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this one writes and speaks for all."""
        return self.rank == 0

    def add(self, vector: Tensor) -> Tensor:
        """The sum over all, in place."""
        if self.size > 1:
            dist.all_reduce(vector)
        return vector

    def told(self, value: Any) -> Any:
        """What the first one says, on all of them."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def report(self, end: End, error: Exception) -> None:
        """Leave word of how the run ends of an error on this process, for the one that leads."""
        if not _of_another(error):
            _board().set(_REPORT, json.dumps(asdict(end)))

    def reported(self, end: End, error: Exception) -> End | None:
        """How the run ends, by this process or by word of another; None if another one is just gone."""
        if not _of_another(error):
            return end
        time.sleep(1.0)  # the other may be about to say why
        return End(**json.loads(_board().get(_REPORT))) if _board().check([_REPORT]) else None

    def gathered(self, value: Any) -> list[Any]:
        """What each one says, by rank, on all of them."""
        found = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(found, value)
        return found


_REPORT = "carryclip/end"


def _board() -> Any:
    """Where processes leave messages even if they no longer work together."""
    return dist.distributed_c10d._get_default_store()


def _of_another(error: Exception) -> bool:
    """Whether an error only says that another process is gone."""
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
    )


def join(device: str) -> Team:
    """Meet the others that torchrun has started."""
    if not dist.is_initialized():
        if device.startswith("cuda"):
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Team(dist.get_rank(), dist.get_world_size())


class Votes:
    """Whether someone wants a pause: known to all at the same step, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._sent: deque[tuple[Tensor, Any]] = deque()

    def heard(self, vote: Tensor) -> bool:
        """Hand in the votes of a step, summed over the team; the answer is that of an earlier step on a GPU."""
        event = torch.cuda.Event() if self._cuda else None
        self._sent.append((vote.to("cpu", non_blocking=True), event))
        if event is None:
            return bool(self._sent.popleft()[0] > 0)
        event.record()
        if len(self._sent) <= DELAY:
            return False
        earlier, arrived = self._sent.popleft()
        arrived.synchronize()
        wanted = bool(earlier > 0)
        if wanted:
            self._sent.clear()  # those that were cast before it came
        return wanted
