"""Others' remedies, each against its published rule written out by hand."""

import math

import pytest
import torch

from carryclip.torch import UClip
from carryclip_lab.engine.training import train
from carryclip_lab.peers import Average, Clip21, Dice, ErrorFeedback, ZScore
from carryclip_lab.spec import Spec, parse
from carryclip_lab.task import load

GIVEN = {"task": "bandit", "optimizer": "sgd", "lr": 0.1, "batch": 4, "epochs": 2, "seed": 0, "steps": 20}
RADIUS = 0.5


def spec_of(region=f"Norm({RADIUS})", **other):
    return Spec.read({**GIVEN, **({} if region is None else {"region": region}), **other})


def gradients(count=60, size=6):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) * (10.0 if step % 7 == 3 else 0.4) for step in range(count)]


def updates(peer, given, spec=None, rates=None):
    """What the optimizer is given in place of each gradient, from how far SGD goes; the parameter is in two parts."""
    whole = torch.zeros(6, dtype=torch.float64)
    parts = [torch.nn.Parameter(whole[:2].clone()), torch.nn.Parameter(whole[2:].clone())]
    optimizer = torch.optim.SGD(parts, lr=1.0)
    peer(optimizer, spec or spec_of())
    seen = []
    for step, gradient in enumerate(given):
        rate = 1.0 if rates is None else rates[step]
        optimizer.param_groups[0]["lr"] = rate
        before = torch.cat([part.detach().clone() for part in parts])
        for part, grad in zip(parts, gradient.double().split([2, 4]), strict=True):
            part.grad = grad.clone()
        optimizer.step()
        seen.append((before - torch.cat([part.detach() for part in parts])) / rate)
    return torch.stack(seen)


def clip(vector, radius=RADIUS):
    return vector * min(1.0, radius / max(float(vector.norm()), 1e-300))


def test_the_average_is_clipped_without_its_first_zeros():
    average, wanted = torch.zeros(6, dtype=torch.float64), []
    for step, g in enumerate(gradients(), 1):
        average = 0.9 * average + 0.1 * g.double()
        wanted.append(clip(average / (1 - 0.9**step)))
    torch.testing.assert_close(updates(Average, gradients()), torch.stack(wanted))


def test_dice_clips_gradient_and_error_apart():
    error, wanted = torch.zeros(6, dtype=torch.float64), []
    for g in gradients():
        update = clip(g.double()) + clip(error)
        error = error + g.double() - update
        wanted.append(update)
    torch.testing.assert_close(updates(Dice, gradients()), torch.stack(wanted))


def test_error_feedback_keeps_steps_and_not_gradients():
    rates = [0.5 / (1 + step) for step in range(60)]
    error, wanted = torch.zeros(6, dtype=torch.float64), []
    for g, rate in zip(gradients(), rates, strict=True):
        total = rate * g.double() + error
        step = clip(total, rate * RADIUS)
        error = total - step
        wanted.append(step / rate)
    torch.testing.assert_close(updates(ErrorFeedback, gradients(), rates=rates), torch.stack(wanted))


@pytest.mark.parametrize("region", [f"Norm({RADIUS})", f"Component({RADIUS})"])
def test_error_feedback_at_a_constant_rate_is_u_clip(region):
    spec = spec_of(region)
    ours = updates(lambda optimizer, spec: UClip(optimizer, parse(spec.region), carry=True), gradients(), spec)
    torch.testing.assert_close(updates(ErrorFeedback, gradients(), spec), ours)


def test_clip21_moves_its_estimate_by_at_most_the_radius():
    average = estimate = torch.zeros(6, dtype=torch.float64)
    wanted = []
    for g in gradients():
        average = 0.9 * average + 0.1 * g.double()
        estimate = estimate + clip(average - estimate)
        wanted.append(estimate)
    torch.testing.assert_close(updates(Clip21, gradients()), torch.stack(wanted))


def test_a_z_score_cuts_outliers_and_only_those():
    spec = spec_of(None, carry="none", method="carryclip.experiments.peers:ZScore")
    given = [torch.full((6,), 1.0 + 0.01 * (step % 5)) for step in range(60)]
    given[40] = given[40] * 50
    found = updates(ZScore, given, spec)
    norms = [float(g.norm()) for g in given]
    cut = [step for step in range(60) if not torch.allclose(found[step], given[step].double())]
    assert 40 in cut
    assert all(norms[step] >= max(norms[26:40]) for step in cut)
    assert float(found[40].norm()) < 1.2 * math.sqrt(6)


def test_a_z_score_with_a_carry_pays_back():
    spec = spec_of(None, carry="full", method="carryclip.experiments.peers:ZScore")
    given = [torch.full((6,), 1.0 + 0.01 * (step % 5)) for step in range(400)]
    given[40] = given[40] * 5
    found = updates(ZScore, given, spec)
    total = torch.stack(given).double().sum(0)
    torch.testing.assert_close(found.sum(0), total, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["Average", "Dice", "ErrorFeedback", "Clip21", "ZScore"])
def test_a_peer_goes_on_bit_by_bit(name, tmp_path):
    region = None if name == "ZScore" else "Norm(0.05)"
    spec = spec_of(
        region, method=f"carryclip.experiments.peers:{name}", carry="full" if name == "ZScore" else "none", steps=40
    )
    whole = [event.metrics for event in train(spec) if hasattr(event, "metrics")]
    events = train(spec, tmp_path / "run.pt")
    next(events)
    next(events, None)
    events.close()
    again = [event.metrics for event in train(spec, tmp_path / "run.pt") if hasattr(event, "metrics")]
    assert again == whole
    assert load(spec.method, "method").__name__ == name


def test_a_peer_says_what_it_cannot_clip():
    with pytest.raises(ValueError, match="Dice wants a Norm or a Component with a number"):
        updates(Dice, gradients(1), spec_of("Sign(1.0)"))
