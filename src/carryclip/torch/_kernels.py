"""What is done to a bundle, behind one signature: ``measure`` its arrays, then ``apply`` the step to them.

    Pure       the functions of ``carryclip.algorithm`` as they are: any rule, any array
    Recorded   the same functions as programs that write in place: flat arrays on the CPU, where values can be read
    Listed     constant regions on a device: each line is one launch for a whole list of tensors
    Compiled   the same functions through ``torch.compile``: large arrays, on request

``Kernel`` says what each must do. Those for rows are in ``_rows``, and ``Kernels`` there takes the first that suits, so
that one more is a class here and an entry there; the battery proves each of them equal to the reference.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as end_to_end
from torch._utils import _unflatten_dense_tensors as in_shape

from carryclip.algorithm import Age, Buffers, Rule, age, apply, measure
from carryclip.diagnosis import Diagnosis
from carryclip.policy import Scaling, Sums
from carryclip.precision import truncate
from carryclip.regions import Component
from carryclip.torch import _compiled
from carryclip.torch._bundles import Bundle, Case, Tuning
from carryclip.torch._compiled import NotCompiledError
from carryclip.torch._namespace import xp
from carryclip.torch._pack import Piece
from carryclip.torch._record import NotRecordableError, Program, filled, record

NO_AGE = Age()
"""Of arrays whose samples nobody counts."""


class Told(NamedTuple):
    """What a kernel has to tell of a bundle after a step; None where it was not asked for."""

    dropped_sq: Any = None
    diagnosis: Diagnosis | None = None


class Call(NamedTuple):
    """What a kernel needs to know of a step."""

    step: int
    scaling: Scaling | None
    """The scalars of the bundle's scope; None if it has none."""
    skip: Tensor | None
    """Boolean that cancels the step, where it cannot be read; None if the step counts."""
    write: bool
    """False: leave the gradients as they are."""
    tally: bool
    inspect: bool


class Kernel(Protocol):
    """What is asked of a kernel. It writes gradients and buffers, but never counts samples, and decides nothing."""

    whole: bool
    """True if it takes tensors in their own shapes; otherwise they come flat, small ones end to end."""

    def suits(self, case: Case) -> bool:
        """Whether it can do this."""
        ...

    def stretch(self, case: Case, tuning: Tuning) -> int:
        """How many entries of a large tensor it wants at a time; 0 for all."""
        ...

    def measure(self, bundle: Bundle, arrays: list[Tensor], *, clear: bool, inspect: bool) -> Sums:
        """The sums of all arrays together, before anybody has written; ``clear`` says that the carry is 0.

        Numbers on the host, else scalars on the device; ``bad`` is then a flag for each piece. Buffers must stay as
        they are, since the step may yet be skipped. Gradients may change, unless the step is inspected, if ``apply``
        knows what to make of them.
        """
        ...

    def apply(self, bundle: Bundle, arrays: list[Tensor], call: Call) -> Told:
        """Write updates and buffers; where ``call.skip`` turns out true, zeros and nothing."""
        ...


