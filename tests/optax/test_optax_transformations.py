"""optax's own tests of its transformations, with a clip before every optimizer in them: which fail, and why.

The tests come with optax. Each runs three times: as it is, with a clip that cuts nothing before each optimizer, and
with a transformation there that does nothing at all, since a chain by itself changes what some tests look at.
"""

import importlib
import unittest
from functools import partial
from unittest import mock

import optax
import pytest
from optax._src import alias, transform

from carryclip import Norm
from carryclip.optax import uclip

theirs = partial(pytest.importorskip, reason="not in every distribution of optax")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad")
BEFORE = {
    "clip": lambda: uclip(Norm(1e30)),
    "passes what is not finite": lambda: uclip(Norm(1e30), nonfinite="propagate"),
    "nothing": optax.identity,
}
MODULES = {
    "tree_utils._state_utils": True,
    "transforms._monitoring": True,
    "transforms._layouts": True,
    "transforms._conditionality": False,
    "transforms._masking": False,
    "transforms._freezing": False,
    "transforms._combining": False,
    "transforms._accumulation": False,
    "_src.transform": False,
    "_src.lookahead": False,
}
"""Where the tests are, and whether they take no more than seconds."""

FINITE = "the clip has seen to what is not finite before apply_if_finite sees it; nonfinite='propagate' leaves it alone"
FAILS = {
    "transforms._conditionality": {
        "ConditionalityTest.test_apply_if_finite_sgd": FINITE,
        "ConditionalityTest.test_apply_if_finite_sgd_extra_args": FINITE,
        "ConditionalityTest.test_apply_if_finite_stateful_sgd": FINITE,
    },
}
"""Those that fail because of the clip; all others that fail do so in any chain of two."""


def before(name, function):
    return lambda *args, **kwargs: optax.chain(BEFORE[name](), function(*args, **kwargs))


def failing(module, name):
    """Names of the tests that fail with ``name`` before each optimizer, and how many ran."""
    places = [(each, at) for each in OPTIMIZERS for at in (alias, optax)] + [("scale_by_adam", transform)]
    patches = [mock.patch.object(at, each, before(name, getattr(at, each))) for each, at in places if name]
    for patch in patches:
        patch.start()
    try:
        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromModule(module).run(result)
    finally:
        for patch in patches:
            patch.stop()
    # A part of a test has a name of its own; what counts is the test.
    found = {getattr(test, "test_case", test).id() for test, _ in result.failures + result.errors}
    return {".".join(each.split(".")[-2:]) for each in found}, result.testsRun


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if quick else pytest.mark.exhaustive) for name, quick in MODULES.items()]
)
def test_what_fails_behind_a_clip_fails_in_any_chain_or_has_a_reason(name):
    theirs(f"optax.{name}_test")
    module = importlib.import_module(f"optax.{name}_test")
    bare, count = failing(module, "")
    clipped, again = failing(module, "clip")
    chained, _ = failing(module, "nothing")
    assert count == again > 0
    reasons = set(FAILS.get(name, {}))
    assert clipped - bare - chained == reasons
    if reasons:
        passing, _ = failing(module, "passes what is not finite")
        assert not passing & reasons
