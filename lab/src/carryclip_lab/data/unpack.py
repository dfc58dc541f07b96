"""Reading files out of an archive that came from outside, and the error that all data raises.

Nothing is written where an archive says: members are read by the names we know, links are not followed, and nothing
is ever unpickled. An archive is opened only after its checksum was compared.
"""

import contextlib
import tarfile
from collections.abc import Iterator
from pathlib import Path

from carryclip_lab.checks import UserError


class DataError(UserError):
    """Data is missing or not what it should be; says what, where, and what to do."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tarfile.TarFile]:
    """A tarball; whatever is wrong with it or with what is read from it becomes a :class:`DataError`."""
    try:
        with tarfile.open(path, "r:gz") as tar:
            yield tar
    except Exception as error:  # tarfile, zlib, json, Pillow and NumPy have a dozen kinds
        raise DataError(f"{path} cannot be unpacked: {error}.") from None


def member(tar: tarfile.TarFile, name: str) -> bytes:
    """The content of a regular file in a tarball."""
    try:
        found = tar.getmember(name)
    except KeyError:
        raise ValueError(f"{name} is not in it") from None
    file = tar.extractfile(found) if found.isreg() else None
    if file is None:
        raise ValueError(f"{name} in it is not a regular file")
    with file:
        return file.read()
