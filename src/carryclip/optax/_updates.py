"""``clip_updates``: clip the optimizer's step instead of the gradient, as the last link of an ``optax.chain``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optax

from carryclip.algorithm import NonFinite
from carryclip.carry import CarryPolicy
from carryclip.optax._transform import uclip
from carryclip.regions import Component, Norm, Region, at_step

TWO_RATES = Component(2.0)
"""In units of the learning rate."""


def clip_updates(
    learning_rate: float | Callable[[Any], Any] | None,
    region: Region = TWO_RATES,
    carry: CarryPolicy = False,
    nonfinite: NonFinite = "skip",
    **options: Any,
) -> optax.GradientTransformation:
    """Clip the step that the chain before has made, weight decay included; put it *last*.

    With n the step so far, w = clip(n + e) is sent and e = n + e - w waits, in units of the parameters: parameters less
    e move by exactly what the optimizer wanted, however its learning rate changes.

    Args:
        learning_rate: a number or a schedule, the one the optimizer has: radii count in it. None: radii are lengths.
        region: where the step must lie: ``Component`` or ``Norm``. The default holds each step within two learning
            rates, which an Adam step exceeds only where gradients are far above their usual size.
        carry: what becomes of what is cut; False, plain clipping, is the default. Drip() pays it back slowly. The full
            carry (True) has the proofs, for steps whose mean stays within the radius; it is for SGD without momentum.
        nonfinite: as for ``uclip``; a skipped step leaves the parameters as they were.
        options: of ``uclip``: ``metrics_every``, ``groups``, ...

    >>> import jax.numpy as jnp, optax
    >>> from carryclip.optax import Component, clip_updates
    >>> tx = optax.chain(optax.sgd(0.25), clip_updates(0.25, Component(1.0), carry=True))
    >>> state = tx.init(jnp.zeros(2))
    >>> updates, state = tx.update(jnp.array([3.0, 0.5]), state)
    >>> print(updates, state[1].carry)
    [-0.25  -0.125] [-0.5  0. ]
    """
    if not isinstance(region, (Component, Norm)):
        raise TypeError(f"clip_updates: region must be Component(...) or Norm(...), got {region!r}.")
    if learning_rate is None:
        return uclip(region, carry, nonfinite, **options)
    if isinstance(region, Norm) and region.rule is not None:
        raise TypeError(f"clip_updates: {region.rule!r} says its own radius: write learning_rate=None.")
    if not (callable(region.radius) or isinstance(region.radius, (int, float))):
        raise TypeError("clip_updates: radii given per parameter are lengths: write learning_rate=None.")
    own, rate = region.radius, learning_rate

    def radius(step: Any) -> Any:
        now = rate(step) if callable(rate) else rate
        return at_step("clip_updates", own, step) * now

    if not callable(rate) and not callable(own):
        return uclip(replace(region, radius=float(own) * float(rate)), carry, nonfinite, **options)
    return uclip(replace(region, radius=radius), carry, nonfinite, **options)
