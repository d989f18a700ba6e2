import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_cnn.data.readers.cifar_binary import CLASSES
from lowrank_cnn.report import read_records
from lowrank_cnn.report.cards import cards
from lowrank_cnn.report.charts.curves import training_curves
from lowrank_cnn.report.charts.layers import layer_charts
from lowrank_cnn.report.charts.trade import trade_charts, trade_points
from lowrank_cnn.report.gathering import gather
from lowrank_cnn.report.reading import device_class, read_record
from lowrank_cnn.report.records import Records, Run, TimedNetwork
from lowrank_cnn.report.tables import summary_table
from lowrank_cnn.system.errors import LowRankError

HERE = Path("record.json")
RUN = {
    "kind": "training",
    "model": {"name": "nin-c3-lr", "num_classes": 10, "width": 0.5, "stride": 1},
    "recipe": {"name": "nin-paper", "epochs": 2},
    "data": {"name": "cifar10", "size": [3, 30, 30]},
    "seed": 3,
    "history": [
        {"epoch": 1, "train_loss": 2.0, "accuracy": 0.4},
        {"epoch": 2, "train_loss": 1.5, "accuracy": None},
    ],
    "result": {"top1": 0.9, "top5": 0.99, "macs": 1000, "params": 100, "seconds": 60.0},
    "status": "finished",
}
CONVERTED = {
    **RUN,
    "model": {"name": "Mine+lr", "config": None, "class": "Mine", "conversion": {"changed": []}},
    "result": {"top1": 0.9, "n": 500, "macs": 1000, "params": 100, "dense": {"macs": 2000, "params": 150}},
}
TIMING = {
    "kind": "timing",
    "name": "nin-c3-lr",
    "input": [4, 3, 30, 30],
    "runtime": "torch",
    "device": "cuda:0",
    "macs": 4000,
    "total": {"ms": 8.0, "low": 7.9, "high": 8.2, "runs": 15},
    "layers": [{"name": "a", "macs": 3000, "ms": 5.0}, {"name": "pool", "macs": 0, "ms": 1.0}],
    "twin": {"name": "nin", "input": [4, 3, 30, 30], "device": "cuda:0", "total": {"ms": 16.0}, "macs": 8000},
}


def run_of(values: dict) -> Run:
    (run,) = read_record(values, HERE)
    assert isinstance(run, Run)
    return run


def test_a_run_is_read():
    run = run_of(RUN)
    assert (run.network.label, run.data, run.recipe, run.seed) == (
        "nin-c3-lr width 0.5",
        "cifar10",
        "nin-paper",
        3,
    )
    assert (run.top1, run.macs, run.params, run.finished) == (0.9, 1000, 100, True)
    assert [row.accuracy for row in run.history] == [0.4, None]


def test_a_run_on_the_way_shows_what_it_has():
    run = run_of({**RUN, "result": {}, "status": "interrupted"})
    assert (run.top1, run.macs, run.finished) == (0.4, None, False)


def test_a_run_that_says_little_is_still_read():
    run = run_of({"kind": "training", "model": {"name": "mine"}})
    assert (run.network.name, run.data, run.recipe, run.top1) == ("mine", "unnamed data", "custom", None)


def test_a_converted_network_is_read_with_what_it_was_before():
    run = run_of(CONVERTED)
    assert (run.network.label, run.network.base, run.n) == ("Mine+lr", "Mine", 500)
    assert run.dense == {"macs": 2000, "params": 150}
    config = {"name": "nin", "width": 0.5, "stride": 1}
    ours = run_of({**CONVERTED, "model": {**CONVERTED["model"], "name": "nin+lr", "config": config}})
    assert (ours.network.label, ours.network.base, ours.dense) == ("nin+lr width 0.5", "nin", None)


def test_what_a_record_does_not_say_of_the_dense_network_is_not_known():
    untold = {key: value for key, value in CONVERTED["result"].items() if key != "dense"}
    assert run_of({**CONVERTED, "result": untold}).dense is None
    plain = {"name": "Mine"}
    assert run_of({**CONVERTED, "model": plain, "result": untold}).dense == {"macs": 1000, "params": 100}
    assert run_of({**CONVERTED, "model": plain, "result": {**untold, "dense": None}}).dense is None


def test_the_data_of_a_run_are_named():
    data = {"name": "data", "classes": list(CLASSES), "train": 50_000, "test": 10_000}
    assert run_of({**RUN, "data": data}).data == "cifar10"
    assert run_of({**RUN, "data": {**data, "name": "cifar10", "train": 45_000}}).data.startswith(
        "a part of CIFAR-10"
    )


