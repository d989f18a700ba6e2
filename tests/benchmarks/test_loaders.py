"""The loaders' benchmark measures every way, alone and under a network, and keeps other machines' entries."""

from __future__ import annotations

import io
import json
import sys

import pytest


@pytest.fixture(scope="module")
def measured(benchmark_module, tmp_path_factory):
    """The record of a run over a few small photographs, into a file that has an entry of another machine."""
    loaders, out = benchmark_module("loaders"), tmp_path_factory.mktemp("loaders") / "loaders.json"
    out.write_text(json.dumps({"machines": [{"environment": {"cpu": "another", "gpu": None}}]}))
    words = ["--images", "8", "--photographs", "2", "--batch", "2", "--repeats", "1", "--workers", "0"]
    words += ["--seconds", "0.1", "--network", "nin-c3-lr", "--device", "cpu", "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("CROP", 32), ("SIDE", 37), ("WIDTH", 64), ("HEIGHT", 48)):
            patch.setattr(loaders, name, value)
        patch.setattr(sys, "argv", ["loaders", *words])
        loaders.main()
    return json.loads(out.read_text())


def test_every_way_has_its_rate_and_idle_share(measured):
    other, machine = measured["machines"]
    assert other["environment"]["cpu"] == "another"
    assert machine["rows"].keys() == {"full size", "shrunk once", "held as bytes", "held as floats"}
    for row in machine["rows"].values():
        assert row["lowest"] <= row["images_per_second"] <= row["highest"]
        assert row["seconds_before"] >= 0
        assert 0 <= row["idle"] < 1


def test_a_way_that_this_machine_lacks_is_named_with_the_reason(measured):
    assert "needs a CUDA device" in measured["machines"][1]["not_measured"]["decoded by the GPU"]


def test_photographs_have_the_size_and_the_bytes_of_ilsvrc(benchmark_module):
    from PIL import Image

    loaders = benchmark_module("loaders")
    data = loaders.photograph(0)
    assert Image.open(io.BytesIO(data)).size == (500, 375)
    assert 90_000 < len(data) < 130_000
    assert loaders.photograph(1) != data
