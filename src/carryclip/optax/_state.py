"""What the transformation keeps between steps, an ordinary pytree, and what can be read from it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import tree_util

from carryclip.algorithm import Rule
from carryclip.diagnosis import LAST_STEP, RUNNING, Course, dangers, is_shut, warn_user
from carryclip.moments import EWMA, Moments, Welford
from carryclip.policy import Policy
from carryclip.radius import RMS, Average, Past, Quantile, ZScore

Tree = Any


class Watch(NamedTuple):
    """The figures behind metrics and warnings."""

    at: Any
    """Step measured last, counted from 0; -1 before the first."""
    last: Any
    """The metrics named in ``carryclip.diagnosis.LAST_STEP``, of that step; NaN before the first."""
    course: Any
    """How the carry fared over the measured steps: ``carryclip.diagnosis.Course`` as a vector."""
    streak: Any
    """Skipped steps in a row."""


class WelfordAverages(NamedTuple):
    """Marks moments that are those of ``Welford``; holds nothing."""


class EWMAAverages(NamedTuple):
    """Marks moments that are those of ``EWMA``; holds nothing."""


class NoAverages(NamedTuple):
    """Marks a rule without moments; holds nothing."""


class NoCarry(NamedTuple):
    """Marks plain clipping; holds nothing."""


class FullCarry(NamedTuple):
    """Marks a policy that pays at once and lets the carry grow without end; holds nothing."""


class BoundedCarry(NamedTuple):
    """Marks one that pays at once and bounds the carry; holds nothing."""


class GatedCarry(NamedTuple):
    """Marks one that follows the feed as well; holds nothing."""


class MixedCarry(NamedTuple):
    """Marks one that mixes the carry slowly into plain clipping; holds nothing."""


class RMSRadii(NamedTuple):
    """Marks what ``RMS`` has learned; holds nothing."""


class QuantileRadii(NamedTuple):
    """Marks what ``Quantile`` has learned; holds nothing."""


class ZScoreRadii(NamedTuple):
    """Marks what ``ZScore`` has learned; holds nothing."""


class AverageRadii(NamedTuple):
    """Marks what ``Average`` has learned; holds nothing."""


def no_past(rules: list[Rule], scopes: int, dtype: Any) -> Any:
    """What radii have learned before the first step, and a mark for each rule; None if they are numbers."""
    found = [rule.region.rule for rule in rules if rule.region.rule is not None and rule.region.rule.follows]
    if not found:
        return None
    marks = {RMS: RMSRadii, Quantile: QuantileRadii, ZScore: ZScoreRadii, Average: AverageRadii}
    keeps = {name for rule in found for name in rule.keeps}
    first, second = (jnp.zeros(scopes, dtype) if name in keeps else None for name in ("first", "second"))
    length = max(rule.length for rule in found)
    window = jnp.zeros((scopes, length), dtype) if length else None
    return tuple(marks[type(rule)]() for rule in found), Past(jnp.zeros(scopes, jnp.int32), first, second, window)


def mark_of(policy: Policy) -> Any:
    """What kind of policy keeps a state, as a part of its structure."""
    if policy.mixes:
        return MixedCarry()
    if policy.gated:
        return GatedCarry()
    if not policy.hasty:
        return NoCarry()
    return BoundedCarry() if policy.bounded else FullCarry()


def kind_of(estimator: Moments | None) -> Any:
    """What the running moments of a rule mean, as a part of the state's structure."""
    kinds = {Welford: WelfordAverages, EWMA: EWMAAverages}
    return NoAverages() if estimator is None else kinds[type(estimator)]()


class UClipState(NamedTuple):
    """State of ``uclip``. Trees are like the parameters', with a ``MaskedNode`` where a leaf is not clipped.

    A skipped step changes ``step``, ``skipped`` and ``watch.streak`` only.
    """

    step: Any
    """Number of updates so far, skipped ones included; what schedules see."""
    skipped: Any
    """How many of them were skipped; None under ``nonfinite="propagate"``, which never skips."""
    dropped: Any
    """Sum of the norms of what the carry policy dropped, and what rounding has taken from it; None with metrics off."""
    carry: Tree
    """What was cut and waits, in at least float32; None under ``carry=False``."""
    mean: Tree
    """Running means of an adaptive region, else None."""
    second: Tree
    """Its second moments, else None."""
    feed: Tree
    """Feed averages of ``Gated`` under a coordinate-wise region, else None."""
    samples: Any
    """Steps each leaf took part in, one entry per leaf; None if no average needs it."""
    gate: tuple[tuple[Any, ...], ...]
    """What the policy remembers of each scope, by rule: its average (of the feed under ``Gated``, of the part that
    plain clipping cuts under ``Drip`` and ``Shrunk``), the steps in it, and under ``Shrunk`` the noise."""
    radii: Any
    """What rules for the radius have learned: marks of their kinds, and ``carryclip.radius.Past`` with an entry for
    each vector; None if radii are numbers."""
    averages: tuple[Any, ...]
    """What the moments of each rule mean; holds nothing."""
    policy: Any
    """Which kind of policy it is; holds nothing."""
    watch: Watch | None
    """Metrics; None with ``metrics_every=0``."""


