"""U-Clip in JAX: a small flax net on scikit-learn's digits, plain clipping against the default carry, one line apart.

python examples/jax_digits.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from sklearn.datasets import load_digits

from carryclip.optax import Norm, check, metrics, uclip

EPOCHS, BATCH, LR, RADIUS = 15, 16, 0.1, 0.5


class Net(nn.Module):
    """Two dense layers."""

    @nn.compact
    def __call__(self, x):
        """Logits of the ten digits."""
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))


def loss_fn(params, apply_fn, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(apply_fn(params, x), y).mean()


@jax.jit
def train_epoch(state, xs, ys):
    """One pass over the batches; the carry travels inside ``state.opt_state``."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, *batch)
        return state.apply_gradients(grads=grads), loss

    return jax.lax.scan(step, state, (xs, ys))


def train(clip, x, y, seed=0):
    model = Net()
    tx = optax.chain(clip, optax.sgd(LR))  # the one line
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(seed), x[:1]), tx=tx)
    rng = np.random.default_rng(seed)
    for _ in range(EPOCHS):
        order = rng.permutation(len(x) // BATCH * BATCH).reshape(-1, BATCH)
        state, _ = train_epoch(state, x[order], y[order])
    return state


def main():
    digits = load_digits()
    x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
    print(f"{'':22}{'train loss':>11}{'accuracy':>10}{'carry':>14}")
    for name, clip in {
        "SGD": optax.identity(),
        "SGD + optax clipping": optax.clip_by_global_norm(RADIUS),
        "SGD + U-Clip": uclip(Norm(RADIUS), metrics_every=10),
    }.items():
        state = train(clip, x, y)
        loss = float(loss_fn(state.params, state.apply_fn, x, y))
        accuracy = float((state.apply_fn(state.params, x).argmax(-1) == y).mean())
        carry = "-"
        if name.endswith("U-Clip"):
            check(state.opt_state)  # warns of a carry that harms, wind-up, spikes, long delays, repeated skips
            carry = f"{float(metrics(state.opt_state)['carry_ratio']):.1f} radii"
        print(f"{name:22}{loss:11.4f}{accuracy:10.1%}{carry:>14}")


if __name__ == "__main__":
    main()
