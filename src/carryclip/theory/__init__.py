"""The theory of U-Clip as functions: bounds with their conditions, and simulation through the shipped algorithm.

    bounds      how large the carry gets and what it costs, one function per result
    delay       how many steps of gradients the full carry mixes into an update
    noise       noise laws: draws, and what the bounds need to know of them
    problems    objectives: the paper's, and any of your own
    simulate    many seeds at once

Needs NumPy alone.
"""

from carryclip.theory import bounds, delay, noise, problems, simulate

__all__ = ["bounds", "delay", "noise", "problems", "simulate"]
