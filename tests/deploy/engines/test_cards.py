"""The card says what a file takes and how to run it."""

from __future__ import annotations

from lowrank_cnn.deploy.engines.targets import write_export_card


def test_a_card_has_shapes_error_and_snippet(check_target):
    path = check_target("onnx", "fp32")
    card = write_export_card(path, "tiny", macs=12_000, error=1e-6, precision="fp32", accuracy="top-1 90%")
    text = card.read_text()
    assert card.name == "net.onnx.md"
    for words in (
        "tiny, fp32, for onnxruntime",
        "image of batchx3x12x12",
        "1.0e-06",
        "top-1 90%",
        "net.onnx",
    ):
        assert words in text
