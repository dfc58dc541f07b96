"""Statements that once were false or loose, each with the case that shows it."""

import csv
from pathlib import Path

import numpy as np
import pytest

from carryclip import Capped, Component, Gated, reference
from carryclip.theory import bounds, noise
from carryclip.theory.problems import Linear, Quadratic
from carryclip.theory.simulate import run

FIGURES = Path(__file__).parents[2] / "docs" / "theory" / "figures"


def test_the_adaptive_bound_does_not_know_the_largest_radius():
    """Radii follow the largest variance, so a small smallest one says nothing of G + gamma_+; no offset needs it."""
    given = {"beta": 1.0, "min_variance": 0.01}
    assert bounds.adaptive_carry_mean(**given) == bounds.adaptive_carry_mean(gradient_bound=0.02, **given)
    with pytest.raises(TypeError, match="form='printed' needs gradient_bound"):
        bounds.adaptive_carry_quantile(0.01, form="printed", **given)


def test_the_adaptive_tail_holds_without_an_offset_for_random_variances():
    """The deviation is drawn anew at every step, by what the carry is; 20,000 runs."""
    rng, beta, runs = np.random.default_rng(3), 0.6, 20_000
    carry = np.zeros(runs)
    for _ in range(120):
        deviation = np.where(np.abs(carry) > 0.8, 0.5, 1.2)
        gradient = deviation * np.where(rng.random(runs) < 0.5, -1.0, 1.0)
        total = gradient + carry
        radius = beta * deviation**2
        carry = total - np.clip(total, -radius, radius)
    for level in (2.0, 4.0, 6.0, 8.0):
        bound = bounds.adaptive_carry_tail(level, 121, beta=beta, min_variance=0.25)
        assert (np.abs(carry) >= level).mean() <= bound + 6 * np.sqrt(bound / runs)
    assert np.abs(carry).mean() <= bounds.adaptive_carry_mean(beta=beta, min_variance=0.25)


def test_convergence_and_carry_use_the_same_adaptive_bound():
    given = {"beta": 0.5, "min_variance": 1.0, "gradient_bound": 2.0}
    carry = bounds.adaptive_carry_mean(**given)
    found = bounds.adaptive_convergence(steps=10_000, distance=1.0, largest_radius=1.5, **given)
    lemma = bounds.transformation_mean(steps=10_000, lr=0.01, distance=1.0, carry=carry, update=1.5)
    assert found == pytest.approx(lemma, rel=1e-12)


def test_an_overshoot_between_recorded_times_is_seen():
    """Every tenth step misses the lowest point; the range does not."""
    given = {"noise": noise.Pareto(1.0, tail=2.5), "carry": Capped(10), "steps": 400, "seeds": 50, "start": 10.0}
    every = run(Quadratic(), Component(1.0), times=range(1, 401), **given)
    tenth = run(Quadratic(), Component(1.0), times=range(10, 401, 10), **given)
    lowest = every.mean_position.min()
    assert tenth.mean_range[0, 0] == lowest
    assert tenth.mean_range[1, 0] == every.mean_position.max()
    assert tenth.mean_position.min() > lowest


def test_the_table_has_the_lowest_point_of_all_steps():
    """Recorded every tenth step the capped overshoot from 10 was printed as 0.2, and Pareto's as 0.15."""
    with (FIGURES / "wind-up.csv").open(encoding="utf-8") as file:
        rows = {(row["noise"], row["policy"], row["start"]): row["overshoot"] for row in csv.DictReader(file)}
    assert float(rows["Gaussian(1)", "Capped(10)", "10.0"]) == pytest.approx(0.26, abs=0.01)
    assert float(rows["Pareto(2.5)", "Capped(10)", "10.0"]) == pytest.approx(0.25, abs=0.01)
    assert float(rows["Gaussian(1)", "Gated()", "100.0"]) == pytest.approx(3.24, abs=0.02)


def test_a_quiet_time_does_not_make_the_gate_new():
    """After 1,000 steps within the radius a constant 1.5 radii winds up to 34.5, not 0.5."""
    clipper = reference.UClip(Component(1.0), carry=Gated())
    sizes = []
    for g in [0.5] * 1000 + [1.5] * 200:
        clipper.step([np.array([g])])
        sizes.append(float(clipper.carry[0][0]))
    assert max(sizes) == pytest.approx(34.5)


def test_a_margin_above_one_need_not_break_the_corollary():
    """G = 10, alpha = 2: the printed level holds there, so it "can be" false, not "is"."""
    seen = run(Linear(), Component(2.0), noise=noise.TwoPoint(10.0), steps=1000, seeds=5000, times=[1000])
    printed = bounds.corollary_quantile(0.01, alpha=2.0, gradient_bound=10.0, form="printed")
    assert (seen.carry[-1] > printed).mean() < 0.01


def test_proportional_radii_leave_a_coordinate_without_a_pull_to_a_free_walk():
    """g = (1, ±1), radii c·|gbar| = (2, 0): the carry grows like sqrt(t) and the gradient's mean never shrinks."""
    rng = np.random.default_rng(0)
    coins = np.where(rng.random((1000, 200)) < 0.5, -1.0, 1.0)
    radii = np.stack([np.full(200, 2.0), np.zeros(200)])
    clipper = reference.UClip(Component([radii]), carry=True)
    for row in coins:
        clipper.step([np.stack([np.ones(200), row])])
    carry = np.abs(clipper.carry[0]).mean(1)
    assert carry[0] == 0.0
    assert carry[1] == pytest.approx(np.sqrt(2 * 1000 / np.pi), rel=0.2)


def test_a_carry_that_grows_slower_than_t_is_not_enough_at_the_papers_rate():
    """D_T = T^(3/4) = o(T): the lemma's bound grows with T at eta = 1/sqrt(T), and vanishes at 1/sqrt(T·D_T)."""
    steps = np.array([1e4, 1e6, 1e8])
    given = {"steps": steps, "distance": 1.0, "carry": steps**0.75, "update": 1.0}
    assert (np.diff(bounds.transformation_mean(lr=steps**-0.5, **given)) > 0).all()
    assert (np.diff(bounds.transformation_mean(lr=(steps * steps**0.75) ** -0.5, **given)) < 0).all()


def test_a_bound_for_all_steps_at_once_comes_from_the_walk():
    """What the lemma's item 2 asks for, by adding up T + 1 probabilities."""
    seen = run(Linear(), Component(0.1), noise=noise.TwoPoint(1.0), steps=1000, seeds=5000, times=[1000])
    level = bounds.walk_quantile(0.01 / 1001, alpha=0.1, proxy=1.0)
    assert (seen.peak_carry > level).mean() < 0.01
    assert np.quantile(seen.peak_carry, 0.99) > 0.3 * level
