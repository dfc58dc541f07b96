"""Saving and resuming: bit-equal, in a new process, with or without U-Clip on either side."""

import copy
import functools
import io
import itertools
import math
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from carryclip import EWMA, Adaptive, Capped, CarryClipWarning, Component, Drip, Gated, Norm, Shrunk
from carryclip.torch import UClip
from cases import REGIONS

TORCH_REGIONS = {name: region for name, region in REGIONS.items() if "per tensor" not in name or "norm" in name}
TORCH_REGIONS = {name: region for name, region in TORCH_REGIONS.items() if "per coordinate" not in name}

CARRIES = {"gated": Gated(), "drip": Drip(), "shrunk": Shrunk()}
RESUME = """
import sys, torch
sys.path[:0] = [{tests!r}, {tests!r} + "/torch"]
from test_checkpoints import CARRIES, TORCH_REGIONS, make, train
from carryclip.torch import UClip
for (carry, region), saved in torch.load({path!r}, weights_only=True).items():
    net, optimizer = make()
    UClip(optimizer, TORCH_REGIONS[region], carry=CARRIES[carry])
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    train(net, optimizer, 6, 12)
    torch.save({{"net": net.state_dict(), "optimizer": optimizer.state_dict()}}, {path!r} + carry + region)
"""


def make(dtype=torch.float32, maker=lambda p: optim.AdamW(p, lr=0.01)):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    return net, maker([{"params": net[0].parameters()}, {"params": net[2].parameters()}])


def train(net, optimizer, start, stop):
    for k in range(start, stop):
        generator = torch.Generator().manual_seed(k)
        x = torch.randn(6, 4, generator=generator).to(net[0].weight.dtype)
        optimizer.zero_grad()
        (5 * net(x).square().mean()).backward()
        optimizer.step()


def equal(one, other):
    """Whether two state dicts hold the same bits in the same types."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    if torch.is_tensor(one):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def test_resume_in_a_new_process_is_bit_equal(tmp_path):
    """One process for all rules: to import torch takes longer."""
    path = str(tmp_path / "checkpoint.pt")
    runs, saved = {}, {}
    for rule in itertools.product(CARRIES, TORCH_REGIONS):
        carry, region = rule
        net, optimizer = runs[rule] = make()
        UClip(optimizer, TORCH_REGIONS[region], carry=CARRIES[carry])
        train(net, optimizer, 0, 6)
        saved[rule] = copy.deepcopy({"net": net.state_dict(), "optimizer": optimizer.state_dict()})
    torch.save(saved, path)
    script = textwrap.dedent(RESUME).format(tests=str(Path(__file__).parents[1]), path=path)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for rule, (net, optimizer) in runs.items():
        train(net, optimizer, 6, 12)
        resumed = torch.load(path + "".join(rule), weights_only=True)
        assert equal(resumed["net"], net.state_dict()), rule
        assert equal(resumed["optimizer"], optimizer.state_dict()), rule


def test_a_checkpoint_without_uclip_loads_with_one_warning():
    net, optimizer = make()
    train(net, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    other, fresh = make()
    clipper = UClip(fresh, Norm(0.1), carry=True)
    train(other, fresh, 0, 4)
    with pytest.warns(CarryClipWarning, match="written without U-Clip, so the carry starts from zero") as caught:
        fresh.load_state_dict(saved)
    assert len(caught) == 1
    assert not any(clipper.carry(p).any() for p in other.parameters())
    assert fresh.param_groups[0]["uclip_steps"] == 0
    train(other, fresh, 4, 6)
    assert clipper.carry(other[0].weight).any()
    fresh.load_state_dict(fresh.state_dict())  # now it has one: no warning, or it would be an error


@pytest.mark.parametrize("before", [0, 4])
def test_a_checkpoint_of_plain_sgd_without_uclip_loads_with_one_warning(before):
    """Without momentum SGD has no state from which one could see that it has been trained."""
    net, optimizer = make(maker=lambda p: optim.SGD(p, lr=0.01))
    train(net, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    other, fresh = make(maker=lambda p: optim.SGD(p, lr=0.01))
    clipper = UClip(fresh, Norm(0.1), carry=True)
    train(other, fresh, 0, before)
    with pytest.warns(CarryClipWarning, match="written without U-Clip, so the carry starts from zero") as caught:
        fresh.load_state_dict(saved)
    assert len(caught) == 1
    assert not any(clipper.carry(p).any() for p in other.parameters())


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adagrad, functools.partial(optim.SGD, momentum=0.9)])
def test_an_empty_checkpoint_loads_in_silence(kind):
    _, optimizer = make(maker=lambda p: kind(p, lr=0.01))
    other, fresh = make(maker=lambda p: kind(p, lr=0.01))
    UClip(fresh, Norm(0.1), carry=True)
    fresh.load_state_dict(optimizer.state_dict())
    train(other, fresh, 0, 2)
    with pytest.warns(CarryClipWarning, match="written without U-Clip"):  # and takes a carry away
        fresh.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_parameters_keep_a_float32_carry_through_a_load(dtype):
    """Trap: load_state_dict casts every state tensor to the parameter's type; 1e6 in float16 would be inf."""
    net, optimizer = make(dtype, lambda p: optim.SGD(p, lr=0.01))
    clipper = UClip(optimizer, Adaptive(1, 1), carry=Gated())
    train(net, optimizer, 0, 5)
    with torch.no_grad():
        clipper.carry(net[0].weight).add_(1e6 + 1 / 3)
        optimizer.state[net[0].weight]["uclip_count"].fill_(1001)
    saved = copy.deepcopy(optimizer.state_dict())
    other, fresh = make(dtype, lambda p: optim.SGD(p, lr=0.01))
    again = UClip(fresh, Adaptive(1, 1), carry=Gated())
    fresh.load_state_dict(saved)
    assert again.carry(other[0].weight).dtype == torch.float32
    assert equal(fresh.state_dict(), saved)


