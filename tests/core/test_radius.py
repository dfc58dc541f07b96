"""Radii that follow gradients or weights: what each rule promises, in every backend and in every accident of a run."""

import copy
import io
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import carryclip.optax
from backends import BACKENDS, run_reference
from carryclip import (
    RMS,
    Average,
    Capped,
    Component,
    Drip,
    Gated,
    Norm,
    OfWeights,
    Quantile,
    Shrunk,
    ZScore,
    reference,
)
from carryclip.torch import LocalUClip, UClip
from cases import GROUPS, SHAPES, heavy_tailed, tolerance
from seam import force, ledger
from spread import batches, check_same, full, model

# Tails this heavy bring spikes, and norms that are all alike look as if somebody else had clipped: warnings say so.
pytestmark = pytest.mark.filterwarnings("ignore:U-Clip on")

FOLLOWING = {
    "rms": RMS(1.2, decay=0.95, reach=3.0, warmup=5),
    "quantile": Quantile(0.7, window=30, warmup=5),
    "quantile with the current norm": Quantile(0.5, window=20, include_current=True, warmup=0),
    "z-score": ZScore(1.5, decay=0.9, warmup=8),
    "average": Average(1.1, decay=0.9, warmup=12),
}
"""Short memories, so that a run of some steps shows warm-up, forgetting and all."""
BOUNDED = {
    "rms within bounds": RMS(1.2, decay=0.9, warmup=4, before=2.0, least=1.0, most=2.5),
    "average after a warm-up with a limit": Average(1.1, decay=0.9, warmup=12, before=1.5),
    "quantile, frozen": Quantile(0.7, window=15, warmup=5, frozen_after=40),
    "rms by a schedule": RMS(lambda step: 1.0 + 1.0 / (1 + step), decay=0.95, warmup=3),
}
POLICIES = {
    "none": False,
    "full": True,
    "capped": Capped(3),
    "gated": Gated(),
    "drip": Drip(),
    "shrunk": Shrunk(),
}
OVER = ("all", "group", "tensor")


class Run:
    """Gradients in, updates out, through an optimizer that moves nothing: updates depend on the gradients alone."""

    def __init__(self, region, carry=False, dtype=torch.float64, host=None, weights=None, **options):
        weights = [np.zeros(shape) for shape in SHAPES] if weights is None else weights
        self.params = [nn.Parameter(torch.tensor(w, dtype=dtype)) for w in weights]
        groups = [{"params": [p for p, k in zip(self.params, GROUPS, strict=True) if k == which]} for which in (0, 1)]
        self.optimizer = torch.optim.SGD(groups, lr=0.0)
        self.clipper = UClip(self.optimizer, region, carry=carry, **({"metrics_every": 1} | options))
        force(self.clipper, host=host)

    def step(self, row):
        """The updates."""
        for p, g in zip(self.params, row, strict=True):
            p.grad = None if g is None else torch.tensor(g).to(p.dtype)
        self.optimizer.step()
        return [None if p.grad is None else p.grad.double().numpy().copy() for p in self.params]

    def steps(self, rows):
        """The updates of every step."""
        return [self.step(row) for row in rows]

    @property
    def radius(self):
        """The root of the sum of all squared radii in the last step."""
        return float(self.clipper.metrics()["radius_norm"])

    @property
    def past(self):
        """What the radii have learned, column by column."""
        return [column.double().numpy().copy() for column in ledger(self.clipper).past.known()]


def norm_of(row):
    return math.sqrt(sum(float(np.sum(np.square(g))) for g in row if g is not None))


