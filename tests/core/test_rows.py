"""Rows of many small tensors are worked on together: the same numbers, and no call for each tensor."""

import numpy as np
import pytest
import torch

from carryclip import Drip, Gated, Norm, Shrunk, reference
from carryclip.torch import UClip
from carryclip.torch._namespace import row_squares
from carryclip.torch._record import NotRecordableError, Symbol

SHAPES = [(3, 4), (5, 4), (4,), (2, 2, 2), (7,), (6, 2, 2), (4,), (1, 9)]
POLICIES = [True, False, Gated(), Drip(), Shrunk()]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]


def give(
    params: list[torch.nn.Parameter], seed: int, missing: int | None = None, size: float = 1.0
) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    given = [size * random.standard_t(2, shape) for shape in SHAPES]
    for k, (param, gradient) in enumerate(zip(params, given, strict=True)):
        param.grad = None if k == missing else torch.tensor(gradient)
    return given


@pytest.mark.parametrize("carry", POLICIES, ids=str)
def test_packed_rows_equal_the_reference(carry):
    params = parameters()
    clipper = UClip(params, Norm(0.7, over="row"), carry=carry)
    judge = reference.UClip(Norm(0.7, over="row"), carry=carry)
    for step in range(60):
        given = give(params, step)
        clipper.clip_()
        for param, wanted in zip(params, judge.step(given), strict=True):
            assert torch.allclose(param.grad, torch.tensor(wanted), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("carry", POLICIES, ids=str)
def test_gradients_that_come_and_go_give_what_each_tensor_gives_alone(carry):
    """Steps inside the radius leave no carry; that must not be believed of a tensor that was not there."""
    together, alone = parameters(), parameters()
    one = UClip(together, Norm(0.7, over="row"), carry=carry)
    many = [UClip([param], Norm(0.7, over="row"), carry=carry) for param in alone]
    for step in range(40):
        missing, size = (None if step % 3 == 0 else step % len(SHAPES)), 1e-3 if step % 4 else 1.0
        give(together, step, missing, size)
        give(alone, step, missing, size)
        one.clip_()
        for clipper in many:
            clipper.clip_()
        for left, right in zip(together, alone, strict=True):
            if left.grad is not None:
                assert torch.allclose(left.grad, right.grad, rtol=1e-12, atol=1e-13)


def calls(count: int) -> int:
    params = [torch.nn.Parameter(torch.zeros(6, 5)) for _ in range(count)]
    clipper = UClip(params, Norm(0.1, over="row"), metrics_every=0)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones(6, 5)
        with torch.profiler.profile() as profile:
            clipper.clip_()
    return sum(event.name in ("aten::sum", "aten::linalg_vector_norm", "aten::addcmul") for event in profile.events())


def test_a_step_has_no_more_operations_with_more_small_tensors():
    assert 0 < calls(200) == calls(20)


@pytest.mark.parametrize("width", [1, 255, 4096, 4097, 40 * 256])
def test_squares_of_rows_are_accurate_however_long_they_are(width):
    rows = torch.randn(20, width, generator=torch.Generator().manual_seed(0))
    exact = rows.double().square().sum(1)
    assert ((row_squares(rows) - exact) / exact).abs().max() < 8 * torch.finfo(torch.float32).eps


def test_a_resumed_run_is_bit_equal_whether_carries_lie_in_packs_or_not():
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1)
    UClip(optimizer, Norm(0.7, over="row"))
    other = parameters()
    resumed = torch.optim.SGD(other, lr=0.1)
    UClip(resumed, Norm(0.7, over="row"))
    for step in range(10):
        give(params, step)
        optimizer.step()
    resumed.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        for mine, theirs in zip(other, params, strict=True):
            mine.copy_(theirs)
    for step in range(10, 20):
        give(params, step)
        give(other, step)
        optimizer.step()
        resumed.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(other, params, strict=True))


class Unwritten(Shrunk):
    """A policy that cannot be made a program."""

    def mix(self, xp, gradient, carry, scaling):
        """As ever, but for the recorder."""
        if isinstance(gradient, Symbol):
            raise NotRecordableError("this policy")
        return super().mix(xp, gradient, carry, scaling)


def test_rows_of_a_rule_that_cannot_be_recorded_take_the_pure_functions():
    sent = []
    for policy in (Shrunk(), Unwritten()):
        param = torch.nn.Parameter(torch.zeros(5, 3))
        clipper = UClip([param], Norm(0.5, over="row"), carry=policy)
        for row in np.random.default_rng(4).standard_normal((20, 5, 3)):
            param.grad = torch.tensor(row, dtype=torch.float32)
            clipper.clip_()
        sent.append(param.grad.clone())
    torch.testing.assert_close(*sent)
