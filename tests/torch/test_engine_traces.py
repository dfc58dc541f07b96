"""The engine computes what the engine of version 0.1 did, and each can read the other's checkpoints.

Where a coordinate is clipped by itself all bits are the same. A norm may be added up in another order, so there the
last bits may differ; ``Allowed`` says by how much.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from carryclip import EWMA
from carryclip.diagnosis import LAST_STEP
from engine_traces import CELLS, END, PREFIX, SAVED, SETUPS, Run, bits, checkpoints, entries_of, stored, trace

pytestmark = pytest.mark.filterwarnings("ignore:U-Clip on")  # tails this heavy bring spikes, and the warning says so

SUMS = 1e-5
"""Relative difference of metrics and of what was dropped: sums over the whole model, which have no order."""
SIZED = ("update", "uclip_carry", "parameter")
FUSED = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
"""Whether torch.lerp, behind the exponential averages, rounds once as it did where the files were written."""


def marks_of(region: Any) -> list[pytest.MarkDecorator]:
    averages = isinstance(getattr(region, "moments", None), EWMA)
    return [pytest.mark.skipif(not FUSED, reason="this processor's lerp rounds twice")] if averages else []


class Allowed:
    """How far a run's numbers may be from the stored ones; ``relative`` is to the largest update, carry or parameter.

    A step multiplies by radius/norm, which another order of adding up changes by a few units in the last place: 4 are
    allowed for each step taken, since what one step leaves in the carry comes back in the next. Updates in a narrow
    type hide that, except where one lies so close to the middle of two numbers that it is rounded the other way: a
    unit of that type. The carry then has the difference and pays it back, in a step where the same may happen: 2.

    ``units`` may be more where a norm is not the host's: torch's own sum of 300,000 squares is off by 60.
    """

    def __init__(self, dtype: str, steps: int, *, exact: bool, units: int = 4) -> None:
        kind = getattr(torch, dtype)
        self.exact = exact
        self.relative = 0.0 if exact else torch.finfo(kind).eps * (2 if kind.itemsize == 2 else units * steps)
        self.sums = max(SUMS, self.relative)

    def differences(self, want: dict[str, Any], have: dict[str, Any]) -> list[str]:
        """What is not as it was; empty if all is well."""
        if want.keys() != have.keys():
            return [f"entries that only one of them has: {sorted(want.keys() ^ have.keys())}"]
        sized = [x.abs().max().item() for name, x in want.items() if name.startswith(SIZED) and x.numel()]
        largest = max(sized, default=0.0)
        return [name for name in want if not self._alike(name, want[name], have[name], largest)]

    def _alike(self, name: str, want: Any, have: Any, largest: float) -> bool:
        if not isinstance(want, Tensor) or not isinstance(have, Tensor):
            return type(want) is type(have) and want == have
        # What is dropped is added up in float64 by now, which the engine of version 0.1 reads as well.
        dropped = name.startswith("uclip_dropped")
        if want.shape != have.shape or (want.dtype != have.dtype and not dropped):
            return False
        if name == "metrics":
            # The feed is a mean of numbers in [-1, 1] that may cancel.
            have, want = have.double(), want.double()
            near = torch.isclose(have, want, rtol=self.sums, atol=0.0, equal_nan=True)
            feed = LAST_STEP.index("carry_feed")
            near[feed] = torch.isclose(have[feed], want[feed], rtol=0.0, atol=self.sums, equal_nan=True)
            return bool(near.all())
        if dropped:
            return torch.allclose(have.double(), want.double(), rtol=self.sums, atol=0.0)
        if self.exact or not want.is_floating_point():
            return torch.equal(bits(have), bits(want))
        scale = largest if name.startswith(SIZED) else 1.0  # a feed is in [-1, 1]
        return torch.allclose(have.double(), want.double(), rtol=0.0, atol=self.relative * scale)


TRACED = [pytest.param(cell, id=cell.name, marks=marks_of(cell.rule[0])) for cell in CELLS if cell.name in stored()]
RUNS = [pytest.param(name, marks=marks_of(setup.region)) for name, setup in SETUPS.items()]


@pytest.mark.parametrize("cell", TRACED)
def test_every_cell_is_as_it_was(cell):
    allowed = Allowed(cell.dtype, cell.steps, exact=cell.exact)
    assert not allowed.differences(stored()[cell.name], trace(cell))


def test_no_trace_is_left_over():
    """New rows of the battery have no trace of version 0.1; the old ones are all still tried."""
    assert stored().keys() <= {cell.name for cell in CELLS}
    assert checkpoints().keys() == SETUPS.keys()


def allowed_for(name: str, steps: int) -> Allowed:
    if "carry_dtype" in SETUPS[name].options:
        # Rounding at random goes by the place in a tensor now, and went by the place among small ones laid end to end.
        return Allowed("bfloat16", steps, exact=False)
    return Allowed(SETUPS[name].dtype, steps, exact=SETUPS[name].exact)


@pytest.mark.parametrize("name", RUNS)
def test_old_checkpoints_go_on_as_they_did(name):
    run = Run(SETUPS[name])
    run.load(checkpoints()[name]["saved"])
    run.train(SAVED, END)
    assert not allowed_for(name, END).differences(checkpoints()[name]["end"], run.result())


@pytest.mark.parametrize("name", RUNS)
def test_new_checkpoints_are_what_the_old_engine_wrote(name):
    """The same entries in the same places, types and shapes: so the engine of version 0.1 can read them."""
    run = Run(SETUPS[name])
    run.train(0, SAVED)
    want, have = checkpoints()[name]["saved"], run.save()
    assert not allowed_for(name, SAVED).differences(entries_of(want), entries_of(have))
    assert {f"{PREFIX}steps of group 0", f"{PREFIX}carry of 0"} <= entries_of(want).keys()
