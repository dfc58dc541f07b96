"""All optimizers and settings of torch's test database, clipped: a wide region changes no bit, a tight one only clips.

The database comes with torch (``torch.testing._internal.common_optimizers``) and needs the package expecttest.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from carryclip import Component, Norm
from carryclip.torch import UClip, uclipped

pytest.importorskip("expecttest", reason="torch's database of optimizers imports it")
from torch.testing._internal.common_optimizers import optim_db

WIDE = {"component": Component(1e30), "norm": Norm(1e30)}
STEPS = 4
CLOSURES = [info for info in optim_db if info.step_requires_closure]
DENSE = [info for info in optim_db if not info.step_requires_closure and not info.only_supports_sparse_grads]
SPARSE = [info for info in optim_db if info.supports_sparse or info.only_supports_sparse_grads]


def name_of(info):
    return info.optim_cls.__name__


def settings_of(info):
    """The options that the database knows, each in all the ways this optimizer has on the CPU."""
    for given in info.optim_inputs_func(device="cpu", dtype=torch.float32):
        yield given.kwargs, f"{given.desc}, default"
        if "foreach" in info.supported_impls:
            yield given.kwargs | {"foreach": False}, f"{given.desc}, loop"
            yield given.kwargs | {"foreach": True}, f"{given.desc}, foreach"
        if "cpu" in info.supports_fused_on:
            yield given.kwargs | {"fused": True}, f"{given.desc}, fused"


CASES = [
    pytest.param(info, options, id=f"{name_of(info)}-{words}") for info in DENSE for options, words in settings_of(info)
]
DEFAULTS = [pytest.param(info, id=name_of(info)) for info in DENSE]


def params_for(info, dtype=torch.float32):
    """Matrices, and for those that take them a vector and a scalar as well."""
    torch.manual_seed(0)
    shapes = [(4, 3), (3, 5)] if name_of(info) == "Muon" else [(4, 3), (5,), ()]
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]


def gradients_for(params, steps=STEPS):
    """Gradients of every step, the third time without one for the first parameter."""
    torch.manual_seed(1)
    rounds = [[torch.randn_like(param) for param in params] for _ in range(steps)]
    rounds[2][0] = None
    return rounds


def own(options):
    """Options whose tensors are not shared: some optimizers and schedulers write to a learning rate."""
    return copy.deepcopy(options)


def run(optimizer, params, rounds, before_step=lambda: None):
    for gradients in rounds:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        before_step()
        optimizer.step()


def assert_same_bits(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y), (x, y)


def assert_same_state(optimizer, params, bare, twins):
    """What the optimizer keeps itself is bit for bit what the bare one keeps."""
    for param, twin in zip(params, twins, strict=True):
        mine = {k: v for k, v in optimizer.state[param].items() if not k.startswith("uclip_")}
        theirs = bare.state[twin]
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            same = torch.equal(mine[key], value) if isinstance(value, torch.Tensor) else mine[key] == value
            assert same, key


def test_the_database_is_not_empty():
    assert len(DENSE) >= 13
    assert len(SPARSE) >= 3
    assert len(CASES) >= 150


@pytest.mark.pairwise(together=1)
@pytest.mark.parametrize("region", WIDE)
@pytest.mark.parametrize(("info", "options"), CASES)
def test_a_wide_region_changes_no_bit(info, options, region):
    params, twins = params_for(info), params_for(info)
    rounds = gradients_for(params)
    bare = info.optim_cls(twins, **own(options))
    run(bare, twins, rounds)
    optimizer = uclipped(info.optim_cls, WIDE[region], carry=True)(params, **own(options))
    run(optimizer, params, rounds)
    assert_same_bits(params, twins)
    assert_same_state(optimizer, params, bare, twins)


def clipped_by_hand(params, limit):
    """Clip each coordinate of g + carry and carry what is cut; the paper's two lines."""
    carries = {}

    def clip():
        for param in params:
            if param.grad is None:
                continue
            total = param.grad + carries.get(param, torch.zeros_like(param.grad))
            if total.is_complex():
                param.grad = torch.view_as_complex(torch.view_as_real(total).clamp(-limit, limit))
            else:
                param.grad = total.clamp(-limit, limit)
            carries[param] = total - param.grad

    return clip


@pytest.mark.parametrize(("info", "options"), CASES)
def test_a_tight_component_region_is_an_explicit_clip_before_the_bare_optimizer(info, options):
    params, twins = params_for(info), params_for(info)
    rounds = gradients_for(params)
    run(info.optim_cls(twins, **own(options)), twins, rounds, clipped_by_hand(twins, 0.25))
    optimizer = uclipped(info.optim_cls, Component(0.25), carry=True)(params, **own(options))
    run(optimizer, params, rounds)
    assert sum(optimizer.uclip.carry(param).abs().sum() for param in params) > 1
    assert_same_bits(params, twins)


