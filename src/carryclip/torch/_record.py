"""The pure functions as straight-line programs that write into memory which is there already.

``carryclip.algorithm`` makes a new array with every operation, and fresh memory costs more than what is written to it.
Here its functions run once on symbols. What they did is kept as a short Python function of torch calls, each with an
``out=``: into the gradient and its buffers as soon as what they held is no longer needed, else into scratch memory that
all programs share. ``program.source`` shows it; for ``Component(0.5)`` with its carry it reads

    torch.add(gradient, carry, out=carry)
    torch.clip(carry, -0.5, 0.5, out=gradient)
    torch.sub(carry, gradient, out=carry)

The operations are those of the pure functions, in their order, so the results are the same bit for bit.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from carryclip.torch._namespace import one_by_one, row_squares, squared_norm


class NotRecordableError(Exception):
    """The function asked for something that a program cannot do; the pure function can."""


def _binary(name: str, dtype: torch.dtype | None = None) -> Any:
    """A method that notes an operation with another operand; ``dtype`` is the result's, where it is another one."""
    return lambda self, other: self.tape.operation(name, (self, other), dtype)


class Symbol:
    """An array, or a number known only at each step, in a function that is being recorded."""

    def __init__(self, tape: "Recorder", dtype: torch.dtype | None, base: "Symbol | None" = None) -> None:
        self.tape = tape
        self.dtype: Any = dtype
        """None for a number."""
        self.base = base
        """The array whose memory this is another view of."""
        self.shape = () if dtype is None else ("n",)

    __add__ = __radd__ = _binary("add")
    __sub__ = _binary("sub")
    __mul__ = __rmul__ = _binary("mul")
    __truediv__ = _binary("div")
    __xor__ = _binary("bitwise_xor")
    __rshift__ = _binary("bitwise_right_shift")
    __ge__ = _binary("ge", torch.bool)
    __gt__ = _binary("gt", torch.bool)
    __lt__ = _binary("lt", torch.bool)
    __eq__ = _binary("eq", torch.bool)
    __ne__ = _binary("ne", torch.bool)
    __hash__ = object.__hash__

    def __neg__(self) -> "Symbol":
        return self.tape.operation("neg", (self,))

    def __and__(self, other: Any) -> "Symbol":
        return self if other is True else self.tape.operation("bitwise_and", (self, other))

    __rand__ = __and__

    def __invert__(self) -> "Symbol":
        return self.tape.operation("bitwise_not", (self,)) if self.dtype is not None else self.tape.number("not", self)

    def __bool__(self) -> bool:
        raise NotRecordableError("a choice that depends on values")


class _Line(NamedTuple):
    """One operation: ``name`` of ``operands``; into memory, or as a number if ``result`` is one."""

    name: str
    operands: tuple[Any, ...]
    result: Symbol


_SQUARES = {"squared_norm": squared_norm, "row_squares": row_squares}
_NUMBERS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "ge": ">=", "gt": ">", "lt": "<"}
"""Operations between numbers, as Python writes them."""
_TO_NUMBER = {
    "numel": "float({}.numel())",
    "sum": "{}.sum().item()",
    "row_sum": "{}.sum(1)",
    "amax": "{}.amax().item()",
    "row_squares": "row_squares({})",
    "squared_norm": "squared_norm({}).item()",
    "isfinite": "math.isfinite({})",
    "not": "not {}",
}
"""Operations that make a number of one operand: an array, or another number."""


def _noted(name: str) -> Any:
    """A method that notes an operation of torch's with the same name and arguments."""
    return lambda self, *operands: self.operation(name, operands)


