"""observe=True changes nothing, and advise() finds what is true of known gradients."""

import copy
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from carryclip import Adaptive, CarryClipWarning, Component, Gated, Norm, Quantile, Sign, Welford
from carryclip.advice import Traits, advise
from carryclip.bias import BLOCK, CoordinateView, NormView
from carryclip.diagnosis import LAST_STEP
from carryclip.judgement import HEAVY_STEPS, LARGE_STEPS, LEAST_SHRINK, LIGHT_STEPS, UNEVEN, WORTHWHILE_BIAS
from carryclip.torch import UClip, uclipped
from carryclip.torch._observe import REMEMBERED_STEPS, SAMPLED_COORDINATES, traits


def watch(region, draw, steps=400, size=50, dtype=torch.float32, seed=0, kind=optim.SGD):
    rng = np.random.default_rng(seed)
    p = nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer = kind([p], lr=0.0)
    clipper = UClip(optimizer, region, carry=True, observe=True)
    for _ in range(steps):
        p.grad = torch.tensor(draw(rng, size)).to(dtype)
        optimizer.step()
    vars(clipper)["watched"] = optimizer  # it does not keep it alive by itself
    return clipper


def test_observing_changes_nothing():
    def run(observe):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = optim.AdamW(net.parameters(), lr=0.01, fused=True)
        clipper = UClip(optimizer, Norm(0.1), carry=True, observe=True) if observe else None
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
    clipper = UClip([p], Component(0.5), carry=True, metrics_every=1)
    for row in rows:
        p.grad = torch.tensor(row)
        clipper.clip_()
    assert dict(watcher.metrics()) == dict(clipper.metrics())


# ------------------------------------------------------------------ gradients whose law is known


def noise(size=1.0, mean=0.0):
    """Normal, around the same mean in every coordinate."""
    return lambda rng, n: mean + size * rng.standard_normal(n)


def heavy(rng, n):
    """Large steps, as likely in any direction as in the opposite one."""
    return rng.standard_t(1.5) * rng.standard_normal(n)


def skewed(rng, n):
    """A squared loss at its optimum: errors of mean 0, rarely very large and then on one side, times the inputs."""
    error = -19.0 if rng.random() < 0.05 else 1.0
    return error * (1.0 + 0.3 * rng.standard_normal(n))


def two_ways(rng, n):
    """Often a little in one direction, 1 in 20 times much in another: mean (0.95, 0.95)."""
    g = 0.02 * rng.standard_normal(n)
    if rng.random() < 0.05:
        g[1] += 19.0
    else:
        g[0] += 1.0
    return g


def one_way(rng, n):
    """Nothing but noise, and 1 in 20 times 20 in one direction: mean 1, of which nothing is left to turn."""
    return (20.0 if rng.random() < 0.05 else 0.0) * np.eye(n)[0] + 0.1 * rng.standard_normal(n)


def lognormal(rng, n):
    """Coordinates of mean 0 with their tail on one side."""
    return rng.lognormal(0, 1, n) - np.exp(0.5)


