"""The rules by which figures of the theory are judged."""

from collections.abc import Sequence

import numpy as np

from carryclip_lab.analysis.claims import Verdict


def reaches_optimum(
    optimum: float, sgd: tuple[float, float], carried: tuple[float, float], clipped: tuple[float, float], alias: float
) -> Verdict:
    """T1, from (mean, standard error) of the final iterates.

    Holds if SGD and U-Clip end at the optimum and clipped SGD at the alias, each within three standard errors. In part
    if U-Clip ends where SGD does and both are within 0.1 of the optimum, clipped SGD within 0.1 of the alias.
    """
    errors = [abs(mean - goal) for (mean, _), goal in ((sgd, optimum), (carried, optimum), (clipped, alias))]
    allowed = [3 * error for _, error in (sgd, carried, clipped)]
    if all(error <= limit for error, limit in zip(errors, allowed, strict=True)):
        return "holds"
    alike = abs(sgd[0] - carried[0]) <= 3 * float(np.hypot(sgd[1], carried[1]))
    return "holds in part" if alike and max(errors) <= 0.1 else "contradicted"


def pulls_inside(clipped: float, carried: float) -> Verdict:
    """T2, from the pull to the optimum inside the interval as a share of SGD's: below 0.1, and above 0.5 with carry."""
    right = (abs(clipped) < 0.1, carried > 0.5)
    return "holds" if all(right) else "holds in part" if any(right) else "contradicted"


def vanishes(carry_slope: float, bias_slope: float) -> Verdict:
    """T3, from slopes on logarithmic axes: 0 for the carry and -1 for the average bias, each within 0.1."""
    right = (abs(carry_slope) <= 0.1, abs(bias_slope + 1.0) <= 0.1)
    return "holds" if all(right) else "holds in part" if any(right) else "contradicted"


def tracks(*ratios: Sequence[float]) -> Verdict:
    """T4 and T5, from bound/percentile along each sweep.

    Every ratio must be at least 1, or the bound is no bound. It tracks up to a constant if the ratio changes by a
    factor of 2 at most along each sweep; in part if it does along one of them, or by 5 at most along each.
    """
    if not all(len(ratio) for ratio in ratios):
        return "inconclusive"
    if min(min(ratio) for ratio in ratios) < 1.0:
        return "contradicted"
    spreads = [max(ratio) / min(ratio) for ratio in ratios]
    if max(spreads) <= 2.0:
        return "holds"
    return "holds in part" if min(spreads) <= 2.0 or max(spreads) <= 5.0 else "contradicted"


def nearly_tight(ratios: Sequence[float]) -> Verdict:
    """T6, from bound/observed at several horizons: within 1.5 at all of them; in part if at some."""
    if min(ratios) < 1.0:
        return "contradicted"
    close = [ratio <= 1.5 for ratio in ratios]
    return "holds" if all(close) else "holds in part" if any(close) else "contradicted"
