"""What torch asks of its own optimizers, asked of clipped ones; and why some of it cannot be.

A check asks one thing of an optimizer class in all settings of torch's database. ``FAILS`` has the cases in which
clipping changes the answer, each with its reason; a case that is listed and passes is as wrong as one that fails.
"""

import copy
import gc
import io
import itertools
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from carryclip import Component, Norm
from carryclip.torch import uclipped

pytest.importorskip("expecttest", reason="torch's database of optimizers imports it")
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, optim_db

INFOS = {info.optim_cls.__name__: info for info in optim_db if not info.step_requires_closure}
MAKE = {
    "wide": lambda kind: uclipped(kind, Component(1e30), carry=True),
    "tight": lambda kind: uclipped(kind, Component(0.1), carry=True),
    "default": lambda kind: uclipped(kind, Norm(1.0)),
}


def settings(info, *skip):
    """Options of the database, and by turns the implementations that the CPU has."""
    flags = [flag for flag in ("foreach", "fused") if flag in info.supported_impls and flag not in skip]
    if "cpu" not in info.supports_fused_on and "fused" in flags:
        flags.remove("fused")
    ways = [{"foreach": False} if "foreach" in flags else {}, *({flag: True} for flag in flags)]
    given = info.optim_inputs_func(device="cpu", dtype=torch.float32)
    return [each.kwargs | way for each, way in zip(given, itertools.cycle(ways), strict=False)]


def goes_up(options):
    return options.get("maximize", False)


class Problem:
    """Least squares in a matrix and a vector; in two matrices for an optimizer that takes no others."""

    def __init__(self, info, *, contiguous=True):
        torch.manual_seed(0)
        self.info = info
        shapes = [(10, 5), (10, 1) if info.optim_cls.__name__ == "Muon" else (10,)]
        if contiguous:
            self.params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        else:
            self.params = [nn.Parameter(torch.randn(*shape, 2)[..., 0]) for shape in shapes]
        self.inputs = torch.randn(5)

    def copied(self):
        other = copy.copy(self)
        other.params = [nn.Parameter(param.detach().clone()) for param in self.params]
        return other

    def loss(self):
        weight, bias = self.params
        return (weight.mv(self.inputs) + bias.reshape(-1)).square().sum()

    def backward(self):
        for param in self.params:
            param.grad = None
        loss = self.loss()
        loss.backward()
        if self.info.only_supports_sparse_grads:
            for param in self.params:
                param.grad = param.grad.to_sparse()
        return loss.detach()

    def train(self, optimizer, steps, schedulers=()):
        for _ in range(steps):
            loss = self.backward()
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))

    def assert_improves(self, optimizer, options, schedulers=(), steps=20):
        before = self.loss().item()
        self.train(optimizer, steps, schedulers)
        after = self.loss().item()
        assert after > before if goes_up(options) else after < before, "the loss went the wrong way"


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def assert_same_state(one, other):
    """Two checkpoints hold the same, but for the names of parameters."""
    found = []
    for state in (one, other):
        groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state["param_groups"]]
        found.append(torch.utils._pytree.tree_flatten([groups, state["state"]]))
    assert found[0][1] == found[1][1]
    for x, y in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# ---------------------------------------------------------------------- what is asked


def steps_improve(kind, info):
    for options in settings(info):
        # Where entries lie apart, torch's fused kernels on the CPU go wrong by themselves.
        for contiguous in (True,) if options.get("fused") else (True, False):
            problem = Problem(info, contiguous=contiguous)
            problem.assert_improves(kind(problem.params, **copy.deepcopy(options)), options)


def steps_with_schedulers_improve(kind, info):
    for makers in info.scheduler_inputs:
        problem = Problem(info)
        optimizer = kind([{"params": problem.params[:1]}, {"params": problem.params[1:], "lr": 0.01}])
        problem.assert_improves(optimizer, {}, [make(optimizer) for make in makers])


def groups_may_decay_differently(kind, info):
    for options in settings(info):
        problem = Problem(info)
        weight, bias = problem.params
        groups = [{"params": [weight], **copy.deepcopy(options)}]
        groups += [{"params": [bias], **copy.deepcopy(options), "weight_decay": 0.0}]
        problem.assert_improves(kind(groups), options)


def a_rate_may_be_a_tensor(kind, info):
    for options in settings(info):
        one = Problem(info)
        other = one.copied()
        known = {k: v for k, v in options.items() if k != "lr"}
        if known.get("foreach"):  # torch takes no such rate there, unless it is compiled
            continue
        second = kind(other.params, lr=torch.tensor(1e-3), **copy.deepcopy(known))
        one.train(kind(one.params, lr=1e-3, **copy.deepcopy(known)), 5)
        other.train(second, 5)
        assert_close(one.params, other.params)


