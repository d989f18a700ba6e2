"""Datasets and DataLoaders of the user's own: any task, any collation, exact resuming."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from inspect import isfunction
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data.own import data_of, listed_labels, named_classes
from lowrank_cnn.data.preprocess import AsGiven
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.evaluate import evaluate, predict
from lowrank_cnn.train.trained import load_checkpoint
from tests.support import assert_equal_weights

RECIPE = Recipe(name="own", batch_size=8, epochs=3, lr=0.1)
ONE = dataclasses.replace(RECIPE, epochs=1)
QUIET = {"progress": False, "device": "cpu"}
IMAGE, LABELS = torch.rand(1, 8, 8), torch.arange(16) % 2


class Halves(Dataset):
    """Bright above (0) or below (1), as floats, prepared by the user."""

    classes = ("above", "below")

    def __init__(self, n: int = 40) -> None:
        self.targets = [number % 2 for number in range(n)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(index))
        image[:, 4 * self.targets[index] : 4 + 4 * self.targets[index]] += 1
        return image, self.targets[index]


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 2)
    )


def test_a_dataset_is_trained_on() -> None:
    record = fit(classifier(), (Halves(), Halves(10)), RECIPE, **QUIET)
    assert record.result["top1"] == 1.0
    assert record.data["classes"] == ["above", "below"]
    assert (record.data["train"], record.data["test"], record.data["prepared_by"]) == (40, 10, "user")
    assert [row["n"] for row in record.result["details"]["per_class"]] == [5, 5]


def test_a_data_loader_brings_its_batch_size_and_its_collation() -> None:
    met = []

    def collate(items: list) -> tuple[Tensor, Tensor]:
        met.append(len(items))
        return torch.stack([image for image, _ in items]), torch.tensor([label for _, label in items])

    sampler = BatchSampler(RandomSampler(Halves()), 20, drop_last=False)
    for brought, size in (({"batch_size": 10, "shuffle": True}, 10), ({"batch_sampler": sampler}, 20)):
        loader = DataLoader(Halves(), collate_fn=collate, **brought)
        assert fit(classifier(), loader, ONE, **QUIET).recipe["batch_size"] == size
    assert set(met) == {10, 20, 40}  # to train on, and at the end to test on


def test_a_sampler_of_ones_own_decides() -> None:
    sampler = WeightedRandomSampler([1.0, 0.0] * 20, 16)
    record = fit(classifier(), (DataLoader(Halves(), 8, sampler=sampler), Halves(10)), RECIPE, **QUIET)
    assert record.result["details"]["per_class"][0]["accuracy"] == 1.0
    assert record.result["top1"] == 0.5  # it has never seen the other class


def test_a_run_resumes_exactly(tmp_path) -> None:
    whole, stopped = classifier(), classifier()
    fit(whole, Halves(), RECIPE, **QUIET)
    fit(stopped, Halves(), RECIPE, epochs=1, out=tmp_path, **QUIET)
    fit(again := classifier(), Halves(), RECIPE, out=tmp_path, resume=True, **QUIET)
    assert_equal_weights(whole, again)


def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs().mean()


IMAGES = torch.rand(32, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("network", "targets", "loss", "below"),
    [
        (nn.Sequential(nn.Conv2d(1, 1, 4), nn.Flatten()), IMAGES.mean((2, 3)), nn.functional.mse_loss, 0.02),
        (nn.Conv2d(1, 2, 1), (IMAGES[:, 0] > 0.5).long(), nn.functional.cross_entropy, 0.69),
        (nn.Sequential(nn.Conv2d(1, 1, 4), nn.Flatten()), torch.arange(32) - 4, absolute, 20),  # no classes
    ],
    ids=["regression", "segmentation", "whole numbers"],
)
def test_other_tasks_by_a_loss_of_ones_own(network: nn.Module, targets: Tensor, loss: Any, below: float) -> None:
    calls = []
    torch.manual_seed(0)  # weights drawn while tests are collected depend on the files collected before
    network.apply(lambda layer: getattr(layer, "reset_parameters", bool)())
    follow = [lambda row, net: calls.append(row.epoch) or row.epoch == 15]  # ends the run
    record = fit(network, TensorDataset(IMAGES, targets), RECIPE, loss=loss, epochs=20, callbacks=follow, **QUIET)
    assert 0 < record.result["loss"] < below
    assert (record.result["top1"], record.history[-1]["accuracy"]) == (None, None)
    assert (calls, record.result["epochs"]) == (list(range(1, 16)), 15)
    assert record.result["best_epoch"] > 1


def test_a_loss_that_is_large_and_falls_does_not_end_the_run() -> None:
    network = nn.Sequential(nn.Conv2d(1, 1, 4), nn.Flatten())
    recipe = dataclasses.replace(RECIPE, holdout=0.2, early_stop=1, epochs=3, lr=0.01, momentum=0.0)
    data = TensorDataset(IMAGES, 100 * IMAGES.mean((2, 3)))
    record = fit(network, data, recipe, loss=nn.functional.mse_loss, **QUIET)
    assert (record.result["loss"] > 1, record.result["epochs"]) == (True, 3)


def test_such_a_run_does_not_pretend_to_know_photographs(tmp_path) -> None:
    image = pytest.importorskip("PIL.Image")
    fit(network := classifier(), Halves(), RECIPE, epochs=1, out=tmp_path / "run", **QUIET)
    image.new("L", (8, 8)).save(tmp_path / "a.png")
    trained = load_checkpoint(tmp_path / "run", network=classifier())
    assert isinstance(trained.preprocess, AsGiven)
    with pytest.raises(LowRankError, match="tensors that your own code prepared"):
        predict(trained, tmp_path / "a.png", device="cpu")
    with pytest.raises(LowRankError, match="predict needs a trained network"):
        predict(network, tmp_path / "a.png", device="cpu")


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


def test_items_are_what_tells_sets_apart() -> None:
    one, same, other = data_of(Halves(), None), data_of(Halves(), None), data_of(Halves(38), None)
    assert one.digest == same.digest != other.digest


def test_classes_are_balanced_by_the_labels_that_a_set_lists() -> None:
    images, labels = torch.rand(16, 1, 8, 8), torch.tensor([0] * 12 + [1] * 4)
    balanced = dataclasses.replace(RECIPE, class_weights="balanced")
    whole = TensorDataset(images, labels)
    assert listed_labels(Subset(whole, [15, 0])).tolist() == [1, 0]
    assert fit(classifier(), whole, balanced, **QUIET).result["n"] == 16

    class Silent(Dataset):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return whole[index]

    with pytest.raises(LowRankError, match="give your Dataset a list `targets`"):
        fit(classifier(), Silent(), balanced, **QUIET)


def test_it_is_told_where_accuracy_is_on_the_images_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert data_of(Halves(), Halves(10)).details == {"prepared_by": "user"}
    record = fit(classifier(), Halves(), RECIPE, epochs=1, device="cpu")
    assert record.data["tested_on"] == "training images"
    assert "the images trained on are used" in capsys.readouterr().out


def test_images_of_ones_own_may_be_smaller_than_a_cutout() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(5, 2))
    recipe = dataclasses.replace(RECIPE, cutout=8, pad=4)
    assert fit(network, TensorDataset(torch.rand(16, 5, 1, 1), LABELS), recipe, **QUIET).result["n"] == 16


class HeadFirst(nn.Module):
    """Its last layer is not the one that was made last."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu().mean((2, 3)))


