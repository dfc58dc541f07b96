"""What the paper states and what does not hold: each with the case that breaks it."""

import numpy as np
import pytest

from carryclip import Component, reference
from carryclip.theory import bounds
from carryclip.theory.noise import TwoPoint, Uniform
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import run


def test_the_corollary_is_false_for_a_margin_above_one():
    """G = 1000, alpha = 100, fair ±G noise: exceeded about every other time where 1 % was claimed."""
    seen = run(Linear(), Component(100.0), noise=TwoPoint(1000.0), steps=2000, seeds=20_000, times=[2000])
    printed = bounds.corollary_quantile(0.01, alpha=100.0, gradient_bound=1000.0, form="printed")
    share = (seen.carry[-1] > printed).mean()
    assert 0.5 < share < 0.58
    corrected = bounds.corollary_quantile(0.01, alpha=100.0, gradient_bound=1000.0, largest_radius=100.0)
    assert (seen.carry[-1] > corrected).mean() < 0.01
    assert (seen.carry[-1] > bounds.walk_quantile(0.01, 2001, alpha=100.0, proxy=1e6)).mean() < 0.01


def test_a_long_norm_needs_no_long_coordinate():
    """The theorem's union bound, P(norm >= r) <= P(some coordinate >= r), in two dimensions."""
    seen = run(Linear(), Component(0.2), noise=TwoPoint(1.0), dimension=2, steps=300, seeds=20_000, paths=False)
    one = run(Linear(), Component(0.2), noise=TwoPoint(1.0), dimension=1, steps=300, seeds=20_000)
    r = np.quantile(seen.carry[-1], 0.9)
    coordinate = (one.carry[-1] >= r).mean()
    assert (seen.carry[-1] >= r).mean() > 1 - (1 - coordinate) ** 2 + 0.02
    assert (seen.carry[-1] >= r).mean() <= 2 * (one.carry[-1] >= r / np.sqrt(2)).mean()  # what does hold


def transform(block: int, steps: int, lr: float) -> tuple[float, np.ndarray]:
    """Regret and carry of f(x) = |x| from x = 0 when the update rule strays in one quarter of the time.

    For a sixteenth of the time it sends -1, and then 3 until what it owes is paid; at all other times it sends the
    gradient itself. There is no noise.
    """
    x, carry, values, carries = 0.0, 0.0, [], [0.0]
    for t in range(steps):
        gradient = float(np.sign(round(x / lr)))
        inside = t - block * steps // 4
        update = -1.0 if 0 <= inside < steps // 16 else min(gradient + carry, 3.0) if carry > 0 else gradient
        values.append(abs(x))
        x -= lr * update
        carry += gradient - update
        carries.append(carry)
    return float(np.mean(values)), np.array(carries)


def test_a_carry_bounded_at_each_step_alone_says_nothing_of_the_regret():
    """Lemma, item 2: each quarter is the bad one with probability delta, so no single step is bad more often.

    The carry is 0 at each t with probability 1 - delta, there is no noise, and the lemma then promises its bound with
    D = 0 with probability 1 - 2·delta. It fails with probability 4·delta.
    """
    steps, lr, delta = 1600, 0.1, 0.05
    runs = [transform(block, steps, lr) for block in range(4)]
    busy = np.stack([carries != 0.0 for _, carries in runs])
    assert busy.sum(0).max() == 1  # at each t at most one of the four: probability delta
    given = {"steps": steps, "lr": lr, "distance": 0.0, "update": 3.0, "domain": 10.0, "sigma": 0.0}
    promised = bounds.transformation_quantile(delta, carry=0.0, form="printed", **given)
    failing = delta * sum(regret > promised for regret, _ in runs)
    assert failing > 2 * delta
    # With a bound on all steps at once, which is what the proof uses, it holds.
    largest = max(carries.max() for _, carries in runs)
    assert all(regret <= bounds.transformation_quantile(delta, carry=largest, **given) for regret, _ in runs)