class Pure:
    """The pure functions on each piece."""

    whole = False

    def suits(self, case: Case) -> bool:
        return True

    def stretch(self, case: Case, tuning: Tuning) -> int:
        """On the host what stays in the cache: a gradient and one buffer, or fewer entries of more arrays."""
        if not case.host:
            return 0
        arrays = 1 + sum(name != "count" for name in case.rule.buffers)
        return max(2 * tuning.chunk // max(arrays, 2), 1)

    def measure(self, bundle: Bundle, arrays: list[Tensor], *, clear: bool, inspect: bool) -> Sums:
        pairs = zip(bundle.pieces, arrays, strict=True)
        return _added([self.measure_one(bundle, piece, array, clear) for piece, array in pairs])

    def measure_one(self, bundle: Bundle, piece: Piece, array: Tensor, clear: bool) -> Sums:
        rule = bundle.rule
        clock = None
        if rule.has_scope and not rule.region.joint:
            clock = age(xp, rule, _spread_out(piece), bundle.dtype)
        given = array, _to_measure(rule, piece, clear), bundle.dtype, bundle.unit
        return measure(self.space(bundle), rule, *given, sizes=piece.sizes or bundle.sizes, clock=clock)

    def apply(self, bundle: Bundle, arrays: list[Tensor], call: Call) -> Told:
        clocks: dict[int, Age] = {}
        told = []
        for piece, array in zip(bundle.pieces, arrays, strict=True):
            count = piece.buffers.count
            clock = clocks.get(id(count))
            if clock is None:
                clock = clocks[id(count)] = age(xp, bundle.rule, _spread_out(piece), bundle.dtype)
            told.append(self.apply_one(bundle, piece, array, call, clock))
        return _told(told)

    def apply_one(self, bundle: Bundle, piece: Piece, array: Tensor, call: Call, clock: Age) -> Told:
        skip = None if call.skip is None else call.skip.to(array.device, non_blocking=True)
        given = array, piece.buffers, piece.sizes or bundle.sizes, call.scaling, skip, bundle.dtype
        how = {"clock": clock, "seed": _seed(bundle, piece, call.step), "tally": call.tally, "inspect": call.inspect}
        outcome = apply(self.space(bundle), bundle.rule, *given, **how)
        if call.write:
            array.copy_(outcome.update)
        for k, new in enumerate(outcome.buffers[:-1]):
            if new is None:
                continue
            if piece.rows is None:
                piece.buffers[k].copy_(new)
            else:
                piece.rows.stored[k].index_put_(piece.rows.rows, new)
        return Told(outcome.dropped_sq, outcome.diagnosis)

    def space(self, bundle: Bundle) -> Any:
        """The array namespace."""
        return xp


class Compiled(Pure):
    """The pure functions through ``torch.compile``; without a compiler that works, as they are."""

    def suits(self, case: Case) -> bool:
        return case.large

    def stretch(self, case: Case, tuning: Tuning) -> int:
        """All; but one that measures coordinates keeps arrays in between, and so must see fewer at a time."""
        return tuning.chunk // 2 if case.host and case.inspect and not case.rule.region.joint else 0

    def measure_one(self, bundle: Bundle, piece: Piece, array: Tensor, clear: bool) -> Sums:
        rule = bundle.rule
        if not rule.has_scope or bundle.unit != 1.0:
            return super().measure_one(bundle, piece, array, clear)
        sizes = piece.sizes or bundle.sizes
        clock = NO_AGE if rule.region.joint else age(xp, rule, _spread_out(piece), bundle.dtype)
        try:
            return _compiled.measured(rule, array, _to_measure(rule, piece, clear), bundle.dtype, sizes, clock)
        except NotCompiledError:
            return super().measure_one(bundle, piece, array, clear)

    def apply_one(self, bundle: Bundle, piece: Piece, array: Tensor, call: Call, clock: Age) -> Told:
        skip = None if call.skip is None else call.skip.to(array.device, non_blocking=True)
        given = array, piece.buffers, piece.sizes or bundle.sizes, call.scaling, skip, bundle.dtype
        how = {"clock": clock, "tally": call.tally, "inspect": call.inspect, "write": call.write}
        try:
            return Told(*_compiled.applied(bundle.rule, *given, **how, seed=_seed(bundle, piece, call.step)))
        except NotCompiledError:
            return super().apply_one(bundle, piece, array, call, clock)


class Recorded(Pure):
    """Programs made of the pure functions, on the CPU, where numbers can be looked at for nothing; see ``_record``."""

    def __init__(self) -> None:
        self._programs: dict[Any, Any] = {}
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}
        """Memory that programs leave to the next ones."""

    def suits(self, case: Case) -> bool:
        return case.host

    def forget(self) -> None:
        """Rules are others from now on."""
        self._programs.clear()

    def measure(self, bundle: Bundle, arrays: list[Tensor], *, clear: bool, inspect: bool) -> Sums:
        rule = bundle.rule
        if not rule.has_scope:
            bundle.tame, bad = _looked_at(arrays, bundle.dtype) if rule.can_reject else (False, None)
            return Sums(bad=bad)
        if not rule.region.joint:
            return self._measure_coordinates(bundle, arrays)
        read = ("carry",) if rule.policy.carries and (rule.policy.gated or not clear) else ()
        pairs = zip(bundle.pieces, arrays, strict=True)
        sums = _summed([self.sums_of(bundle, piece, array, read) for piece, array in pairs])
        if not read and (rule.policy.gated or rule.policy.mixes):
            sums |= {"carry_sq": 0.0, "dot": 0.0}
        # Where the pure functions add up, in the type of the buffers, this would have overflowed.
        if sums["total_sq"] > torch.finfo(bundle.dtype).max:
            sums["total_sq"] = math.inf
        return Sums(not math.isfinite(sums["total_sq"]), **sums)

    def _measure_coordinates(self, bundle: Bundle, arrays: list[Tensor]) -> Sums:
        """The sums of what is clipped coordinate by coordinate, and whether its entries are tame."""
        rule, clocks, parts = bundle.rule, {}, []
        bundle.tame, bad = True, False
        for piece, array in zip(bundle.pieces, arrays, strict=True):
            # The sums hold entries within the policy's reach, so they cannot tell what is infinite.
            tame, not_finite = _looked_at([array], bundle.dtype)
            bundle.tame, bad = bundle.tame and tame, bad or not_finite
            clock = self._clock(bundle, piece, clocks) if "count" in rule.buffers else NO_AGE
            sizes = piece.sizes or bundle.sizes
            found = None
            if tame and clock is not None and all([isinstance(size, float) for size in sizes]):
                found = self.sums_of(bundle, piece, array, _read_to_measure(rule), sizes, clock)
            if found is None:
                sums = self.measure_one(bundle, piece, array, False)._asdict()
                found = {name: x.item() for name, x in sums.items() if name in rule.measures}
            parts.append(found)
        return Sums(bad if rule.can_reject else None, **_summed(parts))

    def sums_of(
        self,
        bundle: Bundle,
        piece: Piece,
        array: Tensor,
        read: tuple[str, ...],
        sizes: tuple[float, ...] = (),
        clock: Age = NO_AGE,
        *,
        rows: bool = False,
    ) -> Any:
        """The sums of one piece, by name, from a program that reads these buffers; None if there can be none."""
        key = "measure", id(bundle.rule), bundle.narrow, bundle.unit, read, sizes, clock.warm
        made = self.program(key, partial(measure_of, rows=rows), bundle, read, sizes, clock)
        if made is None:
            return None
        program, names = made
        stored = [getattr(piece.buffers, name) for name in read]
        times = [x for x in (clock.share, clock.factor) if x is not None]
        return dict(zip(names, program.run(array, *stored, *times, *self.room(program, array)), strict=True))

    def apply(self, bundle: Bundle, arrays: list[Tensor], call: Call) -> Told:
        averages, clocks, told = "count" in bundle.rule.buffers, {}, []
        clock: Age | None = NO_AGE
        for piece, array in zip(bundle.pieces, arrays, strict=True):
            if averages:
                clock = self._clock(bundle, piece, clocks)
            found = None if clock is None else self._replay(bundle, piece, array, call, clock)
            if found is None:
                clock = age(xp, bundle.rule, _spread_out(piece), bundle.dtype)
                found = self.apply_one(bundle, piece, array, call, clock)
            told.append(found)
        return _told(told)

    def _replay(self, bundle: Bundle, piece: Piece, array: Tensor, call: Call, clock: Age) -> Told | None:
        """Run the program for one piece; None if there can be none."""
        # Under a norm the scaling says it all.
        sizes = (1.0,) if bundle.rule.region.joint else piece.sizes or bundle.sizes
        scalars, names = _scalars(bundle.rule, call.scaling)
        if not all([isinstance(size, float) for size in sizes]):
            return None
        plain = call.write, call.tally, call.inspect, bundle.tame, clock.warm, names
        made = self.program(
            (id(bundle.rule), bundle.narrow, sizes, *plain), apply_of, bundle, call, sizes, clock, names
        )
        if made is None:
            return None
        program, shape = made
        given = [array, *[x for x in piece.buffers[:-1] if x is not None], *scalars]
        given += [x for x in (clock.share, clock.factor, clock.gate) if x is not None]
        if bundle.rounds:
            given.append(piece.seed(call.step))
        values = program.run(*given, *self.room(program, array))
        return filled(shape, values) if values else Told()

    def _clock(self, bundle: Bundle, piece: Piece, known: dict[int, Age]) -> Age | None:
        """What follows from the count of samples, as numbers; None if it differs between the tensors of a piece."""
        counts = piece.buffers.count.reshape(-1).tolist()
        count = counts[0]
        if any(other != count for other in counts):
            return None
        if count not in known:
            found = age(xp, bundle.rule, torch.tensor(count), bundle.dtype)
            known[count] = Age(*(None if x is None else x.item() for x in found))
        return known[count]

    def program(self, key: Any, recorder: Callable[..., Any], *given: Any) -> Any:
        """A program and the structure of what it returns; None if there can be none."""
        if key not in self._programs:
            if len(self._programs) >= 64:  # a schedule makes another one at every step
                self._programs.clear()
            try:
                self._programs[key] = recorder(*given)
            except NotRecordableError:
                self._programs[key] = None
        return self._programs[key]

    def room(self, program: Program, array: Tensor) -> list[Tensor]:
        """Scratch memory for an array of this length."""
        count, found = array.numel(), []
        for k, dtype in enumerate(program.scratch):
            kept = self._scratch.get((dtype, k))
            if kept is None or kept.numel() < count or kept.is_inference() != torch.is_inference_mode_enabled():
                kept = self._scratch[dtype, k] = torch.empty(count, dtype=dtype)
            found.append(kept[:count].view(array.shape))
        return found


