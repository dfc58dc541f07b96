"""Mistakes that would cost a training run without a word: each is refused, or said in one warning with its remedy."""

import copy
import functools
import inspect
import math
import warnings

import pytest
import torch
from torch import nn, optim

from carryclip import EWMA, Adaptive, CarryClipWarning, Component, Drip, Gated, Norm, Shrunk, Sign, Symmetric
from carryclip.diagnosis import clipped_before
from carryclip.torch import LocalUClip, UClip, uclipped
from carryclip.torch._hooks import PATIENCE
from seam import as_on_a_device, ledger


def said_by(run):
    """What is warned of while ``run()`` runs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in caught if issubclass(one.category, CarryClipWarning)]


def problem():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return net, optim.SGD(net.parameters(), lr=0.01)


def train(net, optimizer, steps, between=lambda: None, size=1.0):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(4, 6, generator=generator), size * torch.randn(4, 1, generator=generator)
        optimizer.zero_grad()
        (net(inputs) - targets).square().mean().backward()
        between()
        optimizer.step()


# ---------------------------------------------------------------------- schedules that cannot be called


class Cosine:
    def __init__(self, top=1.0):
        self.top = top

    def __call__(self, step):
        return self.top * (1.0 + math.cos(step / 100))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Norm(lambda: 1.0), r"Norm: radius is a schedule.*one argument, the step.*<lambda>\(\) does not take"),
        (lambda: Component(lambda step, epoch: 1.0), r"<lambda>\(step, epoch\) does not take.*radius=lambda step"),
        (lambda: Sign(lambda *, step: 1.0), "Sign: scale is a schedule"),
        (lambda: Adaptive(mean=lambda: 1, std=2), "Adaptive: mean is a schedule"),
        (lambda: Adaptive(mean=1, std=lambda: 2), "Adaptive: std is a schedule"),
        (lambda: Symmetric(std=lambda: 2), "Symmetric: std is a schedule"),
        (lambda: Norm(functools.partial(lambda step, top: top, 0, 1.0)), "is called with one argument"),
        (lambda: Norm(Cosine), r"Norm: radius=Cosine is the class: pass an instance, radius=Cosine\(\.\.\.\)"),
    ],
)
def test_a_schedule_that_cannot_take_a_step_is_refused_at_once(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    "schedule",
    [
        lambda step: 1.0,
        lambda step, top=1.0: top,
        lambda *steps: 1.0,
        functools.partial(lambda top, step: top, 1.0),
        [1.0, 2.0].__getitem__,
        math.sqrt,
        Cosine(),
    ],
)
def test_whatever_takes_a_step_is_a_schedule(schedule):
    for kind in (Norm, Component, Sign, Symmetric):
        assert kind(schedule).sizes(1)[0] > 0


def test_a_schedule_whose_signature_cannot_be_read_is_taken_as_it_is():
    hidden = Cosine()
    hidden.__signature__ = "none"  # inspect.signature raises a TypeError
    with pytest.raises(TypeError):
        inspect.signature(hidden)
    assert Norm(hidden).sizes(0) == (2.0,)


def test_schedules_of_optax_are_taken():
    optax = pytest.importorskip("optax")
    for schedule in (optax.constant_schedule(1.0), optax.cosine_decay_schedule(1.0, 10)):
        assert float(Norm(schedule).sizes(0)[0]) == 1.0


# ---------------------------------------------------------------------- clip_grad_norm_ left in the loop


def left_in(limit, region, steps=130, size=10.0, carry=True, device=False, **options):
    """What is warned of where a loop clips as well; nobody reads the metrics."""
    net, optimizer = problem()
    clipper = UClip(optimizer, region, carry, **options)
    if device:
        as_on_a_device(clipper)
    return said_by(
        lambda: train(net, optimizer, steps, lambda: nn.utils.clip_grad_norm_(net.parameters(), limit), size)
    )


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("limit", "region"),
    [
        (1.0, Norm(1.0)),
        (0.3, Norm(0.3)),
        (0.123, Norm(0.123)),
        (0.01, Norm(0.01)),
        (0.5, Norm(1.0)),
        (0.25, Norm(0.1)),
        (1.0, Component(0.01)),
        (1.0, Norm(1.0, over="tensor")),
    ],
    ids=repr,
)
def test_clip_grad_norm_left_in_the_loop_is_reported_once(limit, region, device):
    said = [text for text in left_in(limit, region, device=device) if "already clipped" in text]
    assert len(said) == 1
    assert f"gradients arrive already clipped to a norm of {limit:g}, and what was cut there never reaches" in said[0]
    assert "Delete the clip_grad_norm_ call in the training loop" in said[0]


def test_clip_grad_norm_that_clips_now_and_then_is_reported():
    net, optimizer = problem()
    UClip(optimizer, Norm(2.5), carry=True, metrics_every=1)
    clipped = []

    def clip():
        clipped.append(float(nn.utils.clip_grad_norm_(net.parameters(), 2.5)) > 2.5)

    said = said_by(lambda: train(net, optimizer, 64, clip))
    assert 3 <= sum(clipped) <= 20
    assert len(said) == 1
    assert "already clipped to a norm of 2.5," in said[0]


def test_without_a_carry_it_is_said_what_is_lost():
    assert "is lost before this clipper sees it" in left_in(1.0, Norm(1.0), carry=False)[0]


@pytest.mark.parametrize("region", [Norm(1.0), Norm(0.5, over="group"), Component(0.1)], ids=repr)
@pytest.mark.parametrize("limit", [None, 1e6])
def test_gradients_that_nobody_clips_are_not_reported(region, limit):
    net, optimizer = problem()
    UClip(optimizer, region, Gated(), metrics_every=1)
    clip = (lambda: None) if limit is None else lambda: nn.utils.clip_grad_norm_(net.parameters(), limit)
    assert said_by(lambda: train(net, optimizer, 300, clip)) == []


def test_a_gradient_that_never_changes_is_not_taken_for_a_clipped_one():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=0.1)
    clipper = UClip(optimizer, Norm(2.0), Gated(), metrics_every=1)
    for _ in range(40):
        p.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
    assert clipper.metrics()["grad_norm"] == 5.0


@pytest.mark.parametrize(("limit", "region"), [(1.0, Norm(1.0)), (0.3, Norm(0.1)), (0.3, Component(0.1))], ids=repr)
def test_while_watching_it_is_said_what_is_seen(limit, region):
    said = left_in(limit, region, observe=True)
    assert len(said) == 1
    assert f"already clipped to a norm of {limit:g}, and advise() sees only what that leaves" in said[0]
    assert "Take the clip_grad_norm_ call out of the training loop while you watch" in said[0]


def test_watching_says_nothing_of_the_carry_and_metrics_that_are_off_say_nothing():
    assert left_in(1e6, Norm(0.01), observe=True) == []
    assert left_in(1.0, Norm(1.0), metrics_every=0) == []


def test_skipped_steps_do_not_count_as_the_norm_before_them():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=0.1)
    clipper = UClip(optimizer, Norm(1.0), carry=True, metrics_every=1)
    as_on_a_device(clipper)
    for size in (1.0, math.nan, math.nan, math.nan):
        p.grad = torch.tensor([0.0, size])
        optimizer.step()
    assert clipper.metrics()["grad_norm"] == 1.0


def test_what_counts_as_clipped_before():
    below = [0.3, 0.72, 0.91]
    limit = [1.0 - 1e-6 / norm for norm in (1.1, 1.7, 2.0, 5.0, 3.0)]
    assert clipped_before(below + limit[:2], 1.0) is None
    assert clipped_before(below + limit[:3], 1.0) == 1.0
    assert clipped_before(below + limit[:3], 0.5) is None
    assert clipped_before(below + limit, 0.5) == 1.0
    assert clipped_before(below + limit, None) == 1.0
    assert clipped_before([*below, *limit, 1.2], 1.0) is None  # one above: nobody clips to 1
    assert clipped_before([norm * 1.037 for norm in limit], 0.5) is None  # the same, but no limit that people give
    assert clipped_before([math.nan] * 32, 1.0) is None
    assert clipped_before([0.0] * 32, 0.0) is None
    assert clipped_before([], 1.0) is None


# ---------------------------------------------------------------------- one cause, one remedy


def steady(clipper, optimizer, steps, size):
    """Steps whose gradient is always the same; the metrics are read after each."""
    for _ in range(steps):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full_like(p, size)
        optimizer.step()
        clipper.metrics()["delay"]


@pytest.mark.parametrize("device", [False, True])
def test_after_the_warning_of_haste_one_more_is_enough(device):
    def run():
        net, _ = problem()
        optimizer = optim.AdamW(net.parameters())
        clipper = UClip(optimizer, Norm(1.0), carry=True, metrics_every=1)
        if device:
            as_on_a_device(clipper)
        steady(clipper, optimizer, 30, 0.5)  # winds up
        steady(clipper, optimizer, 30, 0.0)  # and waits, without being fed

    said = said_by(run)
    assert len(said) == 2
    assert "in front of AdamW often trains far worse" in said[0]
    assert "the carry is winding up" in said[1]


def test_a_change_of_the_rule_says_it_anew():
    def run():
        net, _ = problem()
        optimizer = optim.AdamW(net.parameters())
        clipper = UClip(optimizer, Norm(1.0), carry=True, metrics_every=1)
        steady(clipper, optimizer, 30, 0.5)
        clipper.change(Norm(0.5))
        steady(clipper, optimizer, 30, 0.5)

    assert [("often trains far worse" in text, "winding up" in text) for text in said_by(run)] == 2 * [
        (True, False),
        (False, True),
    ]


def test_the_local_clipper_says_it_twice_as_well():
    def run():
        net, _ = problem()
        optimizer = optim.AdamW(net.parameters())
        clipper = LocalUClip(net, optimizer, Norm(1.0), carry=True, metrics_every=1)
        for factor in [10.0] * 20 + [0.0] * 40:
            optimizer.zero_grad()
            (factor * net(torch.ones(1, 6))).sum().backward()
            optimizer.step()
            clipper.metrics()["delay"]

    said = said_by(run)
    assert "often trains far worse" in said[0]
    assert sum("winding up" in text or "wait about" in text for text in said) == 1


# ---------------------------------------------------------------------- a clipper that sees no step


OPTIMIZERS = pytest.mark.parametrize(
    "make",
    [
        lambda params: optim.SGD(params, lr=0.01),
        lambda params: optim.AdamW(params, lr=0.01, fused=True),
        lambda params: optim.AdamW(params, lr=0.01, foreach=True),
    ],
    ids=["SGD", "fused", "foreach"],
)


@OPTIMIZERS
@pytest.mark.parametrize("observe", [False, True])
def test_an_optimizer_made_anew_after_attaching_is_reported_once(make, observe):
    net, optimizer = problem()
    clipper = UClip(optimizer, Norm(1.0), observe=observe)
    again = make(net.parameters())
    train(net, again, 3)
    said = said_by(lambda: [clipper.metrics() for _ in range(3)])
    assert len(said) == 1
    assert "no step was seen, so that the metrics are NaN" in said[0]
    assert f"an optimizer of the class {type(again).__name__} to which no clipper is attached" in said[0]
    assert "If that was made anew, attach UClip to the new one" in said[0]
    assert "clip_()" not in said[0]


@pytest.mark.parametrize("attached", [True, False])
def test_a_clipper_that_sees_no_step_is_reported_without_being_asked(attached):
    net, optimizer = problem()
    clipper = UClip(optimizer if attached else net.parameters(), Norm(1.0))
    again = optim.SGD(net.parameters(), lr=0.01)
    assert said_by(lambda: train(net, again, PATIENCE - 1)) == []
    said = said_by(lambda: train(net, again, 2 * PATIENCE))
    assert len(said) == 1
    assert "no step was seen" in said[0]
    assert not said_by(clipper.metrics)


def test_nothing_is_said_of_a_clipper_that_was_removed_or_has_clipped():
    net, optimizer = problem()
    UClip(optimizer, Norm(1.0)).remove()
    again = optim.SGD(net.parameters(), lr=0.01)
    clipper = UClip(net.parameters(), Norm(1.0))
    clipper.clip_()
    assert said_by(lambda: train(net, again, 2 * PATIENCE)) == []


def test_a_watcher_of_another_model_asks_whose_optimizer_it_has():
    (net, _), (_other, theirs) = problem(), problem()
    watcher = UClip(theirs, Norm(1.0), observe=True)
    train(net, optim.SGD(net.parameters(), lr=0.01), 3)
    with pytest.raises(RuntimeError, match=r"seen 0 usable steps .* attached to the optimizer that steps"):
        watcher.advise()


def test_advice_without_a_step_says_why():
    net, optimizer = problem()
    watcher = UClip(optimizer, Norm(1.0), observe=True)
    train(net, optim.SGD(net.parameters(), lr=0.01), 1)
    again = optim.SGD(net.parameters(), lr=0.01)
    train(net, again, 30)
    with (
        pytest.warns(CarryClipWarning, match="attach UClip to the new one"),
        pytest.raises(RuntimeError, match="0 usable"),
    ):
        watcher.advise()


@OPTIMIZERS
def test_an_explicit_clipper_that_is_never_called_is_reported_once(make):
    net, _ = problem()
    clipper, optimizer = UClip(net.parameters(), Norm(1.0)), make(net.parameters())
    said = said_by(lambda: train(net, optimizer, 5, clipper.metrics))
    assert len(said) == 1
    assert "Call clipper.clip_() before each optimizer.step(), or pass the optimizer" in said[0]


def test_parameters_that_several_optimizers_step_are_reported():
    net, _ = problem()
    clipper = UClip(net.parameters(), Norm(1.0))
    both = [optim.SGD(net[0].parameters(), lr=0.1), optim.AdamW(net[2].parameters())]
    said = said_by(lambda: [train(net, optimizer, 3, clipper.metrics) for optimizer in both] + [clipper.metrics()])
    assert len(said) == 1
    assert "of the class SGD and AdamW" in said[0]


def test_metrics_before_the_first_step_are_not_reported():
    net, optimizer = problem()
    train(net, optimizer, 5)
    clipper = UClip(optimizer, Norm(1.0))
    explicit_net, explicit_optimizer = problem()
    train(explicit_net, explicit_optimizer, 5)  # before there is a clipper
    explicit = UClip(explicit_net.parameters(), Norm(1.0))

    def run():
        for each in (clipper, explicit):
            for _ in range(8):  # as for micro-batches, or steps that a scaler skips
                each.metrics()
        train(net, optimizer, 3, clipper.metrics)
        train(explicit_net, explicit_optimizer, 3, explicit.clip_)
        clipper.metrics(), explicit.metrics()

    assert said_by(run) == []


def test_an_optimizer_of_a_part_or_of_another_model_is_not_reported():
    net, optimizer = problem()
    clipper = UClip(optimizer, Norm(1.0))
    other, others = problem()
    warm_up = optim.SGD(net[2].parameters(), lr=0.1)
    train(other, others, 5)
    train(net, warm_up, 5)
    assert said_by(clipper.metrics) == []


def test_a_clipper_that_was_removed_is_not_reported():
    net, optimizer = problem()
    clipper = UClip(optimizer, Norm(1.0))
    clipper.remove()
    train(net, optim.SGD(net.parameters(), lr=0.1), 5)
    assert said_by(clipper.metrics) == []


# ---------------------------------------------------------------------- schedules that come to 0


def falling(step):
    return max(0.0, 1.0 - step / 10)


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize(
    ("region", "carry", "fate"),
    [
        (Norm(falling), True, "waits in the carry"),
        (Component(falling), False, "is lost"),
        (Sign(falling), Gated(), "is lost"),
        (Adaptive(mean=falling, std=falling), True, "waits in the carry"),
    ],
    ids=["norm", "component", "sign", "adaptive"],
)
def test_a_schedule_that_comes_to_0_is_reported_once(region, carry, fate, device):
    net, optimizer = problem()
    clipper = UClip(optimizer, region, carry, metrics_every=0)
    if device:
        as_on_a_device(clipper)
    assert said_by(lambda: train(net, optimizer, 11)) == []  # at the last step alone it does no harm
    said = said_by(lambda: train(net, optimizer, 5))
    assert len(said) == 1
    assert f"<schedule falling>{'' if isinstance(region, Component | Sign) else ','}" in said[0]
    assert "is 0 since step 10: every update is 0, and what is cut " + fate in said[0]
    assert "End the schedule at a small positive radius, or call clipper.remove()" in said[0]


def test_a_schedule_that_comes_to_0_is_reported_by_the_local_clipper():
    net, optimizer = problem()
    LocalUClip(net, optimizer, Norm(falling), carry=True)
    assert "is 0 since step 10" in said_by(lambda: train(net, optimizer, 15))[0]


@pytest.mark.parametrize(
    "region",
    [
        Norm(lambda step: min(1.0, step / 10)),
        Norm(lambda step: float(step % 2)),
        Adaptive(mean=falling, std=1.0),
        Adaptive(mean=falling, std=falling, min_radius=0.1),
        Symmetric(std=falling),
    ],
    ids=["warm-up", "by turns", "mean alone", "min_radius", "Symmetric"],
)
def test_schedules_that_let_something_through_are_not_reported(region):
    net, optimizer = problem()
    UClip(optimizer, region, Gated())
    assert said_by(lambda: train(net, optimizer, 20)) == []


# ---------------------------------------------------------------------- assigning instead of changing


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        (
            "region",
            Norm(0.5),
            r"clipper\.region cannot be assigned\. Call clipper\.change\(Norm\(radius=0\.5, over='all'",
        ),
        ("region", 0.5, r"Call clipper\.change\(Norm\(0\.5\)\): it keeps the carry"),
        ("radius", 0.5, r"clipper\.radius cannot be assigned\. Call clipper\.change\(Norm\(0\.5\)\)"),
        ("carry", False, r"Call clipper\.change\(carry=False\); clipper\.carry\(p\) is a tensor"),
        ("carry", "gated", r"Call clipper\.change\(carry=Gated\(\)\)"),
        ("carry_policy", Gated(), r"clipper\.change\(carry=Gated\(decay=0\.99"),
        ("nonfinite", "zero", r"clipper\.nonfinite cannot be assigned.*remove\(\) and make a new UClip"),
        ("metric_every", 1, "metric_every cannot be assigned: it would change nothing. metrics_every can be"),
    ],
)
def test_assigning_to_a_clipper_says_what_to_call(name, value, remedy):
    _, optimizer = problem()
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    with pytest.raises(AttributeError, match=remedy):
        setattr(clipper, name, value)
    assert (clipper.region, clipper.carry_policy) == (Norm(1.0), True)
    clipper.metrics_every = 3
    assert clipper.metrics_every == 3


def test_assigning_to_a_local_clipper_is_refused():
    net, optimizer = problem()
    clipper = LocalUClip(net, optimizer, Norm(1.0), carry=True)
    for name in ("region", "regions", "carry", "carry_policy", "nonfinite"):
        with pytest.raises(AttributeError, match=rf"{name} cannot be assigned.*make a new LocalUClip"):
            setattr(clipper, name, False)


# ---------------------------------------------------------------------- changing in mid-run


def halving(step):
    return 0.5 / (1 + step)


CHANGES = {
    "a radius": (Norm(0.3), True, Norm(0.1), True),
    "a gated radius": (Norm(0.3), Gated(decay=0.5), Norm(0.1), Gated(decay=0.5)),
    "a gated radius of coordinates": (Component(0.05), Gated(decay=0.5), Component(0.01), Gated(decay=0.5)),
    "a schedule": (Norm(0.3), True, Norm(halving), True),
    "no schedule": (Norm(halving), True, Norm(0.3), True),
    "another kind": (Norm(0.3), Gated(), Component(0.02), True),
    "other vectors": (Norm(0.3), Gated(decay=0.5), Norm(0.1, over="tensor"), Gated(decay=0.5)),
    "the same moments": (Adaptive(1, 1, EWMA(0.9)), True, Adaptive(0, 1, EWMA(0.5)), True),
    "other moments": (Adaptive(1, 1, EWMA(0.9)), True, Adaptive(1, 1), True),
    "a rate": (Norm(0.3), Drip(0.1), Norm(0.1), Drip(0.3)),
    "what is followed": (Norm(0.3), Gated(decay=0.5), Norm(0.3), Shrunk(20)),
    "a shrunk radius": (Component(0.05), Shrunk(20), Component(0.02), Shrunk(20)),
    "no carry": (Norm(0.3), True, Norm(0.3), False),
    "a carry": (Component(0.02), False, Component(0.02), True),
}


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


@pytest.mark.parametrize("device", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_does_what_a_new_clipper_does_that_finds_the_state(name, device):
    before, policy, after, other = CHANGES[name]
    results = []
    for changes in (True, False):
        net, optimizer = problem()
        clipper = UClip(optimizer, before, policy)
        if device:
            as_on_a_device(clipper)
        train(net, optimizer, 8)
        if changes:
            carry = clipper.carry(0).clone()
            clipper.change(after, carry=other)
            assert (clipper.region, clipper.carry_policy) == (after, other)
            assert torch.equal(clipper.carry(0), carry if other else torch.zeros_like(carry))
        else:
            clipper.remove()
            with pytest.warns(CarryClipWarning, match="was written with"):
                clipper = UClip(optimizer, after, other)
            if device:
                as_on_a_device(clipper)
        train(net, optimizer, 8)
        results.append([flat(net), *(clipper.carry(p) for p in net.parameters())])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


def test_moments_go_on_where_those_of_the_new_rule_are_among_them():
    net, optimizer = problem()
    clipper = UClip(optimizer, Adaptive(1, 1), Gated())
    train(net, optimizer, 5)
    entries = optimizer.state[net[0].weight]
    mean = entries["uclip_mean"]
    clipper.change(carry=True)
    assert entries["uclip_mean"] is mean
    assert int(entries["uclip_count"]) == 5
    assert "uclip_feed" not in entries
    clipper.change(carry=Gated())  # its average of the feed is new, and counts with the moments
    assert set(entries) == {"uclip_carry"}


def test_a_change_survives_a_checkpoint_and_copies():
    net, optimizer = problem()
    clipper = UClip(optimizer, Norm(0.3), carry=True)
    train(net, optimizer, 5)
    clipper.change(Norm(0.1), carry=Gated())
    train(net, optimizer, 5)
    again, fresh = problem()
    UClip(fresh, Norm(0.1), Gated())
    again.load_state_dict(net.state_dict())
    fresh.load_state_dict(optimizer.state_dict())  # a warning would be an error
    twin_net, twin, twin_clipper = copy.deepcopy((net, optimizer, clipper))
    assert (twin_clipper.region, twin_clipper.carry_policy) == (Norm(0.1), Gated())
    for model, each in ((net, optimizer), (again, fresh), (twin_net, twin)):
        train(model, each, 5)
    assert torch.equal(flat(net), flat(again))
    assert torch.equal(flat(net), flat(twin_net))


def test_a_changed_optimizer_of_a_clipping_class_is_copied_as_it_is():
    net, _ = problem()
    optimizer = uclipped(optim.SGD, Norm(0.3), carry=True)(net.parameters(), lr=0.01)
    train(net, optimizer, 3)
    optimizer.uclip.change(Component(0.01), carry=Gated())
    twin_net, twin = copy.deepcopy((net, optimizer))  # a warning would be an error
    train(net, optimizer, 3)
    train(twin_net, twin, 3)
    assert twin.uclip.region == Component(0.01)
    assert torch.equal(flat(net), flat(twin_net))


def test_the_explicit_form_changes_too():
    p = nn.Parameter(torch.zeros(2))
    clipper = UClip([p], Norm(1.0), carry=True)
    p.grad = torch.tensor([6.0, 8.0])
    clipper.clip_()
    clipper.change(Norm(3.0))
    p.grad = torch.zeros(2)
    clipper.clip_()
    torch.testing.assert_close(p.grad, torch.tensor([1.8, 2.4]))
    torch.testing.assert_close(clipper.carry(p), torch.tensor([3.6, 4.8]))
    other = UClip([nn.Parameter(torch.zeros(2))], Norm(3.0), carry=True)
    other.load_state_dict(clipper.state_dict())  # a warning would be an error


def test_a_policy_that_remembers_more_starts_anew():
    """``Drip`` keeps no noise, without which the average of ``Shrunk`` would count for too much."""
    p = nn.Parameter(torch.zeros(2))
    clipper = UClip([p], Norm(1.0), carry=Drip())
    p.grad = torch.tensor([6.0, 8.0])
    clipper.clip_()
    clipper.change(carry=Shrunk())
    assert [column.item() for column in ledger(clipper).memory.known()] == [0.0, 0.0, 0.0]
    clipper.change(carry=Drip())
    assert ledger(clipper).memory.noise is None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((), {}, TypeError, "needs something to change"),
        ((0.5,), {}, TypeError, r"write Norm\(0\.5\)"),
        ((Norm,), {}, TypeError, "Norm is the class"),
        ((Norm(0.5),), {"carry": "gated"}, TypeError, "Unknown carry policy"),
        ((Component([0.5]),), {}, ValueError, "has 1 values for 4 parameters"),
        (({7: Norm(0.5)},), {}, ValueError, "names 7, but there is no such group"),
        (({0: None},), {}, ValueError, "nothing to clip"),
    ],
)
def test_a_change_that_cannot_be_leaves_everything_as_it_was(arguments, options, error, message):
    runs = []
    for tries in (True, False):
        net, optimizer = problem()
        clipper = UClip(optimizer, Norm(0.3), Gated())
        train(net, optimizer, 3)
        words, state = repr(clipper), copy.deepcopy(optimizer.state_dict())
        if tries:
            with pytest.raises(error, match=message):
                clipper.change(*arguments, **options)
            assert repr(clipper) == words
            assert str(optimizer.state_dict()) == str(state)
        train(net, optimizer, 3)
        runs.append(flat(net))
    assert torch.equal(*runs)


def test_a_removed_clipper_and_a_watcher_do_not_change():
    _, optimizer = problem()
    watcher = UClip(optimizer, Norm(1.0), carry=True, observe=True)
    with pytest.raises(RuntimeError, match="only watches"):
        watcher.change(Norm(0.5))
    watcher.remove()
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    clipper.remove()
    with pytest.raises(RuntimeError, match="was removed"):
        clipper.change(Norm(0.5))


def test_a_change_may_take_groups_in_and_leave_them_alone():
    net, _ = problem()
    groups = [{"params": list(net[0].parameters())}, {"params": list(net[2].parameters())}]
    optimizer = optim.SGD(groups, lr=0.01)
    clipper = UClip(optimizer, {0: Norm(0.01), 1: None}, carry=True)
    other = UClip(groups[1]["params"], Norm(1.0), carry=True)
    with pytest.raises(RuntimeError, match="clipped already"):
        clipper.change(Norm(0.01))
    assert clipper.region == {0: Norm(0.01), 1: None}
    other.remove()
    clipper.change(Norm(0.01))
    train(net, optimizer, 2)
    assert clipper.metrics()["update_norm"] == pytest.approx(0.01, rel=1e-5)
    clipper.change({0: None, 1: Norm(0.01)})
    UClip(groups[0]["params"], Norm(1.0), carry=True)


def test_metrics_and_warnings_begin_anew_after_a_change():
    p = nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([p], lr=0.0)
    clipper = UClip(optimizer, Norm(0.5), carry=True, metrics_every=10)

    def run():
        for _ in range(200):
            p.grad = torch.tensor([3.0, 4.0])
            optimizer.step()
        assert clipper.metrics()["radius_norm"] == clipper.region.radius

    for radius in (0.5, 0.2):
        clipper.change(Norm(radius))
        assert clipper.metrics().step == -1
        said = said_by(run)
        assert any("winding up" in text and f"Norm(radius={radius}" in text for text in said)
