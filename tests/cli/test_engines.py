"""`lowrank plan --engine`: the engines that are there, the fastest, its file."""

from __future__ import annotations

import json


def test_one_engine_is_timed_and_written(output_of, tmp_path):
    out = tmp_path / "files"
    text = output_of("plan", "nin-c3-lr", "--width", "0.1", "--engine", "torchscript", "--out", out, "--json")
    found = json.loads(text)
    assert found["fastest"].startswith("torchscript")
    assert set(found["times"]) <= {"torchscript, fp32", "torchscript, fp16"}
    assert found["rival"].keys() == found["times"].keys()
    assert "A thinner dense network of the same MACs takes" in found["verdict"]
    assert found["path"] == str(out / "net.ts")
    assert (out / "net.ts").is_file()