class Items(Dataset):
    """Items that a function makes, without a list of labels."""

    def __init__(self, make: Callable[[int], Any], n: int = 16) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def test_the_classes_of_a_set_without_names_are_the_outputs_of_the_network() -> None:
    record = fit(HeadFirst(), Items(lambda i: (IMAGE, i % 2)), RECIPE, **QUIET)
    assert record.data["classes"] == ["0", "1"]


@pytest.mark.parametrize("kind", [torch.int32, torch.int16, torch.uint8, torch.bool])
def test_class_numbers_may_be_of_any_whole_type(kind: torch.dtype) -> None:
    data = Items(lambda i: (Halves()[i][0].numpy(), torch.tensor(i % 2, dtype=kind)), 40)
    assert fit(classifier(), data, RECIPE, **QUIET).result["top1"] == 1.0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (Endless(), "a Dataset with a length"),
        (3, "a Dataset or DataLoader, or a pair"),
        ((Halves(), 3), "or a pair of these"),
        (TensorDataset(torch.rand(16, 5), torch.zeros(16)), r"a tensor \[C, H, W\] as image"),
        (TensorDataset(IMAGE.expand(16, 1, 8, 8), LABELS.float()), "its class number, not tensor"),
        (TensorDataset(IMAGE.expand(16, 1, 8, 8), LABELS[:, None]), "its class number, not tensor"),
        (TensorDataset(IMAGE.expand(16, 1, 8, 8), LABELS - 1), "class numbers from 0 on, not -1"),
        (TensorDataset(IMAGE.expand(16, 1, 8, 8), LABELS + 1), "class number 2, and 2 classes"),
        (TensorDataset(torch.zeros(16, 1, 8, 8).byte(), LABELS), "to the network as they are, in float32"),
        (TensorDataset(torch.rand(0, 1, 8, 8), LABELS[:0]), "the data set has no items"),
        (lambda i: (IMAGE, i % 3), "an image of class number 2, and 2 classes, numbered from 0 to 1"),
        (lambda i: (IMAGE, i % 2 if i else -100), "its class number|an image of class number -100"),
        (lambda i: (IMAGE.expand(3 if i == 5 else 1, 8, 8), 0), "images of 1x8x8 and of 3x8x8"),
        (lambda i: (IMAGE, i % 2, "a.png"), r"not \(Tensor \[1, 8, 8\], int, str\)"),
        (lambda i: ({"image": IMAGE}, 0), "cannot take inputs of 1x8x8: .* keyword argument 'image'"),
        (lambda i: ({"image": IMAGE, "name": "a"}, 0), r"not \(dict, int\): .* a training loop of your own"),
        (
            lambda i: ((IMAGE, torch.rand(2 + (i == 5))), 0),
            "images of 2 and of 3, which make no batch|cannot take",
        ),
        (lambda i: (IMAGE, torch.eye(2)[i % 2]), r"take the argmax\(\) of one-hot"),
        (lambda i: (IMAGE.expand(1, 8, 8).permute(1, 2, 0), 0), "Channels come first"),
        (lambda i: (IMAGE * (torch.nan if i == 5 else 1), 0), "an image of epoch 1, batch . has NaN"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_a_sentence(data: Any, says: str) -> None:
    """A function makes the items of a data set."""
    with pytest.raises(LowRankError, match=says):
        fit(classifier(), Items(data) if isfunction(data) else data, RECIPE, **QUIET)


def test_a_worker_tells_of_odd_shapes_in_a_sentence_too() -> None:
    odd = Items(lambda i: (torch.rand(1, 8, 8 + (i == 5)), 0))
    with pytest.raises(LowRankError, match=r"^the data set has images of 1x8x8 and of 1x8x9"):
        fit(classifier(), DataLoader(odd, 8, num_workers=1), RECIPE, **QUIET)


def test_loaders_of_no_batches_or_of_other_batches_are_refused() -> None:
    with pytest.raises(LowRankError, match="makes no batches"):
        fit(classifier(), DataLoader(Halves(), batch_size=None), RECIPE, **QUIET)
    three = DataLoader(Halves(), 8, collate_fn=lambda items: (*default_collate(items), "names"))
    with pytest.raises(LowRankError, match=r"a batch .* not \(Tensor \[8, 1, 8, 8\], Tensor \[8\], str\)"):
        fit(classifier(), three, RECIPE, **QUIET)
    listed = DataLoader(Halves(), 8, collate_fn=lambda items: (torch.rand(8, 1, 8, 8), [0] * 8))
    with pytest.raises(LowRankError, match=r"class numbers \[n\], not \(int, int, int, ...\)"):
        fit(classifier(), listed, RECIPE, **QUIET)


def test_a_collation_may_make_probabilities_to_train_on() -> None:
    soft = DataLoader(Halves(), 8, collate_fn=blended)
    assert fit(classifier(), (soft, Halves()), RECIPE, **QUIET).result["top1"] == 1.0
    with pytest.raises(LowRankError, match=r"class numbers \[n\], not Tensor \[40, 2\]"):
        fit(classifier(), (Halves(), soft), RECIPE, **QUIET)


def blended(items: list[Any]) -> tuple[Tensor, Tensor]:
    images, labels = default_collate(items)
    return images, 0.9 * nn.functional.one_hot(labels, 2) + 0.05


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("mse", "a loss is a function of outputs and targets, not 'mse'"),
        (lambda y, t: nn.functional.cross_entropy(y, t, reduction="none"), r"one number .*, not Tensor \[8\]"),
        (lambda y, t: None, "one number in a tensor for a batch, not NoneType"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, says: str) -> None:
    with pytest.raises(LowRankError, match=says):
        fit(classifier(), Halves(), RECIPE, loss=loss, **QUIET)


def test_parts_know_the_names_of_their_set_and_come_as_a_list() -> None:
    record = fit(classifier(), random_split(Halves(), [30, 10]), RECIPE, epochs=1, **QUIET)
    assert (record.data["classes"], record.data["test"]) == (["above", "below"], 10)
    numbered = Halves()
    numbered.classes = 2
    assert not named_classes(numbered)
    numbered.classes = torch.tensor([3, 5])
    assert named_classes(numbered) == [3, 5]


def test_a_loss_that_would_have_to_learn_is_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs * self.scale, targets)

    with pytest.raises(LowRankError, match=r"the loss has parameters \(scale\)"):
        fit(classifier(), Halves(), ONE, loss=Scaled(), **QUIET)
    fit(classifier(), Halves(), ONE, loss=Scaled().requires_grad_(False), **QUIET)