def of_length(lengths, seed=0):
    """Gradients of given norms, in random directions."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        row = [rng.standard_normal(shape) for shape in SHAPES]
        rows.append([g * (length / norm_of(row)) for g in row])
    return rows


def spoiled(row, bad=math.nan):
    return [np.full_like(g, bad) if k == 1 else g for k, g in enumerate(row)]


def same(one, other):
    """Whether two lists of lists of arrays have the same bits."""
    return all(np.array_equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


# ---------------------------------------------------------------------- the rules, by hand


def test_rms_is_the_root_of_a_debiased_average_of_squares():
    """Written out once more, with what a spike may count."""
    rows = heavy_tailed(0, 500, missing=0.0)
    run = Run(Norm(RMS(2.0)))
    average, weight = 0.0, 0.0
    for k, row in enumerate(rows):
        size = norm_of(row)
        radius = 2.0 * math.sqrt(average / weight) if k >= 10 else math.inf
        scale = min(1.0, radius / size)
        for u, g in zip(run.step(row), row, strict=True):
            np.testing.assert_allclose(u, scale * g, rtol=1e-12, atol=0)
        average = 0.99 * average + 0.01 * min(size, 5.0 * radius) ** 2
        weight = 0.99 * weight + 0.01


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("window", [2, 7, 100])
def test_quantile_is_numpys_over_the_last_norms(share, window):
    rows = heavy_tailed(1, 150, missing=0.0)
    norms = [norm_of(row) for row in rows]
    run = Run(Norm(Quantile(share, window, warmup=1)))
    for k, row in enumerate(rows):
        run.step(row)
        wanted = np.percentile(norms[max(0, k - window) : k], 100 * share) if k else math.inf
        assert run.radius == pytest.approx(wanted, rel=1e-12)


def test_only_past_norms_count_unless_the_current_one_is_asked_for():
    rows = of_length([1.0] * 20 + [100.0])
    past, current = (Run(Norm(Quantile(0.99, 10, include_current=way, warmup=0))) for way in (False, True))
    for run in (past, current):
        run.steps(rows)
    assert past.radius == pytest.approx(1.0)
    assert current.radius == pytest.approx(np.percentile([1.0] * 9 + [100.0], 99))


def test_weights_say_the_radius_and_a_floor_stands_in_for_small_ones():
    weights = [np.full(shape, 0.5) for shape in SHAPES]
    weights[1] = np.array(1e-9)
    run = Run(Norm(OfWeights(0.1, floor=0.02), over="tensor"), weights=weights)
    (updates,) = run.steps(of_length([1e3]))
    sizes = [np.linalg.norm(u) for u in updates]
    np.testing.assert_allclose(sizes, [0.1 * np.linalg.norm(weights[0]), 0.1 * 0.02, 0.1 * np.linalg.norm(weights[2])])


def test_before_the_rule_holds_nothing_is_clipped_or_all_of_it_together():
    rows = of_length([8.0] * 6)
    free = Run(Norm(RMS(0.5, warmup=5), over="tensor"))
    held = Run(Norm(RMS(0.5, warmup=5, before=2.0), over="tensor"))
    for k, row in enumerate(rows):
        open_step, early = free.step(row), held.step(row)
        if k < 5:
            assert same([open_step], [row])
            for u, g in zip(early, row, strict=True):
                np.testing.assert_allclose(u, g * (2.0 / 8.0), rtol=1e-12)
    assert norm_of(open_step) < 8.0
    assert same([open_step], [early])


@pytest.mark.parametrize("rule", [RMS(2.0, warmup=2), Average(1.05, warmup=2), ZScore(2.5, warmup=2), Quantile(0.9)])
def test_least_and_most_hold_whatever_is_learned(rule):
    rows = of_length([1e-6] * 30 + [1e6] * 400)
    run, seen = Run(Norm(replace(rule, least=0.5, most=3.0))), []
    for row in rows:
        run.step(row)
        seen.append(run.radius)
    assert min(seen[12:]) == 0.5
    assert max(seen[12:]) <= 3.0


# ---------------------------------------------------------------------- every backend against the reference


def compare(backend, region, policy, dtype, steps, missing=0.0):
    rows = heavy_tailed(len(repr(region)) + len(policy), steps, missing)
    kind = getattr(torch, dtype)
    rows = [[None if g is None else torch.tensor(g).to(kind).double().numpy() for g in row] for row in rows]
    case = region, POLICIES[policy], rows, dtype
    expected, actual = run_reference(*case), BACKENDS[backend](*case)
    check(expected, actual, dtype, policy)


def check(expected, actual, dtype, policy):
    """Updates and carries agree, relative to the largest of them, and the case has clipped something."""
    largest, worst = 0.0, 0.0
    for want, have in ((expected.updates, actual.updates), (expected.carries, actual.carries)):
        for a, b in zip(want, have, strict=True):
            assert [x is None for x in a] == [x is None for x in b]
            for x, y in zip(a, b, strict=True):
                if x is not None:
                    largest, worst = max(largest, np.abs(y).max()), max(worst, np.abs(x - y).max())
    # A radius that follows norms takes in their last bits too.
    allowed = max(tolerance(dtype, "norm", policy).relative, 1e-12)
    assert worst <= allowed * largest
    if POLICIES[policy] is not False:
        assert any(np.abs(c).max() > 0.0 for row in actual.carries for c in row), "nothing was clipped"


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("rule", FOLLOWING)
@pytest.mark.parametrize("backend", ["torch", "torch on a device"])
def test_rules_over_all_scopes_with_all_policies_equal_the_reference(backend, rule, over, policy):
    missing = 0.1 if policy in ("full", "shrunk") else 0.0
    compare(backend, Norm(FOLLOWING[rule], over=over), policy, "float64", 60, missing)


@pytest.mark.pairwise
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("rule", BOUNDED)
@pytest.mark.parametrize("backend", ["torch", "torch on a device"])
def test_bounds_schedules_and_freezing_equal_the_reference(backend, rule, over):
    compare(backend, Norm(BOUNDED[rule], over=over), "drip", "float64", 60)


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("policy", ["none", "full", "shrunk"])
@pytest.mark.parametrize("rule", FOLLOWING)
@pytest.mark.parametrize("backend", ["torch", "torch on a device"])
def test_narrow_types_equal_the_reference(backend, rule, policy, dtype):
    compare(backend, Norm(FOLLOWING[rule]), policy, dtype, 60)


@pytest.mark.parametrize(
    ("rule", "over", "policy", "dtype"),
    [
        ("rms", "all", "full", "float64"),
        ("quantile", "tensor", "shrunk", "float64"),
        ("quantile with the current norm", "group", "none", "float64"),
        ("z-score", "group", "capped", "float64"),
        ("average", "tensor", "drip", "float64"),
        ("average after a warm-up with a limit", "tensor", "none", "float64"),
        ("rms by a schedule", "all", "gated", "float64"),
        ("z-score", "all", "shrunk", "float32"),
        ("quantile", "all", "none", "bfloat16"),
    ],
)
def test_jax_equals_the_reference(rule, over, policy, dtype):
    compare("optax", Norm((FOLLOWING | BOUNDED)[rule], over=over), policy, dtype, 100)


@pytest.mark.parametrize(
    "other", [Norm(ZScore(1.5, decay=0.9, warmup=8)), Norm(Quantile(0.8, 19, warmup=3)), Norm(1.0)], ids=repr
)
@pytest.mark.parametrize("backend", ["torch", "torch on a device", "optax"])
def test_groups_may_have_rules_of_their_own(backend, other):
    """All keep what they learn in one table, but each in its own columns and for its own length."""
    regions = {0: other, 1: Norm(Quantile(0.5, 7, warmup=2), over="tensor")}
    case = regions, True, heavy_tailed(3, 100, missing=0.0), "float64"
    check(run_reference(*case), BACKENDS[backend](*case), "float64", "full")


WEIGHTS = [0.3 * np.random.default_rng(7).standard_normal(shape) for shape in SHAPES]


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("host", [None, False], ids=["host", "as on a device"])
def test_radii_of_weights_equal_the_reference(host, over, policy):
    region, rows = Norm(OfWeights(0.7, floor=0.4), over=over), heavy_tailed(4, 100)
    judge = reference.UClip(region, POLICIES[policy], groups=GROUPS)
    run = Run(region, POLICIES[policy], host=host, weights=WEIGHTS)
    for row in rows:
        wanted, found = judge.step(row, WEIGHTS), run.step(row)
        scale = max(1.0, *(np.abs(c).max() for c in judge.carry if c is not None))
        for w, f in zip(wanted, found, strict=True):
            if w is not None:
                np.testing.assert_allclose(f, w, rtol=0, atol=1e-13 * scale)


def test_radii_of_weights_in_jax():
    region, rows = Norm(OfWeights(0.7, floor=0.4), over="tensor"), heavy_tailed(4, 60, missing=0.0)
    judge = reference.UClip(region, Shrunk(), groups=GROUPS)
    with jax.enable_x64():
        params = [jnp.asarray(w) for w in WEIGHTS]
        tx = carryclip.optax.uclip(region, Shrunk(), groups=list(GROUPS))
        state, update = tx.init(params), jax.jit(tx.update)
        for row in rows:
            found, state = update([jnp.asarray(g) for g in row], state, params)
            for w, f in zip(judge.step(row, WEIGHTS), found, strict=True):
                np.testing.assert_allclose(f, w, rtol=0, atol=1e-12)


def test_jax_asks_for_the_parameters_if_the_radius_looks_at_them():
    tx = carryclip.optax.uclip(Norm(OfWeights(0.1)))
    params = jnp.ones(3)
    with pytest.raises(ValueError, match=r"looks at the weights: call tx\.update\(gradients, state, params\)"):
        tx.update(jnp.ones(3), tx.init(params))


# ---------------------------------------------------------------------- no scale of their own


@pytest.mark.pairwise
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("over", ["all", "tensor"])
@pytest.mark.parametrize("rule", FOLLOWING)
def test_gradients_a_thousand_times_as_long_give_updates_a_thousand_times_as_long(rule, over, policy):
    """1024 is a power of two, so not even a rounding may differ."""
    rows = heavy_tailed(5, 80)
    longer = [[None if g is None else 1024.0 * g for g in row] for row in rows]
    for host in (None, False):
        runs = [Run(Norm(FOLLOWING[rule], over=over), POLICIES[policy], host=host) for _ in range(2)]
        for row, long in zip(rows, longer, strict=True):
            for u, v in zip(runs[0].step(row), runs[1].step(long), strict=True):
                assert u is None or np.array_equal(1024.0 * u, v)


@pytest.mark.parametrize("policy", POLICIES)
def test_so_do_radii_of_weights_if_the_weights_grow_as_well(policy):
    rows, region = heavy_tailed(5, 80), Norm(OfWeights(0.7, floor=0.0), over="tensor")
    runs = [Run(region, POLICIES[policy], weights=[c * w for w in WEIGHTS]) for c in (1.0, 1024.0)]
    for row in rows:
        long = [None if g is None else 1024.0 * g for g in row]
        for u, v in zip(runs[0].step(row), runs[1].step(long), strict=True):
            assert u is None or np.array_equal(1024.0 * u, v)


# ---------------------------------------------------------------------- accidents of a run


@pytest.mark.pairwise
@pytest.mark.parametrize("host", [None, False], ids=["host", "as on a device"])
@pytest.mark.parametrize("at", [0, 3, 25], ids="at step {}".format)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("over", ["all", "tensor"])
@pytest.mark.parametrize("rule", FOLLOWING)
def test_a_bad_batch_teaches_nothing(rule, over, bad, at, host):
    """Statistics and later updates are those of a run without it, also of tensors whose own gradients were good."""
    rows = heavy_tailed(6, 50, missing=0.0)
    disturbed, calm = (Run(Norm(FOLLOWING[rule], over=over), Shrunk(), host=host) for _ in range(2))
    one, other = disturbed.steps(rows[:at]), calm.steps(rows[:at])
    assert norm_of(disturbed.step(spoiled(rows[at], bad))) == 0.0
    one += disturbed.steps(rows[at:])
    other += calm.steps(rows[at:])
    assert same(one, other)
    assert same([disturbed.past], [calm.past])
    assert disturbed.clipper.metrics()["skipped_steps"] == 1


def test_a_bad_batch_teaches_nothing_in_jax():
    rows = heavy_tailed(6, 30, missing=0.0)
    tx = carryclip.optax.uclip(Norm(ZScore(1.5, decay=0.9, warmup=8)), False)
    update = jax.jit(tx.update)

    def past(*given):
        state = tx.init([jnp.zeros(shape) for shape in SHAPES])
        for row in given:
            _, state = update([jnp.asarray(g, jnp.float32) for g in row], state)
        return [np.asarray(column) for column in state.radii[1].known()]

    assert same([past(*rows)], [past(*rows[:4], spoiled(rows[4]), *rows[4:12], spoiled(rows[12]), *rows[12:])])


@pytest.mark.pairwise
@pytest.mark.parametrize("unscale", [False, True], ids=["step only", "unscale_ first"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("rule", FOLLOWING)
def test_an_overflow_teaches_nothing(rule, fused, unscale):
    """Under a loss scaler, whose scale is a power of two and changes no digit."""

    def trained(scaler, overflow):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        clipper = UClip(optimizer, Norm(FOLLOWING[rule]), metrics_every=1)
        for k in range(30):
            generator = torch.Generator().manual_seed(k)
            x = (1.0 + 9.0 * (k % 7 == 3)) * torch.randn(6, 4, generator=generator)
            for over in (True, False) if k in overflow else (False,):
                optimizer.zero_grad()
                scaler.scale(net(x).square().mean()).backward()
                if over:
                    net[0].weight.grad[0, 0] = math.inf
                if unscale and scaler.is_enabled():
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
        return [p.detach().numpy() for p in net.parameters()], ledger(clipper).past

    scaled = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    params, past = trained(scaled, overflow=(0, 3, 20))
    assert scaled.get_scale() == 2.0**7
    wanted, calm = trained(torch.amp.GradScaler("cpu", enabled=False), overflow=())
    assert same([params], [wanted])
    assert all(torch.equal(a, b) for a, b in zip(past.known(), calm.known(), strict=True))


@pytest.mark.parametrize("rule", FOLLOWING)
def test_micro_batches_teach_only_if_their_step_is_taken(rule):
    """Each is clipped by itself; a NaN in one of them takes the other's norm back too."""

    def learned(steps):
        torch.manual_seed(0)
        net = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        clipper = LocalUClip(net, optimizer, Norm(FOLLOWING[rule]), carry=False)
        for inputs in steps:
            optimizer.zero_grad()
            for row in inputs:
                net(row[None]).sum().backward()
            optimizer.step()
        return [column.numpy().copy() for column in ledger(clipper).past.known()]

    steps = list(torch.randn(20, 2, 3, generator=torch.Generator().manual_seed(1)))
    bad = steps[5].clone()
    bad[1, 0] = math.nan
    assert same([learned([*steps[:5], bad, *steps[5:]])], [learned(steps)])
    assert learned(steps)[0][0] == 40


