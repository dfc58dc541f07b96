"""The clipper's surface: metrics, several optimizers, copies, errors, repr."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from torch import nn, optim

from carryclip import EWMA, Adaptive, Capped, CarryClipWarning, Component, Gated, Leaky, Norm, Sign, Symmetric
from carryclip.torch import UClip, uclipped
from seam import ledger


def param(*values):
    return nn.Parameter(torch.tensor(values))


def one_step(region, *gradient, carry=True, metrics_every=1, before=()):
    p = nn.Parameter(torch.zeros(len(gradient)))
    clipper = UClip([p], region, carry=carry, metrics_every=metrics_every)
    for g in (*before, gradient):
        p.grad = torch.tensor(g)
        clipper.clip_()
    return p, clipper


# ---------------------------------------------------------------------- metrics


def test_metrics_of_a_norm_by_hand():
    _, clipper = one_step(Norm(1.0), 6.0, 8.0, before=((3.0, 4.0),))
    metrics = clipper.metrics()  # carry before: 4·(0.6, 0.8), so s = (8.4, 11.2)
    assert dict(metrics) == pytest.approx(
        {
            "grad_norm": 10.0,
            "sum_norm": 14.0,
            "update_norm": 1.0,
            "carry_norm": 13.0,
            "radius_norm": 1.0,
            "clipped_fraction": 1.0,
            "carry_ratio": 13.0,
            "carry_feed": 1.0,
            "delay": 14.0,
            "skipped_steps": 0.0,
            "dropped_norm": 0.0,
        }
    )
    assert metrics.step == 1


def test_metrics_of_coordinates_by_hand():
    _, clipper = one_step(Component(1.0), 1.0, -0.5, 0.0, before=((3.0, -2.0, 0.0),))
    # carry before: (2, -1, 0); s = (3, -1.5, 0); u = (1, -1, 0); carry after: (2, -0.5, 0)
    assert dict(clipper.metrics()) == pytest.approx(
        {
            "grad_norm": math.sqrt(1.25),
            "sum_norm": math.sqrt(11.25),
            "update_norm": math.sqrt(2),
            "carry_norm": math.sqrt(4.25),
            "radius_norm": math.sqrt(3),
            "clipped_fraction": 2 / 3,
            "carry_ratio": 2.0,
            "carry_feed": (2 * 1.0 + 1 * 0.5) / 3,
            "delay": math.sqrt(11.25) / math.sqrt(3),
            "skipped_steps": 0.0,
            "dropped_norm": 0.0,
        }
    )


def test_dropped_norm_adds_up_what_the_policy_drops():
    for region in (Component(1.0), Norm(1.0)):
        for carry, dropped in ((False, 4.0), (Capped(1), 3.0), (Leaky(0.25), 3.0), (Gated(cap=1), 3.0)):
            p, clipper = one_step(region, 5.0, carry=carry)
            assert clipper.metrics()["dropped_norm"] == pytest.approx(dropped)
            p.grad = torch.tensor([3.0])
            clipper.clip_()
            assert clipper.metrics()["dropped_norm"] > dropped


def test_metrics_over_several_vectors_and_rules():
    a, b, c, d = (param(0.0) for _ in range(4))
    groups = [
        {"params": [a]},
        {"params": [b], "uclip": Norm(2.0)},
        {"params": [c, d], "uclip": Norm(1.0, over="tensor")},
    ]
    optimizer = optim.SGD(groups, lr=1.0)
    clipper = UClip(optimizer, Component(1.0), carry=True, metrics_every=1)
    for p, g in ((a, 4.0), (b, 4.0), (c, 9.0), (d, 0.5)):
        p.grad = torch.tensor([g])
    optimizer.step()
    metrics = clipper.metrics()
    assert metrics["carry_ratio"] == pytest.approx(8.0), "the largest of 3, 1, 8 and 0"
    assert metrics["radius_norm"] == pytest.approx(math.sqrt(1 + 4 + 1 + 1))
    assert metrics["clipped_fraction"] == pytest.approx(3 / 4)
    assert metrics["carry_norm"] == pytest.approx(math.sqrt(9 + 4 + 64))


def test_rounding_alone_does_not_count_as_clipping():
    p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    clipper = UClip([p], Component(100.0), carry=True, metrics_every=1)
    p.grad = torch.tensor([1.0, 2.0, 3.0, 400.0], dtype=torch.bfloat16)
    clipper.clip_()
    clipper.carry(0)[:3] = 2.0**-12  # the sum does not fit into bfloat16
    p.grad = torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.bfloat16)
    clipper.clip_()
    assert clipper.metrics()["clipped_fraction"] == 0.25
    assert clipper.carry(0)[0] == 2.0**-12


def test_huge_radii_and_drops_stay_numbers():
    for dtype in (torch.float32, torch.bfloat16):
        p = nn.Parameter(torch.zeros(2, dtype=dtype))
        clipper = UClip([p], Component(1e30), carry=False, metrics_every=1)
        p.grad = torch.ones(2, dtype=dtype)
        clipper.clip_()
        assert clipper.metrics()["radius_norm"] == pytest.approx(math.sqrt(2) * 1e30, rel=0.01)
    p = param(0.0)
    clipper = UClip([p], Component(1.0), carry=False, metrics_every=1)
    for g in (1e25, 3.0):
        p.grad = torch.tensor([g])
        clipper.clip_()
    assert 1e18 < clipper.metrics()["dropped_norm"] < math.inf


def test_a_skipped_step_drops_nothing():
    p = param(0.0, 0.0)
    for region in (Component(1.0), Norm(1.0)):
        clipper = UClip([p], region, carry=False, metrics_every=1)
        p.grad = torch.tensor([5.0, math.nan])
        clipper.clip_()
        assert clipper.metrics()["dropped_norm"] == 0.0
        clipper.remove()


def test_complex_radii_count_for_both_parts():
    z = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    for radius in (0.5, [torch.full((3,), 0.5)]):
        clipper = UClip([z], Component(radius), carry=True, metrics_every=1)
        z.grad = torch.ones(3, dtype=torch.complex64)
        clipper.clip_()
        assert clipper.metrics()["radius_norm"] == pytest.approx(0.5 * math.sqrt(6))
        clipper.remove()


def test_metrics_are_measured_every_so_many_steps():
    p = param(0.0)
    clipper = UClip([p], Component(10.0), carry=True, metrics_every=3)
    seen = []
    for step in range(7):
        p.grad = torch.tensor([float(step + 1)])
        clipper.clip_()
        seen.append((clipper.metrics().step, clipper.metrics()["grad_norm"]))
    # The first, and then the 3rd, 6th, ...: those after which people log.
    assert seen == [(0, 1.0)] * 2 + [(2, 3.0)] * 3 + [(5, 6.0)] * 2


def test_metrics_before_the_first_step_and_switched_off():
    p = param(0.0)
    clipper = UClip([p], Component(1.0), carry=True, metrics_every=0)
    for _ in range(2):
        metrics = clipper.metrics()
        assert metrics.step == -1
        assert math.isnan(metrics["grad_norm"])
        assert metrics["skipped_steps"] == 0
        p.grad = torch.tensor([5.0])
        clipper.clip_()
    with pytest.raises(KeyError, match="'carry_ration' is not a metric; there are grad_norm"):
        clipper.metrics()["carry_ration"]


def test_a_snapshot_of_the_metrics_does_not_change():
    p, clipper = one_step(Norm(1.0), 3.0, 4.0)
    snapshot = clipper.metrics()
    p.grad = torch.tensor([30.0, 40.0])
    clipper.clip_()
    assert snapshot["grad_norm"] == 5.0
    assert "grad_norm=5" in repr(snapshot)


def test_a_skipped_step_leaves_the_figures_of_the_one_before():
    p, clipper = one_step(Norm(1.0), 3.0, 4.0)
    p.grad = torch.tensor([math.nan, 1.0])
    clipper.clip_()
    assert clipper.metrics()["grad_norm"] == 5.0
    assert clipper.metrics()["skipped_steps"] == 1


# ---------------------------------------------------------------------- copies


def trained(make):
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = make(net.parameters())
    return net, optimizer


def step(net, optimizer, k):
    optimizer.zero_grad()
    (9 * net(torch.randn(4, 3, generator=torch.Generator().manual_seed(k))).square().mean()).backward()
    optimizer.step()


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_class_factory_survives_copies(copier, fused):
    make = uclipped(optim.AdamW, Norm(0.1), carry=Gated())
    net, optimizer = trained(
        lambda p: make([{"params": list(p)[:1]}, {"params": [], "uclip": None}], lr=0.01, fused=fused)
    )
    for k in range(3):
        step(net, optimizer, k)
    twin_net, twin = copier((net, optimizer))
    assert twin.uclip is not optimizer.uclip
    for k in range(3, 6):
        step(net, optimizer, k)
        step(twin_net, twin, k)
    assert torch.equal(net.weight, twin_net.weight)
    assert torch.equal(optimizer.uclip.carry(0), twin.uclip.carry(0))
    assert isinstance(twin, optim.AdamW)
    assert type(twin).__name__ == "UClippedAdamW"


def test_the_class_factory_loads_checkpoints():
    make = uclipped(optim.Adam, Component(0.01), carry=True)
    net, optimizer = trained(lambda p: make(p, lr=0.01))
    step(net, optimizer, 0)
    _, fresh = trained(lambda p: make(p, lr=0.01))
    fresh.load_state_dict(optimizer.state_dict())
    assert torch.equal(fresh.uclip.carry(0), optimizer.uclip.carry(0))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copied_clipper_takes_its_optimizer_along(copier):
    net, optimizer = trained(lambda p: optim.AdamW(p, lr=0.01))
    clipper = UClip(optimizer, Norm(0.1), carry=Gated())
    step(net, optimizer, 0)
    twin_net, twin, twin_clipper = copier((net, optimizer, clipper))
    assert twin_clipper.optimizers == [twin]
    step(net, optimizer, 1)
    step(twin_net, twin, 1)
    assert torch.equal(clipper.carry(0), twin_clipper.carry(0))


def test_a_copied_explicit_clipper_keeps_its_state():
    net = nn.Linear(3, 2)
    clipper = UClip(net.parameters(), Component(0.1), carry=True)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    clipper.clip_()
    twin_net, twin = copy.deepcopy((net, clipper))
    assert torch.equal(twin.carry(twin_net.weight), clipper.carry(net.weight))


def test_a_copied_optimizer_without_its_clipper_warns():
    """Trap: deepcopy keeps the carry and drops the hooks; training would go on unclipped in silence."""
    net, optimizer = trained(lambda p: optim.AdamW(p, lr=0.01))
    UClip(optimizer, Norm(0.1), carry=True)
    step(net, optimizer, 0)
    twin_net, twin = copy.deepcopy((net, optimizer))
    with pytest.warns(CarryClipWarning, match=r"no clipper is attached.*uclipped\(\)"):
        step(twin_net, twin, 1)
    step(twin_net, twin, 2)  # once is enough


def test_a_removed_clipper_stays_removed():
    net, optimizer = trained(lambda p: uclipped(optim.SGD, Norm(0.1), carry=True)(p, lr=0.01))
    optimizer.uclip.remove()
    _, twin = copy.deepcopy((net, optimizer))
    twin.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    twin.step()
    assert twin.param_groups[0]["params"][0].grad.sum() == 6
    explicit = UClip(net.parameters(), Norm(0.1), carry=True)
    explicit.remove()
    with pytest.raises(RuntimeError, match="was removed"):
        explicit.clip_()


def test_nothing_keeps_a_dropped_optimizer_alive():
    """Optimizer and clipper must not hold each other: memory is freed at once, and a new one can be attached."""
    net = nn.Linear(3, 2)
    gc.disable()
    try:
        for _ in range(3):
            optimizer = optim.Adam(net.parameters(), lr=0.01)
            UClip(optimizer, Norm(0.1), carry=True)
            step(net, optimizer, 0)
            alive = weakref.ref(optimizer)
            del optimizer
            assert alive() is None
    finally:
        gc.enable()


def test_remove_takes_the_hooks_off_and_attaching_again_goes_on():
    net, optimizer = trained(lambda p: optim.SGD(p, lr=0.01))
    clipper = UClip(optimizer, Component(0.01), carry=True)
    step(net, optimizer, 0)
    owed = clipper.carry(0).clone()
    clipper.remove()
    step(net, optimizer, 1)
    assert net.weight.grad.abs().max() > 0.01
    again = UClip(optimizer, Component(0.01), carry=True)
    assert torch.equal(again.carry(0), owed)
    again.remove(forget=True)
    assert not optimizer.state[net.weight]
    assert not [key for key in optimizer.param_groups[0] if key.startswith("uclip")]
    step(net, optimizer, 2)


# ---------------------------------------------------------------------- bad input

NAN = float("nan")
SHARED = optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Norm(0),
            ValueError,
            r"Norm: radius must be above 0, got 0\. To leave parameters unclipped give their group None",
        ),
        (lambda: Component(-1.0), ValueError, r"Component: radius must be above 0, got -1\.0"),
        (lambda: Norm(NAN), ValueError, "Norm: radius must be above 0, got nan"),
        (lambda: Norm("1"), TypeError, "Norm: radius must be a number, a schedule"),
        (lambda: Norm([1.0, 2.0]), TypeError, "one radius holds for the whole vector"),
        (
            lambda: Norm(1.0, over="layer"),
            ValueError,
            "over must be .all., .group., .tensor., .row. or .column., got .layer.",
        ),
        (lambda: Component([1.0, NAN]), ValueError, "Component: radius must be at least 0, got nan"),
        (lambda: Component([torch.tensor([1.0, -1.0])]), ValueError, "entries that are negative or NaN"),
        (lambda: Sign(math.inf), ValueError, "Sign: scale must be finite"),
        (lambda: Sign(0), ValueError, "Sign: scale must be above 0"),
        (lambda: Adaptive(0, 0), ValueError, r"mean and std are both 0.*Try Adaptive\(mean=1, std=2\)"),
        (lambda: Adaptive(-1, 1), ValueError, "Adaptive: mean must be at least 0"),
        (lambda: Adaptive(1, 1, moments="welford"), TypeError, r"moments must be Welford\(\) or EWMA"),
        (lambda: Symmetric(0), ValueError, "Symmetric: std must be above 0"),
        (lambda: EWMA(1.0), ValueError, r"EWMA: decay must be in \[0, 1\), got 1\.0"),
        (lambda: Capped(0), ValueError, "Capped: radii must be above 0"),
        (lambda: Capped(math.inf), ValueError, "Capped: radii must be above 0 and finite"),
        (lambda: Leaky(1.5), ValueError, r"Leaky: kappa must be in \[0, 1\]"),
        (lambda: Gated(threshold=0), ValueError, r"Gated: threshold must be in \(0, 1\]"),
        (
            lambda: UClip([param(1.0)], 1.0, carry=True),
            TypeError,
            r"A bare number does not say what to clip: write Norm\(1\.0\)",
        ),
        (lambda: UClip([param(1.0)], Norm, carry=True), TypeError, r"Norm is the class: write Norm\(\.\.\.\)"),
        (lambda: UClip([param(1.0)], None, carry=True), TypeError, "Unknown region None"),
        (lambda: UClip([param(1.0)], {}, carry=True), ValueError, "mapping from groups to regions is empty"),
        (
            lambda: UClip([param(1.0)], {1: Norm(1.0)}, carry=True),
            ValueError,
            "The mapping names 1, but there is no such group",
        ),
        (
            lambda: UClip([{"params": [param(1.0)]}, {"params": [param(1.0)]}], {1: Norm(1.0)}, carry=True),
            ValueError,
            "Group 0 has no region.*or 0: None",
        ),
        (
            lambda: UClip([param(1.0)], Component([1.0, 2.0]), carry=True),
            ValueError,
            "radius has 2 values for 1 parameters",
        ),
        (
            lambda: UClip([param(1.0)], Component({"x": 1.0}), carry=True),
            ValueError,
            "no radius for group 0, parameter 0.*named_parameters",
        ),
        (
            lambda: UClip([("w", param(1.0))], Component({"w": 1.0, "v": 1.0}), carry=True),
            ValueError,
            "a radius for 'v', which is not among the parameters",
        ),
        (
            lambda: UClip([param(1.0)], Component([torch.ones(7, 2)]), carry=True),
            ValueError,
            r"has shape \(7, 2\), which does not fit",
        ),
        (lambda: UClip([SHARED, SHARED], Norm(1.0), carry=True), ValueError, "The same optimizer is in the list twice"),
        (lambda: UClip([param(1.0)], {0: None}, carry=True), ValueError, "nothing to clip: every group is left alone"),
        (lambda: UClip([param(1.0)], Norm(1.0), carry="full"), TypeError, "Unknown carry policy 'full'. Use Drip"),
        (
            lambda: UClip([param(1.0)], Norm(1.0), carry=Gated),
            TypeError,
            r"carry=Gated is the class: write carry=Gated\(",
        ),
        (
            lambda: UClip([param(1.0)], Norm(1.0), carry=True, nonfinite="ignore"),
            ValueError,
            "nonfinite must be 'skip', 'zero'",
        ),
        (
            lambda: UClip([param(1.0)], Norm(1.0), carry=True, metrics_every=-1),
            ValueError,
            "metrics_every must be a whole number",
        ),
        (lambda: UClip([], Norm(1.0), carry=True), ValueError, "empty list: there are no parameters"),
        (lambda: UClip([{"params": []}], Norm(1.0), carry=True), ValueError, "no parameters to clip"),
        (
            lambda: UClip(nn.Linear(1, 1), Norm(1.0), carry=True),
            TypeError,
            r"not a module: pass the optimizer, and its step\(\) clips\. model\.parameters\(\) is for loops",
        ),
        (
            lambda: UClip(3, Norm(1.0), carry=True),
            TypeError,
            "needs an optimizer, a list of optimizers, or parameters; got int",
        ),
        (lambda: UClip(["a"], Norm(1.0), carry=True), TypeError, "the list holds something else: str"),
        (
            lambda: UClip([SHARED, nn.Linear(1, 1)], Norm(1.0), carry=True),
            TypeError,
            "the list holds something else: Linear",
        ),
        (
            lambda: UClip(Norm(1.0), SHARED, carry=True),
            TypeError,
            r"arguments are swapped: write UClip\(optimizer, Norm",
        ),
        (
            lambda: UClip(optim.SGD, Norm(1.0), carry=True),
            TypeError,
            r"SGD is a class: pass an instance.*uclipped\(SGD, region\)",
        ),
        (
            lambda: UClip(optim.lr_scheduler.StepLR(SHARED, 1), Norm(1.0), carry=True),
            TypeError,
            r"not its learning-rate scheduler: pass scheduler\.optimizer",
        ),
        (lambda: uclipped(optim.SGD, Norm(1.0), carry=True, cary=True), TypeError, "cary"),
        (lambda: uclipped(optim.SGD, 1.0, carry=True), TypeError, "A bare number does not say"),
        (lambda: UClip([{"lr": 1}], Norm(1.0), carry=True), TypeError, "needs the key 'params'"),
        (
            lambda: UClip(optim.LBFGS([param(1.0)]), Norm(1.0), carry=True),
            TypeError,
            "LBFGS evaluates the gradient many times",
        ),
        (
            lambda: uclipped(optim.SGD([param(1.0)], lr=1), Norm(1.0), carry=True),
            TypeError,
            "This is an instance: write UClip",
        ),
        (lambda: uclipped(dict, Norm(1.0), carry=True), TypeError, "needs an optimizer class"),
    ],
)
def test_bad_input_gets_a_sentence(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_attaching_twice_and_mixing_forms():
    p = param(0.0)
    optimizer = optim.SGD([p], lr=1.0)
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    for again in (lambda: UClip(optimizer, Norm(2.0), carry=True), lambda: UClip([p], Norm(1.0), carry=True)):
        with pytest.raises(RuntimeError, match=r"clipped already, by UClip\(SGD, Norm.*call \.remove\(\)"):
            again()
    with pytest.raises(RuntimeError, match="do not call clip_"):
        clipper.clip_()
    del optimizer
    with pytest.raises(RuntimeError, match=r"by UClip\(SGD, Norm.*in a notebook do so before the cell runs again"):
        UClip(optim.SGD([p], lr=1.0), Norm(1.0))
    clipper.remove()
    optimizer = optim.SGD([p], lr=1.0)
    explicit = UClip([p], Norm(1.0), carry=True)
    with pytest.raises(RuntimeError, match=r"clipped already, by UClip\(parameters"):
        UClip(optimizer, Norm(1.0), carry=True)
    del explicit
    UClip(optimizer, Norm(1.0), carry=True)


def test_wrapped_optimizers_say_how_to_unwrap():
    class Wrapper(optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

    class Bare:
        param_groups = ()

    inner = optim.SGD([param(0.0)], lr=1.0)
    with pytest.raises(TypeError, match=r"wrapper without step hooks.*UClip\(wrapped\.optimizer, \.\.\.\) \(a SGD\)"):
        UClip(Wrapper(inner), Norm(1.0), carry=True)
    with pytest.raises(TypeError, match="use the explicit form"):
        UClip(Bare(), Norm(1.0), carry=True)


def test_schedules_and_shapes_are_checked_when_they_are_used():
    for region, error, message in (
        (Norm(lambda step: -1.0), ValueError, "the schedule gave -1.0 at step 0"),
        (Norm(lambda step: None), TypeError, "the schedule gave None at step 0"),
        (Norm(lambda step: torch.ones(2)), ValueError, "must be one number, got shape"),
        (Component(lambda step: [torch.ones(7)]), ValueError, r"radius for group 0, parameter 0 has shape \(7,\)"),
        (Component(lambda step: []), ValueError, "0 radii were given, but there is a parameter 0"),
    ):
        p = nn.Parameter(torch.zeros(2, 3))
        p.grad = torch.ones(2, 3)
        clipper = UClip([p], region, carry=True)
        with pytest.raises(error, match=message):
            clipper.clip_()
        assert ledger(clipper).steps == 0
        assert torch.equal(p.grad, torch.ones(2, 3))


def test_repr_tells_what_it_does():
    p, q = nn.Parameter(torch.zeros(1000, 2)), param(0.0)
    optimizer = optim.AdamW([{"params": [p]}, {"params": [q]}], fused=True)
    text = repr(UClip(optimizer, {0: Norm(1.0), 1: None}, carry=Gated()))
    assert text.splitlines()[0] == (
        "UClip(AdamW, {0: Norm(radius=1.0, over='all'), 1: None}, carry=Gated(decay=0.99, threshold=0.5, cap=100))"
    )
    assert "clips 1 parameter (2,000 numbers) in 1 group, leaves 1 group alone" in text
    assert "a non-finite gradient skips the step" in text
    explicit = repr(UClip([param(0.0)], Component(lambda step: 1.0), carry=False))
    assert "Component(radius=<schedule" in explicit
    assert "plain clipping" in explicit
    assert "call clip_() before each step" in explicit
