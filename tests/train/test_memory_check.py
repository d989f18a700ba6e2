"""A run that cannot fit is refused with its figures before it takes the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, ResidentSplit
from lowrank_cnn.train import Recipe, fit, inputs
from lowrank_cnn.train import checks as memory_check
from lowrank_cnn.train.checks import check_memory, free_memory, map_bytes

CPU = torch.device("cpu")


def photographs(n: int, side: int) -> Data:
    split = ResidentSplit.of(torch.zeros(n, 3, side, side, dtype=torch.uint8), torch.arange(n) % 2)
    return Data("photos", ("a", "b"), split, split)


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)
    )


def test_maps_are_counted_and_scaled_to_large_images() -> None:
    assert map_bytes(net(), (3, 16, 16)) == 4 * (2 * 8 * 16 * 16 + 8 + 8 + 2)
    whole, small = map_bytes(net(), (3, 512, 512)), map_bytes(net(), (3, 128, 128))
    assert whole == 16 * small
    network = net().train()
    map_bytes(network, (3, 16, 16))
    assert network.training
    assert not any(module._forward_hooks for module in network.modules())


def test_what_cannot_fit_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "free_memory", lambda _: 2**20)
    recipe = Recipe(batch_size=16, epochs=1)
    sentence = r"images of 3x64x64 take about .* GiB are free: .*--image-size 64"
    with pytest.raises(LowRankError, match=sentence):
        fit(net(), photographs(16, 64), recipe, progress=False, device="cpu")
    # Before the images are prepared, which takes memory itself.
    monkeypatch.setattr(inputs, "fit_preprocess", lambda *_, **__: pytest.fail("prepared"))
    with pytest.raises(LowRankError, match=sentence):
        fit(net(), photographs(16, 64), recipe, progress=False, device="cpu")
    check_memory(net(), photographs(16, 8), recipe, (3, 8, 8), CPU)


def test_parts_of_a_batch_take_less(monkeypatch: pytest.MonkeyPatch) -> None:
    data = photographs(2, 64)
    monkeypatch.setattr(memory_check, "free_memory", lambda _: 16 * map_bytes(net(), (3, 64, 64)))
    with pytest.raises(LowRankError, match="for a batch of 32"):
        check_memory(net(), data, Recipe(batch_size=32), (3, 64, 64), CPU)
    check_memory(net(), data, Recipe(batch_size=32, accumulate=4), (3, 64, 64), CPU)


def test_the_smaller_of_system_and_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    monkeypatch.setattr(memory_check, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_check, "_CGROUP", tmp_path)
    assert free_memory(CPU) == 2000 * 1024
    (tmp_path / "memory.current").write_text("100\n")
    for limit, free in (("max", 2000 * 1024), ("1100", 1000)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert free_memory(CPU) == free
    monkeypatch.setattr(memory_check, "_MEMINFO", tmp_path / "none")
    monkeypatch.setattr(memory_check, "_CGROUP", tmp_path / "none")
    assert free_memory(CPU) is None
    check_memory(net(), photographs(2, 64), Recipe(), (3, 64, 64), CPU)