@pytest.mark.pairwise
@pytest.mark.parametrize("at", [3, 40], ids=["in the warm-up", "later"])
@pytest.mark.parametrize("carry", [False, Shrunk()], ids=["plain", "shrunk"])
@pytest.mark.parametrize("over", ["all", "tensor"])
@pytest.mark.parametrize("rule", FOLLOWING)
def test_resuming_is_bit_equal(rule, over, carry, at):
    rows = heavy_tailed(8, 70, missing=0.0)
    whole = Run(Norm(FOLLOWING[rule], over=over), carry)
    whole.steps(rows[:at])
    file = io.BytesIO()
    torch.save(whole.optimizer.state_dict(), file)
    file.seek(0)
    resumed = Run(Norm(FOLLOWING[rule], over=over), carry)
    resumed.optimizer.load_state_dict(torch.load(file, weights_only=True))
    assert same([resumed.past], [whole.past])
    assert same(resumed.steps(rows[at:]), whole.steps(rows[at:]))
    assert same([resumed.past], [whole.past])


def test_the_explicit_form_saves_what_it_has_learned():
    rows = heavy_tailed(8, 40, missing=0.0)

    def stepped(clipper, params, rows):
        sent = []
        for row in rows:
            for p, g in zip(params, row, strict=True):
                p.grad = torch.tensor(g)
            clipper.clip_()
            sent.append([p.grad.numpy().copy() for p in params])
        return sent

    def make():
        params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
        return UClip(params, Norm(Quantile(0.7, 12, warmup=5)), carry=False), params

    whole, resumed = make(), make()
    stepped(*whole, rows[:20])
    resumed[0].load_state_dict(copy.deepcopy(whole[0].state_dict()))
    assert same(stepped(*resumed, rows[20:]), stepped(*whole, rows[20:]))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rule", FOLLOWING)