def test_the_size_of_the_images_is_that_of_the_crops():
    assert run_of({**RUN, "recipe": {"name": "r", "crop": 28}}).network.image == (3, 28, 28)
    sized = {**RUN, "model": {"name": "nin", "image_size": 24}, "recipe": {"name": "r", "crop": 28}}
    assert run_of(sized).network.image == (3, 24, 24)


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


def test_a_timing_is_known_by_its_fields_too():
    assert len(read_record({k: v for k, v in TIMING.items() if k != "kind"}, HERE)) == 2


@pytest.mark.parametrize(
    ("device", "kind"), [("cpu", "CPU"), ("cuda:1", "GPU"), ("NVIDIA H200", "GPU"), ("mps", "GPU"), ("", "CPU")]
)
def test_devices(device: str, kind: str):
    assert device_class(device) == kind


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([1, 2], "plain JSON"),
        ({"items": []}, "no kind"),
        ({"kind": "shopping"}, "'shopping' is none of training, timing"),
        ({"kind": "training"}, "names no network"),
        ({"kind": "training", "model": {"name": ["x"]}}, "names no network"),
        ({"kind": "timing", "name": "nin"}, "without any time"),
    ],
)
def test_what_is_no_record_is_refused_in_one_sentence(values: object, says: str):
    with pytest.raises(LowRankError, match=says):
        read_record(values, HERE)


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1, 2.0, "0.9", True, None, [0.9], 10**400])
def test_an_impossible_accuracy_is_no_accuracy(nonsense: object):
    assert run_of({**RUN, "history": [], "result": {"top1": nonsense}}).top1 is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


FIELDS = ["name", "size", "width", "stride", "ms", "top1", "n", "macs", "dense", "conversion", "config", "class"]


def mutated(record: dict) -> st.SearchStrategy[dict]:
    """A record with some of its fields, at the top or one below, replaced by anything."""
    inner = [key for key, value in record.items() if isinstance(value, dict)]
    top = st.dictionaries(st.sampled_from(sorted(record)), JSON, max_size=3)
    fields = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=2)
    deep = st.tuples(st.sampled_from(inner), fields)
    keys = st.fixed_dictionaries({"kind": st.just(record["kind"])})
    return st.tuples(top, deep, keys).map(
        lambda parts: {**record, parts[1][0]: {**record[parts[1][0]], **parts[1][1]}, **parts[0], **parts[2]}
    )


@settings(max_examples=40)
@given(st.lists(mutated(RUN) | mutated(CONVERTED) | mutated(TIMING), max_size=4))
def test_whatever_a_record_holds_the_page_can_be_made(found: list[dict]):
    records, refusals = Records(), []
    for values in found:
        try:
            for record in read_record(json.loads(json.dumps(values)), HERE):
                records.add(record)
        except LowRankError as error:
            refusals.append(str(error))
    assert all(len(refusal.splitlines()) == 1 for refusal in refusals)
    entries = gather(records)
    assert len(summary_table(entries).rows) == len(entries)
    cards(entries)
    charts = [trade_charts(trade_points(entries)), training_curves(entries), layer_charts(records.timings)]
    json.dumps(charts, allow_nan=False)


def test_a_folder_is_read_at_any_depth_and_bad_files_are_listed(runs: Path):
    records = read_records([runs])
    assert (len(records.runs), len(records.timings)) == (15, 6)
    reasons = {Path(problem.path).name: problem.reason for problem in records.skipped}
    assert set(reasons) == {"cut.json", "foreign.json", "binary.json"}
    assert "not JSON" in reasons["cut.json"]
    assert "shopping list" in reasons["foreign.json"]


def test_the_other_files_of_a_run_are_no_problem(tmp_path: Path):
    (tmp_path / "record.json").write_text(json.dumps(RUN))
    (tmp_path / "recipe.json").write_text("{}")
    (tmp_path / "step-00000010.json").write_text("{}")
    (tmp_path / "step-00000010.safetensors").write_bytes(b"")
    (tmp_path / "table.json").write_text('{"kind": "reproduction", "rows": []}')
    records = read_records([tmp_path])
    assert (len(records.runs), records.skipped) == (1, [])


def test_a_file_may_hold_several_records_and_is_read_once(tmp_path: Path):
    file = tmp_path / "all.json"
    file.write_text(json.dumps([RUN, TIMING, {"kind": "?"}]))
    records = read_records([tmp_path, file])
    assert (len(records.runs), len(records.timings), len(records.skipped)) == (1, 2, 1)


def test_a_path_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(LowRankError, match=r"no file or folder .*nowhere"):
        read_records([tmp_path / "nowhere"])
