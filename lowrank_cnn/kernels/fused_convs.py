"""Convs as layers of the fused kernels: a composite with its activation and max-pool, trained or frozen.

`fused_layer` makes one of a conv, a composite or a chain of these. A conv is recognised by its attributes, not by
its class: `nn.Conv2d`, or any layer with `weights` and `group_padding`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from lowrank_cnn.core.modules import has_hooks, is_plain
from lowrank_cnn.kernels.autotune import choice
from lowrank_cnn.kernels.conv.pack import laid_out
from lowrank_cnn.kernels.device import asked_for, by_torch
from lowrank_cnn.kernels.dispatch import composite_conv2d, composite_conv2d_with_statistics, needs_gradient
from lowrank_cnn.kernels.problem import OVERLAPPING, Pair, Problem, Sides, canonical, pose
from lowrank_cnn.kernels.reference import compose, enclosure, placed
from lowrank_cnn.kernels.volumes import composite_conv3d, is_flat

# Train a basis and its 1x1 join as two convs, or as the equivalent dense conv.
#
# There is no activation between basis and join, so a small matrix product of their weights gives one dense conv.
# With large images and few filters, writing and reading the output of the basis costs more than the MACs that the
# dense conv adds. Its gradient flows through the matrix product to both. Measured times decide, or counts if there
# are none.

MACS_PER_MS, BYTES_PER_MS = 3e11, 4e9
"""A large GPU's rates, assumed if nothing was measured."""
MERGING_MS = 0.05
"""Time to compute the dense weight, forward and backward: about fifteen small launches in a graph."""


def merged_weight(weights: Sequence[Tensor], padding: Sequence[Sides], join: Tensor) -> tuple[Tensor, Sides]:
    """[filters, channels, height, width]: the join's mixture of the basis in full precision, and its padding."""
    starts, kernel, sides = enclosure([weight.shape for weight in weights], padding)
    parts = join.flatten(1).split([weight.shape[0] for weight in weights], dim=1)
    with torch.autocast(join.device.type, enabled=False):
        mixed = [
            placed(compose(weight, part[:, :, None, None]), kernel, start)
            for weight, part, start in zip(weights, parts, starts, strict=True)
        ]
        return reduce(torch.add, mixed), sides


def merged_bias(basis: Tensor | None, join: Tensor, bias: Tensor | None) -> Tensor | None:
    """The bias of the dense conv: the join of the basis's bias, plus the join's own."""
    if basis is None:
        return bias
    with torch.autocast(join.device.type, enabled=False):
        carried = join.flatten(1) @ basis
    return carried if bias is None else carried + bias