def fading():
    """Gradients that shrink to a tenth and turn meanwhile, as at the start of a training run."""
    step = iter(range(10**6))

    def draw(rng, n):
        k = next(step)
        mean = np.where(np.arange(n) < n // 2, np.cos(k / 200), np.sin(k / 200))
        return 10.0 ** (-k / 400) * (mean + 0.5 * rng.standard_normal(n))

    return draw


def uneven(rng, n):
    """A steady mean that is large in some coordinates and small in others."""
    return np.where(np.arange(n) < n // 5, 2.0, 0.2) + 0.05 * rng.standard_normal(n)


def sgd(params, lr):
    return optim.SGD(params, lr=lr)


def momentum(params, lr):
    return optim.SGD(params, lr=lr, momentum=0.9)


KEEP_PLAIN, KEEP_CARRY, REMOVE, CHANGE = ("keep", False), ("keep", True), ("remove", False), ("change", False)
ANY = (sgd, momentum, optim.Adam, optim.AdamW)
DIVIDING = (optim.Adam, optim.AdamW, optim.RMSprop)
CASES = [
    # what the gradients are, the region observed, with which optimizers, the right answer, and what the reason says
    ("nothing to clip", noise(), Norm(50.0), ANY, REMOVE, "You need no clipping"),
    ("nothing to clip, by coordinate", noise(), Component(50.0), ANY, REMOVE, "You need no clipping"),
    ("a radius that is right", noise(mean=0.2), Norm(8.4), ANY, KEEP_PLAIN, "No gradient stands out"),
    ("like a language model", noise(mean=0.05), Norm(2.0), ANY, KEEP_PLAIN, "No gradient stands out"),
    ("fading", fading, Norm(0.5), DIVIDING, KEEP_PLAIN, "No gradient stands out"),
    ("a radius below the mean", noise(0.2, mean=1.0), Norm(0.5), (sgd, momentum), CHANGE, "below the mean gradient, 7"),
    ("the same under Adam", noise(0.2, mean=1.0), Norm(0.5), DIVIDING, KEEP_PLAIN, "does not notice"),
    ("a tiny radius", noise(), Norm(0.05), (sgd, momentum), CHANGE, "times shorter"),
    ("symmetric heavy tails", heavy, Norm(7.0), ANY, KEEP_PLAIN, "they are noise, which is better cut"),
    ("the same, out of reach", heavy, Norm(1e6), ANY, KEEP_PLAIN, "a guard against large gradients"),
    (
        "heavy tails by coordinate",
        lambda rng, n: rng.standard_t(1.5, n),
        Component(2.0),
        ANY,
        KEEP_PLAIN,
        "they are noise",
    ),
    ("no radius at all", heavy, Norm(float("inf")), ANY, REMOVE, "clips nothing"),
    ("skewed loss", skewed, Norm(10.0), ANY, KEEP_CARRY, "a mean that the gradients do not have"),
    ("skewed loss, much clipped", skewed, Norm(2.0), ANY, KEEP_CARRY, "a mean that the gradients do not have"),
    ("rare gradients with a direction of their own", two_ways, Norm(2.0), ANY, KEEP_CARRY, "whatever its scale"),
    ("rare gradients with the only direction", one_way, Norm(2.0), (sgd, momentum), KEEP_CARRY, "of the steps hold"),
    ("the same under Adam", one_way, Norm(2.0), DIVIDING, KEEP_PLAIN, "was not seen to turn it"),
    ("skewed coordinates", lognormal, Component(1.0), ANY, KEEP_CARRY, "a mean that the gradients do not have"),
    ("coordinates with large means", uneven, Component(0.5), (sgd, momentum), CHANGE, "below the mean gradient, 2"),
    ("the same under Adam", uneven, Component(0.5), DIVIDING, KEEP_PLAIN, "does not notice"),
    ("adaptive, symmetric", noise(), Adaptive(1, 1), ANY, KEEP_PLAIN, "Keep the region, without a carry"),
    ("adaptive, skewed", lognormal, Adaptive(0, 1), ANY, KEEP_CARRY, "Keep the region, with the default carry"),
    ("signs of skewed coordinates", lognormal, Sign(), ANY, KEEP_CARRY, "Keep the region"),
]
ROWS = [
    pytest.param(draw, region, kind, right, says, id=f"{name}, {kind.__name__}")
    for name, draw, region, kinds, right, says in CASES
    for kind in kinds
]


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize(("draw", "region", "kind", "right", "says"), ROWS)
def test_the_right_answer_is_found(draw, region, kind, right, says):
    advice = watch(region, draw() if draw is fading else draw, kind=kind).advise()
    assert (advice.verdict, advice.carry) == right, str(advice)
    assert says in advice.reason, str(advice)
    assert str(advice).splitlines()[-1] == f"    {advice.line}"
    assert advice.optimizer.name in str(advice)
    assert not re.search(r"Gated|Capped|Leaky|carry=True\)", str(advice)), "none of them is for every optimizer"


def test_the_line_can_be_pasted():
    for region, draw in [(Norm(0.1234567890123), heavy), (Component(1.0), lognormal), (Adaptive(1, 2), heavy)]:
        optimizer = optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
        names = {"UClip": UClip, "optimizer": optimizer, "Norm": Norm, "Component": Component}
        names |= {"Adaptive": Adaptive, "Welford": Welford}
        exec(watch(region, draw, kind=optim.AdamW).advise().line, names)
        assert names["clipper"]._session.regions.default == region, "kept to the last digit"
    assert watch(Norm(50.0), noise()).advise().line == "# remove the clipping"


def test_plain_clipping_is_what_torch_has():
    text = str(watch(Norm(2.5), noise(mean=0.05), kind=optim.AdamW).advise())
    assert "torch.nn.utils.clip_grad_norm_(parameters, 2.5) does the same" in text
    assert "clip_grad_value_(parameters, 2)" in str(watch(Component(2.0), heavy).advise())
    carried = str(watch(Norm(2.0), two_ways).advise())
    assert "does the same" not in carried
    assert "if large gradients are bad data, take carry=False" in carried
    assert "bad data" not in text, "plain clipping is what it would say"


# ------------------------------------------------------------------ its figures


def test_both_biases_are_those_of_the_law():
    """m = (0.95, 0.95), and to radius 2 c = (0.95, 0.1): the angle between them has a sine of 0.64."""
    advice = watch(Norm(2.0), two_ways, steps=1000).advise()
    m, c = np.array([0.95, 0.95]), np.array([0.95, 0.1])
    left = m - (m @ c) / (c @ c) * c
    assert advice.mean_size == pytest.approx(np.linalg.norm(m), rel=0.2)
    assert advice.observed.bias == pytest.approx(np.linalg.norm(m - c) / np.linalg.norm(m), abs=0.08)
    assert advice.observed.scaled_bias == pytest.approx(np.linalg.norm(left) / np.linalg.norm(m), abs=0.08)
    assert advice.observed.clipped == pytest.approx(0.05, abs=0.02)
    assert advice.observed.reach < advice.mean_size
    assert advice.observed.floor < 0.3


def test_a_pure_shrink_is_bias_but_none_after_the_best_scale():
    advice = watch(Norm(0.5), noise(0.2, mean=1.0), kind=optim.AdamW).advise()
    assert advice.mean_size == pytest.approx(np.sqrt(50), rel=0.05)
    assert advice.observed.bias == pytest.approx(1 - 0.5 / np.sqrt(50), abs=0.02)
    assert advice.observed.shrink == pytest.approx(0.5 / np.sqrt(50), rel=0.05)
    assert advice.observed.scaled_bias < 0.01
    assert "AdamW divides gradients by their size, so it notices only the bias left after the best scale" in str(advice)
    plain = watch(Norm(0.5), noise(0.2, mean=1.0), kind=momentum).advise()
    assert plain.observed.scaled_bias == advice.observed.scaled_bias
    assert "For SGD with momentum 0.9 a change of scale is only a change of the learning rate" in str(plain)
    assert plain.suggested.radius >= 2 * 0.95 * np.sqrt(50)
    assert "you would train as well without clipping" in plain.reason


def test_a_factor_of_each_coordinate_is_scale_to_adam_alone():
    """Coordinates whose mean is above the radius are flattened: bias for SGD, and nothing Adam would not undo."""
    flattened = {kind: watch(Component(0.5), uneven, kind=kind).advise().observed for kind in (optim.SGD, optim.AdamW)}
    m = np.where(np.arange(50) < 10, 2.0, 0.2)
    c = np.minimum(m, 0.5)
    left = m - (m @ c) / (c @ c) * c
    assert flattened[optim.SGD].scaled_bias == pytest.approx(np.linalg.norm(left) / np.linalg.norm(m), abs=0.02)
    assert flattened[optim.AdamW].scaled_bias < 0.02


def test_the_tail_is_that_of_the_law_and_not_of_a_fading_size():
    normal = watch(Component(1.0), noise(), steps=1000).advise()
    assert 3.82 < normal.tail.ratio < 4.4, "a little more than of the law, because medians of 25 are not exact"
    faded = watch(Norm(0.5), fading(), kind=optim.AdamW).advise()
    assert faded.quantiles[0.99] / faded.quantiles[0.5] > 2.5
    assert faded.tail.ratio < 1.5
    rare = watch(Norm(2.0), lambda rng, n: two_ways(rng, n) + (rng.random() < 0.005) * 500.0).advise()
    assert rare.tail.largest > 12
    assert rare.tail.heavy


def test_the_delay_is_that_of_the_law():
    """(1 + (G/r)²)/2 with G = 3 r; said to those who would feel it, and as what would be."""
    advice = watch(Norm(np.sqrt(50) / 3), noise(), kind=momentum).advise()
    assert advice.observed.delay == pytest.approx(5.0, rel=0.05)
    assert "carry=True is not for SGD with momentum 0.9 here" in str(advice)
    assert "carry=True is not for AdamW here" in str(watch(Norm(1.0), heavy, kind=optim.AdamW).advise())
    assert "carry=True" not in str(watch(Norm(np.sqrt(50) / 3), noise()).advise())
    assert watch(Norm(100.0), noise()).advise().observed.delay == 1.0


def test_many_steps_say_what_they_would_not_show():
    def draw(rng, n):
        return 0.5 + heavy(rng, n)

    for kind in (optim.SGD, optim.AdamW):
        advice = watch(Norm(7.0), draw, steps=400, kind=kind).advise()
        assert (advice.verdict, advice.carry) == KEEP_PLAIN
        assert re.search(r"\(A bias below \d\d% would not show in 400 steps\.\)", advice.reason)


# ------------------------------------------------------------------ watches that are too short


@pytest.mark.parametrize(
    ("draw", "region"),
    [(skewed, Norm(2.0)), (two_ways, Norm(0.5)), (lognormal, Component(1.0))],
)
@pytest.mark.parametrize("kind", [sgd, momentum, optim.AdamW])
@pytest.mark.parametrize("steps", [20, 50, 100])
def test_a_short_watch_does_not_say_that_there_is_nothing_to_give_back(draw, region, kind, steps):
    for seed in range(6):
        advice = watch(region, draw, steps=steps, seed=seed, kind=kind).advise()
        assert (advice.verdict, advice.carry) != KEEP_PLAIN, str(advice)
        if advice.verdict == "unknown":
            assert advice.carry
        if advice.enough is not None:
            assert steps < advice.enough <= HEAVY_STEPS
            assert f"does not show in {steps} steps: watch about {advice.enough}." in advice.reason
            assert "with the default carry" in advice.reason or "keep the default carry" in advice.reason
            assert "does the same" not in advice.reason, "torch has no carry"


@pytest.mark.parametrize("kind", [momentum, optim.AdamW])
def test_a_regression_on_amounts_is_not_judged_before_its_bias_can_be_seen(kind):
    for seed in range(6):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = kind(net.parameters(), lr=2e-3)
        watcher = UClip(optimizer, Norm(1.0), observe=True)
        for step in range(1, 401):
            x, large = torch.randn(32, 6), torch.rand(32) < 0.08
            y = torch.where(large, 15 * torch.exp(torch.randn(32) + 0.3 * x[:, 0]), 0.0)
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x)[:, 0], y).backward()
            optimizer.step()
            if step in (20, 50, 100, 200):
                assert watcher.advise().carry, f"seed {seed}: {watcher.advise()}"
            if step in (300, 400):
                assert watcher.advise().line == "clipper = UClip(optimizer, Norm(1))"
                assert watcher.advise().verdict == "keep"
                assert not watcher.advise().observed.scaled_bias > 1.0


