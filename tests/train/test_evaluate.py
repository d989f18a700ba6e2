"""`evaluate` and what it counts; runs, files and networks come back as they were trained."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.data.decode import thumbnail
from lowrank_cnn.data.types import Decoded
from lowrank_cnn.report.records import read_details
from lowrank_cnn.train.evaluate import (
    BINS,
    MOST_CLASSES,
    EvaluationDetails,
    answers,
    details_of,
    score,
    score_by_loss,
)
from lowrank_cnn.train.inputs import check_fits, preprocessing
from lowrank_cnn.train.objective import class_scores
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import Trained, carried_by, how_far, load_checkpoint, load_pretrained
from tests.support import assert_equal_weights

RECIPE = lr.get_recipe("modern", epochs=2, batch_size=16, warmup=0, mirror=False, pad=1, cutout=0, ema=0.5)
QUIET = {"progress": False, "device": "cpu"}
CPU = torch.device("cpu")


def bright_halves(n: int, seed: int) -> ResidentSplit:
    """Grey 16x16 images, bright above or below."""
    labels = torch.arange(n) % 2
    images = torch.randint(0, 90, (n, 1, 16, 16), generator=torch.Generator().manual_seed(seed))
    images[labels == 0, :, :8] += 150
    images[labels == 1, :, 8:] += 150
    return ResidentSplit.of(images.to(torch.uint8), labels)


@pytest.fixture(scope="module")
def data() -> Data:
    return Data("halves", ("above", "below"), bright_halves(64, 0), bright_halves(33, 1))


def small() -> nn.Module:
    torch.manual_seed(0)
    return lr.create_model("nin-c3-lr", num_classes=2, in_channels=1, width=0.05, norm="batch")


def own(classes: int = 2) -> nn.Sequential:
    conv, pool = nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveAvgPool2d((2, 1))
    return nn.Sequential(conv, nn.ReLU(), pool, nn.Flatten(), nn.Linear(8, classes))


@pytest.fixture(scope="module", params=["standardize", "whiten"])
def run(request, data, tmp_path_factory):
    out, network = tmp_path_factory.mktemp("run") / request.param, small()
    recipe = dataclasses.replace(RECIPE, preprocess=request.param, crop=14, zca_epsilon=1.0)
    return out, network, lr.fit(network, data, recipe, out=out, **QUIET)


def test_a_run_comes_back_and_is_evaluated_as_its_record_says(run, data, tmp_path):
    out, network, record = run
    trained, result = load_checkpoint(out), lr.evaluate(out, data, device="cpu")
    assert_equal_weights(trained.network, network)
    assert (trained.classes, trained.image, trained.input_size) == (("above", "below"), (1, 16, 16), (1, 14, 14))
    assert result.to_dict() == {key: record.result[key] for key in ("top1", "top5", "n", "loss")}
    assert (result.n, result.top5) == (33, 1.0)
    assert result.details is not None
    assert record.result["details"] == result.details.to_dict()
    assert all(image.image.startswith("image ") for image in result.details.worst)
    single = lr.evaluate(out, data, batch_size=1, device="cpu")
    assert (single.top1, single.n) == (result.top1, result.n)
    assert single.loss == pytest.approx(result.loss, rel=1e-5)
    best = lr.evaluate(load_checkpoint(out, best=True), data, device="cpu")
    assert best.top1 == record.result["best_accuracy"]
    [file] = out.glob("best-*.safetensors")
    assert lr.evaluate(file, data, device="cpu") == best
    assert (how_far(out), how_far(out, best=True), how_far(max(out.glob("step-*.json")))) == (None, None, None)
    path = tmp_path / "net.safetensors"
    lr.export(trained, path)
    assert lr.evaluate(path, data, device="cpu").to_dict() == result.to_dict()
    assert lr.predict(path, data.test.images[0]) == lr.predict(out, data.test.images[0])
    assert notes(lr.load(path)).input_size == notes(lr.load(out)).input_size == (1, 14, 14)


def rewritten(inner: int = 3) -> nn.Module:
    """Fitted in part, fresh in part, as a conversion in two steps leaves it."""
    torch.manual_seed(0)
    net = lr.create_model("nin", num_classes=2, in_channels=1, width=0.05, norm="batch")
    return lr.convert(lr.decompose(net, f"separable(m={inner})", where="*conv2*"), "lr", where="*conv1*")


def test_a_run_of_a_converted_network_is_built_again_and_goes_on_with_the_same_conversion_alone(data, tmp_path):
    network = rewritten()
    record = lr.fit(network, data, RECIPE, out=tmp_path, **QUIET)
    assert record.model["name"] == "nin+separable+lr"
    assert lr.evaluate(tmp_path, data, device="cpu").loss == record.result["loss"]
    again = lr.load(tmp_path)
    assert not again.training
    assert_equal_weights(again, network)
    assert_equal_weights(lr.load(max(tmp_path.glob("step-*.safetensors"))), network)
    assert lr.fit(rewritten(), data, RECIPE, epochs=3, out=tmp_path, resume=True, **QUIET).result["epochs"] == 3
    dense = lr.create_model("nin", num_classes=2, in_channels=1, width=0.05, norm="batch")
    layer = r"^this run .* the layer \S*conv2\S* as separable\(m=3\), and cannot go on with separable\(m=4\): "
    whole = r"the network nin\+separable\+lr, and cannot go on with nin: leave"
    for other, says in ((dense, whole), (rewritten(4), layer)):
        with pytest.raises(LowRankError, match=says):
            lr.fit(other, data, RECIPE, epochs=4, out=tmp_path, resume=True, **QUIET)


@pytest.mark.parametrize("scheme", [None, "lr"])
def test_a_run_of_a_network_of_others_is_loaded_into_it(data, tmp_path, scheme: str | None):
    network = lr.convert(own(), scheme) if scheme else own()
    record = lr.fit(network, data, RECIPE, out=tmp_path, **QUIET)
    with pytest.raises(LowRankError, match=r"Sequential is not one of our networks.*load\(path, into=network\)"):
        lr.evaluate(tmp_path, data, device="cpu")
    base = own()
    before = base[0].weight.clone()
    again = lr.load(tmp_path, into=base)
    assert torch.equal(base[0].weight, before)
    assert_equal_weights(again, network)
    path = tmp_path / "own.safetensors"
    lr.export(load_checkpoint(tmp_path, network=own()), path)
    for source, given in ((tmp_path, own()), (tmp_path, again), (path, own())):
        trained = load_checkpoint(source, network=given)
        assert lr.evaluate(trained, data, device="cpu").loss == record.result["loss"]
    with pytest.raises(LowRankError, match=r"do not fit the network|has no layer"):
        lr.load(tmp_path, into=nn.Sequential(nn.Conv2d(1, 5, 3)))
    with pytest.raises(LowRankError, match=r"4\.bias is \[2\] in the file and \[5\] in the network"):
        load_checkpoint(tmp_path, network=own(5))


def test_weights_of_a_run_under_way_are_told_by_its_epochs(data, tmp_path, monkeypatch):
    def leave(trainer, stop) -> None:
        if trainer.iteration == 6:
            trainer.save()
            raise KeyboardInterrupt

    monkeypatch.setattr("lowrank_cnn.train.loop.Trainer._look_around", leave)
    with pytest.raises(KeyboardInterrupt):
        lr.fit(small(), data, RECIPE, out=tmp_path, **QUIET)
    assert how_far(tmp_path) == "after 1 of 2 epochs and 2 batches of the next"
    [best] = tmp_path.glob("best-*.safetensors")
    assert how_far(tmp_path, best=True) == how_far(best) == "after 1 of 2 epochs"
    assert how_far(tmp_path / "step-00000000") == "before any training"


def test_a_network_carries_the_preparation_of_its_images(data, tmp_path):
    """Other images have another mean; the network was trained for that of its own."""
    network = small()
    lr.fit(network, data, RECIPE, out=tmp_path / "run", **QUIET)

    def brighter(split: ResidentSplit) -> ResidentSplit:
        return ResidentSplit.of(split.images // 2 + 100, split.labels)

    others = Data("others", data.classes, brighter(data.train), brighter(data.test))
    right = lr.evaluate(tmp_path / "run", others, device="cpu")
    lr.export(lr.load(tmp_path / "run"), tmp_path / "net.safetensors")
    carried = (lr.load(tmp_path / "run"), lr.load(tmp_path / "net.safetensors"), network, copy.deepcopy(network))
    assert [lr.evaluate(net, others, device="cpu") for net in carried] == [right] * 4
    assert lr.evaluate(network, others, recipe=RECIPE, device="cpu").loss != right.loss


def test_weights_that_come_with_the_package_carry_all_and_are_exported_whole(tmp_path):
    pretrained = load_pretrained("nin-c3-lr", "cifar10")
    carried = carried_by(lr.create_model("nin-c3-lr", pretrained="cifar10"))
    assert carried is not None
    assert carried.classes == pretrained.classes
    assert carried_by(lr.create_model("nin-c3-lr", pretrained="cifar10", num_classes=3)) is None
    path = tmp_path / "net.safetensors"
    lr.export(pretrained, path)
    again = load_checkpoint(path)
    assert (again.classes, again.image, again.recipe) == (pretrained.classes, (3, 32, 32), pretrained.recipe)
    for name, value in pretrained.preprocess.to_dict().items():
        assert torch.equal(again.preprocess.to_dict()[name], value)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["lowrank_cnn"])
    for card in ({}, {"data": 3, "recipe": {}}, {"data": {"classes": 2}, "recipe": {}}):
        save_file(load_file(path), path, metadata={"lowrank_cnn": json.dumps({**about, "card": card})})
        with pytest.raises(LowRankError, match="card of its network is damaged"):
            load_checkpoint(path)


def test_a_damaged_run_is_not_evaluated_silently_by_an_older_state(run, data, tmp_path):
    for path in run[0].glob("step-*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    newest = max(tmp_path.glob("step-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(LowRankError, match=rf"{newest.name} is damaged.*step-\d+\.json is the newest whole one"):
        lr.evaluate(tmp_path, data, device="cpu")
    for path in tmp_path.glob("step-*.json"):
        path.write_text("{}")
    with pytest.raises(LowRankError, match=r"every checkpoint .* is damaged, and none can be used"):
        lr.evaluate(tmp_path, data, device="cpu")


def test_what_cannot_be_evaluated_is_refused_in_a_sentence(run, data, tmp_path):
    out = run[0]
    larger = ResidentSplit.of(torch.zeros(4, 1, 20, 20, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    spoilt = own()
    nn.init.constant_(spoilt[4].bias, float("nan"))
    lr.export(
        lr.create_model("nin", num_classes=2, in_channels=1, width=0.05), bare := tmp_path / "net.safetensors"
    )
    (tmp_path / "notes.txt").write_text("")
    cases = [
        (out, dataclasses.replace(data, test=larger), r"1x16x16, halves has images of 1x20x20.*image_size=16"),
        (out, dataclasses.replace(data, classes=("left", "right")), "has 2 others"),
        (own(4), data, "4 outputs for an image, and the data 2 classes"),
        (spoilt, data, "gives NaN on images of"),  # the largest of several NaN is a class like any other
        (bare, data, r"does not say which classes .*lowrank export RUN net\."),
        (tmp_path, data, "holds no checkpoint"),
        (tmp_path / "notes.txt", data, r"ends in one of .*, and notes\.txt does not"),
    ]
    for model, images, says in cases:
        with pytest.raises(LowRankError, match=says):
            lr.evaluate(model, images, device="cpu")


def test_classes_are_matched_by_name(run, data):
    """The test set has one class, which is the second of the network's; two classes may have one name."""
    below = data.test.subset((data.test.labels == 1).nonzero()[:, 0])
    some = Data("some", ("below",), data.train, ResidentSplit.of(below.images, below.labels * 0))
    whole, part = lr.evaluate(run[0], data, device="cpu"), lr.evaluate(run[0], some, device="cpu")
    assert whole.details is not None
    assert (part.top1, part.n) == (whole.details.per_class()[1]["accuracy"], len(below))
    network = nn.Sequential(nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten())
    assert lr.evaluate(network, data, device="cpu").top1 == 1.0
    trained = Trained(network, preprocessing(data.train, Recipe()), Recipe(), ("crane", "crane"), data.test.size)
    assert lr.evaluate(trained, dataclasses.replace(data, classes=("crane", "crane")), device="cpu").top1 == 1.0


