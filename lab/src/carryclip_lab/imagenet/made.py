"""A small folder of images that anyone can make: ten kinds of pattern, so that trials need no data."""

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from carryclip_lab.data.dataset import cache_folder
from carryclip_lab.data.unpack import DataError

CLASSES, TRAIN, VAL, SIDE = 10, 32, 8, 72
COLOURS = ((0.9, 0.4, 0.3), (0.3, 0.5, 0.9), (0.4, 0.8, 0.4), (0.8, 0.7, 0.2), (0.6, 0.4, 0.8))


def made_folder() -> Path:
    """Where it is, or will be."""
    return cache_folder() / f"made-images-{CLASSES}-{TRAIN}-{VAL}-{SIDE}"


def settings() -> dict[str, Any]:
    """What a spec says of it, as far as that is known before it is made."""
    return {"data": "made", "classes": CLASSES, "images": CLASSES * TRAIN, "tests": CLASSES * VAL}


def make() -> Path:
    """Make it, unless it is there: whole or not at all."""
    folder = made_folder()
    if os.path.isdir(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, ignore_cleanup_errors=True) as aside:
            _draw(Path(aside, folder.name))
            os.replace(Path(aside, folder.name), folder)
    except OSError as error:
        if not os.path.isdir(folder):  # someone else may have made it meanwhile
            raise DataError(
                f"The images for trials cannot be made in {folder.parent}: {error.strerror}. For another place, set "
                "CARRYCLIP_DATA to a folder."
            ) from None
    return folder


def _draw(folder: Path) -> None:
    for part, count in (("train", TRAIN), ("val", VAL)):
        for label in range(CLASSES):
            place = folder / part / f"pattern-{label}"
            place.mkdir(parents=True)
            for k in range(count):
                generator = np.random.default_rng([label, k, part == "val"])
                Image.fromarray(_pattern(label, generator)).save(place / f"{k:03d}.jpeg", quality=90)


def _pattern(label: int, generator: np.random.Generator) -> np.ndarray:
    """Waves in one of five directions, fine or coarse, in a colour that tells a little, with noise."""
    angle = math.pi * (label % 5) / 5 + generator.normal(0, 0.12)
    length = (9.0 if label < 5 else 18.0) * math.exp(generator.normal(0, 0.15))
    y, x = np.mgrid[:SIDE, :SIDE]
    wave = np.sin(2 * math.pi * (x * math.cos(angle) + y * math.sin(angle)) / length + generator.uniform(0, 7))
    hue = np.array(COLOURS[(label + int(generator.integers(3))) % 5])
    values = 0.5 + 0.3 * wave[..., None] * hue + generator.normal(0, 0.12, (SIDE, SIDE, 3))
    return (255 * np.clip(values, 0, 1)).astype(np.uint8)
