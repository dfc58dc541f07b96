"""Every function of the newer pages against its statement, written out once more in plain Python at random points.

A bound that is loose hides mistakes from a simulation. Here a constant that is off by a little is noticed in each of
them, and at the end that is tried.
"""

import functools
import inspect
import itertools
import math

import numpy as np
import pytest

from carryclip import Drip, Gated, Shrunk
from carryclip.theory import nonconvex, optimizers, paths, policies, radii, rates

RNG = np.random.default_rng(20)
CASES: dict[str, tuple[object, dict, float]] = {}
GATE = Gated(decay=0.93, threshold=0.6, cap=7)


def case(function, expected, **given):
    """Note a point, and what the statement says there."""
    CASES[f"{function.__module__.rpartition('.')[2]}.{function.__name__}-{len(CASES)}"] = (function, given, expected)


def drawn(low, high):
    return float(RNG.uniform(low, high))


def settled(alpha, v):
    """Result 2: v/(2a) + a/2 at the best margin up to alpha."""
    a = min(alpha, math.sqrt(v))
    return v / (2 * a) + a / 2


@functools.cache
def weights(t):
    """The weights of the feeds before step t, and that of step t itself."""
    raw = [GATE.decay ** (t - i) for i in range(1, t + 1)]
    total = sum(raw)
    return [w / total for w in raw[:-1]], raw[-1] / total


def past_shuts(t, c):
    before, own = weights(t)
    missing = GATE.threshold - own - c * sum(before)
    return math.exp(-(missing**2) / (2 * sum(w * w for w in before))) if missing > 0 and before else 1.0


def shuts(t, c):
    before, own = weights(t)
    return math.exp(-((GATE.threshold - c) ** 2) / (2 * (sum(w * w for w in before) + own**2)))


def lowest(function, low, high):
    """By brute force."""
    return min(function(low * (high / low) ** (k / 40_000)) for k in range(40_001))


