"""The printed forms are the paper's formulas, all bounds broadcast, and none answers outside its conditions."""

import inspect
import math

import numpy as np
import pytest

from carryclip import Gated
from carryclip.theory import bounds, noise
from carryclip.theory.bounds._walk import log_potential

# Each point by hand from the paper's text: G = 3, alpha = 1/2, gamma_+ = 2, delta = 1/20, t = 40, epsilon = 7;
# beta = 2/5, sigma² = 1/4; T = 900, ||x1 - x*|| = 6, d = 4.
C = 1 / (math.exp(0.25 / 18) - 1)
PRINTED = {
    "carry_tail": (
        (7.0, 40),
        {"alpha": 0.5, "gradient_bound": 3.0},
        2 * C * math.exp(-(49 + 2 * 0.5 * 7 * 40) / (2 * 9 * 40)),
    ),
    "carry_mean": ((), {"alpha": 0.5, "gradient_bound": 3.0, "largest_radius": 2.0}, 2 * C * 9 / 0.5 + 3 + 2),
    "corollary_tail": ((7.0,), {"alpha": 0.5, "gradient_bound": 3.0}, 4 * 9 / 0.25 * math.exp(-0.5 * 7 / 9)),
    "corollary_quantile": (
        (0.05,),
        {"alpha": 0.5, "gradient_bound": 3.0},
        9 / 0.25 * math.log(4 * 9 / (0.25 * 0.05)) + 6,
    ),
    "adaptive_carry_tail": ((7.0, 40), {"beta": 0.4, "min_variance": 0.25}, 2 * 12.5 * math.exp(-0.4 * 7)),
    "adaptive_carry_quantile": (
        (0.05, 40),
        {"beta": 0.4, "min_variance": 0.25, "gradient_bound": 3.0},
        5 * math.log(2 * 12.5 / 0.05) + 2.4 * 3,
    ),
    "adaptive_carry_mean": ((), {"beta": 0.4, "min_variance": 0.25, "gradient_bound": 3.0}, 8 / (0.064 * 0.25) + 7.2),
    "transformation_mean": (
        (),
        {"steps": 900, "lr": 0.1, "distance": 6.0, "carry": 5.0, "update": 2.0},
        2 * 0.1 * 5 * 2 + 0.05 * 4 + 36 / (0.2 * 900) + 5 * 6 / 900,
    ),
    "transformation_quantile": (
        (0.05,),
        {"steps": 900, "lr": 0.1, "distance": 6.0, "carry": 5.0, "update": 2.0, "domain": 8.0, "sigma": 0.5},
        2 * 0.1 * 5 * 2 + 0.05 * 4 + 36 / (0.2 * 900) + 5 * 6 / 900 + math.sqrt(2) * 8 * 0.5 / 30 * math.log(40),
    ),
    "convergence": (
        (),
        {"steps": 900, "distance": 6.0, "alpha": 0.5, "gradient_bound": 3.0, "radius": 2.0, "dimension": 4},
        8 * 81 * 8 * 2 / (0.125 * 30)
        + (4 * 3 * 2 * 2 + (8 + 4) * 4 + 36) / 60
        + (4 * 4 * 81 / 0.125 + 3 + 2) * 6 / 900,
    ),
    "adaptive_convergence": (
        (),
        {"steps": 900, "distance": 6.0, "beta": 0.4, "min_variance": 0.25, "gradient_bound": 3.0, "dimension": 4},
        16 * 8 * 3 / (0.064 * 0.25 * 30)
        + (4 * 2.4 * 2 * 9 + 4 * 9 + 36) / 60
        + (8 * 4 / (0.064 * 0.25) + 2.4 * 3) * 6 / 900,
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_printed_forms_are_the_papers_formulas(name):
    args, kwargs, value = PRINTED[name]
    assert getattr(bounds, name)(*args, form="printed", **kwargs) == pytest.approx(value, rel=1e-12)


def test_the_general_theorem_has_its_own_means_of_the_radius():
    given = {"steps": 900, "distance": 6.0, "alpha": 0.5, "gradient_bound": 3.0, "radius": 2.0, "dimension": 4}
    value = (
        8 * 81 * 8 * 1.5 / (0.125 * 30)
        + (4 * (3 + 2) * 2 * 1.5 + 4 * 2.5 + 36) / 60
        + (4 * 4 * 81 / 0.125 + 3 + 2) * 6 / 900
    )
    found = bounds.convergence(**given, mean_radius=1.5, mean_square_radius=2.5, form="printed")
    assert found == pytest.approx(value, rel=1e-12)


def test_the_quantile_solves_the_tail():
    given = {"alpha": 0.5, "gradient_bound": 3.0}
    for form in ("printed", "corrected"):
        x = bounds.carry_quantile(0.05, 40, largest_radius=2.0, form=form, **given) - 5.0
        assert bounds.carry_tail(x, 40, form=form, **given) == pytest.approx(0.05, rel=1e-9)
    x = bounds.walk_quantile(0.05, 40, alpha=0.5, proxy=9.0)
    assert bounds.walk_tail(x, 40, alpha=0.5, proxy=9.0) == pytest.approx(0.05, rel=1e-6)
    x = bounds.norm_carry_quantile(0.05, alpha=0.5, noise_bound=3.0)
    assert bounds.norm_carry_tail(x, alpha=0.5, noise_bound=3.0) <= 0.05 * (1 + 1e-3)
    assert bounds.lundberg_tail(bounds.lundberg_quantile(0.05, rate=0.3), rate=0.3) == pytest.approx(0.05)


def test_the_walks_tail_is_the_plain_sum():
    plain = 2 * sum(math.exp(-((6 + 0.2 * j) ** 2) / (2 * j * 2.0)) for j in range(1, 50))
    assert bounds.walk_tail(6.0, 50, alpha=0.2, proxy=2.0) == pytest.approx(min(plain, 1.0), rel=1e-12)
    endless = 2 * sum(math.exp(-((8 + 1.5 * j) ** 2) / (2 * j * 2.0)) for j in range(1, 1000))
    assert bounds.walk_tail(8.0, alpha=1.5, proxy=2.0) == pytest.approx(endless, rel=1e-9)


def test_late_steps_at_a_small_margin_are_bounded_without_the_sum():
    plain = 2 * sum(math.exp(-((30 + 0.2 * j) ** 2) / (2 * j * 2.0)) for j in range(1, 10_000))
    assert plain > 1.0
    assert bounds.walk_tail(30.0, alpha=0.2, proxy=2.0) < 0.1
    independent = bounds.lundberg_quantile(0.01, rate=bounds.lundberg_rate(alpha=1e-3, proxy=2.0))
    assert independent < bounds.walk_quantile(0.01, alpha=1e-3, proxy=2.0) < 1.7 * independent


@pytest.mark.parametrize("law", [noise.Uniform(2.0), noise.TwoPoint(2.0), noise.Rare(2.0, p=0.1)])
def test_the_rate_is_the_root_of_the_moment_generating_function(law):
    for alpha in (0.01, 0.3, 1.0, 1.7):
        theta = bounds.lundberg_rate(alpha=alpha, noise=law)
        assert theta >= 2 * alpha / law.proxy * (1 - 1e-9)
        assert float(law.log_mgf(theta)) == pytest.approx(theta * alpha, rel=1e-9)
        draws = law.scale * law.draw(np.random.default_rng(0), (400_000,))
        small = min(theta, 1.0 / law.bound)
        seen = np.log(np.mean(np.exp(small * draws)))
        assert seen == pytest.approx(float(law.log_mgf(small)), abs=0.01)
    assert bounds.lundberg_rate(alpha=2.5, noise=law) == math.inf


def test_the_rate_of_a_proxy_and_of_gaussian_noise_agree():
    exact = bounds.lundberg_rate(alpha=0.3, noise=noise.Gaussian(1.5))
    assert exact == pytest.approx(bounds.lundberg_rate(alpha=0.3, proxy=2.25))


def test_sharper_is_sharper():
    alpha = np.geomspace(0.01, 0.999, 60)
    sharp, coth = ({"form": form} for form in ("sharp", "coth"))
    given = {"alpha": alpha, "noise_bound": 1.0}
    assert (bounds.norm_carry_mean(**given, **sharp) <= bounds.norm_carry_mean(**given, **coth)).all()
    for x in (0.5, 3.0, 30.0):
        tails = [bounds.norm_carry_tail(x, **given, **form) for form in (sharp, coth)]
        assert (tails[0] <= tails[1] * (1 + 1e-9)).all()
    radius = {"largest_radius": 1.0}
    walk = bounds.walk_mean(alpha=alpha, proxy=1.0)
    corrected = bounds.carry_mean(alpha=alpha, gradient_bound=1.0, **radius)
    printed = bounds.carry_mean(alpha=alpha, gradient_bound=1.0, form="printed", **radius)
    assert (walk <= corrected).all()
    assert (corrected < printed).all()
    lundberg = bounds.lundberg_mean(rate=bounds.lundberg_rate(alpha=alpha, proxy=1.0))
    assert (lundberg <= walk).all()
    quantiles = bounds.walk_quantile(0.01, alpha=alpha, proxy=1.0)
    assert (quantiles <= bounds.corollary_quantile(0.01, alpha=alpha, gradient_bound=1.0, **radius)).all()
    given = {"steps": 10_000, "distance": 10.0, "alpha": alpha, "gradient_bound": 1.0, "dimension": 20}
    assert (bounds.sharp_convergence(**given) < bounds.convergence(radius=1.0, **given)).all()


SAMPLES = {
    **{name: (args, kwargs) for name, (args, kwargs, _) in PRINTED.items()},
    "carry_quantile": ((0.05, 40), {"alpha": 0.5, "gradient_bound": 3.0, "largest_radius": 2.0}),
    "corollary_quantile": ((0.05,), {"alpha": 0.5, "gradient_bound": 3.0, "largest_radius": 2.0}),
    "adaptive_convergence": ((), {**PRINTED["adaptive_convergence"][1], "largest_radius": 2.0}),
    "walk_tail": ((4.0, 40), {"alpha": 0.5, "proxy": 2.0}),
    "walk_quantile": ((0.05, 40), {"alpha": 0.5, "proxy": 2.0}),
    "walk_mean": ((40,), {"alpha": 0.5, "proxy": 2.0}),
    "lundberg_rate": ((), {"alpha": 0.5, "proxy": 2.0}),
    "lundberg_tail": ((4.0,), {"rate": 0.5}),
    "lundberg_quantile": ((0.05,), {"rate": 0.5}),
    "lundberg_mean": ((), {"rate": 0.5}),
    "second_moment_mean": ((40,), {"variance": 2.0}),
    "second_moment_average": ((40,), {"alpha": 0.5, "variance": 2.0}),
    "shadow_regret": (
        (),
        {"steps": 9, "lr": 0.1, "distance": 1.0, "gradient_square": 2.0, "mean_gradient": 1.0, "carry": 3.0},
    ),
    "sharp_convergence": ((), {"steps": 900, "distance": 6.0, "alpha": 0.5, "gradient_bound": 3.0, "dimension": 4}),
    "norm_carry_tail": ((4.0,), {"alpha": 0.5, "noise_bound": 2.0}),
    "norm_carry_quantile": ((0.05,), {"alpha": 0.5, "noise_bound": 2.0}),
    "norm_carry_mean": ((), {"alpha": 0.5, "noise_bound": 2.0}),
    "sign_carry_bound": ((), {"gradient_bound": 0.5, "scale": 2.0}),
    "sign_carry_average": ((), {"mean_gradient": 0.5, "variance": 1.0, "scale": 2.0}),
    "leak_bias": ((), {"mean_carry": 0.5, "kappa": 0.9}),
    "gated_carry_bound": ((), {"radius": 0.5}),
    "gated_growth_steps": ((), {"feed": 0.9, "average": -0.5}),
    "gate_open": ((300,), {"clipped_mean": 0.8}),
    "gate_shut": ((40,), {"clipped_mean": 0.1}),
    "gated_bias": ((40,), {"clipped_mean": 0.1, "gradient_bound": 3.0, "radius": 1.0, "rate": 0.5}),
}
FUNCTIONS = [name for name in bounds.__all__ if name.islower()]


def test_every_bound_has_a_sample():
    assert set(SAMPLES) == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_broadcast(name):
    """Any argument may be an array; entries are what the numbers alone would give."""
    function, (args, kwargs) = getattr(bounds, name), SAMPLES[name]
    single = float(function(*args, **kwargs))
    assert np.ndim(function(*args, **kwargs)) == 0
    for place in range(len(args)):
        many = function(*args[:place], np.array([[args[place]] * 3] * 2), *args[place + 1 :], **kwargs)
        assert np.asarray(many) == pytest.approx(np.full((2, 3), single), rel=1e-12)
    for key, value in kwargs.items():
        many = function(*args, **{**kwargs, key: np.array([[value] * 3] * 2)})
        assert np.asarray(many) == pytest.approx(np.full((2, 3), single), rel=1e-12), key


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bounds_refuse_what_is_no_number(name):
    function, (args, kwargs) = getattr(bounds, name), SAMPLES[name]
    for key in kwargs:
        with pytest.raises((ValueError, TypeError), match=key):
            function(*args, **{**kwargs, key: math.nan})
        with pytest.raises((ValueError, TypeError)):
            function(*args, **{**kwargs, key: "much"})
    if "form" in inspect.signature(function).parameters:
        with pytest.raises(ValueError, match="form must be"):
            function(*args, **kwargs, form="best")


OUTSIDE = [
    ("carry_mean", (), {"alpha": 0.0}, r"alpha > 0 \(the radius must exceed the mean gradient"),
    ("carry_tail", (7.0, 40), {"alpha": -0.1}, "alpha >= 0"),
    ("carry_tail", (-1.0, 40), {}, "epsilon > 0"),
    ("carry_tail", (7.0, 0), {}, "t >= 1"),
    ("carry_quantile", (0.05,), {"alpha": 0.0}, "alpha > 0"),
    ("corollary_quantile", (1.5,), {}, "0 < delta < 1"),
    ("adaptive_carry_quantile", (0.05, 40), {"min_variance": 0.0}, "min_variance > 0"),
    ("adaptive_carry_mean", (), {"beta": 0.0}, "beta > 0"),
    ("convergence", (), {"radius": 4.0}, "radius <= gradient_bound"),
    ("convergence", (), {"alpha": 2.5}, "alpha <= radius"),
    ("convergence", (), {"dimension": 0}, "dimension >= 1"),
    ("convergence", (), {"mean_radius": 2.5}, "mean_radius <= radius"),
    ("transformation_mean", (), {"update_square": 1.0}, "update_square >= update²"),
    ("walk_mean", (), {"alpha": 0.0}, "finite t where alpha = 0"),
    ("walk_mean", (40,), {"alpha": -0.1}, "alpha >= 0"),
    ("lundberg_rate", (), {"alpha": 0.0}, "alpha > 0"),
    ("second_moment_average", (math.inf,), {"alpha": 0.0}, "finite number of steps"),
    ("norm_carry_mean", (), {"alpha": 0.0}, "alpha > 0"),
    ("sign_carry_bound", (), {"gradient_bound": 3.0}, "gradient_bound <= scale"),
    ("sign_carry_average", (), {"mean_gradient": 2.0}, "mean_gradient < scale"),
    ("leak_bias", (), {"kappa": 0.0}, "0 < kappa <= 1"),
    ("gated_growth_steps", (), {"feed": 0.5}, "threshold = 0.5 < feed <= 1"),
    ("gated_growth_steps", (), {"average": -1.5}, "-1 <= average <= 1"),
    ("gate_open", (300,), {"clipped_mean": 0.5}, "threshold = 0.5 < clipped_mean <= 1"),
    ("gate_open", (0,), {}, "steps >= 1"),
    ("gate_shut", (40,), {"clipped_mean": 0.6}, "clipped_mean < threshold = 0.5"),
    ("gated_bias", (40,), {"gradient_bound": 0.5}, "gradient_bound >= radius"),
]


@pytest.mark.parametrize(("name", "args", "change", "condition"), OUTSIDE)
def test_outside_its_conditions_a_bound_names_the_condition(name, args, change, condition):
    _, kwargs = SAMPLES[name]
    with pytest.raises(bounds.OutsideConditionsError, match=condition):
        getattr(bounds, name)(*args, **{**kwargs, **change})


def test_the_message_has_the_first_value_that_breaks_the_condition():
    with pytest.raises(bounds.OutsideConditionsError, match=r"got alpha = -2\."):
        bounds.lundberg_rate(alpha=[0.1, -2.0, -3.0], proxy=1.0)
    with pytest.raises(ValueError, match=r"shapes do not go together: .*alpha \(2,\), proxy \(3,\)"):
        bounds.walk_mean(10, alpha=[0.1, 0.2], proxy=[1.0, 1.0, 1.0])


def test_a_rate_needs_one_description_of_the_noise():
    with pytest.raises(TypeError, match="either noise="):
        bounds.lundberg_rate(alpha=0.1)
    with pytest.raises(bounds.OutsideConditionsError, match="exponential moments"):
        bounds.lundberg_rate(alpha=0.1, noise=noise.StudentT())


def test_the_gate_shuts_less_often_the_longer_it_looks():
    early, late = bounds.gate_shut([2.0, math.inf], clipped_mean=0.1)
    assert late < 1e-6 < early < 1.0
    assert bounds.gate_shut(clipped_mean=0.1, policy=Gated(decay=0.9)) > late


def test_the_potential_is_its_recursion():
    for growth, shrink in ((0.02, 0.1), (0.1, 0.1), (0.3, 0.1), (0.1, 0.0), (0.5, 4.0)):
        value = 1.0
        for t in range(1, 60):
            assert float(log_potential(growth, shrink, float(t))) == pytest.approx(math.log(value), rel=1e-9, abs=1e-12)
            value = math.exp(growth) * (math.exp(-shrink) * value + 1 - math.exp(-shrink))
    limit = math.exp(0.02) * (1 - math.exp(-0.1)) / (1 - math.exp(-0.08))
    assert float(log_potential(0.02, 0.1, math.inf)) == pytest.approx(math.log(limit))
    assert float(log_potential(0.3, 0.1, math.inf)) == math.inf


@pytest.mark.parametrize("alpha", [0.0, 1e-4, 1e-2, 0.3])
def test_the_walks_level_grows_smoothly_with_time(alpha):
    t = np.array([2, 10, 100, 999, 1000, 1001, 1002, 20_000, 20_001, 10**6], float)
    level = bounds.walk_quantile(0.01, t, alpha=alpha, proxy=1.0)
    assert (np.diff(level) >= -1e-9 * level[1:]).all()
    assert level[4:6] == pytest.approx(level[3:5], rel=0.25)
    assert level[8] == pytest.approx(level[7], rel=1e-3)
    assert (level[4:] <= bounds.carry_quantile(0.01, t[4:], alpha=alpha, gradient_bound=1.0, largest_radius=1.0)).all()


@pytest.mark.parametrize("p", [0.05, 0.3])
def test_the_rate_is_safe_for_tiny_margins(p):
    """To first order theta = 2·alpha/variance, and skewed noise brings it below that."""
    for alpha in (1e-5, 1e-7, 1e-9, 1e-10, 1e-14):
        law = noise.Rare(1.0, p=p)
        theta = float(bounds.lundberg_rate(alpha=alpha, noise=law))
        first = 2 * alpha / law.variance
        assert theta == pytest.approx(first * (1 - first * (1 - 2 * p) / 3), rel=1e-4)
    uniform = float(bounds.lundberg_rate(alpha=1e-9, noise=noise.Uniform(1.0)))
    assert uniform == pytest.approx(6e-9, rel=1e-6)


EXTREMES = [
    ("lundberg_rate", (), {"alpha": 0.1, "noise": noise.Gaussian(1e-200)}, 2e300),
    ("lundberg_rate", (), {"alpha": 0.1, "noise": noise.Gaussian([0.0, 1.0])}, [math.inf, 0.2]),
    ("norm_carry_mean", (), {"alpha": 0.5, "noise_bound": 1e-163}, 0.0),
    ("norm_carry_quantile", (1e-300,), {"alpha": 0.9995, "noise_bound": 1.0}, None),
    ("walk_mean", (), {"alpha": 40.0, "proxy": 1.0}, None),
    ("walk_quantile", (1e-300,), {"alpha": 10.0, "proxy": 1.0}, None),
    ("walk_quantile", (0.01, 1), {"alpha": 0.1, "proxy": 1.0}, 0.0),
    ("carry_quantile", (0.01,), {"alpha": 40.0, "gradient_bound": 1.0, "largest_radius": 1.0}, 2.0),
    (
        "carry_quantile",
        (1e-300, [5, math.inf]),
        {"alpha": [0.0, 1e-12], "gradient_bound": 1, "largest_radius": 1},
        None,
    ),
    ("corollary_quantile", (1e-300,), {"alpha": 1e-12, "gradient_bound": 1.0, "largest_radius": 1.0}, None),
    ("adaptive_carry_quantile", (1e-300,), {"beta": 1e-9, "min_variance": 1.0, "gradient_bound": 1.0}, None),
    ("second_moment_average", (), {"alpha": 0.1, "variance": 0.0}, 0.0),
    ("second_moment_mean", (math.inf,), {"variance": 0.0}, 0.0),
    ("lundberg_mean", (), {"rate": math.inf}, 0.0),
    ("walk_mean", (np.array([]),), {"alpha": 0.1, "proxy": 1.0}, []),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "value"), EXTREMES)
def test_extreme_arguments_give_numbers_without_warnings(name, args, kwargs, value):
    found = np.asarray(getattr(bounds, name)(*args, **kwargs))
    assert not np.isnan(found).any()
    if value is not None:
        assert found == pytest.approx(np.asarray(value, float))


REFUSED = [
    ("walk_mean", (), {"alpha": 0.1, "proxy": noise.StudentT().proxy}, "a finite proxy"),
    ("walk_quantile", (0.01,), {"alpha": math.inf, "proxy": 1.0}, "a finite alpha"),
    (
        "carry_quantile",
        (0.01,),
        {"alpha": 1.0, "gradient_bound": math.inf, "largest_radius": 1.0},
        "a finite gradient_bound",
    ),
    ("norm_carry_mean", (), {"alpha": 0.1, "noise_bound": math.inf}, "norm_carry_mean needs a finite noise_bound"),
    (
        "sharp_convergence",
        (),
        {"steps": math.inf, "distance": 1, "alpha": 1, "gradient_bound": 1},
        "finite number of steps",
    ),
    (
        "convergence",
        (),
        {"steps": 0, "distance": 1, "alpha": 1, "gradient_bound": 1, "radius": 1},
        "finite number of steps",
    ),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "message"), REFUSED)
def test_what_is_infinite_or_empty_is_refused(name, args, kwargs, message):
    with pytest.raises(bounds.OutsideConditionsError, match=message):
        getattr(bounds, name)(*args, **kwargs)


def test_odd_types_are_refused_by_name():
    for value in (10**400, np.array([True]), np.array([1j]), [1, "2"], None, object()):
        with pytest.raises(TypeError, match="walk_mean: alpha must be a number"):
            bounds.walk_mean(10, alpha=value, proxy=1.0)
    with pytest.raises(TypeError, match=r"noise must be a law .*Uniform\(1.0\); got 0.5"):
        bounds.lundberg_rate(alpha=0.1, noise=0.5)


def test_the_mean_square_of_the_radius_is_never_taken_too_small():
    given = {"steps": 100, "distance": 0.0, "alpha": 0.5, "gradient_bound": 3.0, "radius": 2.0, "mean_radius": 1.5}
    default = bounds.convergence(**given)
    assert default == pytest.approx(bounds.convergence(**given, mean_square_radius=3.0))
    assert default > bounds.convergence(**given, mean_square_radius=2.25)