def test_loading_does_not_share_memory_with_the_checkpoint():
    net, optimizer = make()
    UClip(optimizer, Component(0.01), carry=True)
    train(net, optimizer, 0, 3)
    saved = optimizer.state_dict()
    other, fresh = make()
    clipper = UClip(fresh, Component(0.01), carry=True)
    fresh.load_state_dict(saved)
    clipper.carry(other[0].weight).zero_()
    assert saved["state"][0]["uclip_carry"].any()


@pytest.mark.parametrize(
    "maker", [lambda p: optim.SGD(p, lr=0.1), lambda p: optim.SGD(p, lr=0.1, momentum=0.9), lambda p: optim.AdamW(p)]
)
def test_a_checkpoint_with_the_carry_loads_into_a_bare_optimizer(maker):
    net, optimizer = make(maker=maker)
    UClip(optimizer, Norm(0.1), carry=Gated())
    train(net, optimizer, 0, 3)
    other, bare = make(maker=maker)
    bare.load_state_dict(optimizer.state_dict())
    with pytest.warns(CarryClipWarning, match="no clipper is attached"):
        train(other, bare, 3, 4)
    train(other, bare, 4, 6)


def test_attaching_after_a_load_adopts_the_carry():
    net, optimizer = make()
    clipper = UClip(optimizer, Norm(0.1, over="tensor"), carry=Gated())
    train(net, optimizer, 0, 5)
    other, fresh = make()
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(net.state_dict())
    again = UClip(fresh, Norm(0.1, over="tensor"), carry=Gated())
    assert torch.equal(again.carry(other[0].weight), clipper.carry(net[0].weight))
    train(net, optimizer, 5, 9)
    train(other, fresh, 5, 9)
    assert equal(fresh.state_dict(), optimizer.state_dict())


def test_attaching_after_a_cast_warns():
    net, optimizer = make(torch.bfloat16)
    UClip(optimizer, Norm(0.1), carry=True)
    train(net, optimizer, 0, 3)
    other, fresh = make(torch.bfloat16)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.warns(
        CarryClipWarning, match=r"uclip_carry had been cast.*Attach UClip before optimizer\.load_state_dict"
    ):
        clipper = UClip(fresh, Norm(0.1), carry=True)
    assert clipper.carry(other[0].weight).dtype == torch.float32


