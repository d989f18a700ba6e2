"""One update of the weights, during which the host never waits for the device.

The learning rate, the tally of losses and hits, and the mark that halts training at a gradient that is not
finite are all tensors on the device. The same step therefore runs eagerly anywhere, and on a CUDA device can
be recorded once as a graph and replayed, with Python only copying the next batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.compare import difference, unchanged
from lowrank_cnn.core.environment import is_out_of_memory
from lowrank_cnn.core.errors import LowRankError, first_line, setting
from lowrank_cnn.core.modules import batch_length, call
from lowrank_cnn.graph.fuse import fuse, shared_copy
from lowrank_cnn.kernels import forced
from lowrank_cnn.kernels.autotune.choice import prepare
from lowrank_cnn.kernels.cuda_graph import captured
from lowrank_cnn.kernels.device import for_graphs
from lowrank_cnn.method.branches import DenseHelpers
from lowrank_cnn.train.distributed import generator_states, restore_generators
from lowrank_cnn.train.int8 import range_states
from lowrank_cnn.train.objective import Objective, hits
from lowrank_cnn.train.optimizers import Optimizer, look_ahead
from lowrank_cnn.train.recipe import Recipe

_SCALE, _INT8 = "scale.", "int8."


@dataclass(frozen=True)
class Tally:
    """Sums of an epoch so far, read from the device."""

    loss: float
    correct: float
    images: float
    steps: int
    halted: bool


class TrainingStep:
    """Forward, loss, backward, update and moving average, for one batch.

    After a gradient that is not finite every later update is skipped, so that the weights that caused it stay. In
    fp16 the loss is scaled so that small gradients do not vanish; a step whose gradients overflow is skipped, and
    the scale is halved.
    """

    def __init__(
        self,
        network: nn.Module,
        forward: Callable[..., Any],
        backward: Callable[[Tensor], None],
        recipe: Recipe,
        device: torch.device,
        *,
        objective: Objective | None = None,
        scaled: bool = False,
    ) -> None:
        self.forward, self.backward, self.recipe = forward, backward, recipe
        self.objective = objective or Objective(recipe)
        self.halted, self.skipped = torch.zeros((), device=device), torch.zeros((), device=device)
        self.scaler = LossScale(device) if scaled else None
        self.sums = torch.zeros(4, device=device)
        self.parameters = dict(network.named_parameters())
        self.optimizer = Optimizer(network, recipe, self.skipped)
        state = {name: t.detach() for name, t in network.state_dict().items()}
        self.weights = {name: t for name, t in state.items() if DenseHelpers.NAME not in name}
        self.helpers = {f"helper.{name}": t for name, t in state.items() if name not in self.weights}
        averaging = recipe.ema or recipe.lookahead
        self.averages = {name: t.clone() for name, t in self.weights.items()} if averaging else {}
        self.blend = torch.ones((), device=device)
        self.ranges = {f"{_INT8}{name}": state for name, state in range_states(network).items()}

    def __call__(self, images: Any, targets: Any) -> None:
        self.optimizer.zero_grad()
        parts, batches = self.recipe.accumulate, [(images, targets)]
        if parts > 1:  # gradients of equal parts of the batch are added up
            if not isinstance(targets, Tensor):
                raise LowRankError(f"accumulate needs one tensor of targets: set {setting('accumulate', 1)}.")
            batches = zip(images.chunk(parts), targets.chunk(parts), strict=True)
        shown = torch.zeros_like(self.halted)
        for some, wanted in batches:
            outputs = call(self.forward, some)
            loss, told = self.objective(outputs, wanted, some)
            loss = loss / parts
            self.backward(loss * self.scaler.scale if self.scaler else loss)
            shown += told / parts
            length = batch_length(some)
            right = hits(outputs, wanted, blended=self.objective.loss is None, output=self.recipe.output)
            correct = torch.zeros_like(told) if right is None else right.to(told.dtype)
            self.sums[:3] += torch.stack([told * length, correct, torch.full_like(told, length)]).float()
        self._update(shown)
        self.sums[3] += 1 - self.halted

    def prepare(self, rate: float, iteration: int, *, epochs: float = 0.0) -> None:
        """Set what changes from step to step: the learning rates and the weight of the moving average.

        The average follows quickly at first, to forget the random start. Lookahead happens between steps, and
        not in the part that a CUDA graph repeats; `epochs` is the number of epochs trained so far.
        """
        self.optimizer.set_rate(rate)
        if self.recipe.lookahead and iteration and iteration % self.recipe.lookahead == 0:
            # Little of the slow weights stays at first, and the whole share at the end of the run.
            decay = self.recipe.lookahead_decay * (epochs / self.recipe.epochs) ** 3
            look_ahead(self.weights, self.averages, decay)
        if self.recipe.ema:
            self.blend.fill_(1 - min(self.recipe.ema, (1 + iteration) / (10 + iteration)))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that a step changes, by the name it has in a checkpoint."""
        parts = {"model": self.weights, "average": self.averages}
        named = {f"{part}.{name}": t for part, group in parts.items() for name, t in group.items()}
        scale = {f"{_SCALE}factor": self.scaler.scale, f"{_SCALE}good": self.scaler.good} if self.scaler else {}
        sums = {"tally.sums": self.sums, "tally.halted": self.halted}
        return named | self.optimizer.tensors() | scale | sums | self.ranges | self.helpers

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Take the tensors of a checkpoint. One of another precision may lack the loss scale or ranges of int8."""
        names = [name for name in self.tensors() if name in saved or not name.startswith((_SCALE, _INT8))]
        copy_into(self.tensors(), {name: saved[name] for name in names})

    def statistics(self) -> list[Tensor]:
        """Statistics, such as those of batch norms, which have no gradients, and their moving averages."""
        groups = (self.weights, self.averages)
        return [t for group in groups for name, t in group.items() if name not in self.parameters]

    def read_tally(self, add_up: Callable[[Tensor], Tensor] = Tensor.clone) -> Tally:
        """Wait for the device and read the sums, added up over processes where asked to."""
        sums = torch.cat([self.sums, self.halted[None], torch.ones_like(self.halted)[None]])
        loss, correct, images, steps, halted, processes = add_up(sums).tolist()
        return Tally(loss, correct, images, int(steps / processes), halted > 0)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Run the block with the averaged weights, if the recipe keeps any."""
        own = {name: self.weights[name].clone() for name in self.averages}
        copy_into(self.weights, self.averages)
        try:
            yield
        finally:
            copy_into(self.weights, own)

    @torch.no_grad()
    def _update(self, loss: Tensor) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self.scaler:
            torch._foreach_mul_(gradients, 1 / self.scaler.scale)  # pyright: ignore
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        bad = (~(norm + loss).isfinite()).float()
        self.halted.copy_(torch.maximum(self.halted, self.scaler.update(bad) if self.scaler else bad))
        self.skipped.copy_(torch.maximum(self.halted, bad))
        if self.recipe.clip_norm:
            nn.utils.clip_grads_with_norm_(self.parameters.values(), self.recipe.clip_norm, norm, foreach=True)
        self.optimizer.step()
        if self.recipe.ema:
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


