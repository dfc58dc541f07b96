"""Who steps the optimizer: found among the callers, because frameworks leave no trace on the optimizer itself."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

from carryclip.diagnosis import warn_user

_SET_UP = {
    "_init_optim_state": "torch.distributed.checkpoint",
    "initialize_optimizer_states": "deepspeed",
}
"""Functions that step with gradients of zero, only so that the optimizer makes its state; and where they are."""

_FRAMEWORKS = ("deepspeed.", "lightning.", "pytorch_lightning.", "torch.amp.", "transformers.")


def makes_state() -> bool:
    """Whether this step is none of the training: a framework takes it to have the optimizer's state made."""
    return any(
        frame.f_code.co_name in _SET_UP
        and frame.f_globals.get("__name__", "").startswith(_SET_UP[frame.f_code.co_name])
        for frame in _frames()
    )


def owners() -> Iterator[Any]:
    """The objects of frameworks whose methods are being run, from the innermost. Costs some time: ask once."""
    for frame in _frames():
        code = frame.f_code
        if code.co_varnames[: min(code.co_argcount, 1)] != ("self",):
            continue
        if not frame.f_globals.get("__name__", "").startswith(_FRAMEWORKS):
            continue
        names = frame.f_locals
        owner = names.get("self")
        if type(names) is dict:
            # Before Python 3.13 this is a copy that the frame keeps, and with it a batch, until the training is over.
            names.clear()
        if owner is not None:
            yield owner


def calling_scaler() -> Any:
    """The ``GradScaler`` that is just stepping the optimizer, if one is."""
    scalers = (owner for owner in owners() if isinstance(owner, torch.amp.GradScaler) and owner.is_enabled())
    return next(scalers, None)


def warn_of_clipping() -> None:
    """Warn if a trainer among the callers clips as well; the outermost counts, which sets up those inside it."""
    found = [said for owner in owners() if (said := _clips(owner)) is not None]
    if found:
        who, remedy = found[-1]
        warn_user(f"{who} before U-Clip does, and throws away what the carry should keep: set {remedy}.")


def _clips(owner: Any) -> tuple[str, str] | None:
    """How a trainer says that it clips, and what switches that off."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(owner).__mro__}
    if ("transformers", "Trainer") in kinds and owner.args.max_grad_norm:
        limit = owner.args.max_grad_norm
        return f"The trainer clips to max_grad_norm={limit:g}", "TrainingArguments(max_grad_norm=0.0)"
    if kinds & {("lightning", "Trainer"), ("pytorch_lightning", "Trainer")} and owner.gradient_clip_val:
        limit = owner.gradient_clip_val
        return f"Trainer(gradient_clip_val={limit}) clips", "Trainer(gradient_clip_val=None)"
    if ("deepspeed", "DeepSpeedEngine") in kinds and owner.gradient_clipping():
        limit = owner.gradient_clipping()
        return f"DeepSpeed's gradient_clipping={limit:g} clips", '"gradient_clipping": 0 in its configuration'
    return None


def _frames() -> Iterator[FrameType]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
