"""The simulator is the shipped algorithm, many times: equal to the reference, reproducible, honest about bad input."""

import json
import time

import numpy as np
import pytest

from carryclip import (
    EWMA,
    RMS,
    Adaptive,
    Capped,
    Component,
    Drip,
    Gated,
    Leaky,
    Norm,
    Shrunk,
    Sign,
    Symmetric,
    Welford,
    reference,
)
from carryclip.theory import noise, problems
from carryclip.theory.simulate import Above, Simulation, log_times, run

REGIONS = {
    "Component": Component(0.4),
    "schedule": Component(lambda step: 1.0 / (1 + step)),
    "Norm": Norm(0.9),
    "Welford": Adaptive(mean=1, std=0.5),
    "EWMA": Adaptive(mean=1, std=0.5, moments=EWMA(0.8), include_current=True),
    "Sign": Sign(0.7),
    "Symmetric": Symmetric(std=1, moments=Welford()),
}
POLICIES = [True, False, Capped(2), Leaky(0.8), Gated(decay=0.8, cap=5), Drip(0.2), Shrunk(5)]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("name", REGIONS)
def test_every_run_is_the_references(name, policy):
    """Three runs side by side in four dimensions against three runs of the oracle, on the gradients they saw."""
    region, steps = REGIONS[name], 40
    draws = np.random.default_rng(0).standard_t(3, (steps, 3, 4))
    given = iter(draws)
    seen = run(
        problems.Quadratic(start=[3.0, 0.0, -2.0, 1.0]),
        region,
        noise=noise.Given(lambda rng, shape: next(given)),
        carry=policy,
        dimension=4,
        steps=steps,
        seeds=3,
        times=range(1, steps + 1),
        paths=True,
    )
    for lane in range(3):
        oracle, x = reference.UClip(region, carry=policy), np.array([3.0, 0.0, -2.0, 1.0])
        for n in range(steps):
            x = x - 0.1 * oracle.step([x + draws[n, lane]])[0]
            assert seen.path[n, lane] == pytest.approx(x, rel=1e-9, abs=1e-12)


def test_plain_sgd_is_the_run_without_a_region():
    seen = run(problems.Quadratic(start=2.0), None, steps=10, seeds=2, lr=0.5)
    assert seen.final == pytest.approx(np.full((2, 1), 2.0 * 0.5**10))
    assert not seen.carry.any()


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    def final(seed):
        return run(problems.Absolute(2.0), Above(0.1), noise=noise.Uniform(1.0), steps=50, seeds=5, seed=seed).final

    assert (final(3) == final(3)).all()
    assert (final(3) != final(4)).any()


def test_a_point_of_a_sweep_is_the_run_by_itself():
    given = {"steps": 60, "seeds": 7, "dimension": 2, "times": 6}
    margins, scales, rates = np.array([[0.1], [0.5]]), np.array([0.5, 1.0, 2.0]), np.array([0.1, 0.05, 0.2])
    sweep = run(problems.Absolute(2.0), Above(margins), noise=noise.Uniform(scales), lr=rates, **given)
    assert sweep.carry.shape == (6, 2, 3, 7)
    assert sweep.final.shape == (2, 3, 7, 2)
    assert sweep.mean_carry.shape == (6, 2, 3, 2)
    alone = run(problems.Absolute(2.0), Above(0.5), noise=noise.Uniform(2.0), lr=0.2, **given)
    assert (sweep.final[1, 2] == alone.final).all()
    assert (sweep.carry[:, 1, 2] == alone.carry).all()
    radii = run(problems.Absolute(2.0), Component([0.3, 0.8]), noise=noise.Uniform(1.0), **given)
    single = run(problems.Absolute(2.0), Component(0.8), noise=noise.Uniform(1.0), **given)
    assert (radii.final[1] == single.final).all()