def test_the_lemmas_noise_term_is_looser_than_its_proof_needs():
    given = {"steps": 100, "lr": 0.1, "distance": 0.0, "carry": 0.0, "update": 0.0, "domain": 1.0, "sigma": 1.0}
    delta = np.geomspace(1e-6, 0.999, 50)
    loose, tight = (bounds.transformation_quantile(delta, form=form, **given) for form in ("printed", "corrected"))
    assert (tight < loose).all()


def test_the_second_bounds_count_is_four_times_too_small():
    """The proof's last step, sum of exp(-j·beta²·sigma²/2) <= 1/(2·beta²·sigma²)."""
    beta, variance = 0.5, 0.1
    terms = np.exp(-np.arange(1, 10_000) * beta**2 * variance / 2).sum()
    assert terms > 1 / (2 * beta**2 * variance)
    assert terms <= 2 / (beta**2 * variance)
    given = {"beta": beta, "min_variance": variance}
    ratio = bounds.adaptive_carry_tail(50.0, **given) / bounds.adaptive_carry_tail(50.0, form="printed", **given)
    assert ratio == pytest.approx(4.0)


def test_the_second_bound_prints_more_than_it_proves():
    given = {"beta": np.linspace(0.1, 3.0, 30), "min_variance": 0.5, "gradient_bound": 1.0}
    assert (
        bounds.adaptive_carry_quantile(0.01, **given) < bounds.adaptive_carry_quantile(0.01, form="printed", **given)
    ).all()
    assert (bounds.adaptive_carry_mean(**given) < bounds.adaptive_carry_mean(form="printed", **given)).all()


def test_the_second_bounds_radius_exceeds_what_is_said_of_it():
    """gamma <= (1 + beta)·G: fair ±10 noise has G = 10 and sigma² = 100, so gamma = 100·beta."""
    beta, bound = 0.5, 10.0
    assert beta * TwoPoint(bound).proxy > (1 + beta) * bound


def test_a_radius_above_the_gradients_bound_does_something_once_there_is_a_carry():
    """gamma_t >= G is called a no-op, so that gamma_t <= G could be assumed; it is not one for radii that change."""
    gradients = [np.array([1.0])] * 4
    radii = [0.1, 0.1, 3.0, 3.0]
    given, assumed = (
        reference.UClip(Component(lambda t, r=r: r[t]), carry=True) for r in (radii, np.minimum(radii, 1.0).tolist())
    )
    updates = [[float(clipper.step([g])[0][0]) for g in gradients] for clipper in (given, assumed)]
    assert updates[0] == pytest.approx([0.1, 0.1, 2.8, 1.0])
    assert updates[1] == pytest.approx([0.1, 0.1, 1.0, 1.0])


def test_the_theorems_order_lacks_a_factor_of_the_radius():
    """In other units of the loss the bound grows faster than the O(G⁴ d^{3/2}/(alpha³ sqrt T)) that is said of it."""

    def ratio(unit):
        given = {"alpha": 0.1 * unit, "gradient_bound": unit, "radius": 0.5 * unit}
        bound = bounds.convergence(steps=1e8, distance=0.0, form="printed", **given)
        return bound / (unit**4 / ((0.1 * unit) ** 3 * 1e4))

    assert ratio(100.0) == pytest.approx(100.0 * ratio(1.0), rel=1e-9)


def test_at_margin_zero_only_the_corrected_form_says_anything():
    given = {"alpha": 0.0, "gradient_bound": 1.0}
    with pytest.raises(bounds.OutsideConditionsError):
        bounds.carry_tail(30.0, 100, form="printed", **given)
    seen = run(Linear(), Component(1e-300), noise=Uniform(1.0), steps=100, seeds=20_000, times=[100])
    level = bounds.carry_quantile(0.01, 101, largest_radius=1e-300, **given)
    assert (seen.carry[-1] > level).mean() < 0.01
    assert bounds.carry_quantile(0.01, 401, largest_radius=1e-300, **given) / level == pytest.approx(2.0, rel=0.1)