class Recorder:
    """The array namespace that records; one for each program.

    ``TorchNamespace`` says what its functions give. With ``rows`` arrays have two axes, sums are taken along the
    second, and numbers are columns: one for each row.
    """

    finfo = staticmethod(torch.finfo)
    float32 = torch.float32

    def __init__(self, *, rows: bool = False, passes_nan: bool = False) -> None:
        self.lines: list[_Line] = []
        self.rows = rows
        self.passes_nan = passes_nan

    def operation(self, name: str, operands: tuple[Any, ...], dtype: Any = None) -> Any:
        """Note an operation; the result has the type of the arrays that go in, unless told otherwise."""
        arrays = [x for x in operands if isinstance(x, Symbol) and x.dtype is not None]
        if name == "mul" and isinstance(operands[1], float) and operands[1] in (0.0, 1.0):
            if operands[1] == 1.0:
                return operands[0]
            if not arrays:
                return operands[1]
        if not arrays and (name not in _NUMBERS or dtype is not None):
            raise NotRecordableError(f"{name} of numbers")
        kinds = {x.dtype for x in arrays if x.dtype != torch.bool} or {torch.bool}
        if arrays and dtype is None:
            if len(kinds) > 1:
                raise NotRecordableError(f"{name} of arrays of several types")
            dtype = kinds.pop()
        result = Symbol(self, dtype)
        self.lines.append(_Line(name, operands, result))
        return result

    def number(self, name: str, *operands: Any) -> Symbol:
        """Note an operation that makes a number of arrays."""
        result = Symbol(self, None)
        self.lines.append(_Line(name, operands, result))
        return result

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        if isinstance(condition, bool):
            return x if condition else y
        return self.operation("where", (condition, x, y))

    clip = _noted("clip")
    abs = _noted("abs")
    sign = _noted("sign")
    sqrt = _noted("sqrt")
    lerp = _noted("lerp")

    def plus(self, x: Any, y: Any, factor: Any) -> Symbol:
        """The sum x + factor·y, in one pass."""
        return x + y if isinstance(factor, float) and factor == 1.0 else self.operation("plus", (x, y, factor))

    def weighted(self, x: Any, a: Any, y: Any, b: Any) -> Symbol:
        """The sum x·a + y·b, in one pass.

        Where a factor is 0 that pass does not look at what it belongs to, so that NaN would not be passed on.
        """
        if isinstance(b, float) and b == 0.0 and not self.passes_nan:
            return x * a
        if self.rows or self.passes_nan or (isinstance(a, float) and a == 1.0):
            return self.plus(x * a, y, b)
        return self.operation("weighted", (x, a, y, b))

    def between(self, x: Any, a: Any, y: Any, weight: float, scale: Any) -> Symbol:
        """The vector (1 - weight)·a·x + weight·y, times ``scale``, in one pass; x where the rest is 1 and y is x."""
        plain = not isinstance(a, Symbol) and not isinstance(scale, Symbol) and a * scale == 1.0
        if plain or self.rows or self.passes_nan:
            return self.lerp(x * a, y, weight) * scale
        return self.weighted(x, (1.0 - weight) * a * scale, y, weight * scale)

    def isfinite(self, x: Any) -> Any:
        """Which entries are finite: NaN and infinity are not below infinity."""
        if x.dtype is None:
            return self.number("isfinite", x)
        return self.operation("abs", (x,)) < float("inf")

    def astype(self, x: Any, dtype: Any) -> Any:
        return x if not isinstance(x, Symbol) or x.dtype in (None, dtype) else self.operation("copy", (x,), dtype)

    def size(self, x: Symbol) -> Symbol:
        return self.number("numel", x)

    def inner(self, x: Symbol, y: Symbol) -> Symbol:
        """The sum of x·y, added up as accurately as ``TorchNamespace`` does it."""
        if self.rows:
            return self.number("row_squares", x) if x is y else self.number("row_sum", x * y)
        # Not torch.dot: what it gives depends on where arrays begin in memory, and so a resumed run would differ.
        return self.number("squared_norm", x) if x is y else self.number("sum", x * y)

    def sum(self, x: Symbol) -> Symbol:
        return self.number("sum", x)

    def sums(self, terms: Iterable[Any], *, largest: bool) -> list[Symbol]:
        return one_by_one(self, terms, largest=largest)

    def max(self, x: Symbol) -> Symbol:
        return self.number("amax", x)

    def as_bits(self, x: Symbol) -> Symbol:
        return self._view(x, torch.int32)

    def from_bits(self, x: Symbol) -> Symbol:
        return self._view(x, torch.float32)

    def _view(self, x: Symbol, dtype: torch.dtype) -> Symbol:
        result = Symbol(self, dtype, base=x)
        self.lines.append(_Line("view", (x,), result))
        return result

    def positions(self, x: Symbol) -> Symbol:
        return self.operation("arange", (x,), torch.int32)


class Program(NamedTuple):
    """What was recorded: call it with the arrays and numbers it was recorded with, then memory for its scratch."""

    run: Callable[..., Any]
    scratch: list[torch.dtype]
    """Types of the arrays it needs beside its own."""
    source: str


