"""A tiny run for the tests: in this process, or as a program that is killed, stopped or multiplied."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.train import Interrupted, Recipe, Record, fit
from lowrank_cnn.train.failure import StopRequest
from lowrank_cnn.train.loop import Trainer
from lowrank_cnn.train.step import TrainingStep
from lowrank_cnn.train.trained import Trained, load_checkpoint

STATEFUL = Recipe(
    name="stateful",
    batch_size=16,
    epochs=45,
    lr=0.05,
    schedule="paper",
    holdout=0.2,
    patience=20,
    levels=9,
    ema=0.9,
    crop=6,
    pad=1,
    mirror=False,
)
"""Touches every kind of state a checkpoint holds: dropout, batch norm, average, level-off, random crops."""

PLAIN = Recipe(name="plain", batch_size=16, epochs=3, lr=0.05, mirror=False)


def tiny_data(n: int = 80) -> Data:
    """Noisy 8x8 images of two bright quadrants: four classes, learnt in seconds."""

    def split(count: int, seed: int) -> ResidentSplit:
        draw = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 4
        images = torch.randint(0, 100, (count, 1, 8, 8), generator=draw)
        for quadrant in range(4):
            top, left = 4 * (quadrant // 2), 4 * (quadrant % 2)
            images[labels == quadrant, :, top : top + 4, left : left + 4] += 120
        return ResidentSplit.of(images.to(torch.uint8), labels)

    return Data("tiny", ("nw", "ne", "sw", "se"), split(n, 0), split(24, 1))


def tiny_net(*, stateful: bool = False, seed: int = 0) -> nn.Sequential:
    """A small conv net; stateful: with batch norm and dropout."""
    torch.manual_seed(seed)
    extras = [nn.BatchNorm2d(4), nn.Dropout(0.2)] if stateful else []
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *extras, nn.ReLU(), *head)


def normed() -> nn.Sequential:
    """A conv with batch norm, and one for five classes."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batch() -> tuple[Tensor, Tensor]:
    """Images for it, and their classes."""
    draw = torch.Generator().manual_seed(1)
    images = torch.randn(8, 3, 6, 6, generator=draw).contiguous(memory_format=torch.channels_last)
    return images, torch.arange(8) % 5


def make_step(net: nn.Module, recipe: Recipe) -> TrainingStep:
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return TrainingStep(net, net, lambda loss: loss.backward(), recipe, torch.device("cpu"))


def train(out: Path | None, recipe: Recipe = STATEFUL, **options) -> tuple[nn.Module, Record]:
    """The run that all tests share."""
    network = tiny_net(stateful=recipe is STATEFUL)
    options = {"progress": False, "device": "cpu", **options}
    return network, fit(network, tiny_data(), recipe, out=out, **options)


def load_best(directory: Path) -> Trained:
    """The best weights of a plain run."""
    return load_checkpoint(directory, best=True, network=tiny_net())


def last_weights(directory: Path) -> dict[str, Tensor]:
    """What the last checkpoint of a run holds."""
    from safetensors.torch import load_file

    return load_file(max(directory.glob("step-*.safetensors")))


def newest(directory: Path) -> int:
    """The iteration of the newest checkpoint, -1 before there is one."""
    return max((int(path.stem[5:]) for path in directory.glob("step-*.json")), default=-1)


def train_as_one_of_many(out: Path, dies_at: int | None) -> None:
    """One process of a run of several; the second may die at an iteration."""
    look_around = Trainer._look_around

    def die(self: Trainer, stop: StopRequest) -> None:
        if self.iteration == dies_at and self.fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        look_around(self, stop)

    Trainer._look_around = die
    train(out, PLAIN, resume=True, checkpoint_every=0.0)


def train_endlessly(out: Path) -> None:
    try:
        train(out, progress=True, epochs=100_000)
    except Interrupted as stopped:
        print(stopped, flush=True)
        sys.exit(stopped.exit_code)


def main() -> None:
    torch.set_num_threads(1)
    command, out = sys.argv[1], Path(sys.argv[2])
    if command == "processes":
        dies_at = int(sys.argv[3]) if len(sys.argv) > 3 else None
        train_as_one_of_many(out, dies_at)
    elif command == "statistics":
        from safetensors.torch import save_file

        network, _ = train(out, epochs=2)
        save_file(network.state_dict(), out.parent / f"rank{os.environ['RANK']}.safetensors")


if __name__ == "__main__":
    main()
