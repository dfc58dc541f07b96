"""Runs one after the other, each trained by all the processes that torchrun has started: one of them leads."""

import os
from collections.abc import Callable

import torch.distributed as dist

from carryclip_lab.engine import work
from carryclip_lab.engine.owners import Claims
from carryclip_lab.engine.settings import Setting
from carryclip_lab.engine.team import Team
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import End, StoppedError
from carryclip_lab.store.store import Store


class TogetherEngine:
    """The leading process: it alone has the store, and tells the others what to train.

    A process that dies takes the others with it, by torchrun's hand, and they all end with torchrun; whoever is started
    next goes on from the last checkpoint.

    Args:
        store: where runs come from and go to.
        owner: in whose name they are taken.
        setting: for all of the processes.
        team: these.
    """

    def __init__(self, store: Store, owner: str, setting: Setting, team: Team) -> None:
        self.store, self.setting, self.team = store, setting, team
        self._claims = Claims(store, owner)
        _end_with_torchrun()

    def run(self, study: str, tick: Callable[[], None]) -> None:
        """Work until no run of the study waits."""
        with work.asked_to_stop() as stop:
            while taken := self._claims.next(study):
                spec, claim = taken
                self.team.told(spec.canonical)
                told = work.environment(self.setting, self.team.size)
                try:
                    for event in work.trained(spec, self.setting, team=self.team, stop=stop):
                        if not work.write(self.store, claim, spec, event, told):
                            raise RuntimeError(f"Someone else has taken run {spec.id} meanwhile.")
                        tick()
                        if isinstance(event, End):
                            work.clear(spec, self.setting, event)
                except StoppedError:
                    raise KeyboardInterrupt from None
                except BaseException as error:
                    # Of the run itself it is how the run ends; of a process that died, the run goes on some day.
                    end = self.team.reported(work.failure(error), error)
                    if end is not None:
                        work.write(self.store, claim, spec, end, told)
                    raise

    def close(self) -> None:
        """Let the others go."""
        self.team.told(None)


def follow(setting: Setting, team: Team) -> int:
    """The other processes: train what they are told until there is no more; 130 if stopped."""
    _end_with_torchrun()
    with work.asked_to_stop() as stop:
        while (canonical := team.told(None)) is not None:
            try:
                for _ in work.trained(Spec.from_canonical(canonical), setting, team=team, stop=stop):
                    pass
            except StoppedError:
                return 130
            except BaseException as error:
                team.report(work.failure(error), error)
                raise
    return 0


def _end_with_torchrun() -> None:
    """Its processes have sessions of their own, so that what kills it does not reach them: they would work on, unseen.

    Those that something else has started may outlive it, as under nohup.
    """
    if dist.is_torchelastic_launched():
        work.die_with_parent(os.getppid())