for _ in range(3):
    b, r = drawn(1.05, 3.0), drawn(0.1, 3.0)
    case(radii.rms_average, r * (1 / (2 * min(b - 1, 1)) + min(b - 1, 1) / 2), multiple=b, rms=r)
    case(radii.rms_average, r, multiple=b, rms=r, steady=True)
    beta, v = drawn(0.05, 1.0), drawn(0.1, 4.0)
    level = lowest(lambda b, v=v: math.acosh(1 + math.exp(b * b * v / 2)) / b, beta / 1000, beta)
    case(radii.fixed_adaptive_mean, level, beta=beta, max_variance=v)
    case(radii.adaptive_mean, (1 + math.log(4 / (beta**2 * v))) / beta, beta=beta, min_variance=v)
    case(radii.adaptive_mean, 4 / (900.0 * 30.0**3), beta=30.0, min_variance=900.0)
    a = min(beta, 1 / math.sqrt(v))
    case(radii.adaptive_average, 1 / (2 * a) + a * v / 2, beta=beta, max_variance=v)
    alpha, mean, short, most = drawn(0.1, 1.0), drawn(0.0, 2.0), drawn(0.0, 1.0), drawn(1.0, 9.0)
    found = (v + alpha**2 + short * (2 * (mean + alpha) * most + mean**2)) / (2 * alpha)
    at = {"alpha": alpha, "variance": v, "mean_gradient": mean}
    case(radii.estimated_average, found, short=short, largest_carry=most, **at)
    n, e, k, d, g = 1500, drawn(0.3, 1.0), drawn(1.0, 2.0), drawn(0.5, 2.0), drawn(2.0, 4.0)
    # Half of what is missing is the mean's, half the deviation's; the range of a gradient is 2G.
    off = 2 * math.exp(-2 * n * (e / (2 * k)) ** 2 / (2 * g) ** 2)
    off += math.exp(-(n - 1) * (e / (2 * d * 2 * g)) ** 2 / 2)
    given = {"excess": e, "mean_multiple": k, "std_multiple": d, "gradient_bound": g}
    case(radii.welford_short, min(off, 1.0), n=n, **given)

    cap, gamma, c, extra = drawn(1.0, 20.0), drawn(0.2, 2.0), drawn(0.0, 0.4), drawn(0.1, 3.0)
    case(policies.capped_bias, v / (2 * cap * gamma), variance=v, radius=gamma, cap=cap)
    case(policies.largest_excess, v / (4 * gamma), second_moment=v, radius=gamma)
    t = int(RNG.integers(2, 200))
    case(policies.late_shut, past_shuts(t, c), t=t, clipped_mean=c, policy=GATE)
    given = {"clipped_mean": c, "excess": extra, "variance": v, "radius": gamma, "policy": GATE}
    gate = extra * sum(past_shuts(t, c) for t in range(1, 901)) / 900
    case(policies.gated_average_bias, gate + v / (2 * 7 * gamma), steps=900, **given)
    top, theta = gamma + 0.05, drawn(0.5, 3.0)
    gate = min(gate, 0.05 * sum(shuts(t, c) for t in range(1, 901)) / 900)
    most = min(v / (2 * 7 * gamma), 2 * math.exp(-theta * 7 * gamma) / theta)
    case(policies.gated_average_bias, gate + most, steps=900, gradient_bound=top, rate=theta, **given)
    case(policies.dropped_regret, e + k * d, regret=e, domain=k, dropped=d)
    case(policies.drip_share, 0.9**t, steps=t, policy=Drip(0.1))
    case(policies.drip_carry_bound, gamma / 0.2, radius=gamma, policy=Drip(0.2))
    T, lr, L, gap, M = 400, drawn(0.01, 0.2), drawn(0.5, 4.0), drawn(0.5, 5.0), drawn(0.5, 3.0)
    smooth = {"steps": T, "lr": lr, "smoothness": L, "gap": gap}
    C = 5 * gamma
    found = gap / (lr * T) + L * lr * v / 2 + L * lr * M * C + (M + L * lr * C) * d
    given = {"gradient_norm": M, "moved_square": v, "radius": gamma, "dropped": d, "policy": Drip(0.2)}
    case(policies.drip_stationarity, found, **smooth, **given)
    w = 1 / (2 * 60 - 1)
    case(policies.shrunk_left, w * (1 + extra) / (1 + w * extra), noise=extra, policy=Shrunk(60))
    case(policies.shrunk_noise, 1 / math.sqrt(2 * t), dimension=t)

    found = (gap / (lr * T) + L * lr * v / 2 + L * lr * M * settled(alpha, v)) / (1 - L * lr / 2)
    case(nonconvex.with_margin, found, gradient_norm=M, alpha=alpha, variance=v, **smooth)
    budget = gap / (lr * (1 - L * lr / 2))
    case(nonconvex.clipped_steps, budget / gamma**2, radius=gamma, lr=lr, smoothness=L, gap=gap)
    long = smooth | {"steps": 10**6}
    case(nonconvex.exact_gradients, budget / (10**6 - 2 * budget / gamma**2), radius=gamma, **long)
    B, s2, dim = drawn(0.5, 2.0), drawn(0.1, 1.0), int(RNG.integers(1, 9))
    R = 2 * B + 4 * s2 / gamma * math.log(T)
    case(nonconvex.free_cap, R / gamma, radius=gamma, noise_bound=B, proxy=s2, steps=T)
    kappa = gamma / (4 * s2)
    start = math.log(1 + math.exp(-kappa * R)) / kappa
    # V_1 - inf V, what each step adds, and the slack of the claim.
    found = gap / lr + dim * gamma * start + dim * gamma * (R + start)
    found += T * lr * L * dim * (gamma**2 / 2 + gamma * (R + start)) + T * 2 * dim * gamma * 4 * s2 / (gamma * T)
    given = {"radius": gamma, "noise_bound": B, "proxy": s2, "dimension": dim}
    case(nonconvex.any_radius, 1.5 * found / T, **smooth, **given)
    Q = M + B + gamma
    kappa = gamma / (64 * Q**2)
    R = 1 / kappa + Q + math.log(T) / kappa
    start = math.log(1 + math.exp(-kappa * R)) / kappa
    found = gap / lr + gamma * start + gamma * (R + start) + 2.3 * gamma * Q
    found += T * lr * L * (gamma**2 / 2 + gamma * (R + start))
    given = {"radius": gamma, "noise_bound": B, "gradient_norm": M}
    case(nonconvex.any_norm_radius, 1.2 * found / T, **smooth, **given)

    eta, u, D = (RNG.uniform(0.1, 1.0, 5).tolist() for _ in range(3))
    down = sorted(eta, reverse=True)
    far = drawn(0.5, 3.0)
    spent = far**2 / (2 * down[-1]) + sum(e * (x * x / 2 + x * y) for e, x, y in zip(down, u, D, strict=True))
    case(rates.projected_regret, spent + far * D[-1], rates=down, update_norms=u, carry_norms=D, diameter=far)
    case(rates.leader_regret, spent, rates=down, gradient_norms=u, carry_norms=D, distance=far)
    squares, average = sum(e * e for e in eta), settled(alpha, v)
    case(rates.update_carry, average * squares, rates=eta, alpha=alpha, variance=v)
    jump = far * most * sum(abs(x - y) for x, y in itertools.pairwise(eta))
    case(rates.unit_price, jump, rates=eta, domain=far, carry=most)
    given = {"distance": far, "gradient_square": M, "mean_gradient": mean, "alpha": alpha, "variance": v}
    found = far**2 + squares * M + 2 * mean * average * squares
    case(rates.schedule_regret, found / (2 * sum(eta)), rates=eta, **given)
    falls = sum(min(eta[: k + 1]) ** 2 for k in range(5))
    found += 2 * jump + 2 * mean * average * (squares - falls)
    case(rates.schedule_regret, found / (2 * sum(eta)), rates=eta, jump=jump, carry=2 * average, **given)

    case(paths.age_certificate, gamma + most / t, carry=most, age=t, radius=gamma)
    case(paths.window_carry, max(e * math.sqrt(j) - j * 0.02 for j in range(1, 9999)), deviation=e, alpha=0.02)
    wide = {"deviation": far, "alpha": alpha}
    case(paths.comparator_carry, 2 * far + far**2 / (2 * alpha), **wide)
    # The largest of 2·r·z - z² over 0 <= z <= diameter.
    found = 2 * far + max(2 * far * z - z * z for z in np.linspace(0.0, gamma, 1001)) / (2 * alpha)
    case(paths.comparator_carry, 2 * far + far**2 / (2 * alpha) if gamma > far else found, diameter=gamma, **wide)
    case(paths.comparator_average, v / (2 * alpha), mean_square=v, alpha=alpha)

    beta = drawn(0.0, 0.99)
    case(optimizers.batch_average, settled(alpha, v * 2 / 12), batch=12, workers=2, alpha=alpha, variance=v)
    found = sum((1 - beta) * beta**k * (k + 1) for k in range(20_000)) - 1  # the mean age of what a momentum holds
    case(optimizers.momentum_carry, found * gamma + e, momentum=beta, radius=gamma, carry=e)
    case(optimizers.momentum_gap, 2 * (1 - beta) * e, momentum=beta, largest_carry=e)
    case(optimizers.rate_factor, e / k, gradient_rms=e, update_rms=k)
    case(optimizers.step_average, lr * (1 / (2 * 0.5) + 0.5 / 2), lr=lr, multiple=1.5)
    case(optimizers.waiting, e / k, mean_carry=e, mass=k)


@pytest.mark.parametrize("name", CASES)
def test_a_function_is_its_statement(name):
    function, given, expected = CASES[name]
    tolerance = 1e-5 if function in (radii.fixed_adaptive_mean, paths.window_carry, paths.comparator_carry) else 1e-10
    assert float(function(**given)) == pytest.approx(expected, rel=tolerance, abs=0.0)


def test_no_function_is_left_out():
    """But those that give sequences or arrays, and have tests of their own."""
    others = {"path_carry", "path_curve", "path_radius", "turning_points"}
    for module in (nonconvex, optimizers, paths, policies, radii, rates):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not name.startswith("_") and name not in others:
                assert any(function is each for each, _, _ in CASES.values()), name


@pytest.mark.parametrize("name", CASES)
def test_a_bound_that_is_a_little_weaker_is_noticed(name):
    function, given, expected = CASES[name]
    assert 0.999 * float(function(**given)) != pytest.approx(expected, rel=1e-5, abs=0.0)