class LossScale:
    """The factor that keeps gradients in fp16's range: halved at an overflow, doubled after many good steps."""

    FIRST, GROW_AFTER, LEAST = 2.0**16, 1000, 2.0**-10

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), self.FIRST, device=device)
        self.good = torch.zeros((), device=device)

    def update(self, bad: Tensor) -> Tensor:
        """Adapt to a step; returns 1 once the scale is so small that the network itself is not finite."""
        self.good.copy_((self.good + 1) * (1 - bad))
        grows = (self.good >= self.GROW_AFTER).float()
        self.good.mul_(1 - grows)
        self.scale.mul_((1 - 0.5 * bad) * (1 + grows))
        return (self.scale < self.LEAST).float()


class GraphedStep:
    """The same step, recorded as a CUDA graph: a call copies the batch and replays."""

    def __init__(self, step: TrainingStep, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images.clone(), labels.clone()
        self.step = step  # the graph alone would not keep the weights that it reads and writes
        with for_graphs(), contextlib.ExitStack() as changes:
            changes.enter_context(put_back(step.tensors().values(), images.device))

            def undo() -> None:
                changes.close()
                step.optimizer.zero_grad()

            self.graph = captured(lambda: step(self.images, self.labels), before_capture=undo).graph

    def __call__(self, images: Tensor, labels: Tensor) -> None:
        self.images.copy_(images, non_blocking=True)
        self.labels.copy_(labels, non_blocking=True)
        self.graph.replay()


@torch.no_grad()
def copy_into(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
    """Copy by name, in place: graphs and optimisers keep the tensors they know."""
    for name, source in sources.items():
        targets[name].copy_(source)


@contextlib.contextmanager
def put_back(
    tensors: Iterable[Tensor], device: torch.device, *, after: type[BaseException] | None = None
) -> Iterator[None]:
    """Run the block, then restore the tensors and the random generators; with `after` only if it raises that."""
    before, drawn = [(tensor, tensor.clone()) for tensor in tensors], generator_states(device)
    undo = after is None
    try:
        yield
    except BaseException as error:
        undo = after is None or isinstance(error, after)
        raise
    finally:
        if undo:
            with torch.no_grad():
                for tensor, value in before:
                    tensor.copy_(value)
            restore_generators(drawn, device)


def build_update(
    step: TrainingStep,
    images: Tensor,
    labels: Tensor,
    *,
    graphs: bool,
    compiled: bool = False,
    say: Callable[[str], None] = print,
) -> TrainingStep | GraphedStep:
    """The update for batches of this shape: a CUDA graph if `graphs` allows one and the step can be recorded."""
    if not graphs:
        return step
    try:
        # Kernels are measured and compiled before torch traces, which can do neither.
        with for_graphs():
            with (
                put_back(step.tensors().values(), images.device),
                torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext(),
            ):
                prepare(lambda: step.forward(images))
                if compiled:
                    step(images, labels)
            return GraphedStep(step, images, labels)
    except RuntimeError as error:
        if is_out_of_memory(error) or compiled:
            raise
        say(f"Steps run one kernel at a time, not as a CUDA graph: {first_line(error)}.")
        return step


TOLERANCE = 1e-3
IMAGES = 4
"""Images of the comparison. Fewer would make a batch norm give plus and minus one on its last, smallest maps."""


def fused_to_train(network: nn.Module, size: Sequence[int], say: Callable[[str], None] = print) -> nn.Module:
    """A copy that shares all parameters and runs its layers fused, or the network itself.

    A forward may ask a layer for an attribute that its fused form lacks, or depend on its class. Both networks
    therefore run on the same random images first: results and gradients must agree.
    """
    try:
        twin = fuse(shared_copy(network).train(), say=say)
        with forced("off"), unchanged(network, twin):  # both by torch's operations
            images = torch.randn(IMAGES, *size, device=next(network.parameters()).device)
            seed = torch.seed()
            right, ours = (_results(part.train(), images, network, seed) for part in (network, twin))
        apart = difference(ours, right, by="norm")
    except Exception as error:  # a user's forward may fail in any way
        say(f"Layers are not fused: {first_line(error)}")
        return network
    if apart <= TOLERANCE:
        return twin.train()
    say(f"Layers are not fused: the results would differ by {apart:.1g}.")
    return network


def _results(run: nn.Module, images: Tensor, network: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """A network's outputs for images, and the gradients of a weighted sum of these, each as one vector."""
    torch.manual_seed(seed)  # dropout draws the same for both
    with torch.enable_grad():
        found = run(images)
        outputs = torch.cat([part.flatten() for part in (found if isinstance(found, tuple) else (found,))])
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        some = torch.linspace(-1, 1, outputs.numel(), device=outputs.device, dtype=outputs.dtype)
        gradients = torch.autograd.grad((outputs * some).sum(), parameters, allow_unused=True)
    known = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
    return outputs.detach(), torch.cat([gradient.flatten() for gradient in known])
