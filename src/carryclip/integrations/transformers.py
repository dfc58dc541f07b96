"""Hugging Face ``Trainer``: ``attach(trainer, Norm(1.0))``, or a callback."""

from typing import Any

from carryclip._checks import needs
from carryclip.carry import DEFAULT, CarryPolicy
from carryclip.groups import Regions
from carryclip.integrations.loggers import News
from carryclip.torch import UClip
from carryclip.torch._clipper import check_arguments

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise needs(
        "carryclip.integrations.transformers", "Hugging Face Transformers", "transformers accelerate", missing
    ) from missing


class UClipCallback(TrainerCallback):
    """Attach ``UClip`` when training begins, and add its metrics to the trainer's logs.

    The carry is part of the optimizer's state, so the trainer's checkpoints hold it. ``attach(trainer, ...)`` does a
    little more: it is there before a checkpoint is loaded, which a model in bfloat16 needs, and comes before the
    callbacks that report to TensorBoard and the like.

    Args:
        region: as for ``UClip``.
        carry: as for ``UClip``.
        log: add metrics to what the trainer logs.
        **options: as for ``UClip``: ``nonfinite``, ``metrics_every`` and so on.
    """

    def __init__(self, region: Regions, carry: CarryPolicy = DEFAULT, *, log: bool = True, **options: Any) -> None:
        check_arguments("UClipCallback", region, {"carry": carry, **options})
        self.region = region
        self.carry = carry
        self.log = log
        self.options = options
        self.clipper: UClip | None = None
        """There once training has begun."""
        self._news: News | None = None

    def clip(self, optimizer: Any) -> None:
        """Attach to an optimizer, unless that has been done."""
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if self.clipper is not None and self.clipper.optimizers == [inner]:
            return
        if self.clipper is not None:
            self.clipper.remove()
        self.clipper = UClip(inner, self.region, self.carry, **self.options)
        self._news = News(self.clipper)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach, if the trainer has not been told before it made its optimizer."""
        self.clip(kwargs["optimizer"])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the metrics to logs of training steps, and to the trainer's memory of them."""
        if not self.log or self._news is None or logs is None or "loss" not in logs:
            return
        found = self._news.scalars()
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


def attach(trainer: Trainer, region: Regions, carry: CarryPolicy = DEFAULT, **options: Any) -> UClipCallback:
    """Clip the gradients of a ``Trainer``; returns the callback, whose ``clipper`` is there once the optimizer is.

    Args:
        trainer: made, and not training yet.
        region: as for ``UClip``.
        carry: as for ``UClip``.
        **options: as for ``UClipCallback``.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"attach needs the Trainer, got {type(trainer).__name__}: attach(trainer, Norm(1.0)). An optimizer of your "
            "own is clipped with UClip(optimizer, Norm(1.0))."
        )
    callback = UClipCallback(region, carry, **options)
    trainer.callback_handler.callbacks.insert(0, callback)
    if trainer.optimizer is not None:
        callback.clip(trainer.optimizer)
        return callback
    make = trainer.create_optimizer

    def create_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = make(*args, **kwargs)
        callback.clip(trainer.optimizer)
        return optimizer

    trainer.create_optimizer = create_optimizer  # type: ignore[method-assign]
    return callback
