"""From a file to an array of pixels: decoding, the random crop of training and the middle crop of evaluation."""

import io
import math
import warnings
from pathlib import Path

import numpy as np
from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of each colour over ImageNet, in [0, 1]."""
AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Of a random crop: its share of the area, width by height, and how often one is drawn until it fits."""
MARGIN = 224 / 256
"""Side of the middle crop, as a share of the shorter side."""
FORMATS = ("JPEG", "PNG")
"""By content, whatever a file is called: others would bring decoders of many more kinds, and start Ghostscript."""
MOST_PIXELS = 1 << 26
"""More than ImageNet has in any file. A PNG of kilobytes can unfold to gigabytes."""
Box = tuple[int, int, int, int]
"""Left, top, right, bottom."""


# Of odd metadata, which thousands of ImageNet's files have. Here, since filters of a thread are those of all.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class BrokenImageError(Exception):
    """A file that cannot be decoded."""


def decoded(path: Path) -> Image.Image:
    """The image in red, green and blue, whatever the file has: grey, a palette, or four colours of ink.

    A disk that does not give the file is another matter, and raises what it raises.
    """
    content = path.read_bytes()
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}")
            return image.convert("RGB")
    except MemoryError:  # of the machine, not of the file
        raise
    except Exception as error:  # which kinds a damaged file leads to, Pillow does not say
        raise BrokenImageError(f"{path} cannot be read: {error}") from None


def random_box(width: int, height: int, generator: np.random.Generator) -> Box:
    """A crop of random area and proportions; the middle one if none fits."""
    for _ in range(TRIES):
        area = width * height * generator.uniform(*AREA)
        ratio = math.exp(generator.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(generator.integers(width - w + 1)), int(generator.integers(height - h + 1))
            return left, top, left + w, top + h
    return middle_box(width, height)


def middle_box(width: int, height: int) -> Box:
    """The square in the middle that evaluation sees."""
    side = max(1, int(MARGIN * min(width, height)))
    left, top = (width - side + 1) // 2, (height - side + 1) // 2
    return left, top, left + side, top + side


def for_training(image: Image.Image, size: int, generator: np.random.Generator) -> np.ndarray:
    """A random crop, flipped half the time, as (size, size, 3) bytes."""
    pixels = _resized(image, random_box(*image.size, generator), size)
    return np.ascontiguousarray(pixels[:, ::-1]) if generator.random() < 0.5 else pixels


def for_evaluation(image: Image.Image, size: int) -> np.ndarray:
    """The middle crop as (size, size, 3) bytes."""
    return _resized(image, middle_box(*image.size), size)


def _resized(image: Image.Image, box: Box, size: int) -> np.ndarray:
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))
