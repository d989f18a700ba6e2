"""What a figure may be given: records, or a network from its name, its shipped weights or a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowrank_cnn.models import create_model, list_pretrained
from lowrank_cnn.models.network import Network
from lowrank_cnn.report.datasets import data_label
from lowrank_cnn.report.records import Records
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import note


@dataclass(frozen=True)
class FigureOptions:
    """The records of runs, a network's name, or the checkpoint of a run; figures take what they can use.

    `pretrained` names the data set whose weights, of those that come with the package, a named network gets.
    `into` is the unconverted network of a checkpoint that is not of one of our networks.
    """

    records: Records | None = None
    model: str | None = None
    checkpoint: str | Path | None = None
    seed: int = 0
    pretrained: str | None = None
    into: nn.Module | None = None

    def network(self, default: str) -> tuple[str, nn.Module]:
        """The network asked for, with what to call it; untrained where only its name is given."""
        if self.model and self.checkpoint:
            raise LowRankError("give a model's name or a checkpoint, not both.")
        if self.checkpoint and self.pretrained:
            raise LowRankError("a checkpoint has its own weights: give it or --pretrained, not both.")
        if self.checkpoint:
            network = load_trained(self.checkpoint, self.into)
            return f"{network_name(network)}, trained", network
        return self.named(self.model or default)

    def named(self, name: str, *, trained: bool = True, **options: Any) -> tuple[str, nn.Module]:
        """A network by its name: trained where weights are asked for, else as it is before training."""
        if trained and self.pretrained:
            label = f"{name}, trained on {data_label(self.pretrained)}"
            return label, create_model(name, pretrained=self.pretrained).eval()
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return f"{name}, as initialised", create_model(name, **options)

    def has_weights(self, name: str) -> bool:
        return self.pretrained is not None and (name, self.pretrained) in list_pretrained()


def load_trained(path: str | Path, into: nn.Module | None = None) -> nn.Module:
    """The network of a run's checkpoint, in evaluation mode, for images as it was trained on."""
    # Loaded when asked for: it brings the data and training parts along.
    from lowrank_cnn.train.evaluation import load_checkpoint

    trained = load_checkpoint(path, network=into)
    note(trained.network, input_size=trained.input_size)
    return trained.network.eval()


def network_name(network: nn.Module) -> str:
    return str(network.config["name"]) if isinstance(network, Network) else type(network).__name__
