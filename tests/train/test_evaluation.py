"""A trained network comes back from its checkpoint as it was, and is counted exactly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, ResidentSplit, open_data
from lowrank_cnn.deploy.export import load
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.decompose import decompose
from lowrank_cnn.models import create_model
from lowrank_cnn.train import Recipe, fit, get_recipe
from lowrank_cnn.train.evaluate import Trained, evaluate, how_far, load_checkpoint, predict
from lowrank_cnn.train.inputs import preprocessing
from lowrank_cnn.train.score import score

RECIPE = get_recipe("modern", epochs=2, batch_size=16, warmup=0, mirror=False, pad=1, cutout=0, ema=0.5)


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


@pytest.fixture(scope="module", params=["standardize", "whiten"])
def run(request, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / request.param
    torch.manual_seed(0)
    network = create_model("nin-c3-lr", num_classes=2, in_channels=1, width=0.05, norm="batch")
    recipe = dataclasses.replace(RECIPE, preprocess=request.param, crop=14, zca_epsilon=1.0)
    return out, network, fit(network, data, recipe, out=out, progress=False, device="cpu")


def test_a_run_is_evaluated_as_its_record_says(run, data):
    out, _, record = run
    result = evaluate(out, data, device="cpu")
    assert result.to_dict() == {key: record.result[key] for key in ("top1", "top5", "n", "loss")}
    assert (result.n, result.top5) == (33, 1.0)


def test_the_network_comes_back_with_its_averaged_weights(run):
    out, network, _ = run
    trained = load_checkpoint(out)
    for name, value in network.state_dict().items():
        assert torch.equal(trained.network.state_dict()[name], value), name
    assert trained.classes == ("above", "below")
    assert trained.image == (1, 16, 16)


def rewritten() -> nn.Module:
    """Fitted in part, fresh in part, as a conversion in two steps leaves it."""
    torch.manual_seed(0)
    net = create_model("nin", num_classes=2, in_channels=1, width=0.05, norm="batch")
    return convert(decompose(net, "separable(m=3)", where="*conv2*"), "lr", where="*conv1*")


def test_a_run_of_a_converted_network_is_built_again(data, tmp_path):
    network = rewritten()
    record = fit(network, data, RECIPE, out=tmp_path, progress=False, device="cpu")
    assert record.model["name"] == "nin+separable+lr"
    assert evaluate(tmp_path, data, device="cpu").loss == record.result["loss"]
    again = load(tmp_path)
    assert not again.training
    assert again.state_dict().keys() == network.state_dict().keys()
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in network.state_dict().items())
    newest = max(tmp_path.glob("step-*.safetensors"))
    assert torch.equal(load(newest).features.classes.weight, again.features.classes.weight)


def test_a_run_goes_on_with_the_same_conversion_alone(data, tmp_path):
    fit(rewritten(), data, RECIPE, out=tmp_path, progress=False, device="cpu")
    record = fit(rewritten(), data, RECIPE, epochs=3, out=tmp_path, resume=True, progress=False, device="cpu")
    assert record.result["epochs"] == 3
    dense = create_model("nin", num_classes=2, in_channels=1, width=0.05, norm="batch")
    finer = convert(decompose(dense, "separable(m=4)", where="*conv2*"), "lr", where="*conv1*")
    cases = (
        (dense, r"the network nin\+separable\+lr, and cannot go on with nin: leave"),
        (
            finer,
            r"^this run .* the layer \S*conv2\S* as separable\(m=3\), and cannot go on with separable\(m=4\): ",
        ),
    )
    for other, says in cases:
        with pytest.raises(LowRankError, match=says):
            fit(other, data, RECIPE, epochs=4, out=tmp_path, resume=True, progress=False, device="cpu")


def own() -> nn.Module:
    conv = nn.Conv2d(1, 4, 3, padding=1)
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize("scheme", [None, "lr"])
def test_a_run_of_a_network_of_others_is_loaded_into_it(data, tmp_path, scheme: str | None):
    network = convert(own(), scheme) if scheme else own()
    record = fit(network, data, RECIPE, out=tmp_path, progress=False, device="cpu")
    with pytest.raises(LowRankError, match=r"Sequential is not one of our networks.*load\(path, into=network\)"):
        evaluate(tmp_path, data, device="cpu")
    base = own()
    before = base[0].weight.clone()
    again = load(tmp_path, into=base)
    assert torch.equal(base[0].weight, before)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in network.state_dict().items())
    for given in (own(), again):
        trained = load_checkpoint(tmp_path, network=given)
        assert evaluate(trained, data, device="cpu").loss == record.result["loss"]
    with pytest.raises(LowRankError, match=r"are not those of|has no layer"):
        load(tmp_path, into=nn.Sequential(nn.Conv2d(1, 5, 3)))
    wide = own()
    wide[4] = nn.Linear(8, 5)
    with pytest.raises(LowRankError, match=r"4\.weight is 2x8 in the file and 5x8 in the network"):
        load_checkpoint(tmp_path, network=wide)


def test_the_size_that_a_trained_network_sees_is_known(run):
    assert load_checkpoint(run[0]).input_size == (1, 14, 14)


def test_a_single_file_and_the_best_can_be_named(run, data):
    out, _, record = run
    best = evaluate(load_checkpoint(out, best=True), data, device="cpu")
    assert best.top1 == record.result["best_accuracy"]
    [file] = out.glob("best-*.safetensors")
    assert evaluate(file, data, device="cpu") == best


def test_a_finished_run_is_not_told_to_be_under_way(run):
    out, _, _ = run
    assert how_far(out) is None
    assert how_far(out, best=True) is None
    assert how_far(max(out.glob("step-*.safetensors"))) is None


def test_weights_of_a_run_under_way_are_told_by_its_epochs(data, tmp_path, monkeypatch):
    network = create_model("nin-c3-lr", num_classes=2, in_channels=1, width=0.05, norm="batch")

    def leave(trainer, stop) -> None:
        if trainer.iteration == 6:
            trainer.save()
            raise KeyboardInterrupt

    monkeypatch.setattr("lowrank_cnn.train.loop.Trainer._look_around", leave)
    with pytest.raises(KeyboardInterrupt):
        fit(network, data, RECIPE, out=tmp_path, progress=False, device="cpu")
    assert how_far(tmp_path) == "after 1 of 2 epochs and 2 batches of the next"
    assert how_far(tmp_path, best=True) == "after 1 of 2 epochs"
    [best] = tmp_path.glob("best-*.safetensors")
    assert how_far(best) == "after 1 of 2 epochs"
    assert how_far(tmp_path / "step-00000000") == "before any training"


def test_the_batch_size_does_not_matter(run, data):
    out, _, _ = run
    one, many = (evaluate(out, data, batch_size=size, device="cpu") for size in (1, 33))
    assert (one.top1, one.n) == (many.top1, many.n)
    assert one.loss == pytest.approx(many.loss, rel=1e-5)


def test_predictions_agree_with_the_evaluation(run, data, tmp_path):
    image = pytest.importorskip("PIL.Image")
    out, _, record = run
    paths = [tmp_path / f"{i}.png" for i in range(len(data.test))]
    for path, pixels in zip(paths, data.test.images, strict=True):
        image.fromarray(pixels[0].numpy()).save(path)
    answers = predict(out, paths, device="cpu")
    hits = sum(answer[0][0] == data.classes[y] for answer, y in zip(answers, data.test.labels, strict=True))
    assert hits / len(paths) == record.result["top1"]
    assert sum(p for _, p in answers[0]) == pytest.approx(1.0, rel=1e-5)
    assert answers[0][0][1] >= answers[0][1][1]
    assert predict(out, paths[0], device="cpu") == predict(out, str(paths[0]), device="cpu") == answers[:1]


class Probe(nn.Module):
    """Says the first of two classes."""

    def forward(self, x):
        return x.new_tensor([[1.0, 0.0]]).expand(len(x), 2)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("sizes", [[(20, 20)] * 4, [(20, 26), (31, 20), (40, 40), (18, 22)]], ids=["one", "many"])
@pytest.mark.parametrize("framing", [{"crop": 14}, {"crop": 14, "resize": 16}, {"crop": 28, "resize": 32}])
def test_predict_shows_the_network_what_evaluate_does(tmp_path, mode, sizes, framing):
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "val"):
        for number, size in enumerate(sizes):
            path = tmp_path / part / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.effect_noise(size, 90).convert(mode).save(path)
    images = open_data(tmp_path)
    recipe = dataclasses.replace(Recipe(), **framing)
    trained = Trained(Probe(), preprocessing(images.train, recipe), recipe, images.classes, images.test.size or ())
    seen: list[torch.Tensor] = []
    trained.network.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    evaluate(trained, images, batch_size=1, device="cpu")
    evaluated = seen[-len(sizes) :]
    predict(trained, sorted(tmp_path.glob("val/*/*.png")), device="cpu")
    predicted = seen[-len(sizes) :]
    side, channels = framing["crop"], len(image.new(mode, (1, 1)).getbands())
    assert torch.cat(predicted).shape == (len(sizes), channels, side, side)
    torch.testing.assert_close(torch.cat(predicted), torch.cat(evaluated))


def test_images_of_another_size_than_in_training_are_refused(run, data):
    out, _, _ = run
    larger = ResidentSplit.of(torch.zeros(4, 1, 20, 20, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(LowRankError, match=r"1x16x16, halves has images of 1x20x20.*image_size=16"):
        evaluate(out, dataclasses.replace(data, test=larger), device="cpu")


@pytest.mark.parametrize("top", [0, -1, "x", 1.5])
def test_at_least_one_class_is_named(run, top):
    out, _, _ = run
    with pytest.raises(LowRankError, match=f"at least 1, not {top!r}"):
        predict(out, [], top=top, device="cpu")


def test_a_network_alone_does_not_predict():
    with pytest.raises(LowRankError, match="predict needs a trained network"):
        predict(nn.Linear(1, 1), [])


def test_an_image_of_another_size_and_colour_is_fitted(run, tmp_path):
    image = pytest.importorskip("PIL.Image")
    out, _, _ = run
    image.new("RGB", (50, 40), (200, 10, 10)).save(tmp_path / "red.png")
    [answer] = predict(out, [tmp_path / "red.png"], top=1, device="cpu")
    assert len(answer) == 1


def test_what_is_no_image_is_named(run, tmp_path):
    out, _, _ = run
    (tmp_path / "text.png").write_text("hello")
    for name, sentence in (("text.png", "not an image"), ("absent.png", "cannot be read")):
        with pytest.raises(LowRankError, match=sentence):
            predict(out, [tmp_path / name], device="cpu")


def test_other_classes_are_refused(run, data):
    out, _, _ = run
    with pytest.raises(LowRankError, match="has 2 others"):
        evaluate(out, dataclasses.replace(data, classes=("left", "right")), device="cpu")


def test_a_damaged_run_is_not_evaluated_silently_by_an_older_state(run, data, tmp_path):
    out, _, _ = run
    for path in out.glob("step-*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    newest = max(tmp_path.glob("step-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(LowRankError, match=rf"{newest.name} is damaged.*step-\d+\.json is the newest whole one"):
        evaluate(tmp_path, data, device="cpu")
    for path in tmp_path.glob("step-*.json"):
        path.write_text("{}")
    with pytest.raises(LowRankError, match=r"every checkpoint .* is damaged, and none can be used"):
        evaluate(tmp_path, data, device="cpu")


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(LowRankError, match="holds no checkpoint"):
        load_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(LowRankError, match=r"ends in one of .*, and notes\.txt does not"):
        load_checkpoint(tmp_path / "notes.txt")


def test_a_bare_network_is_evaluated_too(data):
    network = nn.Sequential(nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten())
    assert evaluate(network, data, device="cpu").top1 == 1.0
    with pytest.raises(LowRankError, match="4 outputs for an image, and the data 2 classes"):
        evaluate(nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten()), data, device="cpu")


def test_a_network_that_gives_nan_has_no_accuracy(data):
    """The largest of several NaN is the first: it would be right for all images of the first class."""

    class Spoilt(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean((2, 3))[:, :1].expand(-1, 2) * float("nan")

    with pytest.raises(LowRankError, match="gives NaN on images of"):
        evaluate(Spoilt(), data, device="cpu")


def test_hits_are_counted_by_hand():
    logits = torch.tensor([[5.0, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5], [9, 8, 7, 6, 5, 0], [1, 0, 0, 0, 0, 2]])
    labels = torch.tensor([0, 4, 5, 5])
    result = score(nn.Identity(), [(logits[:3], labels[:3]), (logits[3:], labels[3:])], device=torch.device("cpu"))
    assert (result.top1, result.top5, result.n) == (2 / 4, 3 / 4, 4)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item())


def test_evaluating_leaves_the_mode_of_the_network():
    network = nn.Dropout()
    score(network, [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))], device=torch.device("cpu"))
    assert network.training


def test_images_of_some_classes_are_matched_by_name(run, data):
    """The test set has one class, which is the second of the network's."""
    out, _, _ = run
    below = data.test.subset((data.test.labels == 1).nonzero()[:, 0])
    some = Data("some", ("below",), data.train, ResidentSplit.of(below.images, below.labels * 0))
    whole, part = evaluate(out, data, device="cpu"), evaluate(out, some, device="cpu")
    assert whole.details is not None
    assert part.top1 == whole.details.per_class()[1]["accuracy"]
    assert part.n == len(below)


