"""Every backend reproduces the traces of ``golden.json``, which a person can check with pencil and paper."""

import json

import numpy as np
import pytest

import golden
from backends import BACKENDS, run_reference

TRACES = json.loads(golden.FILE.read_text())


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", golden.POLICIES)
@pytest.mark.parametrize("region", golden.REGIONS)
@pytest.mark.parametrize("backend", ["reference", *(name for name in BACKENDS if name != "torch compiled")])
def test_golden_traces(backend, region, policy):
    run = {"reference": run_reference, **BACKENDS}[backend]
    trace = run(golden.REGIONS[region], golden.POLICIES[policy], golden.gradients(), "float64")
    exact = backend == "reference" or region.startswith(("Component", "Sign"))
    for expected, updates, carries in zip(
        TRACES[f"{region}, carry {policy}"], trace.updates, trace.carries, strict=True
    ):
        for want, have in ((expected["u"], updates), (expected["carry"], carries)):
            for a, b in zip(want, have, strict=True):
                np.testing.assert_allclose(b, a, rtol=0, atol=0 if exact else 1e-13)


def test_the_paper_s_example_by_hand():
    """Clip (3, 4) to norm 2.5: half of it goes out, the other half waits."""
    first, second, *_ = TRACES["Norm(2.5), carry full"]
    assert first == {"u": [[1.5, 2.0], [0.0]], "carry": [[1.5, 2.0], [0.0]]}
    # Now s = (1.5, 2, 0.5) has norm sqrt(6.5) = 2.55, just outside.
    np.testing.assert_allclose(second["u"][1], 0.5 * 2.5 / np.sqrt(6.5), rtol=1e-15)


def test_no_trace_is_missing_or_left_over():
    assert set(TRACES) == {f"{r}, carry {p}" for r in golden.REGIONS for p in golden.POLICIES}
