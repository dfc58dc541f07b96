"""One step over all parameters: gradients -> bundles -> measure -> agree -> decide -> apply -> update and state.

Where all tensors are in the host's memory ("host"), values can be read for nothing: a bad step is simply left out, and
the few numbers per scope are worked out by NumPy. Elsewhere nothing here reads a value back, except under
``nonfinite="raise"``.
"""

import operator
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from carryclip.diagnosis import LAST_STEP
from carryclip.policy import Memory, Scaling, Sums
from carryclip.radius import Past
from carryclip.scopes import (
    NO_SCOPE,
    Figures,
    Follower,
    Totals,
    decide_all,
    figures,
    finished,
    metrics,
    rule_pasts,
    rule_radii,
    totals,
)
from carryclip.torch._agree import Aftermath, Agreement, Seen
from carryclip.torch._bundles import Bundle, Planner, Sizes, Tuning, Turn
from carryclip.torch._compiled import CompileMode
from carryclip.torch._kernels import Call, Told
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._namespace import RowsNamespace, constant, host_xp, xp
from carryclip.torch._pack import open_up
from carryclip.torch._rows import Kernels
from carryclip.torch._shards import local
from carryclip.torch._state import AS_COMPUTED, KEYS, Home, Ledger, Storage, wide


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


class Stepper:
    """Runs the algorithm over a layout, with buffers from a home and scalars from a ledger."""

    def __init__(
        self,
        home: Home,
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
        self.planner = Planner(home, Kernels(Tuning()), storage, write=write, compile=compile)
        self.agreement = Agreement(home, storage)
        self._skipping = True
        """Whether the last step may have been skipped."""
        self._clear: dict[Any, list[tuple[Leaf, Tensor, int]]] = {}
        """Vectors whose carry is 0 everywhere: their parameters, carries, and how often each was written."""
        self._runs: tuple[Sizes, list[Any], list[float]] | None = None

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
        ledger, spread = self.ledger, layout.spread
        if gradients is None:
            gradients = [leaf.param.grad for leaf in layout.leaves] if spread is None else layout.gradients()
        # Everything that can fail for a reason of the user's comes before anything is written, or counted.
        turn = self.planner.turn(layout, gradients, grad_scale, ledger, inspect=inspect)
        awaited = spread is not None and (spread.whole or any(gradient is not None for gradient in gradients))
        if not awaited and not any([bundle.pieces for bundle in turn.bundles]):
            ledger.steps += 1
            return Report(None, None)
        seen = self._measure(turn)
        found = _totals(turn, seen, self._by_run(turn)[1]) if layout.scopes else None
        talks = self.metrics_every > 0 or layout.rejects or found is not None
        skip, found = self.agreement.skip(turn, seen, found, found_inf, talks=talks)
        ledger.steps += 1
        if turn.host and skip is not None and bool(skip):
            self._leave_out(turn)
            after = Aftermath(turn.step, skip, inspected=inspect)
        else:
            doubt = None if turn.host else skip
            radius, scaling = self._decide(turn, found, doubt)
            told = self._apply(turn, found, scaling, doubt)
            _count_up(turn.bundles, doubt)
            after = self._aftermath(turn, told, scaling, radius, skip)
        self._count(skip, host=turn.host)
        if spread is None:
            return Report(skip, self._settle(after))
        if talks:
            self.agreement.pending = after
        return Report(skip, self._settle(self.agreement.summed()))

    def prepare(self, layout: Layout) -> None:
        """Make the buffers of all parameters that have a gradient."""
        for leaf, gradient in zip(layout.leaves, layout.gradients(), strict=True):
            if gradient is not None:
                entries, storage = self.home.entries(leaf.param), self.planner.storage
                open_up(leaf, gradient, layout.rules[leaf.rule], entries, storage, write=self.write, scale=None)

    def forget(self) -> None:
        """Carries come from elsewhere from now on, and what was done last is of no interest any more."""
        self._clear.clear()
        self.planner.forget()
        self.agreement.forget()

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added."""
        self._clear.clear()
        self.planner.forget()
        self.agreement.move(old, new)

    # ------------------------------------------------------------------ measuring, deciding, applying

    def _measure(self, turn: Turn) -> Seen:
        """What was seen of each bundle; on the host as numbers."""
        seen = []
        for bundle, own in zip(turn.bundles, turn.arrays, strict=True):
            if not own:
                continue
            clear = turn.host and bundle.rule.region.joint and self._is_clear(bundle)
            sizes = turn.sizes[bundle.number]
            if sizes is not bundle.sizes:  # they stay the same object for as long as they are constants
                bundle.sizes, bundle.unit = sizes, bundle.rule.unit(sizes)
            sums = bundle.kernel.measure(bundle, own, clear=clear, inspect=turn.inspect)
            if turn.host and (isinstance(sums.bad, Tensor) or isinstance(sums.total_sq, Tensor)):
                bad = bool(sums.bad.any()) if isinstance(sums.bad, Tensor) else sums.bad
                sums = Sums(bad, *(None if x is None else _number(x) for x in sums[1:]))
            seen.append((bundle, sums))
        return seen

    def _decide(self, turn: Turn, found: Totals | None, skip: Tensor | None) -> tuple[Any, Scaling | None]:
        """(radius of each scope, its scaling); the policy's memory moves on."""
        if found is None:
            return None, None
        table, memory, past = turn.layout.table, self.ledger.memory, self.ledger.past
        space, like = xp, found.sums.total_sq
        if turn.host:  # scalars of the host are NumPy's: views of the same memory, and much faster to reckon with
            space, like = host_xp, np.float64
            memory = None if memory is None else Memory.each(Tensor.numpy, memory)
            past = None if past is None else Past.each(Tensor.numpy, past)
        with np.errstate(all="ignore"):
            followers = _followers(turn, space, like)
            radius = table.spread(space, self._by_run(turn)[0], like)
            radius = rule_radii(space, followers, radius, past, found.sums)
            scaling, moved = decide_all(space, table, found, radius, memory, skip, like)
            if past is not None:
                _overwrite(past, rule_pasts(space, followers, past, found, skip))
        if memory is not None and moved is not None:
            _overwrite(memory, moved)
        return radius, scaling

    def _apply(self, turn: Turn, found: Totals | None, scaling: Scaling | None, skip: Tensor | None) -> list[Told]:
        """Write all bundles."""
        told: list[Told] = []
        inside: dict[Any, list[Bundle]] = {}
        call = Call(turn.step, None, skip, self.write, self.metrics_every > 0, turn.inspect)
        for bundle, own in zip(turn.bundles, turn.arrays, strict=True):
            if not own:
                told.append(Told())
                continue
            mine = call
            if bundle.scope != NO_SCOPE and scaling is not None:
                if bundle.rule.region.joint:
                    # NaN, under "propagate", is above nothing and yet leaves nothing as it was.
                    within = turn.host and _within(scaling, bundle)
                    if within and not turn.inspect and self._stays(bundle):
                        told.append(Told())
                        continue
                    self._clear.pop(bundle.vector, None)
                    # The paper's rule has paid all by now; one that mixes has nothing to pay if there was nothing.
                    if within and self._pays_all(bundle, found):
                        inside.setdefault(bundle.vector, []).append(bundle)
                mine = call._replace(scaling=_own(scaling, bundle, own[0].device))
            told.append(bundle.kernel.apply(bundle, own, mine))
            if self.write:
                bundle.give_back(turn.gradients, own)
        for vector, some in inside.items():
            if isinstance(vector, tuple) or sum(len(bundle.leaves) for bundle in some) == turn.layout.members[vector]:
                self._note_clear(vector, some)
        return told

    def _leave_out(self, turn: Turn) -> None:
        """Give the optimizer a gradient of zero."""
        for bundle, own in zip(turn.bundles, turn.arrays, strict=True):
            if own and self.write:
                torch._foreach_zero_(own)
                bundle.give_back(turn.gradients, own)

    def _by_run(self, turn: Turn) -> tuple[list[Any], list[float]]:
        """(radius, unit) of each run of scopes, 1 for coordinates; kept while regions have only constants."""
        if self._runs is None or self._runs[0] is not turn.sizes:
            rules, runs = turn.layout.rules, turn.layout.scopes
            radii = [turn.sizes[run.rule][0] if rules[run.rule].region.joint else 1.0 for run in runs]
            self._runs = turn.sizes, radii, [rules[run.rule].unit(turn.sizes[run.rule]) for run in runs]
        return self._runs[1:]

    @staticmethod
    def _pays_all(bundle: Bundle, found: Totals | None) -> bool:
        """Whether a vector inside its radius leaves no carry: one that mixes pays nothing if there was nothing."""
        return found is None or not bundle.rule.policy.mixes or _all_are(found.sums.carry_sq, bundle, 0.0)

    # ------------------------------------------------------------------ carries that are known to be 0

    def _stays(self, bundle: Bundle) -> bool:
        """Whether a vector inside its radius is left as it is: nothing is carried, and no entry must be made 0."""
        return bundle.rule.nonfinite != "zero" and (not bundle.rule.policy.carries or self._is_clear(bundle))

    def _is_clear(self, bundle: Bundle) -> bool:
        """Whether the carry of a vector is known to be 0, because the last step has left it so."""
        seen = self._clear.get(bundle.vector)
        # Only look: asking for the carry would make one of another type where the model was converted.
        return seen is not None and all(
            self._carry(leaf) is carry and carry._version == version for leaf, carry, version in seen
        )

    def _carry(self, leaf: Leaf) -> Any:
        carry = self.home.peek(leaf.param).get(KEYS["carry"])
        return local(carry) if leaf.sharded and carry is not None else carry

    def _note_clear(self, vector: Any, bundles: list[Bundle]) -> None:
        """Remember a vector that was inside as a whole, so that its carry is 0 now."""
        rule = bundles[0].rule
        exact = all(bundle.sources and bundle.narrow == bundle.dtype and not bundle.rounds for bundle in bundles)
        if not exact or not rule.policy.carries or rule.nonfinite == "propagate":
            return
        carries = [(leaf, self._carry(leaf)) for bundle in bundles for leaf in bundle.leaves]
        if not any(carry.is_inference() for _, carry in carries):
            self._clear[vector] = [(leaf, carry, carry._version) for leaf, carry in carries]

    # ------------------------------------------------------------------ what is known afterwards

    def _aftermath(
        self, turn: Turn, told: list[Told], scaling: Scaling | None, radius: Any, skip: Tensor | None
    ) -> Aftermath:
        """What the ranks tell each other, and what becomes the metrics; what another rank counts is left out."""
        if self.metrics_every <= 0 and not turn.inspect:
            return Aftermath(turn.step, skip)
        pairs = zip(turn.bundles, told, strict=True)
        own = [(bundle, each) for bundle, each in pairs if turn.layout.spread is None or bundle.counted]
        dropped = [each.dropped_sq for _, each in own if each.dropped_sq is not None]
        mine, joint = self._dropped(turn, dropped, scaling, None if turn.host else skip)
        found = None
        if turn.inspect:
            found = self._figures(turn, [(b, each.diagnosis) for b, each in own if each.diagnosis], scaling, radius)
        return Aftermath(turn.step, skip, mine, joint, turn.inspect, found)

    def _dropped(
        self, turn: Turn, dropped: list[Any], scaling: Scaling | None, doubt: Tensor | None
    ) -> tuple[Any, Any]:
        """Squares of what this rank and what all ranks together have dropped in this step; None for nothing."""
        own, joint = list(dropped), []
        if scaling is not None and scaling.dropped is not None:
            squares, layout = scaling.dropped**2, turn.layout
            for places, column in ((layout.own, own), (layout.shared, joint)):
                if places:
                    column.append((squares if len(places) == layout.table.width else squares[places]).sum())
        if turn.host:
            return (float(sum(own)) if own else None, float(sum(joint)) if joint else None)
        device, kind = self.ledger.dropped.device, self.ledger.dropped.dtype
        sums = [None if not x else torch.stack([y.to(device, kind) for y in x]).sum() for x in (own, joint)]
        if doubt is not None:
            sums = [None if x is None else torch.where(doubt, 0.0, x) for x in sums]
        return sums[0], sums[1]

    def _figures(self, turn: Turn, diagnosed: list[Any], scaling: Scaling | None, radius: Any) -> Figures:
        """The sums behind the metrics; norms that only this rank knows are finished."""
        space, like = (host_xp, np.float64) if turn.host else (xp, self.ledger.dropped)
        if turn.host:
            diagnosed = [(bundle, each._make([_number(x) for x in each])) for bundle, each in diagnosed]
        clipped = None if scaling is None else scaling.clipped
        where = [bundle.place if bundle.rule.region.joint else NO_SCOPE for bundle, _ in diagnosed]
        own, width = turn.layout.own, turn.layout.table.width
        with np.errstate(all="ignore"):
            found = figures(space, [d for _, d in diagnosed], where, width, like, radius, clipped)
            if own:
                which = np.isin(np.arange(width), own)
                if not turn.host:
                    which = constant(which.tolist(), self.ledger.dropped.device, torch.bool)
                found = finished(space, found, like, which)
        return found

    def _count(self, skip: Tensor | None, *, host: bool) -> None:
        """Count skipped steps."""
        ledger = self.ledger
        if skip is None:
            return
        if not host:
            ledger.count(skip)
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


def _totals(turn: Turn, seen: Seen, units: list[float]) -> Totals:
    """The sums of every scope, as far as this rank counts them."""
    layout, plan = turn.layout, turn.plan
    counted = layout.spread is None
    own = [(bundle, sums) for bundle, sums in seen if bundle.scope >= 0 and (counted or bundle.counted)]
    like: Any = np.float64
    if not turn.host:
        double = any(bundle.dtype == torch.float64 for bundle, _ in own)
        like = torch.empty((), dtype=torch.float64 if double else torch.float32, device=turn.device)
    space, present = host_xp if turn.host else xp, None
    if not all(plan.held) or (layout.spread is not None and layout.spread.whole):
        present = layout.table.marked(space, plan.held, like)
    sums = [each for _, each in own]
    where = [bundle.place for bundle, _ in own]
    for scope, square in _weights(turn):
        sums.append(Sums(weight_sq=square))
        where.append(scope)
    how = {"present": present, "rounding": plan.rounding, "units": units}
    return totals(space, sums, where, layout.table, like, **how)


def _weights(turn: Turn) -> Iterator[tuple[Any, Any]]:
    """The place of parameters whose weights count, and their squares; numbers on the host."""
    spread = turn.layout.spread is not None
    alike: dict[Any, list[tuple[slice, Tensor]]] = {}
    for leaf in turn.layout.weighs:
        if turn.gradients[leaf.number] is None or (spread and not leaf.counted):
            continue
        weights = local(leaf.param).detach()
        weights = torch.view_as_real(weights) if weights.is_complex() else weights
        if not isinstance(leaf.place, slice):
            weights = weights.to(wide(weights.dtype)).reshape(-1)
            square = xp.inner(weights, weights)
        elif turn.host and leaf.axis in (None, 0) and 0 < weights.numel() < turn.small:
            rows = weights.reshape(leaf.place.stop - leaf.place.start, -1)
            alike.setdefault((rows.shape[1], rows.dtype), []).append((leaf.place, rows))
            continue
        else:
            square = RowsNamespace(leaf.axis).squares(weights.to(wide(weights.dtype)))
        yield leaf.place, _number(square) if turn.host else square
    # One call for all small tensors with rows of the same length: a call for each costs more than their entries.
    for members in alike.values():
        where = np.concatenate([np.arange(place.start, place.stop) for place, _ in members])
        rows = torch.cat([each for _, each in members])
        yield where, _number(RowsNamespace(0).squares(rows.to(wide(rows.dtype))))


def _followers(turn: Turn, space: Any, like: Any) -> list[Follower]:
    """The rules whose radius is not a number, with what they are given at this step."""
    found = []
    for number in turn.layout.followers:
        rule = turn.layout.rules[number]
        mine = turn.layout.table.which(space, partial(operator.is_, rule), like)
        found.append(Follower(rule, turn.sizes[number][0], mine))
    return found


def _overwrite(old: Any, new: Any) -> None:
    """Put new columns in the place of old ones."""
    mine, theirs = old.known(), new.known()
    if mine and isinstance(mine[0], Tensor):
        torch._foreach_copy_(mine, theirs)
        return
    for column, value in zip(mine, theirs, strict=True):
        np.copyto(column, value)


def _within(scaling: Scaling, bundle: Bundle) -> bool:
    """Whether a vector is inside its radius as a whole, and neither it nor a carry of 0 would change."""
    policy = bundle.rule.policy
    if not policy.mixes:
        return _all_are(scaling.scale, bundle, 1.0)
    ones = _all_are(scaling.scale, bundle, 1.0) and _all_are(scaling.base, bundle, 1.0)
    return ones and _all_are(scaling.taken, bundle, policy.idle)


def _all_are(values: Any, bundle: Bundle, wanted: float) -> bool:
    """Whether the scalars of a bundle's scopes all have a value."""
    found = values if isinstance(values, float) else values[bundle.place]
    return bool(
        found == wanted if isinstance(bundle.place, int) or isinstance(found, float) else (found == wanted).all()
    )


def _own(scaling: Scaling, bundle: Bundle, device: torch.device) -> Scaling:
    """The scalars of a bundle's scopes, where they are needed and in that precision: of rows as a vector."""
    scope, found = bundle.place, []
    kind = np.float64 if bundle.dtype == torch.float64 else np.float32
    scale, keep, _, _, *mixed = scaling
    for values in (scale, keep, None, None, *mixed):  # one loop and no function: this is called for each bundle
        if isinstance(values, np.ndarray) and isinstance(scope, int):
            found.append(float(kind(values[scope])))
        elif isinstance(values, np.ndarray):
            found.append(torch.from_numpy(values[scope].astype(kind)))
        elif isinstance(values, Tensor):
            found.append(values[scope].to(device=device, dtype=bundle.dtype, non_blocking=True))
        else:
            found.append(values)
    return Scaling(*found)


def _number(value: Any) -> Any:
    """A scalar as a number, a vector as one of NumPy's."""
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.dim() == 0 else value.double().numpy()


def _count_up(bundles: list[Bundle], skip: Tensor | None) -> None:
    """Count the sample, unless the step does not count."""
    counts: dict[int, Tensor] = {}
    for bundle in bundles:
        if "count" in bundle.rule.buffers:
            found = [bundle.count] if bundle.count is not None else [piece.buffers.count for piece in bundle.pieces]
            counts |= {id(count): count for count in found}
    for count in counts.values():
        count += 1 if skip is None else (~skip).to(count.device, torch.int64, non_blocking=True)
