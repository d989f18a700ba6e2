from pathlib import Path
from unittest import mock

import pytest
import torch

from lowrank_cnn.models import create_model
from lowrank_cnn.report.figures import FigureOptions, draw_figure

pytest.importorskip("vl_convert", reason="figures are drawn by vl-convert")


def test_a_checkpoint_shows_what_was_learned(tmp_path: Path, text_of):
    pytest.importorskip("lightning_fabric", reason="training needs lightning-fabric")
    from lowrank_cnn.data import Data, ResidentSplit
    from lowrank_cnn.train import fit, get_recipe

    labels = torch.arange(16) % 2
    images = (90 + 80 * labels)[:, None, None, None].expand(-1, 3, 16, 16).to(torch.uint8).contiguous()
    split = ResidentSplit.of(images, labels)
    network = create_model("nin-c3-lr", num_classes=2, width=0.05)
    recipe = get_recipe("modern", epochs=1, batch_size=8, crop=14)
    fit(network, Data("grey", ("dark", "bright"), split, split), recipe, out=tmp_path / "run", device="cpu")
    figure = draw_figure("filters", tmp_path / "out.svg", FigureOptions(checkpoint=tmp_path / "run"))
    assert "First layer of nin-c3-lr, trained" in text_of(figure)
    with mock.patch("lowrank_cnn.report.network_figures.create_model", wraps=create_model) as built:
        text = text_of(
            draw_figure("receptive-field", tmp_path / "out.svg", FigureOptions(checkpoint=tmp_path / "run"))
        )
    assert {"nin, as initialised", "nin-c3-lr, trained"} <= text
    assert len([words for words in text if "of 196 pixels hold" in words]) == 2
    built.assert_called_once_with("nin", width=0.05, num_classes=2, in_channels=3, image_size=14)


@pytest.mark.parametrize(
    ("name", "model", "words"),
    [
        ("filters", "nin-c3-lr", {"First layer of nin-c3-lr, trained on CIFAR-10", "96 filters"}),
        ("spectra", "nin", {"Singular values of the dense filters of nin, trained on CIFAR-10", "random filters"}),
        ("receptive-field", "nin-c3-lr", {"nin, trained on CIFAR-10", "nin-c3-lr, trained on CIFAR-10"}),
    ],
)
def test_the_weights_of_the_package_can_be_shown(name: str, model: str, words: set[str], tmp_path: Path, text_of):
    options = FigureOptions(model=model, pretrained="cifar10")
    assert words <= text_of(draw_figure(name, tmp_path / "out.svg", options))
