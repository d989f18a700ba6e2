"""Bad input, damaged files and full machines end in one sentence and exit code 2, whatever the command."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import typer
from torch import nn

from lowrank_cnn.cli import app
from lowrank_cnn.core.errors import LowRankError


def without_convs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


@pytest.mark.filterwarnings("ignore")
def scripted() -> nn.Module:
    return torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))


HERE, OWN = f"{__file__}:", ("--input", "3x8x8")


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """Run a command in an empty folder: its one sentence. It prints nothing else, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # Python's own cache of the user's file does not count

    def run(*arguments: object) -> str:
        before = list(tmp_path.iterdir())
        assert app.run([str(argument) for argument in arguments]) == 2
        done = capsys.readouterr()
        assert (done.out, list(tmp_path.iterdir())) == ("", before)
        assert len(done.err.strip().splitlines()) == 1
        return done.err

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("count vgg12", "did you mean vgg11"),
        ("train resnet50 --data digits", "Or timm:resnet50, torchvision:resnet50?"),
        ("train nin --data imagenet", "there is no data at imagenet: give digits, a folder"),
        ("train nin --data digits --pretrained imagenet", "there are: nin on cifar10, nin-c3 on cifar10"),
        ("train nin --data digits --recipe imagenet", "there is no recipe 'imagenet'; known are"),
        ("count vgg11 --input 224x224", "CHANNELSxHEIGHTxWIDTH"),
        (f"count {HERE}without_convs", "give --input"),
        (f"count {HERE}without_convs --width 2", "width can be set for our own"),
        (f"convert {__file__}", "names no network"),
        (f"convert {HERE}scripted --input 3x8x8", "the model is scripted"),
        (f"convert {HERE}without_convs --input 3x8x8", "Sequential has no convolutions"),
        (f"convert {HERE}nett", "no function 'nett'"),
        ("convert nim", "did you mean nin"),
        ("convert net.pt", "names no network"),
        ("convert nothing.py:net", "no file nothing.py"),
        ("convert torchvision:vgg11 --width 0.5", "taken as it is; width can be set"),
        ("convert nin --where layer1", "no convolution is called 'layer1'"),
        ("convert nin --stage 4", "has 3 stages"),
        ("convert nin-c3-lr", "the network is low-rank already (4 of its layers), and nothing is left to convert"),
        ("convert nin-c3-lr --stage 1", "low-rank already (4 of its layers), and nothing is left to convert"),
        ("decompose nin-c3-lr", "low-rank already (4 of its layers), and nothing is left to convert"),
        ("decompose nin --macs 0.6 --by accuracy", "--by accuracy is measured on images of a data set"),
        ("time nin --repeats 1", "number of at least 3"),
        ("time nin --threads 0", "threads must be a number of at least 1"),
        ("time nin --device gpu", "no device 'gpu'"),
        ("time net.onnx", "no file net.onnx"),
        ("time net.onnx --scheme lr", "without --scheme"),
        ("compare nin --at-most 3ms", "are for training: add --data"),
        ("compare nin --data digits --at-most soon", "a time such as 3ms"),
        ("compare nin --data digits --at-least most", "an accuracy such as 90%"),
        ("compare nin --data digits --macs 0.5", "--macs is for advice without --data"),
        ("plan nin --budget -1", "budget, in seconds, must be a number above 0, not -1.0"),
        ("plan nin --engine auto --batch 4", "one image at a time"),
        ("demo --json --device cuda:x", "no device"),
        ("export nin", "say once where to write"),
        ("export nin net.bin", "ends in one of .onnx"),
        ("export nin -o phone --to tensorrt", "trtexec"),
        ("export nin -o phone --to onx", "did you mean onnx"),
        ("export nin -o net.onnx --strips --precision int8", "int8 is written without --strips"),
        ("export nin net.onnx --precision int8 --opset 17", "int8 is written without --opset"),
        ("export nin -o net.pt2 --strips", "run in ONNX Runtime"),
        ("export nin net.onnx --precision int8", "give --calibrate"),
        ("export nin net.onnx --precision int8 --calibrate digits", "give --calibrate path.py:function"),
        ("export vgg11-gmp net.onnx --pretrained cifar10", "no weights of vgg11-gmp on cifar10"),
        ("export net.safetensors net.onnx --pretrained cifar10", "taken with the weights it has"),
        (f"export {HERE}without_convs n.onnx --example two.py", "as path.py:function"),
        (f"export {HERE}without_convs n.onnx --example no.py:f", "no file no.py"),
        (f"export {HERE}without_convs n.onnx --example {HERE}nothing", "has no function 'nothing'"),
        ("predict nowhere x.png", "nowhere is no trained network: give a run"),
        ("predict nowhere.onnx x.png", "nowhere.onnx does not exist"),
        ("predict nin-c3-lr x.png", "no trained network: give a run's directory, an exported file, or nin"),
        ("predict nin-c3-lr x.png --pretrained cifar10 --top=-1", "at least 1, not -1"),
        ("evaluate nin --data digits --pretrained cifar10 --best", "--best is for runs"),
        (f"evaluate {__file__} --data digits --pretrained cifar10", "is for networks by name"),
        ("evaluate nin --data digits", "or nin --pretrained cifar10 or"),
        ("train nin --config none.toml", "cannot be read"),
        ("report .", "no record in .; make one first: lowrank train"),
        ("report nowhere", "no file or folder nowhere"),
        ("report -o - --json", "--json"),
        ("figure big-picture", "did you mean big-picture-macs"),
        ("audit --runs nowhere", "nowhere"),
        ("frontier airbensh --out .", "no network 'airbensh'; did you mean airbench"),
        ("frontier airbench --design x --out .", "neither a design"),
        ("frontier nin --out .", "no record"),
        ("frontier nin --data digits --budget -1 --out .", "budget, in seconds, must be a number above 0"),
        ("design nin --macs 2", "at most 1"),
        ("design nin", "needs a budget"),
        ("reproduce cifar10 --out .", "give --data, or --table"),
        ("reproduce cifar10 --table --out typo", "typo"),
        ("train nin --data digits --scheme learned --macs 0", "above 0"),
        ("train nin --data digits --scheme learned", "need a budget"),
        ("train nin --data digits --macs 0.5", "is the share that a scheme keeps"),
        ("train nin --data digits --shapes nowhere.json", "cannot be read"),
        ("train nin --data digits --shapes nowhere.json --scheme lr", "not both"),
        ("train nin --data digits --resume", "give --out"),
        ("train nin --data digits --pretrained cifar10 --width 0.5", "are for width=1.0"),
        ("train nin --data digits --thin 0.5 --scheme lr", "dense filters fewer: leave --scheme"),
        ("train nin --data digits --set lrr=1", "no field 'lrr'"),
        ("train nin --data . --out .", "holds the images to train on"),
        ("train nin --data digits --device meta", "no device"),
        ("train nin --data digits --log paper", "paper"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(refused, arguments: str, says: str):
    assert says in refused(*arguments.split())


@pytest.mark.parametrize(
    ("option", "says"), [("--threads", "1024"), ("--batch", "1000000"), ("--batch", "--batch")]
)
@pytest.mark.parametrize("command", ["time", "plan", "design", "optimize"])
def test_numbers_that_no_machine_has_are_refused(command, option, says, capsys):
    number = 10**21 if says.isdigit() else 0
    assert app.run([command, "nin", option, str(number)]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def net():\n    return 3", r"mine.py:net is to give an nn.Module, but gives 3."),
        ("def net(size):\n    return size", "does not run: TypeError: net() missing 1 required"),
        ("1 / 0", "does not run: ZeroDivisionError"),
        ("raise ValueError('first line\\nsecond line')", "mine.py does not run: ValueError: first line\n"),
    ],
)
def test_errors_of_the_users_own_file_are_one_sentence(refused, tmp_path, text, says):
    (tmp_path / "mine.py").write_text(text)
    assert says in refused("convert", "mine.py:net", *OWN)


