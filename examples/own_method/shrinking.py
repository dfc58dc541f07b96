"""A method of your own in a study: U-Clip with a radius that falls from 2 to 0.5 over the first 500 steps.

From this folder: carryclip reproduce study.toml --store own.sqlite --out own-report
"""

from carryclip import Norm
from carryclip.torch import UClip


def shrinking(optimizer, spec):
    return UClip(optimizer, Norm(lambda step: 0.5 + 1.5 * max(0.0, 1.0 - step / 500)))