def _looked_at(arrays: list[Tensor], dtype: torch.dtype) -> tuple[bool, bool]:
    """(all entries are finite and small, some are not finite).

    A finite sum of squares tells the first at the speed of memory; only if it is not finite, or huge, a closer look is
    needed: a finite 1e25 is no reason to skip a step.
    """
    limit = torch.finfo(dtype).max / 64
    tame, bad = True, False
    for array in arrays:
        if array.dtype == dtype and torch.dot(array, array).item() <= limit:
            continue
        low, high = (x.item() for x in torch.aminmax(array))
        bad = bad or not (math.isfinite(low) and math.isfinite(high))
        tame = tame and max(-low, high) <= limit**0.5
    return tame and not bad, bad


def _to_measure(rule: Rule, piece: Piece, clear: bool) -> Buffers:
    """The buffers of a piece, without a carry that is known to be 0 where that need not be read."""
    return piece.buffers._replace(carry=None) if clear and "dot" not in rule.measures else piece.buffers


def _summed(parts: list[dict[str, float]]) -> dict[str, Any]:
    """The sums of several pieces, by name."""
    if len(parts) == 1:
        return parts[0]
    return {name: sum([part[name] for part in parts]) for name in parts[0]}


def _read_to_measure(rule: Rule) -> tuple[str, ...]:
    """The buffers that are read to measure what is clipped coordinate by coordinate."""
    read = ("mean", "second") + (("carry",) if rule.policy.noisy else ())
    return tuple([name for name in rule.buffers if name in read])


