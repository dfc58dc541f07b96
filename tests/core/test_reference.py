"""The judge itself, checked by hand and against textbook formulas."""

import numpy as np
import pytest

from carryclip import EWMA, Adaptive, Capped, Component, Gated, Leaky, Norm, Sign, Symmetric, Welford
from carryclip.reference import UClip, _to_bfloat16


def path(region, gradients, **options):
    clipper = UClip(region, **{"carry": True, **options})
    return [(float(clipper.step([np.array([float(g)])])[0][0]), float(clipper.carry[0][0])) for g in gradients]


def test_component_by_hand():
    assert path(Component(1.0), [3, -1, 0.5, 0]) == [(1, 2), (1, 0), (0.5, 0), (0, 0)]


def test_sign_by_hand():
    assert path(Sign(1.0), [0.25, 0.25, 0, 0]) == [(1, -0.75), (-1, 0.5), (1, -0.5), (-1, 0.5)]
    assert path(Sign(1.0), [0.0]) == [(0, 0)]


def test_norm_by_hand():
    clipper = UClip(Norm(5.0), carry=True)
    u = clipper.step([np.array([6.0]), np.array([8.0])])
    np.testing.assert_allclose(np.concatenate(u), [3, 4])
    np.testing.assert_allclose(np.concatenate(clipper.carry), [3, 4])


def test_policies_by_hand():
    assert path(Component(1.0), [5, 0], carry=Capped(2)) == [(1, 2), (1, 1)]
    assert path(Component(1.0), [5, 0], carry=Leaky(0.5)) == [(1, 2), (1, 0.5)]
    assert path(Component(1.0), [5, 0], carry=False) == [(1, 0), (0, 0)]
    # Feed 0, then 1: the debiased average is 1/(1 + 0.99) >= 0.5, so the carry of 2 may not grow.
    assert path(Component(1.0), [3, 3], carry=Gated()) == [(1, 2), (1, 2)]
    assert path(Component(1.0), [3, 3], carry=Gated(threshold=0.6)) == [(1, 2), (1, 4)]
    assert path(Component(1.0), [500], carry=Gated()) == [(1, 100)]


def test_welford_equals_the_two_pass_formula():
    rng = np.random.default_rng(0)
    rows = rng.standard_t(3, (30, 4))
    clipper = UClip(Adaptive(2, 3, Welford()), carry=False)
    for t, g in enumerate(rows):
        (u,) = clipper.step([g])
        if t >= 2:
            radius = 2 * np.abs(rows[:t].mean(0)) + 3 * rows[:t].std(0, ddof=1)
            np.testing.assert_allclose(u, np.clip(g, -radius, radius), rtol=1e-12)
        else:
            np.testing.assert_array_equal(u, g)


def test_ewma_equals_the_weighted_sum():
    rng = np.random.default_rng(0)
    rows = rng.standard_t(3, (30, 4))
    clipper = UClip(Symmetric(0.5, EWMA(decay=0.9)), carry=False)
    for t, g in enumerate(rows):
        (u,) = clipper.step([g])
        if t:
            weights = 0.9 ** np.arange(t)[::-1, None]
            mean = (weights * rows[:t]).sum(0) / weights.sum()
            std = np.sqrt((weights * rows[:t] ** 2).sum(0) / weights.sum())
            np.testing.assert_allclose(u, np.clip(g, mean - 0.5 * std, mean + 0.5 * std), rtol=1e-10)


def test_a_parameter_without_gradient_keeps_everything():
    clipper = UClip(Component(1.0), carry=True)
    clipper.step([np.array([3.0]), np.array([3.0])])
    assert clipper.step([None, np.array([0.0])])[0] is None
    assert [float(c[0]) for c in clipper.carry] == [2.0, 1.0]


def test_non_finite_policies():
    bad = np.array([np.nan, 3.0])
    clipper = UClip(Component(1.0), carry=True)
    np.testing.assert_array_equal(clipper.step([bad])[0], [0, 0])
    assert clipper.skipped_steps == 1
    np.testing.assert_array_equal(UClip(Component(1.0), nonfinite="zero").step([bad])[0], [0, 1])
    with pytest.raises(FloatingPointError):
        UClip(Component(1.0), nonfinite="raise").step([bad])
    assert np.isnan(UClip(Component(1.0), nonfinite="propagate").step([bad])[0][0])


def test_bad_arguments_complain_as_everywhere():
    with pytest.raises(TypeError, match="Unknown carry policy"):
        UClip(Component(1.0), carry="yes")


def test_bfloat16_rounding_against_torch():
    import torch

    x = np.concatenate([np.random.default_rng(0).standard_normal(10_000), [0, 1e-40, 3.3e38, np.inf]]).astype(
        np.float32
    )
    np.testing.assert_array_equal(_to_bfloat16(x), torch.tensor(x).bfloat16().float().numpy())


def test_plain_clipping_has_no_memory_of_an_inf():
    clipper = UClip(Norm(1.0), carry=False, nonfinite="propagate")
    with np.errstate(invalid="ignore"):
        clipper.step([np.array([np.inf])])
    assert clipper.step([np.array([0.5])])[0] == 0.5