def test_classes_of_one_name_are_matched_in_their_order(data):
    """As ILSVRC's two cranes: a bird and a machine."""
    network = nn.Sequential(nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten())
    trained = Trained(network, preprocessing(data.train, Recipe()), Recipe(), ("crane", "crane"), data.test.size)
    cranes = dataclasses.replace(data, classes=("crane", "crane"))
    assert evaluate(trained, cranes, device="cpu").top1 == 1.0


def test_the_worst_images_are_named(run, data):
    out, _, record = run
    found = evaluate(out, data, device="cpu").details
    assert found is not None
    assert record.result["details"] == found.to_dict()
    assert all(image.image.startswith("image ") for image in found.worst)


def test_a_data_set_of_ones_own_is_evaluated_as_training_counted_it():
    class Halves(TensorDataset):
        classes = ("above", "below")

    images = torch.rand(40, 1, 8, 8)
    images[::2, :, :4] += 1
    data = Halves(images, torch.arange(40) % 2)
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    told = {"progress": False, "device": "cpu"}
    record = fit(network, data, Recipe(epochs=1, batch_size=8), **told)
    unnamed = TensorDataset(images, torch.arange(40, dtype=torch.int32) % 2)
    for again in (data, DataLoader(data, 7), unnamed):
        assert evaluate(network, again, **told).loss == pytest.approx(record.result["loss"], rel=1e-5)
    fresh = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 2))
    assert evaluate(fresh, data, **told).n == 40