def test_a_rule_learns_from_gradients_and_not_from_the_carry(rule, policy):
    rows = heavy_tailed(12, 60)
    run, plain = Run(Norm(FOLLOWING[rule]), POLICIES[policy]), Run(Norm(FOLLOWING[rule]))
    run.steps(rows)
    plain.steps(rows)
    for column, wanted in zip(run.past, plain.past, strict=True):
        np.testing.assert_allclose(column, wanted, rtol=1e-13)


@pytest.mark.parametrize("nonfinite", ["zero", "propagate"])
@pytest.mark.parametrize("rule", FOLLOWING)
def test_bad_entries_that_are_zeroed_or_passed_on_leave_a_rule_in_order(rule, nonfinite):
    rows = heavy_tailed(12, 40, missing=0.0)
    rows[20] = spoiled(rows[20])
    region = Norm(FOLLOWING[rule])
    run, judge = Run(region, nonfinite=nonfinite), reference.UClip(region, False, nonfinite, groups=GROUPS)
    for step, row in enumerate(rows):
        found, wanted = run.step(row), judge.step(row)
        if step == 20 and nonfinite == "propagate":  # bad is what comes of it; what matters here is what comes after
            continue
        for u, w in zip(found, wanted, strict=True):
            np.testing.assert_allclose(u, w, rtol=1e-12)


