"""The command behind ``carryclip replay``: one run again, compared with its record bit by bit."""

import os
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from carryclip_lab.checks import UserError
from carryclip_lab.commands.output import complain, tells_errors
from carryclip_lab.commands.status import find
from carryclip_lab.engine import work
from carryclip_lab.engine.settings import Setting
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.records import End, Epoch, Progress, Record
from carryclip_lab.store.store import Store

COMPARED = [field.name for field in fields(Epoch) if field.name != "seconds"]


@tells_errors
def main(start: str, path: str, data: str | None = None) -> int:
    """0 if every number is the same, 1 if one differs, 2 if there is nothing to compare with."""
    console = Console()
    with Store(path, create=False) as store:
        run = find(store, start)
        store.check(run)
        record = store.record_of(run)
        recorded = store.epochs(run)
    if record.outcome is None:
        raise StoreError(f"Run {run} is not done yet; see carryclip status --store {path}")
    if (needs := record.spec.recipe.needs) and data is None:
        raise UserError(f"Run {run} is of {record.spec.task}, which needs {needs}.")
    threads = int(record.environment.get("threads", 1))
    device = record.environment.get("device", "cpu")
    setting = Setting(threads=threads, device=device, paths=(os.getcwd(),), data=data)
    console.print(f"{run}: {record.spec.canonical}", highlight=False, markup=False)
    again: list[Epoch] = []
    end: End | None = None
    with console.status("Training ...") as status:
        for event in work.events(record.spec, setting):
            if isinstance(event, End):
                end = event
                break
            if isinstance(event, Epoch):
                again.append(event)
            said = f", {event}" if isinstance(event, Progress) else ""
            status.update(f"Training: epoch {event.epoch} of {len(recorded)}{said}")
    different = differences(recorded, again)
    if end is not None and (end.outcome, end.reached) != (record.outcome, record.reached):
        before, now = (_said(ended) for ended in (record, end))
        complain(console, f"It ended otherwise: recorded {before}, now {now}. {end.message or ''}".rstrip())
    elif not different:
        console.print(f"Every number of its {len(recorded)} epochs is the same.")
        return 0
    table = Table("epoch", "number", "recorded", "now", title="What differs", title_justify="left")
    for epoch, name, before, now in different[:20]:
        table.add_row(str(epoch), name, repr(before), repr(now))
    console.print(table)
    here = work.environment(setting)
    for key, value in record.environment.items():
        if here.get(key) != value and key != "commit":
            console.print(f"Recorded with {key} {value}, here {here.get(key)}.", highlight=False)
    return 1


def _said(ended: Record | End) -> str:
    """How a run has ended, in words."""
    epoch = "" if ended.reached is None else f" in epoch {ended.reached}"
    return f"{str(ended.outcome).replace('_', ' ')}{epoch}"


def differences(recorded: list[Epoch], again: list[Epoch]) -> list[tuple[int, str, object, object]]:
    """(epoch, number, before, now) of all that is not the same to the last bit."""
    found: list[tuple[int, str, object, object]] = []
    if len(recorded) != len(again):
        found.append((0, "epochs", len(recorded), len(again)))
    for before, now in zip(recorded, again, strict=False):
        pairs = [(name, getattr(before, name), getattr(now, name)) for name in COMPARED]
        found += [(before.epoch, name, one, other) for name, one, other in pairs if one != other]
    return found