def test_what_is_not_known_yet_says_how_long_to_watch():
    text = str(watch(Norm(2.0), skewed, steps=50, kind=optim.AdamW).advise())
    assert "Advice: Not known yet, watch longer. Radius 2 cuts 100.0% of the steps." in text
    assert re.search(r"turns the mean gradient does not show in 50 steps: watch about [1-4][05]0\.", text)
    assert "Until then keep radius 2, with the default carry" in text
    assert text.endswith("    clipper = UClip(optimizer, Norm(2))")


def test_answers_that_need_no_bias_are_given_after_few_steps():
    assert watch(Norm(50.0), noise(), steps=20).advise().verdict == "remove"
    assert watch(Norm(0.05), noise(), steps=20, kind=sgd).advise().verdict == "change"
    assert watch(Norm(2.0), noise(mean=0.05), steps=60).advise().verdict == "keep", "no large gradient in 60 steps"


def test_a_carry_is_seldom_advised_where_few_steps_show_no_bias_and_there_is_none():
    for draw in (heavy, lambda rng, n: rng.standard_t(1.5, n)):
        advice = [watch(Norm(1.0), draw, steps=150, seed=seed, kind=optim.AdamW).advise() for seed in range(8)]
        assert sum(each.verdict == "keep" and each.carry for each in advice) <= 1


