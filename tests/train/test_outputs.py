"""The class scores are found among one output, several in a row and several by name, in every use."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import ResidentSplit
from lowrank_cnn.data.types import Data
from lowrank_cnn.train.objective import class_scores
from lowrank_cnn.train.score import check_fits, score

SCORES, FEATURES = torch.zeros(2, 3), torch.zeros(2, 8)
CPU = torch.device("cpu")
Named = namedtuple("Named", ["features", "head"])


@dataclass
class Answer:
    head: Tensor
    features: Tensor


@pytest.mark.parametrize(
    ("outputs", "output"),
    [
        (SCORES, None),
        (SCORES, "0"),
        ((SCORES, FEATURES), None),
        ([SCORES, FEATURES], None),
        ({"features": FEATURES, "logits": SCORES}, None),
        ({"head": SCORES}, None),
        ({"output_0": SCORES, "output_1": FEATURES}, None),
        ((FEATURES, SCORES), "1"),
        ((FEATURES, SCORES), "output_1"),
        ({"features": FEATURES, "head": SCORES}, "head"),
        ({"output_0": FEATURES, "output_1": SCORES}, "1"),
        (Named(FEATURES, SCORES), "head"),
        (Named(SCORES, FEATURES), None),
        (Answer(SCORES, FEATURES), "head"),
    ],
)
def test_the_output_with_the_class_scores_is_found(outputs: object, output: str | None):
    assert class_scores(outputs, output) is SCORES


@pytest.mark.parametrize(
    ("outputs", "output", "sentence"),
    [
        (
            {"a": SCORES, "b": FEATURES},
            None,
            r"returns a, b, .*\(--output NAME; .* --set output=NAME\)\.$",
        ),
        ({"a": SCORES, "b": FEATURES}, "c", r"no tensor as output 'c': its outputs are a, b\.$"),
        ((SCORES, FEATURES), "2", r"no tensor as output '2': its outputs are output_0, output_1\.$"),
        ({"a": None, "b": SCORES}, "a", r"no tensor as output 'a'"),
        (SCORES, "1", r"the network has one output"),
        ("text", None, r"returns a str"),
        ((), None, r"returns a tuple"),
        ({}, None, r"returns a dict"),
    ],
)
def test_what_leaves_no_choice_is_refused_with_the_names(outputs: object, output: str | None, sentence: str):
    with pytest.raises(LowRankError, match=sentence):
        class_scores(outputs, output)


class Several(nn.Module):
    """Features, and class scores behind them, by place or by name."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.head = kind, nn.Linear(12, 2)

    def forward(self, x: Tensor) -> object:
        parts = {"features": x, "head": self.head(x.flatten(1))}
        return parts if self.kind is dict else self.kind(parts.values())


@pytest.fixture
def data() -> Data:
    images = torch.randint(0, 256, (16, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = ResidentSplit.of(images, torch.arange(16) % 2)
    return Data("some", ("a", "b"), split, split)


@pytest.mark.parametrize(("kind", "output"), [(dict, "head"), (tuple, "1")])
def test_a_network_is_trained_evaluated_asked_and_exported_by_the_chosen_output(data, tmp_path, kind, output):
    pytest.importorskip("onnxruntime")
    network = Several(kind)
    before = network.head.weight.detach().clone()
    recipe = lr.get_recipe("digits", batch_size=4, epochs=1, crop=None, pad=0, output=output)
    record = lr.fit(network, data, recipe, progress=False)
    assert not torch.equal(network.head.weight, before)
    found = lr.evaluate(network, data, progress=False)
    assert found.top1 == record.result["top1"]
    lr.export(network, tmp_path / "net.onnx")
    assert lr.evaluate(tmp_path / "net.onnx", data, progress=False).top1 == found.top1
    pixels = data.test.images[0]
    assert lr.predict(tmp_path / "net.onnx", pixels)[0][0] == pytest.approx(lr.predict(network, pixels)[0][0])
    with pytest.raises(LowRankError, match="no tensor as output 'tail'"):
        lr.predict(tmp_path / "net.onnx", pixels, output="tail")
    with pytest.raises(LowRankError, match="no tensor as output '7'"):
        lr.evaluate(network, data, output="7", progress=False)


def test_a_network_without_a_choice_is_refused_before_training(data):
    with pytest.raises(LowRankError, match=r"returns features, head, .*--set output=NAME"):
        lr.fit(Several(dict), data, lr.get_recipe("digits", batch_size=4, crop=None, pad=0), progress=False)


def test_the_score_of_a_row_of_outputs_is_that_of_the_first():
    network = Several(list)
    images, labels = torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 0, 1])
    first = score(network, [(images, labels)], device=CPU, forward=lambda x: network(x)[::-1])
    right = network.head(images.flatten(1)).argmax(1) == labels
    assert first.top1 == right.double().mean().item()
    check_fits(network, (3, 2, 2), 2, CPU, output="1")
    with pytest.raises(LowRankError, match="gives 3x2x2 for an image, and not a score for each class"):
        check_fits(network, (3, 2, 2), 2, CPU)
