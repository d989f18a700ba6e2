"""One update of the weights, written so that nothing in it waits for the device.

The learning rate, the tally of losses and hits, and the mark that halts training at a gradient that is not
finite are all tensors on the device. The same step therefore runs eagerly anywhere, and on a CUDA device can
be recorded once as a graph and replayed, with Python only copying the next batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.mode import for_graphs
from lowrank_cnn.train.randomness import generator_states, restore_generators
from lowrank_cnn.train.recipe import Recipe


@dataclass(frozen=True)
class Tally:
    """Sums since the tally was last cleared, read from the device."""

    loss: float
    correct: float
    images: float
    steps: int
    halted: bool


class Step:
    """Forward, loss, backward, SGD with momentum, moving average, for one batch.

    Once a gradient is not finite every later update is skipped, so the weights stay those that met it.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[[Tensor], Tensor | tuple[Tensor, ...]],
        backward: Callable[[Tensor], None],
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.forward, self.backward, self.recipe = forward, backward, recipe
        self.rate = torch.zeros((), device=device)
        self.halted = torch.zeros((), device=device)
        self.sums = torch.zeros(4, device=device)
        self.parameters = dict(network.named_parameters())
        self.optimizer = make_optimizer(list(self.parameters.values()), recipe, self.rate, self.halted)
        self.weights = {name: t.detach() for name, t in network.state_dict().items()}
        self.averages = {name: t.clone() for name, t in self.weights.items()} if recipe.ema else {}
        self.blend = torch.ones((), device=device)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        outputs = self.forward(images)
        logits, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = self._loss(logits, labels)
        self.backward(loss + self.recipe.aux_weight * sum(self._loss(a, labels) for a in auxiliary))
        self._update(loss.detach())
        self._count(logits.detach(), labels, loss.detach())

    def prepare(self, rate: float, iteration: int) -> None:
        """Set what changes from step to step: the learning rate and the weight of the moving average.

        The average follows quickly at first, so that the random start does not linger in it.
        """
        self.rate.fill_(rate)
        if self.averages:
            self.blend.fill_(1 - min(self.recipe.ema, (1 + iteration) / (10 + iteration)))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by the name it has in a checkpoint."""
        momentum = {name: self.optimizer.state[p]["momentum_buffer"] for name, p in self.parameters.items()}
        parts = {"model": self.weights, "momentum": momentum, "average": self.averages}
        named = {f"{part}.{name}": t for part, group in parts.items() for name, t in group.items()}
        return named | {"tally.sums": self.sums, "tally.halted": self.halted}

    def read_tally(self, add_up: Callable[[Tensor], Tensor] = Tensor.clone) -> Tally:
        """Wait for the device and read the sums, added up over processes where asked to."""
        sums = torch.cat([self.sums, self.halted[None], torch.ones_like(self.halted)[None]])
        loss, correct, images, steps, halted, processes = add_up(sums).tolist()
        return Tally(loss, correct, images, int(steps / processes), halted > 0)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The network with its averaged weights while the block lasts; with its own where none are kept."""
        own = {name: self.weights[name].clone() for name in self.averages}
        copy_into(self.weights, self.averages)
        try:
            yield
        finally:
            copy_into(self.weights, own)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.float(), labels, label_smoothing=self.recipe.label_smoothing)

    @torch.no_grad()
    def _update(self, loss: Tensor) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        self.halted.copy_(torch.maximum(self.halted, (~(norm + loss).isfinite()).float()))
        if self.recipe.clip_norm:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.recipe.clip_norm, norm, foreach=True)
        self.optimizer.step()
        if self.averages:
            self._average()

    def _average(self) -> None:
        for name, average in self.averages.items():
            if not average.is_floating_point():
                average.copy_(self.weights[name])
        names = [name for name, average in self.averages.items() if average.is_floating_point()]
        averages = [self.averages[name] for name in names]
        change = torch._foreach_sub([self.weights[name] for name in names], averages)  # pyright: ignore
        torch._foreach_mul_(change, self.blend)  # pyright: ignore
        torch._foreach_add_(averages, change)  # pyright: ignore

    @torch.no_grad()
    def _count(self, logits: Tensor, labels: Tensor, loss: Tensor) -> None:
        correct = (logits.argmax(dim=1) == labels).sum()
        seen = torch.full_like(loss, len(labels))
        self.sums += torch.stack([loss * len(labels), correct.float(), seen, 1 - self.halted])


class GraphedStep:
    """The same step, recorded as a CUDA graph: a call copies the batch and replays."""

    def __init__(self, step: Step, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.clone(), labels.clone()
        with for_graphs(), contextlib.ExitStack() as changes:
            changes.enter_context(put_back(step.tensors(), images.device))

            def undo() -> None:
                changes.close()
                step.optimizer.zero_grad(set_to_none=True)

            self.graph = captured(lambda: step(self.images, self.labels), before_capture=undo)

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.images.copy_(images, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        self.graph.replay()


def make_optimizer(
    parameters: list[nn.Parameter], recipe: Recipe, rate: Tensor, halted: Tensor
) -> torch.optim.SGD:
    """SGD in one fused kernel, weight decay on weights alone, its momentum there from the start.

    The fused kernel leaves everything as it is while `halted` is 1.
    """
    free = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in free if p.ndim > 1], "weight_decay": recipe.weight_decay},
        {"params": [p for p in free if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=rate,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        fused=True,
    )
    for parameter in parameters:
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    optimizer.found_inf = halted  # type: ignore[attr-defined]
    return optimizer


@torch.no_grad()
def copy_into(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    """Copy by name, in place: graphs and optimisers keep the tensors they know."""
    for name, source in sources.items():
        targets[name].copy_(source)


@contextlib.contextmanager
def put_back(tensors: dict[str, Tensor], device: torch.device) -> Iterator[None]:
    """Let the block change tensors and draw random numbers, then undo all of it."""
    before = {name: t.clone() for name, t in tensors.items()}
    drawn = generator_states(device)
    try:
        yield
    finally:
        copy_into(tensors, before)
        restore_generators(drawn, device)
