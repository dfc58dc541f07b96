"""Lightning: ``Trainer(callbacks=[UClipCallback(Norm(1.0))])``."""

from typing import Any

from carryclip.diagnosis import warn_user
from carryclip.integrations.loggers import scalars
from carryclip.torch import UClip

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the older name of the same package
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[no-redef]


class UClipCallback(Callback):  # type: ignore[misc]
    """Attach ``UClip`` to the optimizers of a ``Trainer``, and log its metrics through the trainer's loggers.

    The carry is part of the optimizers' state, so Lightning's checkpoints hold it.

    Args:
        region: as for ``UClip``.
        carry: as for ``UClip``.
        together: clip several optimizers as one vector; by default each by itself.
        log: log metrics every ``Trainer(log_every_n_steps=...)`` steps.
        **options: as for ``UClip``: ``nonfinite``, ``metrics_every`` and so on.
    """

    def __init__(
        self, region: Any, carry: Any = True, *, together: bool = False, log: bool = True, **options: Any
    ) -> None:
        self.region = region
        self.carry = carry
        self.together = together
        self.log = log
        self.options = options
        self.clippers: list[UClip] = []
        """One for each optimizer, or one for all; there from the start of ``fit`` on."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: the optimizers exist, and a checkpoint has not been loaded into them yet."""
        if trainer.gradient_clip_val:
            warn_user(
                f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) clips before U-Clip does, and throws away "
                "what the carry should keep: set Trainer(gradient_clip_val=None)."
            )
        for clipper in self.clippers:  # of an earlier fit
            clipper.remove()
        optimizers: list[Any] = list(trainer.optimizers)
        targets: list[Any] = [optimizers] if self.together else optimizers
        self.clippers = [UClip(target, self.region, self.carry, **self.options) for target in targets]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log what was measured since the last time."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not self.log or trainer.global_step == 0 or trainer.global_step % every:
            return
        for number, clipper in enumerate(self.clippers):
            prefix = "uclip" if len(self.clippers) == 1 else f"uclip/{number}"
            pl_module.log_dict(scalars(clipper.metrics(), prefix), on_step=True, on_epoch=False)
