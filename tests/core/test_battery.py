"""Every backend x region x carry policy x type against the reference, over heavy-tailed gradients."""

import numpy as np
import pytest
import torch

from backends import BACKENDS, run_reference
from cases import (
    CELLS,
    COMPILED_CELLS,
    DEVICE_CELLS,
    MIXING,
    OPTAX_CELLS,
    POLICIES,
    REGIONS,
    SHAPES,
    STEPS,
    heavy_tailed,
    tolerance,
)
from compilers import needs_compiler
from pairwise import cells, covering

FEWER = {"optax": OPTAX_CELLS, "torch compiled": COMPILED_CELLS, "torch on a device": DEVICE_CELLS}
"""Cells of backends for which all would take too long."""
ALL = {backend: FEWER.get(backend, CELLS) for backend in BACKENDS}
QUICK = {backend: covering(table) for backend, table in ALL.items()} | {
    # These take seconds to compile.
    "optax": covering(OPTAX_CELLS, together=1),
    "torch compiled": covering(COMPILED_CELLS, together=1),
}
TABLE = [
    pytest.param(backend, *cell.values, marks=[*cell.marks, *([needs_compiler] if backend == "torch compiled" else [])])
    for backend, table in ALL.items()
    for cell in cells(table, QUICK[backend])
]


def rounded(gradients, dtype):
    """The gradients as the type stores them, so that all backends start from the same numbers."""
    return [
        [None if a is None else torch.tensor(a).to(getattr(torch, dtype)).double().numpy() for a in row]
        for row in gradients
    ]


@pytest.mark.filterwarnings("ignore:U-Clip on")  # tails this heavy bring spikes, and the warning says so
@pytest.mark.parametrize(("backend", "region", "policy", "dtype"), TABLE)
def test_backends_equal_the_reference(backend, region, policy, dtype):
    # Gradients that are missing now and then make a second program to compile, so one column has them.
    missing = 0.1 if (dtype, policy) in {("float64", "full"), ("float32", "gated early")} else 0.0
    if REGIONS[region].split:  # the reference must have seen all rows at first
        missing = 0.0
    gradients = rounded(heavy_tailed(len(region) + len(policy), STEPS[dtype], missing), dtype)
    case = REGIONS[region], POLICIES[policy], gradients, dtype
    expected, actual = run_reference(*case), BACKENDS[backend](*case)
    worst = [np.zeros(shape) for shape in SHAPES]
    for want, have in zip(expected.updates, actual.updates, strict=True):
        assert [u is None for u in want] == [u is None for u in have]
    for want, have in ((expected.updates, actual.updates), (expected.carries, actual.carries)):
        for k, shape in enumerate(SHAPES):
            differences = [np.abs(a[k] - b[k]) for a, b in zip(want, have, strict=True) if a[k] is not None]
            worst[k] = np.maximum(worst[k], np.max(differences, axis=0).reshape(shape))
    largest_carry = max(np.abs(c).max() for row in actual.carries for c in row)
    scale = largest_carry
    if policy == "none" or policy in MIXING:
        # Plain clipping has no carry to compare with, and one that is mixed in may be small; updates set the scale.
        scale = max(scale, max(np.abs(u).max() for row in actual.updates for u in row if u is not None))
    allowed = tolerance(dtype, region, policy)
    assert sum(int((w > allowed.relative * scale).sum()) for w in worst) <= allowed.strays, max(w.max() for w in worst)
    if POLICIES[policy] is not False:
        assert largest_carry > 0.0, "nothing was clipped: the case tests nothing"
    if not np.isnan(actual.dropped):
        assert actual.dropped == pytest.approx(expected.dropped, rel=5e-2 if allowed.strays else 1e-4, abs=1e-6)
