"""`fit`, `evaluate`, `predict` and frontiers with volumes [C, D, H, W], by the path that images take."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.choose.trace import FrontierPlan, trace_frontier
from lowrank_cnn.core.modules import is_example
from lowrank_cnn.data import Augment, fit_preprocess, make_loader, open_data
from lowrank_cnn.data.augment import Mixer
from lowrank_cnn.data.own import data_of
from lowrank_cnn.data.preprocess import AsGiven, Standardize
from lowrank_cnn.train.loop import Trainer
from lowrank_cnn.train.recipe import Recipe
from lowrank_cnn.train.trained import load_checkpoint
from tests.support import assert_equal_weights

SIZE = (2, 5, 6, 7)
RECIPE = Recipe(batch_size=8, epochs=2, lr=0.05, pad=4, cutout=8)
QUIET: dict[str, Any] = {"progress": False, "device": "cpu"}
LABELS = torch.arange(40) % 2
NETWORK = """
from torch import nn
def net(num_classes=2):
    body = nn.Conv3d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv3d(32, 32, 3, padding=1), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, num_classes))
"""


def in_bytes() -> Tensor:
    """Volumes of uint8; those of class 1 are brighter."""
    draw = torch.Generator().manual_seed(0)
    return (torch.randint(100, (40, *SIZE), generator=draw) + 100 * LABELS.view(-1, 1, 1, 1, 1)).byte()


def network(scheme: str = "lr") -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv3d(2, 16, 3, padding=1, bias=False), nn.BatchNorm3d(16), nn.ReLU()]
    body += [nn.Conv3d(16, 24, 3, 2, 1, bias=False), nn.BatchNorm3d(24), nn.ReLU()]
    net = nn.Sequential(*body, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(24, 2))
    return lr.convert(net, scheme, input_size=SIZE)


class Items(Dataset):
    """Volumes that a user's own code reads one by one."""

    targets = LABELS.tolist()

    def __init__(self, volumes: Tensor) -> None:
        self.volumes = volumes

    def __len__(self) -> int:
        return len(self.volumes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.volumes[index], self.targets[index]


@pytest.mark.parametrize("bytes_", [True, False])
def test_tensors_arrays_and_data_sets_give_the_same_run(bytes_: bool):
    x = in_bytes() if bytes_ else in_bytes() / 255
    forms = [Items(x), TensorDataset(x, LABELS), (x, LABELS), (x.numpy(), LABELS.numpy()), DataLoader(Items(x), 8)]
    runs = []
    for form in forms:
        record = lr.fit(net := network(), (form, form), RECIPE, **QUIET)
        runs.append((net, record.result["loss"]))
    assert record.data["image"] == list(SIZE)
    for net, loss in runs[1:]:
        assert loss == pytest.approx(runs[0][1], rel=1e-4)
        for key, value in net.state_dict().items():
            torch.testing.assert_close(value, runs[0][0].state_dict()[key], rtol=1e-3, atol=1e-4)


def test_bytes_are_standardized_and_the_network_carries_how(tmp_path: Path):
    data = (in_bytes(), LABELS)
    record = lr.fit(net := network(), (data, data), RECIPE, epochs=4, out=tmp_path / "run", **QUIET)
    assert record.result["top1"] == 1.0
    trained = load_checkpoint(tmp_path / "run", network=network())
    assert trained.input_size == SIZE
    assert isinstance(trained.preprocess, Standardize)
    assert trained.preprocess.mean.tolist() == pytest.approx(in_bytes().double().mean((0, 2, 3, 4)).tolist())
    x = (in_bytes().float() - trained.preprocess.mean.view(-1, 1, 1, 1)) / trained.preprocess.std.view(-1, 1, 1, 1)
    right = nn.functional.cross_entropy(net.eval()(x), LABELS)
    assert lr.evaluate(net, data, **QUIET).loss == pytest.approx(float(right), rel=1e-4)
    ranking = lr.predict(trained, [in_bytes()[1], in_bytes()[0].numpy()], top=1)
    assert [answer[0][0] for answer in ranking] == ["1", "0"]
    with pytest.raises(lr.LowRankError, match="takes volumes of 2x5x6x7, not Tensor"):
        lr.predict(trained, in_bytes())


def test_floats_are_taken_as_they_are(tmp_path: Path):
    x = in_bytes() / 255
    record = lr.fit(net := network("2+1"), ((x, LABELS), (x, LABELS)), RECIPE, out=tmp_path / "run", **QUIET)
    assert record.result["loss"] == pytest.approx(float(nn.functional.cross_entropy(net.eval()(x), LABELS)))
    trained = load_checkpoint(tmp_path / "run", network=network("2+1"))
    assert isinstance(trained.preprocess, AsGiven)
    assert lr.predict(trained, x[0], device="cpu")[0][0][0] in "01"


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("make", [lambda x: TensorDataset(x, LABELS), Items])
def test_batches_are_channels_last_even_of_one_channel(make, channels: int):
    """By these strides cuDNN and our kernels choose their format."""
    split = data_of(make(in_bytes()[:, :channels]), None).train
    how: dict[str, Any] = {"preprocess": fit_preprocess("standardize", split), "augment": Augment(), "seed": 0}
    batch, _ = next(make_loader(split, batch_size=8, device="cpu", train=True, **how).epoch(0))
    assert batch.stride() == (channels * 5 * 6 * 7, 1, channels * 6 * 7, channels * 7, channels)


@pytest.mark.parametrize("scheme", ["lr", "2+1"])
def test_a_gpu_records_the_step_and_fuses_its_layers(scheme: str, monkeypatch: pytest.MonkeyPatch):
    """The path of a GPU up to the recording, which only a GPU has, gives the same run."""
    loop, data = import_module("lowrank_cnn.train.loop"), (in_bytes(), LABELS)
    plain = lr.fit(one := network(scheme), data, RECIPE, **QUIET)
    running = loop.running_network

    def as_on_a_gpu(trainer: Trainer, say) -> nn.Module:
        assert not is_example(trainer.inputs.size)  # or its steps would not be recorded
        trainer.graphs = True
        found = running(trainer, pytest.fail)
        trainer.graphs = False
        assert {type(part).__name__ for part in found.modules()} & {"NormedConv", "FusedComposite"}
        return found

    monkeypatch.setattr(loop, "running_network", as_on_a_gpu)
    fused = lr.fit(other := network(scheme), data, RECIPE, **QUIET)
    assert fused.result["loss"] == pytest.approx(plain.result["loss"], rel=1e-3)
    for key, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def test_a_run_on_volumes_resumes_exactly(tmp_path: Path):
    data, recipe = (in_bytes(), LABELS), {**QUIET, "holdout": 0.2, "cutmix": 1.0, "test_mirror": True}
    lr.fit(whole := network(), data, RECIPE, **recipe)
    lr.fit(network(), data, RECIPE, epochs=1, out=tmp_path, **recipe)
    lr.fit(again := network(), data, RECIPE, out=tmp_path, resume=True, **recipe)
    assert_equal_weights(whole, again)


def test_cutmix_pastes_a_box_and_counts_it():
    x = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, *SIZE)
    mixed, targets = Mixer(0.0, 1.0, 4, seed=3)(x, torch.arange(4), 0, 0)
    kept = (mixed == x).double().mean((1, 2, 3, 4))
    assert torch.equal((targets > 0).sum(1), 1 + (kept < 1).long())
    torch.testing.assert_close(targets[range(4), range(4)].double(), kept)


