from pathlib import Path

import pytest
from record_examples import HERE, TIMING

from lowrank_cnn.report import read_records
from lowrank_cnn.report.reading import device_class, read_record
from lowrank_cnn.report.records import TimedNetwork


def test_a_timing_brings_its_twin_and_counts_one_image():
    ours, twin = read_record(TIMING, HERE)
    assert isinstance(ours, TimedNetwork)
    assert isinstance(twin, TimedNetwork)
    assert (ours.batch, ours.macs, ours.ms_per_image, ours.device) == (4, 1000, 2.0, "GPU")
    assert (twin.network.name, twin.macs, twin.ms_per_image) == ("nin", 2000, 4.0)
    assert [(layer.name, layer.macs) for layer in ours.layers] == [("a", 750)]


def test_what_the_command_time_prints_is_read():
    printed = {
        "environment": {"cpu": "a fast one"},
        "timings": [{**TIMING, "kind": None, "device": "cpu"}, TIMING],
    }
    found = read_record(printed, HERE)
    assert [timing.network.name for timing in found] == ["nin-c3-lr", "nin", "nin-c3-lr", "nin"]
    assert isinstance(found[0], TimedNetwork)
    assert found[0].hardware == "a fast one"


def test_our_own_benchmarks_are_read():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    records = read_records([results / "gpu_speed.json", results / "cpu_speed.json"])
    assert records.skipped == []
    by_device = {(timing.network.name, timing.device): timing for timing in records.timings}
    assert {device for _, device in by_device} == {"CPU", "GPU"}
    timing = by_device["vgg11-gmp-lr", "GPU"]
    assert (timing.network.image, timing.hardware) == ((3, 224, 224), "NVIDIA H200")
    assert 2.5e9 < (timing.macs or 0) < 2.53e9


def test_the_record_of_todays_networks_is_read():
    records = read_records([Path(__file__).parents[2] / "benchmarks" / "results" / "gpu_models.json"])
    assert records.skipped == []
    found = {(timing.network.name, timing.runtime, timing.batch): timing for timing in records.timings}
    low, dense = found["resnet18, lr", "optimize", 256], found["resnet18", "torch.compile", 256]
    assert (low.network.base, low.dense, low.hardware) == ("resnet18", {"macs": dense.macs}, "NVIDIA H200")
    assert low.ms < dense.ms
    assert ("resnet18, thin as lr", "optimize", 1) in found


def test_a_timing_is_known_by_its_fields_too():
    assert len(read_record({k: v for k, v in TIMING.items() if k != "kind"}, HERE)) == 2


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", "CPU"), ("cuda:1", "GPU"), ("NVIDIA H200", "GPU"), ("mps", "GPU"), ("", "CPU")]
)
def test_devices(device: str, kind: str):
    assert device_class(device) == kind
