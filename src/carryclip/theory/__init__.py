"""The theory of U-Clip as functions: bounds with their conditions, and simulation through the shipped algorithm.

    bounds      how large the carry gets and what it costs, one function per result of the paper and sharper ones
    radii       the same for radii that follow the gradients: their RMS, their noise, estimated moments
    policies    what the carry policies drop, keep and forget
    nonconvex   smooth objectives that are not convex
    rates       learning rates that change, and one that tunes itself
    paths       recorded gradients: how large the carry would have been, for any radius
    optimizers  minibatches, momentum, preconditioners, delayed feedback
    delay       how many steps of gradients the full carry mixes into an update
    noise       noise laws: draws, and what the bounds need to know of them
    problems    objectives: the paper's, and any of your own
    simulate    many seeds at once

Needs NumPy alone.
"""

from carryclip.theory import (
    bounds,
    delay,
    noise,
    nonconvex,
    optimizers,
    paths,
    policies,
    problems,
    radii,
    rates,
    simulate,
)

__all__ = [
    "bounds",
    "delay",
    "noise",
    "nonconvex",
    "optimizers",
    "paths",
    "policies",
    "problems",
    "radii",
    "rates",
    "simulate",
]
