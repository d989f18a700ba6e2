"""`lowrank export` to engines: a directory by --to, half precision, int8 with accuracy, and sentences."""

from __future__ import annotations

import pytest

from lowrank_cnn.data import open_data

SMALL = ("--width", "0.1", "--input", "3x30x30")


def test_a_target_gets_a_directory_with_a_card(output_of, tmp_path):
    text = output_of("export", "nin-c3-lr", "-o", tmp_path / "phone", "--to", "torchscript", "--fp16", *SMALL)
    assert sorted(file.name for file in (tmp_path / "phone").iterdir()) == ["nin-c3-lr.ts", "nin-c3-lr.ts.md"]
    assert 'torch.jit.load("nin-c3-lr.ts")' in text
    assert "fp16" in (tmp_path / "phone" / "nin-c3-lr.ts.md").read_text()


def test_int8_prints_the_accuracy_before_and_after(output_of, tmp_path, monkeypatch):
    few = open_data("digits", limit=60, progress=False)
    monkeypatch.setattr("lowrank_cnn.deploy.quantizing.open_data", lambda *_, **__: few)
    run = tmp_path / "run"
    small = ("--limit", "60", "--batch-size", "16", "--width", "0.05", "--epochs", "1", "--device", "cpu")
    output_of("train", "nin-c3-lr", "--data", "digits", "--recipe", "digits", *small, "--out", run)
    text = output_of("export", run, "-o", tmp_path / "net.int8.onnx", "--int8", "--calibrate", "digits")
    assert "in int8, on 60 test images" in text
    assert "Layers that stay in float:" in text
    assert (tmp_path / "net.int8.onnx.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nin", "-o", "phone", "--to", "tensorrt"], "trtexec"),
        (["nin", "-o", "phone", "--to", "onx"], "did you mean onnx"),
        (["nin"], "say once where to write"),
        (["nin", "net.onnx", "--int8"], "give --calibrate"),
        (["nin", "net.onnx", "--int8", "--calibrate", "digits"], "for a trained network"),
    ],
)
def test_mistakes_are_one_sentence(arguments, words, lowrank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = lowrank("export", *arguments)
    assert words in str(done.exception)
    assert not list(tmp_path.iterdir())
