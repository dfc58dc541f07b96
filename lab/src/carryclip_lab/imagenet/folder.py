"""A folder of images: ``train`` and ``val``, in each a folder per class. Looked through before anything starts."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carryclip_lab.data.unpack import DataError

ENDINGS = (".jpeg", ".jpg", ".png")
PARTS = ("train", "val")
WHERE = "Where are the images? Say --data DIR: a folder with train and val, and in each one folder per class."
EXPECTED = "It needs the folders train and val, and in each a folder of images for every class."


@dataclass(frozen=True)
class Part:
    """The images of ``train`` or ``val``, class by class."""

    root: Path
    names: tuple[str, ...]
    """Below the root, such as ``n01440764/one.jpeg``."""
    labels: tuple[int, ...]

    def path(self, number: int) -> Path:
        """Of one image."""
        return self.root / self.names[number]

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Folder:
    """Both parts, which have the same classes."""

    root: Path
    classes: tuple[str, ...]
    train: Part
    val: Part

    @property
    def fingerprint(self) -> str:
        """The same for the same file names, and sizes as far as some are looked at, wherever they are."""
        told = hashlib.sha256()
        for part in (self.train, self.val):
            told.update("\n".join((part.root.name, *part.names)).encode())
            for name in part.names[:: max(1, len(part) // 1000)]:
                told.update(f"{(part.root / name).stat().st_size} ".encode())
        return told.hexdigest()[:12]

    @property
    def settings(self) -> dict[str, Any]:
        """What a spec says of it."""
        counts = {"classes": len(self.classes), "images": len(self.train), "tests": len(self.val)}
        return {"data": self.fingerprint, **counts}

    def __str__(self) -> str:
        return f"{self.root}: {len(self.classes):,} classes, {len(self.train):,} + {len(self.val):,} images"


def look_through(root: str | Path) -> Folder:
    """List a folder; what is wrong with it is said at once, as far as names can tell."""
    root = Path(os.path.expanduser(root))
    if not os.path.isdir(root):
        raise DataError(f"There is no folder {root}. {EXPECTED}")
    missing = [part for part in PARTS if not os.path.isdir(root / part)]
    if missing:
        raise DataError(f"{root} has no folder {' and no folder '.join(missing)}. {EXPECTED}")
    classes = {part: _classes(root / part) for part in PARTS}
    _compare(root, classes["train"], classes["val"])
    train, val = (_listed(root / part, classes[part]) for part in PARTS)
    return Folder(root, tuple(classes["train"]), train, val)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, sorted by name, but for what is hidden."""
    try:
        with os.scandir(folder) as entries:
            found = sorted((entry for entry in entries if entry.name[0] != "."), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}.") from None
    for entry in found:
        if entry.is_symlink() and not os.path.exists(entry.path):
            raise DataError(f"{entry.path} is a link to nothing. Mend it, or remove it.")
    return found


def _classes(folder: Path) -> list[str]:
    found = [entry.name for entry in _entries(folder) if entry.is_dir()]
    if not found:
        raise DataError(f"{folder} has no folders, one for each class. {EXPECTED}")
    return found


def _compare(root: Path, train: Sequence[str], val: Sequence[str]) -> None:
    for one, other, has, lacks in ((train, val, "train", "val"), (val, train, "val", "train")):
        only = sorted(set(one) - set(other))
        if only:
            more = f" and {len(only) - 3} more" if len(only) > 3 else ""
            raise DataError(
                f"The classes of {root} do not agree: {has} has {', '.join(only[:3])}{more}, {lacks} has not. Labels "
                "are numbered by the sorted names, so both must have the same."
            )


def _listed(folder: Path, classes: Sequence[str]) -> Part:
    names: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = [entry.name for entry in _entries(folder / name) if entry.is_file()]
        images = [name for name in found if name.lower().endswith(ENDINGS)]
        if not images:
            raise DataError(
                f"The class folder {folder / name} has no images ({', '.join(ENDINGS)}). Fill it, or remove it from "
                "train and val."
            )
        names += [f"{name}/{image}" for image in images]
        labels += [label] * len(images)
    return Part(folder, tuple(names), tuple(labels))