def measure_of(
    bundle: Bundle, read: tuple[str, ...], sizes: tuple[float, ...], clock: Age, *, rows: bool = False
) -> tuple[Program, list[str]]:
    """``measure`` as a program, and the names of the sums it returns; of coordinates if entries are tame."""
    arrays = {"gradient": bundle.narrow} | {name: _kind(bundle, name) for name in read}
    times = [name for name in ("share", "factor") if getattr(clock, name) is not None]

    def function(tape: Any, symbols: dict[str, Any], numbers: dict[str, Any]) -> Any:
        own = Buffers(**{name: symbols[name] for name in read})
        now = Age(warm=clock.warm, **{name: numbers[name] for name in times})
        how = {"sizes": sizes, "clock": now, "tame": True}
        sums = measure(tape, bundle.rule, symbols["gradient"], own, bundle.dtype, bundle.unit, **how)
        return {}, sums._replace(bad=None)

    program, sums = record(function, arrays, times, rows=rows)
    return program, [name for name in Sums._fields if getattr(sums, name) is not None]


_FACTORS = ("scale", "keep", "base", "taken", "back", "held")
"""The scalars that arrays are multiplied with."""


def _scalars(rule: Rule, scaling: Scaling | None) -> tuple[list[float], tuple[Any, ...]]:
    """The scalars that a program is given, and the names of all; one that is 1 or 0 stands for itself as (name, 1)."""
    if scaling is None:
        return [], ()
    if not rule.policy.mixes:
        return ([scaling.scale], ("scale",)) if scaling.keep is None else ([scaling.scale, scaling.keep], _FACTORS[:2])
    values, names = [], []
    for name in _FACTORS:
        value = getattr(scaling, name)
        if value is None:
            continue
        # Often so, and then there is nothing to multiply, or to add; but NaN times 0 is NaN.
        if value == 1.0 or (value == 0.0 and rule.nonfinite != "propagate"):
            names.append((name, value))
        else:
            values.append(value)
            names.append(name)
    return values, tuple(names)


