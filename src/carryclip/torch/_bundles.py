"""Gradients as arrays, bundled for the kernels: which gradients go together, and which kernel gets them.

A *bundle* is all that one kernel works on for one vector: gradients of one rule, scope and type. It is made once and
kept for as long as gradients look the same; a step only fills in the gradients of its *pieces*: large tensors in
stretches, small ones end to end. Whatever looks unusual (sparse, complex, expanded, an odd layout) is opened anew at
every step.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors as end_to_end
from torch._utils import _unflatten_dense_tensors as in_shape

from carryclip.algorithm import Rule
from carryclip.regions import Component
from carryclip.scopes import NO_SCOPE, Place
from carryclip.torch import _compiled
from carryclip.torch._compiled import CompileMode
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._pack import Member, Packer, Piece, Source, open_up, piece_of, sizes_of
from carryclip.torch._state import KEYS, Home, Ledger, OptimizerHome, Storage, wide

Sizes = list[tuple[Any, ...]]
"""The numbers of each rule's region at a step."""
ORDINARY = {Tensor, torch.nn.Parameter, type(None)}
UNUSUAL = "unusual"
SMALL_ROWS = "small rows"
"""Stands for the scope where the rows of many small tensors make up one bundle."""


class Tuning:
    """Sizes at which work is cut and packed; tests make them small."""

    def __init__(self) -> None:
        self.chunk = 1 << 20
        """Entries worked on at a time on the CPU, of a gradient and one buffer; of more arrays fewer, so that all of
        them stay in the last cache."""
        self.small = 1 << 15
        """Tensors with fewer entries are packed, because each operation on them costs more than their entries."""
        self.worth = 1 << 18
        """Tensors are compiled from this size on, because a compiled call costs more to begin; those of rules with many
        operations already if they are not small."""
        self.way: str | None = None
        """The only kernel to use; None for the first that suits."""
        self.host: bool | None = None
        """False: treat all tensors as if reading a value meant to wait."""


class Case(NamedTuple):
    """Gradients of one rule, scope and type that look for a kernel."""

    rule: Rule
    sizes: tuple[Any, ...]
    narrow: torch.dtype
    """Their type."""
    device: torch.device
    host: bool
    """Values can be read without waiting."""
    write: bool
    rounds: bool
    """Some buffers are stored in fewer bits."""
    large: bool
    """They are worth a compiled function, and one is asked for."""
    inspect: bool
    """It is for a step that is measured; only said of large ones."""


class Bundle:
    """Pieces of one rule, scope and type, for one kernel."""

    def __init__(self, rule: Rule, leaf: Leaf, narrow: torch.dtype, kernel: Any) -> None:
        self.rule = rule
        self.number = leaf.rule
        """Of the rule, in the layout."""
        self.scope = leaf.scope
        self.vector: Any = leaf.scope
        """By what others know of it whether its carry is 0: its scope, or its parameters if rows of many are in it."""
        self.place: Place = leaf.place
        """Its entry in the table of scopes, or entries if its rows have one each."""
        self.axis = leaf.axis
        """Along which its rows lie."""
        self.counted = leaf.counted
        self.narrow = narrow
        """The gradients' type."""
        self.dtype = wide(narrow)
        """The type to compute in."""
        self.kernel = kernel
        self.unit = 1.0
        """What entries are multiplied with before they are squared; set at every step, by the radius."""
        self.sizes: tuple[Any, ...] = ()
        """The region's numbers at this step, unless a piece has its own."""
        self.rounds = False
        """Some buffers are stored in fewer bits, and rounded at random."""
        self.tame = True
        """All entries are finite and small, as far as is known; set when a step looks at them."""
        self.pieces: list[Piece] = []
        self.sources: list[Source] = []
        self.given: list[Tensor] = []
        """Arrays that belong to no source: gradients that were opened for this step."""
        self.count: Tensor | None = None
        """Of their samples."""

    @property
    def leaves(self) -> list[Leaf]:
        """Its parameters, each once."""
        return list({leaf.number: leaf for piece in self.pieces for leaf in piece.leaves}.values())

    def gather(self) -> None:
        """Take the scopes of all its parameters, whose rows follow each other as its pieces do."""
        own: list[Any] = [leaf.place for leaf in self.leaves]
        self.place = np.concatenate([np.arange(rows.start, rows.stop) for rows in own] or [np.arange(0)])
        self.axis = 0
        self.vector = tuple(leaf.number for leaf in self.leaves)

    def arrays(self, gradients: Gradients) -> list[Tensor]:
        """The gradients of its pieces; several small ones are copied into memory of the bundle's."""
        if not self.sources:
            return self.given
        found: list[Tensor] = []
        for source in self.sources:
            if source.packed:
                own: Any = [gradients[n] for n in source.numbers]
                if source.flat is None:
                    found.append(end_to_end(own))
                else:
                    torch._foreach_copy_(source.views, own)  # type: ignore[arg-type]
                    found.append(source.flat)
                continue
            gradient: Any = gradients[source.numbers[0]]
            if source.whole:
                found.append(gradient)
                continue
            if source.rows:
                gradient = gradient.view(source.rows, -1)
                found += gradient.split(source.cut) if source.cut else [gradient]
                continue
            if source.order is not None:
                gradient = gradient.permute(source.order)
            gradient = gradient.view(-1)
            if source.cut:
                found += gradient.split(source.cut)
            else:
                found.append(gradient)
        return found

    def give_back(self, gradients: Gradients, arrays: list[Tensor]) -> None:
        """Bring the updates of small gradients from ``arrays`` where they belong."""
        place = 0
        for source in self.sources:
            if source.packed:
                own: Any = [gradients[n] for n in source.numbers]
                torch._foreach_copy_(own, source.views or in_shape(arrays[place], own))
            place += source.pieces