@pytest.mark.parametrize("zeros", [1, 30], ids=["at first", "for long"])
@pytest.mark.parametrize("rule", FOLLOWING)
def test_gradients_of_zero_do_not_shut_a_radius_for_ever(rule, zeros):
    """A layer behind one that begins at 0, or an expert that nothing was sent to, has such gradients for a while."""
    run = Run(Norm(FOLLOWING[rule]))
    run.steps([[np.zeros(shape) for shape in SHAPES]] * zeros)
    lengths = 1.0 + 0.1 * np.random.default_rng(0).random(200)
    assert norm_of(run.steps(of_length(lengths))[-1]) > 0.5


# ---------------------------------------------------------------------- changing the rule in mid-run


def test_another_multiple_goes_on_with_what_was_learned():
    run = Run(Norm(RMS(2.0)))
    run.steps(heavy_tailed(9, 60, missing=0.0))
    learned = run.past
    run.clipper.change(Norm(RMS(3.0)))
    assert same([run.past], [learned])
    average = learned[1][0] / (1 - 0.99**60)
    run.step(of_length([1.0])[0])
    assert run.radius == pytest.approx(3.0 * math.sqrt(average), rel=1e-12)


@pytest.mark.parametrize("rule", FOLLOWING)
def test_what_was_learned_can_be_frozen(rule):
    run = Run(Norm(FOLLOWING[rule]))
    run.steps(heavy_tailed(9, 60, missing=0.0))
    learned = run.past
    run.clipper.change(Norm(replace(FOLLOWING[rule], frozen_after=0)))
    run.steps(of_length([1e3, 1e-3, 50.0]))
    assert same([run.past], [learned])


def test_frozen_from_the_first_step_on_there_is_nothing_to_go_by():
    rows = heavy_tailed(9, 30, missing=0.0)
    run = Run(Norm(RMS(2.0, frozen_after=0)))
    assert same(run.steps(rows), rows)


def test_another_kind_of_rule_starts_anew():
    rows = heavy_tailed(10, 60, missing=0.0)
    run = Run(Norm(RMS(2.0)))
    run.steps(rows)
    run.clipper.change(Norm(Average(1.05, warmup=5)))
    assert not any(column.any() for column in run.past)
    assert same(run.steps(rows[:5]), rows[:5])
    fresh = Run(Norm(Average(1.05, warmup=5)))
    fresh.steps(rows[:5])
    assert same([run.past], [fresh.past])
    assert same(run.steps(rows), fresh.steps(rows))


@pytest.mark.parametrize("window", [10, 200], ids=["shorter", "longer"])
def test_a_window_of_another_length_never_counts_norms_that_it_has_not(window):
    """Whether it starts anew or keeps the norms that fit, a gradient like all the others gets through."""
    run = Run(Norm(Quantile(0.9, 50)))
    run.steps(of_length([2.0] * 60))
    run.clipper.change(Norm(Quantile(0.9, window)))
    rows = of_length([2.0] * 40, seed=1)
    for update in run.steps(rows):
        assert norm_of(update) == pytest.approx(2.0, rel=1e-9)


def test_groups_with_rules_of_their_own_keep_what_each_has_learned():
    """One group's gradients are a hundred times as long as the other's."""
    rows = [[g * (100.0 if k == 2 else 1.0) for k, g in enumerate(row)] for row in of_length([1.0] * 40)]
    run = Run({0: Norm(RMS(2.0)), 1: Norm(RMS(2.5))})
    run.steps(rows)
    learned = run.past
    run.clipper.change({0: Norm(RMS(3.0)), 1: Norm(RMS(3.5))})
    assert same([run.past], [learned])


def test_groups_with_rules_of_their_own_keep_it_when_another_joins():
    rows = [[g * (100.0 if k == 2 else 1.0) for k, g in enumerate(row)] for row in of_length([1.0] * 40)]
    run = Run({0: Norm(RMS(2.0)), 1: Norm(RMS(2.5))})
    run.steps(rows)
    small, large = run.past[1]
    extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    run.optimizer.add_param_group({"params": [extra], "uclip": Norm(1.0)})
    extra.grad = torch.ones(3, dtype=torch.float64)
    run.step(rows[0])
    np.testing.assert_allclose(run.past[1][:2], [small, large], rtol=0.1)


def test_a_group_that_joins_later_leaves_the_others_what_they_have_learned():
    run = Run(Norm(RMS(2.0), over="tensor"))
    run.steps(of_length([1.0] * 20))
    learned = run.past
    extra = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    run.optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.ones(3, dtype=torch.float64)
    run.step(of_length([1.0])[0])
    counts, averages = run.past
    assert sorted(counts) == [1, 21, 21, 21]
    assert all(np.isclose(averages, old, rtol=0.5).any() for old in learned[1])