def apply_of(
    bundle: Bundle,
    call: Call,
    sizes: tuple[float, ...],
    clock: Age,
    given: tuple[Any, ...],
    *,
    rows: bool = False,
) -> tuple[Program, Any]:
    """``apply`` as a program."""
    rule, names = bundle.rule, [name for name in bundle.rule.buffers if name != "count"]
    arrays = {"gradient": bundle.narrow} | {name: _kind(bundle, name) for name in Buffers._fields if name in names}
    scalars = [name for name in given if isinstance(name, str)]
    fixed = dict(name for name in given if not isinstance(name, str))
    times = [name for name in ("share", "factor", "gate") if getattr(clock, name) is not None]

    def function(tape: Any, symbols: dict[str, Any], numbers: dict[str, Any]) -> Any:
        own = Buffers(**{name: symbols[name] for name in names})
        scaling = Scaling(**{name: numbers[name] for name in scalars}, **fixed) if given else None
        own_clock = Age(warm=clock.warm, **{name: numbers[name] for name in times})
        how = {"clock": own_clock, "seed": numbers.get("seed"), "tally": call.tally, "inspect": call.inspect}
        gradient = symbols["gradient"]
        outcome = apply(tape, rule, gradient, own, sizes, scaling, None, bundle.dtype, tame=bundle.tame, **how)
        finals = {name: getattr(outcome.buffers, name) for name in names}
        if call.write:
            finals["gradient"] = outcome.update
        return finals, Told(outcome.dropped_sq, outcome.diagnosis)

    numbers = [*scalars, *times, *(["seed"] if bundle.rounds else [])]
    return record(function, arrays, numbers, rows=rows, passes_nan=rule.nonfinite == "propagate")


def _kind(bundle: Bundle, name: str) -> torch.dtype:
    """The type a buffer is stored in."""
    return getattr(bundle.pieces[0].buffers, name).dtype


