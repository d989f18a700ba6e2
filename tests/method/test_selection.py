from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.deploy.export import export
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.method.select import stages
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit
from lowrank_cnn.train.evaluate import evaluate


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 5, padding="same", bias=False),
    )


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ("features.conv1_1", ["features.conv1_1"]),
        ("features", ["features.conv1_1", "features.conv2_1", "features.conv3_1"]),
        ("*conv2*", ["features.conv2_1"]),
        (["*conv3*", "features.conv1_1"], ["features.conv1_1", "features.conv3_1"]),
        (3, ["features.conv3_1"]),
        ([3, (5, 5)], ["features.conv1_1", "features.conv2_1", "features.conv3_1"]),
        ({"features.conv1_1", 3}, ["features.conv1_1", "features.conv3_1"]),
        ((5, 5), ["features.conv1_1", "features.conv2_1"]),
        (lambda name, conv: conv.in_channels == 3, ["features.conv1_1"]),
    ],
)
def test_layers_are_selected_by_name_prefix_pattern_kernel_or_function(where, changed: list[str]):
    net = create_model("nin", width=0.1)
    assert [row.name for row in notes(convert(net, "lr", where=where)).conversion.changed] == changed


def test_layers_are_selected_by_stage():
    net = create_model("vgg11-gmp", width=0.1)
    found = stages(net, (3, 32, 32))
    assert [len(stage) for stage in found] == [1, 1, 2, 2, 2]
    assert found == stages(net)
    changed = notes(convert(net, "lr", where=found[2])).conversion.changed
    assert [row.name for row in changed] == ["features.conv3_1", "features.conv3_2"]
    with pytest.raises(LowRankError, match="size of its images"):
        stages(small())


def test_one_frozen_conv_stays_and_the_rest_is_rewritten():
    net = small()
    net[0].requires_grad_(False)
    report = notes(convert(net, "lr")).conversion
    assert [row.name for row in report.changed] == ["3"]
    assert "frozen" in report.kept[0].reason


def test_complex_convs_stay():
    net = nn.Sequential(nn.Conv2d(4, 8, 3, dtype=torch.complex64))
    for rewrite in (convert, decompose):
        with pytest.raises(LowRankError, match="0: its weights are complex"):
            rewrite(net, "lr-join")


@pytest.mark.parametrize("use", ["export", "fit", "evaluate"])
def test_a_network_that_was_loaded_in_part_is_refused_in_a_sentence(use: str, tmp_path: Path):
    """A model built on the meta device, into which a file without its last layer was loaded."""
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    net.load_state_dict(nn.Sequential(nn.Conv2d(3, 8, 3)).state_dict(), assign=True, strict=False)
    items = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
    uses: dict[str, Any] = {
        "export": lambda: export(net, tmp_path / "net.safetensors"),
        "fit": lambda: fit(net, items, "modern", epochs=1, batch_size=4, progress=False),
        "evaluate": lambda: evaluate(net, items, progress=False),
    }
    with pytest.raises(LowRankError, match=r"3\.weight is on the meta device and has no values"):
        uses[use]()
