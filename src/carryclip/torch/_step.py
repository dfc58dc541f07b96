"""One step over all parameters: gradients -> bundles -> measure -> agree -> decide -> apply -> update and state.

Where all tensors are in the host's memory ("host"), values can be read for nothing: a bad step is simply left out, and
the few numbers per scope are worked out by NumPy. Elsewhere nothing here reads a value back, except under
``nonfinite="raise"``.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carryclip.algorithm import Feed, Rule, Scaling, Sums, unit_of
from carryclip.diagnosis import LAST_STEP
from carryclip.scopes import NO_SCOPE, Figures, Totals, decide_all, figures, finished, metrics, per_scope, totals
from carryclip.torch import _compiled
from carryclip.torch._agree import Aftermath, Agreement, Seen
from carryclip.torch._bundles import Bundle, Opened, Packer, Tuning, open_up, piece_of, sizes_of
from carryclip.torch._compiled import CompileMode
from carryclip.torch._kernels import Call, Kernels, Told
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._namespace import constant, host_xp, xp
from carryclip.torch._shards import local
from carryclip.torch._state import AS_COMPUTED, KEYS, Ledger, OptimizerHome, OwnHome, Storage, wide

ORDINARY = {Tensor, torch.nn.Parameter, type(None)}
UNUSUAL = "unusual"
Sizes = list[tuple[Any, ...]]
"""The numbers of each rule's region at a step."""


class Measured(NamedTuple):
    """Metrics of a step as one small vector, whether it was skipped, and its number."""

    metrics: Tensor
    skip: Tensor | None
    step: int


class Report(NamedTuple):
    """What a step tells the outside.

    ``measured`` is of the step before where parameters are spread over ranks: only then have the ranks met.
    """

    skip: Tensor | None
    """Whether it was skipped; None: it cannot be."""
    measured: Measured | None


class Plan(NamedTuple):
    """How gradients that look alike are bundled, made once for all steps in which they do."""

    layout: Layout
    home: Any
    look: tuple[Any, ...]
    bundles: list[Bundle]
    opened: list[Leaf]
    """Parameters whose gradients are opened anew at every step."""
    kept: list[tuple[Tensor, str, Tensor]]
    """The entries of the state that the bundles hold: parameter, key and buffer."""

    rounding: list[float]
    """How far, relative to its size, rounding to the narrowest gradient's type may move each scope's update."""
    held: list[bool]
    """Whether each scope has a gradient."""

    def holds(self) -> bool:
        """Whether the state still has these buffers, and not others that were put in their place."""
        home = self.home
        if isinstance(home, OptimizerHome):
            optimizer = home.optimizers[0]()
            if home.waiting or len(home.optimizers) > 1 or optimizer is None:
                return all([home.peek(param).get(key) is buffer for param, key, buffer in self.kept])
            state: Any = optimizer.state
        else:
            state = home.state
        return all([param in state and state[param].get(key) is buffer for param, key, buffer in self.kept])