@pytest.mark.parametrize(
    "field", [{"zoom": 0.5}, {"auto_augment": "rand"}, {"test_shift": 1}, {"whiten_first": True}, {"jitter": 0.1}]
)
def test_what_needs_images_is_refused(field: dict[str, Any]):
    with pytest.raises(
        lr.LowRankError, match=f"{next(iter(field))} is for networks of one image, .* takes volumes"
    ):
        lr.fit(network(), (in_bytes(), LABELS), RECIPE, **field, **QUIET)


def test_inputs_and_targets_are_as_many():
    with pytest.raises(lr.LowRankError, match=r"are as many, not \(Tensor \[40, 2, 5, 6, 7\], Tensor \[3\]\)"):
        lr.fit(network(), (in_bytes(), LABELS[:3]), RECIPE, **QUIET)


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_an_archive_of_volumes_is_opened_and_a_frontier_traced(tmp_path: Path):
    x, y = in_bytes().numpy(), LABELS.numpy()
    path = write(
        tmp_path / "shapes.npz", X_train=x[:, 0].astype(int), y_train=y[:, None], X_test=x[:8, 0], y_test=y[:8]
    )
    data = open_data(path, limit=30)
    assert (len(data.train), len(data.test), data.train.size, data.classes) == (30, 8, (1, 5, 6, 7), ("0", "1"))
    (tmp_path / "net.py").write_text(NETWORK)
    plan, how = (
        FrontierPlan(("lr",), match=("macs",), seeds=1, rates=(1.0,), batch=0),
        {"epochs": 1, "batch_size": 8},
    )
    quiet: dict[str, Any] = {"settings": how, "device": "cpu", "say": lambda _: None}
    found = trace_frontier(f"{tmp_path}/net.py:net", data, tmp_path / "found", plan, **quiet)
    assert [len(row.runs) for row in found.rows] == [1, 1, 1]


@pytest.mark.parametrize(
    "arrays",
    [
        {"x_train": np.zeros((2, 3))},
        {"x_train": np.zeros((2, 3, 3))},
        {"y_train": np.zeros(3, int)},
        {"y_train": np.zeros(2)},
        {"x_test": np.array([None, None])},
    ],
)
def test_other_archives_are_refused(arrays: dict[str, Any], tmp_path: Path):
    whole = {"x_train": np.zeros((2, 3, 3, 3)), "x_test": np.zeros((2, 3, 3, 3)), "y_train": np.arange(2)}
    path = write(tmp_path / "a.npz", **{**whole, "y_test": np.arange(2), **arrays})
    with pytest.raises(lr.LowRankError, match=r"does not hold x_train|needs volumes \[n, D, H, W\]"):
        open_data(path)
