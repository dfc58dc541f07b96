"""Which kernel gets which gradients: the first that suits."""

from carryclip.torch._bundles import Tuning
from carryclip.torch._kernels import Case, Compiled, Kernel, Listed, Pure, Recorded
from carryclip.torch._rows import RecordedRows, Rows


class Kernels:
    """The kernels of one clipper."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.case = Case
        self.pure, self.recorded, self.rows = Pure(), Recorded(), Rows()
        by_rows = [RecordedRows(self.recorded), self.rows]
        self.by_preference: list[Kernel] = [*by_rows, Compiled(), self.recorded, Listed(), self.pure]

    def choose(self, case: Case) -> Kernel:
        """The first that suits ordinary gradients; unusual ones go to ``pure``."""
        if self.tuning.way == "pure" and not case.rule.region.split:
            return self.pure
        return next(kernel for kernel in self.by_preference if kernel.suits(case))
