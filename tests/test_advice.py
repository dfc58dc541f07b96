"""observe=True changes nothing, and advise() finds what is true of known gradients."""

import copy
import re

import numpy as np
import pytest
import torch
from torch import nn, optim

from carryclip import Adaptive, Component, Gated, Norm
from carryclip.torch import UClip


def watch(region, draw, steps=400, size=50, dtype=torch.float32, seed=0, kind=optim.SGD):
    rng = np.random.default_rng(seed)
    p = nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer = kind([p], lr=0.0)
    clipper = UClip(optimizer, region, observe=True)
    for _ in range(steps):
        p.grad = torch.tensor(draw(rng, size)).to(dtype)
        optimizer.step()
    clipper.watched = optimizer  # it does not keep it alive by itself
    return clipper


def test_observing_changes_nothing():
    def run(observe):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = optim.AdamW(net.parameters(), lr=0.01, fused=True)
        clipper = UClip(optimizer, Norm(0.1), observe=True) if observe else None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for k in range(6):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(3, 4)).square().mean()).backward()
            if k == 3:
                net[0].weight.grad[0, 0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
        return net, optimizer, clipper

    net, optimizer, clipper = run(True)
    twin, bare, _ = run(False)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert optimizer.state[p].keys() == bare.state[q].keys()
    assert optimizer.param_groups[0].keys() == bare.param_groups[0].keys()
    assert clipper.metrics()["skipped_steps"] == 1
    assert 0.1 < clipper.metrics()["grad_norm"] < 10, "the loss scale is taken out"
    assert "changes nothing" in repr(clipper)
    assert "carried" not in repr(clipper)


def test_observed_metrics_are_those_of_a_clipper_on_the_same_gradients():
    rows = np.random.default_rng(0).standard_t(2, (50, 8)).astype(np.float32)
    queue = iter(rows)
    watcher = watch(Component(0.5), lambda rng, size: next(queue), steps=50, size=8)
    p = nn.Parameter(torch.zeros(8))
    clipper = UClip([p], Component(0.5), metrics_every=1)
    for row in rows:
        p.grad = torch.tensor(row)
        clipper.clip_()
    assert dict(watcher.metrics()) == dict(clipper.metrics())


def test_a_known_mean_and_bias_are_found_for_a_norm():
    """Rare large gradients in one direction: plain clipping loses most of the mean, which is known."""

    def draw(rng, size):
        g = 0.1 * rng.standard_normal(size)
        if rng.random() < 0.1:
            g[0] += 20.0
        return g

    advice = watch(Norm(1.0), draw, steps=1000).advise()
    assert advice.mean_size == pytest.approx(2.0, rel=0.25)
    assert advice.bias == pytest.approx(0.95, abs=0.03)
    assert advice.clipped == pytest.approx(0.1, abs=0.05)
    assert advice.suggested_radius >= 2 * advice.mean_size
    assert advice.line.endswith("carry=Gated())"), "the mean sets the radius"
    text = str(advice)
    assert "Observed 1000 steps" in text
    assert re.search(r"clipper = UClip\(optimizer, Norm\([\d.]+\)", text)


def test_optimizers_that_divide_by_the_gradients_size_are_advised_against_a_carry():
    def draw(rng, size):
        return (20.0 if rng.random() < 0.05 else 0.0) * np.eye(size)[0] + 0.1 * rng.standard_normal(size)

    advice = {kind: watch(Norm(1.0), draw, steps=600, kind=kind).advise() for kind in (optim.SGD, optim.AdamW)}
    assert advice[optim.SGD].line.endswith("carry=Gated())")
    assert advice[optim.AdamW].line.endswith("carry=False)")
    assert "divides gradients by their own size" in str(advice[optim.AdamW])


def test_a_radius_below_the_mean_is_called_so():
    advice = watch(Norm(0.5), lambda rng, size: 1.0 + 0.2 * rng.standard_normal(size)).advise()
    assert advice.mean_size == pytest.approx(np.sqrt(50), rel=0.05)
    assert advice.bias == pytest.approx(1 - 0.5 / np.sqrt(50), abs=0.02)
    assert advice.suggested_radius >= 2 * 0.95 * np.sqrt(50)
    assert advice.line.endswith("carry=False)"), "at twice the mean nothing is cut"


def test_the_advice_does_not_depend_on_the_radius_watched_with():
    def draw(rng, size):
        return 0.1 + rng.lognormal(0, 1, size) - np.exp(0.5)

    lines = {watch(Norm(radius), draw, steps=600).advise().line for radius in (0.01, 1.0, 50.0)}
    assert len(lines) == 1


def test_symmetric_noise_needs_no_carry_and_spikes_need_a_gate():
    calm = watch(Norm(1.0), lambda rng, size: 0.02 + 0.1 * rng.standard_normal(size), steps=600).advise()
    assert calm.line.endswith("carry=False)")

    def spiky(rng, size):
        g = 0.01 * rng.standard_normal(size)
        return g + (500.0 if rng.random() < 0.02 else 0.0) * np.eye(size)[0]

    wild = watch(Component(1.0), spiky, steps=600).advise()
    assert wild.line.endswith("carry=Gated())")


def test_skewed_noise_needs_a_carry_even_if_its_mean_is_lost():
    """Centred lognormal noise: the mean is 0, but what plain clipping cuts is not."""

    def draw(rng, size):
        return rng.lognormal(0, 1, size) - np.exp(0.5)

    advice = watch(Component(1.0), draw, steps=400).advise()
    assert advice.quantiles[0.5] == pytest.approx(0.9, abs=0.2)
    assert np.isnan(advice.mean_size)
    assert np.isnan(advice.suggested_bias)
    assert advice.line.endswith("carry=Gated())")
    assert "lost in the noise" in str(advice)
    assert "plain clipping would be biased" in str(advice)
    assert "per coordinate" in str(advice)


def test_an_adaptive_region_is_kept():
    advice = watch(Adaptive(1, 1), lambda rng, size: rng.standard_normal(size)).advise()
    assert "Adaptive(mean=1, std=1" in advice.line
    assert advice.suggested_radius is None
    assert "clips" in str(advice)


def test_large_models_are_sampled():
    advice = watch(Norm(1.0), lambda rng, size: 0.1 + 0.01 * rng.standard_normal(size), steps=40, size=40_000).advise()
    assert advice.mean_size == pytest.approx(0.1 * np.sqrt(40_000), rel=0.02)


def test_small_tensors_do_not_weigh_more_than_they_are():
    """Many tiny tensors beside a large one: a sample must not favour them."""
    big, small = nn.Parameter(torch.zeros(200_000)), [nn.Parameter(torch.zeros(4)) for _ in range(100)]
    optimizer = optim.SGD([big, *small], lr=0.0)
    watcher = UClip(optimizer, Norm(1.0), observe=True)
    for _ in range(25):
        big.grad = torch.full((200_000,), 0.01)
        for p in small:
            p.grad = torch.full((4,), 0.05)
        optimizer.step()
    true = np.sqrt(200_000 * 0.01**2 + 400 * 0.05**2)
    assert watcher.advise().mean_size == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("draw", ["standard_normal", "heavy"])
@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=repr)
def test_symmetric_noise_gives_plain_clipping_every_time(region, draw):
    """Where large gradients cancel out, plain clipping has no bias and is the more robust."""
    noise = {"standard_normal": lambda rng, n: rng.standard_normal(n), "heavy": lambda rng, n: rng.standard_t(1.5, n)}[
        draw
    ]
    advice = [watch(region, noise, steps=150, seed=seed).advise() for seed in range(8)]
    assert sum(each.line.endswith("carry=False)") for each in advice) >= 7
    assert sum("lost in the noise" in str(each) for each in advice) >= 7


