"""A dense conv beside each composite fades in training, and leaves a plain composite."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.branches import DenseHelpers, helped
from lowrank_cnn.train import fit
from lowrank_cnn.train.loop import Trainer
from lowrank_cnn.train.trained import load_checkpoint
from tests.support import assert_equal_weights


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("lr", {"stride": 2}),
        ("lr-join", {"groups": 2}),
        ("lr", {"padding_mode": "reflect"}),
        ("bands", {"groups": 8}),
    ],
)
def test_a_helper_adds_a_dense_conv_times_the_factor(scheme: str, options: dict):
    dense = nn.Conv2d(8, 8, 3, padding=1, **options).double()
    network, x = lr.convert(nn.Sequential(dense), scheme, where="*"), torch.randn(2, 8, 9, 8, dtype=torch.float64)
    plain, names = network(x), list(network.state_dict())
    with helped(network, 0.5) as helpers:
        assert helpers is not None
        torch.testing.assert_close(network(x), plain, rtol=0, atol=0)
        [helper] = (m for name, m in network.named_modules() if name.endswith(DenseHelpers.NAME))
        helper.weight.data.copy_(torch.randn_like(helper.weight))
        helpers.factor.fill_(0.25)
        added: list[Tensor] = []
        helper.register_forward_hook(lambda _, given, result: added.append(result))
        helped_result = network[0](x) if scheme != "lr-join" else network[0].basis(x)
        with torch.no_grad():
            helper.weight.zero_()
            without = network[0](x) if scheme != "lr-join" else network[0].basis(x)
        torch.testing.assert_close(helped_result, without + 0.25 * added[0], rtol=0, atol=1e-12)
    assert list(network.state_dict()) == names
    torch.testing.assert_close(network(x), plain, rtol=0, atol=0)


def composites() -> nn.Module:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)]
    return nn.Sequential(lr.build_conv(1, 6, 3, "lr", padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), *head)


def test_a_run_resumed_before_and_after_the_fade_ends_as_one_that_was_not(driver, tmp_path, monkeypatch):
    recipe = replace(driver.PLAIN, epochs=4, helper=0.5, holdout=0.2, layer_decay=0.9)
    look_around = Trainer._look_around

    def train(name: str, **options):
        network = composites()
        how = {"out": tmp_path / name, "progress": False, "device": "cpu", **options}
        return network, fit(network, driver.tiny_data(), how.pop("recipe", recipe), **how)

    network, record = train("whole")
    plain, without = train("plain", recipe=replace(recipe, helper=0.0))
    assert list(network.state_dict()) == list(plain.state_dict())
    assert record.result["macs"] == without.result["macs"]
    assert not torch.equal(network[0].weights[0], plain[0].weights[0])
    for stop_at in (3, 8, 11):

        def stop_there(self, stop, at=stop_at) -> None:
            stop.received = self.iteration == at
            look_around(self, stop)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_look_around", stop_there)
            with pytest.raises(KeyboardInterrupt):
                train("parts", resume=stop_at > 3)
    again, resumed = train("parts", resume=True)
    assert_equal_weights(network, again)
    assert [row["train_loss"] for row in record.history] == [row["train_loss"] for row in resumed.history]
    assert resumed.result["best_epoch"] > 2
    assert_equal_weights(load_checkpoint(tmp_path / "parts", network=composites()).network, network)
    load_checkpoint(tmp_path / "parts", best=True, network=composites())


def test_helpers_are_not_rounded_or_compiled(driver):
    with pytest.raises(LowRankError, match="helper and quantize exclude each other"):
        fit(composites(), driver.tiny_data(), driver.PLAIN, helper=0.5, quantize="int8")
    with pytest.raises(LowRankError, match="helper trains in one process"):
        fit(composites(), driver.tiny_data(), driver.PLAIN, helper=0.5, compile=True)
