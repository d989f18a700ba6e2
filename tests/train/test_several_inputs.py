"""`fit` and `evaluate` with networks of several inputs, in a tuple or by keyword."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lowrank_cnn.choose.learn_shapes import learn_shapes
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.deploy.export import load
from lowrank_cnn.train import Recipe, fit
from lowrank_cnn.train.evaluate import evaluate
from tests.support import assert_equal_weights

RECIPE = Recipe(name="own", batch_size=8, epochs=3, lr=0.1)
QUIET = {"progress": False, "device": "cpu"}


class Pair(Dataset):
    """Two grey images. The class is told by the second alone: whether its upper half is brighter."""

    def __init__(self, form: str = "tuple", n: int = 40) -> None:
        self.form, self.targets = form, [number % 2 for number in range(n)]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        first, second = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(index))
        second[:, 4 * self.targets[index] : 4 + 4 * self.targets[index]] += 1
        forms = {
            "tuple": (first, second),
            "dict": {"second": second, "first": first},
            "one": torch.cat([first, second]),
            "nan": (first, second * torch.nan),
        }
        return forms[self.form], self.targets[index]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.last = nn.Linear(32, 2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.last(self.head(torch.cat([self.left(first), self.right(second)], dim=1)))


class Packed(Both):
    """The same network with both images as channels of one."""

    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(image[:, :1], image[:, 1:])


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_training_is_that_of_one_input(form: str):
    several, one = Both(), Packed()
    record = fit(several, (Pair(form), Pair(form, 12)), RECIPE, **QUIET)
    same = fit(one, (Pair("one"), Pair("one", 12)), RECIPE, **QUIET)
    assert_equal_weights(one, several)
    assert record.result["top1"] == same.result["top1"] == 1.0
    assert (record.result["loss"], record.result["n"]) == (same.result["loss"], 12)
    assert record.result["macs"] == same.result["macs"] > 0
    assert evaluate(several, Pair(form, 12), **QUIET).loss == pytest.approx(record.result["loss"])


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_a_loader_with_workers_and_a_loss_of_ones_own(form: str):
    loss = nn.functional.cross_entropy
    record = fit(Both(), DataLoader(Pair(form), 8, num_workers=1), RECIPE, loss=loss, **QUIET)
    assert record.result["n"] == 40
    assert record.result["loss"] < 0.6


def test_a_collation_may_make_the_inputs_and_the_run_is_loaded(tmp_path):
    class InARow(Pair):
        def __getitem__(self, index: int) -> Any:
            inputs, target = super().__getitem__(index)
            return *inputs, target

    def collate(items: list[Any]) -> Any:
        first, second, targets = default_collate(items)
        return {"first": first, "second": second}, targets

    several, one = Both(), Packed()
    fit(several, DataLoader(InARow(), 8, collate_fn=collate), RECIPE, out=tmp_path, **QUIET)
    inputs, _ = next(iter(DataLoader(Pair("dict"), 8)))
    assert torch.equal(load(tmp_path, into=Both())(**inputs), several.eval()(**inputs))
    fit(one, DataLoader(Pair("one"), 8), RECIPE, **QUIET)
    assert torch.equal(several.last.weight, one.last.weight)


@pytest.mark.parametrize(
    "field", [{"mixup": 0.2}, {"whiten_first": True}, {"accumulate": 2}, {"quantize": "int8"}]
)
def test_what_is_done_to_images_is_refused(field: dict[str, Any]):
    with pytest.raises(LowRankError, match=f"{next(iter(field))} is for networks of one image"):
        fit(Both(), Pair(), RECIPE, **field, **QUIET)


def test_teachers_and_learned_shapes_are_refused():
    with pytest.raises(LowRankError, match="a teacher takes one image"):
        fit(Both(), Pair(), RECIPE, teacher=Both(), **QUIET)
    with pytest.raises(LowRankError, match="this is for networks of one image"):
        learn_shapes(Both(), Pair(), RECIPE, macs=0.5, **QUIET)


def test_inputs_that_do_not_fit_are_refused_in_a_sentence():
    with pytest.raises(LowRankError, match="the network cannot take inputs of 1x8x8 and 1x8x8"):
        fit(Packed(), Pair(), RECIPE, **QUIET)
    with pytest.raises(LowRankError, match="one has several inputs, the other images"):
        fit(Both(), (Pair(), Pair("one")), RECIPE, **QUIET)
    with pytest.raises(LowRankError, match=r"an image of epoch 1, batch . has NaN"):
        fit(Both(), (Pair("nan"), Pair()), RECIPE, **QUIET)
