"""``measure`` and ``apply`` as compiled functions: one loop over memory for each array.

A function is compiled for a kind of rule and a type, never for a list of parameters. Arrays come as vectors of any
length and radii as tensors, so that neither another model nor a schedule compiles anew.
"""

import dataclasses
import functools
import logging
import re
import types
import warnings
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from torch import Tensor

from carryclip.algorithm import Age, Buffers, Rule, apply, measure
from carryclip.policy import Scaling, Sums
from carryclip.precision import truncate
from carryclip.torch._namespace import xp

CompileMode = bool | Literal["auto"]
WORTHWHILE = 1 << 22
"""With ``"auto"``: entries in large tensors from which it pays to compile."""
OPTIONS: dict[str, Any] = {"emulate_precision_casts": True, "cpp.min_chunk_size": 0}
"""Precision casts: without them the compiler drops the rounding to a narrower type, and the carry loses what that cuts.

The chunk size: on the CPU the length of the first array decides whether a loop runs on all cores, however long the next
arrays are; and the compiler's cache on disk hands that loop to other processes. With 0 every loop does.
"""

log = logging.getLogger("carryclip")
_broken = False
_called_before: set[Callable[..., Any]] = set()


class NotCompiledError(Exception):
    """There is no compiler that works; nothing has been written."""


def check_mode(mode: Any) -> CompileMode:
    """Return ``mode`` if it is one."""
    if isinstance(mode, bool) or mode == "auto":
        return mode
    raise ValueError(f'compile must be True, False or "auto", got {mode!r}.')


def wanted(mode: CompileMode, large: int) -> bool:
    """Whether to compile, with ``large`` entries in tensors that are worth it."""
    return not _broken and (mode is True or (mode == "auto" and large >= WORTHWHILE))


def measured(
    rule: Rule, gradient: Tensor, buffers: Buffers, dtype: torch.dtype, sizes: tuple[Any, ...], clock: Age
) -> Sums:
    """``measure`` of what has a scope."""
    stored, numbers, ages = (buffers.carry,), (), ()
    if not rule.region.joint:
        stored, numbers, ages = tuple(buffers[:-1]), _numbers(rule, sizes, dtype, gradient), tuple(clock)
    function = _measure(_kind(rule), dtype, _look_of(gradient, *stored, *numbers, *ages))
    return Sums(*_called(function, gradient, stored, numbers, ages))


def _numbers(rule: Rule, sizes: tuple[Any, ...], dtype: torch.dtype, like: Tensor) -> tuple[Any, ...]:
    """The region's numbers as tensors."""
    if rule.region.estimator is None:
        sizes = tuple(truncate(size, torch.finfo(dtype)) if isinstance(size, float) else size for size in sizes)
    return tuple(_number(size, dtype, like.device) if isinstance(size, float) else size for size in sizes)


def applied(
    rule: Rule,
    gradient: Tensor,
    buffers: Buffers,
    sizes: tuple[Any, ...],
    scaling: Scaling | None,
    skip: Tensor | None,
    dtype: torch.dtype,
    *,
    clock: Age,
    seed: int | None,
    tally: bool,
    inspect: bool,
    write: bool,
) -> tuple[Any, Any]:
    """``apply`` that writes update and buffers itself and returns (square of what is dropped, diagnosis)."""
    scalars = None
    if scaling is not None:
        scalars = tuple(_number(x, dtype, gradient.device) if isinstance(x, float) else x for x in scaling)
    numbers = _numbers(rule, sizes, dtype, gradient)
    chance = None if seed is None else torch.full((), seed, dtype=torch.int32, device=gradient.device)
    kind = _kind(rule)
    if rule.region.joint:  # the scaling says it all
        carry = rule.carry if rule.policy.mixes else rule.policy.carries
        kind, tally = Rule(kind.region, carry, kind.nonfinite), False
    stored, ages = tuple(buffers[:-1]), tuple(clock)
    look = _look_of(gradient, *stored, *numbers, *(scalars or ()), skip, *ages, chance)
    function = _apply(kind, dtype, tally, inspect, write, look)
    return _called(function, gradient, stored, numbers, scalars, skip, ages, chance)


