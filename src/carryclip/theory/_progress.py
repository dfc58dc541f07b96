"""A progress bar for long simulations: rich's where it is installed, a line now and then off a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Progress = bool | Callable[[int, int], None]
INTERVAL = 0.2
"""Seconds between two updates of a bar."""
QUIET_INTERVAL = 30.0
"""Seconds between two lines where there is no terminal."""


class Ticker:
    """Call it with the number of steps done, inside a ``with`` block."""

    def __init__(self, progress: Progress, total: int, title: str):
        self.total, self.title = total, title
        self.report = progress if callable(progress) else None
        self.shown = progress is True
        self.next, self.stack = 0.0, contextlib.ExitStack()

    def __enter__(self) -> "Ticker":
        if self.shown:
            self.report = self.stack.enter_context(_bar(self.title))
        self.next = time.monotonic() + self._pause()
        return self

    def __call__(self, done: int) -> None:
        now = time.monotonic() if self.report else 0.0
        if self.report and (done == self.total or now >= self.next):
            self.report(done, self.total)
            self.next = now + self._pause()

    def _pause(self) -> float:
        return INTERVAL if sys.stderr.isatty() or not self.shown else QUIET_INTERVAL

    def __exit__(self, *error: Any) -> None:
        self.stack.close()


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    if not sys.stderr.isatty():
        yield lambda done, total: print(f"{title}: {done:,} of {total:,}", file=sys.stderr)
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ModuleNotFoundError:
        yield lambda done, total: print(f"\r{title}: {done:,} of {total:,}", end="", file=sys.stderr)
        print(file=sys.stderr)
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
