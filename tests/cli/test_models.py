import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn


def lowrank(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lowrank_cnn", *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={"COLUMNS": str(columns), "PATH": "/usr/bin:/bin"},
        check=False,
    )


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3)))


def without_convs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 2))


def test_alone_it_shows_what_it_can_do():
    done = lowrank()
    assert done.returncode == 0
    for command in ("models", "count", "audit"):
        assert command in done.stdout


def test_count_prints_the_published_integers_as_json():
    done = lowrank("count", "vgg11-gmp-lr", "--convention", "paper", "--json")
    printed = json.loads(done.stdout)
    assert (printed["model"], printed["convention"]) == ("vgg11-gmp-lr", "paper")
    assert (printed["macs"], printed["params"]) == (2518134440, 26054888)
    assert printed["input"] == [3, 224, 224]
    assert printed["layers"][0]["name"] == "features.conv1_1"


def test_count_takes_any_network(tmp_path):
    own = tmp_path / "mine.py"
    own.write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Conv2d(3, 9, 3, padding=1))\n")
    dense, low_rank = (
        json.loads(lowrank("count", f"{own}:net", "--input", "3x8x8", "--json", *more).stdout)["macs"]
        for more in ([], ["--scheme", "lr"])
    )
    assert (dense, low_rank) == (9 * 27 * 64, 9 * 9 * 64)
    assert "give --input" in lowrank("count", f"{own}:net").stderr
    assert "width can be set for our own" in lowrank("count", f"{own}:net", "--width", "2").stderr


def test_tables_fit_eighty_columns():
    for arguments in (["models"], ["count", "vgg11-gmp-lr-join"], ["count", "googlenet-lr-conv1"], ["audit"]):
        done = lowrank(*arguments)
        assert "conv3_reduce " in done.stdout or "googlenet-lr-conv1" not in arguments
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80


def test_models_lists_costs_and_accuracy_as_json():
    rows = {row["network"]: row for row in json.loads(lowrank("models", "--json").stdout)}
    assert len(rows) == 22
    assert rows["airbench"]["top1"] is None
    assert rows["nin-c3-lr"]["macs"] == 104260224
    assert rows["vgg11"]["top5"] == 0.8617


def test_audit_holds_accuracies_against_runs():
    runs = str(Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10" / "paper")
    findings = json.loads(lowrank("audit", "--runs", runs, "--json").stdout)
    verdicts = {
        f["subject"]: f["verdict"] for f in findings if f["table"] == "nin-cifar10" and f["quantity"] == "top1"
    }
    assert verdicts == dict.fromkeys(("nin", "nin-c3", "nin-c3-lr"), "reproduced")
    assert "91.65%" in lowrank("audit", "--runs", runs).stdout
    assert "standard deviation" not in lowrank("audit", "--runs", runs, columns=200).stdout.partition("Notes")[2]


def test_audit_says_where_runs_test_nothing(tmp_path):
    others = str(Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10" / "modern-equal-compute")
    (tmp_path / "damaged.json").write_text("{")
    done = lowrank("audit", "--runs", others, "--runs", str(tmp_path))
    assert "No accuracy is tested by these 3 runs" in done.stderr
    assert "damaged.json" in done.stderr
    (tmp_path / "damaged.json").unlink()
    for empty in ("nowhere", str(tmp_path)):
        assert lowrank("audit", "--runs", empty).returncode == 2


def test_audit_says_which_accuracy_was_not_reached(tmp_path):
    record = (
        Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10" / "paper" / "nin-seed1" / "record.json"
    )
    values = json.loads(record.read_text())
    values["result"]["top1"] = 0.85
    (tmp_path / "record.json").write_text(json.dumps(values))
    assert "not reached" in lowrank("audit", "--runs", str(tmp_path), columns=200).stdout


def test_audit_as_json_has_a_verdict_for_everything():
    findings = json.loads(lowrank("audit", "--json").stdout)
    assert len(findings) > 100
    assert all(finding["verdict"] for finding in findings)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["count", "vgg12"], "did you mean vgg11"),
        (["count", "vgg11", "--input", "224x224"], "CHANNELSxHEIGHTxWIDTH"),
        (["count", "vgg11", "--input", "3x64x64"], "takes 224x224 images"),
        (["count", "nin", "--scheme", "mixture(kx1"], "cannot read the scheme"),
        (["count", "nin", "--convention", "flops"], "convention is mac or paper"),
        (["count", "nin", "--width", "-1"], "width must be positive"),
        (["count", "nin", "--input", "3x1x1"], "nin takes images of 4x4 at least"),
        (["convert", __file__], "names no network"),
        (["convert", f"{__file__}:scripted", "--input", "3x8x8"], "the model is scripted"),
        (["convert", f"{__file__}:without_convs", "--input", "3x8x8"], "Sequential has no convolutions"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments: list[str], says: str):
    done = lowrank(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
