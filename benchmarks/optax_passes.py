"""Bytes moved and time taken by compiled ``uclip``, beside the same promise written by hand and plain optax clipping.

    python benchmarks/optax_passes.py [millions of parameters, default 25]

Bytes are XLA's own estimate, in model sizes; times are medians of interleaved runs, as ratios to the hand-written one.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import optax

from carryclip import Component, Norm
from carryclip.optax import uclip


def by_hand(clip, *, guard=True):
    """The two lines of the paper; with ``guard`` a bad gradient changes nothing."""

    def update(gradients, carry, params=None):
        total = jax.tree.map(jnp.add, gradients, carry)
        sent, bad = clip(total, gradients)
        rest = jax.tree.map(jnp.subtract, total, sent)
        if guard:
            sent = jax.tree.map(lambda u: jnp.where(bad, 0.0, u), sent)
            rest = jax.tree.map(lambda old, new: jnp.where(bad, old, new), carry, rest)
        return sent, rest

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def component(total, gradients):
    bad = ~jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(gradients)]))
    return jax.tree.map(lambda s: jnp.clip(s, -0.1, 0.1), total), bad


def norm(total, gradients):
    size = optax.tree.norm(total)
    return jax.tree.map(lambda s: s * jnp.minimum(1.0, 1.0 / size), total), ~jnp.isfinite(size)


TABLE = {
    "component": {
        "by hand": by_hand(component),
        "uclip": uclip(Component(0.1), carry=True),
        "uclip, propagate": uclip(Component(0.1), carry=True, nonfinite="propagate"),
        "uclip, metrics_every=10": uclip(Component(0.1), carry=True, metrics_every=10),
        "optax.clip": optax.clip(0.1),
    },
    "norm": {
        "by hand": by_hand(norm),
        "uclip": uclip(Norm(1.0), carry=True),
        "uclip, propagate": uclip(Norm(1.0), carry=True, nonfinite="propagate"),
        "uclip, metrics_every=10": uclip(Norm(1.0), carry=True, metrics_every=10),
        "optax.clip_by_global_norm": optax.clip_by_global_norm(1.0),
    },
}


def main() -> None:
    """Compile, interleave, print."""
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 25
    leaves = max(1, round(millions * 1e6 / 1024**2))
    model = {f"layer{k}": jax.random.normal(jax.random.key(k), (1024, 1024)) for k in range(leaves)}
    size = sum(x.nbytes for x in model.values())
    print(f"{leaves} leaves of 1024 x 1024, jax {jax.__version__} on {jax.devices()[0].device_kind}, state donated")
    for kind, rows in TABLE.items():
        runs = {}
        for name, tx in rows.items():
            update = jax.jit(lambda g, s, tx=tx: tx.update(g, s), donate_argnums=1)
            moved = update.lower(model, tx.init(model)).compile().cost_analysis()["bytes accessed"]
            _, state = update(model, tx.init(model))
            runs[name] = [update, state, [], moved / size]
        for _ in range(15):
            for run in runs.values():
                start = time.perf_counter()
                for _ in range(10):
                    updates, run[1] = run[0](model, run[1])
                jax.block_until_ready((updates, run[1]))
                run[2].append(time.perf_counter() - start)
        hand = statistics.median(runs["by hand"][2])
        print(f"\n{kind:28}{'bytes / model':>14}{'time / by hand':>16}")
        for name, (_, _, times, moved) in runs.items():
            print(f"{name:28}{moved:14.1f}{statistics.median(times) / hand:16.2f}")


if __name__ == "__main__":
    main()
