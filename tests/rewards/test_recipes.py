"""Critics: the recipes for Stable-Baselines3 and for a loop of one's own do what the page says."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from stable_baselines3 import PPO

from carryclip.torch import Norm, Quantile, UClip

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name):
    path = EXAMPLES / name
    assert len(path.read_text().splitlines()) < 120
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_of_ones_own_learns_cart_pole():
    first, last = map(
        int, re.search(r"steps per episode: (\d+) at first, (\d+) at the end", run("ppo_loop.py")).groups()
    )
    assert first < 40
    assert last > 150


def test_the_critic_of_stable_baselines_learns_rare_rewards():
    usual, ours = (int(share) / 100 for share in re.findall(r"says (\d+)% of the true value", run("sb3_ppo.py")))
    assert usual < 0.7, "max_grad_norm=0.5 is off by 30 % or more"
    assert abs(ours - 1) < 0.5 * abs(usual - 1), "ours is at least twice as near"


def cart_pole(max_grad_norm):
    return PPO("MlpPolicy", "CartPole-v1", n_steps=64, n_epochs=2, max_grad_norm=max_grad_norm, seed=0, device="cpu")


def learned(max_grad_norm, region=None):
    """The weights before and after; each model starts torch's global generator anew, so one after the other."""
    model = cart_pole(max_grad_norm)
    before = torch.cat([p.detach().flatten() for p in model.policy.parameters()])
    if region is not None:
        UClip(model.policy.optimizer, region, carry=False)
    model.learn(128)
    return before, torch.cat([p.detach().flatten() for p in model.policy.parameters()])


def test_the_documented_line_switches_its_own_clipping_off():
    """Plain clipping by UClip in its place gives the same weights, so nothing else clips."""
    start, theirs = learned(0.05)
    ours, unclipped = learned(math.inf, Norm(0.05))[1], learned(math.inf)[1]
    moved = (theirs - start).norm()
    # clip_grad_norm_ adds 1e-6 to the norm, so the two are equal to rounding only.
    assert (theirs - ours).norm() < 1e-3 * moved
    assert (theirs - unclipped).norm() > 0.02 * moved


@pytest.mark.parametrize("region", [Norm(0.05), Norm(Quantile(0.3))], ids=str)
def test_saved_models_keep_the_carry(region, tmp_path):
    model = cart_pole(math.inf)
    clipper = UClip(model.policy.optimizer, region)
    model.learn(768)
    carries = [clipper.carry(p).clone() for p in model.policy.parameters()]
    assert any(carry.any() for carry in carries)
    model.save(tmp_path / "model.zip")
    again = PPO.load(tmp_path / "model.zip", env=model.get_env(), device="cpu")
    attached = UClip(again.policy.optimizer, region)
    for parameter, carry in zip(again.policy.parameters(), carries, strict=True):
        torch.testing.assert_close(attached.carry(parameter), carry, rtol=0, atol=0)
    again.learn(64)