class Listed:
    """``Component`` and ``Norm`` on lists of tensors, where values cannot be read: each line is one launch for a list.

    A step that must not count is undone by arithmetic: its gradients become 0, and so does all that is taken from them.
    """

    whole = True

    def suits(self, case: Case) -> bool:
        """Without a second look at coordinates, entries to make 0, an error to raise before writing or a conversion."""
        rule, radius = case.rule, case.sizes[0]
        simple = rule.region.joint or (type(rule.region) is Component and isinstance(rule.carry, bool))
        plain = isinstance(radius, float) and rule.unit(case.sizes) == 1.0
        exact = case.narrow in (torch.float32, torch.float64) and not case.rounds
        return simple and plain and exact and case.write and rule.nonfinite in ("skip", "propagate")

    def stretch(self, case: Case, tuning: Tuning) -> int:
        return 0

    def measure(self, bundle: Bundle, arrays: list[Tensor], *, clear: bool, inspect: bool) -> Sums:
        """The sums. Under a norm the gradients hold g + carry afterwards, because that would need memory of its own.

        A step that is inspected needs the gradients as they were, and makes the sums part by part.
        """
        rule = bundle.rule
        if not rule.region.joint:
            return Sums(bad=_flags(arrays)) if rule.can_reject else Sums()
        carry_sq = dot = None
        if not rule.policy.carries:
            squares = _squares(arrays)
            return Sums(~torch.isfinite(squares), squares.sum())
        grad_sq = _squares(arrays).sum() if rule.measures_gradient else None
        carries = [piece.buffers.carry for piece in bundle.pieces]
        if "dot" in rule.measures:
            carry_sq = _squares(carries).sum()
            pairs = _slices(arrays, carries)
            dot = torch.stack([end_to_end(torch._foreach_mul(some, owed)).sum() for some, owed in pairs]).sum()
        if rule.policy.mixes:
            squares = _squares(arrays)
        elif inspect:
            squares = torch.cat([_squares(torch._foreach_add(some, owed)) for some, owed in _slices(arrays, carries)])
        else:
            torch._foreach_add_(arrays, carries)
            squares = _squares(arrays)
        return Sums(~torch.isfinite(squares), squares.sum(), carry_sq, dot, grad_sq=grad_sq)

    def apply(self, bundle: Bundle, arrays: list[Tensor], call: Call) -> Told:
        carries = [piece.buffers.carry for piece in bundle.pieces] if bundle.rule.policy.carries else []
        keep = None if call.skip is None else (~call.skip).to(arrays[0].device, bundle.dtype, non_blocking=True)
        if call.inspect:
            return self._inspected(bundle, arrays, carries, call)
        if keep is not None:
            _multiply_bits(arrays, keep)
        if call.scaling is None:
            return self._clip(bundle, arrays, carries, call, keep)
        if bundle.rule.policy.mixes:
            return self._mix(bundle, arrays, carries, call.scaling, call.skip)
        scale, share = call.scaling.scale, call.scaling.keep
        if keep is not None:
            scale = torch.where(keep > 0, scale, 0.0)
        if carries and keep is not None:
            torch._foreach_mul_(carries, 1.0 - keep)
            torch._foreach_add_(carries, arrays)
        elif carries:
            torch._foreach_copy_(carries, arrays)
        torch._foreach_mul_(arrays, scale)
        if carries:
            torch._foreach_sub_(carries, arrays)
            if share is not None:
                share = share if isinstance(share, Tensor) or keep is None else torch.full_like(keep, share)
                torch._foreach_mul_(carries, share if keep is None else torch.where(keep > 0, share, 1.0))
        return Told()

    @staticmethod
    def _mix(
        bundle: Bundle, arrays: list[Tensor], carries: list[Tensor], scaling: Scaling, skip: Tensor | None
    ) -> Told:
        """What a policy mixes, part by part."""
        policy = bundle.rule.policy
        if skip is not None:  # then gradients are 0 by now; with these nothing is sent, and the carry stays
            skip = skip.to(arrays[0].device, non_blocking=True)
            keep = None if scaling.keep is None else torch.where(skip, 1.0, scaling.keep)
            held = None if scaling.held is None else torch.where(skip, 1.0, scaling.held)
            scaling = scaling._replace(scale=torch.where(skip, 0.0, scaling.scale), keep=keep, held=held)
        for some, owed in _slices(arrays, carries):
            update, left = policy.mix(_Lists, _List(some), _List(owed), scaling)
            policy.left(_Lists, left, update, scaling)
        return Told()

    @staticmethod
    def _clip(bundle: Bundle, arrays: list[Tensor], carries: list[Tensor], call: Call, keep: Tensor | None) -> Told:
        """Clip each coordinate."""
        largest = torch.finfo(bundle.dtype).max
        limit = truncate(bundle.sizes[0], torch.finfo(bundle.narrow))
        if bundle.rule.nonfinite != "propagate":
            limit = min(limit, largest)
        if not carries:
            lost = []
            for (some,) in _slices(arrays) if call.tally else ():
                rest = [part - part.clamp(-limit, limit) for part in [end_to_end(some)]]
                lost.append(xp.inner(rest[0].clamp(-(largest**0.5) / 4, largest**0.5 / 4), rest[0]))
            _clamp(arrays, limit)
            return Told(torch.stack(lost).sum() if lost else None)
        torch._foreach_add_(carries, arrays)
        if keep is not None:
            _clamp(carries, largest)  # two huge finite numbers may add up to inf
        torch._foreach_copy_(arrays, carries)
        _clamp(arrays, limit)
        if keep is not None:
            torch._foreach_mul_(arrays, keep)
        torch._foreach_sub_(carries, arrays)
        return Told()

    @staticmethod
    def _inspected(bundle: Bundle, arrays: list[Tensor], carries: list[Tensor], call: Call) -> Told:
        """The same through the pure function, which also measures; several tensors at a time, end to end."""
        told = []
        for some, owed in _slices(arrays, carries or arrays):
            gradient = end_to_end(some)
            carry = end_to_end(owed) if carries else None
            given = gradient, Buffers(carry), bundle.sizes, call.scaling, call.skip, bundle.dtype
            outcome = apply(xp, bundle.rule, *given, tally=call.tally, inspect=True)
            torch._foreach_copy_(some, in_shape(outcome.update, some))
            if carry is not None:
                torch._foreach_copy_(owed, in_shape(outcome.buffers.carry, owed))
            told.append(Told(outcome.dropped_sq, outcome.diagnosis))
        return _told(told)


