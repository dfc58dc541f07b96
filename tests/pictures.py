"""A tiny folder of images, and a spec that trains on it in a second."""

import numpy as np
from PIL import Image

from carryclip_lab.imagenet.folder import look_through
from carryclip_lab.spec import Spec

SPEC = {
    "task": "imagenet", "optimizer": "nesterov", "lr": 0.2, "batch": 8, "epochs": 3, "seed": 0,
    "net": "resnet10", "image": 16, "micro": 4, "warmup": 1,
}  # fmt: skip


def folder(root, classes=3, train=9, val=4):
    """Stripes of three kinds, in colours at random; one image is grey."""
    for part, count in (("train", train), ("val", val)):
        for label in range(classes):
            place = root / part / f"class-{label}"
            place.mkdir(parents=True)
            for k in range(count):
                generator = np.random.default_rng([label, k, part == "val"])
                stripes = 128 + 100 * np.sin(np.arange(24) * (label + 1) / 2 + generator.uniform(0, 6))
                pixels = np.clip(stripes[:, None, None] + generator.normal(0, 30, (24, 28, 3)), 0, 255)
                image = Image.fromarray(pixels.astype(np.uint8))
                (image.convert("L") if k == 0 else image).save(place / f"{k}.jpeg")
    return root


def spec_of(root, **other):
    """The spec of a run on such a folder."""
    return Spec.read({**SPEC, **look_through(root).settings, **other})


STUDY = """
name = "pair"
tier = "smoke"
[defaults]
task = "imagenet"
optimizer = "nesterov"
lr = 0.2
batch = 8
epochs = 16
seed = 0
net = "resnet10"
image = 16
micro = 4
warmup = 1
[[grid]]
region = "Norm(0.5)"
carry = "full"
[[grid]]
"""