def test_a_schedule_is_judged_by_the_radius_of_each_step():
    advice = watch(Norm(lambda step: 1.0 if step < 200 else 100.0), noise(), kind=optim.AdamW).advise()
    assert advice.observed.radius is None
    assert advice.observed.clipped == pytest.approx(0.5)
    assert advice.line == "clipper = UClip(optimizer, region, carry=False)", "it has no text to paste"
    shrinking = watch(Component(lambda step: 4.0 / (1 + step)), heavy, steps=40, kind=optim.AdamW).advise()
    assert shrinking.observed.radius == 4 / 40
    assert "does the same" not in shrinking.reason, "torch has no schedule"


def test_a_rule_is_judged_by_the_radius_it_had_at_each_step():
    advice = watch(Norm(Quantile(0.9)), noise(mean=0.2), kind=optim.AdamW).advise()
    assert (advice.verdict, advice.carry) == KEEP_PLAIN
    assert advice.observed.radius is None
    assert advice.observed.clipped == pytest.approx(0.1, abs=0.05)


def test_the_docs_name_the_limits_that_are_used():
    page = (Path(__file__).parents[2] / "docs" / "diagnostics.md").read_text()
    limits = [
        f"From {NormView.heavy:g} on it counts as heavy; so do single norms of {NormView.heavy_largest:g} medians",
        f"counts from {CoordinateView.heavy:g} on",
        f"within stretches of {BLOCK} steps",
        f"From {100 * WORTHWHILE_BIAS:g} % on the bias is worth a carry",
        f"by {100 * UNEVEN:g} points",
        f"{LIGHT_STEPS} steps without a large gradient",
        f"at most {HEAVY_STEPS} steps",
        f"at least {LARGE_STEPS} steps with a large gradient",
        f"up to {SAMPLED_COORDINATES:,} coordinates over the last {REMEMBERED_STEPS:,} steps",
    ]
    assert LEAST_SHRINK == 0.1
    assert "more than ten times shorter" in page
    for limit in limits:
        assert limit in page.replace("\n  ", " ").replace("\n", " "), limit


