"""The table of figures: each a function from a study's summary to picture, caption and numbers."""

import functools
from collections.abc import Mapping

from carryclip_lab.analysis.summary import Summary
from carryclip_lab.figures import carry, epochs, faster, images, outcomes, rates, ratios, regions, trials
from carryclip_lab.figures.drawn import Drawn, Figure
from carryclip_lab.figures.style import RC

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
IMAGES: Mapping[str, Figure] = {
    "accuracy": Figure("The best accuracy of every way of clipping", images.accuracy),
    "trajectory": Figure("One run: norms and loss", images.trajectory),
}
"""The same for ImageNet."""
TRIALS: Mapping[str, Figure] = {
    "worth": Figure("Every method at every learning rate, and against plain clipping", trials.worth),
    "course": Figure("Over training", trials.course),
}
"""The same for trials."""
FROZEN: Mapping[str, Figure] = {"frozen": Figure("Bias against the radius", trials.frozen)}
"""The same where weights stay where they are."""


def figures_of(summary: Summary) -> Mapping[str, Figure]:
    """Those that suit a study."""
    if summary.task == "imagenet":
        return IMAGES
    if summary.subject is not None:
        return FROZEN if summary.subject.kind == "frozen" else TRIALS
    return FIGURES


def draw(name: str, summary: Summary) -> Drawn | None:
    """One figure of the table; None if the study has nothing for it."""
    import matplotlib

    with matplotlib.rc_context(RC):
        return figures_of(summary)[name].draw(summary)
