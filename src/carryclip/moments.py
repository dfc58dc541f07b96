"""Running moments of the raw gradient, from which adaptive regions take their radius."""

from dataclasses import dataclass
from typing import Any, ClassVar

from carryclip import _checks
from carryclip.precision import debias_weight


@dataclass(frozen=True)
class Welford:
    """Mean and sample standard deviation of all gradients so far, by Welford's recursion.

    n += 1;  d = g - m;  m += d/n;  M2 += d·(g - m);  std = sqrt(M2/(n-1)).

    >>> Welford()
    Welford()
    """

    warmup: ClassVar[int] = 2
    """Samples needed before a radius exists."""

    def update(self, xp: Any, gradient: Any, mean: Any, second: Any, share: Any) -> tuple[Any, Any]:
        """New (mean, sum of squared deviations) after ``gradient``; ``share`` is 1/n with itself counted."""
        deviation = gradient - mean
        mean = mean + deviation * share
        second = xp.clip(second + deviation * (gradient - mean), 0.0, float(xp.finfo(mean.dtype).max))
        return mean, second

    def factor(self, xp: Any, count: Any) -> Any:
        """What ``estimate`` multiplies with after ``count`` samples, before ``warmup`` anything finite."""
        return 1.0 / xp.clip(count - 1.0, 1.0, None)

    def estimate(self, xp: Any, mean: Any, second: Any, factor: Any) -> tuple[Any, Any]:
        """(mean, standard deviation)."""
        return mean, xp.sqrt(second * factor)


@dataclass(frozen=True)
class EWMA:
    """Exponentially weighted first and second moment; the second moment's root stands for the deviation.

    m = decay·m + (1-decay)·g;  v = decay·v + (1-decay)·g²;  std = sqrt(v).
    Both are divided by 1 - decay^n unless ``debias=False``.

    Args:
        decay: weight of the past, in [0, 1). The paper uses 0.95.
        debias: correct for the zeros the averages start from.

    >>> EWMA(decay=0.9)
    EWMA(decay=0.9, debias=True)
    """

    decay: float = 0.95
    debias: bool = True
    warmup: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _checks.number("EWMA", "decay", self.decay, high=1.0, high_open=True)

    def update(self, xp: Any, gradient: Any, mean: Any, second: Any, share: Any) -> tuple[Any, Any]:
        """New raw averages (m, v) after ``gradient``."""
        # m + (1-decay)·(g - m): the same as decay·m + (1-decay)·g, but exact to the last bits for a decay near 1.
        share = 1.0 - self.decay
        return xp.lerp(mean, gradient, share), xp.lerp(second, gradient * gradient, share)

    def factor(self, xp: Any, count: Any) -> Any:
        """What ``estimate`` multiplies with after ``count`` samples; None without debiasing."""
        return 1.0 / debias_weight(xp, self.decay, xp.clip(count, 1.0, None)) if self.debias else None

    def estimate(self, xp: Any, mean: Any, second: Any, factor: Any) -> tuple[Any, Any]:
        """(mean, root of the second moment)."""
        if factor is not None:
            mean, second = mean * factor, second * factor
        return mean, xp.sqrt(second)


Moments = Welford | EWMA