class _List:
    """Tensors of any shapes as one operand, one launch for all. Every operation overwrites the first operand.

    ``Policy.mix`` and ``left`` read no first operand again, so that gradients become updates, and carries the new ones,
    in the memory they are in.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __mul__(self, factor: Any) -> "_List":
        torch._foreach_mul_(self.tensors, factor)
        return self

    def __sub__(self, other: "_List") -> "_List":
        torch._foreach_sub_(self.tensors, other.tensors)
        return self


class _Lists:
    """The array functions that ``Policy.mix`` and ``left`` need, for such lists."""

    @staticmethod
    def plus(x: _List, y: _List, factor: Any) -> _List:
        """The sum x + factor·y."""
        torch._foreach_add_(x.tensors, torch._foreach_mul(y.tensors, factor))
        return x

    @staticmethod
    def weighted(x: _List, a: Any, y: _List, b: Any) -> _List:
        """The sum x·a + y·b."""
        return _Lists.plus(x * a, y, b)

    @staticmethod
    def between(x: _List, a: Any, y: _List, weight: float, scale: Any) -> _List:
        """The vector (1 - weight)·a·x + weight·y, times ``scale``."""
        torch._foreach_lerp_((x * a).tensors, y.tensors, weight)
        return x * scale


def _slices(*lists: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """The lists in at most a score of parts, so that what is made of one is small beside the whole."""
    counts = [tensor.numel() for tensor in lists[0]]
    most = max([1 << 20, sum(counts) // 20, *counts])
    start, filled_up = 0, 0
    for k, count in enumerate(counts):
        if filled_up + count > most and k > start:
            yield tuple(list(each[start:k]) for each in lists)
            start, filled_up = k, 0
        filled_up += count
    yield tuple(list(each[start:]) for each in lists)


def _flags(tensors: list[Tensor]) -> Tensor:
    """Which of the tensors are not finite, for all at once."""
    return ~torch.isfinite(torch.stack(torch._foreach_norm(tensors, math.inf)))


def _squares(tensors: Any) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).square()


def _clamp(tensors: list[Tensor], limit: float) -> None:
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _multiply_bits(tensors: list[Tensor], keep: Tensor) -> None:
    """Leave numbers as they are or make them 0, whatever they are: NaN·0 would be NaN, but bits know nothing of it."""
    kind = _BITS[tensors[0].element_size()]
    torch._foreach_mul_([tensor.view(kind) for tensor in tensors], keep.to(kind))


def _added(parts: list[Sums]) -> Sums:
    """The sums of several arrays; one flag for each of them."""
    if len(parts) == 1:
        return parts[0]

    def column(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.stack(values)

    bad, *rest = (column(name) for name in Sums._fields)
    return Sums(bad, *(None if x is None else x.sum() for x in rest))


def _told(parts: list[Told]) -> Told:
    """What several arrays have to tell, as one."""
    if len(parts) == 1:
        return parts[0]
    dropped = [part.dropped_sq for part in parts if part.dropped_sq is not None]
    diagnoses = [part.diagnosis for part in parts if part.diagnosis is not None]
    diagnosis = None
    if diagnoses:
        *sums, ratios = zip(*diagnoses, strict=True)
        worst = ratios[0]
        for other in ratios[1:]:
            tensors = isinstance(worst, Tensor) and isinstance(other, Tensor)
            worst = torch.maximum(worst, other) if tensors else max(worst, other)
        diagnosis = Diagnosis._make([*(xp.total(column) for column in sums), worst])
    return Told(xp.total(dropped) if dropped else None, diagnosis)


def _spread_out(piece: Piece) -> Any:
    """The count of samples of each entry where several tensors lie end to end; else one for all."""
    count = piece.buffers.count
    if count is None or len(piece.leaves) == 1:
        return count
    lengths = torch.tensor([leaf.param.numel() for leaf in piece.leaves], device=count.device)
    return torch.repeat_interleave(count, lengths, output_size=sum(leaf.param.numel() for leaf in piece.leaves))


def _seed(bundle: Bundle, piece: Piece, step: int) -> int | None:
    return piece.seed(step) if bundle.rounds else None
