"""Methods that go wrong in ways that real ones do, for studies that must survive them."""

import ctypes
import time

import torch

from carryclip import Norm
from carryclip.torch import UClip


def _only(spec, seed=1):
    """One seed goes wrong, the others train."""
    return spec.seed == seed


def nan(optimizer, spec):
    if _only(spec):
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].fill_(float("nan"))


def segfault(optimizer, spec):
    if _only(spec):
        ctypes.string_at(0)


def hang(optimizer, spec):
    if _only(spec):
        time.sleep(3600)


def fail(optimizer, spec):
    if _only(spec):
        raise LookupError("no such <radius> & no [bold]luck[/bold]")


def devour(optimizer, spec):
    if _only(spec):
        hoard = []
        while True:
            hoard.append(torch.ones(50_000_000))


def slow(optimizer, spec):
    """Every step takes a little while, so that there is time to be killed in."""
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.002))
    return UClip(optimizer, Norm(0.5), carry=True)


def leave(optimizer, spec):
    """What a script does that parses its arguments when it is imported."""
    if _only(spec):
        raise SystemExit("usage: train.py")


def restless(optimizer, spec):
    """Noise on every gradient, from the generator that everyone shares."""

    def shake(*_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)

    optimizer.register_step_pre_hook(shake)
    return UClip(optimizer, Norm(0.5), carry=True)
