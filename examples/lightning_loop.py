"""The same with Lightning: convert a model of your own, let the Trainer train it, and make it fast.

pip install pytorch-lightning
python examples/lightning_loop.py
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from plain_loop import accuracy, digits, make
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lowrank_cnn as lr


class Classifier(pl.LightningModule):
    """Any classifier; nothing in it knows of low-rank layers."""

    def __init__(self, network: nn.Module, steps: int) -> None:
        super().__init__()
        self.network, self.steps = network, steps

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    options = argparse.ArgumentParser(description="Convert, train and optimise a model with Lightning.")
    options.add_argument("--scheme", default="lr-join")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--limit", type=int, default=4000)
    chosen = options.parse_args()

    pl.seed_everything(0, verbose=False)
    images, labels, test_images, test_labels = digits(chosen.limit)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True, drop_last=True)
    network = lr.convert(make(), chosen.scheme, where=lambda name, conv: conv.in_channels > 1)
    classifier = Classifier(network, chosen.epochs * len(loader))
    trainer = pl.Trainer(
        max_epochs=chosen.epochs, logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    trainer.fit(classifier, loader)
    network = network.cpu()
    print(f"{accuracy(network, test_images, test_labels):.1%} of {len(test_labels)} digits")
    fast = lr.optimize(network.eval(), test_images[:1], compile=False, repeats=3)
    print(f"{fast.report.choice}: {fast.report.times[fast.report.choice].ms:.3f} ms an image")


if __name__ == "__main__":
    main()