def test_a_data_set_of_ones_own_is_evaluated_as_training_counted_it():
    class Halves(TensorDataset):
        classes = ("above", "below")

    images = torch.rand(40, 1, 8, 8)
    images[::2, :, :4] += 1
    data = Halves(images, torch.arange(40) % 2)
    network = own()
    record = lr.fit(network, data, Recipe(epochs=1, batch_size=8), **QUIET)
    unnamed = TensorDataset(images, torch.arange(40, dtype=torch.int32) % 2)
    for again in (data, DataLoader(data, 7), unnamed):
        assert lr.evaluate(network, again, **QUIET).loss == pytest.approx(record.result["loss"], rel=1e-5)
    assert lr.evaluate(own(), data, **QUIET).n == 40


LOGITS = torch.randn(11, 7, generator=torch.Generator().manual_seed(0)).double()
LABELS = torch.arange(11) % 7
BATCHES = list(zip(LOGITS.split(4), LABELS.split(4), strict=True))


def test_batches_count_as_the_whole() -> None:
    found = score(nn.Identity(), BATCHES, device=CPU)
    right = LOGITS.argsort(1, descending=True) == LABELS[:, None]
    assert found.top1 == found.rank == pytest.approx(float(right[:, 0].double().mean()))
    assert found.top5 == pytest.approx(float(right[:, :5].any(1).double().mean()))
    assert found.loss == pytest.approx(float(functional.cross_entropy(LOGITS, LABELS)), rel=1e-5)
    assert (found.n, found.details) == (11, None)
    own_loss = score_by_loss(nn.Identity(), BATCHES, functional.cross_entropy, forward=lambda x: x)
    assert own_loss.loss == pytest.approx(found.loss, rel=1e-6)
    assert (own_loss.top1, own_loss.rank) == (found.top1, -own_loss.loss)
    values = [(part, part * 2) for part, _ in BATCHES]
    other = score_by_loss(nn.Identity(), values, functional.mse_loss, forward=lambda x: x)
    assert other.loss == pytest.approx(float(LOGITS.square().mean()), rel=1e-9)
    assert other.top1 is None


