"""Radii that nobody has to choose: rules that follow the norms of past gradients, or the norms of the weights.

``Norm`` takes them in place of a number: ``Norm(RMS(2.0))``. A radius is a number, a schedule, or such a rule. A rule
keeps a few numbers for each scope (all parameters, a group, a tensor or a row) and says, before a step is taken, how
long an update may be. It follows the norms of the raw gradients, never those of gradient and carry. Gradients that are
0, or not finite, teach it nothing.

What was published elsewhere under a name of its own is in ``carryclip.presets``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple

from carryclip import _checks
from carryclip.precision import debias_weight


class Past(NamedTuple):
    """What rules remember of each scope; None where none of them needs it. Skipped steps leave it alone."""

    count: Any
    """Norms seen."""
    first: Any = None
    """An average, by the rule's own recursion."""
    second: Any = None
    """Another one."""
    window: Any = None
    """The last norms, a row for each scope, each where its number leaves a rest by the length."""

    def known(self) -> list[Any]:
        """The columns that there are."""
        return [column for column in self if column is not None]

    @staticmethod
    def each(function: Callable[..., Any], *pasts: "Past") -> "Past":
        """The past with ``function`` applied column by column."""
        columns = zip(*pasts, strict=True)
        return Past(*(None if column[0] is None else function(*column) for column in columns))


