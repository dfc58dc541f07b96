"""The gradients of one step, arranged: which way each takes through it, cut or packed to size."""

from typing import Any

import torch
from torch import Tensor

from carryclip.algorithm import Age, Rule
from carryclip.torch import _compiled, _inplace
from carryclip.torch._compiled import CompileMode
from carryclip.torch._inplace import ORDINARY, Scratch, Slab
from carryclip.torch._jobs import CHUNK, COMPILED_CHUNK, SMALL, WORTH, Job, Piece, open_job, pieces_of, sizes_of
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._shards import local
from carryclip.torch._state import KEYS, Ledger, OptimizerHome, OwnHome, Storage, buffers_of, wide


class Work:
    """The gradients of one step, arranged."""

    def __init__(
        self,
        gradients: Gradients,
        slabs: list[Slab],
        jobs: list[Job],
        pieces: list[Piece],
        scratch: Scratch,
        *,
        host: bool,
        compiled: bool,
    ) -> None:
        self.gradients = gradients
        self.slabs = slabs
        self.jobs = jobs
        """What the pieces are cut from."""
        self.pieces = pieces
        self.host = host
        """All values can be read for nothing."""
        self.compiled = compiled
        self.clear: dict[tuple[int, int], bool] = {}
        self.untouched: set[tuple[int, int]] = set()
        """Scopes whose carry is 0 and whose gradients are inside, so that nothing is written."""
        self.scratch = scratch
        self.clocks: dict[int, Age] = {}


class Arranger:
    """Finds out what is worth which way: in place, in pieces, or compiled."""

    def __init__(
        self, home: OwnHome | OptimizerHome, ledger: Ledger, storage: Storage, *, write: bool, compile: CompileMode
    ) -> None:
        self.home = home
        self.ledger = ledger
        self.storage = storage
        self.write = write
        self.compile: CompileMode = compile
        self.small = SMALL
        self.worth = WORTH
        self._scratch: Scratch = {}

    def _arrange(
        self,
        layout: Layout,
        gradients: Gradients,
        sizes: list[tuple[Any, ...]],
        scale: Tensor | None,
        *,
        in_place: bool,
        inspect: bool,
    ) -> "Work":
        """Which way each gradient takes."""
        host = self._on_host(gradients)
        large = self._large(layout, gradients, sizes) if self.compile else {}
        compiled = _compiled.wanted(self.compile, sum(large.values()))
        slabs: list[Slab] = []
        leaves: list[Leaf] = []
        for number, rule in enumerate(layout.rules):
            members = layout.of_rule(number)
            if in_place and self._suits(rule, sizes[number]):
                big = [leaf for leaf in members if leaf.number in large] if compiled else []
                small = [leaf for leaf in members if leaf.number not in large] if compiled else members
                for some in (small,) if layout.spread is None else _split(small):
                    given = some, gradients, rule, sizes[number][0], self._carry
                    found, left = _inplace.gather(*given, host=host, inspect=inspect)
                    slabs += found
                    big = big + left
                members = big
            leaves += [leaf for leaf in members if gradients[leaf.number] is not None]
        jobs = [self._open(layout, leaf, gradients, scale) for leaf in leaves]
        # Those of which nothing is here are not worked on, but their samples are counted, as on other ranks.
        fitted = [(job, sizes_of(job, sizes[job.leaf.rule])) for job in jobs if job.gradient.numel()]
        # Metrics must not change how a norm is added up, or a run that measures would differ in the last bits. So only
        # a compiled function for coordinates, which needs arrays in between to measure, is cut for that.
        longest = None if compiled or not host else CHUNK
        joint = [pair for pair in fitted if pair[0].rule.region.joint]
        alone = [pair for pair in fitted if not pair[0].rule.region.joint]
        pieces = list(pieces_of(joint, longest, self.small))
        longest = COMPILED_CHUNK if compiled and host and inspect else longest
        pieces += pieces_of(alone, longest, self.small)
        return Work(gradients, slabs, jobs, pieces, self._scratch, host=host, compiled=compiled)

    def _open(self, layout: Layout, leaf: Leaf, gradients: Gradients, scale: Tensor | None) -> Job:
        entries = self.home.entries(leaf.param)
        gradient = gradients[leaf.number]
        assert gradient is not None
        return open_job(leaf, gradient, layout.rules[leaf.rule], entries, self.storage, write=self.write, scale=scale)

    def _large(self, layout: Layout, gradients: Gradients, sizes: list[tuple[Any, ...]]) -> dict[int, int]:
        """Numbers of the parameters that are worth a compiled function, and how many entries their gradients have."""
        suited = [self.write and self._suits(*pair) for pair in zip(layout.rules, sizes, strict=True)]
        least = [max(self.small, self.worth) if suits else self.small for suits in suited]
        pairs = zip(layout.leaves, gradients, strict=True)
        counts = {leaf: gradient.numel() for leaf, gradient in pairs if gradient is not None}
        return {leaf.number: count for leaf, count in counts.items() if count >= least[leaf.rule]}

    def _suits(self, rule: Rule, sizes: tuple[Any, ...]) -> bool:
        return _inplace.suits(rule) and self.storage.carry is None and isinstance(sizes[0], float)

    def _carry(self, leaf: Leaf, dtype: torch.dtype) -> Tensor:
        """The carry of a real parameter, as far as it is here."""
        entries = self.home.entries(leaf.param)
        carry = entries.get(KEYS["carry"])
        if carry is None or carry.dtype != dtype:
            carry = buffers_of(entries, ("carry",), leaf.param, dtype, self.storage).carry
        return local(carry) if leaf.sharded else carry

    def _on_host(self, gradients: Gradients) -> bool:
        """Whether values can be read without waiting: ordinary tensors in the host's memory, and no tracing."""
        tensors = [gradient for gradient in gradients if gradient is not None]
        tensors.append(self.ledger.skipped)
        ordinary = {type(tensor) for tensor in tensors} <= ORDINARY
        return ordinary and all(tensor.is_cpu for tensor in tensors) and not torch.compiler.is_compiling()


def kinds_of(gradients: Gradients) -> set[torch.dtype]:
    """The types in which steps compute."""
    return {wide(kind) for kind in {gradient.dtype for gradient in gradients if gradient is not None}}


def _split(leaves: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
    """Those that this rank counts, and those that another one does."""
    return [leaf for leaf in leaves if leaf.counted], [leaf for leaf in leaves if not leaf.counted]
