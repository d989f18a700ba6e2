import pytest
import torch
from torch import fx, nn

from lowrank_cnn.core.clock import Sample
from lowrank_cnn.deploy.block_forms import CANDIDATES, Candidate
from lowrank_cnn.deploy.blocks import Block, BlockAsGiven, Epilogue, in_blocks
from lowrank_cnn.deploy.plan import BlockPlanner, Cache, objection_on

AS_GIVEN = CANDIDATES["as given"]
MS = {"as given": 2.0, "quick": 1.0, "hardly quicker": 1.95, "wrong": 0.1, "reordered": 0.1}


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate takes the time that `MS` says."""

    def measured(runs: dict[str, object], **_: object) -> dict[str, Sample]:
        return {name: Sample(MS[name], MS[name], MS[name], 3) for name in runs}

    monkeypatch.setattr("lowrank_cnn.deploy.plan.measure", measured)


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 30, 30, generator=torch.Generator().manual_seed(1))


def two_alike() -> nn.Module:
    """Two blocks that differ in nothing but their place."""
    return nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1), nn.ReLU()).eval()


def planner(network: nn.Module, image: torch.Tensor, **candidates: Candidate) -> BlockPlanner:
    graph, blocks, _ = in_blocks(network, image)
    ways = {"as given": AS_GIVEN, **{name.replace("_", " "): make for name, make in candidates.items()}}
    return BlockPlanner(graph, blocks, Cache.open(False), ways, 3)


@torch.no_grad()
def test_the_fastest_candidate_replaces_each_block(image: torch.Tensor):
    quick: list[nn.Module] = []

    def make(block: Block) -> nn.Module:
        quick.append(BlockAsGiven(block.layer, block.epilogue))
        return quick[-1]

    found = planner(two_alike(), image, quick=make)
    found.run(image)
    assert [row.choice for row in found.decisions.values()] == ["quick", "quick"]
    assert [found.network.get_submodule(name) for name in found.decisions] == quick
    assert [row.macs for row in found.decisions.values()] == [2 * 900 * 9] * 2


@torch.no_grad()
def test_a_gain_within_noise_changes_nothing(image: torch.Tensor):
    found = planner(two_alike(), image, hardly_quicker=AS_GIVEN)
    found.run(image)
    assert {row.choice for row in found.decisions.values()} == {"as given"}


@torch.no_grad()
def test_wrong_and_broken_candidates_are_left_out_with_the_reason_in_blocks_that_are_alike(image: torch.Tensor):
    ways: dict[str, Candidate] = {
        "wrong": lambda block: BlockAsGiven(block.layer, Epilogue("silu")),
        "broken": lambda block: nn.Flatten(start_dim=7),
    }
    found = planner(two_alike(), image, quick=AS_GIVEN, **ways)
    found.run(image)
    for row in found.decisions.values():
        assert set(row.times) == {"as given", "quick"}
        assert row.failed["wrong"] == "another result"
        assert "Dimension out of range" in row.failed["broken"]


class Flat(nn.Module):
    """Views its maps as vectors, which maps in another memory format do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 32, 3, padding=1), nn.Linear(32 * 900, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return self.fc(y.view(y.size(0), -1))


class Reordered(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.layer = block.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_a_choice_that_stops_the_rest_of_the_network_is_taken_back(image: torch.Tensor):
    net = Flat().eval()
    found = planner(net, image, reordered=Reordered)
    found.run(image)
    (row,) = found.settled(net, image)
    assert row.choice == "as given"
    assert "memory format" in row.failed["reordered"]
    assert objection_on(found.network, net, image) == ""


@torch.no_grad()
def test_a_choice_that_changes_the_whole_network_is_refused(image: torch.Tensor):
    class Drifts(nn.Module):
        """Agrees on the tensors that the block was planned on, and gives something else afterwards."""

        def __init__(self, block: Block) -> None:
            super().__init__()
            self.layer, self.calls = BlockAsGiven(block.layer, block.epilogue), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x) * (1 if self.calls <= 2 else 2)

    net = two_alike()
    found = planner(net, image, quick=Drifts)
    found.run(image)
    assert isinstance(found.network, fx.GraphModule)
    assert objection_on(found.network, net, image)
    decisions = found.settled(net, image)
    assert {row.choice for row in decisions} == {"as given"}
    assert objection_on(found.network, net, image) == ""
