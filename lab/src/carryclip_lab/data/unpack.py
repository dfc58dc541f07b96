"""What the files of a data set must be, and how to read them out of a folder, an archive or an npm package.

Nothing found outside is trusted: an archive is opened only after its checksum, only the members we know are read,
each under a name of ours, and every file is compared with its own checksum at the end. Nothing is ever unpickled.
"""

import hashlib
import json
import tarfile
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO

import numpy as np

Files = Generator[tuple[str, bytes], None, None]
"""Names of ours, and what belongs under them; not yet checked."""

CHANNELS, SIDE = 3, 32
PIXELS = SIDE * SIDE
RECORD = 1 + CHANNELS * PIXELS
"""Bytes of an image: its label, then all red, all green, all blue."""
UNPACKED = "cifar-10-batches-bin"
"""The folder in the official archive."""


class DataError(RuntimeError):
    """Data is missing or not what it should be; says what, where, and what to do."""


@dataclass(frozen=True)
class Expected:
    """Everything that is known beforehand: the one table that files, archives and downloads are compared with."""

    md5: dict[str, str]
    """Of each file; the last one is the test set."""
    records: int
    """Images in each file."""
    url: str
    archive_md5: str
    archive_size: int
    npm: str
    npm_sha512: str
    pickled_md5: str
    """Of the archive that people get by mistake."""

    @property
    def size(self) -> int:
        """Bytes of each file."""
        return self.records * RECORD

    @property
    def archive(self) -> str:
        """File name of the official archive."""
        return self.url.rpartition("/")[2]

    def check(self, name: str, content: bytes, where: object) -> None:
        """Raise unless this is the file of that name."""
        if len(content) != self.size:
            raise DataError(f"{where} has {len(content)} bytes; the official file has {self.size}")
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != self.md5[name]:
            raise DataError(f"{where} is not the official file: its MD5 is {found}, not {self.md5[name]}")

    def read(self, path: Path, name: str | None = None) -> bytes:
        """A file, checked; ``name`` says which one it is, if it is not called so."""
        try:
            if not path.is_file():
                raise DataError(f"{path} is {'not a file' if path.exists() else 'missing'}")
            with path.open("rb") as file:
                content = file.read(self.size + 1)  # whatever else may lie there, it is not read into memory
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from None
        if len(content) > self.size:
            raise DataError(f"{path} is longer than the official file, which has {self.size} bytes")
        self.check(name or path.name, content, path)
        return content

    def faults(self, folder: Path) -> list[str]:
        """What is wrong with the files in a folder; nothing if all are right."""
        found = []
        for name in self.md5:
            try:
                self.read(folder / name)
            except DataError as error:
                found.append(str(error))
        return found


def md5_of(file: BufferedReader) -> str:
    """Checksum of a whole file."""
    file.seek(0)
    return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def sha512_of(file: BufferedReader) -> str:
    """Checksum of a whole file."""
    file.seek(0)
    return hashlib.file_digest(file, "sha512").hexdigest()


def from_path(path: Path, expected: Expected) -> Files:
    """The files in what a user has: a folder, the official archive, or the npm package."""
    try:
        if path.is_dir():
            yield from from_folder(path, expected)
        elif path.exists():
            yield from from_tarball(path, expected)
        else:
            raise DataError(f"{path} does not exist.")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def from_folder(path: Path, expected: Expected) -> Files:
    """The files in a folder, or in the folder of the official archive in it; all are right, or none is taken."""
    places = (path, path / UNPACKED)
    folder = next((place for place in places if any((place / name).exists() for name in expected.md5)), None)
    if folder is None:
        pickled = [place for place in (path / "data_batch_1", path / "cifar-10-batches-py") if place.exists()]
        raise DataError(
            _no_pickles(pickled[0], expected) if pickled else f"{path} holds none of {', '.join(expected.md5)}."
        )
    if faults := expected.faults(folder):
        raise DataError("\n".join(f"{fault}." for fault in faults) + "\nNothing was taken from there.")
    for name in expected.md5:
        yield name, expected.read(folder / name)