@pytest.mark.parametrize("info", DEFAULTS)
def test_a_tight_norm_is_clip_grad_norm_before_the_bare_optimizer(info):
    params, twins = params_for(info, torch.float64), params_for(info, torch.float64)
    rounds = gradients_for(params)

    def clip():
        # Divided by hand: clip_grad_norm_ adds 1e-6 to the norm.
        given = [twin.grad for twin in twins if twin.grad is not None]
        total = torch.cat([x.reshape(-1) for x in given]).norm()
        for gradient in given:
            gradient.mul_(0.5 / total)

    run(info.optim_cls(twins), twins, rounds, clip)
    run(uclipped(info.optim_cls, Norm(0.5), carry=False)(params), params, rounds)
    for actual, expected in zip(params, twins, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("info", [pytest.param(info, id=name_of(info)) for info in DENSE if info.supports_complex])
@pytest.mark.parametrize("limit", [1e30, 0.25])
def test_complex_parameters(info, limit):
    params, twins = params_for(info, torch.complex64), params_for(info, torch.complex64)
    rounds = gradients_for(params)
    run(info.optim_cls(twins), twins, rounds, clipped_by_hand(twins, limit))
    run(uclipped(info.optim_cls, Component(limit), carry=True)(params), params, rounds)
    assert_same_bits(params, twins)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of tensors that Adagrad makes itself
@pytest.mark.parametrize("info", [pytest.param(info, id=name_of(info)) for info in SPARSE])
@pytest.mark.parametrize("limit", [1e30, 0.25])
def test_sparse_gradients(info, limit):
    """Rows that are present are clipped with their carry, the others wait; duplicate rows are added up first."""
    settings = info.metadata_for_sparse[0] or {}
    torch.manual_seed(0)
    start = torch.randn(6, 2)
    rows = [torch.tensor(x) for x in ([0, 2, 2], [1, 2], [0, 5], [2])]
    values = [torch.randn(len(x), 2) for x in rows]
    param, twin, carry = nn.Parameter(start.clone()), nn.Parameter(start.clone()), torch.zeros(6, 2)
    bare = info.optim_cls([twin], **own(settings))
    optimizer = uclipped(info.optim_cls, Component(limit), carry=True)([param], **own(settings))
    for where, what in zip(rows, values, strict=True):
        gradient = torch.sparse_coo_tensor(where[None], what, (6, 2), check_invariants=True)
        param.grad = gradient.clone()
        optimizer.step()
        found = gradient.coalesce()
        total = found.values() + carry[found.indices()[0]]
        sent = total.clamp(-limit, limit)
        carry[found.indices()[0]] = total - sent
        how = {"is_coalesced": True, "check_invariants": True}
        twin.grad = torch.sparse_coo_tensor(found.indices(), sent, (6, 2), **how)
        bare.step()
    assert torch.equal(param, twin)
    assert torch.equal(optimizer.uclip.carry(param), carry)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict", "file"])
@pytest.mark.parametrize("info", DEFAULTS)
def test_going_on_after_a_copy_is_bit_equal(info, way):
    kind = uclipped(info.optim_cls, Component(0.25), carry=True)
    params = params_for(info)
    rounds = gradients_for(params)
    optimizer = kind(params)
    run(optimizer, params, rounds[:2])
    if way == "deepcopy":
        other = copy.deepcopy(optimizer)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(optimizer))
    else:
        saved = optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        other = kind([nn.Parameter(param.detach().clone()) for param in params])
        other.load_state_dict(copy.deepcopy(saved))
    others = other.param_groups[0]["params"]
    run(optimizer, params, rounds[2:])
    run(other, others, rounds[2:])
    assert_same_bits(others, params)
    assert_same_bits([other.uclip.carry(x) for x in others], [optimizer.uclip.carry(x) for x in params])


@pytest.mark.parametrize("info", DEFAULTS)
def test_groups_closures_and_schedulers_go_on_as_without_clipping(info):
    def train(clipped):
        params = params_for(info)
        groups = [{"params": params[:1], "lr": 0.02}, {"params": params[1:]}]
        kind = uclipped(info.optim_cls, Norm(1e30), carry=True) if clipped else info.optim_cls
        optimizer = kind(groups, lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = sum((param**2).sum() for param in params)
            loss.backward()
            return loss

        for _ in range(STEPS):
            losses.append(optimizer.step(closure).detach())
            scheduler.step()
        return params, losses, [group["lr"] for group in optimizer.param_groups]

    params, losses, rates = train(clipped=True)
    twins, expected, own_rates = train(clipped=False)
    assert_same_bits(params, twins)
    assert_same_bits(losses, expected)
    assert rates == own_rates


@pytest.mark.parametrize(
    ("info", "number"),
    [pytest.param(info, k, id=f"{name_of(info)}-{k}") for info in DENSE for k in range(len(info.scheduler_inputs))],
)
def test_schedulers_of_the_database(info, number):
    def train(clipped):
        params = params_for(info)
        rounds = gradients_for(params)
        kind = uclipped(info.optim_cls, Component(1e30), carry=True) if clipped else info.optim_cls
        optimizer = kind(params, lr=0.01)
        schedulers = [make(optimizer) for make in info.scheduler_inputs[number]]
        for gradients in rounds:
            run(optimizer, params, [gradients])
            for scheduler in schedulers:
                if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    scheduler.step(1.0)
                else:
                    scheduler.step()
        return params

    assert_same_bits(train(clipped=True), train(clipped=False))


@pytest.mark.parametrize("info", [pytest.param(info, id=name_of(info)) for info in CLOSURES])
def test_those_that_need_many_gradients_a_step_are_refused(info):
    with pytest.raises(TypeError, match="evaluates the gradient many times"):
        uclipped(info.optim_cls, Norm(1.0))(params_for(info))


@pytest.mark.parametrize("info", DEFAULTS)
def test_parameters_without_memory_can_be_attached_to(info):
    """A model is laid out on the meta device before its weights are loaded; Adagrad makes its state at once."""
    with torch.device("meta"):
        optimizer = info.optim_cls(params_for(info))
    UClip(optimizer, Norm(1.0))


@pytest.mark.parametrize(
    "info", [pytest.param(x, id=name_of(x)) for x in DENSE if "differentiable" in x.supported_impls]
)
def test_differentiable_steps_are_refused(info):
    """The clip writes in place and leaves no trace for autograd, so that derivatives would silently be wrong."""
    with pytest.raises(ValueError, match="no derivative passes through a clipped step"):
        uclipped(info.optim_cls, Norm(1.0))(params_for(info), differentiable=True)