def a_group_without_a_rate_stays(kind, info):
    for options in settings(info):
        problem = Problem(info)
        others = nn.Parameter(torch.randn(2, 2))
        before = others.detach().clone()
        rate = options.get("lr") or 1e-3
        still = {"lr": 1e-28} | ({"step_sizes": (0, 50)} if info.optim_cls.__name__ == "Rprop" else {})
        groups = [{"params": problem.params, **copy.deepcopy(options), "lr": rate}, {"params": [others]}]
        optimizer = kind(groups, **still)
        for _ in range(20):
            problem.backward()
            others.grad = torch.rand_like(others)
            if info.only_supports_sparse_grads:
                others.grad = others.grad.to_sparse()
            optimizer.step()
        assert_close(others.detach(), before)


def no_gradient_is_no_step(kind, info):
    for options in settings(info):
        param = nn.Parameter(torch.randn(2, 3))
        before = param.detach().clone()
        kind([param], **options).step()
        assert_close(param.detach(), before)


def a_gradient_of_zero_is_no_step(kind, info):
    for options in settings(info):
        if options.get("weight_decay", 0) != 0 or info.optim_cls.__name__ in (
            "AdamW",
            "ASGD",
            "Muon",
        ):  # they decay anyhow
            continue
        param = nn.Parameter(torch.randn(5, 1))
        before = param.detach().clone()
        optimizer = kind([param], **options)
        param.grad = torch.zeros(5, 1)
        if info.only_supports_sparse_grads:
            param.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 1), (5, 1), check_invariants=True)
        optimizer.step()
        assert_close(param.detach(), before)


def sparse_and_dense_agree(kind, info):
    """One coordinate at a time of a curved valley, its gradient in two parts that are to be added up."""
    if not info.supports_sparse and not info.only_supports_sparse_grads:
        return
    changed = info.metadata_for_sparse[0]
    for options in settings(info, "fused"):
        options = {k: v for k, v in options.items() if k not in changed} | dict(changed)
        start = torch.tensor([1.5, 1.5], dtype=torch.float64)
        sparse, dense = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        optimizer = kind([sparse], **options)
        twin = None if info.only_supports_sparse_grads else kind([dense], **options)
        for step in range(100):
            which = step % 2
            for param in (sparse, dense):
                x, y = param.detach()
                slope = [-400 * x * (y - x**2) - 2 * (1 - x), 200 * (y - x**2)][which]
                param.grad = torch.zeros(2, dtype=torch.float64)
                param.grad[which] = slope
                if param is sparse:
                    where, what = torch.tensor([[which, which]]), torch.stack([slope / 4, slope - slope / 4])
                    param.grad = torch.sparse_coo_tensor(where, what, (2,), check_invariants=True)
            optimizer.step()
            if twin is not None:
                twin.step()
                assert_close(sparse, dense)
        if twin is None and not goes_up(options):
            assert (sparse - 1).norm() < (start - 1).norm(), "further from the solution"


def complex_numbers_are_pairs(kind, info):
    if not info.supports_complex:
        return
    for options in settings(info, "fused"):
        torch.manual_seed(0)
        numbers = [nn.Parameter(torch.randn(4, 3, dtype=torch.complex64)), nn.Parameter(torch.randn(3))]
        plain = [torch.view_as_real(numbers[0].detach()), numbers[1].detach()]
        pairs = [nn.Parameter(x.clone()) for x in plain]
        one, other = kind(numbers, **copy.deepcopy(options)), kind(pairs, **copy.deepcopy(options))
        for _ in range(3):
            for param, pair in zip(numbers, pairs, strict=True):
                param.grad = torch.randn_like(param)
                pair.grad = (torch.view_as_real(param.grad) if param.is_complex() else param.grad).clone()
            one.step()
            other.step()
        assert_close(plain, [x.detach() for x in pairs])


