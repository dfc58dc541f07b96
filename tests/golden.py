"""Traces small enough to check by hand, written once by the reference: ``python tests/golden.py`` writes them anew.

Two parameters, a pair and a single number, see the six gradients below. One line of the file is one step:
gradients -> updates, and the carries that remain.
"""

import json
from pathlib import Path

import numpy as np

from carryclip import EWMA, Adaptive, Capped, Component, Gated, Leaky, Norm, Sign, Symmetric, Welford

FILE = Path(__file__).with_name("golden.json")

GRADIENTS = [
    [[3.0, 4.0], [0.0]],
    [[0.0, 0.0], [0.5]],
    [[-1.0, 2.0], [0.5]],
    [[0.25, -8.0], [0.5]],
    [[0.0, 0.0], [-6.0]],
    [[1.0, 1.0], [1.0]],
]
REGIONS = {
    "Component(1)": Component(1.0),
    "Sign(2)": Sign(2.0),
    "Norm(2.5)": Norm(2.5),
    "Norm(2.5, over='tensor')": Norm(2.5, over="tensor"),
    "Adaptive(1, 1, Welford())": Adaptive(1.0, 1.0, Welford()),
    "Adaptive(1, 0.5, EWMA(0.5))": Adaptive(1.0, 0.5, EWMA(0.5)),
    "Symmetric(1, EWMA(0.5))": Symmetric(1.0, EWMA(0.5)),
}
POLICIES = {
    "full": True,
    "none": False,
    "Capped(2)": Capped(2.0),
    "Leaky(0.5)": Leaky(0.5),
    "Gated(0.5, 0.5, 4)": Gated(decay=0.5, threshold=0.5, cap=4.0),
}


def gradients() -> list[list[np.ndarray]]:
    """The six steps as arrays."""
    return [[np.array(a) for a in row] for row in GRADIENTS]


def write() -> None:
    """Let the reference write the file."""
    from carryclip.reference import UClip

    lines = []
    for region in REGIONS:
        for policy in POLICIES:
            clipper = UClip(REGIONS[region], POLICIES[policy], carry=True)
            steps = []
            for row in gradients():
                sent = [u.tolist() for u in clipper.step(row)]
                steps.append(json.dumps({"u": sent, "carry": [c.tolist() for c in clipper.carry]}))
            lines.append(f"{json.dumps(f'{region}, carry {policy}')}: [\n  " + ",\n  ".join(steps) + "\n]")
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