def test_a_checkpoint_of_another_rule_starts_anew_and_says_so():
    rows = heavy_tailed(10, 30, missing=0.0)
    old, new = Run(Norm(ZScore(2.5))), Run(Norm(RMS(2.0)))
    old.steps(rows)
    with pytest.warns(carryclip.CarryClipWarning, match="what radii have learned start anew"):
        new.optimizer.load_state_dict(old.optimizer.state_dict())
    assert not any(column.any() for column in new.past)


@pytest.mark.parametrize("window", [10, 20], ids=["shorter", "longer"])
def test_jax_refuses_a_state_with_a_window_of_another_length(window):
    """With the words it has for every state that was made by another ``uclip``."""
    old, new = (carryclip.optax.uclip(Norm(Quantile(0.9, length))) for length in (15, window))
    with pytest.raises(ValueError, match="The state was made by a uclip with another region"):
        new.update(jnp.ones(3), old.init(jnp.zeros(3)))


def test_jax_refuses_a_state_of_another_kind_of_rule():
    old, new = carryclip.optax.uclip(Norm(RMS())), carryclip.optax.uclip(Norm(Average()))
    with pytest.raises(ValueError, match="The state was made by a uclip with another region"):
        new.update(jnp.ones(3), old.init(jnp.zeros(3)))


def test_jax_grafts_what_the_same_kind_of_rule_has_learned():
    old, new = carryclip.optax.uclip(Norm(RMS(2.0))), carryclip.optax.uclip(Norm(RMS(3.0)))
    other = carryclip.optax.uclip(Norm(Average()))
    params = jnp.zeros(3)
    state = old.init(params)
    for _ in range(5):
        _, state = old.update(jnp.ones(3), state)
    kept = carryclip.optax.graft(new.init(params), state).radii[1]
    assert int(kept.count[0]) == 5
    assert float(kept.first[0]) == float(state.radii[1].first[0])
    assert int(carryclip.optax.graft(other.init(params), state).radii[1].count[0]) == 0


# ---------------------------------------------------------------------- a spike


def after_a_spike(rule, spike, steps=300):
    """(run, columns before, columns after) a gradient of this length among others of lengths around 1."""
    lengths = 1.0 + 0.2 * np.random.default_rng(11).standard_normal(steps).clip(-3, 3)
    run = Run(Norm(rule))
    run.steps(of_length(lengths))
    before = run.past
    run.steps(of_length([spike]))
    return before, run.past


@pytest.mark.parametrize("spike", [20.0, 1e3, 1e12])
def test_a_spike_counts_as_so_many_radii_in_the_rms(spike):
    before, after = after_a_spike(RMS(2.0, decay=0.99, reach=5.0), spike)
    weights = [1 - 0.99**300, 1 - 0.99**301]
    growth = (after[1][0] / weights[1]) / (before[1][0] / weights[0])
    most = 1 + 0.01 / weights[1] * ((5.0 * 2.0) ** 2 - 1)
    assert 1.0 < growth <= most * (1 + 1e-12)
    assert math.sqrt(most) < 1.5, "so that one spike makes the radius at most half as large again"


@pytest.mark.parametrize("spike", [20.0, 1e3, 1e12])
def test_a_spike_is_one_norm_among_many_for_a_quantile(spike):
    """However long it is: the radius is that after any norm above the others."""
    radii = []
    for size in (2.0, spike):
        lengths = 1.0 + 0.2 * np.random.default_rng(11).standard_normal(100).clip(-3, 3)
        run = Run(Norm(Quantile(0.9, 50)))
        run.steps(of_length([*lengths, size, 1.0]))
        radii.append(run.radius)
    assert radii[1] == pytest.approx(radii[0], rel=1e-12)


@pytest.mark.parametrize("spike", [20.0, 1e3, 1e12])
def test_a_spike_moves_mean_and_deviation_by_what_clipping_leaves_of_it(spike):
    before, after = after_a_spike(ZScore(2.5, decay=0.97), spike)
    std = math.sqrt(before[2][0])
    assert 0.0 <= after[1][0] - before[1][0] <= 0.03 * 2.5 * std
    assert after[2][0] <= (0.97 + 0.03 * (0.97 * 2.5) ** 2) * std**2


@pytest.mark.parametrize("spike", [20.0, 1e3, 1e12])
def test_a_spike_moves_an_average_by_what_clipping_leaves_of_it(spike):
    before, after = after_a_spike(Average(1.05, decay=0.98), spike)
    assert after[1][0] == pytest.approx(before[1][0] * (1 + 0.02 * 0.05), rel=1e-12)


# ---------------------------------------------------------------------- many processes


def trained(rank, how, region, carry, bad):
    """Parameters and statistics of a run in which the second rank's batch is NaN at a step; alone without that step."""
    net = model()
    if how == "ddp":
        net = DistributedDataParallel(net)
    elif how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(net)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05)
    clipper = UClip(optimizer, region, carry, metrics_every=1)
    for step, given in enumerate(zip(batches(0), batches(1), strict=True)):
        optimizer.zero_grad()
        if how == "alone":
            if step == bad:
                continue
            losses = [(net(inputs) - targets).square().mean() for inputs, targets in given]
            found = [torch.autograd.grad(loss, params) for loss in losses]
            for p, one, other in zip(params, *found, strict=True):
                p.grad = (one + other) / 2
        else:
            inputs, targets = given[rank]
            factor = math.nan if step == bad and rank == 1 else 1.0
            (factor * (net(inputs) - targets).square().mean()).backward()
        optimizer.step()
    past = [column.double() for column in ledger(clipper).past.known()]
    return [full(p.detach()) for p in params], past


