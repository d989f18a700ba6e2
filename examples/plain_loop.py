"""Convert a model of your own, train it in a plain PyTorch loop, and make it fast.

python examples/plain_loop.py                       # 3 epochs on 4,000 real digits, no download
python examples/plain_loop.py --compile --amp       # through torch.compile, in bfloat16
torchrun --nproc-per-node 2 examples/plain_loop.py --parallel ddp
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import lowrank_cnn as lr


def make() -> nn.Module:
    """A small dense network: replace it by your own."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    return nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 32), *head)


def digits(limit: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Real digits as tensors: images and labels to train on, then to test on."""
    data = lr.open_data("digits", limit=limit)
    train, test = data.train, data.test
    return train.images.float() / 255 - 0.13, train.labels, test.images.float() / 255 - 0.13, test.labels


def parallel(model: nn.Module, kind: str) -> nn.Module:
    """Wrap a model for several processes; a converted model needs nothing special."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        return fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, amp: bool, batch: int = 32) -> None:
    steps = epochs * (len(images) // batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=max(1, steps))
    model.train()
    for _ in range(epochs):
        order = torch.randperm(len(images))
        for part in order.split(batch)[: len(images) // batch]:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = F.cross_entropy(model(images[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()


def main() -> None:
    options = argparse.ArgumentParser(description="Convert, train and optimise a model in a plain loop.")
    options.add_argument("--scheme", default="lr-join")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--limit", type=int, default=4000)
    options.add_argument("--amp", action="store_true", help="train in bfloat16")
    options.add_argument("--compile", action="store_true", help="train through torch.compile")
    options.add_argument("--parallel", choices=["none", "ddp", "fsdp"], default="none", help="under torchrun")
    chosen = options.parse_args()

    if chosen.parallel != "none":
        dist.init_process_group("gloo")
    rank = int(os.environ.get("RANK", 0))
    torch.manual_seed(rank)  # every process draws its own batches
    images, labels, test_images, test_labels = digits(chosen.limit)

    dense = make()
    network = lr.convert(dense, chosen.scheme, where=lambda name, conv: conv.in_channels > 1)
    cost = lr.conversion_costs(dense, network, (1, 28, 28))[-1]
    running = parallel(network, chosen.parallel)
    running = torch.compile(running) if chosen.compile else running
    train(running, images, labels, epochs=chosen.epochs, amp=chosen.amp)
    if chosen.parallel == "fsdp":  # sharded parameters are gathered by the model itself
        found = accuracy(running, test_images, test_labels)
    else:
        found = accuracy(network, test_images, test_labels)
    if rank == 0:
        print(f"{found:.1%} of {len(test_labels)} digits, {cost.macs_after / cost.macs_before:.2f} of the MACs")
    if chosen.parallel == "none":
        fast = lr.optimize(network.eval(), test_images[:1], compile=False, repeats=3)
        print(f"{fast.report.choice}: {fast.report.times[fast.report.choice].ms:.3f} ms an image")
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
