"""Many runs of the shipped algorithm side by side, gradient by gradient, and how bounds are compared with them."""

import numpy as np
import pytest

from carryclip.theory.simulate import _Lanes

POINTS, SEEDS = 20, 20_000


class Lanes:
    """Runs of one rule: axes (runs..., seeds, coordinates). ``carry`` is the carry before the next step."""

    def __init__(self, region, policy, shape):
        self.rule = _Lanes(region, policy)
        self.rule.begin(shape)
        self.shape, self.count = shape, 0

    @property
    def carry(self):
        found = self.rule.buffers.carry
        return np.zeros(self.shape) if found is None else found

    def step(self, gradients):
        """The updates."""
        updates = self.rule.step(np.broadcast_to(gradients, self.shape), gradients, self.count)
        self.count += 1
        return updates


def on_average(values, bound):
    """The mean over the last axis is at most ``bound``, allowing for six of its standard errors."""
    error = values.std(-1) / np.sqrt(values.shape[-1])
    assert (values.mean(-1) <= bound + 6 * error + 1e-12).all(), (values.mean(-1) / bound).max()


def rarely(exceeded, probability):
    """The share of runs is at most ``probability``, allowing for six standard errors of a share, and ten cases."""
    runs = exceeded.shape[-1]
    expected = runs * np.asarray(probability)
    allowed = expected + 6 * np.sqrt(expected * (1 - np.minimum(probability, 1.0))) + 10
    assert (exceeded.sum(-1) <= allowed).all(), (exceeded.sum(-1) - allowed).max()


def dominates(values, bound, *, noticed):
    """The mean is below the bound at every point, and a bound ``noticed`` times as large would fail at some."""
    on_average(values, bound)
    with pytest.raises(AssertionError):
        on_average(values, noticed * np.asarray(bound))


def norms(vectors):
    return np.sqrt(np.einsum("...i,...i->...", vectors, vectors))
