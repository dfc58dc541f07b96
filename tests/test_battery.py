"""Every region x carry policy x type against the reference, over 100 heavy-tailed steps."""

import numpy as np
import pytest
import torch

from carryclip import reference
from carryclip.torch import UClip
from cases import GROUPS, POLICIES, REGIONS, SHAPES, heavy_tailed, tolerance

STEPS = 100


def run_reference(region, policy, gradients, dtype):
    clipper = reference.UClip(region, policy, groups=GROUPS, dtype=dtype if dtype == "bfloat16" else None)
    kind = np.float32 if dtype == "bfloat16" else dtype
    for arrays in gradients:
        updates = clipper.step([None if a is None else np.asarray(a).astype(kind) for a in arrays])
        yield updates, [np.zeros(s) if c is None else c for c, s in zip(clipper.carry, SHAPES, strict=True)], clipper


def run_torch(region, policy, gradients, dtype):
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype))) for shape in SHAPES]
    optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.01)
    clipper = UClip(optimizer, region, carry=policy, metrics_every=1)
    for arrays in gradients:
        for p, a in zip(params, arrays, strict=True):
            p.grad = None if a is None else torch.tensor(a).to(p.dtype)
        optimizer.step()
        yield (
            [None if p.grad is None else p.grad.double().numpy() for p in params],
            [clipper.carry(p).double().numpy() for p in params],
            clipper,
        )


def rounded(gradients, dtype):
    """The gradients as the type stores them, so that both sides start from the same numbers."""
    return [
        [None if a is None else torch.tensor(a).to(getattr(torch, dtype)).double().numpy() for a in row]
        for row in gradients
    ]


@pytest.mark.filterwarnings("ignore:U-Clip on")  # tails this heavy bring spikes, and the warning says so
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("region", REGIONS)
def test_torch_equals_reference(region, policy, dtype):
    gradients = rounded(heavy_tailed(seed=len(region) + len(policy), steps=STEPS), dtype)
    allowed = tolerance(dtype, region)
    largest_carry = largest_update = 0.0
    worst = [np.zeros(shape) for shape in SHAPES]
    for expected, actual in zip(
        run_reference(REGIONS[region], POLICIES[policy], gradients, dtype),
        run_torch(REGIONS[region], POLICIES[policy], gradients, dtype),
        strict=True,
    ):
        for k, (u, v) in enumerate(zip(expected[0], actual[0], strict=True)):
            assert (u is None) == (v is None)
            if u is not None:
                worst[k] = np.maximum(worst[k], np.abs(u.astype(float) - v))
                largest_update = max(largest_update, np.abs(v).max())
        for k, (c, d) in enumerate(zip(expected[1], actual[1], strict=True)):
            worst[k] = np.maximum(worst[k], np.abs(c.astype(float) - d))
            largest_carry = max(largest_carry, np.abs(d).max())
    # Plain clipping has no carry to compare with; its updates set the scale.
    limit = allowed.relative * (largest_carry or largest_update)
    assert sum(int((w > limit).sum()) for w in worst) <= allowed.strays, max(w.max() for w in worst)
    if POLICIES[policy] is not False:
        assert largest_carry > 0.0, "nothing was clipped: the case tests nothing"
    dropped = actual[2].metrics()["dropped_norm"]
    assert dropped == pytest.approx(expected[2].dropped_norm, rel=5e-2 if allowed.strays else 1e-4, abs=1e-6)
