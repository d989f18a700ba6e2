"""Open exported graphs (.onnx, .pt2, ...) in rooms below the one that runs them.

The package itself says who opens such a file, so that no room imports one above it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


class GraphOpener(Protocol):
    """Gives the network in a file; a file whose code may run has to be `trusted`."""

    def __call__(self, path: Path, *, trusted: bool) -> nn.Module: ...


_openers: list[GraphOpener] = []


def open_graphs_by(opener: GraphOpener) -> None:
    """Let this function open graphs from now on."""
    _openers[:] = [opener]


def open_graph(path: Path, *, trusted: bool) -> nn.Module:
    """The network in an exported graph, run by the engine of the file."""
    (opener,) = _openers
    return opener(path, trusted=trusted)
