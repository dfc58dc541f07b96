"""Kernels for norms of rows, or columns, whose sums and scalars are vectors; and the choice between all kernels.

Rows           the pure functions: any array
RecordedRows   the same as programs that write in place: tensors that lie in memory row by row, on the CPU
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from carryclip.algorithm import Age, apply
from carryclip.diagnosis import Diagnosis
from carryclip.policy import Scaling, Sums
from carryclip.torch._bundles import Bundle, Case, Tuning
from carryclip.torch._kernels import NO_AGE, Call, Compiled, Kernel, Listed, Pure, Recorded, Told, apply_of
from carryclip.torch._namespace import RowsNamespace


class Rows(Pure):
    """The pure functions with a sum for each row, or column, of a tensor: sums and scalars are vectors of these."""

    def suits(self, case: Case) -> bool:
        return case.rule.region.split

    def measure(self, bundle: Bundle, arrays: list[Tensor], *, clear: bool, inspect: bool) -> Sums:
        pairs = zip(bundle.pieces, arrays, strict=True)
        parts = [self.measure_one(bundle, piece, array, clear) for piece, array in pairs]
        bad, *sums = (_end_to_end(column) for column in zip(*parts, strict=True))
        return Sums(bad.any(), *sums)

    def apply(self, bundle: Bundle, arrays: list[Tensor], call: Call) -> Told:
        told, start = [], 0
        assert call.scaling is not None
        for piece, array in zip(bundle.pieces, arrays, strict=True):
            count = 1 if bundle.axis is None else array.shape[bundle.axis]
            shape = [count if k == bundle.axis else 1 for k in range(array.dim())]
            own = [x[start : start + count].view(shape) if isinstance(x, Tensor) else x for x in call.scaling]
            told.append(self.apply_one(bundle, piece, array, call._replace(scaling=Scaling(*own)), NO_AGE))
            start += count
        diagnoses = [each.diagnosis for each in told if each.diagnosis is not None]
        if not diagnoses:
            return Told()
        return Told(None, Diagnosis(*(_end_to_end(column) for column in zip(*diagnoses, strict=True))))

    def space(self, bundle: Bundle) -> Any:
        return _rows(bundle.axis)


class RecordedRows(Rows):
    """Programs made of the pure functions, kept and given scratch memory by ``Recorded``."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded

    def suits(self, case: Case) -> bool:
        return case.rule.region.split and case.host

    def measure(self, bundle: Bundle, arrays: list[Tensor], *, clear: bool, inspect: bool) -> Sums:
        read = ("carry",) if bundle.rule.policy.carries else ()
        pairs = zip(bundle.pieces, arrays, strict=True)
        parts = [self.recorded.sums_of(bundle, piece, array, read, rows=True) for piece, array in pairs]
        if None in parts:
            return super().measure(bundle, arrays, clear=clear, inspect=inspect)
        found = Sums(**{name: _end_to_end([part[name] for part in parts]) for name in parts[0]})
        return found._replace(bad=~torch.isfinite(found.total_sq).all())

    def apply_one(self, bundle: Bundle, piece: Any, array: Tensor, call: Call, clock: Age) -> Told:
        """Write one piece; the figures of a step that is measured come from the pure function, which writes nothing."""
        if bundle.rounds or call.scaling is None:
            return super().apply_one(bundle, piece, array, call, clock)
        diagnosis = None
        if call.inspect:
            given = array, piece.buffers, (1.0,), call.scaling, None, bundle.dtype
            diagnosis = apply(self.space(bundle), bundle.rule, *given, clock=clock, inspect=True).diagnosis
        names = [name for name, value in zip(Scaling._fields, call.scaling, strict=True) if value is not None]
        key = "rows", id(bundle.rule), bundle.narrow, call.write, tuple(names)
        how = bundle, call._replace(tally=False, inspect=False), (1.0,), clock, tuple(names)
        made = self.recorded.program(key, partial(apply_of, rows=True), *how)
        if made is None:
            return super().apply_one(bundle, piece, array, call, clock)
        program, _ = made
        known = [x for x in call.scaling if x is not None]
        columns = [x if isinstance(x, Tensor) else torch.tensor(x, dtype=bundle.dtype) for x in known]
        stored = [x for x in piece.buffers[:-1] if x is not None]
        program.run(array, *stored, *columns, *self.recorded.room(program, array))
        return Told(None, diagnosis)


class Kernels:
    """The kernels of one clipper, and which of them gets which gradients: the first that suits."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.pure, self.recorded, self.rows = Pure(), Recorded(), Rows()
        by_rows = [RecordedRows(self.recorded), self.rows]
        self.by_preference: list[Kernel] = [*by_rows, Compiled(), self.recorded, Listed(), self.pure]

    def choose(self, case: Case) -> Kernel:
        """The first that suits ordinary gradients; unusual ones go to ``pure``."""
        if self.tuning.way == "pure" and not case.rule.region.split:
            return self.pure
        return next(kernel for kernel in self.by_preference if kernel.suits(case))


@cache
def _rows(axis: int | None) -> RowsNamespace:
    return RowsNamespace(axis)


def _end_to_end(values: Sequence[Any]) -> Any:
    """Vectors of several arrays as one; what is the same number for all stays one."""
    if not isinstance(values[0], Tensor):
        return values[0]
    return values[0] if len(values) == 1 else torch.cat(list(values))