# ------------------------------------------------------------------ what somebody has clipped before


def clipped_to(limit, draw):
    """As ``clip_grad_norm_`` leaves them."""

    def cut(rng, n):
        row = draw(rng, n).astype(np.float32)
        return row * min(1.0, limit / (np.linalg.norm(row) + 1e-6))

    return cut


@pytest.mark.filterwarnings("ignore:.*already clipped")
@pytest.mark.parametrize("kind", [optim.SGD, optim.AdamW])
@pytest.mark.parametrize("region", [Norm(0.3), Norm(0.1), Component(0.05)], ids=repr)
@pytest.mark.parametrize("limit", [0.3, 0.2718], ids=str)
def test_what_is_clipped_already_is_not_judged(kind, region, limit):
    advice = watch(region, clipped_to(limit, noise()), kind=kind).advise()
    assert (advice.verdict, advice.carry, advice.suggested) == ("unknown", False, None)
    assert f"The largest norms are all exactly {limit:g} (400 of 400 steps): something clips the grad" in advice.reason
    assert "(clip_grad_norm_, max_grad_norm, gradient_clip_val)" in advice.reason
    assert "Take it out while you watch, with a new watcher, then ask again" in advice.reason
    assert "bias" not in str(advice)
    assert str(advice).splitlines()[-1] == "    # take the other clipping out, watch anew, then ask again"


def test_the_loop_of_a_newcomer_is_seen_through():
    torch.manual_seed(0)
    net = nn.Linear(20, 1)
    optimizer = optim.AdamW(net.parameters(), lr=1e-3)
    watcher = UClip(optimizer, Norm(0.3), observe=True)

    def loop():
        for _ in range(200):
            optimizer.zero_grad()
            x = torch.randn(16, 20)
            (net(x) - 3 * x[:, :1]).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()

    with pytest.warns(CarryClipWarning, match=r"already clipped to a norm of 0\.3, and advise\(\) sees only"):
        loop()
    assert "exactly 0.3 (200 of 200 steps)" in watcher.advise().reason


@pytest.mark.parametrize(("limit", "seen"), [(7.0, True), (8.2, True), (30.0, False)])
def test_a_limit_that_is_reached_now_and_then_is_seen(limit, seen):
    rng = np.random.default_rng(0)
    rows = np.array([clipped_to(limit, noise())(rng, 50) for _ in range(300)])
    advice = judge(rows, Norm(2.0), KINDS[0])
    assert (advice.verdict == "unknown") == seen, "without torch too"