class FusedChain(nn.Module):
    """Convs in a row, with the last one's activation and max-pool; basis and join may run as one dense conv."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None and self.merges(x):
            return self._merged(x)
        *front, last = self.stages
        for stage in front:
            x = stage(x)
        return last(x, residual)

    def _merged(self, x: Tensor) -> Tensor:
        basis, join = self._basis_and_join()
        weight, sides = merged_weight(list(basis.weights), basis.padding, join.weights[0])
        bias = merged_bias(basis.bias, join.weights[0], join.bias)
        options = {"stride": basis.stride, "activation": join.activation, "pool": join.pool}
        return composite_conv2d(x, [weight], bias, padding=[sides], **options)

    @property
    def pool(self) -> str | None:
        """The max-pool at the end of the chain, as `composite_conv2d` names it."""
        last: Any = self.stages[-1]
        return last.pool

    @property
    def is_joined(self) -> bool:
        """Whether the chain is a basis and its join: one conv with 1x1 filters, stride 1 and no padding."""
        if len(self.stages) != 2:
            return False
        _, join = self._basis_and_join()
        pointwise = [tuple(w.shape[2:]) for w in join.weights] == [(1, 1)] and tuple(join.stride) == (1, 1)
        return pointwise and not any(sum(join.padding[0], ()))

    def merges(self, x: Tensor) -> bool:
        """Whether the dense conv is faster than the two stages on such an input."""
        # First, because torch.compile cannot trace what `by_torch` reads.
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return False
        if by_torch() or not (x.is_cuda or asked_for()) or not self.is_joined:
            return False
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        if not needs_gradient(*self.parameters()):
            return False  # for inference `merge` folds a chain once, not at every call
        apart, whole = self._problems(tuple(x.shape), dtype)
        ours, theirs = (_measured_ms(way, x.device, need_input=x.requires_grad) for way in ([whole], apart))
        if ours is None or theirs is None:
            ours, theirs = _counted_ms([whole]), _counted_ms(apart)
        return ours + MERGING_MS < theirs

    def _problems(self, size: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Problem], Problem]:
        """The problems of basis and join, and that of the dense conv."""
        basis, join = self._basis_and_join()
        shapes = [tuple(weight.shape) for weight in basis.weights]
        first = pose(size, shapes, dtype, stride=basis.stride, padding=basis.padding)
        between = (size[0], first.filters, first.out_height, first.out_width)
        last = {"activation": join.activation, "pool": join.pool}
        mixture = [tuple(join.weights[0].shape)]
        second = pose(between, mixture, dtype, stride=(1, 1), padding=join.padding, **last)
        _, kernel, sides = enclosure(shapes, basis.padding)
        dense = [(mixture[0][0], size[1], *kernel)]
        return [first, second], pose(size, dense, dtype, stride=basis.stride, padding=[sides], **last)

    def _basis_and_join(self) -> tuple[Any, Any]:
        return self.stages[0], self.stages[1]


def _measured_ms(problems: Sequence[Problem], device: torch.device, *, need_input: bool) -> float | None:
    """The summed training times of problems that run in turn; None if one of them was not measured."""
    measured = [
        choice.fastest(problem, device, training=True, need_input=need_input or place > 0)
        for place, problem in enumerate(problems)
    ]
    known = [ms for ms in measured if ms is not None]
    return sum(known) if len(known) == len(problems) else None


def _counted_ms(problems: Sequence[Problem]) -> float:
    return sum(max(problem.macs / MACS_PER_MS, problem.bytes / BYTES_PER_MS) for problem in problems)


class FusedComposite(nn.Module):
    """A composite layer in one call with its residual (`add_last`: after the activation), activation and pool."""

    def __init__(
        self,
        weights: Sequence[nn.Parameter],
        bias: nn.Parameter | None,
        *,
        stride: Pair,
        padding: Sequence[Sides],
        pool: str | None = None,
        activation: str | None = None,
        add_last: bool = False,
    ) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.bias = bias
        self.stride, self.padding = stride, tuple(padding)
        self.activation, self.pool, self.add_last = canonical(activation), pool, add_last

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        run: Any = composite_conv3d if self.weights[0].dim() == 5 else composite_conv2d
        return run(x, list(self.weights), self.bias, **self.options, residual=residual)

    def with_statistics(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The conv's result with its mean and variance; these are None if no kernel of ours runs."""
        how = {"stride": self.stride, "padding": self.padding}
        return composite_conv2d_with_statistics(x, list(self.weights), self.bias, **how)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `composite_conv2d` that are not tensors."""
        found: dict[str, Any] = {
            name: getattr(self, name) for name in ("stride", "padding", "activation", "add_last")
        }
        return found | ({"pool": self.pool} if self.pool else {})

    def extra_repr(self) -> str:
        groups = " + ".join(f"{'x'.join(map(str, w.shape[2:]))},{len(w)}" for w in self.weights)
        return f"{groups}, stride={self.stride}, activation={self.activation}, pool={self.pool}"


class FrozenComposite(FusedComposite):
    """A fused layer for inference: its weights are fixed copies in the memory layout that the kernels read.

    The input's size decides which kernel runs, and kernels read different layouts. The layer makes each layout at
    the first call that needs it and keeps it. Loading a state dict into the layer discards them.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None, **options: Any) -> None:
        copies = [weight.detach().clone() for weight in weights]
        copies = laid_out(copies, weights[0].dtype) if copies[0].dim() == 4 else copies
        added = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)
        super().__init__([nn.Parameter(copy, requires_grad=False) for copy in copies], added, **options)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        def packed(kernel: str, dtype: torch.dtype) -> Tensor:
            return self._packed(kernel, dtype, x)

        if self.weights[0].dim() == 5:
            return super().forward(x, residual)
        tensors = (x, list(self.weights), self.bias)
        return composite_conv2d(*tensors, **self.options, residual=residual, packed=packed)

    def _packed(self, kernel: str, dtype: torch.dtype, x: Tensor) -> Tensor:
        from lowrank_cnn.kernels.conv.plans import KERNELS
        from lowrank_cnn.kernels.ops import flat_padding, pack_weights

        name = f"packed_{KERNELS[kernel].layout.name}_{str(dtype).removeprefix('torch.')}"
        if (kept := self._buffers.get(name)) is not None:
            return kept
        weights = [weight.to(dtype) for weight in self.weights]
        packed = pack_weights(weights, list(x.shape), list(self.stride), flat_padding(self.padding), kernel)
        # Memory allocated during a capture has no contents before the graph is replayed: do not keep it.
        if not torch.compiler.is_compiling() and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.register_buffer(name, packed, persistent=False)
        return packed

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        for name in [name for name in self._buffers if name.startswith("packed_")]:
            del self._buffers[name]
        super()._load_from_state_dict(*arguments, **options)