def test_advice_needs_observed_steps():
    clipper = watch(Norm(1.0), lambda rng, size: rng.standard_normal(size), steps=5)
    with pytest.raises(RuntimeError, match="has seen 5 usable steps and needs at least 20"):
        clipper.advise()
    with pytest.raises(RuntimeError, match=r"attach with UClip.*observe=True"):
        UClip([nn.Parameter(torch.zeros(1))], Norm(1.0)).advise()


def test_a_watcher_goes_on_before_the_clipper():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    watcher = UClip(optimizer, Norm(9.0), observe=True)
    clipper = UClip(optimizer, Norm(1.0), carry=Gated())
    for _ in range(25):
        p.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
    assert watcher.advise().quantiles[0.5] == pytest.approx(5.0)
    with pytest.raises(RuntimeError, match="Attach the watcher first"):
        UClip(optimizer, Norm(1.0), observe=True)
    clipper.remove()
    copy.deepcopy(watcher)


@pytest.mark.parametrize("nonfinite", ["skip", "zero", "raise", "propagate"])
def test_bad_and_missing_gradients_are_no_data(nonfinite):
    for region in (Norm(1.0), Component(1.0)):
        p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        optimizer = optim.SGD([p, q], lr=0.0)
        watcher = UClip(optimizer, region, observe=True, nonfinite=nonfinite)
        for k in range(60):
            p.grad = torch.full((4,), float("nan") if k == 5 else 2.0)
            q.grad = torch.full((4,), 2.0) if k % 10 == 0 else None
            optimizer.step()
        advice = watcher.advise()
        assert (advice.steps, advice.skipped) == (59, 1)
        assert advice.clipped == 1.0
        assert advice.mean_size == pytest.approx(2.0 if isinstance(region, Component) else 4.0, rel=0.1)
        assert advice.quantiles[0.5] == pytest.approx(2.0 if isinstance(region, Component) else 4.0)


def test_observing_is_about_one_region():
    for region in (Norm(1.0, over="tensor"), {0: Norm(1.0), 1: Component(1.0)}):
        p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        optimizer = optim.SGD([{"params": [p]}, {"params": [q]}], lr=0.0)
        with pytest.raises(ValueError, match="judges one region for the whole gradient"):
            UClip(optimizer, region, observe=True)