def test_gradients_that_are_alike_are_not_taken_for_clipped_ones():
    steps = np.arange(300)
    turn = np.exp(-1e-8 * steps)[:, None] * np.stack([3 + 1e-5 * steps, 4 - 0.75e-5 * steps], axis=1)
    signs = np.where(np.random.default_rng(0).random((300, 8)) < 0.5, -1.0, 1.0)
    for rows in (np.tile([3.0, 4.0], (300, 1)), turn * 1.037, signs):
        assert judge(rows, Norm(2.0), KINDS[0]).verdict != "unknown"


# ------------------------------------------------------------------ words that agree with each other


@pytest.mark.parametrize(
    ("bias", "scaled", "words"),
    [
        (0.38, 0.12, "bias 38.0%, after the best scale 12.0%"),
        (0.38, 0.0, "bias 38.0%, after the best scale too small to tell from noise"),
        (0.0, 0.0, "bias: too small to tell from noise"),
        (0.0, 1.0, "bias: its size is lost in the noise; after the best scale 100.0%"),
        (0.0, np.nan, "bias: seen after the best scale only, of unknown size"),
        (np.nan, np.nan, "bias: seen, of unknown size"),
        (np.nan, 0.5, "bias: seen, of unknown size, after the best scale 50.0%"),
        (0.5, np.nan, "bias 50.0%, after the best scale seen, of unknown size"),
    ],
)
def test_a_bias_in_words(bias, scaled, words):
    advice = watch(Norm(7.0), heavy).advise()
    observed = replace(advice.observed, bias=bias, scaled_bias=scaled)
    assert f"of the steps; {words}\n" in str(replace(advice, observed=observed))


def test_a_mean_that_is_lost_makes_no_firm_advice():
    text = str(watch(Norm(7.0), heavy).advise())
    assert "mean gradient: lost in the noise" in text
    assert "none seen" not in text
    assert "The large gradients showed no bias in 400 steps, but the mean gradient was too small to tell" in text


def test_what_is_cut_is_said_in_the_same_words():
    text = str(watch(Norm(1e6), heavy).advise())
    assert "0.0%" not in text
    assert text.count("cuts nothing") == 2
    assert "Radius 50 cuts nothing, and no gradient stands out" in str(watch(Norm(50.0), noise()).advise())


# ------------------------------------------------------------------ what always holds


