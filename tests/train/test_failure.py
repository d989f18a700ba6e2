"""What goes wrong is said in one sentence: the layer, the batch size, the wish to stop."""

from __future__ import annotations

import os
import re
import signal
import threading

import pytest
import torch
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import Interrupted, NotFiniteError, OutOfMemoryError, fit, load_record
from lowrank_cnn.train.failure import StopRequest, lost_process_as_user_error, oom_as_user_error
from tests.support import assert_equal_weights


def diverge(driver, out, burns_at: int, **options) -> str:
    """Burn the fuse at a batch of three epochs of five, before any checkpoint is due, and give what is said."""
    network = driver.tiny_net()
    network.insert(2, Fuse(burns_at=burns_at))
    with pytest.raises(NotFiniteError) as caught:
        driver.fit(network, driver.tiny_data(), driver.PLAIN, out=out, progress=False, device="cpu", **options)
    return str(caught.value)


def test_a_run_that_diverges_says_how_far_what_was_saved_has_come(driver, tmp_path):
    assert "epoch 2, batch 3" in (says := diverge(driver, None, burns_at=8))
    assert "Nothing is saved: start anew" in says
    assert "The state before any training is saved" in diverge(driver, tmp_path, burns_at=3)
    assert driver.newest(tmp_path) == 0


def test_a_run_that_diverges_names_the_layer_and_keeps_its_last_good_state(driver, tmp_path):
    says = diverge(driver, tmp_path, burns_at=8, checkpoint_every=0.0)
    assert re.search(r"epoch 2, batch 3.*layer '2' \(Fuse\).*resume=True", says)
    assert "The state after 1 of 3 epochs and 2 batches of the next" in says
    assert load_record(tmp_path).status == "failed"
    assert driver.newest(tmp_path) == 7
    assert all(t.isfinite().all() for t in driver.last_weights(tmp_path).values())


class Fuse(nn.Module):
    """Passes everything on until its n-th batch in training, and not a number from then on."""

    def __init__(self, burns_at: int) -> None:
        super().__init__()
        self.left = burns_at

    def forward(self, x):
        self.left -= self.training
        return x * float("nan") if self.left <= 0 else x


def test_out_of_memory_names_the_batch_size():
    with pytest.raises(OutOfMemoryError, match="512 images"), oom_as_user_error(512, torch.device("cpu")):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 99 bytes")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), "^a process that reads images"),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:5] Connection closed"), "^another process of this run"),
        (torch.distributed.DistBackendError("NCCL communicator was aborted"), "^another process of this run"),
    ],
)
def test_a_killed_process_is_told_in_a_sentence(error, sentence):
    with pytest.raises(LowRankError, match=sentence), lost_process_as_user_error():
        raise error


@pytest.mark.parametrize("told", [oom_as_user_error(512, torch.device("cpu")), lost_process_as_user_error()])
def test_other_errors_pass(told):
    with pytest.raises(RuntimeError, match="shape"), told:
        raise RuntimeError("shape mismatch")


def test_a_second_ctrl_c_leaves_at_once():
    with StopRequest().listening() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_stop_after_the_last_step_is_not_lost(driver, tmp_path):
    """`compare` would begin the next run."""

    def ask(row, _network) -> None:
        if row.epoch == driver.PLAIN.epochs:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="after the last step; all is saved"):
        driver.train(tmp_path, driver.PLAIN, callbacks=(ask,))
    assert driver.train(tmp_path, driver.PLAIN, resume=True)[1].status == "finished"
    assert driver.train(None, driver.PLAIN, callbacks=(ask,))[1].status == "finished"  # nothing else would keep it


def test_outside_the_main_thread_nothing_is_listened_to():
    before, seen = signal.getsignal(signal.SIGINT), []

    def elsewhere() -> None:
        with StopRequest().listening():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


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

    whole, stopped = network(0), network(6)  # four times an epoch
    train(whole, tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"after batch 1; all is saved"):
        train(stopped, tmp_path / "stopped")
    train(again := network(0), tmp_path / "stopped", resume=True)
    assert_equal_weights(whole, again)
