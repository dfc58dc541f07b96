"""The one place where tests reach into the torch front end: how a step is done, and the scalars it keeps."""

from typing import Any


def stepper(clipper: Any) -> Any:
    """What runs the steps of a ``UClip`` or a ``LocalUClip``."""
    return clipper._stepper if hasattr(clipper, "_stepper") else clipper._session.stepper


def force(clipper: Any, **how: Any) -> None:
    """Make steps go a certain way; see ``carryclip.torch._bundles.Tuning`` for what can be set.

    ``way="pure"`` takes the pure functions only, ``host=False`` behaves as on a device whose values cannot be read
    without waiting, ``small``, ``worth`` and ``chunk`` are sizes at which tensors are packed, compiled and cut.
    """
    tuning = stepper(clipper).planner.tuning
    for name, value in how.items():
        assert hasattr(tuning, name), name
        setattr(tuning, name, value)


def as_on_a_device(clipper: Any) -> None:
    """As on a device whose values cannot be read without waiting."""
    force(clipper, host=False)


def ledger(clipper: Any) -> Any:
    """Steps, skips, dropped mass and the gates' memory."""
    return clipper._stage.ledger if hasattr(clipper, "_stage") else clipper._session.ledger