def conv_options(module: nn.Module) -> dict[str, Any] | None:
    """A conv as arguments of `FusedComposite`; None if no kernel can run it (dilated, grouped, other padding).

    Convs with hooks are excluded, and convs whose weights are computed, as by weight norm: the current value is no
    parameter and would not be trained.
    """
    options = _of_conv(module) if isinstance(module, nn.Conv2d | nn.Conv3d) else _of_composite(module)
    if options is None or has_hooks(module):
        return None
    if any(weight.dim() == 5 and not is_flat(weight.shape[2:]) for weight in options["weights"]):
        return None
    tensors = (*options["weights"], options["bias"])
    return options if all(t is None or isinstance(t, nn.Parameter) for t in tensors) else None


def _of_conv(module: nn.Conv2d | nn.Conv3d) -> dict[str, Any] | None:
    ordinary = module.groups == 1 and max(module.dilation) == 1 and module.padding_mode == "zeros"
    plain = is_plain(module, nn.Conv3d if isinstance(module, nn.Conv3d) else nn.Conv2d)
    if not (ordinary and plain) or isinstance(module.padding, str):
        return None
    sides = [tuple((side, side) for side in module.padding)]
    return {"weights": [module.weight], "bias": module.bias, "stride": module.stride, "padding": sides}


def _of_composite(layer: Any) -> dict[str, Any] | None:
    if not (hasattr(layer, "weights") and hasattr(layer, "group_padding")):
        return None
    if layer.channel_groups != 1 or layer.groups != 1 or max(layer.dilation) > 1 or layer.padding_mode != "zeros":
        return None
    return {
        "weights": list(layer.weights),
        "bias": layer.bias,
        "stride": layer.stride,
        "padding": layer.group_padding,
    }


def fused_layer(
    layer: nn.Module | None, *, activation: str | None = None, pool: str | None = None
) -> FusedComposite | FusedChain | None:
    """A conv, composite or chain as one fused layer with its epilogue; None if the kernels cannot run it."""
    if layer is None:
        return None
    chain = isinstance(layer, nn.Sequential) and hasattr(layer, "scheme") and is_plain(layer, nn.Sequential)
    stages = (list(layer.children()) if chain else []) or [layer]
    options = [found for found in map(conv_options, stages) if found is not None]
    if len(options) < len(stages):
        return None
    options[-1] |= {"activation": activation, "pool": pool}
    layers = [FusedComposite(**found) for found in options]
    return FusedChain(*layers) if len(layers) > 1 else layers[0]


def pool_name(module: nn.Module) -> str | None:
    """A max-pool that kernels can fuse, as `composite_conv2d` names it; None for any other module."""
    if not isinstance(module, nn.MaxPool2d) or not is_plain(module, nn.MaxPool2d) or module.return_indices:
        return None
    sizes = [(v, v) if isinstance(v, int) else tuple(v) for v in (module.kernel_size, module.stride)]
    if module.dilation not in (1, (1, 1)):
        return None
    if sizes == [(3, 3), (2, 2)] and module.padding in (1, (1, 1)) and not module.ceil_mode:
        return OVERLAPPING
    if sizes != [(2, 2), (2, 2)] or module.padding not in (0, (0, 0)):
        return None
    return "ceil" if module.ceil_mode else "floor"