def implementations_agree(kind, info):
    """Loops, lists of tensors and fused kernels; with a layer that is frozen for a while, and one without gradient."""
    flags = [flag for flag in ("foreach", "fused") if flag in info.supported_impls]
    if "fused" in flags and "cpu" not in info.supports_fused_on:
        flags.remove("fused")
    for flag in flags:
        for given in info.optim_inputs_func(device="cpu", dtype=torch.float64):
            found = []
            for on in (False, True):
                torch.manual_seed(1)
                model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).double()
                extra = nn.Parameter(torch.randn((), dtype=torch.float64))
                extra.grad = torch.rand_like(extra)
                options = copy.deepcopy(given.kwargs) | {flag: on}
                optimizer = kind([*model.parameters(), extra], **options)
                for step in range(7):
                    optimizer.zero_grad()
                    model[2].requires_grad_(step not in (3, 4))
                    if step != 2:
                        model(torch.linspace(0.1, 0.6, 6, dtype=torch.float64).view(3, 2)).sum().backward()
                    optimizer.step()
                state = [optimizer.state[param] for param in model.parameters()]
                found.append((list(model.parameters()), state))
            assert_close(found[0], found[1])


def fused_steps_need_memory(kind, info):
    """On the meta device there are no values; when there are, steps go on."""
    if "cpu" not in info.supports_fused_on:
        return
    with torch.device("meta"):
        model = nn.Linear(2, 3)
    optimizer = kind(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.empty_like(param)
    with pytest.raises(RuntimeError, match="`fused=True` requires all the params to be floating point Tensors"):
        optimizer.step()
    optimizer.zero_grad()
    model.to_empty(device="cpu")
    for param in model.parameters():
        param.grad = torch.rand_like(param)
    optimizer.step()


def a_fused_step_is_skipped_where_others_say_so(kind, info):
    if "cpu" not in info.supports_fused_on:
        return
    for given in info.optim_inputs_func(device="cpu"):
        for scale in (None, torch.ones(1)):
            params = [nn.Parameter(torch.ones(1)) for _ in range(5)]
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer = kind(params, **given.kwargs, fused=True)
            optimizer.grad_scale, optimizer.found_inf = scale, torch.ones(())
            optimizer.step()
            assert_close([param.detach() for param in params], [torch.ones(1)] * 5)
            assert all(optimizer.state[param].get("step", 0) == 0 for param in params)


def checkpoints_are_deterministic(kind, info):
    for options in settings(info):
        for named in (False, True):
            problem = Problem(info)
            optimizer = kind(problem.params, **copy.deepcopy(options))
            problem.train(optimizer, 10)
            other = problem.copied()
            params = [(f"name{k}", param) for k, param in enumerate(other.params)] if named else other.params
            second = kind(params, **copy.deepcopy(options))
            second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            problem.train(optimizer, 5)
            other.train(second, 5)
            torch.testing.assert_close(problem.params, other.params, rtol=0, atol=0)
            assert_same_state(optimizer.state_dict(), second.state_dict())


def repeated_groups_are_saved_alike(kind, info):
    problem = Problem(info)
    optimizer = kind(problem.params)
    problem.train(optimizer, 2)
    before = optimizer.state_dict()["param_groups"][-1]
    optimizer.param_groups.extend(optimizer.param_groups[:])
    assert optimizer.state_dict()["param_groups"][-1] == before


def older_checkpoints_load(kind, info):
    for options in settings(info):
        problem = Problem(info)
        optimizer = kind(problem.params, **copy.deepcopy(options))
        problem.train(optimizer, 3)
        state = copy.deepcopy(optimizer.state_dict())
        for group in state["param_groups"]:
            for flag in info.not_og_supported_flags:
                group.pop(flag, None)
        for entries in state["state"].values():
            if isinstance(entries.get("step"), torch.Tensor):  # numbers, as they once were
                entries["step"] = entries["step"].item()
        optimizer.load_state_dict(state)
        problem.train(optimizer, 1)


def names_of_parameters_stay(kind, info):
    problem = Problem(info)
    named = [("weight", problem.params[0]), ("bias", problem.params[1])]
    optimizer = kind(named)
    problem.train(optimizer, 2)
    other = problem.copied()
    for given in (other.params, [("weight", other.params[0]), ("bias", other.params[1])]):
        other = other.copied()
        given = [(x[0], y) if isinstance(x, tuple) else y for x, y in zip(given, other.params, strict=True)]
        second = kind(given)
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        other.train(second, 1)
        assert second.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]


def files_hold_what_was_saved(kind, info):
    for options in settings(info):
        problem = Problem(info)
        optimizer = kind(problem.params, **copy.deepcopy(options))
        problem.train(optimizer, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        assert_same_state(torch.load(file, weights_only=True), optimizer.state_dict())


def hooks_of_checkpoints_run(kind, info):
    problem = Problem(info)
    optimizer = kind(problem.params)
    problem.train(optimizer, 1)

    def loaded(optimizer, state):
        changed = copy.deepcopy(state)
        changed["param_groups"][0]["lr"] = 0.003
        return changed

    seen = []
    optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda optimizer, state: state | {"note": 1})
    optimizer.register_load_state_dict_pre_hook(loaded)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: seen.append("after loading"))
    state = optimizer.state_dict()
    assert state.pop("note") == 1
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.003
    assert seen == ["before saving", "after loading"]
    optimizer.register_load_state_dict_pre_hook(
        lambda optimizer, state: state["param_groups"][0].update(lr=0.002), prepend=True
    )
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.003, "the hook in front came first"