class ForEver(Sampler):
    """Goes through the items again and again; the number of an epoch's items is told, or is not."""

    def __iter__(self) -> Iterator[int]:
        return cycle(range(6))


class SixAtATime(ForEver):
    def __len__(self) -> int:
        return 6


def test_a_subset_sampler_decides_what_is_tested_on() -> None:
    """The usual split of one data set by two samplers: nothing is trained and tested on."""
    seen: list[int] = []

    class Noted(Halves):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            seen.append(index)
            return super().__getitem__(index)

    train, test = (
        DataLoader(Noted(), 8, sampler=SubsetRandomSampler(part)) for part in (range(32), range(32, 40))
    )
    record = fit(classifier(), (train, test), RECIPE, **QUIET)
    assert (record.result["n"], record.data["train"], record.data["test"]) == (8, 32, 8)
    assert evaluate(classifier(), test, **QUIET).n == 8
    seen.clear()
    fit(classifier(), train, dataclasses.replace(RECIPE, holdout=8), **QUIET)
    assert set(seen) == set(range(32))
    seen.clear()
    fit(classifier(), (DataLoader(Noted(), 8, sampler=RandomSampler(Noted(), num_samples=16)), test), ONE, **QUIET)
    assert len(set(seen) - {0}) in range(16, 26)  # 16 to train on, 8 to test on, and the first to look at


