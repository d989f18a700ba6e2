"""`lr.find_lr` and `lowrank train --find-lr`: a rate is suggested, and nothing else changes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lowrank_cnn as lr
from lowrank_cnn.cli.app import build
from lowrank_cnn.core.errors import LowRankError

QUIET = {"device": "cpu", "steps": 30}


def test_a_rate_below_the_one_with_the_lowest_loss_is_suggested(driver) -> None:
    network = driver.tiny_net(stateful=True)
    before, drawn = {name: t.clone() for name, t in network.state_dict().items()}, torch.get_rng_state()
    tested = lr.find_lr(network, driver.tiny_data(), driver.PLAIN, **QUIET)
    assert tested.rate is not None
    lowest = tested.rates[tested.losses.index(min(tested.losses))]
    assert lowest / 6 < tested.rate < lowest / 3
    assert tested.rates[0] == 1e-4
    assert tested.rates[-1] == pytest.approx(10) or len(tested.rates) < 30
    assert f"Suggested rate: {tested.rate:g}." in str(tested)
    assert all(torch.equal(before[name], t) for name, t in network.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    same = lr.find_lr(network, driver.tiny_data(), driver.PLAIN, **QUIET)
    assert same == tested


def test_a_loss_that_is_no_number_ends_the_test(driver) -> None:
    def lost(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(outputs, targets)
        calls.append(loss)
        return loss * float("nan") if len(calls) > 12 else loss

    calls: list[torch.Tensor] = []
    flat = lr.find_lr(driver.tiny_net(), driver.tiny_data(), driver.PLAIN, loss=lambda a, _: a.sum() * 0, **QUIET)
    assert str(flat).startswith("No rate is suggested: the loss did not fall in 30 steps")
    assert len(lr.find_lr(driver.tiny_net(), driver.tiny_data(), driver.PLAIN, loss=lost, **QUIET).rates) == 12
    with pytest.raises(LowRankError, match="not finite at the lowest rate"):
        lr.find_lr(driver.tiny_net(), driver.tiny_data(), driver.PLAIN, loss=lost, **QUIET)


def test_the_command_prints_a_sentence_and_draws_the_losses(tmp_path: Path, monkeypatch) -> None:
    net = "nn.Sequential(nn.Conv2d(1, 4, 5, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))"
    (tmp_path / "mine.py").write_text(f"from torch import nn\ndef net(): return {net}\n")
    words = ["train", f"{tmp_path}/mine.py:net", "--data", "digits", "--limit", "64", "--find-lr"]
    words += ["--device", "cpu"]
    words += ["--set", "norm=none", "--out", str(tmp_path / "run")]
    told = json.loads(CliRunner().invoke(build(), [*words, "--json"], catch_exceptions=False).stdout)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["find-lr.svg"]
    assert told["picture"].endswith("find-lr.svg")
    assert len(told["rates"]) == len(told["losses"]) > 10
    assert "Learning rate" in (tmp_path / "run" / "find-lr.svg").read_text()
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    shown = CliRunner().invoke(build(), words, catch_exceptions=False).stdout
    assert f"Suggested rate: {told['rate']:g}." in shown
    assert "There is no picture: " in shown
    assert "64 images: batches of 16, 200 epochs, rate 0.04, 800 steps in all." in shown