SPREAD = {
    "rms": (Norm(RMS(1.2, decay=0.9, warmup=3)), Shrunk(5)),
    "quantile by tensor": (Norm(Quantile(0.6, 5, warmup=2), over="tensor"), False),
    "z-score": (Norm(ZScore(1.0, decay=0.8, warmup=3)), Drip()),
    "average by tensor": (Norm(Average(1.05, decay=0.9, warmup=3, before=1.0), over="tensor"), False),
}


@pytest.mark.parametrize("bad", [None, 1, 6], ids=["all good", "NaN in the warm-up", "NaN later"])
@pytest.mark.parametrize("kind", SPREAD)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_ranks_learn_what_one_process_learns_without_the_bad_batch(ranks, how, kind, bad):
    region, carry = SPREAD[kind]
    params, past = trained(0, "alone", region, carry, bad)
    found = ranks.run(trained, how, region, carry, bad)
    for mine, learned in found:
        # All-reduce adds up two ranks in their order; shards add up a norm in another one.
        check_same(mine, params, exact=how == "ddp")
        for column, wanted in zip(learned, past, strict=True):
            tolerance = 0.0 if how == "ddp" else 1e-5
            torch.testing.assert_close(column, wanted, rtol=tolerance, atol=0.0)
    for column, other in zip(*(learned for _, learned in found), strict=True):
        assert torch.equal(column, other), "ranks must decide alike to the last bit"


def with_weights(rank, how):
    """Radii of weights that are spread over ranks."""
    net = model()
    if how == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(net)
    params = list(net.parameters())
    optimizer = torch.optim.SGD(params, lr=0.05)
    UClip(optimizer, Norm(OfWeights(0.05), over="tensor"), carry=False)
    for given in zip(batches(0), batches(1), strict=True):
        optimizer.zero_grad()
        if how == "alone":
            sum((net(inputs) - targets).square().mean() / 2 for inputs, targets in given).backward()
        else:
            inputs, targets = given[rank]
            (net(inputs) - targets).square().mean().backward()
        optimizer.step()
    return [full(p.detach()) for p in params]


def test_weights_that_are_spread_have_the_norm_of_the_whole(ranks):
    wanted = with_weights(0, "alone")
    for found in ranks.run(with_weights, "fsdp2"):
        check_same(found, wanted, exact=False)


# ---------------------------------------------------------------------- the theorem


LAWS = {
    "Student's t with 2.5 degrees": lambda rng, shape: rng.standard_t(2.5, shape) / math.sqrt(5.0),
    "lognormal": lambda rng, shape: (
        (rng.lognormal(0.0, 1.5, shape) - math.exp(1.125)) / math.sqrt((math.exp(2.25) - 1) * math.exp(2.25))
    ),
    "two points": lambda rng, shape: (
        ((rng.random((shape[0], 1)) < 0.02) - 0.02) / math.sqrt(0.02 * 0.98) * np.ones(shape)
    ),
}
"""Noise of mean 0 and deviation 1 in each coordinate; two points: in all of them at once."""
MEANS = {
    "steady": lambda step: 1.0,
    "turning round": lambda step: 1.0 if step // 50 % 2 else -1.0,
    "now and then": lambda step: 1.0 if step % 400 < 40 else 0.0,
}


