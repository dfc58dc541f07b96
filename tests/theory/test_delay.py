"""The delay law, through the shipped algorithm: the size of the sum, and how long updates remember."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from carryclip import Component, Norm
from carryclip.theory import bounds, delay, noise
from carryclip.theory.problems import Linear
from carryclip.theory.simulate import run
from carryclip.torch import UClip


@functools.cache
def seen(rms, dimension, *, mean=0.0, kind=Norm, steps=3000, seeds=2):
    """(updates, sizes of the sum) of noise under a radius of 1, once settled: axes (steps, seeds[, dimension]).

    Under component-wise clipping ``rms`` is that of a coordinate; coordinates are independent, so one is enough.
    """
    law = noise.Gaussian(math.sqrt((rms**2 - mean**2) / dimension))
    tilt = Linear(mean / math.sqrt(dimension))
    made = run(
        tilt,
        kind(1.0),
        noise=law,
        dimension=dimension,
        lr=1.0,  # so that the path's differences are the updates
        steps=steps,
        seeds=seeds,
        times=range(1000, steps + 1),
        paths=True,
    )
    updates = -np.diff(made.path, axis=0)
    return updates, np.linalg.norm(updates, axis=-1) + made.carry[1:]


def correlation(updates, lag):
    """Of updates ``lag`` steps apart."""
    return np.mean(np.sum(updates[:-lag] * updates[lag:], -1)) / np.mean(np.sum(updates**2, -1))


@pytest.mark.parametrize(("rms", "steps"), [(2.0, 2.5), (3.0, 5.0), (5.0, 13.0), (10.0, 50.5)])
def test_in_a_thousand_dimensions_the_sum_has_the_laws_size(rms, steps):
    assert delay.steps(gradient_rms=rms, radius=1.0) == steps
    _, size = seen(rms, 1000)
    assert size.mean() == pytest.approx(steps, rel=0.02)
    assert size.std() < 0.05 * steps, "it hardly varies, which is why the average's decay is constant"


@pytest.mark.parametrize("rms", [2.0, 3.0, 5.0, 10.0])
def test_in_a_thousand_dimensions_updates_forget_like_a_momentum(rms):
    updates, _ = seen(rms, 1000)
    steps = float(delay.steps(gradient_rms=rms, radius=1.0))
    for lag in (1, 2, 5, 10, round(steps), round(2 * steps)):
        expected = delay.momentum(gradient_rms=rms, radius=1.0) ** lag
        assert correlation(updates, lag) == pytest.approx(expected, abs=0.03)


def test_a_mean_gradient_lengthens_the_delay():
    for mean, steps in ((0.5, 6.5), (0.8, 13.0)):
        rms = math.sqrt(9.0 + mean**2)
        assert delay.steps(gradient_rms=rms, radius=1.0, mean_gradient=mean) == pytest.approx(steps)
        _, size = seen(rms, 1000, mean=mean)
        assert size.mean() == pytest.approx(steps, rel=0.03)


def test_along_one_coordinate_a_mean_gradient_lengthens_it_further():
    """There the carry lies along the mean gradient; the bound of the page still holds."""
    _, size = seen(math.sqrt(9.25), 1, mean=0.5, steps=8000, seeds=60)
    law = delay.steps(gradient_rms=math.sqrt(9.25), radius=1.0, mean_gradient=0.5)
    assert 1.15 * law < size.mean() < 9.25 / (2 * 0.5) + 0.5 / 2


@pytest.mark.parametrize(("dimension", "kind"), [(1, Component), (2, Norm)])
@pytest.mark.parametrize("rms", [0.3, 1.0, 3.0, 5.0])
def test_in_few_dimensions_the_mean_size_follows_the_law(dimension, kind, rms):
    """Less what sums inside the region cost, which is at most half a step."""
    _, size = seen(rms, dimension, kind=kind, steps=8000, seeds=60)
    square = rms**2
    exact = (1 + square) / 2 - np.mean(np.maximum(1 - size, 0) ** 2) / 2
    assert size.mean() == pytest.approx(exact, rel=0.03)
    assert square / 2 < size.mean() < (1 + square) / 2 * 1.01


def test_for_one_coordinate_updates_forget_fast_at_first_and_slowly_later():
    """No single momentum: the size of the sum varies as much as it measures."""
    updates, size = seen(5.0, 1, kind=Component, steps=8000, seeds=60)
    momentum = delay.momentum(gradient_rms=5.0, radius=1.0)
    assert size.std() > 0.8 * size.mean()
    assert correlation(updates, 1) == pytest.approx(0.75, abs=0.02)
    assert momentum > 0.92
    assert correlation(updates, 52) == pytest.approx(0.055, abs=0.02)
    assert momentum**52 < 0.016


@pytest.mark.parametrize(("dimension", "kind"), [(1000, Norm), (10, Norm), (1, Component)])
def test_correlations_add_up_to_the_delay(dimension, kind):
    """Over lags from 0 on, in any dimension: sums of updates have the variance of sums of gradients.

    The variance of a long sum of updates is that of one times the correlations at all lags, negative ones too.
    """
    steps, seeds = (3000, 2) if dimension == 1000 else (8000, 60)
    updates, _ = seen(3.0, dimension, kind=kind, steps=steps, seeds=seeds)
    blocks = updates[: len(updates) // 300 * 300].reshape(-1, 300, *updates.shape[1:]).sum(1)
    both_ways = np.mean(np.sum(blocks**2, -1)) / (300 * np.mean(np.sum(updates**2, -1)))
    total = (1 + both_ways) / 2
    square = np.mean(np.sum(updates**2, -1))
    assert total == pytest.approx((1 + 9.0 / square) / 2, rel=0.06)
    if dimension > 1:
        assert total == pytest.approx(5.0, rel=0.06)


@pytest.mark.parametrize("law", [noise.StudentT(1.0, degrees=3), noise.Pareto(1.0), noise.Rare(3.0)])
@pytest.mark.parametrize("kind", [Norm, Component])
def test_the_law_bounds_the_time_average_from_the_first_step_on(law, kind):
    """Heavy and skewed tails too: time averages of E|s| never exceed it, at any time and radius."""
    radii = np.array([0.2, 0.5, 1.0, 3.0])
    times = [1, 10, 100, 500]
    every = run(Linear(), kind(radii), noise=law, lr=1.0, steps=500, seeds=4000, times=range(1, 501), paths=True)
    path = np.concatenate([np.zeros_like(every.path[:1]), every.path])
    size = np.abs(np.diff(path, axis=0))[..., 0] + every.carry
    for t in times:
        average = size[:t].mean(0)
        allowed = (1 + law.variance / radii**2) / 2 * radii
        error = average.std(-1) / math.sqrt(average.shape[-1])
        assert (average.mean(-1) <= allowed + 6 * error).all()


def test_the_metrics_of_a_clipper_show_it():
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(1000))
    clipper = UClip([p], Norm(1.0), carry=True, metrics_every=1)
    ratios = []
    for _ in range(300):
        p.grad = 3.0 / math.sqrt(1000) * torch.randn(1000, generator=generator)
        clipper.clip_()
        ratios.append(clipper.metrics()["sum_norm"] / clipper.metrics()["radius_norm"])
    assert np.mean(ratios[100:]) == pytest.approx(5.0, rel=0.05)


def test_what_the_page_says_of_radii():
    assert delay.radius(steps=[2, 10, 100], gradient_rms=1.0) == pytest.approx([0.58, 0.23, 0.071], abs=0.005)
    assert delay.momentum(gradient_rms=1.0, radius=delay.radius(steps=[2, 10, 100], gradient_rms=1.0)) == pytest.approx(
        [0.5, 0.9, 0.99]
    )


def test_it_is_continuous_and_one_below_the_radius():
    found = delay.steps(gradient_rms=[0.0, 0.5, 1.0, 1.0 + 1e-9], radius=1.0)
    assert found[:3].tolist() == [1.0, 1.0, 1.0]
    assert found[3] == pytest.approx(1.0 + 1e-9, rel=1e-15)
    assert delay.momentum(gradient_rms=0.5, radius=1.0) == 0.0


def test_arguments_broadcast_and_the_radius_is_the_inverse():
    rms, mean = np.array([[1.5], [4.0]]), np.array([0.0, 0.3, 0.9])
    found = delay.steps(gradient_rms=rms, radius=1.0, mean_gradient=mean)
    assert found.shape == (2, 3)
    assert found[1, 2] == pytest.approx(float(delay.steps(gradient_rms=4.0, radius=1.0, mean_gradient=0.9)))
    assert delay.radius(steps=found, gradient_rms=rms, mean_gradient=mean) == pytest.approx(np.ones((2, 3)))
    assert np.ndim(delay.steps(gradient_rms=2.0, radius=1.0)) == 0


def test_extreme_arguments_give_numbers_without_warnings():
    assert delay.steps(gradient_rms=1e300, radius=1e-300) == math.inf
    assert delay.momentum(gradient_rms=1e300, radius=1e-300) == 1.0
    assert delay.steps(gradient_rms=3e-200, radius=1e-200) == pytest.approx(5.0)
    assert delay.radius(steps=5.0, gradient_rms=3e-200) == pytest.approx(1e-200)
    assert delay.radius(steps=math.inf, gradient_rms=3.0, mean_gradient=0.5) == 0.5


REFUSED = [
    (delay.steps, {"gradient_rms": 1.0, "radius": 0.0}, r"delay\.steps needs radius > 0"),
    (delay.steps, {"gradient_rms": -1.0, "radius": 1.0}, "gradient_rms >= 0"),
    (delay.steps, {"gradient_rms": math.nan, "radius": 1.0}, "a finite gradient_rms"),
    (delay.steps, {"gradient_rms": 2.0, "radius": math.inf}, "a finite radius"),
    (delay.steps, {"gradient_rms": 2.0, "radius": 1.0, "mean_gradient": 3.0}, "gradient_rms >= mean_gradient"),
    (
        delay.momentum,
        {"gradient_rms": 2.0, "radius": [2.0, 1.0], "mean_gradient": 1.0},
        r"radius > mean_gradient \(the carry winds up otherwise\); got radius = 1, mean_gradient = 1\.",
    ),
    (delay.radius, {"steps": 0.5, "gradient_rms": 1.0}, r"delay\.radius needs steps >= 1"),
]


@pytest.mark.parametrize(("function", "given", "message"), REFUSED)
def test_outside_its_conditions_it_names_the_condition(function, given, message):
    with pytest.raises(bounds.OutsideConditionsError, match=message):
        function(**given)


def test_what_is_no_number_is_refused():
    with pytest.raises(TypeError, match=r"delay\.steps: radius must be a number or an array of numbers, got 'much'"):
        delay.steps(gradient_rms=1.0, radius="much")
    with pytest.raises(ValueError, match="shapes do not go together"):
        delay.steps(gradient_rms=[1.0, 2.0], radius=[1.0, 2.0, 3.0])