def test_equal_scores_count_once_in_all_figures() -> None:
    """In half precision the two highest scores of many images are equal."""
    logits = torch.randn(2000, 10, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[0], labels = 0, torch.arange(2000) % 10
    found = score(nn.Identity(), [(logits, labels)], device=CPU, classes=list("abcdefghij"))
    assert found.details is not None
    assert found.top1 == float((logits.argmax(1) == labels).double().mean())
    assert found.top1 == int(found.details.confusion.diagonal().sum()) / 2000


def test_every_module_keeps_its_own_mode() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    network[1].eval()  # frozen, in a network that trains
    modes = [module.training for module in network.modules()]
    batches = [(torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))]
    score(network, batches, device=CPU)
    score_by_loss(network, batches, functional.cross_entropy, forward=network)
    check_fits(network, (1, 8, 8), 2, CPU)
    assert [module.training for module in network.modules()] == modes


CLASSES = ("cat", "dog", "owl")


def photos(images: Tensor, labels: Tensor) -> ResidentSplit:
    decoded = Decoded(images, labels, describe="photo {}".format)
    return ResidentSplit(lambda: decoded, (3, 8, 8))


@pytest.fixture
def details() -> EvaluationDetails:
    """Seven images: both dogs and one cat are right, two cats are taken for dogs; there is no owl."""
    sure, unsure = 4.0, 1.0
    labels = torch.tensor([0, 0, 0, 0, 1, 1, 0])
    said = torch.tensor([0, 1, 1, 2, 1, 1, 0])
    logits, images = torch.zeros(7, 3), torch.zeros(7, 3, 8, 8, dtype=torch.uint8)
    logits[torch.arange(7), said] = torch.tensor([sure, sure, unsure, unsure, sure, unsure, sure])
    images[1] = 255
    return details_of(answers(logits, labels), CLASSES, photos(images, labels))