@st.composite
def laws(draw):
    """Two kinds of gradients, one rarer and of another size and direction, with noise of any tail."""
    numbers = st.floats(0.01, 30.0)
    rare, angle = draw(st.sampled_from([0.0, 0.02, 0.1, 0.5])), draw(st.floats(0.0, np.pi))
    often, seldom, loud = draw(numbers), draw(numbers), draw(st.sampled_from([0.01, 0.3, 3.0]))
    freedom = draw(st.sampled_from([1.5, 3.0, 50.0]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    rows = loud * rng.standard_normal((120, 6)) * np.abs(rng.standard_t(freedom, (120, 1)))
    large = rng.random(120) < rare
    rows[:, 0] += np.where(large, seldom * np.cos(angle), often)
    rows[:, 1] += np.where(large, seldom * np.sin(angle), 0.0)
    return rows


def judge(rows, region, optimizer):
    metrics = np.zeros((len(rows), len(LAST_STEP)))
    metrics[:, LAST_STEP.index("grad_norm")] = np.linalg.norm(rows, axis=1)
    metrics[:, LAST_STEP.index("radius_norm")] = getattr(region, "radius", 0.0)
    return advise(rows, metrics, 0, region, 0, coordinates=rows.shape[1], optimizer=optimizer)


KINDS = [Traits(), Traits("SGD", False), Traits("SGD", False, 0.9), Traits("AdamW", True, 0.9)]


@settings(max_examples=150, deadline=None)
@given(laws(), st.sampled_from([Norm, Component]), st.floats(0.01, 30.0), st.sampled_from(KINDS))
def test_nothing_is_advised_that_its_own_figures_call_worse(rows, kind, radius, optimizer):
    advice = judge(rows, kind(radius), optimizer)
    final = advice.suggested or advice.observed
    if advice.suggested is not None:
        old, new = advice.observed, advice.suggested
        assert advice.verdict == "change"
        assert new.radius > old.radius
        assert new.clipped <= old.clipped
        assert np.nan_to_num(new.bias, nan=np.inf) <= np.nan_to_num(old.bias, nan=np.inf)
        assert np.nan_to_num(new.scaled_bias, nan=np.inf) <= np.nan_to_num(old.scaled_bias, nan=np.inf)
    if advice.carry:
        assert final.clipped > 0
        turned = np.isnan(final.scaled_bias) or final.scaled_bias >= 0.1
        too_short = advice.enough is not None and advice.steps < advice.enough
        assert turned or too_short or (not optimizer.divides and final.bias > final.clipped)
    if final.bias > 0.0 and final.scaled_bias > 0.0:
        assert final.scaled_bias <= min(final.bias, 1.0), "no scale at all is a scale too"
    if advice.verdict == "remove":
        assert advice.observed.clipped <= 0.01
        assert not advice.tail.heavy
        assert not advice.observed.scaled_bias >= 0.1
    assert ("carry=False" in advice.line) == (not advice.carry and advice.verdict != "remove")
    assert str(advice).splitlines()[-1].strip() == advice.line


@settings(max_examples=40, deadline=None)
@given(laws(), st.sampled_from([Norm, Component]), st.floats(0.1, 10.0), st.sampled_from(KINDS))
def test_the_unit_of_the_gradients_does_not_matter(rows, kind, radius, optimizer):
    advice, scaled = (judge(unit * rows, kind(unit * radius), optimizer) for unit in (1.0, 2.0**20))
    assert (advice.verdict, advice.carry) == (scaled.verdict, scaled.carry)
    assert advice.observed.clipped == scaled.observed.clipped
    assert scaled.observed.scaled_bias == pytest.approx(advice.observed.scaled_bias, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(
    ("law", "region", "carry"),
    [
        (skewed, Norm(10.0), True),
        (two_ways, Norm(2.0), True),
        (lognormal, Component(1.0), True),
        (heavy, Norm(7.0), False),
        (noise(mean=0.05), Norm(2.0), False),
        (lambda rng, n: rng.standard_t(1.5, n), Component(2.0), False),
    ],
)
def test_luck_has_little_part_in_it(law, region, carry):
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        rows = np.array([law(rng, 50) for _ in range(300)])
        found.append(judge(rows, region, KINDS[-1]).carry)
    assert found.count(carry) >= 18


@pytest.mark.parametrize("optimizer", KINDS, ids=str)
def test_following_the_advice_ends(optimizer):
    """Asked again with the radius it suggested, it keeps that radius."""
    for law in (noise(0.2, mean=1.0), uneven, two_ways, one_way, skewed, heavy):
        rng = np.random.default_rng(0)
        rows = np.array([law(rng, 50) for _ in range(400)])
        first = judge(rows, Norm(0.05), optimizer)
        if first.suggested is not None:
            again = judge(rows, Norm(first.suggested.radius), optimizer)
            assert again.verdict != "change"
            assert again.carry == first.carry


# ------------------------------------------------------------------ optimizers


class Lion(optim.SGD):
    """Of somebody's own, known by its betas."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        for group in self.param_groups:
            group["betas"] = (0.95, 0.98)


Foreign = type("Adafactor", (optim.SGD,), {})


@pytest.mark.parametrize(
    ("kind", "divides", "moment"),
    [
        (sgd, False, 0.0),
        (momentum, False, 0.9),
        (optim.ASGD, False, 0.0),
        (optim.Adam, True, 0.9),
        (optim.Adamax, True, 0.9),
        (optim.RMSprop, True, 0.0),
        (optim.Adagrad, True, 0.0),
        (optim.Rprop, True, 0.0),
        (Lion, True, 0.95),
        (Foreign, True, 0.0),
        (uclipped(optim.AdamW, Norm(1.0), carry=True), True, 0.9),
    ],
)
def test_what_the_optimizer_does_is_known(kind, divides, moment):
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    found = traits([optimizer])
    assert (found.divides, found.momentum) == (divides, moment)
    assert found.name == type(optimizer).__name__
    assert traits([optimizer, sgd([nn.Parameter(torch.zeros(1))], 0.1)]).divides == divides


def test_the_optimizer_is_remembered_when_it_is_gone_and_may_be_unknown():
    watcher = watch(Norm(2.0), two_ways, kind=momentum)
    del watcher.watched
    assert str(watcher.advise()).startswith("Observed 400 steps of SGD with momentum 0.9.")
    p = nn.Parameter(torch.zeros(50))
    explicit, rng = UClip([p], Norm(2.0), carry=True, observe=True), np.random.default_rng(0)
    for _ in range(100):
        p.grad = torch.tensor(two_ways(rng, 50)).float()
        explicit.clip_()
    text = str(explicit.advise())
    assert text.startswith("Observed 100 steps.")
    assert "Adam and its like notice only the bias left after the best scale; for SGD a change of scale" in text


# ------------------------------------------------------------------ what is remembered


def test_large_models_are_sampled():
    advice = watch(Norm(1.0), lambda rng, size: 0.1 + 0.01 * rng.standard_normal(size), steps=40, size=40_000).advise()
    assert advice.mean_size == pytest.approx(0.1 * np.sqrt(40_000), rel=0.02)


def test_small_tensors_do_not_weigh_more_than_they_are():
    """Many tiny tensors beside a large one: a sample must not favour them."""
    big, small = nn.Parameter(torch.zeros(200_000)), [nn.Parameter(torch.zeros(4)) for _ in range(100)]
    optimizer = optim.SGD([big, *small], lr=0.0)
    watcher = UClip(optimizer, Norm(1.0), carry=True, observe=True)
    for _ in range(25):
        big.grad = torch.full((200_000,), 0.01)
        for p in small:
            p.grad = torch.full((4,), 0.05)
        optimizer.step()
    true = np.sqrt(200_000 * 0.01**2 + 400 * 0.05**2)
    assert watcher.advise().mean_size == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("draw", [noise(), heavy, lambda rng, n: rng.standard_t(1.5, n)], ids=["normal", "t", "t each"])
@pytest.mark.parametrize("region", [Norm(1.0), Component(1.0)], ids=repr)
def test_symmetric_noise_gives_plain_clipping_every_time(region, draw):
    """Where large gradients cancel out, plain clipping has no bias and is the more robust."""
    advice = [watch(region, draw, steps=300, seed=seed, kind=optim.AdamW).advise() for seed in range(8)]
    assert sum(each.line.endswith("carry=False)") for each in advice) >= 7
    assert sum("lost in the noise" in str(each) for each in advice) >= 7


def test_advice_needs_observed_steps():
    clipper = watch(Norm(1.0), lambda rng, size: rng.standard_normal(size), steps=5)
    with pytest.raises(RuntimeError, match="has seen 5 usable steps and needs at least 20"):
        clipper.advise()
    with pytest.raises(RuntimeError, match=r"This clipper clips, and keeps no gradients.*UClip.*observe=True"):
        UClip([nn.Parameter(torch.zeros(1))], Norm(1.0), carry=True).advise()


def test_a_watcher_goes_on_before_the_clipper():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    watcher = UClip(optimizer, Norm(9.0), carry=True, observe=True)
    clipper = UClip(optimizer, Norm(1.0), carry=Gated())
    for _ in range(25):
        p.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
    assert watcher.advise().quantiles[0.5] == pytest.approx(5.0)
    with pytest.raises(RuntimeError, match="Attach the watcher first"):
        UClip(optimizer, Norm(1.0), carry=True, observe=True)
    clipper.remove()
    copy.deepcopy(watcher)


@pytest.mark.parametrize("nonfinite", ["skip", "zero", "raise", "propagate"])
def test_bad_and_missing_gradients_are_no_data(nonfinite):
    for region in (Norm(1.0), Component(1.0)):
        p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        optimizer = optim.SGD([p, q], lr=0.0)
        watcher = UClip(optimizer, region, carry=True, observe=True, nonfinite=nonfinite)
        for k in range(60):
            p.grad = torch.full((4,), float("nan") if k == 5 else 2.0)
            q.grad = torch.full((4,), 2.0) if k % 10 == 0 else None
            optimizer.step()
        advice = watcher.advise()
        assert (advice.steps, advice.skipped) == (59, 1)
        assert advice.observed.clipped == 1.0
        assert advice.mean_size == pytest.approx(2.0 if isinstance(region, Component) else 4.0, rel=0.1)
        assert advice.quantiles[0.5] == pytest.approx(2.0 if isinstance(region, Component) else 4.0)


def test_observing_is_about_one_region():
    two = [torch.ones(4), torch.ones(4)]
    for region in (Norm(1.0, over="tensor"), {0: Norm(1.0), 1: Component(1.0)}, Component([1.0, 2.0]), Component(two)):
        p, q = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
        optimizer = optim.SGD([{"params": [p]}, {"params": [q]}], lr=0.0)
        with pytest.raises(ValueError, match="judges one region for the whole gradient"):
            UClip(optimizer, region, carry=True, observe=True)
