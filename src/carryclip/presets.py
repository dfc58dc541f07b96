"""Published rules for the radius, each as one call that returns a region with its paper's numbers.

All of them were published as plain clipping, which is ``carry=False``. The default carry goes with each of them too.
"""

import math
from typing import Literal

from carryclip import _checks
from carryclip.radius import Average, OfWeights, Quantile, ZScore
from carryclip.regions import Norm


def autoclip(percentile: float = 10, window: int = 1000) -> Norm:
    """AutoClip (https://arxiv.org/abs/2007.14469): clip to a percentile of the norms seen so far.

        radius = percentile of {norm of each gradient up to and including this one}

    ``UClip(optimizer, autoclip(), carry=False)`` is the published rule. The default carry works with it too.

    The paper keeps every norm since the first step. A state of fixed size cannot: this one keeps the last ``window``,
    so both are the same for the first ``window`` steps, and later ours follows the newer ones. At the paper's 10 about
    nine gradients in ten are clipped. That is close to giving all of them one length, which follows the run.

    Args:
        percentile: in (0, 100).
        window: how many norms to keep.

    >>> autoclip()
    Norm(radius=Quantile(0.1, window=1000, include_current=True, warmup=0), over='all')
    """
    _checks.number("autoclip", "percentile", percentile, high=100.0, low_open=True, high_open=True)
    return Norm(Quantile(percentile / 100, window, include_current=True, warmup=0))


def zclip(threshold: float = 2.5, decay: float = 0.97, warmup: int = 25, max_norm: float | None = None) -> Norm:
    """ZClip (https://arxiv.org/abs/2504.02507): clip norms that stand out of their running mean and deviation.

        z      = (norm - mean)/std
        radius = mean + (threshold²/z)·std       where z > threshold; other gradients pass

    ``UClip(optimizer, zclip(), carry=False)`` is the published rule. The default carry works with it too.

    During the warm-up nothing is clipped. The authors' code puts a fixed limit of 1.0 on top of the rule, which then
    holds from the first step on (``max_grad_norm=1.0``). Here there is none unless you ask: ``zclip(max_norm=1.0)``.

    Args:
        threshold: deviations above the mean from which on a norm is clipped.
        decay: of the running mean and deviation, which take in norms as they are after clipping.
        warmup: norms from which mean and deviation begin.
        max_norm: a fixed limit on top, during the warm-up as well; None for none.

    >>> zclip()
    Norm(radius=ZScore(2.5), over='all')
    >>> zclip(max_norm=1.0)
    Norm(radius=ZScore(2.5, before=1.0, most=1.0), over='all')
    """
    limit = _limit("zclip", max_norm)
    return Norm(ZScore(threshold, decay, warmup=warmup, before=limit, most=limit))


def adagc(multiple: float = 1.05, decay: float = 0.98, warmup: int = 100, max_norm: float | None = 1.0) -> Norm:
    """AdaGC (https://arxiv.org/abs/2502.11034): clip each tensor to a little more than its own average norm.

        radius  = multiple·average                                       of each tensor
        average = decay·average + (1 - decay)·min(norm, radius)

    ``UClip(optimizer, adagc(), carry=False)`` is the published rule. The default carry works with it too.

    During the warm-up all tensors together are clipped to ``max_norm``, and each average is the smallest norm of its
    tensor after that.

    Args:
        multiple: of the average, the largest norm of a tensor.
        decay: of the average.
        warmup: steps before the averages hold.
        max_norm: the limit for all tensors together until then; None for none.

    >>> adagc()
    Norm(radius=Average(1.05, before=1.0), over='tensor')
    """
    return Norm(Average(multiple, decay, warmup=warmup, before=_limit("adagc", max_norm)), over="tensor")


def agc(clipping: float = 0.01, eps: float = 1e-3, over: Literal["row", "column", "tensor"] = "row") -> Norm:
    """AGC (https://arxiv.org/abs/2102.06171): clip the gradient of each unit relative to the unit's own weights.

        radius = clipping·max(norm of the weights, eps)                  of each row

    ``UClip(optimizer, agc(), carry=False)`` is the published rule. The default carry works with it too. It learns
    nothing from gradients, so there is no warm-up and no state. In JAX call ``tx.update(gradients, state, params)``.

    The paper leaves the last linear layer unclipped: give its param group None instead of a region.

    Args:
        clipping: largest norm of a gradient, relative to that of the weights.
        eps: weights shorter than this count as this long, or those that begin at 0 would never move.
        over: where a unit's weights are: ``"row"``, ``w[k]``, in PyTorch; ``"column"``, ``w[..., k]``, in JAX.

    >>> agc()
    Norm(radius=OfWeights(0.01), over='row')
    >>> agc(0.02, over="column")
    Norm(radius=OfWeights(0.02), over='column')
    """
    return Norm(OfWeights(clipping, eps), over=over)


def _limit(owner: str, max_norm: float | None) -> float:
    """A largest norm, infinite where there is none."""
    if max_norm is None:
        return math.inf
    _checks.number(owner, "max_norm", max_norm, low_open=True)
    return float(max_norm)
