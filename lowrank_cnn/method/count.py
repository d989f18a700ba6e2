"""Exact multiply-accumulates, parameters and activation memory of any module, without computing anything.

The model runs once on the meta device, where tensors have shapes and no storage. Each operation that multiplies
is looked up in a table of formulas (`operations`) and booked on the layer that called it; one that is not known is
listed as unsupported. One use of a weight is one multiply-accumulate (MAC), never a FLOP.

Biases, norms, activations and pools cost nothing. `convention="paper"` counts as published: one more MAC per bias
and layer (not per pixel), the auxiliary heads included, and the parameters without what the paper left out of
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from lowrank_cnn.core.compare import unchanged
from lowrank_cnn.core.errors import LowRankError, check_choice, explained
from lowrank_cnn.core.modules import InputSize, arguments, check_module, checked_size, is_part_of
from lowrank_cnn.core.notes import AsDict, notes
from lowrank_cnn.core.text import counted, html_table, si
from lowrank_cnn.method.branches import fold_branches
from lowrank_cnn.method.layers import CompositeConv2d

# Formulas are PyTorch's own (`torch.utils.flop_counter`; a new operation is registered there), with a few that
# it lacks. Operations that are neither in that table nor free by convention are listed as unknown, not counted
# as zero.

_VECTORS = {"aten.mv": 0, "aten.addmv": 1, "aten.dot": 0, "aten.vdot": 0}
"""Products with a vector, with the place of the argument each of whose values is multiplied once."""
_FREE = {
    # data moved, made or looked up
    "_pad_circular", "_reshape_alias", "_to_copy", "_unsafe_index", "_unsafe_view", "arange",
    "as_strided_copy", "bernoulli", "cat", "channel_shuffle", "clone", "col2im", "constant_pad_nd",
    "contiguous", "copy", "detach", "embedding", "empty", "empty_like", "empty_strided", "eye", "fill",
    "flip", "full", "full_like", "gather", "im2col", "index", "index_put", "index_select", "lift_fresh",
    "linspace", "masked_fill", "native_channel_shuffle", "native_dropout", "new_empty", "new_empty_strided",
    "new_full", "new_ones", "new_zeros", "nonzero", "normal", "ones", "ones_like", "pixel_shuffle",
    "pixel_unshuffle", "rand", "rand_like", "randint", "randn", "randn_like", "reflection_pad1d",
    "reflection_pad2d", "reflection_pad3d", "repeat", "repeat_interleave", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", "resize", "roll", "scalar_tensor", "scatter", "scatter_add",
    "select_scatter", "set", "slice_scatter", "sort", "split", "split_with_sizes_copy", "stack", "sym_size",
    "sym_stride", "topk", "tril", "triu", "unbind_copy", "unfold", "uniform", "unique", "unsafe_split",
    "unsafe_split_with_sizes", "view_copy", "zero", "zeros", "zeros_like",
    # pools, norms, resizing and reductions
    "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_batch_norm_with_update", "_fused_rms_norm",
    "_log_softmax", "_native_batch_norm_legit", "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training", "_safe_softmax", "_softmax", "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa", "_upsample_nearest_exact2d", "_weight_norm_interface", "adaptive_avg_pool2d",
    "adaptive_max_pool2d", "adaptive_max_pool3d", "all", "amax", "amin", "aminmax", "any", "argmax", "argmin",
    "avg_pool2d", "avg_pool3d", "batch_norm_with_update", "count_nonzero", "cudnn_batch_norm", "cumprod",
    "cumsum", "fractional_max_pool2d", "glu", "linalg_vector_norm", "logsumexp", "max",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d", "mean", "median", "min", "mode",
    "multi_margin_loss", "native_batch_norm", "native_group_norm", "native_layer_norm", "norm", "prod", "std",
    "std_mean", "sum", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_trilinear3d", "var", "var_mean",
}  # fmt: skip


def macs_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """The multiply-accumulates of one call; None for an operation that is not known."""
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return formula(*args, **kwargs, out_val=out) // 2  # PyTorch counts a multiplication and an addition apart
    name = str(func._overloadpacket)
    if name in _VECTORS:
        return args[_VECTORS[name]].numel()
    space, _, base = name.partition(".")
    listed = space in ("aten", "prims", "prim") and base.rstrip("_") in _FREE
    return 0 if listed or func.is_view or torch.Tag.pointwise in func.tags else None


_LAYERS = (CompositeConv2d, nn.Conv2d, nn.Conv3d, nn.Linear)


def _product(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(f"a matrix of {a.shape[1]} columns meets one of {b.shape[0]} rows")
    return a.new_empty(a.shape[0], b.shape[1])


def _norm(x: Tensor, *given: object) -> tuple[Tensor, Tensor, Tensor]:
    for values in given[:4]:  # weight, bias, mean and variance
        if isinstance(values, Tensor) and values.shape != x.shape[1:2]:
            raise RuntimeError(f"a batch norm of {values.shape[0]} channels meets {x.shape[1]}")
    return torch.empty_like(x), x.new_empty(0), x.new_empty(0)


# On the meta device torch runs these by decomposition in Python: a batch norm takes 4 ms, and before a linear
# layer torch loads its compiler (a second).
_SHAPES: dict[object, Callable[..., Any]] = {
    torch.ops.aten.native_batch_norm.default: _norm,
    torch.ops.aten.gelu.default: lambda x: torch.empty_like(x),
    torch.ops.aten.addmm.default: lambda _bias, a, b: _product(a, b),
    torch.ops.aten.mm.default: _product,
}


@dataclass(frozen=True)
class LayerCount:
    """One layer: its name, kind, output shape, and cost for one image."""

    name: str
    type: str
    output: tuple[int, ...]
    macs: int
    params: int
    activation_bytes: int


@dataclass(frozen=True)
class Count(AsDict):
    """A network's cost for one image, in total and per layer, in the order of execution.

    `unsupported` names operations of unknown cost, with the number of their calls; `macs` does not include them.

    >>> from torch import nn
    >>> import lowrank_cnn as lr
    >>> cost = lr.count(nn.Conv2d(3, 8, 3, padding=1), (3, 4, 4))
    >>> cost.macs, cost.params, cost.layers[0].output
    (3456, 224, (8, 4, 4))
    """

    input: tuple[int, ...]
    convention: str
    macs: int
    params: int
    activation_bytes: int
    layers: tuple[LayerCount, ...]
    unsupported: tuple[tuple[str, int], ...] = ()

    def __repr__(self) -> str:
        """One line; `layers` has the rows."""
        memory = f"{self.activation_bytes / 2**20:.2f} MiB in {counted(len(self.layers), 'layer')}"
        return f"{'x'.join(map(str, self.input))}: {si(self.macs)} MACs, {si(self.params)} parameters, {memory}"

    def _repr_html_(self) -> str:
        """The table that notebooks show."""
        rows = [
            (row.name, row.type, "x".join(map(str, row.output)), si(row.macs), si(row.params))
            for row in self.layers
        ]
        rows.append(("total", "", "", si(self.macs), si(self.params)))
        size = "x".join(map(str, self.input))
        return html_table(("layer", "type", "output", ">MACs", ">parameters"), rows, f"One image of {size}")


def count(model: nn.Module, input_size: InputSize, *, convention: str = "mac") -> Count:
    """Count a model on one image of `input_size` (channels, height, width). The model is left as it was.

    A network of another kind of input is counted on an example: a tensor, or a tuple of all arguments of its
    forward, or a dictionary of its keywords. The count is that of its whole batch.

    Branches that are folded after training (`method.branches`) count as the layer that they become.
    `convention` is "mac" (convs, linear layers and matrix products in evaluation) or "paper" (as published: one
    more MAC per bias and layer, and the auxiliary heads).

    >>> import lowrank_cnn as lr
    >>> net = lr.create_model("nin-c3-lr")
    >>> lr.count(net, (3, 30, 30)).macs
    104260224
    """
    check_choice("the convention", convention, ("mac", "paper"))
    check_module(model)
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise LowRankError("the model is wrapped in nn.DataParallel: count its `.module`.")
    size, model = checked_size(input_size), fold_branches(model)
    paper = convention == "paper"
    book = _Book(biases=paper)
    with torch.no_grad(), book.follow(model):
        _run(model, input_size, training=paper and bool(notes(model).auxiliary))
    known = notes(model)
    left_out = known.unpublished if paper else known.auxiliary
    params = sum(
        p.numel() for name, p in model.named_parameters() if not any(is_part_of(name, part) for part in left_out)
    )
    layers = tuple(book.layers())
    macs, memory = sum(layer.macs for layer in layers), sum(layer.activation_bytes for layer in layers)
    return Count(size, convention, macs, params, memory, layers, tuple(sorted(book.unsupported.items())))


def _run(model: nn.Module, inputs: InputSize, *, training: bool) -> None:
    """Run the model once on the meta device, in evaluation, or in training to count auxiliary heads as well."""
    tensors = chain(model.parameters(), model.buffers())
    dtype = next((t.dtype for t in tensors if t.is_floating_point()), None)
    args, kwargs = arguments(inputs, device="meta", dtype=dtype)
    size = "x".join(map(str, checked_size(inputs)))
    # A forward may need values, or another size.
    failed = explained(f"the model does not take an input of {size} without values, as counting gives it")
    with failed, unchanged(model, on_meta=True), torch.device("meta"):
        for module in model.modules():  # a module of torch.export refuses train() and eval()
            module.training = training
        model(*args, **kwargs)


class ShapesOnly(TorchDispatchMode):
    """Gives slow operations on the meta device an empty result of the right shape."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from loading its compiler, which takes more than a second and is not used here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        shape = _SHAPES.get(func)
        return shape(*args) if shape else func(*args, **(kwargs or {}))