def metrics(state: Tree) -> dict[str, jax.Array]:
    """The metrics of the last measured step and the running ones, by name, from any optimizer state with a ``uclip``.

    Pure: it works inside ``jit`` and waits for nothing. ``carry_norm`` and ``skipped_steps`` can always be told; the
    others need ``metrics_every=10`` (or another interval) in ``uclip`` and are NaN without it.

    >>> from carryclip import Norm
    >>> from carryclip.optax import metrics, uclip
    >>> tx = optax.chain(uclip(Norm(1.0), metrics_every=10), optax.sgd(0.1))
    >>> params = {"w": jnp.zeros(2)}
    >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params))
    >>> round(float(metrics(state)["grad_norm"]), 3)
    5.0
    """
    own = _the_one(state)
    missing = jnp.full(jnp.shape(own.step), jnp.nan)
    figures: dict[str, Any] = dict.fromkeys([*LAST_STEP, *RUNNING], missing)
    if own.watch is None:
        figures["carry_norm"] = _norm(own.carry, jnp.ndim(own.step), jnp.zeros(jnp.shape(own.step)))
    else:
        figures |= {name: own.watch.last[..., k] for k, name in enumerate(LAST_STEP)}
        figures["dropped_norm"] = jnp.sum(own.dropped, axis=-1)
    figures["skipped_steps"] = jnp.zeros_like(own.step) if own.skipped is None else own.skipped
    return figures


def _norm(tree: Tree, leading: int, missing: jax.Array) -> jax.Array:
    """The norm of all leaves together, one for each entry of the ``leading`` axes that devices or ``vmap`` added."""
    sizes = [jnp.abs(x).astype(jnp.promote_types(jnp.abs(x).dtype, jnp.float32)) for x in jax.tree.leaves(tree)]
    squares = [jnp.sum(x**2, axis=tuple(range(leading, x.ndim))) for x in sizes]
    return jnp.sqrt(sum(squares)) if squares else missing


_LOOK = "jax.debug.print inside the loss, or the config jax_debug_nans, shows where they arise"
_AVERAGING = {
    "ScaleByAdamState": "Adam",
    "ScaleByAmsgradState": "AMSGrad",
    "ScaleByLionState": "Lion",
    "ScaleByBeliefState": "AdaBelief",
    "ScaleByRmsState": "RMSProp",
    "ScaleByRStdDevState": "RMSProp",
    "TraceState": "momentum",
}
"""Parts of optimizers that average what they are given or divide it by its size, by the name of their state."""


def check(state: Tree) -> None:
    """Warn of what the state shows: a carry that harms this optimizer, wind-up, a spike, a long delay, skips.

    Call it outside ``jit``, where you log: it reads a few numbers from the device. Only how the carry has fared needs
    the metrics, so that ``uclip`` must measure: ``metrics_every=10``, for example.

    Raises:
        ValueError: there is a carry that pays at once, and nothing was measured by which to judge it.
    """
    optimizer = next((_AVERAGING[type(n).__name__] for n in walk(state) if type(n).__name__ in _AVERAGING), "")
    for name, own in find(state):
        where = f" at {name}" if name else ""
        messages = _haste(own, optimizer) | (
            _told_unmeasured(own, where) if own.watch is None else _told(own, optimizer)
        )
        for message in messages.values():
            warn_user(f"U-Clip in the optimizer state{where}: {message}")


def _is_hasty(own: UClipState) -> bool:
    return isinstance(own.policy, (FullCarry, BoundedCarry, GatedCarry))


def _haste(own: UClipState, optimizer: str) -> dict[str, str]:
    if not optimizer or not _is_hasty(own):
        return {}
    return {
        "haste": f"a carry that pays at once (True, Gated, Capped or Leaky) in front of {optimizer} often trains far "
        "worse than plain clipping at the same learning rate. Write uclip(region), whose default carry is safe with "
        "any optimizer, or carry=False."
    }


