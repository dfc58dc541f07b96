"""The command behind ``carryclip status``: how far the studies of a store are, and what failed."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from carryclip_lab.commands.output import tells_errors
from carryclip_lab.store.database import StoreError
from carryclip_lab.store.records import FAULTS, OUTCOMES
from carryclip_lab.store.store import Store

COLUMNS = ("waiting", "running", *OUTCOMES)


@tells_errors
def main(
    path: str, *, watch: bool, failed: bool, check: bool = False, as_json: bool = False, every: float = 2.0
) -> int:
    """Say once, or go on saying until all is done or Ctrl-C."""
    console = Console()
    with Store(path, create=False) as store:
        if as_json and not watch:
            print(json.dumps(_failures(store) if failed else as_data(store), indent=1, ensure_ascii=False))
            return 0
        if failed:
            return _failed(store, console)
        if check:
            store.check()
            console.print("Every run that is done is as it was written.")
            return 0
        if not watch:
            console.print(overview(store))
            return 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while watch:
                with Store(path, create=False) as store:  # anew, since who may only read has a copy
                    live.update(overview(store), refresh=True)
                    watch = any(_unfinished(store, study) for study in store.studies())
                time.sleep(every if watch else 0.0)
    except KeyboardInterrupt:
        return 130
    return 0


def _unfinished(store: Store, study: str) -> int:
    progress = store.progress(study)
    return progress["waiting"] + progress["running"]


def overview(store: Store) -> Group:
    """A line for each study, and where the runs are that are under way."""
    found = {study: store.progress(study) for study in store.studies()}
    columns = [column for column in COLUMNS if any(progress[column] for progress in found.values())]
    table = Table(title=f"{store.path}", title_justify="left")
    table.add_column("study", no_wrap=True)
    for column in ("done", *columns):
        table.add_column(column.replace("_", " "), justify="right", no_wrap=True)
    for study, progress in found.items():
        done = sum(progress[outcome] for outcome in OUTCOMES)
        counts = [f"{progress[column]:,}" for column in columns]
        table.add_row(study, f"{done:,} of {sum(progress.values()):,}", *counts)
    shown = list(store.under_way().items())[:20]
    running = Table("run", "epochs done", title="under way", title_justify="left")
    if any(said for _, (_, said) in shown):  # only long runs tell of their steps
        running.add_column("now")
    for run, (epochs, said) in shown:
        running.add_row(run, str(epochs), *([said] if len(running.columns) > 2 else []))
    return Group(table, running) if running.row_count else Group(table)


def as_data(store: Store) -> dict[str, Any]:
    """The same for programs."""
    studies = []
    for study in store.studies():
        progress = store.progress(study)
        title, tier = store.title(study)
        counts = {column: progress[column] for column in COLUMNS}
        done, runs = sum(progress[outcome] for outcome in OUTCOMES), sum(progress.values())
        studies.append({"name": study, "title": title, "tier": tier, "runs": runs, "done": done, "counts": counts})
    running = [{"run": run, "epochs": epochs, "now": said} for run, (epochs, said) in store.under_way().items()]
    return {"store": str(store.path), "studies": studies, "under_way": running}


def _failures(store: Store) -> list[dict[str, Any]]:
    return [
        {"study": study, "run": record.spec.id, "outcome": record.outcome, "message": record.message}
        for study in store.studies()
        for record in store.records(study, FAULTS)
    ]


def _failed(store: Store, console: Console) -> int:
    """Every run that failed, and why."""
    if not _failures(store):
        console.print(f"No run of {store.path} has failed.", highlight=False, markup=False)
    for study in store.studies():
        for record in store.records(study, FAULTS):
            said = f"{record.spec.id} {record.outcome}: {record.spec.canonical}"
            console.print(said, style="bold", markup=False, highlight=False)
            console.print(record.message or "", style="dim", markup=False, highlight=False)
    return 0


def find(store: Store, start: str) -> str:
    """The one run whose id starts so."""
    found = store.find(start)
    if len(found) != 1:
        said = f"{len(found)} runs" if found else "No run"
        raise StoreError(f"{said} in {Path(store.path)} with an id that starts with {start!r}; ids are in the report.")
    return found[0]
