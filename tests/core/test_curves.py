"""The same small net on the same data in torch and in JAX: the same loss at every step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from carryclip import EWMA, Adaptive, Component, Drip, Gated, Norm, Shrunk, Sign
from carryclip.optax import uclip
from carryclip.torch import UClip

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 5))
Y = np.sin(2 * X[:, :1]) + 0.3 * RNG.standard_t(3, (64, 1))
WEIGHTS = [RNG.standard_normal((5, 16)) / 2, np.zeros(16), RNG.standard_normal((16, 1)) / 4, np.zeros(1)]
STEPS = 200

RULES = {
    "component": (Component(0.1), True),
    "norm": (Norm(1.5), True),
    "norm gated": (Norm(0.3), Gated()),
    "adaptive": (Adaptive(mean=1, std=0.5, moments=EWMA()), Gated()),
    "sign": (Sign(0.1), True),
    "norm drip": (Norm(0.3), Drip()),
    "component drip": (Component(0.1), Drip()),
    "norm shrunk": (Norm(0.3), Shrunk()),
    "adaptive shrunk": (Adaptive(mean=1, std=0.5, moments=EWMA()), Shrunk()),
}


def torch_curve(region, carry, optimizer_of):
    w = [torch.nn.Parameter(torch.tensor(a)) for a in WEIGHTS]
    optimizer = optimizer_of(w)
    UClip(optimizer, region, carry=carry)
    losses = []
    for step in range(STEPS):
        x, y = (torch.tensor(a[step % 4 * 16 :][:16]) for a in (X, Y))
        loss = ((torch.tanh(x @ w[0] + w[1]) @ w[2] + w[3] - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def jax_curve(region, carry, optimizer):
    with jax.enable_x64(True):
        w = [jnp.asarray(a) for a in WEIGHTS]
        tx = optax.chain(uclip(region, carry), optimizer)
        state = tx.init(w)

        def loss(w, x, y):
            return ((jnp.tanh(x @ w[0] + w[1]) @ w[2] + w[3] - y) ** 2).mean()

        @jax.jit
        def step(w, state, x, y):
            value, grads = jax.value_and_grad(loss)(w, x, y)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state, value

        losses = []
        for k in range(STEPS):
            x, y = (jnp.asarray(a[k % 4 * 16 :][:16]) for a in (X, Y))
            w, state, value = step(w, state, x, y)
            losses.append(float(value))
        return losses


@pytest.mark.pairwise(together=1)
@pytest.mark.filterwarnings("ignore:U-Clip on")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_torch_and_jax_draw_the_same_curve(optimizer, rule):
    pair = {
        "sgd": (lambda w: torch.optim.SGD(w, lr=0.01, momentum=0.9), optax.sgd(0.01, momentum=0.9)),
        "adam": (lambda w: torch.optim.Adam(w, lr=0.01), optax.adam(0.01)),
    }[optimizer]
    one, other = torch_curve(*RULES[rule], pair[0]), jax_curve(*RULES[rule], pair[1])
    np.testing.assert_allclose(one, other, rtol=1e-10)
    assert sum(one[-4:]) < 0.9 * sum(one[:4]), "it learns"