def _told_unmeasured(own: UClipState, where: str) -> dict[str, str]:
    """What can be told without metrics; an error if that is not enough to judge by."""
    steps = int(np.max(jax.device_get(own.step)))
    skipped = 0 if own.skipped is None else int(np.max(jax.device_get(own.skipped)))
    if _is_hasty(own):
        size = float(np.max(jax.device_get(_norm(own.carry, jnp.ndim(own.step), jnp.zeros(jnp.shape(own.step))))))
        raise ValueError(
            f"check() cannot judge the carry{where}: this uclip measures nothing. Make it with uclip(region, "
            f"metrics_every=10). What can be told: after {steps} steps the carry has norm {size:.3g}, and {skipped} "
            "steps were skipped. Before momentum or Adam such a carry is itself the trouble: it often trains far worse "
            "than plain clipping at the same learning rate. There, leave carry= out, or write carry=False."
        )
    if steps >= 10 and skipped > steps / 2:
        return {"skips": f"{skipped} of {steps} steps were skipped because gradients were not finite. {_LOOK}."}
    return {}


def _told(own: UClipState, optimizer: str) -> dict[str, str]:
    """What the metrics show, by kind of danger."""
    assert own.watch is not None
    last, course, streak = (np.asarray(x) for x in jax.device_get((own.watch.last, own.watch.course, own.watch.streak)))
    found: dict[str, str] = {}
    # Devices, or what vmap added, each have figures of their own; the first that shows a danger is reported.
    carried = last[..., LAST_STEP.index("carry_ratio")].reshape(-1)
    how = {
        "look": _LOOK,
        "unbounded": isinstance(own.policy, FullCarry),
        "optimizer": optimizer,
        "smooth": bool(optimizer),
        "hasty": _is_hasty(own),
    }
    gradient, update, radius = (
        last[..., LAST_STEP.index(name)] for name in ("grad_norm", "update_norm", "radius_norm")
    )
    total = last[..., LAST_STEP.index("sum_norm")]
    # Where a mean gets through a radius of 0, as with Symmetric, the update is not of the radius' size.
    shut = is_shut(radius, gradient) & (update <= 2.0 * radius) & ((total > 0.0) | (gradient > 0.0))
    rows = zip(carried, course.reshape(len(carried), -1), streak.reshape(-1), shut.reshape(-1), strict=True)
    for ratio, row, skips, closed in rows:
        for kind, message in dangers(float(ratio), Course(*map(float, row)), float(skips), shut=bool(closed), **how):
            found.setdefault(kind, message)
    if np.any(shut):
        found["shut"] = (
            f"the radius was 0 at step {np.max(np.asarray(own.watch.at))}, and so was the update. If a schedule has "
            "come to 0, end it at a small positive radius."
        )
    return found


def find(state: Tree) -> list[tuple[str, UClipState]]:
    """Every ``UClipState`` in an optimizer state, with the path to it."""
    found = [
        (tree_util.keystr(path), node)
        for path, node in tree_util.tree_flatten_with_path(state, is_leaf=lambda n: isinstance(n, UClipState))[0]
        if isinstance(node, UClipState)
    ]
    if not found:
        raise ValueError(
            "There is no uclip in this optimizer state. Pass the state of the optimizer that contains it, for example "
            "that of optax.chain(carryclip.optax.uclip(Norm(1.0)), optax.adamw(3e-4))."
        )
    _refuse_inner_guard(state)
    return found


def _the_one(state: Tree) -> UClipState:
    found = find(state)
    if len(found) > 1:
        raise ValueError(
            f"There are {len(found)} uclips in this optimizer state, at {', '.join(name for name, _ in found)}. "
            "Pass the part that holds the one you mean, for example state.inner_states['decay'] of optax.partition."
        )
    return found[0][1]


def _refuse_inner_guard(state: Tree) -> None:
    """A guard against NaN behind a ``uclip`` that lets NaN through protects the optimizer, but not the carry."""
    for chain in walk(state):
        if type(chain) is not tuple:
            continue
        exposed = False
        for part in chain:
            if exposed and _nodes(part, optax.ApplyIfFiniteState):
                raise ValueError(
                    'A uclip with nonfinite="propagate" stands in front of optax.apply_if_finite: a NaN is kept from '
                    "the optimizer but stays in the carry for ever. Put the guard outside, "
                    'optax.apply_if_finite(optax.chain(uclip(...), ...), n), or use nonfinite="skip".'
                )
            exposed = exposed or any(own.skipped is None for own in _nodes(part, UClipState))


def walk(tree: Tree) -> Iterator[Any]:
    """Every inner node of a tree, from the top down; ``UClipState`` counts as a leaf."""
    level = None if isinstance(tree, UClipState) else tree_util.default_registry.flatten_one_level(tree)
    if level is not None:
        yield tree
        for child in level[0]:
            yield from walk(child)


def _nodes(tree: Tree, kind: type) -> list[Any]:
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in nodes if isinstance(node, kind)]
