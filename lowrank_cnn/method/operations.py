"""Which operations cost multiply-accumulates, which cost nothing by convention, and which are not known.

Formulas are PyTorch's own (`torch.utils.flop_counter`; a new operation is registered there), with a few that it
lacks. Operations that are neither in that table nor free by convention are listed as unknown, not counted as zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_VECTORS: dict[str, Callable[..., int]] = {
    "aten.mv": lambda matrix, *_, **__: matrix.numel(),
    "aten.addmv": lambda _bias, matrix, *_, **__: matrix.numel(),
    "aten.dot": lambda a, *_, **__: a.numel(),
    "aten.vdot": lambda a, *_, **__: a.numel(),
}
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
        return _VECTORS[name](*args, **kwargs)
    return 0 if _is_free(func, name) else None


def _is_free(func: Any, name: str) -> bool:
    space, _, base = name.partition(".")
    if func.is_view or torch.Tag.pointwise in func.tags:
        return True
    return space in ("aten", "prims", "prim") and base.rstrip("_") in _FREE


_REASONS = (
    (
        (
            "item()",
            "out of meta tensor",
            "local_scalar_dense",
            "nonzero",
            "data-dependent",
            "aten::equal",
            "tolist",
        ),
        "its forward reads the values of tensors (`.item()`, `float()`, an `if` on a tensor), which counting "
        "without computing does not have",
    ),
    (("numpy",), "its forward calls numpy on a tensor, which counting without computing does not have"),
    (
        ("expected device meta", "on the same device", "device type at start of device", "on different devices"),
        "its forward uses a tensor that is neither a parameter nor a buffer, kept in a list or made on a named "
        "device: register it as a buffer",
    ),
)


def reason_of(error: Exception) -> str | None:
    """Why a forward cannot run without values, in words; None if it failed for another reason."""
    text = str(error)
    return next((reason for marks, reason in _REASONS if any(mark in text for mark in marks)), None)
