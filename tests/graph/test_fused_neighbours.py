"""Norms, pools and response norms by the kernels compute what torch computes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowrank_cnn.graph.fuse import fuse
from lowrank_cnn.graph.fused_between import FusedPool, FusedResponseNorm, fused_neighbour
from lowrank_cnn.kernels import forced

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.MaxPool2d(3, 2, 1), FusedPool),
        (nn.LocalResponseNorm(5), FusedResponseNorm),
        (nn.MaxPool2d(2, return_indices=True), type(None)),
        (nn.MaxPool2d(2, dilation=2), type(None)),
        (nn.LocalResponseNorm(99), type(None)),
        (nn.LocalResponseNorm(5, alpha=-1.0), type(None)),
        (nn.CrossMapLRN2d(5), type(None)),
    ],
)
def test_plain_pools_and_response_norms_are_known(layer, kind):
    assert type(fused_neighbour(layer)) is kind


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_between_convs_compute_the_same(dtype):
    pytest.importorskip("triton")
    chain = nn.Sequential(nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU(inplace=True))
    right, x = copy.deepcopy(chain).double().to(DEVICE), torch.randn(2, 24, 9, 8, device=DEVICE).to(dtype)
    twin, leaf = fuse(chain.to(DEVICE)), x.clone().requires_grad_()
    wide = x.double().requires_grad_()
    with forced("on"), torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = twin(leaf)
    assert y.dtype == dtype
    assert "lowrank" in str(y.grad_fn.next_functions[0][0])
    exact = right(wide)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.linalg.vector_norm(y - exact) <= limit * torch.linalg.vector_norm(exact)
    # Rounded values may win other windows: what a window is given must arrive somewhere all the same.
    grads = [torch.autograd.grad(out.square().sum(), leaf)[0] for out, leaf in ((y, leaf), (exact, wide))]
    if dtype == torch.float32:
        assert torch.linalg.vector_norm(grads[0] - grads[1]) <= 1e-4 * torch.linalg.vector_norm(grads[1])
    assert torch.allclose(chain[0].running_var.double(), right[0].running_var, atol=1e-3)
    assert chain[0].num_batches_tracked == 1


def test_what_torch_refuses_is_refused():
    pytest.importorskip("triton")
    norm = fuse(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).to(DEVICE))
    with forced("on"), pytest.raises(ValueError, match="more than 1 value"):
        norm(torch.randn(1, 8, 1, 1, device=DEVICE))
    with forced("on"), pytest.raises(RuntimeError, match="pad"):
        fuse(nn.MaxPool2d(2, padding=2))(torch.randn(1, 8, 4, 4, device=DEVICE))


def test_a_cumulative_average_is_left_to_torch():
    pytest.importorskip("triton")
    chain, x = nn.Sequential(nn.BatchNorm2d(8, momentum=None), nn.ReLU()), torch.randn(2, 8, 3, 3)
    right = copy.deepcopy(chain)
    with forced("on"):
        for scale in (1, 2):
            assert torch.equal(fuse(chain)(x * scale), right(x * scale))
    assert torch.equal(chain[0].running_var, right[0].running_var)