def test_details_count_what_a_few_lines_of_python_count(details: EvaluationDetails) -> None:
    assert details.confusion.tolist() == [[2, 2, 1], [0, 2, 0], [0, 0, 0]]
    assert details.per_class() == [
        {"class": "cat", "n": 5, "accuracy": 0.4},
        {"class": "dog", "n": 2, "accuracy": 1.0},
        {"class": "owl", "n": 0, "accuracy": None},
    ]
    assert details.most_confused() == [
        {"true": "cat", "predicted": "dog", "n": 2, "share": 0.4},
        {"true": "cat", "predicted": "owl", "n": 1, "share": 0.2},
    ]
    assert len(details.most_confused(1)) == 1
    assert details.right is not None
    assert details.right.tolist() == [True, False, False, False, True, True, True]
    assert details_of(torch.zeros(0, 4, dtype=torch.float64), CLASSES).right is None
    sure, unsure = (float(torch.tensor([0.0, x, 0.0], dtype=torch.float64).softmax(0)[1]) for x in (4.0, 1.0))
    expected = (abs(4 * sure - 3) + abs(3 * unsure - 1)) / 7  # all sure answers share a bin, and so do the others
    assert int(sure * BINS) != int(unsure * BINS)
    assert details.calibration_error == pytest.approx(expected, rel=1e-6)


