"""Whether the clipping that was observed is right, and if not, what would be; with the reason in words.

The region that was observed is judged first. It may be right as it is, with a carry or without; there may be nothing to
clip; and only if it is too small another radius is suggested, a larger one, which is never worse by its own figures.

A carry has something to give back where two things meet: some gradients are far larger than most (a heavy tail), and
they point one way, so that cutting them turns the mean gradient. Without the first, cutting is a lower learning rate.
Without the second, the large ones are noise, which is better cut.

A bias that was not seen is none only if so many steps would have shown it. Where they would not, the answer is how many
more to watch, and the default carry until then, because it is the smaller mistake.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from carryclip.bias import Effect, NormView, Tail, View
from carryclip.regions import Region

WORTHWHILE_BIAS = 0.1
"""Less is nothing to repair: the mean gradient is turned by less than 6 degrees."""
RARELY = 0.01
"""A share of gradients that is next to nothing."""
LEAST_SHRINK = 0.1
"""Below this usual factor the radius takes an optimizer that feels the length of gradients a decade off its rate."""
LIGHT_STEPS = 60
"""Steps without a large gradient from which on these are taken to be rarer than 1 in 20, by the rule of three."""
LARGE_STEPS = 4
"""Steps with a large gradient from which on it shows whether these point one way."""
HEAVY_STEPS = 400
"""Steps that are enough for a heavy tail: large gradients that are no rarer than ``RARELY`` have come ``LARGE_STEPS``
times, and a turn as large as ``WORTHWHILE_BIAS`` of the gradients themselves would show whatever their directions."""
UNEVEN = 0.25
"""How much more of the mean gradient must be lost than the share that is cut, to count as lost by the large ones."""

Verdict = Literal["keep", "change", "remove", "unknown"]
"""Keep the observed region, take a larger radius, train without clipping; or what was seen does not tell."""


@dataclass(frozen=True)
class Traits:
    """What the advice needs to know of the optimizer."""

    name: str = "your optimizer"
    divides: bool | None = None
    """Whether it divides gradients by their own size, and so is blind to their scale; None: not known."""
    momentum: float = 0.0

    def __str__(self) -> str:
        if self.divides or not self.momentum:
            return self.name
        return f"{self.name} with momentum {self.momentum:g}"

    def in_words(self) -> str:
        """The same, or nothing if nothing is known."""
        return "" if self.divides is None else str(self)

    @property
    def smooths(self) -> bool:
        """Whether it is known to average updates or divide by their size, and so suffers from a hasty carry."""
        return bool(self.divides) or self.momentum > 0.0


UNKNOWN = Traits()


class Case(NamedTuple):
    """What is judged, and for whom."""

    region: Region
    view: View
    tail: Tail
    mean_size: float
    optimizer: Traits
    observed: Effect
    stock: Mapping[type[Region], str]

    def skewed(self, effect: Effect) -> bool:
        """Whether clipping turns the mean gradient, or takes more of it than it could by cutting noise."""
        if math.isnan(effect.scaled_bias) or effect.scaled_bias >= WORTHWHILE_BIAS:
            return True
        if self.optimizer.divides or not isinstance(self.view, NormView):
            return False
        # Where noise is as likely as its opposite, cutting a share of the gradients takes about that share of the mean
        # at the most: E[clip(m + noise)] grows with m by 1 for those that are not cut, and the others add to that.
        return effect.bias > effect.clipped + UNEVEN

    def enough(self, effect: Effect) -> int:
        """How many steps would show whether clipping turns the mean gradient; 0 if it shows already."""
        if effect.clipped <= RARELY or effect.scaled_bias != 0.0:
            return 0
        if not self.tail.heavy:
            return LIGHT_STEPS
        steps = len(self.view.whole)
        # Where the mean gradient is lost in the noise, a turn counts that is as large beside the gradients themselves.
        unseen = effect.unseen if math.isnan(effect.floor) else effect.floor
        noise = steps * (unseen / WORTHWHILE_BIAS) ** 2  # it falls with the square root of the steps
        large = steps * LARGE_STEPS / max(self.tail.steps, 1)
        return math.ceil(min(max(noise, large), HEAVY_STEPS))

    def too_short(self, effect: Effect) -> bool:
        """Whether these steps are too few to show that clipping turns the mean gradient."""
        return self.enough(effect) > len(self.view.whole)

    def larger(self) -> Effect | None:
        """What a radius does that leaves most gradients alone and twice the mean; None if any figure is worse."""
        if self.observed.radius is None:
            return None
        usual = self.view.size_quantile(self.view.usual_quantile)
        twice = 0.0 if math.isnan(self.mean_size) else 2.0 * self.mean_size
        radius = _two_digits_up(max(usual, twice))
        if not radius > self.observed.radius:
            return None
        effect = self.view.clip(radius)
        return effect if _at_least_as_good(effect, self.observed) else None


class Judgement(NamedTuple):
    """What to do, and why."""

    verdict: Verdict
    suggested: Effect | None
    carry: bool
    reason: str
    enough: int | None = None
    """About how many steps would tell, where those seen were too few."""


def judge(case: Case) -> Judgement:
    """What to do with the observed region."""
    observed = case.observed
    wrong = _too_small(case)
    if wrong is not None:
        larger = case.larger()
        if larger is not None:
            return _take(case, larger, wrong)
    skewed = case.skewed(observed)
    if skewed and not case.tail.heavy:
        # Without a tail it is not a few large gradients but the usual ones that are cut too much.
        larger = case.larger()
        if larger is not None and not case.skewed(larger):
            return _take(case, larger, "cuts usual gradients, not rare ones")
    if skewed:
        return Judgement("keep", None, True, _why_carry(case))
    guards = case.tail.heavy and observed.radius != math.inf
    if observed.clipped <= RARELY and not guards:
        return Judgement("remove", None, False, _why_none(case))
    if case.too_short(observed):
        return Judgement("unknown", None, True, _why_wait(case), _round(case.enough(observed)))
    return Judgement("keep", None, False, _why_plain(case))


def _take(case: Case, larger: Effect, wrong: str) -> Judgement:
    """A larger radius, with the default carry if that has something to give back, or might have."""
    reason = _why_larger(case, larger, wrong)
    if case.too_short(larger):
        return Judgement("change", larger, True, reason, _round(case.enough(larger)))
    return Judgement("change", larger, case.skewed(larger), reason)


def _too_small(case: Case) -> str | None:
    """What is wrong with the observed radius, or None if it is large enough."""
    observed, optimizer = case.observed, case.optimizer
    if observed.radius is None:
        return None
    if not optimizer.divides and observed.radius < case.mean_size:
        return f"is below the mean gradient, {case.mean_size:.3g}, so that steps no longer tell how large it is"
    if not optimizer.divides and observed.shrink < LEAST_SHRINK:
        return f"makes gradients {times(1 / observed.shrink)} times shorter, and the steps of {optimizer} with them"
    if case.skewed(observed) and observed.radius < observed.reach:
        return f"is below the mean that updates should have, {observed.reach:.3g}, so that no carry could pay it"
    return None


def _at_least_as_good(new: Effect, old: Effect) -> bool:
    """Whether no figure is worse; a bias of unknown size is as bad as can be."""
    pairs = [
        (new.clipped, old.clipped),
        (new.bias, old.bias),
        (new.scaled_bias, old.scaled_bias),
    ]
    return all([np.nan_to_num(a, nan=math.inf) <= np.nan_to_num(b, nan=math.inf) for a, b in pairs])


def _round(steps: int) -> int:
    """Up to the next 50, because it is a rough number."""
    return 50 * math.ceil(steps / 50)


def _two_digits_up(value: float) -> float:
    if not 0.0 < value < math.inf:
        return 1.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.6g}")


# ------------------------------------------------------------------ words

_SAFE = "where nothing is to be given back, it changes next to nothing."
"""Why to have the default carry while nothing is known."""


def _why_larger(case: Case, larger: Effect, wrong: str) -> str:
    then = f"{larger.radius:g} cuts {cut(larger, case.view.unit)}"
    if case.skewed(larger):
        then += ", and the carry gives back what that takes from the mean."
    elif case.too_short(larger):
        then += f". {_not_seen(case, larger)} Until then keep the default carry: {_SAFE}"
    elif larger.clipped <= RARELY and not case.tail.heavy:
        then += ": it is a guard against bad batches, and you would train as well without clipping."
    else:
        then += ", and plain clipping does no harm there."
    follow = ""
    if isinstance(case.view, NormView):  # usual_quantile is where the larger radius comes from
        follow = f" Norm(Quantile({case.view.usual_quantile:g})) finds such a radius by itself, and follows it."
    return f"Take a larger radius: {case.observed.radius:g} {wrong}. {then}{follow}" + _stock(case, larger)


def _not_seen(case: Case, effect: Effect) -> str:
    """That there were too few steps, and how many would do."""
    return (
        f"Whether that turns the mean gradient does not show in {len(case.view.whole)} steps: watch about "
        f"{_round(case.enough(effect))}."
    )


def _why_wait(case: Case) -> str:
    observed = case.observed
    return (
        f"Not known yet, watch longer. {_name(observed).capitalize()} cuts {cut(observed, case.view.unit)}. "
        f"{_not_seen(case, observed)} Until then keep {_name(observed)}, with the default carry: {_SAFE}"
    )


def _why_carry(case: Case) -> str:
    observed, optimizer = case.observed, case.optimizer
    large = "The gradients that are cut most"
    if case.tail.heavy:
        large = "The large gradients"
    if math.isnan(observed.scaled_bias):
        harm = "without them updates have a mean that the gradients do not have"
    elif observed.scaled_bias >= WORTHWHILE_BIAS:
        harm = f"without them the mean is off by {observed.scaled_bias:.0%}, whatever its scale"
    else:
        harm = f"{observed.clipped:.1%} of the {case.view.unit} hold {observed.bias:.0%} of the mean gradient"
    return (
        f"Keep {_name(observed)}, with the default carry. {large} point one way: {harm}. The carry gives that back "
        f"slowly, which suits {optimizer}; keep your learning rate."
    )


def _why_none(case: Case) -> str:
    observed = case.observed
    if observed.radius == math.inf:
        return "An infinite radius clips nothing."
    return (
        f"You need no clipping. {_name(observed).capitalize()} cuts {cut(observed, case.view.unit)}, and no gradient "
        "stands out. As a guard against bad batches it does no harm."
    )


def _why_plain(case: Case) -> str:
    observed, optimizer = case.observed, case.optimizer
    if observed.clipped <= RARELY:
        only = "only " if observed.clipped > 0.0 else ""
        reason = f"It is a guard against large gradients, and cuts {only}{cut(observed, case.view.unit)}."
    elif case.tail.heavy:
        reason = _why_no_bias(case)
    elif optimizer.divides:
        reason = (
            f"No gradient stands out, so that cutting them only makes their mean shorter, which {optimizer} does not "
            "notice: there is nothing to give back."
        )
    else:
        reason = (
            "No gradient stands out, so that cutting them only makes their mean shorter: a learning rate "
            f"{1 - observed.shrink:.0%} lower, and nothing to give back."
        )
    return f"Keep {_name(observed)}, without a carry. {reason}" + _stock(case, observed)


def _why_no_bias(case: Case) -> str:
    """Of a heavy tail."""
    observed, optimizer = case.observed, case.optimizer
    unseen, steps = "", len(case.view.whole)
    if observed.floor > WORTHWHILE_BIAS:
        unseen = f" (A bias below {observed.floor:.0%} would not show in {steps} steps.)"
    if optimizer.divides and observed.bias >= WORTHWHILE_BIAS and observed.scaled_bias == 0.0:
        return (
            "Cutting the large gradients makes the mean shorter, which "
            f"{optimizer} does not notice, and was not seen to turn it.{unseen}"
        )
    if observed.scaled_bias > 0.0:
        return (
            f"Without the large gradients the mean is off by {observed.scaled_bias:.0%}: next to nothing to give back."
        )
    reason = "The large gradients show no common direction: to all appearance they are noise, which is better cut."
    if math.isnan(case.mean_size):
        reason = (
            f"The large gradients showed no bias in {steps} steps, but the mean gradient was too small "
            "to tell from noise, so that a bias may be hidden in it: watch for longer to be sure. As far as these "
            "steps show, they are noise, which is better cut."
        )
    return reason + unseen


def _stock(case: Case, effect: Effect) -> str:
    """That the framework's own clipping does the same, where it does."""
    call = case.stock.get(type(case.region))
    scheduled = callable(getattr(case.region, "radius", None)) and effect is case.observed
    if call is None or effect.radius is None or scheduled or case.skewed(effect) or case.too_short(effect):
        return ""
    return f" {call.format(radius=f'{effect.radius:.15g}')} does the same."


def _name(effect: Effect) -> str:
    if effect.radius is None:
        return "the region"
    return f"radius {effect.radius:g}"


def cut(effect: Effect, unit: str) -> str:
    """How much is cut, to read."""
    if effect.clipped == 0.0:
        return "nothing"
    if effect.clipped < 0.0005:
        return f"less than 0.1% of the {unit}"
    return f"{effect.clipped:.1%} of the {unit}"


def times(value: float) -> str:
    """A ratio to read."""
    if value >= 100.0:
        return f"{value:,.0f}"
    return f"{value:.2g}"