def record(
    function: Callable[..., tuple[dict[str, Any], Any]],
    arrays: dict[str, torch.dtype],
    numbers: Sequence[str],
    *,
    rows: bool = False,
    passes_nan: bool = False,
) -> tuple[Program, Any]:
    """Make a program of ``function(xp, arrays, numbers)``, which gets symbols by name.

    The function returns what some of the arrays are to hold afterwards, by name, and a structure of results. With the
    program comes that structure; ``filled`` puts into it what the program returns.
    """
    tape = Recorder(rows=rows, passes_nan=passes_nan)
    symbols = {name: Symbol(tape, dtype) for name, dtype in arrays.items()}
    given = {name: Symbol(tape, None) for name in numbers}
    finals, results = function(tape, symbols, given)
    return _Writer(tape, symbols, given, finals, results).program(), results


def _needed(lines: list[_Line], finals: Iterable[Symbol], results: Any) -> list[_Line]:
    """The lines without those whose result nobody asks for."""
    wanted = {_root(x) for x in [*finals, *_flat(results)] if isinstance(x, Symbol)}
    kept: list[_Line] = []
    for line in reversed(lines):
        if _root(line.result) in wanted or line.result in wanted:
            kept.append(line)
            wanted |= {_root(x) for x in _symbols(line)}
    return kept[::-1]


def _ordered(lines: list[_Line], arrays: dict[str, Symbol], finals: dict[str, Symbol]) -> list[_Line]:
    """The lines in an order in which arrays get their last value after all others have read the first one.

    Otherwise that would have to wait in scratch memory and be copied.
    """
    uses: dict[Symbol, int] = {}
    for line in lines:
        for x in {_root(x) for x in _symbols(line)}:
            uses[x] = uses.get(x, 0) + 1
    old = {symbol: arrays[name] for name, symbol in finals.items()}
    made = set(arrays.values())
    ordered: list[_Line] = []
    left = list(lines)

    def blocked(line: _Line) -> bool:
        first = old.get(line.result)
        if first is None:
            return False
        own = any(first is _root(x) for x in _symbols(line))
        return uses.get(first, 0) > own

    while left:
        ready = [line for line in left if all(x in made for x in _symbols(line))]
        line = next((line for line in ready if not blocked(line)), ready[0])
        left = [other for other in left if other is not line]
        ordered.append(line)
        made.add(line.result)
        for x in {_root(x) for x in _symbols(line)}:
            uses[x] -= 1
    return ordered


