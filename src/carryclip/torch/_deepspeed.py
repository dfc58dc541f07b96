"""DeepSpeed, which steps the optimizer on flat partitions of the parameters, one group after the other."""

import sys
from typing import Any, NamedTuple

from torch.optim import Optimizer

from carryclip.algorithm import Rule
from carryclip.regions import Norm
from carryclip.torch._callers import owners


class Partition(NamedTuple):
    """How ZeRO cuts the parameters up."""

    group: Any
    """The process group whose ranks have the other parts."""
    calls: int
    """How often the optimizer is stepped for one step of the training."""


def stepping_engine(optimizer: Optimizer) -> Partition | None:
    """The ZeRO optimizer that is just stepping this one, if one is."""
    if "deepspeed" not in sys.modules:
        return None
    zero: Any = None
    for owner in owners():
        ours = type(owner).__module__.startswith("deepspeed.") and getattr(owner, "optimizer", None) is optimizer
        if zero is None and ours and hasattr(owner, "dp_process_group"):
            zero = owner
    if zero is None:
        return None
    # Stages 1 and 2 step group by group, stage 3 by smaller parts still; others all at once.
    parts = getattr(zero, "bit16_groups", None) or getattr(zero, "fp16_groups", None) or [None]
    return Partition(zero.dp_process_group, len(parts))


def check_rules(rules: list[Rule], partition: Partition) -> None:
    """Refuse norms that DeepSpeed leaves no way to measure."""
    for region in [rule.region for rule in rules if isinstance(rule.region, Norm)]:
        if region.over != "all" or partition.calls > 1:
            why = "each tensor is cut up" if region.over != "all" else "the optimizer is stepped once for each group"
            raise TypeError(
                f"{region!r} cannot be measured under DeepSpeed's ZeRO, where {why}. Use one param group with "
                "Norm(radius), a region that looks at each coordinate (Component, Adaptive, Sign), or FSDP2."
            )
