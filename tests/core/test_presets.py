"""Published rules: each equals its paper's loop, and outlives what a loop with attributes of its own does not."""

import copy
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import carryclip.optax
from carryclip import Average, Norm, OfWeights, Quantile, ZScore, presets, reference
from carryclip.presets import adagc, agc, autoclip, zclip
from carryclip.torch import UClip
from cases import heavy_tailed
from seam import force

# Tails this heavy bring spikes, and warnings say so.
pytestmark = pytest.mark.filterwarnings("ignore:U-Clip on")

STEPS = 500


def sent(region, rows, host=None, carry=False):
    """The updates of every step, through PyTorch."""
    params = [nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in rows[0]]
    optimizer = torch.optim.SGD(params, lr=0.0)
    force(UClip(optimizer, region, carry=carry), host=host)
    found = []
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = torch.tensor(g)
        optimizer.step()
        found.append([p.grad.numpy().copy() for p in params])
    return found


def length(row):
    return math.sqrt(sum(float(np.sum(g**2)) for g in row))


def shortened(row, limit):
    """Scaled to a norm of at most ``limit``; if that is NaN so is everything, as with ``clip_grad_norm_``."""
    return [g * np.minimum(1.0, limit / length(row)) for g in row]


def check(found, wanted, rtol=1e-11):
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=0, err_msg=f"step {step}")


def on_both(test):
    return pytest.mark.parametrize("host", [None, False], ids=["host", "as on a device"])(test)


# ---------------------------------------------------------------------- straight from the papers


@on_both
@pytest.mark.parametrize("percentile", [10, 50, 90])
def test_autoclip_is_the_percentile_of_all_norms_so_far(percentile, host):
    rows, history, wanted = heavy_tailed(0, STEPS, missing=0.0), [], []
    for row in rows:
        history.append(length(row))
        wanted.append(shortened(row, np.percentile(history, percentile)))
    check(sent(autoclip(percentile), rows, host), wanted)


def test_autoclip_then_forgets_what_is_older_than_its_window():
    rows, history, wanted = heavy_tailed(1, STEPS, missing=0.0), [], []
    for row in rows:
        history.append(length(row))
        wanted.append(shortened(row, np.percentile(history[-40:], 10)))
    check(sent(autoclip(window=40), rows), wanted)


def zclipped(rows, max_norm=math.inf):
    """ZClip's algorithm; the limit on top is that of the authors' code."""
    first, wanted, mean, variance = [], [], 0.0, 0.0
    for row in rows:
        norm = length(row)
        if len(first) < 25:
            first.append(norm)
            mean, variance = np.mean(first), np.var(first)
            wanted.append(shortened(row, max_norm))
            continue
        z = (norm - mean) / math.sqrt(variance)
        kept = mean + 2.5**2 / z * math.sqrt(variance) if z > 2.5 else norm
        wanted.append(shortened(row, min(kept, max_norm)))
        mean = 0.97 * mean + 0.03 * kept
        variance = 0.97 * variance + 0.03 * (kept - mean) ** 2
    return wanted


@on_both
@pytest.mark.parametrize("max_norm", [None, 4.0], ids=["as published", "with a limit on top"])
def test_zclip_is_its_algorithm(max_norm, host):
    rows = heavy_tailed(2, STEPS, missing=0.0)
    wanted = zclipped(rows, math.inf if max_norm is None else max_norm)
    check(sent(zclip(max_norm=max_norm), rows, host), wanted)
    clipped = sum(length(u) < length(g) * (1 - 1e-9) for u, g in zip(wanted, rows, strict=True))
    assert 10 < clipped < STEPS


@on_both
@pytest.mark.parametrize("max_norm", [1.0, 5.0])
def test_adagc_is_its_algorithm(max_norm, host):
    rows, wanted = heavy_tailed(3, STEPS, missing=0.0), []
    averages = [math.inf] * len(rows[0])
    for step, row in enumerate(rows):
        if step < 100:
            updates = shortened(row, max_norm)
            averages = [min(old, length([u])) for old, u in zip(averages, updates, strict=True)]
        else:
            updates = [shortened([g], 1.05 * average)[0] for g, average in zip(row, averages, strict=True)]
            averages = [0.98 * old + 0.02 * length([u]) for old, u in zip(averages, updates, strict=True)]
        wanted.append(updates)
    check(sent(adagc(max_norm=max_norm), rows, host), wanted)


def units(rng, rows):
    """Weights and gradients of a convolution, a dense layer and a bias, as PyTorch lays them out."""
    shapes = (6, 3, 2, 2), (4, 5), (7,)
    weights = [0.2 * rng.standard_normal(shape) for shape in shapes]
    weights[1][2] = 0.0  # begins at 0, so that the floor counts
    return weights, [[0.01 * rng.standard_t(2, shape) for shape in shapes] for _ in range(rows)]


