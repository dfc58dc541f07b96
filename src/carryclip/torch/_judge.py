"""Whether a step counts: looking for bad gradients, agreeing with the other ranks, and naming the culprits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from carryclip.algorithm import measure
from carryclip.torch._exchange import Exchange
from carryclip.torch._jobs import Job, present
from carryclip.torch._layout import Gradients, Layout, Leaf
from carryclip.torch._namespace import constant, xp
from carryclip.torch._scopes import Part, Totals, by_tensor, totals_of
from carryclip.torch._shards import local
from carryclip.torch._work import Work


class NonFiniteGradientError(FloatingPointError):
    """A gradient was not finite under ``nonfinite="raise"``; nothing has been changed."""


_ANSWERS = (torch.tensor(False, device="cpu"), torch.tensor(True, device="cpu"))


class Judge:
    """Decides, and remembers which parameters were not finite."""

    def __init__(self, open: Callable[[Layout, Leaf, Gradients, Tensor | None], Job]) -> None:
        self._open = open
        """Sees a parameter's gradient as plain arrays."""
        self.exchange = Exchange()
        self.bad_steps: Tensor | None = None
        """How often each clipped parameter was not finite."""

    def culprits(self, layout: Layout) -> dict[str, int]:
        """Names of the parameters that were not finite, and in how many steps; waits for the device."""
        counts = [] if self.bad_steps is None else self.bad_steps.tolist()
        return {leaf.name: count for leaf, count in zip(layout.leaves, counts, strict=False) if count}

    def totals(self, layout: Layout, work: Work, parts: list[Part], device: torch.device) -> dict[int, Totals]:
        """The sums of every norm that takes part, as far as this rank counts them."""
        found = {}
        for number, rule in enumerate(layout.rules):
            if not rule.region.joint:
                continue
            own = [part for part in parts if part.rule == number]
            members = [(part.scope, part.gradients[0].dtype) for part in own]
            scopes: Sequence[int] = ()
            if layout.spread is not None and layout.spread.whole and not by_tensor(rule):
                scopes = range(len(layout.scopes[number]))  # also those of which only other ranks have gradients
            elif layout.spread is not None:
                pairs = [(leaf, work.gradients[leaf.number]) for leaf in layout.of_rule(number)]
                members = [(leaf.scope, gradient.dtype.to_real()) for leaf, gradient in pairs if gradient is not None]
                own = [part for part in own if part.leaves[0].counted]
            if members or scopes:
                found[number] = totals_of(rule, own, members, device, scopes)
        return found

    def skip(
        self,
        layout: Layout,
        work: Work,
        parts: list[Part],
        totals: dict[int, Totals],
        found_inf: Tensor | None,
        step: int,
        device: torch.device,
        *,
        talks: bool,
    ) -> tuple[Tensor | None, dict[int, Totals]]:
        """Whether this step must not count, as a boolean on the device; None if nothing can stop it.

        Where parameters are spread over ranks, these meet here: they decide alike, and learn each other's sums.
        """
        outside = None if found_inf is None else (local(found_inf).to(device, non_blocking=True) > 0).reshape(())
        judged = [part for part in parts if part.sums.bad is not None and layout.rules[part.rule].can_reject]
        bad: Any = None
        if judged and work.host:
            bad = any(bool(part.sums.bad) for part in judged)
            if bad:
                self._remember(layout, *self._culprits(layout, work, judged, device))
        elif judged:
            numbers, flags = _flags(judged, device)
            bad = torch.stack([part.sums.bad.any().to(device, non_blocking=True) for part in judged]).any()
            self._remember(layout, numbers, flags)
        if layout.spread is not None and talks:
            if bad is None and any(rule.can_reject for rule in layout.rules):
                bad = False if work.host else torch.zeros((), dtype=torch.bool, device=device)
            if layout.spread.whole:  # norms that only this rank knows
                bad = self._overflows(layout, {n: each for n, each in totals.items() if each.single}, bad, work)
            bad, outside, totals = self.exchange.meet(layout.spread, bad, outside, totals, device, host=work.host)
        if bad is None:
            return outside, totals
        bad = self._overflows(layout, totals, bad, work)
        if layout.rules[0].nonfinite == "raise":
            guilty = bad if outside is None else bad & ~outside
            if bool(guilty):
                raise self._complaint(layout, work, judged, step, device)
        bad = _ANSWERS[bad] if work.host else bad
        return (bad if outside is None else bad | outside), totals

    @staticmethod
    def _overflows(layout: Layout, totals: dict[int, Totals], bad: Any, work: Work) -> Any:
        """``bad``, or whether one of these norms is not finite."""
        for number, part in totals.items():
            if layout.rules[number].can_reject:
                if work.host:
                    bad = bad or not all(map(math.isfinite, part.sums.total_sq.tolist()))
                else:
                    bad = bad | ~torch.all(torch.isfinite(part.sums.total_sq))
        return bad

    def _complaint(self, layout: Layout, work: Work, judged: list[Part], step: int, device: torch.device) -> Exception:
        numbers, flags = self._culprits(layout, work, judged, device)
        names = [layout.leaves[n].name for n, flag in zip(numbers, flags.tolist(), strict=True) if flag]
        culprit = "; ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        unknown = "the whole vector (its norm overflows)"
        if layout.spread is not None:
            unknown = "a parameter on another rank, or the whole vector (its norm overflows)"
        return NonFiniteGradientError(
            f"Step {step}: the gradient of {culprit or unknown} is not finite. "
            "Carry, moments and parameters are unchanged. Skip the batch (optimizer.zero_grad()), or attach "
            'U-Clip with nonfinite="skip".'
        )

    def _culprits(
        self, layout: Layout, work: Work, judged: list[Part], device: torch.device
    ) -> tuple[list[int], Tensor]:
        """Numbers of the parameters, and whether each is bad, by a second look at each."""
        leaves = {leaf.number: leaf for part in judged for leaf in part.leaves}
        flags = [torch.zeros((0,), dtype=torch.bool, device=device)]
        for leaf in leaves.values():
            job = self._open(layout, leaf, work.gradients, None)
            bad = measure(xp, job.rule, job.gradient, present(job).carry, job.dtype).bad
            flags.append(bad.to(device).reshape(1))
        return list(leaves), torch.cat(flags)

    def move(self, old: Layout, new: Layout) -> None:
        """Param groups were added: keep the counts with their parameters."""
        if self.bad_steps is not None:
            counts = self.bad_steps
            self.bad_steps = torch.zeros(len(new.leaves), dtype=torch.int64, device=counts.device)
            places = {leaf.param: leaf.number for leaf in old.leaves}
            for leaf in new.leaves:
                if leaf.param in places:
                    self.bad_steps[leaf.number] = counts[places[leaf.param]]

    def _remember(self, layout: Layout, numbers: list[int], flags: Tensor) -> None:
        """Count, per parameter, the steps in which it was not finite."""
        if self.bad_steps is None:
            self.bad_steps = torch.zeros(len(layout.leaves), dtype=torch.int64, device=flags.device)
        if numbers == list(range(len(layout.leaves))):
            self.bad_steps += flags
        else:
            self.bad_steps.index_add_(0, constant(numbers, flags.device, torch.int64), flags.long())


def _flags(judged: list[Part], device: torch.device) -> tuple[list[int], Tensor]:
    """Numbers of the parameters, and whether each is bad, without waiting for the device."""
    numbers, columns = [], []
    for part in judged:
        flags = part.sums.bad.reshape(-1)
        if flags.numel() < len(part.leaves):  # packed ones have one flag together; the norms tell which it is
            norms = torch._foreach_norm(part.gradients, math.inf)
            flags = flags & ~torch.isfinite(torch.stack(norms))
        numbers += [leaf.number for leaf in part.leaves]
        columns.append(flags.to(device, non_blocking=True))
    return numbers, torch.cat(columns)