def test_what_is_recorded():
    seen = run(
        problems.Absolute(3.0), Above(0.2), noise=noise.TwoPoint(1.0), steps=30, seeds=4, times=range(1, 31), paths=True
    )
    path = np.concatenate([np.full((1, 4, 1), 3.0), seen.path])[:, :, 0]
    assert seen.regret[-1] == pytest.approx(np.abs(path[:-1]).mean(0))
    carry = np.concatenate([np.zeros((1, 4)), seen.carry])
    assert seen.average_carry[-1] == pytest.approx(carry[:-1].mean(0))
    assert seen.peak_carry == pytest.approx(carry.max(0))
    assert seen.mean_position[:, 0] == pytest.approx(seen.path[:, :, 0].mean(1))
    assert seen.spread[:, 0] == pytest.approx(seen.path[:, :, 0].std(1))
    assert seen.quantile(0.5) == pytest.approx(np.median(seen.carry[-1]))
    assert seen.quantile(0.5, pooled=True) == pytest.approx(np.median(seen.carry))
    assert log_times(10_000, 5).tolist() == [1, 10, 100, 1000, 10_000]


@pytest.mark.parametrize("paths", [True, False])
def test_a_saved_simulation_comes_back(tmp_path, paths):
    seen = run(
        problems.Aliasing(),
        Component([1.0, 2.0]),
        carry=Gated(),
        lr=0.01,
        steps=20,
        seeds=3,
        times=[5, 20],
        paths=paths,
    )
    back = Simulation.load(seen.save(tmp_path / "seen.npz"))
    assert back.setting == seen.setting
    assert json.dumps(back.setting)
    assert back.setting["region"] == {"kind": "Component", "radius": [1.0, 2.0]}
    for name in (
        "times",
        "carry",
        "average_carry",
        "regret",
        "mean_carry",
        "mean_position",
        "spread",
        "peak_carry",
        "final",
    ):
        assert (getattr(back, name) == getattr(seen, name)).all(), name
    assert (back.path is None) == (not paths)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="it holds one array"):
        Simulation.load(tmp_path / "one.npy")
    (tmp_path / "text.npz").write_text("no")
    with pytest.raises(ValueError, match=r"text\.npz is no saved simulation"):
        Simulation.load(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", carry=np.zeros(3))
    with pytest.raises(ValueError, match="no saved simulation: it lacks average_carry"):
        Simulation.load(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"saved as \.npz"):
        seen.save(tmp_path / "seen.csv")


def test_an_objective_and_a_noise_of_ones_own():
    mine = problems.Custom(lambda x: np.log(np.cosh(x)).sum(-1), np.tanh, start=4.0)
    laplace = noise.Given(lambda rng, shape: rng.laplace(size=shape), scale=0.5)
    seen = run(mine, Norm(0.5), noise=laplace, dimension=3, steps=400, seeds=50)
    assert np.abs(seen.final).mean() < 1.0
    assert seen.setting["problem"]["function"].endswith("<lambda>")


def test_a_run_that_diverges_can_be_seen():
    seen = run(problems.Quadratic(start=1.0), None, lr=[0.1, 3.0], steps=3000, seeds=2)
    assert np.isfinite(seen.final[0]).all()
    assert not np.isfinite(seen.final[1]).any()
    assert not np.isfinite(seen.regret[-1, 1]).any()


BAD = [
    ({"steps": 0}, ValueError, "steps must be at least 1"),
    ({"seeds": 0}, ValueError, "seeds must be at least 1"),
    ({"times": [0, 3]}, ValueError, "times must be whole numbers from 1 to steps = 5"),
    ({"times": [3, 9]}, ValueError, "times must be whole numbers"),
    ({"times": [1.5]}, ValueError, "times must be whole numbers"),
    ({"steps": 5.0}, TypeError, "steps must be a whole number, got 5.0"),
    ({"seed": -1}, ValueError, "seed must be at least 0"),
    ({"times": True}, TypeError, "times must be a whole number"),
    ({"noise": 0.5}, TypeError, "noise must be a law"),
    ({"noise": noise.Uniform}, TypeError, "noise must be a law"),
    ({"problem": problems.Linear}, TypeError, "problem must be one of"),
    ({"region": Norm(0.1, over="tensor"), "dimension": 3}, ValueError, "no groups or tensors here"),
    ({"region": Component({"a": 0.1})}, TypeError, "a mapping has no meaning"),
    ({"region": 0.5}, TypeError, "A bare number does not say what to clip"),
    ({"carry": "gated"}, TypeError, "Unknown carry policy"),
    ({"noise": noise.Given(lambda rng, shape: rng.random(3))}, ValueError, r"asked for shape \(4, 1\) and gave \(3,\)"),
    ({"problem": problems.Custom(lambda x: x, np.sign)}, ValueError, "Custom: function gave shape"),
    ({"problem": problems.Custom(lambda x: x.sum(-1), lambda x: 1.0)}, ValueError, "Custom: derivative gave shape"),
    ({"start": [1.0, 2.0]}, ValueError, "start"),
    ({"lr": [0.1, 0.2], "region": Above([0.1, 0.2, 0.3])}, ValueError, "sweep"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_told_what_is_wrong(change, error, message):
    given = {"problem": problems.Absolute(1.0), "region": Above(0.1), "steps": 5, "seeds": 4, "times": 1} | change
    with pytest.raises(error, match=message):
        run(given.pop("problem"), given.pop("region"), **given)


def test_bad_laws_are_refused():
    for make in (
        lambda: noise.Uniform(-1.0),
        lambda: noise.Gaussian(np.inf),
        lambda: noise.Rare(1.0, p=0.7),
        lambda: noise.StudentT(degrees=1.0),
        lambda: noise.Pareto(tail=0.5),
        lambda: noise.Given(3),
        lambda: problems.Custom(3, np.sign),
        lambda: Above(np.nan),
        lambda: Above(0.1, over="tensor"),
    ):
        with pytest.raises((ValueError, TypeError)):
            make()


LAWS = [
    noise.Uniform(2.0),
    noise.TwoPoint(2.0),
    noise.Rare(2.0, p=0.2),
    noise.Gaussian(2.0),
    noise.StudentT(2.0, degrees=9.0),
    noise.Pareto(2.0, tail=9.0),
    noise.Skewed(2.0, shape=0.5),
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_laws_have_the_moments_they_say(law):
    draws = law.scale * law.draw(np.random.default_rng(1), (1_000_000, 1))
    assert draws.mean() == pytest.approx(0.0, abs=6 * np.sqrt(law.variance / 1e6))
    assert draws.var() == pytest.approx(law.variance, rel=0.02)
    assert np.abs(draws).max() <= law.bound
    if np.isfinite(law.proxy):
        assert law.variance <= law.proxy * (1 + 1e-12)
        theta = np.linspace(0.01, 5.0, 200)
        assert (law.log_mgf(theta) <= theta**2 * law.proxy / 2 + 1e-12).all()


def test_progress_is_told(capsys):
    told = []
    run(problems.Absolute(), Above(0.1), steps=20, seeds=2, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (20, 20)
    run(problems.Absolute(), Above(0.1), steps=20, seeds=2, progress=True)
    assert "simulating: 20 of 20" in capsys.readouterr().err


def test_aliasing():
    """Constant steps leave even plain SGD short of the optimum 0.25; clipped SGD solves another problem."""
    given = {"lr": 0.01, "steps": 1500, "seeds": 1000, "times": 1}
    sgd = run(problems.Aliasing(), None, **given).final.mean()
    clipped = run(problems.Aliasing(), Component(2.0), carry=False, **given).final.mean()
    carried = run(problems.Aliasing(), Component(2.0), **given).final.mean()
    assert sgd == pytest.approx(0.18, abs=0.015)
    assert carried == pytest.approx(0.18, abs=0.015)
    assert clipped == pytest.approx(-0.97, abs=0.01)


def test_the_carry_of_a_norm_by_its_margin():
    """Bounded above 0, like sqrt(t) at 0, linear below."""
    seen = run(
        problems.Linear(1.0),
        Above([0.2, 0.0, -0.2], over="norm"),
        noise=noise.Sphere(1.0),
        dimension=10,
        steps=6400,
        seeds=100,
        times=[400, 1600, 6400],
    )
    above, at, below = seen.carry.mean(-1).T
    error = seen.carry[:, 0].std(-1) / 10
    assert abs(above[2] - above[0]) < 6 * np.hypot(error[2], error[0]) < 2 * above[0]  # 16 times as many steps
    assert at[1:] / at[:-1] == pytest.approx([2.0, 2.0], rel=0.15)
    assert below == pytest.approx(0.2 * seen.times, rel=0.15)


def error_feedback(gradients, rates, radius):
    """EF-SGD: what the compressor leaves is kept in units of the parameters, already multiplied by a learning rate."""
    x, error = 0.0, 0.0
    for gradient, rate in zip(gradients, rates, strict=True):
        wanted = rate * gradient + error
        sent = np.clip(wanted, -rate * radius, rate * radius)
        x, error = x - sent, wanted - sent
    return x, error


def test_it_is_error_feedback_with_clipping_as_the_compressor():
    """At a constant learning rate U-Clip's carry is EF-SGD's error over the rate; they part when the rate changes."""
    gradients = np.random.default_rng(0).standard_t(2, 300)
    for rates, same in ((np.full(300, 0.1), True), (0.1 / np.sqrt(np.arange(1, 301)), False)):
        clipper, x = reference.UClip(Component(0.5), carry=True), 0.0
        for gradient, rate in zip(gradients, rates, strict=True):
            x -= rate * clipper.step([np.array([gradient])])[0][0]
        theirs, error = error_feedback(gradients, rates, 0.5)
        assert (x == pytest.approx(theirs, rel=1e-12)) == same
        assert (rates[-1] * clipper.carry[0][0] == pytest.approx(error, rel=1e-9)) == same


def test_the_shadow_moves_by_plain_sgd():
    """x - lr·carry, with the gradients taken at x: the identity behind the regret bound."""
    draws = np.random.default_rng(0).normal(size=(50, 1, 1))
    given = iter(draws)
    seen = run(
        problems.Absolute(2.0),
        Component(0.5),
        noise=noise.Given(lambda rng, shape: next(given)),
        steps=50,
        seeds=1,
        times=range(1, 51),
        paths=True,
    )
    x = np.concatenate([[2.0], seen.path[:, 0, 0]])
    shadow = x - 0.1 * np.concatenate([[0.0], seen.mean_carry[:, 0]])
    gradients = np.sign(x[:-1]) + draws[:, 0, 0]
    assert np.diff(shadow) == pytest.approx(-0.1 * gradients)


def test_tilts_make_a_sweep_by_themselves():
    seen = run(problems.Linear([0.1, 0.2]), Component(0.5), noise=noise.Uniform(1.0), steps=20, seeds=3)
    assert seen.final.shape == (2, 3, 1)


def test_numbers_may_come_from_numpy(tmp_path):
    five = np.int64(5)
    seen = run(problems.Absolute(), Above(0.1), steps=np.int64(20), seeds=five, seed=five, times=five, start=range(1))
    assert seen.times.tolist() == [4, 8, 12, 16, 20]
    assert Simulation.load(seen.save(tmp_path / "seen.npz")).setting == seen.setting


def test_a_callback_is_told_now_and_then():
    told = []
    slow = problems.Custom(lambda x: x.sum(-1), lambda x: time.sleep(0.02) or np.sign(x))
    run(slow, Above(0.1), steps=40, seeds=2, progress=lambda done, total: told.append(done))
    assert len(told) >= 3


def test_a_radius_that_learns_is_refused():
    with pytest.raises(TypeError, match=r"run: RMS\(2.0\) learns from single runs"):
        run(problems.Quadratic(), Norm(RMS()), steps=3, seeds=2)
