"""Tables of frontiers, of other libraries' networks, and the first screen of README."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from table_records import ENVIRONMENT, Put, cells

from lowrank_cnn.choose.frontier import DesignRow, DesignTime, Frontier, RateTry, SeedRun
from lowrank_cnn.choose.verdict import EARLY, NO, YES


def empty_frontier(folder: Path, family: str) -> Frontier:
    """A record of runs on CIFAR-10 without any runs, where the tables look for it."""
    place = folder / "frontier" / "cifar10"
    place.mkdir(parents=True)
    about: dict[str, Any] = dict.fromkeys(("recipe", "precision", "device", "teacher"), "")
    about["network"] = {"base": 1.0}
    found = Frontier(place, {**about, "family": family, "data": {"name": "cifar10"}}, 1000)
    found.environments.append(ENVIRONMENT)
    return found


def add(found: Frontier, name: str, ms: float, correct: int, seeds: int = 4) -> None:
    """A design called SCHEME or SCHEME@WIDTH, with its time and runs of so many right answers."""
    scheme, _, width = name.partition("@")
    design = {"name": name, "scheme": scheme, "width": float(width or 1), "matched": ""}
    runs = [SeedRun(seed, correct + seed, 0, "", 3.0, 4.0, 1.0, 1.0, 0) for seed in range(1, seeds + 1)]
    found.rows.append(DesignRow(design, 10**6, 10**5, DesignTime(ms, ms, ms, 2.0, 256, "folded"), runs=runs))


def test_a_frontier_shows_its_networks_by_time_and_its_verdicts(blocks: ModuleType, put: Put, tmp_path: Path):
    found = empty_frontier(tmp_path, "airbench")
    for name, ms in (("dense", 2.0), ("lr", 1.0)):
        add(found, name, ms, 900, seeds=2)
    judged = {
        "question": "better",
        "design": "lr",
        "control": "dense",
        "margin": 0.2,
        "time": 0.5,
        "verdict": "no",
    }
    judged |= {"gap": -1.0, "low": -2.0, "high": 0.0, "p": 1.0, "corrected": 1.0, "runs": [2, 2]}
    found.answers = [judged, judged | {"question": "faster", "verdict": EARLY}]
    found.save()
    text = blocks.TABLES["frontier"]()
    assert text.index("`lr`") < text.index("`dense`")
    assert cells(text, "`lr`")[1:] == ["1.00M", "100k", "1.000", "0.50", "90.15 (89.51 to 90.79)", "2", "3.0"]
    assert cells(text, "`lr` better by +0.2")[-1] == "no"
    assert "`lr` faster" not in text
    assert "One more question has too few runs for a verdict." in text
    assert "record: `benchmarks/results/frontier/cifar10/frontier.json`" in text


def test_a_frontier_of_tries_alone_shows_the_rates(blocks: ModuleType, put: Put, tmp_path: Path):
    found = empty_frontier(tmp_path, "airbench")
    design = {"name": "lr", "scheme": "lr", "width": 1.0, "matched": ""}
    tries = [RateTry(0.5, [0.4, 0.5]), RateTry(2.0, [])]
    found.rows.append(DesignRow(design, 10**6, 10**5, tries=tries))
    found.save()
    text = blocks.TABLES["frontier"]()
    assert "0.5 x the rate | 2 x the rate" in text
    assert cells(text, "`lr`")[1:] == ["45.00", ""]


def test_a_short_run_is_told_with_and_without_compiling(blocks: ModuleType, put: Put):
    run = {"network": "net", "recipe": "fast", "data": "images", "epochs": 10, "train": 1000, "top1": 0.5}
    put("tiny_fast.json", {**run, "images_per_second": 500.0, "seconds": 45.0, "environment": ENVIRONMENT})
    text = blocks.TABLES["short-run"]()
    assert "`fast` trains `net` for 10 epochs in 20 seconds, alone on the GPU, to 50.0%" in text
    assert "took 45 seconds" in text


def test_networks_of_other_libraries_appear_with_every_reason(blocks: ModuleType, put: Put):
    versions = dict.fromkeys(("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch"), "1.0")
    cells_of = {
        "counted": "equal",
        "merged": "1e-07, 0 of 2 folded: no layer feeds it",
        "exported": "refused: it is odd.",
    }
    rows = [{"name": f"monai:{name}", "cells": cells_of, "seconds": 1.0} for name in ("UNet", "VNet")]
    put("foreign.json", {"kind": "foreign", "environment": ENVIRONMENT | versions, "rows": rows})
    text = blocks.TABLES["foreign"]()
    assert cells(text, "monai:<wbr>UNet")[1:] == ["equal", "", "", "1e-07, 0 of 2 folded", "", "", "refused"]
    assert "- exported, refused: it is odd. (`UNet`, `VNet`)" in text
    assert "- merged, in part: no layer feeds it (`UNet`, `VNet`)" in text
    assert "2 networks, 14 results: 0 wrong or failed, 2 refused." in text


def test_foreign_networks_on_a_gpu_appear_with_their_record(blocks: ModuleType, put: Put):
    assert blocks.TABLES["gpu-models"]() == ""
    times = {"dense, torch.compile": 2.0, "dense, fit": 1.9, "low-rank, fit": 1.0}
    times = {way: {"ms": 1.5 * ms, "low": ms} for way, ms in times.items()}
    row = {"row": "torchvision:resnet18/lr", "macs": {"dense": 100, "low-rank": 33}}
    whole = {**row, "training": {"ms": times}}
    cut = {
        **row,
        "training": {"ms": {"dense, torch.compile": {"ms": 1.0, "low": 1.0}}},
        "inference": {"choice": {}},
    }
    slow = {**row, "training": {"ms": {way: {"ms": 9.0, "low": 9.0} for way in times}}}
    put("gpu_models.json", {"runs": [{"environment": ENVIRONMENT, "rows": [row]} for row in (whole, cut, slow)]})
    text = blocks.TABLES["gpu-models"]()
    assert text.startswith("## Networks of torchvision and timm on a GPU\n\n### Training step, batch 256\n")
    expected = ["0.330", "2.00 (1.00)", "1.90 (0.95)", "not measured", "1.00 (0.50)"]
    assert cells(text, "`resnet18`, `lr`")[1:] == expected
    assert "### Inference" not in text


def test_of_two_runs_the_one_with_the_stronger_thin_network_is_shown(blocks: ModuleType, put: Put):
    runs = []
    for compiler, thin in ((2.0, "thin"), (2.5, "thin in 64s"), (3.0, "thin in 64s")):
        ways = {"dense, torch.compile": compiler, "low-rank, optimize": 1.0, f"{thin}, optimize": 1.5}
        row = {"row": "torchvision:resnet18/lr", "macs": {"dense": 100, "low-rank": 33, thin: 40}}
        row["inference"] = {"ms": {way: {"ms": ms} for way, ms in ways.items()}}
        runs.append({"environment": ENVIRONMENT, "rows": [row]})
    put("gpu_models.json", {"runs": runs})
    expected = ["2.50 (1.00)", "not measured", "1.50 (0.60) in 64s", "1.00 (0.40)"]
    assert cells(blocks.TABLES["gpu-models"](), "`resnet18`, `lr`")[2:] == expected


def test_the_newest_profile_of_a_network_is_shown(blocks: ModuleType, put: Put):
    profiles = [
        {"network": "net/lr", "batch": 8, "ms": ms, "kernels": [{"name": "stem_gradient", "ms": 1.0, "calls": 1}]}
        for ms in (9.0, 4.0)
    ]
    put("training_profile.json", {"runs": [{"environment": ENVIRONMENT, "rows": [row]} for row in profiles]})
    text = blocks.TABLES["training-profile"]()
    assert "4.00 ms of kernels a step" in text
    assert "9.00" not in text
    assert cells(text, "all others") == ["all others", "", "", "3.00"]


def test_loaders_show_how_long_a_gpu_waits(blocks: ModuleType, put: Put) -> None:
    setting = {"size": [500, 375], "images": 64, "repeats": 3, "workers": 2, "crop": 160, "side": 183}
    setting["bytes"] = 9e4
    row = {"images_per_second": 100.4, "lowest": 90.0, "highest": 110.0, "seconds_before": 2.04}
    cpu = {"setting": setting, "rows": {"shrunk once": row}, "step_images_per_second": None}
    cpu["not_measured"] = {"decoded by the GPU": "there is none."}
    trained = {**row, "trained_per_second": 3000.0, "idle": 0.25}
    gpu = {"setting": {**setting, "network": "net"}, "rows": {"shrunk once": trained}, "not_measured": {}}
    gpu["step_images_per_second"] = 4000.0
    put("loaders.json", {"machines": [{**machine, "environment": ENVIRONMENT} for machine in (cpu, gpu)]})
    text = blocks.TABLES["loaders"]()
    assert cells(text, "shrunk once") == ["shrunk once", "100 (90 to 110)", "2.0"]
    assert "| shrunk once | 100 (90 to 110) | 2.0 | 3,000 | 25% |" in text
    assert "`net` trains at 4,000 images/s" in text
    assert "Not measured: decoded by the GPU (there is none)." in text


def test_the_first_screen_shows_times_of_networks_that_were_not_trained(blocks: ModuleType, put: Put):
    times = {"dense, torch.compile": 3.0, "dense, optimize": 2.0, "low-rank, optimize": 1.0, "thin, optimize": 1.9}
    times["thin in 64s, optimize"] = 1.5
    macs = {"dense": 7 * 10**9, "low-rank": 2 * 10**9, "thin": 3 * 10**9, "thin in 64s": 2 * 10**9}
    row = {"row": "lowrank:vgg11-gmp/lr", "macs": macs}
    row["inference"] = {"ms": {way: {"ms": ms} for way, ms in times.items()}}
    put("gpu_models.json", {"runs": [{"environment": ENVIRONMENT, "rows": [row]}]})
    speed = {"network": "vgg11-gmp-lr", "batch": 256, "ms": 3.0, "dense_ms": 9.0, "tricks_ratio": 0.5}
    put("gpu_speed.json", {"runs": [{"environment": ENVIRONMENT, "rows": [{**speed, "mode": "training"}]}]})
    text = blocks.TABLES["headline"]()
    # Dense through our kernels, thin in the widths that are fastest.
    assert cells(text, "`vgg11-gmp`")[1:] == ["2.00 ms, step 6.0 ms", "1.00 ms, step 3.0 ms", "1.50 ms"]
    assert "%" not in text
    assert "gpu_models.json" in text


@pytest.mark.parametrize("verdict", ["yes", "undecided"])
def test_the_first_screen_takes_three_networks_of_a_frontier(
    blocks: ModuleType, put: Put, tmp_path: Path, verdict: str
):
    found = empty_frontier(tmp_path, "nin")
    found.about["recipe"] = {"crop": 32}
    for name, ms, correct in (
        ("dense", 2.0, 897),
        ("lr", 1.0, 888),
        ("lr-join", 1.9, 897),
        ("dense@0.5", 1.1, 878),
    ):
        add(found, name, ms, correct)
    found.answers = [{"question": "better", "design": "lr", "verdict": verdict}]
    found.save()
    text = blocks.TABLES["headline"]()
    low_rank = "89.0% in 1.00 ms" if verdict == "undecided" else "**89.0% in 1.00 ms**"
    row = ["90.0% in 2.00 ms", f"`lr`: {low_rank}", "88.0% in 1.10 ms", "4"]
    assert cells(text, "`nin` on cifar10, 32 px")[1:] == row
    assert "`lr-join`" not in text  # no thin network takes as long


def test_the_first_screen_keeps_each_way_to_train_apart(blocks: ModuleType, put: Put, tmp_path: Path):
    found = empty_frontier(tmp_path, "nin")
    found.about |= {"recipe": {"crop": 32}, "teacher": "dense"}
    schemes = {"dense": 900, "lr": 890, "dense@0.5": 880, "lr(branches)": 910, "dense(branches)@0.5": 905}
    for name, correct in schemes.items():
        add(found, name, 2.0 if name == "dense" else 1.0, correct - 2)
    found.save()
    text = blocks.TABLES["headline"]()
    expected = ["90.0% in 2.00 ms", "`lr`: 89.0% in 1.00 ms", "88.0% in 1.00 ms", "4"]
    assert cells(text, "`nin` on cifar10, 32 px, with a teacher")[1:] == expected
    branched = ["not trained", "`lr(branches)`: 91.0% in 1.00 ms", "90.5% in 1.00 ms", "4"]
    assert cells(text, "`nin` on cifar10, 32 px, with branches and a teacher")[1:] == branched


def test_learned_shapes_are_shown_by_falling_accuracy_with_what_was_decided(blocks: ModuleType, put: Put):
    about = {"network": "nin", "width": 0.1, "data": "stripes", "recipe": {"epochs": 10}}
    rows = [
        {"way": way, "top1": top1, "macs": 0.5} for way, top1 in (("thin", 0.5), ("proximal", 0.6), ("thin", 0.52))
    ]
    rows += [
        {"way": "thin", "phase": "try", "top1": 0.9, "macs": 0.5},
        {"way": "thin", "phase": "full", "top1": None, "diverged": True},
    ]
    gap = {"gap": 9.0, "low": 1.5, "high": 16.5}
    answer = {"ours": "proximal", "theirs": "thin", "margin": 0.5, "verdict": "yes", **gap}
    put(
        "learned_shapes_x.json",
        {
            "about": about,
            "rows": rows,
            "answers": [answer],
            "mechanisms": [{"theirs": "gates", "verdict": "undecided", **gap}],
        },
    )
    text = blocks.TABLES["learned-shapes"]()
    assert "`gates` by +9.00 (+1.50 to +16.50), undecided." in text
    assert text.index("`proximal` |") < text.index("`thin` |")
    assert cells(text, "`thin`") == ["`thin`", "0.500", "51.00 ± 1.41", "2", ""]  # neither tries nor diverged runs
    assert cells(text, "`proximal`")[-1] == "+9.00 (+1.50 to +16.50)"
    assert "`proximal` over `thin` by 0.5: yes." in text
    assert "nin (width 0.1) on stripes, 10 epochs" in text


def test_initialisations_are_shown_with_their_best_rates(blocks: ModuleType, put: Put):
    row = {"init": "torch", "rate": 2.0, "mean": 90.0, "sd": 0.5, "runs": 4, "tries": 5}
    row |= {"diverged_full": 1, "diverged_try": 2}
    about = {"network": "nin-c3-lr", "data": "cifar10", "recipe": {"epochs": 180}, "try_epochs": 30}
    verdicts = {"torch": YES, "normal": NO}
    answers = [{"ours": "composite", "theirs": init, "verdict": found} for init, found in verdicts.items()]
    put("initialisation_nin.json", {"about": about, "summary": [row], "answers": answers})
    text = blocks.TABLES["initialisations"]()
    assert "in runs of 30 epochs, on held-out images. Means are those of the runs that did not diverge." in text
    assert "Decided: `composite` over `torch`.\n" in text
    assert cells(text, "`torch`") == ["`torch`", "x 2", "90.00 ± 0.50", "4", "1", "2 of 5"]
