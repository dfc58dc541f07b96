"""Lightning: ``Trainer(callbacks=[UClipCallback(Norm(1.0))])``."""

from typing import Any

from carryclip._checks import needs
from carryclip.carry import DEFAULT, CarryPolicy
from carryclip.groups import Regions
from carryclip.integrations.loggers import News
from carryclip.torch import UClip
from carryclip.torch._clipper import check_arguments

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    try:  # the older name of the same package
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[no-redef]
    except ImportError:
        raise needs("carryclip.integrations.lightning", "Lightning", "lightning", missing) from missing


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
        self, region: Regions, carry: CarryPolicy = DEFAULT, *, together: bool = False, log: bool = True, **options: Any
    ) -> None:
        check_arguments("UClipCallback", region, {"carry": carry, **options})
        self.region = region
        self.carry = carry
        self.together = together
        self.log = log
        self.options = options
        self.clippers: list[UClip] = []
        """One for each optimizer, or one for all; there from the start of ``fit`` on."""
        self._news: list[News] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach: the optimizers exist, and a checkpoint has not been loaded into them yet."""
        for clipper in self.clippers:  # of an earlier fit
            clipper.remove()
        optimizers: list[Any] = list(trainer.optimizers)
        targets: list[Any] = [optimizers] if self.together else optimizers
        self.clippers = [UClip(target, self.region, self.carry, **self.options) for target in targets]
        prefixes = ["uclip"] if len(targets) == 1 else [f"uclip/{number}" for number in range(len(targets))]
        self._news = list(map(News, self.clippers, prefixes))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Log what was measured since the last time."""
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not self.log or trainer.global_step == 0 or trainer.global_step % every:
            return
        for news in self._news:
            found = news.scalars()
            pl_module.log_dict(found, on_step=True, on_epoch=False, logger=False)  # for other callbacks
            for logger in trainer.loggers:
                # By way of the module the trainer would repeat the last figures at every later step that it logs.
                logger.log_metrics(found, step=trainer.fit_loop.epoch_loop._batches_that_stepped)
