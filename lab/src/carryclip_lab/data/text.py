"""Texts for a language model: one that ``carryclip data`` fetches, one that comes with Python, or your own."""

import hashlib
import os
from pathlib import Path

import numpy as np
from rich.console import Console

from carryclip_lab.data.cifar10 import cache_folder
from carryclip_lab.data.fetch import alone, download
from carryclip_lab.data.unpack import DataError

NAME = "tinyshakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE = 1_115_394
MD5 = "6fb458f1232090904fb40fe944165e91"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
LEAST = 10_000
"""Bytes of a text from which something can be learnt."""


def load_text(name: str, file: str | None = None) -> np.ndarray:
    """The bytes of a text.

    Args:
        name: as a spec has it.
        file: the text itself, if the name is a checksum.

    Raises:
        DataError: it is not here, or not what it should be.
    """
    if name == "python":
        from pydoc_data import topics

        return np.frombuffer("\n".join(topics.topics.values()).encode(), np.uint8)
    if name == NAME:
        path = _place()
        if not path.is_file():
            raise DataError(f"The text is not here: there is no {path}.\nFetch it with: carryclip data {NAME}")
        return np.frombuffer(_checked(path), np.uint8)
    if file is None:
        raise DataError(f"The text {name} is a file of somebody's own: say --data FILE.")
    content = _read(Path(file))
    if checksum(content) != name:
        raise DataError(f"{file} is not the text of this run: its checksum is {checksum(content)}, not {name}.")
    return np.frombuffer(content, np.uint8)


def own_text(file: str) -> str:
    """What a spec calls a file of one's own."""
    content = _read(Path(file))
    if len(content) < LEAST:
        raise DataError(f"{file} has {len(content):,} bytes; a text needs {LEAST:,} or more.")
    return checksum(content)


def checksum(content: bytes) -> str:
    """Short, for a spec."""
    return f"sha256:{hashlib.sha256(content).hexdigest()[:16]}"


def main(source: str | None) -> int:
    """Fetch the text, or take it from ``source``: the file, or the folder it is in."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    path = _place()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with alone(path.parent / ".lock", console):
            if not _is_there(path):
                part = path.with_name(path.name + ".part")
                if source is not None:
                    given = Path(source).expanduser()
                    part.write_bytes(_checked(given / "input.txt" if given.is_dir() else given))
                else:
                    console.print(f"Fetching {URL}")
                    download(URL, part, size=SIZE, md5=MD5, console=console)
                    _checked(part)
                os.replace(part, path)
    except DataError as error:
        further = (
            ""
            if source is not None
            else (
                f"\nFetch {URL} on a machine that can, bring it here, and type:\n\n"
                f"    carryclip data {NAME} --from input.txt\n"
            )
        )
        console.print(f"The text could not be had: {error}{further}", style="red")
        return 1 if source is None else 2
    except OSError as error:
        console.print(
            f"The text cannot be kept in {path.parent}: {error.strerror or error}. For another place, set "
            "CARRYCLIP_DATA to a folder.",
            style="red",
        )
        return 1
    console.print(f"The text is complete and checked in {path}")
    return 0


def _place() -> Path:
    return cache_folder() / NAME / "input.txt"


def _is_there(path: Path) -> bool:
    try:
        return bool(_checked(path))
    except DataError:
        return False


def _checked(path: Path) -> bytes:
    content = _read(path)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise DataError(f"{path} is not the text we know: {len(content):,} bytes, and another SHA-256 than {SHA256}")
    return content


def _read(path: Path) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
