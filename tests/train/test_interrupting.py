"""A request to stop is heard within a step, and a run stopped there goes on as if it never was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowrank_cnn.train import Interrupted, fit
from lowrank_cnn.train.failure import StopRequest
from lowrank_cnn.train.interrupting import StoppedWithin, stopping_within


class Asks(nn.Module):
    """Asks to stop when it computes for the n-th time, forward or backward."""

    def __init__(self, stop: dict, at: int, *, backward: bool) -> None:
        super().__init__()
        self.stop, self.at, self.backward, self.calls = stop, at, backward, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        self.calls += 1
        if self.calls == self.at and self.backward:
            x.register_hook(lambda gradient: self.ask())
        elif self.calls == self.at:
            self.ask()
        return x

    def ask(self) -> None:
        self.stop["request"].received = True


@pytest.mark.parametrize("backward", [False, True])
def test_a_run_stopped_within_a_step_goes_on_exactly(driver, tmp_path, monkeypatch, backward: bool):
    stop: dict = {}
    listening = StopRequest.listening
    monkeypatch.setattr(StopRequest, "listening", lambda self: stop.update(request=self) or listening(self))

    def network(at: int) -> nn.Module:
        layers = list(driver.tiny_net(stateful=True).children())
        return nn.Sequential(*layers[:3], Asks(stop, at, backward=backward), *layers[3:])

    def train(net: nn.Module, out, **more):
        return fit(
            net, driver.tiny_data(), driver.STATEFUL, epochs=3, out=out, progress=False, device="cpu", **more
        )

    whole, stopped = network(0), network(7)  # once to look for dropout, four times an epoch
    train(whole, tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"after batch 1; all is saved"):
        train(stopped, tmp_path / "stopped")
    train(again := network(0), tmp_path / "stopped", resume=True)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_layers_are_left_alone_afterwards():
    network, stop = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), StopRequest()
    with stopping_within(network, stop):
        network(torch.ones(1, 2)).sum().backward()
        stop.received = True
        with pytest.raises(StoppedWithin):
            network(torch.ones(1, 2))
    network(torch.ones(1, 2))


def test_it_is_said_at_once(capsys):
    stop = StopRequest()
    with stop.listening():
        stop._receive(2, None)
        stop._receive(2, None)
    assert capsys.readouterr().err.count("Stopping at the next safe point") == 1