def raised_by(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def ending_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command that raises this."""
    built = typer.Typer()

    @built.command()
    def fail() -> None:
        raise error

    monkeypatch.setattr(app, "build", lambda: built)
    return app.run([])


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (LowRankError("this is wrong: do that."), 2, "lowrank: this is wrong: do that."),
        (FileNotFoundError(2, "No such file", "there"), 2, "lowrank: there: No such file."),
        (MemoryError(), 2, "not enough memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 2, "memory"),
        (OSError(24, "Too many open files", "a.png"), 2, "too many files are open: use fewer --workers"),
        (RuntimeError("Too many open files. Communication with the workers is no longer possible."), 2, "ulimit"),
        (raised_by(lambda: "cat\ud800".encode()), 2, "'cat\\ud800' holds half of a surrogate pair"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(143), 143, ""),
    ],
)
def test_how_a_command_ends(error, code, told, monkeypatch, capsys):
    assert ending_with(error, monkeypatch) == code
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("fault", [ZeroDivisionError, RecursionError])
def test_a_fault_of_ours_is_not_hidden(monkeypatch, fault):
    with pytest.raises(fault):
        ending_with(fault(), monkeypatch)


def test_more_memory_than_there_is_is_one_sentence(refused):
    assert "not enough memory" in refused("plan", "nin", "--batch", 10**6, "--input", "3x9999x9999", "--no-twin")


@pytest.mark.parametrize("option", ["--config", "--shapes"])
def test_options_that_are_nested_deeply_are_one_sentence(refused, tmp_path, option):
    (tmp_path / "deep.json").write_text('{"a":' * 100_000)
    assert "deep.json" in refused("train", "nin", "--data", "digits", option, tmp_path / "deep.json")
