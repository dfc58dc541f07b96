"""Compiled, ``uclip`` moves no more memory than what one would write by hand for the same promises."""

import jax
import jax.numpy as jnp
import pytest
from optax_passes import by_hand, component, norm

from carryclip import Component, Norm
from carryclip.optax import uclip

PARAMS = {f"layer{k}": jnp.zeros((256, 256)) for k in range(6)}


@pytest.mark.parametrize("donate", [(), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (uclip(Component(0.1), carry=True, nonfinite="propagate"), by_hand(component, guard=False)),
        (uclip(Component(0.1), carry=True), by_hand(component)),
        (uclip(Norm(1.0), carry=True, nonfinite="propagate"), by_hand(norm, guard=False)),
        (uclip(Norm(1.0), carry=True), by_hand(norm)),
    ],
    ids=["component", "component guarded", "norm", "norm guarded"],
)
def test_no_more_passes_over_memory(ours, theirs, donate):
    def compiled(tx):
        update = jax.jit(lambda g, s: tx.update(g, s), donate_argnums=donate)
        return update.lower(PARAMS, jax.eval_shape(tx.init, PARAMS)).compile()

    mine, hand = compiled(ours), compiled(theirs)
    model = sum(x.nbytes for x in PARAMS.values())
    # A hundredth of the model covers the few scalars that tell steps and skips.
    assert mine.cost_analysis()["bytes accessed"] <= hand.cost_analysis()["bytes accessed"] + model / 100
    assert mine.memory_analysis().temp_size_in_bytes <= hand.memory_analysis().temp_size_in_bytes + model / 100
    assert big_copies(mine) <= big_copies(hand)


def big_copies(program):
    return sum("f32[256,256]" in line and " copy(" in line for line in program.as_text().splitlines())