@pytest.mark.parametrize("attach_first", [True, False])
def test_another_region_than_the_checkpoints_warns(attach_first):
    net, optimizer = make()
    UClip(optimizer, Norm(0.1), carry=True)
    train(net, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    _, fresh = make()
    first, second = lambda: UClip(fresh, Norm(0.5), carry=True), lambda: fresh.load_state_dict(saved)
    if not attach_first:
        first, second = second, first
    first()
    with pytest.warns(CarryClipWarning, match=r"written with Norm\(radius=0\.1.*clips with Norm\(radius=0\.5"):
        second()


def test_schedules_go_on_where_they_stopped():
    seen = []

    def radius(step):
        seen.append(step)
        return 0.1

    net, optimizer = make()
    UClip(optimizer, Norm(radius), carry=True)
    train(net, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    seen.clear()
    other, fresh = make()
    UClip(fresh, Norm(radius), carry=True)
    fresh.load_state_dict(saved)
    train(other, fresh, 3, 5)
    assert seen == [3, 4]


@pytest.mark.parametrize("carry", [True, Capped(3), Gated()], ids=repr)
@pytest.mark.parametrize("region", [Component(0.01), Norm(0.1, over="group"), Adaptive(1, 1)], ids=repr)
def test_explicit_form_resumes_bit_equal(region, carry, tmp_path):
    def setup():
        net, optimizer = make()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
        return net, optimizer, UClip(groups, region, carry=carry)

    def go(net, optimizer, clipper, start, stop):
        for k in range(start, stop):
            optimizer.zero_grad()
            net(torch.randn(6, 4, generator=torch.Generator().manual_seed(k))).square().mean().backward()
            clipper.clip_()
            optimizer.step()

    one = setup()
    go(*one, 0, 5)
    torch.save([part.state_dict() for part in one], tmp_path / "saved.pt")
    go(*one, 5, 9)
    other = setup()
    for part, state in zip(other, torch.load(tmp_path / "saved.pt", weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*other, 5, 9)
    assert equal([part.state_dict() for part in one], [part.state_dict() for part in other])


def test_wrong_states_are_refused_with_a_reason():
    net, _ = make()
    clipper = UClip(net.parameters(), Norm(1.0), carry=True)
    with pytest.raises(ValueError, match="expected the keys 'groups' and 'state'"):
        clipper.load_state_dict({})
    other = UClip([nn.Parameter(torch.zeros(3))], Norm(1.0), carry=True)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    clipper.clip_()
    with pytest.raises(ValueError, match="does not fit these parameters"):
        other.load_state_dict(clipper.state_dict())
    assert not other.carry(0).any()
    attached = UClip(optim.SGD([nn.Parameter(torch.zeros(3))], lr=1), Norm(1.0), carry=True)
    with pytest.raises(RuntimeError, match=r"use optimizer\.state_dict"):
        attached.state_dict()


def test_saving_warns_of_trouble():
    net, optimizer = make()
    UClip(optimizer, Component(1e-6), carry=True, metrics_every=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(7):
            for p in net.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert not caught
        optimizer.state_dict()
    assert [w.category for w in caught] == [CarryClipWarning] * len(caught)
    assert "winding up" in str(caught[0].message)


def test_groups_added_before_a_load_are_part_of_it():
    """Staged unfreezing: the group is added in the resumed run too, before any step."""

    def setup():
        net, _ = make()
        optimizer = optim.SGD(net[0].parameters(), lr=0.1)
        clipper = UClip(optimizer, Norm(0.1, over="group"), carry=Gated())
        optimizer.add_param_group({"params": list(net[2].parameters()), "uclip": Component(0.01)})
        return net, optimizer, clipper

    net, optimizer, clipper = setup()
    train(net, optimizer, 0, 3)
    other, fresh, again = setup()
    torch.save(optimizer.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    other.load_state_dict(net.state_dict())
    train(net, optimizer, 3, 6)
    train(other, fresh, 3, 6)
    assert torch.equal(again.carry(2), clipper.carry(2))
    assert equal(fresh.state_dict(), optimizer.state_dict())


def test_a_groups_own_region_survives_remove_observe_copy_and_load():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = optim.SGD([{"params": [a]}, {"params": [b], "uclip": None}], lr=1.0)
    UClip(optimizer, Norm(1.0), carry=True, observe=True).remove()
    UClip(optimizer, Norm(1.0), carry=True).remove()
    assert optimizer.param_groups[1]["uclip"] is None
    clipper = UClip(optimizer, Norm(1.0), carry=True)
    optimizer.load_state_dict(optimizer.state_dict())
    b.grad = torch.full((2,), 100.0)
    optimizer.step()
    assert b[0].item() == -100.0
    assert "leaves 1 group alone" in repr(clipper)
    assert all("uclip" not in group for group in optimizer.state_dict()["param_groups"])
    twin = copy.deepcopy(optimizer)
    assert "leaves 1 group alone" in repr(UClip(twin, Norm(1.0), carry=True))


CHANGES = {
    "gated coordinates to moments": ((Component(0.01), Gated()), (Adaptive(1, 1), True)),
    "moments to gated coordinates": ((Adaptive(1, 1), True), (Component(0.01), Gated())),
    "ewma to welford": ((Adaptive(1, 1, EWMA()), True), (Adaptive(1, 1), True)),
    "per tensor to one norm": ((Norm(0.1, over="tensor"), Gated()), (Norm(0.1), Gated())),
    "one norm to per tensor": ((Norm(0.1), Gated()), (Norm(0.1, over="tensor"), Gated())),
    "full to gated": ((Norm(0.1), True), (Norm(0.1), Gated())),
    "gated to drip": ((Norm(0.1), Gated()), (Norm(0.1), Drip())),
    "drip to shrunk": ((Norm(0.1), Drip()), (Norm(0.1), Shrunk())),
    "carry to none": ((Component(0.01), True), (Component(0.01), False)),
}


@pytest.mark.parametrize("attach_first", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_averages_of_another_meaning_start_anew(change, attach_first):
    """The carry is taken over; what the new rule would misread is not."""
    (old, old_carry), (new, new_carry) = CHANGES[change]
    net, optimizer = make()
    UClip(optimizer, old, carry=old_carry)
    train(net, optimizer, 0, 8)
    saved = copy.deepcopy(optimizer.state_dict())
    other, fresh = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if attach_first:
            clipper = UClip(fresh, new, carry=new_carry)
            train(other, fresh, 0, 3)
            fresh.load_state_dict(saved)
        else:
            fresh.load_state_dict(saved)
            clipper = UClip(fresh, new, carry=new_carry)
    told = [str(w.message) for w in caught if "often trains far worse" not in str(w.message)]
    assert ["state was written with" in message for message in told] == [True]
    entries = fresh.state[other[0].weight]
    assert [key for key in entries if key.startswith("uclip_")] == (["uclip_carry"] if new_carry is not False else [])
    if new_carry is not False:
        assert torch.equal(clipper.carry(other[0].weight), saved["state"][0]["uclip_carry"])
    assert all(not group["uclip_feed"].any() for group in fresh.param_groups if "uclip_feed" in group)
    train(other, fresh, 8, 12)


def test_a_carry_that_a_cast_made_infinite_is_dropped():
    """Trap: 1e6 in float16 is inf, and would be sent for ever."""
    net, optimizer = make(torch.float16, lambda p: optim.SGD(p, lr=0.01))
    clipper = UClip(optimizer, Norm(0.1), carry=True)
    train(net, optimizer, 0, 2)
    clipper.carry(0).fill_(1e6)
    other, fresh = make(torch.float16, lambda p: optim.SGD(p, lr=0.01))
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.warns(CarryClipWarning, match="entries that had become infinite are now 0"):
        again = UClip(fresh, Norm(0.1), carry=True)
    assert not again.carry(other[0].weight).any()


def test_metrics_start_anew_with_a_loaded_checkpoint():
    net, optimizer = make()
    clipper = UClip(optimizer, Norm(0.1), carry=True, metrics_every=1)
    saved = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, 0, 4)
    optimizer.load_state_dict(saved)
    assert clipper.metrics().step == -1
    assert math.isnan(clipper.metrics()["carry_norm"])


def test_the_first_step_after_a_load_is_measured():
    net, optimizer = make()
    UClip(optimizer, Norm(0.1), carry=True)
    train(net, optimizer, 0, 5)
    other, fresh = make()
    clipper = UClip(fresh, Norm(0.1), carry=True)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(other, fresh, 5, 6)
    assert clipper.metrics().step == 5
    assert clipper.metrics()["carry_norm"] > 0


def test_a_converted_model_gets_converted_buffers():
    net, optimizer = make()
    clipper = UClip(optimizer, Adaptive(1, 1), carry=True)
    train(net, optimizer, 0, 3)
    net.double()
    for entries in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            entries[key] = entries[key].double()
    train(net, optimizer, 3, 5)
    assert clipper.carry(0).dtype == torch.float64
    optimizer.load_state_dict(optimizer.state_dict())  # no talk of a cast


def test_a_failed_attach_leaves_nothing_behind(monkeypatch):
    net, optimizer = make()
    with monkeypatch.context() as patch:
        patch.setattr("carryclip.torch._session.Session._link", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            UClip(optimizer, Norm(0.1), carry=True)
    UClip(optimizer, Norm(0.1), carry=True)
    train(net, optimizer, 0, 2)
    assert optimizer.param_groups[0]["uclip_steps"] == 2