def from_tarball(path: Path, expected: Expected) -> Files:
    """The files in the official archive or the npm package; which one it is, its checksum says."""
    try:
        with path.open("rb") as file:
            read = _reader(path, file, expected)
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:gz") as tar:
                yield from read(tar, expected)
    except (tarfile.TarError, zlib.error, EOFError, OSError, ValueError, SyntaxError) as error:  # Pillow raises these
        raise DataError(f"{path} cannot be unpacked: {error}.") from None


def _reader(path: Path, file: BufferedReader, expected: Expected) -> Callable[[tarfile.TarFile, Expected], Files]:
    """How to read a tarball, if it is one that we know."""
    md5 = md5_of(file)
    if md5 == expected.archive_md5:
        return _official
    if sha512_of(file) == expected.npm_sha512:
        return _npm
    if md5 == expected.pickled_md5 or path.name.startswith("cifar-10-python"):
        raise DataError(_no_pickles(path, expected))
    raise DataError(
        f"{path} is neither {expected.archive} (MD5 {expected.archive_md5}, {expected.archive_size} bytes) nor the npm "
        f"package {expected.npm}: its MD5 is {md5}, and it has {file.tell()} bytes.\n"
        "If it was cut short, fetch it again; if it was packed anew, unpack it and give the folder."
    )


def _no_pickles(path: Path, expected: Expected) -> str:
    return (
        f"{path} is the Python version of CIFAR-10, which is made of pickles. Pickles can run any code and are not "
        f"read.\nGet the binary version instead: {expected.url}"
    )


def _official(tar: tarfile.TarFile, expected: Expected) -> Files:
    for name in expected.md5:
        yield name, _member(tar, f"{UNPACKED}/{name}", expected.size, exactly=True)


def _npm(tar: tarfile.TarFile, expected: Expected) -> Files:
    """Put the official files together again from pictures, an image a row, and lists of labels."""
    from PIL import Image

    limit = 2 * expected.size  # of pictures without losses, and far more than the labels need
    *train, test = expected.md5
    train_labels = _labels(_member(tar, "package/train_lables.json", limit), len(train) * expected.records)
    test_labels = _labels(_member(tar, "package/test_lables.json", limit), expected.records)
    labels = np.concatenate([train_labels, test_labels]).reshape(-1, expected.records, 1)
    for name, column in zip([*train, test], labels, strict=True):
        picture = _member(tar, f"package/{Path(name).stem}.png", limit)
        with Image.open(BytesIO(picture), formats=["PNG"]) as image:
            if image.size != (PIXELS, expected.records) or image.mode not in ("RGB", "RGBA"):
                raise ValueError(f"the picture of {name} is {image.size} {image.mode}")
            rows = np.asarray(image.convert("RGB"))
        planes = rows.transpose(0, 2, 1).reshape(expected.records, CHANNELS * PIXELS)
        yield name, np.concatenate([column, planes], axis=1).tobytes()


def _labels(text: bytes, count: int) -> np.ndarray:
    given = json.loads(text)
    if not (isinstance(given, list) and len(given) == count and all(label in range(10) for label in given)):
        raise ValueError(f"the labels are not {count} digits")
    return np.array(given, np.uint8)


def _member(tar: tarfile.TarFile, name: str, size: int, *, exactly: bool = False) -> bytes:
    """The content of a regular file in a tarball; links are not followed, and no size is taken on trust."""
    try:
        member = tar.getmember(name)
    except KeyError:
        raise ValueError(f"{name} is not in it") from None
    file: IO[bytes] | None = tar.extractfile(member) if member.isreg() else None
    if file is None:
        raise ValueError(f"{name} in it is not a regular file")
    if member.size > size or (exactly and member.size != size):
        raise ValueError(f"{name} in it has {member.size} bytes, not {size}")
    with file:
        return file.read()
