"""Fused GPU kernels for composite layers, their eager reference, and the choice between them.

`composite_conv2d` is the whole interface. It runs anywhere, and fused if that is supported and faster.
"""

from lowrank_cnn.kernels.autotune.choice import Choice, choose, explain
from lowrank_cnn.kernels.autotune.tuned import unsupported
from lowrank_cnn.kernels.depthwise.dispatch import depthwise_conv2d, explain_depthwise
from lowrank_cnn.kernels.device import for_graphs, forced
from lowrank_cnn.kernels.dispatch import composite_conv2d, composite_conv2d_with_statistics, explain_call, tune
from lowrank_cnn.kernels.problem import Problem, describe
from lowrank_cnn.kernels.reference import composite_reference

__all__ = [
    "Choice",
    "Problem",
    "choose",
    "composite_conv2d",
    "composite_conv2d_with_statistics",
    "composite_reference",
    "depthwise_conv2d",
    "describe",
    "explain",
    "explain_call",
    "explain_depthwise",
    "for_graphs",
    "forced",
    "tune",
    "unsupported",
]
