"""scikit-learn's digits and a small dense network: real, small, and inside a dependency."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from carryclip_lab.tasks._images import Images, ImageTask, initialised


@dataclass(frozen=True, kw_only=True)
class Digits(ImageTask):
    """1,438 images of 8 × 8 pixels for training and 359 for tests."""

    name = "scikit-learn's digits"
    size = 1438
    weights = (1e-5, 1e-3)

    @staticmethod
    def read() -> Images:
        """Standardised by all pixels together."""
        pixels, digits = _table()
        images = torch.tensor(pixels, dtype=torch.float32)
        images = (images - images.mean()) / images.std()
        labels = torch.tensor(digits)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
        test, train = order[: len(order) // 5], order[len(order) // 5 :]
        return Images(images[train], labels[train], images[test], labels[test], _net, chunk=512)


def _table() -> tuple[np.ndarray, np.ndarray]:
    """Pixels and digits, read from scikit-learn's own file: to import its reader takes longer than a short run."""
    package = find_spec("sklearn")
    origin = "" if package is None else package.origin or ""
    file = Path(origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():  # another version may keep it elsewhere
        from sklearn.datasets import load_digits

        found: Any = load_digits()
        return found.data, found.target
    rows = np.loadtxt(file, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)


def _net(generator: torch.Generator) -> nn.Module:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return initialised(net, generator)