def carries(region, law, mean, size, steps=3000):
    """(time average of the carry's norm under the full carry, the largest root mean square that a gradient has)."""
    rng = np.random.default_rng(size)
    direction = np.ones(size) / math.sqrt(size)
    noise = LAWS[law](rng, (steps, size)) / math.sqrt(size)
    param = nn.Parameter(torch.zeros(size, dtype=torch.float64))
    clipper = UClip([param], region, carry=True, metrics_every=0)
    total = 0.0
    for step in range(steps):
        param.grad = torch.tensor(0.7 * MEANS[mean](step) * direction + noise[step])
        clipper.clip_()
        total += float(clipper.carry(param).norm())
    return total / steps, math.sqrt(1.0 + 0.7**2)


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [1, 10, 1000])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("law", LAWS)
def test_at_two_root_mean_squares_a_full_carry_is_on_average_below_one(law, mean, size):
    """Whatever the law, the dimension and the way of the mean."""
    rms = math.sqrt(1.0 + 0.7**2)
    average, _ = carries(Norm(2.0 * rms), law, mean, size)
    assert 0.0 < average <= rms


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("law", LAWS)
def test_the_running_estimate_keeps_it_below_half_of_one(law, mean, size):
    """The theorem is about the true root mean square. No proof covers the estimate, but here it does as well."""
    average, rms = carries(Norm(RMS(2.0)), law, mean, size)
    assert 0.0 < average <= 0.5 * rms


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RMS(0), ValueError, "RMS: multiple must be above 0"),
        (lambda: RMS(-1.0), ValueError, "RMS: multiple must be above 0"),
        (lambda: RMS(math.nan), ValueError, "RMS: multiple must be above 0"),
        (lambda: RMS("2"), TypeError, "RMS: multiple must be a number or a schedule"),
        (lambda: RMS(True), TypeError, "RMS: multiple must be a number or a schedule"),
        (lambda: RMS([1.0, 2.0]), TypeError, "RMS: multiple must be a number or a schedule"),
        (lambda: RMS(lambda: 2.0), TypeError, "RMS: multiple is a schedule and is called with one argument"),
        (lambda: RMS(decay=1.0), ValueError, r"RMS: decay must be in \[0, 1\)"),
        (lambda: RMS(decay=None), TypeError, "RMS: decay must be a number"),
        (lambda: RMS(reach=0.5), ValueError, "RMS: reach must be at least 1"),
        (lambda: RMS(warmup=-1), ValueError, "RMS: warmup must be a whole number, at least 0; got -1"),
        (lambda: RMS(warmup=2.5), ValueError, "RMS: warmup must be a whole number"),
        (lambda: RMS(warmup=True), ValueError, "RMS: warmup must be a whole number"),
        (lambda: RMS(before=0.0), ValueError, "RMS: before must be above 0"),
        (lambda: RMS(before="none"), TypeError, "RMS: before must be a number"),
        (lambda: RMS(least=-1.0), ValueError, "RMS: least must be at least 0"),
        (lambda: RMS(least=2.0, most=1.0), ValueError, "RMS: most must be at least 2"),
        (lambda: RMS(frozen_after=-1), ValueError, "RMS: frozen_after must be a whole number, at least 0"),
        (lambda: Quantile(0.0), ValueError, r"Quantile: share must be in \(0, 1\)"),
        (lambda: Quantile(1.0), ValueError, r"Quantile: share must be in \(0, 1\)"),
        (lambda: Quantile(90), ValueError, r"Quantile: share must be in \(0, 1\), got 90"),
        (lambda: Quantile("0.9"), TypeError, "Quantile: share must be a number"),
        (lambda: Quantile(lambda step: 0.9), TypeError, "Quantile: share must be a number"),
        (lambda: Quantile(window=1), ValueError, "Quantile: window must be a whole number, at least 2"),
        (lambda: Quantile(window=10.0), ValueError, "Quantile: window must be a whole number"),
        (lambda: Quantile(warmup=-3), ValueError, "Quantile: warmup must be a whole number"),
        (lambda: ZScore(0), ValueError, "ZScore: threshold must be above 0"),
        (lambda: ZScore(None), TypeError, "ZScore: threshold must be a number or a schedule"),
        (lambda: ZScore(decay=1.5), ValueError, r"ZScore: decay must be in \[0, 1\)"),
        (lambda: ZScore(warmup=1), ValueError, "ZScore: warmup must be at least 2, or there is no deviation"),
        (lambda: Average(0.0), ValueError, "Average: multiple must be above 0"),
        (lambda: Average(decay=-0.1), ValueError, r"Average: decay must be in \[0, 1\)"),
        (lambda: Average(warmup=-1), ValueError, "Average: warmup must be a whole number"),
        (lambda: OfWeights(0), ValueError, "OfWeights: multiple must be above 0"),
        (lambda: OfWeights(floor=-1e-3), ValueError, "OfWeights: floor must be at least 0"),
        (lambda: OfWeights({"w": 0.1}), TypeError, "OfWeights: multiple must be a number or a schedule"),
        (lambda: Norm(RMS), TypeError, r"Norm: radius=RMS is the class: write Norm\(RMS\(\)\)"),
        (lambda: Norm(Quantile), TypeError, r"write Norm\(Quantile\(\)\)"),
        (lambda: Norm(RMS(), over="layer"), ValueError, "Norm: over must be 'all', 'group', 'tensor', 'row' or"),
        (lambda: Component(RMS()), TypeError, r"Component: RMS\(2.0\) follows norms, so it is for Norm\(RMS\(2.0\)\)"),
        (lambda: Component(RMS), TypeError, "RMS"),
    ],
)
def test_bad_numbers_are_refused_when_a_rule_is_made(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("rule", [*FOLLOWING.values(), OfWeights(0.02, 1e-2), RMS(), Quantile(), ZScore(), Average()])
def test_a_rule_reads_as_it_is_written(rule):
    assert eval(repr(rule)) == rule


def test_the_page_shows_what_the_trials_of_radii_gave():
    import radii

    results = radii.read()
    assert len(results) == len(radii.runs())
    assert radii.write_page(results) == radii.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("over", ["row", "column"])
@pytest.mark.parametrize("shapes", [[(5,), ()], [(0, 3), (2, 3)], [(4, 3), (0,)]], ids=str)
def test_odd_shapes_have_rows_too(shapes, over):
    """A bias is one vector, so is a number, and a tensor without entries has none."""
    rng = np.random.default_rng(3)
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    clipper, judge = UClip(params, Norm(0.5, over=over), metrics_every=1), reference.UClip(Norm(0.5, over=over))
    for _ in range(5):
        gradients = [rng.standard_normal(shape) for shape in shapes]
        for p, g in zip(params, gradients, strict=True):
            p.grad = torch.tensor(g)
        clipper.clip_()
        full = [g for g in gradients if np.size(g)]
        for p, wanted in zip([p for p in params if p.numel()], judge.step(full), strict=True):
            np.testing.assert_allclose(p.grad, wanted, rtol=1e-12, atol=0)
    assert clipper.metrics()["update_norm"] > 0.0
