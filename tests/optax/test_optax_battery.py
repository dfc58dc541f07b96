"""optax's own list of optimizers behind the default clip: which do not get to the minimum, and why.

The list and the two functions come with optax; a case is there if it ends as near to the minimum as optax asks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

from carryclip import Norm
from carryclip.optax import uclip
from pairwise import cells

theirs = pytest.importorskip("optax.contrib._common_test", reason="not in every distribution of optax")
aliases = pytest.importorskip("optax._src.alias_test", reason="not in every distribution of optax")

CLIPS = {
    "default": lambda: uclip(Norm(1.0)),
    "plain": lambda: uclip(Norm(1.0), carry=False),
}
FUNCTIONS = {"parabola": theirs._setup_parabola, "rosenbrock": theirs._setup_rosenbrock}
LEFT_OUT = {
    "optimistic_adam": "deprecated for optimistic_adam_v2",
    "sign_sgd": "optax leaves it out as well where a valley is curved",
    "signum": "optax leaves it out as well where a valley is curved",
    "schedule_free_sgd": "its parameters are read from its own state, which a chain holds in second place",
    "schedule_free_adamw": "its parameters are read from its own state, which a chain holds in second place",
}


class Case(NamedTuple):
    """An optimizer with its options, and in how many steps optax wants it to be there."""

    name: str
    options: dict
    steps: int

    @property
    def words(self):
        """Its name and what it is made with beside a learning rate."""
        others = [f"{name}={value}" for name, value in self.options.items() if not name.endswith("learning_rate")]
        return " ".join([self.name, *others])


LISTED = [
    Case(x["opt_name"], x["opt_kwargs"], 30_000) for x in theirs._MAIN_OPTIMIZERS_UNDER_TEST if not x["wrapper_name"]
]
LISTED += [Case(x["opt_name"], x["opt_kwargs"], 10_000) for x in aliases._OPTIMIZERS_UNDER_TEST if x["opt_kwargs"]]
CASES = {case.words: case for case in LISTED if case.name not in LEFT_OUT}


def distance(words, function, clip, *, times=1, rate=1.0):
    """How far the parameters end from what optax takes for the minimum; not above 0 if they are there."""
    case = CASES[words]
    options = {name: value * rate if name == "learning_rate" else value for name, value in case.options.items()}
    tx = theirs._get_opt_factory(case.name)(**options)
    tx = optax.with_extra_args_support(optax.chain(CLIPS[clip](), tx))
    start, end, loss = FUNCTIONS[function](jnp.float32)
    more = case.name in ("momo", "momo_adam", "polyak_sgd", "sophia")

    def step(carried, _):
        params, state = carried
        value, gradients = jax.value_and_grad(loss)(params)
        given = {"value": value, "obj_fn": loss} if more else {}
        updates, state = tx.update(gradients, state, params, **given)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda carried: jax.lax.scan(step, carried, length=times * case.steps)[0])
    params, _ = run((start, tx.init(start)))
    return float(jnp.max(jnp.abs(params - end) - 3e-2 * jnp.abs(end) - 3e-2))


class Reason(NamedTuple):
    """Why an optimizer is not there in the steps allowed, and what shows that this is why."""

    why: str
    shown_by: str


CIRCLES = Reason(
    "inherent: where gradients are cut its steps are as long as its rate, which is never lowered, and it circles the "
    "minimum",
    "a tenth of the rate",
)
SLOW = Reason("inherent: steps are short where gradients are cut", "four times the steps")
DECAYS = Reason("inherent to clipping: beside a gradient that is cut weight decay weighs more", "plain clipping")
SUMS = Reason(
    "inherent to the carry: its momentum adds gradients up without a mean, and so a hundred times what is paid late",
    "no carry",
)
FAILS = {
    "cocob": SLOW,
    "cocob weight_decay=0.01": DECAYS,
    "momo_adam": CIRCLES,
    "simplified_ademamix": SUMS,
    "adam": CIRCLES,
    "adamax": CIRCLES,
    "adamaxw": CIRCLES,
    "adamw": CIRCLES,
    "lion weight_decay=0.0001": CIRCLES,
}
"""All of them in the curved valley of Rosenbrock's function."""


def shows(reason, words):
    """Whether what is said to show the reason does."""
    match reason.shown_by:
        case "a tenth of the rate":
            return distance(words, "rosenbrock", "default", rate=0.1) <= 0
        case "four times the steps":
            return distance(words, "rosenbrock", "default", times=4) <= 0
        case "plain clipping":
            return distance(words, "rosenbrock", "plain") > 0
        case "no carry":
            return distance(words, "rosenbrock", "plain") <= 0


@pytest.mark.parametrize("words", cells([[words] for words in FAILS], [["adamw"], ["simplified_ademamix"]]))
def test_those_that_do_not_get_there_have_a_reason(words):
    assert distance(words, "rosenbrock", "default") > 0
    assert shows(FAILS[words], words)


@pytest.mark.parametrize(("words", "function"), [("nadam", "rosenbrock"), ("muon", "parabola")])
def test_others_get_there(words, function):
    """The measure is one that can be met."""
    assert distance(words, function, "default") <= 0