class _Writer:
    """Gives every symbol a place in memory, and writes the program down."""

    def __init__(
        self,
        tape: Recorder,
        arrays: dict[str, Symbol],
        numbers: dict[str, Symbol],
        finals: dict[str, Symbol],
        results: Any,
    ) -> None:
        self.arrays, self.numbers, self.finals, self.results = arrays, numbers, finals, results
        self.rows = tape.rows
        needed = _needed(tape.lines, finals.values(), results)
        self.lines = _ordered(needed, {**arrays, **numbers}, finals)
        self.names: dict[Symbol, str] = {symbol: name for name, symbol in (arrays | numbers).items()}
        self.scratch: list[torch.dtype] = []
        self.constants: dict[str, Any] = {}
        self.code: list[str] = []
        self.home = {symbol: name for name, symbol in finals.items()}
        """The array that a symbol is to end up in."""
        self.last_use: dict[Symbol, int] = {}
        for k, line in enumerate(self.lines):
            for operand in line.operands:
                if isinstance(operand, Symbol):
                    self.last_use[_root(operand)] = k
        for symbol in finals.values():
            self.last_use[_root(symbol)] = len(self.lines)
        self.born = {line.result: k for k, line in enumerate(self.lines)}
        self.occupant: dict[str, Symbol] = dict(arrays)
        self.kinds = {name: symbol.dtype for name, symbol in arrays.items()}

    def program(self) -> Program:
        """Write it."""
        for k, line in enumerate(self.lines):
            self._write(k, line)
        for name, symbol in self.finals.items():
            if self.names[symbol] != name:
                self.code.append(f"{name}.copy_({self.names[symbol]})")
        found = [x for x in _flat(self.results) if isinstance(x, Symbol)]
        self.code.append(f"return ({''.join(self.names[x] + ', ' for x in found)})")
        slots = [f"s{k}" for k in range(len(self.scratch))]
        head = f"def program({', '.join([*self.arrays, *self.numbers, *slots])}):"
        source = "\n    ".join([head, *self.code]) + "\n"
        scope: dict[str, Any] = {"torch": torch, "math": math, **_SQUARES, **self.constants}
        exec(compile(source, "<carryclip program>", "exec"), scope)
        return Program(scope["program"], self.scratch, source)

    def _write(self, k: int, line: _Line) -> None:
        words = [self._word(x, line) for x in line.operands]
        result = line.result
        if result.dtype is None:
            self.names[result] = f"n{k}"
            between = line.name in _NUMBERS
            number = f" {_NUMBERS[line.name]} ".join(words) if between else _TO_NUMBER[line.name].format(*words)
            self.code.append(f"n{k} = {number}")
            return
        if line.name == "view":
            self.names[result] = f"v{k}"
            self.code.append(f"v{k} = {words[0]}.view({result.dtype})")
            return
        place = self._place(k, line)
        self.names[result] = place
        if line.name == "copy":
            self.code.append(f"{place}.copy_({words[0]})")
        elif line.name == "plus" and self.rows and isinstance(line.operands[2], Symbol):
            self.code.append(f"torch.addcmul({words[0]}, {words[1]}, {words[2]}, out={place})")
        elif line.name == "plus":
            self.code.append(f"torch.add({words[0]}, {words[1]}, alpha={words[2]}, out={place})")
        elif line.name == "weighted":
            # An outer product with (1): the only operation of torch's that multiplies both terms of a sum.
            x, a, y, b = words
            one = self._constant(torch.ones(1, dtype=result.dtype))
            self.code.append(f"torch.addr({y}.view(-1, 1), {x}, {one}, beta={b}, alpha={a}, out={place}.view(-1, 1))")
        elif line.name == "arange":
            self.code.append(f"torch.arange({words[0]}.numel(), dtype={result.dtype}, out={place})")
        else:
            self.code.append(f"torch.{line.name}({', '.join(words)}, out={place})")

    def _word(self, operand: Any, line: _Line) -> str:
        """How an operand is written; ``torch.where`` takes no bare numbers where there is an ``out=``."""
        if isinstance(operand, Symbol):
            return self.names[operand]
        if line.name == "where" and isinstance(operand, (int, float)):
            return self._constant(torch.tensor(operand, dtype=line.result.dtype))
        if isinstance(operand, Real) and not isinstance(operand, int):
            operand = float(operand)  # NumPy's numbers have names of their own
            return repr(operand) if math.isfinite(operand) else f'float("{operand}")'
        return repr(operand)

    def _constant(self, value: torch.Tensor) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _place(self, k: int, line: _Line) -> str:
        """Memory for the result: its own array, that of an operand which is not needed any more, or scratch."""
        result = line.result
        free = [
            name
            for name, symbol in self.occupant.items()
            if self.last_use.get(symbol, -1) <= k and self.kinds[name] == result.dtype
        ]
        wanted = self.home.get(result)
        if wanted in free:
            return self._take(wanted, result)
        dying = [self.names[_root(x)] for x in line.operands if isinstance(x, Symbol) and _root(x).dtype is not None]
        for name in [*(name for name in dying if name in free), *free]:
            if self._may_hold(name, result):
                return self._take(name, result)
        name = f"s{len(self.scratch)}"
        self.scratch.append(result.dtype)
        self.kinds[name] = result.dtype
        return self._take(name, result)

    def _may_hold(self, name: str, result: Symbol) -> bool:
        """An array that gets a value at the end may hold another one only until that is made."""
        if name not in self.finals:
            return name not in self.arrays
        final = self.finals[name]
        return final is not self.arrays[name] and self.last_use.get(result, -1) <= self.born.get(final, -1)

    def _take(self, name: str, result: Symbol) -> str:
        self.occupant[name] = result
        return name


def _symbols(line: _Line) -> list[Symbol]:
    return [x for x in line.operands if isinstance(x, Symbol)]


def _root(symbol: Symbol) -> Symbol:
    while symbol.base is not None:
        symbol = symbol.base
    return symbol


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [x for entry in value for x in _flat(entry)]
    return [value]


def filled(results: Any, values: Sequence[Any]) -> Any:
    """The structure of results that a function returned, with what its program returned in place of symbols."""
    left = iter(values)

    def fill(value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return value._make([fill(entry) for entry in value])  # type: ignore[attr-defined]
        if isinstance(value, (list, tuple)):
            return type(value)(fill(entry) for entry in value)
        return next(left) if isinstance(value, Symbol) else value

    return fill(results)
