"""Lightning: one callback, and the carry is in Lightning's own checkpoints.

From a clone: pip install ".[frameworks]"
python examples/lightning_digits.py
"""

import logging
import tempfile

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from carryclip import Norm
from carryclip.integrations.lightning import UClipCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Digits(lightning.LightningModule):
    """A small network for 8x8 digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        """The loss of a batch."""
        images, labels = batch
        scores = self.net(images)
        self.log("accuracy", (scores.argmax(1) == labels).float().mean(), prog_bar=True)
        return nn.functional.cross_entropy(scores, labels)

    def configure_optimizers(self):
        """Any optimizer will do."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    lightning.seed_everything(0, verbose=False)
    clip = UClipCallback(Norm(0.2))  # the line that matters
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=8,
            accelerator="cpu",
            callbacks=[clip],
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(), DataLoader(data, batch_size=32, shuffle=True))
        saved = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    entries = saved["optimizer_states"][0]["state"][0]
    shown = {name: float(trainer.callback_metrics[name]) for name in ("accuracy", "uclip/carry/norm")}
    print(f"accuracy of the last batch {shown['accuracy']:.2f}; carry {shown['uclip/carry/norm']:.3f}")
    print(f"the checkpoint holds {sorted(name for name in entries if name.startswith('uclip'))}")


if __name__ == "__main__":
    main()
