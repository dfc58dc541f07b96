"""Texts for a language model: one that ``carryclip data`` fetches, one that comes with Python, or your own."""

import hashlib
import os
from pathlib import Path

import numpy as np

from carryclip_lab.data.dataset import DataSet
from carryclip_lab.data.unpack import DataError

FILE = "input.txt"
LEAST = 10_000
"""Bytes of a text from which something can be learnt."""


class Text(DataSet):
    """A text that is a single file."""

    def unpack(self, path: Path) -> dict[str, bytes]:
        """The file, or the file in a folder."""
        return {FILE: _read(path / FILE if os.path.isdir(path) else path)}


SHAKESPEARE = Text(
    name="tinyshakespeare",
    title="The text",
    files={FILE: "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    size=1_115_394,
    url="https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    checksum="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    url_size=1_115_394,
)


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
    if name == SHAKESPEARE.name:
        return np.frombuffer(SHAKESPEARE.load()[FILE], np.uint8)
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
    return SHAKESPEARE.provide(source)


def _read(path: Path) -> bytes:
    try:
        return Path(os.path.expanduser(path)).read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
