"""A trace is taken where one call shows what a network computes, and refused where values decide."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.engines.torchscript import trace
from lowrank_cnn.deploy.export import export


class Calls(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * float(self.scale)


def written(x: Tensor) -> Tensor:
    kept = torch.zeros(2)
    kept[0] = x.mean()
    return x * int(kept[0] > 0)


READERS: dict[str, Callable[[Tensor], Tensor]] = {
    "__bool__": lambda x: x if x.mean() > 9 else -x,
    "__float__": lambda x: x / float(x.std()),
    "item": lambda x: x - x.max().item(),
    "tolist": lambda x: x * x.flatten().tolist()[0],
    "equal": lambda x: x if torch.equal(x, x.flip(-1)) else -x,
    "__int__": written,
}


@pytest.mark.parametrize("name", READERS)
def test_a_forward_that_decides_by_values_is_refused(name: str):
    with pytest.raises(LowRankError, match=f"cannot trace Calls: its forward reads values .*{name}"):
        trace(Calls(READERS[name]), [torch.randn(1, 3, 8, 8)], "Calls")


def test_sizes_and_buffers_may_be_read():
    x = torch.randn(1, 3, 8, 8)
    net = Calls(lambda x: x.view(int(x.shape[0]), -1) if x.dim() == 4 and len(x) else x)
    assert torch.equal(trace(net, [x], "Calls")(x), net(x))


def test_no_file_is_written_of_one_path_alone(tmp_path: Path):
    """For images brighter than the example the network takes the other way."""
    with pytest.raises(LowRankError, match="a trace would hold those of the example"):
        export(Calls(READERS["__bool__"]), tmp_path / "net.ts", input_size=(3, 8, 8))
    assert not list(tmp_path.iterdir())


def test_an_export_that_fails_prints_no_graph(tmp_path: Path, capfd):
    with pytest.raises(LowRankError, match=r"torch.export cannot trace Calls"):
        export(Calls(READERS["__bool__"]), tmp_path / "net.pt2", input_size=(3, 8, 8))
    assert capfd.readouterr() == ("", "")
