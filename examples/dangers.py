"""The full carry's two dangers, and what each policy makes of them, on f(x) = x²/2 with radius 1 and lr 0.1.

Prints a table: lowest point reached from x = 100 (wind-up), lowest point after one gradient of 10,000 radii at the
optimum (spike), and the distance of the mean iterate from the optimum under skewed noise (bias). The optimizer is SGD
without momentum: in front of momentum or Adam all that carry get a warning, but for Drip() and Shrunk().

    python examples/dangers.py
"""

import warnings

import numpy as np
import torch

from carryclip import Capped, CarryClipWarning, Component, Drip, Gated, Leaky, Shrunk
from carryclip.torch import UClip

POLICIES = {
    "clip (carry=False)": False,
    "full (carry=True)": True,
    "Capped(10)": Capped(10),
    "Leaky(0.9)": Leaky(0.9),
    "Gated()": Gated(),
    "Drip()": Drip(),
    "Shrunk()": Shrunk(),
}


def descend(carry, start, noise, steps):
    """Lanes of SGD side by side, one per coordinate of x; returns all iterates."""
    x = torch.nn.Parameter(torch.full((noise.shape[1],), float(start), dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.1)
    UClip(optimizer, Component(1.0), carry=carry, metrics_every=0)
    path = []
    for step in range(steps):
        x.grad = x.detach() + torch.from_numpy(noise[step])
        optimizer.step()
        path.append(x.detach().numpy().copy())
    return np.stack(path)


def main():
    warnings.simplefilter("ignore", CarryClipWarning)
    still, spike = np.zeros((3000, 1)), np.zeros((3000, 1))
    spike[10] = 1e4
    skewed = np.random.default_rng(0).lognormal(0, 1.5, (4000, 500)) - np.exp(1.5**2 / 2)
    print(f"{'policy':20} {'wind-up':>10} {'spike':>10} {'bias':>10}")
    for name, carry in POLICIES.items():
        low = descend(carry, 100, still, 3000).min()
        hit = descend(carry, 0, spike, 3000).min()
        bias = abs(descend(carry, 0, skewed, 4000)[2000:].mean())
        print(f"{name:20} {low:10.1f} {hit:10.1f} {bias:10.2f}")


if __name__ == "__main__":
    main()
