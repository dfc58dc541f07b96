"""Which radius? Bounds and simulation side by side, for a gradient with rare large values.

    python examples/which_radius.py

The mean gradient is 0.3; one gradient in twenty is 3.8 larger. The bounds are those of the paper's full carry
(carry=True) with SGD. Needs NumPy alone.
"""

import numpy as np

from carryclip import Component
from carryclip.theory import bounds, noise, problems, simulate

MEAN = 0.3
LAW = noise.Rare(4.0, p=0.05)


def main() -> None:
    radii = np.array([0.4, 0.5, 0.8, 1.5, 3.0])
    given = {"noise": LAW, "lr": 1.0, "steps": 3000, "seeds": 1000, "times": [3000]}
    carried = simulate.run(problems.Linear(MEAN), Component(radii), carry=True, **given)
    plain = simulate.run(problems.Linear(MEAN), Component(radii), carry=False, **given)
    rate = bounds.lundberg_rate(alpha=radii - MEAN, noise=LAW)
    lost = MEAN + plain.mean_position[-1, :, 0] / 3000  # plain clipping's bias, for which there is no carry to make up
    print("radius   carry: mean (bound)   99 % below (bound)   plain clipping loses")
    for k, radius in enumerate(radii):
        mean, level = carried.carry[-1, k].mean(), carried.quantile(0.99)[k]
        limits = bounds.lundberg_mean(rate=rate[k]), bounds.lundberg_quantile(0.01, rate=rate[k])
        print(f"{radius:6.1f} {mean:12.1f} ({limits[0]:5.1f}) {level:13.1f} ({limits[1]:5.1f}) {lost[k] / MEAN:16.0%}")
    print("\nA radius near the mean gradient works, at the price of a long carry; plain clipping loses the rare part.")


if __name__ == "__main__":
    main()