@pytest.mark.parametrize(
    ("sampler", "tested"),
    [
        (WeightedRandomSampler([1.0, 0.0] * 20, 8), 20),
        (BatchSampler(range(12), 8, drop_last=False), 12),
        (RandomSampler(range(40), num_samples=6), 6),
        (RandomSampler(range(40)), 40),
    ],
)
def test_a_test_set_is_what_its_sampler_gives(sampler: Any, tested: int) -> None:
    given = (
        {"batch_sampler": sampler} if isinstance(sampler, BatchSampler) else {"sampler": sampler, "batch_size": 8}
    )
    drawn = torch.random.get_rng_state()
    assert len(data_of(Halves(), DataLoader(Halves(), **given)).test) == tested
    assert torch.equal(drawn, torch.random.get_rng_state())


def test_nothing_is_held_out_of_what_a_sampler_draws() -> None:
    loader = DataLoader(Halves(), 8, sampler=WeightedRandomSampler([1.0, 0.0] * 20, 16))
    with pytest.raises(LowRankError, match="cannot be held out where a DataLoader has a sampler of its own"):
        fit(classifier(), loader, dataclasses.replace(RECIPE, holdout=8), **QUIET)


def test_a_sampler_without_an_end_tells_how_long_an_epoch_is() -> None:
    assert len(data_of(Halves(), DataLoader(Halves(), 2, sampler=SixAtATime())).test) == 6
    for endless in ({"sampler": ForEver()}, {"batch_sampler": BatchSampler(ForEver(), 2, drop_last=False)}):
        with pytest.raises(LowRankError, match="does not say how long an epoch is"):
            data_of(Halves(), DataLoader(Halves(), **endless))