class Plan(NamedTuple):
    """The bundles of gradients that look alike."""

    look: tuple[Any, ...]
    bundles: list[Bundle]
    opened: list[Leaf]
    """Parameters whose gradients are opened anew at every step."""
    kept: list[tuple[Tensor, str, Tensor]]
    """The entries of the state that the bundles hold: parameter, key and buffer."""
    memory: list[int]
    """Where each of these lies, if it is an ordinary tensor: ``buffer.data = ...`` gives it other memory."""
    rounding: list[float]
    """How far, relative to its size, rounding to the narrowest gradient's type may move each run's updates."""
    held: list[bool]
    """Whether each run of scopes has a gradient."""


class Turn(NamedTuple):
    """One step, as far as it is known before anything is measured."""

    layout: Layout
    gradients: Gradients
    """By number of the parameter; what is here of those that are spread over ranks."""
    sizes: Sizes
    plan: Plan
    bundles: list[Bundle]
    arrays: list[list[Tensor]]
    """The gradients of each bundle's pieces."""
    step: int
    host: bool
    inspect: bool
    device: torch.device
    """Where the scalars are."""
    small: int
    """Tensors with fewer entries are taken together."""


class Planner:
    """Finds or makes the plan of a step."""

    def __init__(self, home: Home, kernels: Any, storage: Storage, *, write: bool, compile: CompileMode) -> None:
        self.home = home
        self.kernels = kernels
        self.tuning: Tuning = kernels.tuning
        self.storage = storage
        self.write = write
        self.compile: CompileMode = compile
        self._plans: list[Plan] = []
        self._memory: dict[torch.dtype, Tensor] = {}
        """In which small gradients lie end to end during a step."""
        self._constant: Sizes | None = None
        """The regions' numbers, if all are constants."""
        self.shut: list[Rule] = []
        """Rules whose schedule has come to a radius of 0."""

    def forget(self) -> None:
        """Buffers come from elsewhere from now on, or the layout is another."""
        self._plans.clear()
        self._memory.clear()
        self._constant = None
        self.shut = []
        self.kernels.recorded.forget()

    def _sizes(self, layout: Layout, step: int, *, host: bool) -> Sizes:
        """The numbers of each region at this step; constants are asked for once."""
        if self._constant is not None:
            return self._constant
        sizes = [tuple([_simple(size, host) for size in rule.region.sizes(step)]) for rule in layout.rules]
        plain = all([isinstance(size, float) for own in sizes for size in own])
        scheduled = any([rule.region.scheduled for rule in layout.rules])
        self._constant = sizes if plain and not scheduled else None
        self.shut = [rule for rule, own in zip(layout.rules, sizes, strict=True) if rule.region.is_shut(own)]
        return sizes

    def turn(
        self, layout: Layout, gradients: Gradients, scale: Tensor | None, ledger: Ledger, *, inspect: bool
    ) -> Turn:
        """Bundle the gradients of a step; plans are those of one layout, until they are forgotten."""
        step, host = ledger.steps, self._on_host(gradients, ledger)
        sizes = self._sizes(layout, step, host=host)
        alike = [scale is None and all([isinstance(size, float) for size in own]) for own in sizes]
        compiled = bool(self.compile) and self._compiles(layout, gradients)
        look = (host, compiled, compiled and inspect, alike, _looks(gradients))
        plan = None
        for known in self._plans:
            if known.look == look:
                plan = known if self._holds(known) else None
                break
        if plan is None:
            plan = self._made(layout, gradients, sizes, look)
        bundles = plan.bundles
        if plan.opened:
            bundles = bundles + [self._opened(layout, leaf, gradients, sizes, scale) for leaf in plan.opened]
        arrays = [bundle.arrays(gradients) for bundle in bundles]
        device, small = ledger.skipped.device, self.tuning.small
        return Turn(layout, gradients, sizes, plan, bundles, arrays, step, host, inspect, device, small)

    def _on_host(self, gradients: Gradients, ledger: Ledger) -> bool:
        """Whether values can be read without waiting: ordinary tensors in the host's memory, and no tracing."""
        if self.tuning.host is not None:
            return self.tuning.host
        ordinary = set(map(type, gradients)) <= ORDINARY and type(ledger.skipped) is Tensor
        on_cpu = all([gradient is None or gradient.is_cpu for gradient in gradients]) and ledger.skipped.is_cpu
        return ordinary and on_cpu and not torch.compiler.is_compiling()

    def _holds(self, plan: Plan) -> bool:
        """Whether the state still has the plan's buffers, and not others that were put in their place."""
        home = self.home
        optimizer: Any = home.optimizers[0]() if isinstance(home, OptimizerHome) else home
        if isinstance(home, OptimizerHome) and (home.waiting or len(home.optimizers) > 1 or optimizer is None):
            same = [home.peek(param).get(key) is buffer for param, key, buffer in plan.kept]
        else:  # the same with fewer calls
            state = optimizer.state
            same = [param in state and state[param].get(key) is buffer for param, key, buffer in plan.kept]
        return all(same) and _places(plan.kept) == plan.memory

    def _compiles(self, layout: Layout, gradients: Gradients) -> bool:
        """Whether large tensors go through compiled functions."""
        if self.tuning.way not in (None, "compiled"):
            return False
        pairs = zip(layout.leaves, gradients, strict=True)
        counts = [x.numel() for leaf, x in pairs if x is not None and self._is_worth(layout, leaf, x)]
        return _compiled.wanted(self.compile, sum(counts))

    def _is_worth(self, layout: Layout, leaf: Leaf, gradient: Tensor) -> bool:
        """Whether a gradient is worth a compiled function: where a rule is three operations, only a larger one is."""
        rule = layout.rules[leaf.rule]
        few = rule.region.joint or (type(rule.region) is Component and isinstance(rule.carry, bool))
        return gradient.numel() >= (self.tuning.worth if few else self.tuning.small)

    def _made(self, layout: Layout, gradients: Gradients, sizes: Sizes, look: tuple[Any, ...]) -> Plan:
        host, compiled, measures, alike, looks = look
        groups: dict[Any, list[Member]] = {}
        opened: list[Leaf] = []
        for leaf, gradient in zip(layout.leaves, gradients, strict=True):
            if gradient is None:
                continue
            if not alike[leaf.rule] or looks[leaf.number][0] == UNUSUAL or not gradient.numel():
                opened.append(leaf)
                continue
            large = compiled and self._is_worth(layout, leaf, gradient)
            scope: Any = leaf.scope
            if host and layout.rules[leaf.rule].region.split and self._packs_rows(layout, leaf, gradient):
                scope = SMALL_ROWS
            key = leaf.rule, scope, leaf.counted, gradient.dtype, gradient.device, large
            groups.setdefault(key, []).append((leaf, gradient))
        packer = Packer(self.home.entries, self.storage, self.tuning.small, self._memory, host)
        if not host:
            # Few launches matter more than a copy: only what is large beside the whole stays by itself.
            total = sum(gradient.numel() for gradient in gradients if gradient is not None)
            packer.small = max(self.tuning.small, min(total // 20, 1 << 22))
        bundles: list[Bundle] = []
        for (number, scope, _, dtype, device, large), members in groups.items():
            rule = layout.rules[number]
            rounds = self.storage.rounds(rule)
            case = Case(rule, sizes[number], dtype, device, host, self.write, rounds, large, large and measures)
            bundle = Bundle(rule, members[0][0], dtype, self.kernels.choose(case))
            bundle.rounds = rounds
            opened += packer.fill(bundle, members, cut=bundle.kernel.stretch(case, self.tuning))
            if scope is SMALL_ROWS:
                bundle.gather()
            bundles += [bundle] if bundle.pieces else []
        names = [(leaf.param, leaf.rule) for bundle in bundles for leaf in bundle.leaves]
        kept = [
            (param, KEYS[name], self.home.peek(param)[KEYS[name]])
            for param, rule in names
            for name in layout.rules[rule].buffers
        ]
        plan = Plan(look, bundles, opened, kept, _places(kept), *_known(layout, gradients))
        # Gradients come and go in a few patterns at the most.
        self._plans = [known for known in self._plans if known.look != look][-7:]
        self._plans.append(plan)
        return plan

    def _packs_rows(self, layout: Layout, leaf: Leaf, gradient: Tensor) -> bool:
        """Whether a small tensor goes together with others whose rows are as long."""
        if gradient.numel() >= self.tuning.small or leaf.sharded or self.storage.rounds(layout.rules[leaf.rule]):
            return False
        return leaf.axis in (None, 0) and gradient.is_contiguous()

    def _opened(self, layout: Layout, leaf: Leaf, gradients: Gradients, sizes: Sizes, scale: Tensor | None) -> Bundle:
        """A bundle of one unusual gradient. If nothing of it is here there is no array, but its sample is counted."""
        rule, gradient = layout.rules[leaf.rule], gradients[leaf.number]
        assert gradient is not None
        entries = self.home.entries(leaf.param)
        opened = open_up(leaf, gradient, rule, entries, self.storage, write=self.write, scale=scale)
        bundle = Bundle(
            rule, leaf, opened.gradient.dtype, self.kernels.rows if rule.region.split else self.kernels.pure
        )
        bundle.rounds = self.storage.rounds(rule)
        bundle.count = opened.stored.count
        own = sizes_of(leaf, rule, sizes[leaf.rule], opened)
        if opened.gradient.numel():
            bundle.pieces.append(piece_of(opened, own))
            bundle.given.append(opened.gradient)
        return bundle


def _looks(gradients: Gradients) -> list[Any]:
    """What must be alike for gradients to keep their places in a plan; one loop, because there may be thousands."""
    looks: list[Any] = []
    devices = set()
    for gradient in gradients:
        if gradient is None:
            looks.append(None)
            continue
        devices.add(gradient.device)
        kind = gradient.dtype
        if gradient.layout is not torch.strided or kind.is_complex or gradient.is_neg():
            looks.append((UNUSUAL, kind))
        elif gradient.is_contiguous():
            looks.append((kind, gradient.shape))
        else:
            strides = gradient.stride()
            looks.append((UNUSUAL if 0 in strides else kind, gradient.shape, strides))
    looks.append(devices)
    return looks


def _places(kept: list[tuple[Tensor, str, Tensor]]) -> list[int]:
    """Where buffers lie, as far as they are ordinary tensors."""
    return [buffer.data_ptr() for _, _, buffer in kept if type(buffer) is Tensor]


def _known(layout: Layout, gradients: Gradients) -> tuple[list[float], list[bool]]:
    """(rounding, held) of each run of scopes; see ``Plan``."""
    runs = {place.start: k for k, (_, place) in enumerate(layout.runs)}
    rounding, held = [0.0] * len(layout.scopes), [False] * len(layout.scopes)
    for leaf, gradient in zip(layout.leaves, gradients, strict=True):
        if gradient is None or leaf.scope == NO_SCOPE:
            continue
        run = runs[leaf.scope]
        # Of a tensor without entries here, other ranks may have some; without other ranks nobody has.
        held[run] |= layout.spread is not None or gradient.numel() > 0
        kind = gradient.dtype.to_real()
        if kind != wide(kind):
            rounding[run] = max(rounding[run], torch.finfo(kind).eps / 2)
    return rounding, held


def _simple(size: Any, host: bool) -> Any:
    """A size without shape, such as NumPy's, as a plain number; a tensor only where reading it means no waiting."""
    if isinstance(size, float) or getattr(size, "shape", None) != ():
        return size
    if isinstance(size, Tensor) and not (host and size.is_cpu):
        return size
    value = float(size)
    return value if value >= 0.0 else 0.0  # as everywhere: below 0 and NaN count as 0