@dataclass(frozen=True, kw_only=True, repr=False)
class Radius:
    """What is asked of a rule, and what all rules can do.

    Args:
        warmup: norms to see before the rule holds.
        before: the radius until then, of the norm over all scopes of the region together; infinite by default, so that
            nothing is clipped.
        least: the radius is never below this.
        most: nor above this, once the rule holds.
        frozen_after: norms after which what was learned stays as it is; None: never.
    """

    warmup: int = 0
    before: float = math.inf
    least: float = 0.0
    most: float = math.inf
    frozen_after: int | None = None
    keeps: ClassVar[tuple[str, ...]] = ()
    """Fields of ``Past`` that it uses, beside the count."""
    weighs: ClassVar[bool] = False
    """True if it looks at the weights."""

    def __post_init__(self) -> None:
        name = type(self).__name__
        _whole(name, "warmup", self.warmup)
        _checks.number(name, "before", self.before, low_open=True)
        _checks.number(name, "least", self.least)
        _checks.number(name, "most", self.most, low=self.least)
        if self.frozen_after is not None:
            _whole(name, "frozen_after", self.frozen_after)

    @property
    def follows(self) -> bool:
        """Whether it needs the norms of gradients."""
        return bool(self.keeps)

    @property
    def length(self) -> int:
        """Norms that are kept one by one."""
        return 0

    @property
    def size(self) -> Any:
        """Its number, or a schedule of it."""
        raise NotImplementedError

    def radius(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """The radius of each scope.

        Args:
            xp: the array namespace.
            past: of each scope; without columns if it keeps nothing.
            size: its number at this step.
            norm: of this step's gradients; a rule may look at it to clip what is unusual.
            weight: norm of the weights; None unless it ``weighs``.
        """
        found = self.limit(xp, past, size, norm, weight)
        if self.least > 0.0 or self.most < math.inf:
            found = xp.clip(found, self.least, self.most)
        if not self.needed:
            return found
        early: Any = math.inf
        if self.before < math.inf:  # each scope gets what scaling all of them together would leave of it
            total = xp.sqrt(xp.sum(norm * norm))
            over = total > self.before
            early = xp.where(over, norm * (self.before / xp.where(over, total, 1.0)), math.inf)
        return xp.where(past.count >= self.needed, found, early)

    @property
    def needed(self) -> int:
        """Norms without which there is no radius."""
        return max(self.warmup, 1) if self.follows else 0

    def limit(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """The same where there is enough to go by; anything elsewhere."""
        raise NotImplementedError

    def followed(self, xp: Any, past: Past, size: Any, norm: Any) -> Past:
        """The past with this step's norms in it."""
        moved = self.follow(xp, past, size, norm)._replace(count=past.count + 1)
        # A gradient of exactly 0 says nothing of its usual size: an expert that was not asked, a layer behind a 0.
        keep = xp.isfinite(norm) & (norm > 0.0)
        if self.frozen_after is not None:
            keep = keep & (past.count < self.frozen_after)

        def chosen(old: Any, new: Any) -> Any:
            return xp.where(keep if len(old.shape) == len(keep.shape) else keep[..., None], new, old)

        return Past.each(chosen, past, moved)

    def follow(self, xp: Any, past: Past, size: Any, norm: Any) -> Past:
        """The same for norms that are finite, but for the count."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """The first number, and what differs from the defaults."""
        first, *rest = sorted(fields(self), key=lambda each: bool(each.kw_only))
        words = [repr(getattr(self, first.name))]
        for each in rest:
            value = getattr(self, each.name)
            if value != each.default:
                words.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(frozen=True, repr=False)
class RMS(Radius):
    """``multiple`` times the root mean square of past norms.

        v      = decay·v + (1 - decay)·min(norm, reach·radius)²       debiased
        radius = multiple·sqrt(v)

    The one with a theorem: at twice the true root mean square, a full carry is on average at most one of them long,
    whatever the law of the gradients. The running estimate has no proof. A spike counts as ``reach`` radii at the most.

    >>> RMS()
    RMS(2.0)
    """

    multiple: Any = 2.0
    decay: float = 0.99
    reach: float = 5.0
    warmup: int = field(default=10, kw_only=True)
    keeps: ClassVar[tuple[str, ...]] = ("first",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _number("RMS", "multiple", self.multiple)
        _checks.number("RMS", "decay", self.decay, high=1.0, high_open=True)
        _checks.number("RMS", "reach", self.reach, low=1.0)

    @property
    def size(self) -> Any:
        """The multiple."""
        return self.multiple

    def limit(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """See the class."""
        return size * xp.sqrt(past.first / _weight(xp, self.decay, past))

    def follow(self, xp: Any, past: Past, size: Any, norm: Any) -> Past:
        """See the class."""
        most = xp.where(past.count >= self.needed, self.reach * self.limit(xp, past, size, norm, None), math.inf)
        # Before there is anything to go by, and where all was 0, a norm counts in full.
        counted = xp.where((norm > most) & (most > 0.0), most, norm)
        return past._replace(first=past.first + (1.0 - self.decay) * (counted * counted - past.first))


@dataclass(frozen=True, repr=False)
class Quantile(Radius):
    """The norm that a ``share`` of the last ``window`` norms did not exceed, by linear interpolation.

    Exact over a window rather than estimated along the way: there is no step size to choose, it forgets all of the
    past that is older, and a spike counts as one norm among many. The price is ``window`` numbers for each scope, and
    sorting them at each step: nothing for one norm of all parameters, but much for a norm of each row.

    Args:
        share: in (0, 1): 0.9 clips about one gradient in ten.
        window: norms to look back.
        include_current: let a gradient count in its own radius, as AutoClip does; by default only past ones do.

    >>> Quantile(0.9)
    Quantile(0.9)
    """

    share: float = 0.9
    window: int = 100
    include_current: bool = False
    warmup: int = field(default=10, kw_only=True)
    keeps: ClassVar[tuple[str, ...]] = ("window",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.number("Quantile", "share", self.share, high=1.0, low_open=True, high_open=True)
        _whole("Quantile", "window", self.window, least=2)

    @property
    def length(self) -> int:
        """The window's."""
        return self.window

    @property
    def size(self) -> float:
        """The share."""
        return float(self.share)

    @property
    def needed(self) -> int:
        """A gradient that counts for itself is enough for the first radius."""
        return max(self.warmup, 0 if self.include_current else 1)

    def limit(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """See the class."""
        if self.include_current:
            past = self.follow(xp, past, size, norm)._replace(count=past.count + 1)
        places = xp.arange(self.window, norm)
        count = xp.astype(past.count, norm.dtype)
        count = xp.clip(count, 1.0, float(self.window))[..., None]
        norms = xp.sort(xp.where(places < count, past.window[..., : self.window], math.inf))
        wanted = size * (count - 1.0)
        low = xp.floor(wanted)
        high = xp.where(low + 1.0 < count, low + 1.0, low)
        lower = xp.sum(xp.where(places == low, norms, 0.0), -1)
        upper = xp.sum(xp.where(places == high, norms, 0.0), -1)
        return lower + (upper - lower) * (wanted - low)[..., 0]

    def follow(self, xp: Any, past: Past, size: Any, norm: Any) -> Past:
        """See the class."""
        length = past.window.shape[-1]
        here = xp.astype(past.count % self.window, norm.dtype)[..., None] == xp.arange(length, norm)
        return past._replace(window=xp.where(here, norm[..., None], past.window))


@dataclass(frozen=True, repr=False)
class ZScore(Radius):
    """Norms ``threshold`` deviations above the mean are unusual, and are clipped the more the further out they are.

        z      = (norm - mean)/std
        radius = mean + threshold·std            if z <= threshold, so that the gradient passes
                 mean + (threshold²/z)·std       otherwise
        mean   = decay·mean + (1 - decay)·min(norm, radius)
        std²   = decay·std² + (1 - decay)·(min(norm, radius) - mean)²

    The rule of ZClip (https://arxiv.org/abs/2504.02507), without the constant that its code adds to std: that would be
    a scale of its own. Mean and deviation begin with those of the first ``warmup`` norms.

    >>> ZScore(2.5)
    ZScore(2.5)
    """

    threshold: Any = 2.5
    decay: float = 0.97
    warmup: int = field(default=25, kw_only=True)
    keeps: ClassVar[tuple[str, ...]] = ("first", "second")

    def __post_init__(self) -> None:
        super().__post_init__()
        _number("ZScore", "threshold", self.threshold)
        _checks.number("ZScore", "decay", self.decay, high=1.0, high_open=True)
        if self.warmup < 2:
            raise ValueError(f"ZScore: warmup must be at least 2, or there is no deviation; got {self.warmup}.")

    @property
    def size(self) -> Any:
        """The threshold."""
        return self.threshold

    def limit(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """See the class."""
        usual = size * xp.sqrt(past.second)
        beyond = norm - past.first
        out = beyond > usual
        return past.first + xp.where(out, usual * (usual / xp.where(out, beyond, 1.0)), usual)

    def follow(self, xp: Any, past: Past, size: Any, norm: Any) -> Past:
        """See the class."""
        # The first norms count alike, which is the same recursion with a decay that grows.
        seen = xp.astype(past.count, norm.dtype)
        early = past.count < self.warmup
        share = xp.where(early, 1.0 / (seen + 1.0), 1.0 - self.decay)
        limit = self.limit(xp, past, size, norm, None)
        counted = xp.where(early | (norm < limit), norm, limit)
        mean = past.first + share * (counted - past.first)
        # Of norms that count alike the sum of squares grows by (x - old mean)·(x - new mean).
        square = (counted - mean) * xp.where(early, counted - past.first, counted - mean)
        return past._replace(first=mean, second=past.second + share * (square - past.second))


@dataclass(frozen=True, repr=False)
class Average(Radius):
    """``multiple`` times the running average of norms after clipping.

        radius  = multiple·average
        average = decay·average + (1 - decay)·min(norm, radius)

    During the warm-up the average is the smallest norm so far, and ``before`` holds for all scopes together. With
    ``over="tensor"`` this is AdaGC (https://arxiv.org/abs/2502.11034).

    >>> Average(1.05, before=1.0)
    Average(1.05, before=1.0)
    """

    multiple: Any = 1.05
    decay: float = 0.98
    warmup: int = field(default=100, kw_only=True)
    keeps: ClassVar[tuple[str, ...]] = ("first",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _number("Average", "multiple", self.multiple)
        _checks.number("Average", "decay", self.decay, high=1.0, high_open=True)

    @property
    def size(self) -> Any:
        """The multiple."""
        return self.multiple

    def limit(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """See the class."""
        return size * past.first

    def follow(self, xp: Any, past: Past, size: Any, norm: Any) -> Past:
        """See the class."""
        limit = self.radius(xp, past, size, norm, None)
        counted = xp.where(norm < limit, norm, limit)
        smallest = xp.where((past.count > 0) & (past.first < counted), past.first, counted)
        moved = past.first + (1.0 - self.decay) * (counted - past.first)
        return past._replace(first=xp.where(past.count < self.needed, smallest, moved))


@dataclass(frozen=True, repr=False)
class OfWeights(Radius):
    """``multiple`` times the norm of the weights, or of ``floor`` if they are smaller than that.

    With ``over="row"`` this is AGC (https://arxiv.org/abs/2102.06171): each unit's gradient against its own weights.

    >>> OfWeights(0.01)
    OfWeights(0.01)
    """

    multiple: Any = 0.01
    floor: float = 1e-3
    weighs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _number("OfWeights", "multiple", self.multiple)
        _checks.number("OfWeights", "floor", self.floor)

    @property
    def size(self) -> Any:
        """The multiple."""
        return self.multiple

    def limit(self, xp: Any, past: Past, size: Any, norm: Any, weight: Any) -> Any:
        """See the class."""
        return size * xp.where(weight < self.floor, self.floor, weight)


def _weight(xp: Any, decay: float, past: Past) -> Any:
    """What an average of ones would be by now; of an average of nothing it is of no interest."""
    return debias_weight(xp, decay, xp.astype(xp.where(past.count > 0, past.count, 1), past.first.dtype))


def _whole(owner: str, name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{owner}: {name} must be a whole number, at least {least}; got {value!r}.")


def _number(owner: str, name: str, value: Any) -> None:
    """A number or a schedule; one radius holds for the whole vector."""
    if not callable(value) and not (isinstance(value, Real) and not isinstance(value, bool)):
        raise TypeError(f"{owner}: {name} must be a number or a schedule step -> number, got {value!r}.")
    _checks.size(owner, name, value)
