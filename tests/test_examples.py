"""The examples in miniature, and what they claim: compiled, in bfloat16, and in several processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

import lowrank_cnn as lr
from tests.support import ROOT, load_file

SMALL = ("--epochs", "1", "--limit", "128")


def run(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def plain_loop(monkeypatch: pytest.MonkeyPatch):
    """The example as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    module = load_file("examples/plain_loop.py")
    monkeypatch.setitem(sys.modules, "plain_loop", module)
    return module


def test_a_plain_loop_learns(plain_loop, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plain_loop.py", "--limit", "600"])
    plain_loop.main()
    told = capsys.readouterr().out
    assert float(told.partition("%")[0]) > 50  # of ten digits, after three epochs of 600
    assert "of the MACs" in told
    assert "ms an image" in told


def test_a_converted_network_trains_in_bfloat16(plain_loop):
    torch.manual_seed(0)
    images, labels, _, _ = plain_loop.digits(16)
    network = lr.convert(plain_loop.make(), "lr-join")
    before = [p.clone() for p in network.parameters()]
    plain_loop.train(network, images, labels, epochs=1, amp=True, batch=8)
    assert all(torch.isfinite(p).all() for p in network.parameters())
    assert not any(torch.equal(*pair) for pair in zip(before, network.parameters(), strict=True))


def test_a_lightning_module_trains_a_converted_network(plain_loop, monkeypatch, capsys):
    pytest.importorskip("pytorch_lightning")
    monkeypatch.setattr(sys, "argv", ["lightning_loop.py", *SMALL])
    load_file("examples/lightning_loop.py").main()
    assert "ms an image" in capsys.readouterr().out


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_several_processes_train_a_converted_network(kind: str):
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert "of the MACs" in run(*launch, str(ROOT / "examples" / "plain_loop.py"), "--parallel", kind, *SMALL)


@pytest.mark.parametrize("scheme", ["lr-join", pytest.param("separable", marks=pytest.mark.nightly)])
def test_torch_compile_gives_the_same_outputs_and_gradients(plain_loop, scheme: str):
    """Traced by Dynamo and AOTAutograd; that Inductor makes kernels of it is torch's own business."""
    torch.compiler.reset()  # torch compiles a class, such as Sequential, so many times in a process and no more
    torch.manual_seed(0)
    network = lr.convert(plain_loop.make(), scheme).double()
    images, labels = torch.randn(4, 1, 28, 28, dtype=torch.float64), torch.tensor([1, 2, 3, 4])
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    gradients = []
    for forward in (network, compiled):
        network.zero_grad()
        F.cross_entropy(forward(images), labels).backward()
        gradients.append([p.grad.clone() for p in network.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-9, atol=1e-12)
