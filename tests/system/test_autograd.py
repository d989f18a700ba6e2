"""What depends on what, by autograd's graph."""

import torch

from lowrank_cnn.core.modules import upstream


def test_every_node_comes_once_and_paths_end_where_they_are_cut():
    x = torch.ones(3, requires_grad=True)
    first = 2 * x
    second = first.exp()
    total = (first + second).sum()
    nodes = list(upstream([total.grad_fn, None]))
    assert len(nodes) == len(set(nodes)) == 5  # the sums, exp, the product, and x
    cut = set(upstream([total.grad_fn], until={second.grad_fn, first.grad_fn}))
    assert cut == set(nodes) - {node for node in nodes if "AccumulateGrad" in node.name()}
    assert list(upstream([x.detach().grad_fn])) == []