def unit_by_unit(weights, row, clipping, eps):
    """AGC's formula, one output unit after the other; a bias counts as one unit."""
    updates = []
    for w, g in zip(weights, row, strict=True):
        u = g.copy()
        for k in range(len(w)) if w.ndim > 1 else [slice(None)]:
            limit, size = clipping * max(np.linalg.norm(w[k]), eps), np.linalg.norm(g[k])
            if size > limit:
                u[k] = g[k] * limit / size
        updates.append(u)
    return updates


@pytest.mark.parametrize("clipping", [0.01, 0.16])
def test_agc_goes_unit_by_unit(clipping):
    weights, rows = units(np.random.default_rng(4), 20)
    judge = reference.UClip(agc(clipping), carry=False)
    check([judge.step(row, weights) for row in rows], [unit_by_unit(weights, row, clipping, 1e-3) for row in rows])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_agc_goes_unit_by_unit_in_torch(layout):
    """By the formula that timm has, too: a row is an output unit, and weights below the floor count as that."""
    weights, rows = units(np.random.default_rng(4), 20)
    params = [nn.Parameter(torch.tensor(w)) for w in weights]
    params[0].data = params[0].data.to(memory_format=layout)
    clipper = UClip(params, agc(0.1), carry=False)
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = torch.empty_like(p).copy_(torch.tensor(g))
        clipper.clip_()
        check([[p.grad.numpy() for p in params]], [unit_by_unit(weights, row, 0.1, 1e-3)])


def test_agc_over_columns_is_optaxs():
    """Dense layers are (in, out) in JAX, convolutions end in their output channels; a bias is one vector in both."""
    weights, rows = units(np.random.default_rng(5), 20)
    judge = reference.UClip(agc(0.05, over="column"), carry=False)
    ours = carryclip.optax.uclip(agc(0.05, over="column"), carry=False)

    def turned(arrays):
        return [np.moveaxis(x, 0, -1).copy() if x.ndim > 1 else x for x in arrays]

    with jax.enable_x64():
        tx = optax.adaptive_grad_clip(0.05, eps=1e-3)
        params = [jnp.asarray(w) for w in turned(weights)]
        for row in rows:
            wanted, _ = tx.update([jnp.asarray(g) for g in turned(row)], tx.init(params), params)
            check([judge.step(turned(row), turned(weights))], [[np.asarray(u) for u in wanted]])
            found, _ = ours.update([jnp.asarray(g) for g in turned(row)], ours.init(params), params)
            check([[np.asarray(u) for u in found]], [[np.asarray(u) for u in wanted]])


# ---------------------------------------------------------------------- what a loop with attributes loses


class AutoClipLoop:
    """As simple implementations have it: the norms are an attribute, and nobody saves them or looks at them."""

    def __init__(self):
        self.history = []

    def __call__(self, row):
        self.history.append(length(row))
        return shortened(row, np.percentile(self.history, 90))


class ZClipLoop:
    """The same for a running mean and deviation."""

    def __init__(self):
        self.first, self.mean, self.variance = [], 0.0, 0.0

    def __call__(self, row):
        norm = length(row)
        if len(self.first) < 25:
            self.first.append(norm)
            self.mean, self.variance = np.mean(self.first), np.var(self.first)
            return row
        z = (norm - self.mean) / math.sqrt(self.variance)
        kept = self.mean + 2.5**2 / z * math.sqrt(self.variance) if z > 2.5 else norm
        self.mean = 0.97 * self.mean + 0.03 * kept
        self.variance = 0.97 * self.variance + 0.03 * (kept - self.mean) ** 2
        return shortened(row, kept)


LOOPS = {"AutoClip": (AutoClipLoop, autoclip(90)), "ZClip": (ZClipLoop, zclip())}


