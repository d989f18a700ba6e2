"""Walk the graph that autograd records, to see what depends on what."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any


def upstream(nodes: Iterable[Any], *, until: Container[Any] = ()) -> Iterator[Any]:
    """The graph nodes (`grad_fn`) that these depend on, themselves among them; what `until` has ends a path.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> [node.name() for node in upstream([(2 * x).exp().grad_fn])]
    ['ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    seen: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node not in until:
            waiting += [past for past, _ in node.next_functions]
