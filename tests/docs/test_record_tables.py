"""Tables of single records, made up for the purpose: also of those that are still to come."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from table_records import ENVIRONMENT, ROOT, Put, cells

from lowrank_cnn.paper.reproduce import AccuracyRow, ExperimentTable

TO_COME = (
    "learned-shapes",
    "initialisations",
    "decompose",
    "decompose-aware",
    "depth-flow",
    "frontier",
    "full-run",
    "input-pipeline",
    "loaders",
    "memory",
    "tiny-imagenet",
    "zoo",
)


@pytest.mark.parametrize("name", TO_COME)
def test_a_table_without_its_record_says_so(blocks: ModuleType, put: Put, name: str):
    assert blocks.TABLES[name]() == "No runs recorded yet.\n"


def test_every_table_stands_on_a_page(blocks: ModuleType):
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {match[1] for page in pages for match in blocks.BLOCK.findall(page.read_text())}
    assert shown == set(blocks.TABLES)


def test_the_zoo_is_summed_up_and_failures_are_named(blocks: ModuleType, put: Put):
    cost = {"input": "3x224x224", "macs_before": 4_000_000_000, "macs_after": 1_000_000_000, "changed": 17}
    put(
        "zoo.json",
        {
            "scheme": "lr-join",
            "networks": [
                {"network": "torchvision:resnet18", "outcome": "converted", **cost},
                {"network": "torchvision:vit_b_16", "outcome": "nothing to convert", "why": "no conv"},
                {"network": "timm:unheard_of", "outcome": "converted", **cost},
                {"network": "timm:broken", "outcome": "failed", "why": "KeyError: `a|b`"},
                {"network": "timm:broken_too", "outcome": "failed", "why": "KeyError: `a|b`"},
            ],
        },
    )
    text = blocks.TABLES["zoo"]()
    assert cells(text, "") == ["", "networks", "converted", "nothing to convert", "failed"]
    assert cells(text, "torchvision") == ["torchvision", "2", "1", "1", "0"]
    assert cells(text, "timm") == ["timm", "3", "1", "0", "2"]
    assert cells(text, "`torchvision:resnet18`")[2:] == ["4.00 G", "1.00 G", "0.250", "17"]
    assert "unheard_of" not in text
    assert "| `timm:broken`, `timm:broken_too` | `KeyError: 'a\\|b'` |" in text


def row(network: str, published: float, *top1: float) -> AccuracyRow:
    top5 = tuple(value + 0.2 for value in top1)
    return AccuracyRow("paper", network, "", published, published + 0.2, top1, top5, 10**8, 10**6, 56, 30, 60.0)


def test_runs_stand_beside_the_papers_column(blocks: ModuleType, put: Put, tmp_path: Path):
    rows = (row("vgg11-gmp", 0.67, 0.4, 0.42), row("vgg11-gmp-lr", 0.66, 0.5, 0.51), row("vgg11", 0.65, 0.3))
    (tmp_path / "tiny-imagenet").mkdir()
    ExperimentTable("tiny-imagenet", rows, {"paper/vgg11-seed2": "not begun"}, {"paper": "Crops of 56."}).save(
        tmp_path / "tiny-imagenet"
    )
    text = blocks.TABLES["tiny-imagenet"]()
    assert cells(text, "`vgg11-gmp`")[1:6] == ["100 M", "41.00 ± 1.41", "67.00", "61.00 ± 1.41", "87.00"]
    assert cells(text, "`vgg11`")[2] == "30.00"
    assert cells(text, "lr matches gmp")[2:] == ["-1.00", "+9.50 ± 4.81", "holds"]
    assert "2 of 3 pairs of networks have the published order of top-1; rank correlation 0.50." in text
    assert "Crops of 56." in text
    assert "Not finished: 1 runs." in text


def pipeline(**changes: Any) -> dict[str, Any]:
    rate = {"images_per_second": 100.0, "lowest": 90.0, "highest": 110.0}
    kind = {"bytes": 5e4, "decode": {"Pillow": rate}, "frame": {"chosen here": rate}, "worker": rate, "loader": {}}
    fast = kind | {"worker": {**rate, "images_per_second": 400.0}}
    setting = {"size": [500, 375], "repeats": 5, "photographs": 8, "libraries": {"pillow": "1"}}
    machine = {"rows": {"upscaled": kind, "mosaic": kind, "shrunk": fast}, "setting": setting, "idle": {}}
    return {**machine, "environment": ENVIRONMENT, **changes}


def test_every_processor_has_its_table_of_rates(blocks: ModuleType, put: Put):
    other = pipeline(
        environment={**ENVIRONMENT, "cpu": "other cores"}, idle={"vgg11": 0.25}, train_rates={"vgg11": 8000}
    )
    put("input_pipeline.json", {"machines": [pipeline(), other]})
    text = blocks.TABLES["input-pipeline"]()
    assert cells(text, "read and framed")[1:] == ["a worker", *["100 (90 to 110)"] * 2, "400 (90 to 110)"]
    assert text.index("some cores") < text.index("other cores")
    assert "A GPU that trains `vgg11` at 8,000 images/s waits 25% of the time." in text
    assert "where the GPU decodes" not in text


def test_a_gpu_that_decodes_is_held_against_the_cpu(blocks: ModuleType, put: Put):
    machine = pipeline(idle={"vgg11": 0.75}, gpu_idle={"vgg11": 0.125}, train_rates={"vgg11": 8000})
    machine["rows"]["mosaic"] = machine["rows"]["mosaic"] | {
        "loader": {"0": 400.0, "16": 2000.0},
        "gpu_loader": {"0": 1000.0, "16": 7000.0},
        "gpu_decode": {"images_per_second": 20000.0, "lowest": 19000.0, "highest": 21000.0},
        "gpu_difference": 1.234,
    }
    put("input_pipeline.json", {"machines": [machine]})
    text = blocks.TABLES["input-pipeline"]()
    assert "The whole loader, textured, images/s: 0 workers 400; 16 workers 2,000." in text
    decoded = "0 workers 1,000; 16 workers 7,000; alone it decodes 20,000 (19,000 to 21,000)."
    assert f'The same if the GPU decodes (`decode="gpu"`): {decoded}' in text
    assert "Its pixels differ from Pillow's by 1.23 of 255 levels on average." in text
    waits = "waits 75% of the time, and 12% if it decodes them itself."
    assert f"A GPU that trains `vgg11` at 8,000 images/s {waits}" in text


def test_a_full_run_is_bound_by_its_slowest_part(blocks: ModuleType, put: Put):
    on_a_gpu = pipeline(environment={**ENVIRONMENT, "cpu": "other cores", "gpu": "a GPU"})
    put("input_pipeline.json", {"machines": [pipeline(), on_a_gpu]})
    ways = {"vgg11-gmp|training|256|graph": {"ms": 128.0}, "vgg11-gmp|training|256|ours": {"ms": 64.0}}
    ways |= {"vgg11-gmp|training|1|ours": {"ms": 0.001}, "vgg11-gmp|inference|256|ours": {"ms": 1.0}}
    ways |= {"vgg11-gmp-lr|training|256|fused": {"failed": "out of memory"}}
    before = {"vgg11-gmp|training|256|graph": {"ms": 32.0}}  # an older run, though it was faster
    after = {"nin|training|256|graph": {"ms": 1.0}}
    environment = {**ENVIRONMENT, "gpu": "a GPU"}
    runs = [{"ways": each, "rows": [], "environment": environment} for each in (before, ways, after)]
    put("gpu_speed.json", {"runs": runs})
    text = blocks.TABLES["full-run"]()
    lines = [cells(line, "ilsvrc") for line in text.splitlines() if line.startswith("| ilsvrc | `vgg11-gmp` |")]
    assert [line[2] for line in lines] == ["1", "8", "64"]
    compute, decode, shrunk, _, hours, bound, hours_shrunk, bound_shrunk = lines[0][3:]
    steps = 90 * (round(0.98 * 1_281_167) // 256)
    assert float(compute) == pytest.approx(steps * 0.064 / 3600, abs=0.05)  # the faster of the two ways
    assert float(decode) == pytest.approx(steps * 256 / 1600 / 3600, abs=0.05)
    assert float(shrunk) == pytest.approx(float(decode) / 4, abs=0.05)
    assert (hours, bound, hours_shrunk, bound_shrunk) == (f"**{decode}**", "decode", f"**{compute}**", "compute")
    for unmeasured in (
        "| ilsvrc | `vgg11-gmp-lr` | 1 | not measured yet |",
        "| places | `vgg11-gmp` | 8 | not measured yet |",
    ):
        assert unmeasured in text
    assert "`vgg11-gmp` on ilsvrc 4,000" in text
    assert "other cores, 100 images/s each" in text


def test_a_full_run_invents_no_rate(blocks: ModuleType, put: Put):
    put("input_pipeline.json", {"machines": [pipeline()]})
    put("gpu_speed.json", {"runs": []})
    text = blocks.TABLES["full-run"]()
    assert "no training rate at 224x224 is recorded" in text
    assert all(
        "not measured yet" in line for line in text.splitlines() if line.startswith(("| ilsvrc", "| places"))
    )


def test_peaks_of_a_gpu_join_what_is_kept(blocks: ModuleType, put: Put):
    kept = [
        {"network": "vgg11", "image": image, "way": way, "weight_bytes": 4_000_000, "kept_bytes_per_image": size}
        for image, sizes in ((224, (2_000_000, 500_000)), (56, (125_000, 30_000)))
        for way, size in zip(("all maps kept", "stages computed again"), sizes, strict=True)
    ]
    record: dict[str, Any] = {"kept": {"rows": kept, "environment": ENVIRONMENT}}
    put("memory.json", record)
    assert cells(blocks.TABLES["memory"](), "`vgg11`") == ["`vgg11`", "4", "2.00", "0.50", "0.12", "0.03"]
    line = {"network": "vgg11", "image": 224, "way": "all maps kept"}
    peaks = [
        {**line, "batch": 64, "peak_bytes": 3e9},
        {**line, "batch": 512, "peak_bytes": None},
    ]
    put("memory.json", record | {"peaks": {"rows": peaks, "environment": {**ENVIRONMENT, "gpu": "a GPU"}}})
    text = blocks.TABLES["memory"]()
    assert "| `vgg11` | 224 | all maps kept | 3.0 | too large |" in text
    assert "a GPU" in text


def test_gradients_and_dead_filters_are_shown_over_seeds(blocks: ModuleType, put: Put):
    def seed(ratio: float, share: float) -> dict[str, Any]:
        ends = {"first_to_last": ratio, "least": ratio / 2, "most": 3.0}
        return ends | {"dead_share": share, "worst_group": ["conv5 1x3", 2 * share]}

    fresh = {"network": "vgg11", "norm": None, **seed(0.25, 0.1), "seeds": [seed(0.25, 0.1), seed(1.0, 0.2)]}
    trained = {"network": "paper/run", **seed(0.5, 0.0)}
    put("depth_flow.json", {"setting": {"images": 64, "dead_below": 1e-4}, "rows": [fresh, trained]})
    text = blocks.TABLES["depth-flow"]()
    shown = ["no", "0.5 (0.25 to 1)", "0.12", "3", "15.0%", "40.0%: `conv5 1x3`"]
    assert cells(text, "`vgg11`")[1:] == shown
    assert cells(text, "`paper/run`")[1:] == ["", "0.5", "0.25", "3", "0.0%", "none"]