def _look_of(*arguments: Any) -> tuple[Any, ...]:
    """What must be alike for arguments to share a function: which there are, and of what type, device and rank.

    Each combination has a function of its own, because torch allows but a few variants of one.
    """
    return tuple(None if x is None else (x.dtype, x.device.type, x.dim()) for x in arguments)


def _kind(rule: Rule) -> Rule:
    """The rule without what is handed over at each step: equal for all rules that one function serves."""
    sizes: dict[str, Any] = {name: 1.0 for name in ("radius", "scale", "mean", "std") if hasattr(rule.region, name)}
    if rule.measures_gradient:  # then one more sum is made
        sizes.pop("radius")
    if rule.region.joint:
        sizes["over"] = "all"
    region = dataclasses.replace(cast(Any, rule.region), **sizes)
    return Rule(region, rule.carry, "skip" if rule.nonfinite == "raise" else rule.nonfinite)


@functools.lru_cache(maxsize=256)
def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


@functools.cache
def _measure(rule: Rule, dtype: torch.dtype, look: Any) -> Callable[..., Any]:
    def uclip_measure(gradient: Tensor, stored: Any, sizes: Any, clock: Any) -> tuple[Any, ...]:
        return tuple(measure(xp, rule, gradient, Buffers(*stored), dtype, sizes=sizes, clock=Age(*clock)))

    return _compile(uclip_measure)


@functools.cache
def _apply(rule: Rule, dtype: torch.dtype, tally: bool, inspect: bool, write: bool, look: Any) -> Callable[..., Any]:
    def uclip_apply(
        gradient: Tensor, stored: Any, sizes: Any, scalars: Any, skip: Any, clock: Any, seed: Any
    ) -> tuple[Any, Any]:
        scaling = None if scalars is None else Scaling(*scalars)
        buffers = Buffers(*stored)
        given = gradient, buffers, sizes, scaling, skip, dtype
        outcome = apply(xp, rule, *given, clock=Age(*clock), seed=seed, tally=tally, inspect=inspect)
        if write:
            gradient.copy_(outcome.update)
        for old, new in zip(stored, outcome.buffers, strict=False):
            if old is not None:
                old.copy_(new)
        return outcome.dropped_sq, outcome.diagnosis

    return _compile(uclip_apply)


def _compile(function: Any) -> Callable[..., Any]:
    """Compile a copy with a code object of its own, because the limit of recompilations is counted per code object."""
    own = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )
    constant = function.__code__.co_freevars

    def worth_checking(guards: Any) -> list[bool]:
        """Modules and rules stay what they are; looking at them at every call costs more than a small array."""
        return [not guard.is_global and re.split(r"\W", guard.name)[0] not in constant for guard in guards]

    # From torch 2.8 on one may choose what is checked before a compiled function is used again.
    can_filter = hasattr(torch.compiler, "skip_guard_on_globals_unsafe")
    options = OPTIONS | ({"guard_filter_fn": worth_checking} if can_filter else {})
    return torch.compile(own, dynamic=True, fullgraph=True, options=options)


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    global _broken
    if _broken:
        raise NotCompiledError
    try:
        if function in _called_before:
            return function(*arguments)
        _called_before.add(function)
        with warnings.catch_warnings():  # torch warns of its own use of old parts of itself
            warnings.simplefilter("ignore", DeprecationWarning)
            return function(*arguments)
    except RuntimeError as problem:
        from torch._dynamo.exc import TorchDynamoException  # loaded by now, and slow to load otherwise

        if not isinstance(problem, TorchDynamoException):
            raise
        _broken = True
        reason = " ".join(str(problem).split("\n\n")[0].split())[:300]
        log.warning("torch.compile does not work here, so U-Clip goes on uncompiled: %s", reason)
        raise NotCompiledError from problem
