"""Made-up runs for the tests of everything that reads a store."""

import math

from carryclip_lab.analysis.summary import summarise
from carryclip_lab.spec import Spec
from carryclip_lab.store.records import Epoch, Record

NORM = "Norm(0.5)"
METHODS = {"none": {}, "clip": {"region": NORM}, "U-Clip": {"region": NORM, "carry": "full"}}


def record(needed, seed=0, *, outcome=None, message=None, environment=None, **given):
    """A run that needed so many epochs; infinity for one that did not reach the target, None for one not done."""
    spec = Spec(**{"task": "cifar10", "optimizer": "sgd", "lr": 0.1, "batch": 50, "epochs": 300, "seed": seed, **given})
    if needed is None:
        return Record(spec, "waiting", None, None, None, None, {})
    outcome = outcome or ("reached" if needed < math.inf else "not_reached")
    reached = int(needed) if outcome == "reached" else None
    return Record(spec, "done", outcome, reached, 2.0, message, environment or {})


def seeds(*needed, **given):
    """One run per seed."""
    return [record(each, seed, **given) for seed, each in enumerate(needed)]


def summary(records, *, tier="small", study="study", epochs=None):
    """The only data set of a study."""
    (made,) = summarise(study, f"All of {study}", tier, records, epochs or (lambda run: TRACE))
    return made


def cell(*records):
    """The only cell of some runs."""
    (made,) = summary(records).cells
    return made


TRACE = [
    Epoch(epoch, loss=1.0 / epoch, grad_norm=2.0, carry_norm=0.5 * epoch, radius_norm=0.5, carry_feed=0.2)
    for epoch in (1, 2, 3)
]