def test_the_worst_images_are_named_and_shown(details: EvaluationDetails) -> None:
    assert {image.image for image in details.worst} == {"photo 1", "photo 2", "photo 3"}
    worst = details.worst[0]
    assert (worst.image, worst.true, worst.predicted) == ("photo 1", "cat", "dog")
    probabilities = torch.tensor([0.0, 4.0, 0.0], dtype=torch.float64).softmax(0)
    assert worst.probability == pytest.approx(float(probabilities[1]), rel=1e-6)
    assert worst.loss == pytest.approx(-float(probabilities[0].log()), rel=1e-6)
    white, black = (thumbnail(torch.full((3, 8, 8), value, dtype=torch.uint8)) for value in (255, 0))
    assert worst.thumbnail == white != black
    written = json.loads(json.dumps(details.to_dict()))
    assert written["confusion"][0] == [2, 2, 1]
    assert sum(row["n"] for row in written["calibration"]["bins"]) == 7
    assert read_details(written).worst[0].thumbnail == white  # pyright: ignore[reportOptionalMemberAccess]
    assert "thumbnail" not in details.to_dict(pictures=False)["worst"][0]
    many = MOST_CLASSES + 1
    large = EvaluationDetails(tuple(map(str, range(many))), torch.eye(many).long(), details.bins)
    assert large.to_dict()["confusion"] is None
    assert large.to_dict()["most_confused"] == []


SCORES, FEATURES = torch.zeros(2, 3), torch.zeros(2, 8)
Named = namedtuple("Named", ["features", "head"])


@dataclass
class Answer:
    head: Tensor
    features: Tensor


@pytest.mark.parametrize(
    ("outputs", "output", "sentence"),
    [
        (SCORES, None, None),
        (SCORES, "0", None),
        ((SCORES, FEATURES), None, None),
        ([SCORES, FEATURES], None, None),
        ({"features": FEATURES, "logits": SCORES}, None, None),
        ({"head": SCORES}, None, None),
        ({"output_0": SCORES, "output_1": FEATURES}, None, None),
        ((FEATURES, SCORES), "1", None),
        ((FEATURES, SCORES), "output_1", None),
        ({"features": FEATURES, "head": SCORES}, "head", None),
        ({"output_0": FEATURES, "output_1": SCORES}, "1", None),
        (Named(FEATURES, SCORES), "head", None),
        (Named(SCORES, FEATURES), None, None),
        (Answer(SCORES, FEATURES), "head", None),
        ({"a": SCORES, "b": FEATURES}, None, r"returns a, b, .* name it by output=NAME\.$"),
        ({"a": SCORES, "b": FEATURES}, "c", r"no tensor as output 'c': its outputs are a, b\.$"),
        ((SCORES, FEATURES), "2", r"no tensor as output '2': its outputs are output_0, output_1\.$"),
        ({"a": None, "b": SCORES}, "a", r"no tensor as output 'a'"),
        (SCORES, "1", r"the network has one output"),
        ("text", None, r"returns a str"),
        ((), None, r"returns a tuple"),
        ({}, None, r"returns a dict"),
    ],
)
def test_the_output_with_the_class_scores_is_found_or_asked_for(outputs, output: str | None, sentence: str | None):
    if sentence is None:
        assert class_scores(outputs, output) is SCORES
        return
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


@pytest.mark.parametrize(("kind", "output"), [(dict, "head"), (tuple, "1")])
def test_a_network_is_trained_evaluated_asked_and_exported_by_the_chosen_output(tmp_path, kind, output):
    pytest.importorskip("onnxruntime")
    images = torch.randint(0, 256, (16, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = ResidentSplit.of(images, torch.arange(16) % 2)
    data, network = Data("some", ("a", "b"), split, split), Several(kind)
    before = network.head.weight.detach().clone()
    recipe = lr.get_recipe("digits", batch_size=4, epochs=1, crop=None, pad=0)
    sentence = (
        r"name it by output=NAME" if kind is dict else r"gives 3x2x2 for an image, and not a score for each class"
    )
    with pytest.raises(LowRankError, match=sentence):
        lr.fit(network, data, recipe, progress=False)
    record = lr.fit(network, data, recipe, output=output, progress=False)
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