def far(one, other):
    """Whether two lists of updates differ by more than rounding, or only one of them is finite."""
    return any(
        not np.allclose(a, b, rtol=1e-6, atol=0)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


@pytest.mark.parametrize("name", LOOPS)
def test_a_bad_batch_spoils_a_loops_statistics_but_not_ours(name):
    loop, region = LOOPS[name]
    rows = heavy_tailed(6, 120, missing=0.0)
    bad = [np.full_like(g, math.nan) for g in rows[0]]
    disturbed = [*rows[:60], bad, *rows[60:]]
    ours, calm = sent(region, disturbed), sent(region, rows)
    check([*ours[:60], *ours[61:]], calm, rtol=0)
    theirs, clean = loop(), loop()
    broken = [theirs(row) for row in disturbed][61:]
    wanted = [clean(row) for row in rows][60:]
    check(calm[60:], wanted)
    assert far(broken, wanted)
    if name == "AutoClip":
        assert all(math.isnan(length(update)) for update in broken), "the percentile is NaN from now on"
    else:
        check(broken, rows[60:], rtol=0)  # nothing stands out of a mean that is NaN: it never clips again


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_begins_anew_after_a_checkpoint_but_we_go_on(name):
    loop, region = LOOPS[name]
    rows = heavy_tailed(7, 120, missing=0.0)

    def make():
        params = [nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in rows[0]]
        optimizer = torch.optim.SGD(params, lr=0.0)
        UClip(optimizer, region, carry=False)
        return params, optimizer

    def go_on(params, optimizer, rows):
        found = []
        for row in rows:
            for p, g in zip(params, row, strict=True):
                p.grad = torch.tensor(g)
            optimizer.step()
            found.append([p.grad.numpy().copy() for p in params])
        return found

    params, optimizer = make()
    go_on(params, optimizer, rows[:60])
    saved = copy.deepcopy(optimizer.state_dict())
    whole = go_on(params, optimizer, rows[60:])
    fresh, resumed = make()
    resumed.load_state_dict(saved)
    check(go_on(fresh, resumed, rows[60:]), whole, rtol=0)

    uninterrupted, restarted = loop(), loop()  # model and optimizer are saved, and the loop is made again
    wanted = [uninterrupted(row) for row in rows][60:]
    check(whole, wanted)
    assert far([restarted(row) for row in rows[60:]], wanted)


# ---------------------------------------------------------------------- what the calls make


def test_presets_are_regions_with_the_papers_numbers():
    assert autoclip() == Norm(Quantile(0.1, 1000, include_current=True, warmup=0))
    assert zclip() == Norm(ZScore(2.5, 0.97, warmup=25))
    assert zclip(max_norm=1.0) == Norm(ZScore(2.5, 0.97, warmup=25, before=1.0, most=1.0))
    assert adagc() == Norm(Average(1.05, 0.98, warmup=100, before=1.0), over="tensor")
    assert adagc(max_norm=None) == Norm(Average(1.05, 0.98, warmup=100), over="tensor")
    assert agc() == Norm(OfWeights(0.01, 1e-3), over="row")
    assert agc(over="column") == Norm(OfWeights(0.01, 1e-3), over="column")


@pytest.mark.parametrize("make", [autoclip, zclip, adagc, agc], ids=lambda make: make.__name__)
def test_every_preset_says_where_it_comes_from_and_how_it_was_published(make):
    text = inspect.getdoc(make)
    assert "https://arxiv.org/abs/" in text.splitlines()[0]
    assert f"``UClip(optimizer, {make.__name__}(), carry=False)`` is the published rule" in text
    assert make.__module__ == presets.__name__


@pytest.mark.parametrize("region", [autoclip(), zclip(), adagc()], ids=["autoclip", "zclip", "adagc"])
def test_the_default_carry_goes_with_each(region):
    rows = heavy_tailed(8, 200, missing=0.0)
    params = [nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in rows[0]]
    clipper = UClip(params, region)
    judge = reference.UClip(region)
    for row in rows:
        for p, g in zip(params, row, strict=True):
            p.grad = torch.tensor(g)
        clipper.clip_()
        for p, wanted in zip(params, judge.step(row), strict=True):
            np.testing.assert_allclose(p.grad, wanted, rtol=0, atol=1e-10)
    assert any(clipper.carry(p).any() for p in params)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: autoclip(0), ValueError, r"autoclip: percentile must be in \(0, 100\)"),
        (lambda: autoclip(100), ValueError, r"autoclip: percentile must be in \(0, 100\)"),
        (lambda: autoclip("10"), TypeError, "autoclip: percentile must be a number"),
        (lambda: autoclip(window=1), ValueError, "Quantile: window must be a whole number"),
        (lambda: zclip(max_norm=0), ValueError, "zclip: max_norm must be above 0"),
        (lambda: zclip(max_norm="1"), TypeError, "zclip: max_norm must be a number"),
        (lambda: zclip(0), ValueError, "ZScore: threshold must be above 0"),
        (lambda: zclip(warmup=1), ValueError, "ZScore: warmup must be at least 2"),
        (lambda: adagc(max_norm=-1.0), ValueError, "adagc: max_norm must be above 0"),
        (lambda: adagc(decay=1.0), ValueError, r"Average: decay must be in \[0, 1\)"),
        (lambda: agc(0), ValueError, "OfWeights: multiple must be above 0"),
        (lambda: agc(over="unit"), ValueError, "Norm: over must be"),
    ],
)
def test_bad_numbers_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