class Stepper:
    """Runs the algorithm over a layout, with buffers from a home and scalars from a ledger."""

    def __init__(
        self,
        home: OwnHome | OptimizerHome,
        ledger: Ledger,
        metrics_every: int,
        *,
        write: bool = True,
        compile: CompileMode = False,
        storage: Storage = AS_COMPUTED,
    ) -> None:
        self.home = home
        self.ledger = ledger
        self.metrics_every = metrics_every
        self.write = write
        self.compile: CompileMode = compile
        self.storage = storage
        self.tuning = Tuning()
        self.kernels = Kernels(self.tuning)
        self.agreement = Agreement()
        self._plans: list[Plan] = []
        self._constant: tuple[Layout, Sizes] | None = None
        """The layout whose regions have only constants, and these."""
        self._skipping = True
        """Whether the last step may have been skipped."""
        self._clear: dict[int, list[tuple[Leaf, Tensor, int]]] = {}
        """Scopes whose carry is 0 everywhere: their parameters, carries, and how often each was written."""

    @torch.no_grad()
    def run(
        self,
        layout: Layout,
        found_inf: Tensor | None,
        grad_scale: Tensor | None,
        *,
        inspect: bool = False,
        gradients: Gradients | None = None,
    ) -> Report:
        """Clip the gradients of all parameters that have one.

        Args:
            layout: the parameters and their rules.
            found_inf: above 0 if somebody else wants the step skipped.
            grad_scale: a loss scale still in the gradients, when only observing.
            inspect: measure this step.
            gradients: by number of the parameter, taken instead of those that the parameters have.
        """
        ledger, step = self.ledger, self.ledger.steps
        # Everything that can fail for a reason of the user's comes before anything is written.
        if gradients is None:
            gradients = [leaf.param.grad for leaf in layout.leaves] if layout.spread is None else layout.gradients()
        host = self._on_host(gradients)
        sizes = self._sizes(layout, step, host=host)
        plan, bundles = self._bundles(layout, gradients, sizes, grad_scale, host=host, inspect=inspect)
        spread = layout.spread
        awaited = spread is not None and (spread.whole or any(gradient is not None for gradient in gradients))
        ledger.steps += 1
        if not awaited and not any([bundle.pieces for bundle in bundles]):
            return Report(None, None)
        try:
            arrays = [bundle.arrays(gradients) for bundle in bundles]
            seen = self._measure(bundles, arrays, sizes, host=host, inspect=inspect)
            device = ledger.skipped.device
            found = None
            if layout.joint is not None:
                found = _totals(layout, plan, seen, sizes, host=host, device=device)
            talks = self.metrics_every > 0 or layout.rejects or layout.joint is not None
            how = {"host": host, "device": device, "talks": talks}
            skip, found = self.agreement.skip(
                layout, gradients, seen, found, found_inf, step, self._open_to_read, **how
            )
        except BaseException:
            ledger.steps -= 1
            raise
        if host and skip is not None and bool(skip):
            self._leave_out(bundles, arrays, gradients)
            after = Aftermath(step, skip, inspected=inspect)
        else:
            doubt = None if host else skip
            radius, scaling = self._decide(layout, sizes, found, doubt, host=host)
            told = self._apply(layout, bundles, arrays, sizes, scaling, doubt, step, inspect=inspect, host=host)
            for bundle, own in zip(bundles, arrays, strict=True):
                if self.write:
                    bundle.give_back(gradients, own)
            _count_up(bundles, doubt)
            after = self._aftermath(layout, bundles, told, scaling, radius, step, skip, inspect=inspect, host=host)
        self._count(skip, host=host)
        if spread is not None:
            if talks:
                self.agreement.pending = after
            return Report(skip, self._settle(self.agreement.summed()))
        return Report(skip, self._settle(after))

    def prepare(self, layout: Layout) -> None:
        """Make the buffers of all parameters that have a gradient."""
        for leaf, gradient in zip(layout.leaves, layout.gradients(), strict=True):
            if gradient is not None:
                open_up(
                    leaf, gradient, layout.rules[leaf.rule], self.home.entries(leaf.param), self.storage,
                    write=self.write, scale=None,
                )  # fmt: skip

    def forget(self) -> None:
        """Carries come from elsewhere from now on, and what was done last is of no interest any more."""
        self._clear.clear()
        self._plans.clear()
        self.agreement.forget()

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added."""
        self._clear.clear()
        self._plans.clear()
        self._constant = None
        self.kernels.recorded.forget()
        self.agreement.move(old, new)

    # ------------------------------------------------------------------ bundling

    def _on_host(self, gradients: Gradients) -> bool:
        """Whether values can be read without waiting: ordinary tensors in the host's memory, and no tracing."""
        if self.tuning.host is not None:
            return self.tuning.host
        ordinary = set(map(type, gradients)) <= ORDINARY and type(self.ledger.skipped) is Tensor
        on_cpu = all([gradient is None or gradient.is_cpu for gradient in gradients]) and self.ledger.skipped.is_cpu
        return ordinary and on_cpu and not torch.compiler.is_compiling()

    def _sizes(self, layout: Layout, step: int, *, host: bool) -> Sizes:
        """The numbers of each region at this step; constants are asked for once."""
        if self._constant is not None and self._constant[0] is layout:
            return self._constant[1]
        sizes = [tuple([_simple(size, host) for size in rule.region.sizes(step)]) for rule in layout.rules]
        schedules = [callable(value) for rule in layout.rules for value in vars(rule.region).values()]
        plain = all([isinstance(size, float) for own in sizes for size in own])
        self._constant = (layout, sizes) if plain and not any(schedules) else None
        return sizes

    def _bundles(
        self, layout: Layout, gradients: Gradients, sizes: Sizes, scale: Tensor | None, *, host: bool, inspect: bool
    ) -> tuple[Plan, list[Bundle]]:
        """The gradients in bundles: those of a plan, and the unusual ones as they are now."""
        alike = [scale is None and all([isinstance(size, float) for size in own]) for own in sizes]
        compiled = bool(self.compile) and self._compiles(gradients)
        look = (host, compiled, compiled and inspect, alike, _looks(gradients))
        plan = None
        for known in self._plans:
            if known.look == look and known.layout is layout and known.home is self.home:
                plan = known if known.holds() else None
                break
        if plan is None:
            plan = self._plan(layout, gradients, sizes, look)
        if not plan.opened:
            return plan, plan.bundles
        return plan, plan.bundles + [self._opened(layout, leaf, gradients, sizes, scale) for leaf in plan.opened]

    def _compiles(self, gradients: Gradients) -> bool:
        """Whether large tensors go through compiled functions."""
        if self.tuning.way not in (None, "compiled"):
            return False
        counts = [gradient.numel() for gradient in gradients if gradient is not None]
        return _compiled.wanted(self.compile, sum(count for count in counts if count >= self.tuning.worth))

    def _plan(self, layout: Layout, gradients: Gradients, sizes: Sizes, look: tuple[Any, ...]) -> Plan:
        host, compiled, measures, alike, looks = look
        packer = Packer(self.home.entries, self.storage, self.tuning, host=host)
        if not host:
            # Few launches matter more than a copy: only what is large beside the whole stays by itself.
            total = sum(gradient.numel() for gradient in gradients if gradient is not None)
            packer.small = max(self.tuning.small, min(total // 20, 1 << 22))
        groups: dict[Any, list[tuple[Leaf, Tensor]]] = {}
        opened: list[Leaf] = []
        for leaf, gradient in zip(layout.leaves, gradients, strict=True):
            if gradient is None:
                continue
            if not alike[leaf.rule] or looks[leaf.number] == UNUSUAL or not gradient.numel():
                opened.append(leaf)
                continue
            large = compiled and gradient.numel() >= self.tuning.worth
            key = leaf.rule, leaf.scope, leaf.counted, gradient.dtype, gradient.device, large
            groups.setdefault(key, []).append((leaf, gradient))
        bundles: list[Bundle] = []
        for (number, *_, dtype, _, large), members in groups.items():
            rule = layout.rules[number]
            bundle = Bundle(rule, members[0][0], dtype, self.kernels.compiled)
            bundle.rounds = self.storage.rounds(rule)
            if not large:
                how = {"host": host, "write": self.write, "rounds": bundle.rounds}
                bundle.kernel = self.kernels.choose(rule, sizes[number], dtype, **how)
            opened += self._fill(packer, bundle, members, host=host, measures=large and measures)
            bundles += [bundle] if bundle.pieces else []
        names = [(leaf.param, leaf.rule) for bundle in bundles for leaf in bundle.leaves]
        kept = [
            (param, KEYS[name], self.home.peek(param)[KEYS[name]])
            for param, rule in names
            for name in layout.rules[rule].buffers
        ]
        rounding, held = _known(layout, gradients)
        plan = Plan(layout, self.home, look, bundles, opened, kept, rounding, held)
        self._plans = [known for known in self._plans if known.look != look or known.home is not self.home][-7:]
        self._plans.append(plan)
        return plan

    def _fill(
        self, packer: Packer, bundle: Bundle, members: list[tuple[Leaf, Tensor]], *, host: bool, measures: bool
    ) -> list[Leaf]:
        """Put gradients into a bundle; returned are the parameters whose gradients lie oddly in memory."""
        if bundle.kernel is self.kernels.listed:
            for leaf, gradient in members:
                entries = self.home.entries(leaf.param)
                opened = open_up(leaf, gradient, bundle.rule, entries, self.storage, write=True, scale=None)
                bundle.add_whole(opened)
            return []
        cut = 0
        if bundle.kernel is self.kernels.compiled:
            # A compiled function that measures coordinates keeps arrays in between, and so must see fewer at a time.
            cut = self.tuning.chunk // 2 if host and measures and bundle.scope == NO_SCOPE else 0
        elif host:
            arrays = 1 + sum(name != "count" for name in bundle.rule.buffers)
            cut = max(2 * self.tuning.chunk // max(arrays, 2), 1)
        return [leaf for leaf, _ in packer.add(bundle, members, cut=cut)]

    def _opened(self, layout: Layout, leaf: Leaf, gradients: Gradients, sizes: Sizes, scale: Tensor | None) -> Bundle:
        """A bundle of one unusual gradient. If nothing of it is here there is no array, but its sample is counted."""
        rule, gradient = layout.rules[leaf.rule], gradients[leaf.number]
        assert gradient is not None
        entries = self.home.entries(leaf.param)
        opened = open_up(leaf, gradient, rule, entries, self.storage, write=self.write, scale=scale)
        bundle = Bundle(rule, leaf, opened.gradient.dtype, self.kernels.pure)
        bundle.rounds = self.storage.rounds(rule)
        own = sizes_of(leaf, rule, sizes[leaf.rule], opened)
        bundle.count = opened.stored.count
        if opened.gradient.numel():
            bundle.pieces.append(piece_of(opened, own))
            bundle.given.append(opened.gradient)
        return bundle

    def _open_to_read(self, layout: Layout, leaf: Leaf, gradient: Tensor) -> Opened:
        entries = dict(self.home.peek(leaf.param))
        return open_up(leaf, gradient, layout.rules[leaf.rule], entries, self.storage, write=False, scale=None)

    # ------------------------------------------------------------------ measuring, deciding, applying

    def _measure(
        self, bundles: list[Bundle], arrays: list[list[Tensor]], sizes: Sizes, *, host: bool, inspect: bool
    ) -> Seen:
        """What was seen of each bundle; on the host as numbers."""
        seen = []
        for bundle, own in zip(bundles, arrays, strict=True):
            if not own:
                continue
            clear = False
            if bundle.scope >= 0:
                bundle.unit = unit_of(sizes[bundle.number][0])
                clear = host and self._is_clear(bundle.scope)
            sums = bundle.kernel.measure(bundle, own, clear=clear, inspect=inspect)
            if host and isinstance(sums.bad, Tensor):
                sums = Sums(bool(sums.bad.any()), *(None if x is None else x.item() for x in sums[1:]))
            seen.append((bundle, sums))
        return seen

    def _decide(
        self, layout: Layout, sizes: Sizes, found: Totals | None, skip: Tensor | None, *, host: bool
    ) -> tuple[Any, Scaling | None]:
        """(radius of each scope, its scaling); the gates' memory moves on."""
        if found is None or layout.joint is None:
            return None, None
        radii = [sizes[rule][0] for rule, _ in layout.scopes]
        feed = self.ledger.feed
        if not host:
            radius = per_scope(xp, radii, found.sums.total_sq)
            scaling, moved = decide_all(xp, layout.joint, found, radius, feed, skip)
            for old, new in zip(feed or (), moved or (), strict=True):
                old.copy_(new)
            return radius, scaling
        radius = per_scope(host_xp, radii, np.float64)
        known = None if feed is None else Feed(*(x.numpy() for x in feed))
        with np.errstate(all="ignore"):
            scaling, moved = decide_all(host_xp, layout.joint, found, radius, known, None)
        for old, new in zip(known or (), moved or (), strict=True):
            np.copyto(old, new)
        return radius, scaling

    def _apply(
        self,
        layout: Layout,
        bundles: list[Bundle],
        arrays: list[list[Tensor]],
        sizes: Sizes,
        scaling: Scaling | None,
        skip: Tensor | None,
        step: int,
        *,
        inspect: bool,
        host: bool,
    ) -> list[Told]:
        """Write all bundles."""
        told: list[Told] = []
        inside: dict[int, list[Bundle]] = {}
        call = Call(step, (), None, skip, self.write, self.metrics_every > 0, inspect)
        for bundle, own in zip(bundles, arrays, strict=True):
            if not own:
                told.append(Told())
                continue
            mine = call._replace(sizes=sizes[bundle.number])
            if bundle.scope != NO_SCOPE and scaling is not None:
                # NaN, under "propagate", is above nothing and yet leaves nothing as it was.
                within = host and scaling.scale[bundle.scope] == 1.0
                if within and not inspect and self._stays(bundle):
                    told.append(Told())
                    continue
                self._clear.pop(bundle.scope, None)
                if within:
                    inside.setdefault(bundle.scope, []).append(bundle)
                mine = mine._replace(scaling=_own(scaling, bundle, own[0].device, host=host))
            told.append(bundle.kernel.apply(bundle, own, mine))
        for scope, some in inside.items():
            if sum(len(bundle.leaves) for bundle in some) == layout.members[scope]:
                self._note_clear(some[0].rule, scope, some)
        return told

    def _stays(self, bundle: Bundle) -> bool:
        """Whether a vector inside its radius is left as it is: nothing is carried, and no entry must be made 0."""
        return bundle.rule.nonfinite != "zero" and (not bundle.rule.policy.carries or self._is_clear(bundle.scope))

    def _is_clear(self, scope: int) -> bool:
        """Whether the carry of a vector is known to be 0, because the last step has left it so."""
        seen = self._clear.get(scope)
        # Only look: asking for the carry would make one of another type where the model was converted.
        return seen is not None and all(
            self._carry(leaf) is carry and carry._version == version for leaf, carry, version in seen
        )

    def _carry(self, leaf: Leaf) -> Any:
        carry = self.home.peek(leaf.param).get(KEYS["carry"])
        return local(carry) if leaf.sharded and carry is not None else carry

    def _note_clear(self, rule: Rule, scope: int, bundles: list[Bundle]) -> None:
        """Remember a vector that was inside as a whole, so that its carry is 0 now."""
        exact = all(bundle.sources and bundle.narrow == bundle.dtype and not bundle.rounds for bundle in bundles)
        if not exact or not rule.policy.carries or rule.nonfinite == "propagate":
            return
        leaves = [leaf for bundle in bundles for leaf in bundle.leaves]
        carries = [(leaf, self._carry(leaf)) for leaf in leaves]
        if not any(carry.is_inference() for _, carry in carries):
            self._clear[scope] = [(leaf, carry, carry._version) for leaf, carry in carries]

    def _leave_out(self, bundles: list[Bundle], arrays: list[list[Tensor]], gradients: Gradients) -> None:
        """Give the optimizer a gradient of zero."""
        if self.write:
            for bundle, own in zip(bundles, arrays, strict=True):
                if own:
                    torch._foreach_zero_(own)
                    bundle.give_back(gradients, own)

    # ------------------------------------------------------------------ what is known afterwards

    def _aftermath(
        self,
        layout: Layout,
        bundles: list[Bundle],
        told: list[Told],
        scaling: Scaling | None,
        radius: Any,
        step: int,
        skip: Tensor | None,
        *,
        inspect: bool,
        host: bool,
    ) -> Aftermath:
        """What the ranks tell each other, and what becomes the metrics; what another rank counts is left out."""
        if self.metrics_every <= 0 and not inspect:
            return Aftermath(step, skip)
        doubt = None if host else skip
        counted = layout.spread is None
        own = [(bundle, each) for bundle, each in zip(bundles, told, strict=True) if counted or bundle.counted]
        dropped = [each.dropped_sq for _, each in own if each.dropped_sq is not None]
        mine, joint = self._dropped(layout, dropped, scaling, doubt, host=host)
        found = None
        if inspect:
            diagnosed = [(bundle, each.diagnosis) for bundle, each in own if each.diagnosis is not None]
            found = self._figures(layout, diagnosed, scaling, radius, host=host)
        return Aftermath(step, skip, mine, joint, inspect, found)

    def _dropped(
        self, layout: Layout, dropped: list[Any], scaling: Scaling | None, doubt: Tensor | None, *, host: bool
    ) -> tuple[Any, Any]:
        """Squares of what this rank and what all ranks together have dropped in this step; None for nothing."""
        own, joint = list(dropped), []
        if scaling is not None and scaling.dropped is not None:
            squares = scaling.dropped**2
            for mine, column in ((True, own), (False, joint)):
                places = [k for k, each in enumerate(layout.own) if each == mine]
                if places:
                    column.append((squares if len(places) == len(layout.own) else squares[places]).sum())
        if host:
            return (float(sum(own)) if own else None, float(sum(joint)) if joint else None)
        device, kind = self.ledger.dropped.device, self.ledger.dropped.dtype
        sums = [None if not x else torch.stack([y.to(device, kind) for y in x]).sum() for x in (own, joint)]
        if doubt is not None:
            sums = [None if x is None else torch.where(doubt, 0.0, x) for x in sums]
        return sums[0], sums[1]

    def _figures(
        self, layout: Layout, diagnosed: list[Any], scaling: Scaling | None, radius: Any, *, host: bool
    ) -> Figures:
        """The sums behind the metrics; norms that only this rank knows are finished."""
        space, like = (host_xp, np.float64) if host else (xp, self.ledger.dropped)
        if host:
            diagnosed = [(bundle, each._make([_number(x) for x in each])) for bundle, each in diagnosed]
        clipped = None if scaling is None else scaling.clipped
        where = [bundle.scope for bundle, _ in diagnosed]
        with np.errstate(all="ignore"):
            found = figures(space, [d for _, d in diagnosed], where, len(layout.scopes), like, radius, clipped)
            if any(layout.own):
                own = np.array(layout.own) if host else constant(layout.own, self.ledger.dropped.device, torch.bool)
                found = finished(space, found, like, own)
        return found

    def _count(self, skip: Tensor | None, *, host: bool) -> None:
        """Count skipped steps."""
        ledger = self.ledger
        if skip is None:
            return
        if not host:
            ledger.skipped += skip
            ledger.streak.copy_(torch.where(skip, ledger.streak + 1, 0))
            return
        stop = bool(skip)
        if stop:
            ledger.skipped += 1
            ledger.streak += 1
        elif self._skipping:
            ledger.streak.zero_()
        self._skipping = stop

    def _settle(self, after: Aftermath | None) -> Measured | None:
        """Take in what is known of a step when it is done."""
        if after is None:
            return None
        ledger = self.ledger
        squares = [x for x in (after.dropped_sq, after.joint_sq) if x is not None]
        if squares:
            amount = squares[0] if len(squares) == 1 else squares[0] + squares[1]
            ledger.dropped += amount.to(ledger.dropped.dtype).sqrt() if isinstance(amount, Tensor) else amount**0.5
        if not after.inspected:
            return None
        found = after.figures
        if found is None:
            vector = torch.zeros(len(LAST_STEP), device=ledger.dropped.device, dtype=ledger.dropped.dtype)
        elif isinstance(found.sums.ratio, np.ndarray):
            with np.errstate(all="ignore"):
                vector = torch.as_tensor(metrics(host_xp, found, np.float64))
        else:
            vector = metrics(xp, found, ledger.dropped)
        return Measured(vector, after.skip, after.step)


def _looks(gradients: Gradients) -> list[Any]:
    """What must be alike for gradients to keep their places in a plan; one loop, because there may be thousands."""
    looks: list[Any] = []
    devices = set()
    for gradient in gradients:
        if gradient is None:
            looks.append(None)
            continue
        devices.add(gradient.device)
        if gradient.layout is not torch.strided or gradient.is_complex():
            looks.append(UNUSUAL)
        elif gradient.is_contiguous():
            looks.append(gradient.dtype)
        else:
            strides = gradient.stride()
            looks.append(UNUSUAL if 0 in strides else (gradient.dtype, strides))
    looks.append(devices)
    return looks


def _known(layout: Layout, gradients: Gradients) -> tuple[list[float], list[bool]]:
    """(rounding, held) of each scope; see ``Plan``."""
    rounding, held = [0.0] * len(layout.scopes), [False] * len(layout.scopes)
    for leaf, gradient in zip(layout.leaves, gradients, strict=True):
        if gradient is None or leaf.scope == NO_SCOPE:
            continue
        # Of a tensor without entries here, other ranks may have some; without other ranks nobody has.
        held[leaf.scope] |= layout.spread is not None or gradient.numel() > 0
        kind = gradient.dtype.to_real()
        if kind != wide(kind):
            rounding[leaf.scope] = max(rounding[leaf.scope], torch.finfo(kind).eps / 2)
    return rounding, held


def _own(scaling: Scaling, bundle: Bundle, device: torch.device, *, host: bool) -> Scaling:
    """The scalars of one scope, where they are needed and in that precision."""
    scope, keep = bundle.scope, scaling.keep
    if host:
        kept = keep if keep is None or isinstance(keep, (int, float)) else _rounded(keep[scope], bundle.dtype)
        return Scaling(_rounded(scaling.scale[scope], bundle.dtype), kept)
    place = {"device": device, "dtype": bundle.dtype, "non_blocking": True}
    kept = keep[scope].to(**place) if isinstance(keep, Tensor) else keep
    return Scaling(scaling.scale[scope].to(**place), kept)


def _rounded(value: Any, dtype: torch.dtype) -> float:
    """A number as it is in the type of the arrays."""
    return float(value) if dtype == torch.float64 else float(np.float32(value))


def _number(value: Any) -> float:
    return value.item() if isinstance(value, Tensor) else value


def _totals(layout: Layout, plan: Plan, seen: Seen, sizes: Sizes, *, host: bool, device: torch.device) -> Totals:
    """The sums of every scope, as far as this rank counts them."""
    counted = layout.spread is None
    own = [(bundle, sums) for bundle, sums in seen if bundle.scope >= 0 and (counted or bundle.counted)]
    width = len(layout.scopes)
    like: Any = np.float64
    if not host:
        double = any(bundle.dtype == torch.float64 for bundle, _ in own)
        like = torch.empty((), dtype=torch.float64 if double else torch.float32, device=device)
    present = None
    if not all(plan.held) or (layout.spread is not None and layout.spread.whole):
        present = np.array(plan.held) if host else constant(plan.held, device, torch.bool)
    joint = layout.joint
    assert joint is not None
    sums = [each for _, each in own] or [Sums(None, 0.0, *((0.0, 0.0) if joint.gates_scopes else ()))]
    where = [bundle.scope for bundle, _ in own] or [0]
    units = [unit_of(sizes[rule][0]) for rule, _ in layout.scopes]
    how = {"present": present, "rounding": plan.rounding, "units": units}
    return totals(host_xp if host else xp, sums, where, width, like, **how)


def _simple(size: Any, host: bool) -> Any:
    """A size without shape, such as NumPy's, as a plain number; a tensor only where reading it means no waiting."""
    if isinstance(size, float) or getattr(size, "shape", None) != ():
        return size
    if isinstance(size, Tensor):
        if not (host and size.is_cpu):
            return size
        value = float(size)
        return value if value >= 0.0 else 0.0  # as everywhere: below 0 and NaN count as 0
    return float(size)


def _count_up(bundles: list[Bundle], skip: Tensor | None) -> None:
    """Count the sample, unless the step does not count."""
    counts: dict[int, Tensor] = {}
    for bundle in bundles:
        if "count" in bundle.rule.buffers:
            found = [bundle.count] if bundle.count is not None else [piece.buffers.count for piece in bundle.pieces]
            counts |= {id(count): count for count in found}
    for count in counts.values():
        count += 1 if skip is None else (~skip).to(count.device, torch.int64, non_blocking=True)
