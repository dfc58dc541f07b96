"""The table of figures: each a function from a study's summary to picture, caption and numbers."""

import functools
from collections.abc import Mapping

from carryclip.experiments.analysis.summary import Summary
from carryclip.experiments.figures import carry, epochs, faster, outcomes, rates, ratios, regions
from carryclip.experiments.figures.drawn import Drawn, Figure
from carryclip.experiments.figures.style import RC

FIGURES: Mapping[str, Figure] = {
    "epochs": Figure("Epochs to the target against batch size", epochs.draw),
    "faster": Figure("The chance that U-Clip needs fewer epochs", faster.draw),
    "ratios": Figure("Every setting against its optimizer alone", ratios.draw),
    "constant": Figure("Constant regions", regions.constant),
    "constant-small": Figure("Constant regions, small batches", regions.constant_small),
    "adaptive-sgd": Figure("Adaptive regions, SGD", functools.partial(regions.adaptive, optimizer="sgd")),
    "adaptive-momentum": Figure(
        "Adaptive regions, momentum", functools.partial(regions.adaptive, optimizer="momentum")
    ),
    "adaptive-adam": Figure("Adaptive regions, Adam", functools.partial(regions.adaptive, optimizer="adam")),
    "rates": Figure("Learning rates", rates.draw),
    "carry": Figure("Carry, radius and gradient during training", carry.draw),
    "outcomes": Figure("How runs ended", outcomes.draw),
}
"""In the order of the report."""


def draw(name: str, summary: Summary) -> Drawn | None:
    """One figure of the table; None if the study has nothing for it."""
    import matplotlib

    with matplotlib.rc_context(RC):
        return FIGURES[name].draw(summary)