class _Book(ShapesOnly):
    """Books each operation's MACs on the layer that is running; what runs outside any is booked on its caller."""

    def __init__(self, *, biases: bool) -> None:
        super().__init__()
        self.biases = biases
        self.running: list[tuple[str, nn.Module]] = []
        self.modules: dict[str, nn.Module] = {}
        self.macs: Counter[str] = Counter()
        self.unsupported: Counter[str] = Counter()
        self.outputs: dict[str, tuple[tuple[int, ...], int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        macs = macs_of(func, args, kwargs or {}, out)
        if macs is None:
            self.unsupported[str(func._overloadpacket)] += 1
        elif macs and self.running:
            name, module = self.running[-1]
            self.modules[name] = module
            self.macs[name] += macs
        return out

    @contextmanager
    def follow(self, model: nn.Module) -> Iterator[None]:
        """Hook every module, so that the one that is running is known."""
        hooks = []
        for name, module in model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            hooks.append(module.register_forward_hook(partial(self._leave, name), always_call=True))
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, name: str, module: nn.Module, _inputs: object) -> None:
        # A layer is booked whole: what its parts do is part of it.
        inside = self.running and isinstance(self.running[-1][1], _LAYERS)
        self.running.append(self.running[-1] if inside else (name, module))

    def _leave(self, name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        self.running.pop()
        if isinstance(output, Tensor):
            self.outputs[name] = tuple(output.shape[1:]), output.numel() * output.element_size()

    def layers(self) -> Iterator[LayerCount]:
        for name, module in self.modules.items():
            kind = type(module).__name__
            kind += f" {module.composite}" if isinstance(module, CompositeConv2d) else ""
            own = module.parameters(recurse=isinstance(module, CompositeConv2d))  # which has its own in a list
            params = sum(p.numel() for p in own)
            bias = getattr(module, "bias", None) if self.biases and isinstance(module, _LAYERS) else None
            macs = self.macs[name] + (bias.numel() if isinstance(bias, Tensor) else 0)
            size, memory = self.outputs.get(name, ((), 0))
            yield LayerCount(name, kind, size, macs, params, memory)