def hooks_of_steps_run_in_order(kind, info):
    problem = Problem(info)
    optimizer = kind(problem.params)
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(0)),
        register_optimizer_step_post_hook(lambda *_: seen.append(3)),
        optimizer.register_step_pre_hook(lambda *_: seen.append(1)),
        optimizer.register_step_post_hook(lambda *_: seen.append(2)),
    ]
    try:
        problem.train(optimizer, 2)
    finally:
        for handle in handles:
            handle.remove()
    problem.train(optimizer, 1)
    assert seen == [0, 1, 2, 3] * 2


def copies_have_all_attributes(kind, info):
    problem = Problem(info)
    optimizer = kind(problem.params)
    problem.train(optimizer, 3)
    names = [{name for name in vars(x) if not name.startswith("_")} for x in (optimizer, copy.deepcopy(optimizer))]
    assert names[0] == names[1]
    assert repr(optimizer)


def no_state_is_empty(kind, info):
    problem = Problem(info)
    optimizer = kind(problem.params)
    problem.train(optimizer, 1)
    assert all(len(state) > 0 for state in optimizer.state.values())


def gradients_are_only_read(kind, info):
    for options in settings(info):
        problem = Problem(info)
        optimizer = kind(problem.params, **options)
        problem.backward()
        versions = [(param.grad, param.grad._version) for param in problem.params]
        optimizer.step()
        for param, (gradient, version) in zip(problem.params, versions, strict=True):
            assert param.grad is gradient, "it is another tensor"
            assert gradient._version == version, "it was written to"


def wrong_options_raise(kind, info):
    for wrong in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = wrong.optimizer_error_input
        expects = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        at_once = wrong.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        if not at_once:
            optimizer = kind(given.params, **given.kwargs)
        with expects(wrong.error_type, match=wrong.error_regex):
            kind(given.params, **given.kwargs) if at_once else optimizer.step()


def nothing_refers_back(kind, info):
    """An optimizer and its scheduler are gone when nobody holds them, without the garbage collector."""
    if info.optim_cls is not torch.optim.SGD:  # looking for cycles takes long, and they would be in what all share
        return
    optimizer = kind([nn.Parameter(torch.zeros(2, 2))])
    scheduler = StepLR(optimizer, 1)
    del scheduler
    gc.collect()
    assert not gc.get_referrers(optimizer), "something refers to the optimizer"
    del optimizer
    assert gc.collect() == 0, "a cycle was left behind"


