"""The tables of figures: each a function from a study's summary to picture, caption and numbers."""

import functools
from collections.abc import Mapping

from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures import carry, epochs, faster, images, outcomes, rates, ratios, trials
from carryclip_lab.figures.sheet import Drawn, Figure
from carryclip_lab.figures.style import RC

FIGURES: Mapping[str, Figure] = {
    "epochs": Figure("Epochs to the target against batch size", epochs.main_region),
    "faster": Figure("The chance that a run with a carry needs fewer epochs", faster.draw),
    "ratios": Figure("Every setting against its optimizer alone", ratios.draw),
    "constant": Figure("Constant regions", epochs.constant),
    "constant-small": Figure("Constant regions, small batches", epochs.constant_small),
    "adaptive-sgd": Figure("Adaptive regions, SGD", functools.partial(epochs.adaptive, optimizer="sgd")),
    "adaptive-momentum": Figure("Adaptive regions, momentum", functools.partial(epochs.adaptive, optimizer="momentum")),
    "adaptive-adam": Figure("Adaptive regions, Adam", functools.partial(epochs.adaptive, optimizer="adam")),
    "rates": Figure("Learning rates", rates.draw),
    "carry": Figure("Carry, radius and gradient during training", carry.draw),
    "outcomes": Figure("How runs ended", outcomes.draw),
}
"""Of epochs to a target, in the order of the report."""
IMAGES: Mapping[str, Figure] = {
    "accuracy": Figure("The best accuracy of every way of clipping", images.accuracy),
    "trajectory": Figure("One run: norms and loss", carry.trajectory),
}
"""Of the best accuracy."""
TRIALS: Mapping[str, Figure] = {
    "worth": Figure("Every method at every learning rate, and against plain clipping", trials.worth),
    "course": Figure("Over training", trials.course),
    "frozen": Figure("Bias against the radius", trials.frozen),
}
"""Of trials; the last where weights stay where they are, and only there."""


def draw(name: str, summary: Summary) -> Drawn | None:
    """One figure of the study's kind; None if the study has nothing for it."""
    import matplotlib

    from carryclip_lab.analysis.kinds import kind_of  # which names the tables above

    with matplotlib.rc_context(RC):
        return kind_of(summary).figures[name].draw(summary)
