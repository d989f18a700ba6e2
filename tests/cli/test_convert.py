"""The command convert, as a user types it."""

import json

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.method.count import count
from lowrank_cnn.models import create_model
from tests.cli.conftest import SMALL_RUN, fits

SMALL = ["--width", "0.1"]


def test_convert_prints_layers_costs_and_what_was_left(output_of):
    text = output_of("convert", "nin", "--scheme", "lr-join", *SMALL)
    assert fits(text)
    assert "features.conv2_1" in text
    assert "5x1,10 + 1x5,9 -> 1x1,19" in " ".join(text.split())
    assert "of the MACs" in text
    assert "its kernel is 1x1" in text


def test_convert_as_json_agrees_with_the_counter(output_of):
    printed = json.loads(output_of("convert", "nin", "--scheme", "lr", "--where", "5x5", "--json"))
    assert [row["name"] for row in printed["changed"]] == ["features.conv1_1", "features.conv2_1"]
    assert printed["costs"][-1]["macs_before"] == count(create_model("nin"), (3, 30, 30)).macs


def test_convert_takes_stages_kernels_and_names_together(output_of):
    options = ["--stage", "3", "--where", "*conv1*", "--where", "7x7", "--json", *SMALL]
    printed = json.loads(output_of("convert", "nin", *options))
    assert [row["name"] for row in printed["changed"]] == ["features.conv1_1", "features.conv3_1"]


def test_weights_of_a_network_that_is_not_ours_are_put_into_it(output_of, own, tmp_path):
    out, size = tmp_path / "net.safetensors", ["--input", "3x8x8"]
    output_of("convert", f"{own}:net", "--scheme", "lr", "--out", out, *size)
    with pytest.raises(LowRankError, match=r"Sequential is not one of our networks.*--into path.py:function"):
        output_of("export", out, tmp_path / "net.pt2", *size)
    printed = json.loads(output_of("export", out, tmp_path / "net.pt2", "--into", f"{own}:net", "--json", *size))
    assert printed["error"] < 1e-5


@pytest.mark.usefixtures("squares")
def test_decompose_refits_a_trained_run_on_images_prepared_as_in_training(output_of, tmp_path):
    run, out = tmp_path / "dense", tmp_path / "small.safetensors"
    output_of("train", "nin", "--data", "squares", *SMALL_RUN, "--out", run)
    options = ["--macs", "0.6", "--images", "squares", "--out", out, "--json"]
    for more in ([], ["--by", "accuracy"]):
        printed = json.loads(output_of("decompose", run, *options, *more))
        assert printed["costs"][-1]["macs_after"] <= 0.6 * printed["costs"][-1]["macs_before"]
        assert all(0 <= row["error"] < 1 for row in printed["fitted"])
        assert json.loads(output_of("evaluate", out, "--data", "squares", "--json"))["n"] == 10
        out.unlink()


def test_thin_prints_its_layers_and_its_file_is_read(output_of, tmp_path):
    out, options = tmp_path / "net.safetensors", ["--multiple", "4", *SMALL]
    text = output_of("thin", "nin", "--channels", "0.5", "--out", out, *options)
    assert "features.conv2_1" in text
    assert "5x5,8" in text
    total = json.loads(output_of("thin", "nin", "--macs", "0.5", "--json", *options))["costs"][-1]
    assert total["macs_after"] == pytest.approx(0.5 * total["macs_before"], rel=0.2)
    assert json.loads(output_of("count", out, "--json"))["macs"] < total["macs_before"]
    with pytest.raises(LowRankError, match="give the share to keep"):
        output_of("thin", "nin")


def test_decompose_fits_within_a_budget(output_of, tmp_path):
    out = tmp_path / "net.safetensors"
    printed = json.loads(output_of("decompose", "nin", "--macs", "0.5", "--out", out, "--json", *SMALL))
    total = printed["costs"][-1]
    assert total["macs_after"] <= 0.5 * total["macs_before"] + 1
    assert all(0 < row["energy"] <= 1 for row in printed["fitted"])
    assert "energy" in output_of("decompose", "nin", *SMALL)
    again = json.loads(output_of("time", str(out), "--repeats", "3", "--json"))
    assert again["timings"][0]["macs"] == total["macs_after"]