def schedulers_know_whether_steps_were_taken(kind, info):
    problem = Problem(info)
    optimizer = kind(problem.params)
    scheduler = StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before .optimizer.step"):
        scheduler.step()
    other = problem.copied()
    optimizer = kind(other.params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.train(optimizer, 3, [StepLR(optimizer, 1)])


def parameters_may_have_two_optimizers(kind, info):
    if info.optim_cls is not torch.optim.SGD:  # looking for a clipper that nobody holds takes long
        return
    problem = Problem(info)
    first, second = kind(problem.params), kind(problem.params)
    problem.train(first, 1)
    problem.train(second, 1)


CHECKS = [
    steps_improve,
    steps_with_schedulers_improve,
    groups_may_decay_differently,
    a_rate_may_be_a_tensor,
    a_group_without_a_rate_stays,
    no_gradient_is_no_step,
    a_gradient_of_zero_is_no_step,
    sparse_and_dense_agree,
    complex_numbers_are_pairs,
    implementations_agree,
    fused_steps_need_memory,
    a_fused_step_is_skipped_where_others_say_so,
    checkpoints_are_deterministic,
    repeated_groups_are_saved_alike,
    older_checkpoints_load,
    names_of_parameters_stay,
    files_hold_what_was_saved,
    hooks_of_checkpoints_run,
    hooks_of_steps_run_in_order,
    copies_have_all_attributes,
    no_state_is_empty,
    gradients_are_only_read,
    wrong_options_raise,
    nothing_refers_back,
    schedulers_know_whether_steps_were_taken,
    parameters_may_have_two_optimizers,
]


class Reason(NamedTuple):
    """Why a check cannot be met, and with what error it fails."""

    match: str
    why: str
    cured_by: str | None = None
    """What shows that this is the reason: clipped in this way instead, the check is met."""


WRITTEN = Reason(
    "it was written to",
    "inherent: the update is handed over where the optimizer looks for the gradient, as clip_grad_norm_ does it",
)
ONE_CLIPPER = Reason(
    "These parameters are clipped already",
    "on purpose: what a second clipper is given has been cut, and would bias what both carry",
)
ABSENT_ROWS = Reason(
    "Tensor-likes are not close",
    "inherent: a row that is absent keeps its carry, and one with a gradient of zero pays from it",
    "plain",
)
PAYS_LATE = Reason(
    "the loss went the wrong way",
    "inherent: with the full carry updates go on in one direction after the gradient has turned, and an optimizer that "
    "takes signs or divides by their size goes on with them; that carry is for SGD without momentum",
    "plain",
)
PAYS_LATE_IN_ROWS = PAYS_LATE._replace(match="further from the solution")
ONLY_SIGNS = Reason(
    "further from the solution",
    "inherent: under a norm of 1 all gradients of this valley have one size, so that Adam takes steps as long as its "
    "rate to the end; it does so behind clip_grad_norm_ as well",
)

FAILS = {(gradients_are_only_read, name, region): WRITTEN for name in INFOS for region in MAKE}
FAILS |= {(parameters_may_have_two_optimizers, "SGD", region): ONE_CLIPPER for region in MAKE}
FAILS |= {
    (sparse_and_dense_agree, "Adagrad", "tight"): ABSENT_ROWS,
    (sparse_and_dense_agree, "Adagrad", "default"): ABSENT_ROWS,
    (sparse_and_dense_agree, "SGD", "tight"): ABSENT_ROWS,
    (sparse_and_dense_agree, "SGD", "default"): ABSENT_ROWS,
    (sparse_and_dense_agree, "SparseAdam", "tight"): PAYS_LATE_IN_ROWS,
    (sparse_and_dense_agree, "SparseAdam", "default"): ONLY_SIGNS,
    (steps_improve, "Adamax", "tight"): PAYS_LATE,
    (steps_improve, "Rprop", "tight"): PAYS_LATE,
    (steps_with_schedulers_improve, "Rprop", "tight"): PAYS_LATE,
    (groups_may_decay_differently, "Adamax", "tight"): PAYS_LATE,
    (groups_may_decay_differently, "Rprop", "tight"): PAYS_LATE,
}
"""Not in the database's settings, and tested beside them: LBFGS and differentiable steps, which are refused."""
CURES = {"plain": lambda kind: uclipped(kind, Component(0.1), carry=False)}


def outcome(check, kind, info):
    """Run a check in peace; torch and the carry's warnings have tests of their own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(kind, info)


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("name", INFOS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_torchs_own_optimizers_meet_it(check, name):
    """Otherwise the checks would say nothing of clipping."""
    outcome(check, INFOS[name].optim_cls, INFOS[name])


@pytest.mark.pairwise
@pytest.mark.parametrize("region", MAKE)
@pytest.mark.parametrize("name", INFOS)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_clipped_ones_meet_it_unless_there_is_a_reason(check, name, region):
    info, reason = INFOS[name], FAILS.get((check, name, region))
    kind = MAKE[region](info.optim_cls)
    if reason is None:
        outcome(check, kind, info)
        return
    with pytest.raises((AssertionError, RuntimeError), match=reason.match):
        outcome(check, kind, info)


CURED = {case: reason for case, reason in FAILS.items() if reason.cured_by is not None}


@pytest.mark.parametrize("case", CURED, ids=[f"{check.__name__}-{name}-{region}" for check, name, region in CURED])
def test_a_reason_is_the_reason(case):
    """It fails as said, and without what is said to be the reason it does not."""
    check, name, region = case
    info = INFOS[name]
    with pytest.raises(AssertionError, match=CURED[case].match):
        outcome(check, MAKE[region](info.optim_cls), info)
    outcome(check, CURES[CURED[case].cured_by](info.optim_cls), info)


def test_adam_goes_astray_behind_torchs_own_clip_as_well():
    class Clipping(torch.optim.SparseAdam):
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                values = param.grad.coalesce()
                limit = 1.0 / values.values().norm().clamp(min=1.0)
                param.grad = values * limit
            return super().step(closure)

    with pytest.raises(AssertionError, match=ONLY_SIGNS.match):
        outcome(sparse_and_dense_agree, Clipping, INFOS["SparseAdam"])
