"""Records as a report reads them: files and folders, runs, timings, answers, and what does not fit."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from record_examples import CONVERTED, RUN, TIMING, records_of, run_of

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import ResidentSplit
from lowrank_cnn.data.small_sets import CLASSES
from lowrank_cnn.report import read_records
from lowrank_cnn.report.page import render
from lowrank_cnn.report.records import LARGEST_THUMBNAIL, data_label, pool_answers, require_records
from lowrank_cnn.train.evaluate import EvaluationDetails, answers, details_of

DEEP = json.loads('{"a":' * 900 + "1" + "}" * 900)
PICTURE = "data:image/png;base64,iVBORw0KGgo="


def test_a_folder_is_read_at_any_depth_and_bad_files_are_listed(runs: Path):
    records = read_records([runs])
    assert (len(records.runs), len(records.timings)) == (15, 6)
    reasons = {Path(problem.path).name: problem.reason for problem in records.skipped}
    assert set(reasons) == {"cut.json", "foreign.json", "binary.json"}
    assert "not JSON" in reasons["cut.json"]
    assert "shopping list" in reasons["foreign.json"]


def test_a_frontier_is_shown_by_its_own_command(tmp_path: Path):
    (tmp_path / "frontier.json").write_text(json.dumps({"kind": "frontier", "family": "nin"}))
    records = read_records([tmp_path])
    assert [file.reason for file in records.skipped] == [f"`lowrank frontier nin --out {tmp_path}` shows it."]
    with pytest.raises(LowRankError, match=r"no record in .*lowrank frontier nin"):
        require_records([tmp_path], records)


def test_the_other_files_of_a_run_are_no_problem(tmp_path: Path):
    (tmp_path / "record.json").write_text(json.dumps(RUN))
    for name in ("recipe.json", "shape_costs.json", "shapes.json", "step-00000010.json", "config.json"):
        (tmp_path / name).write_text("{}")
    for name in ("step-00000010.safetensors", "model.safetensors"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "table.json").write_text('{"kind": "reproduction", "rows": []}')
    records = read_records([tmp_path])
    assert (len(records.runs), records.skipped) == (1, [])


def test_a_file_may_hold_several_records_and_is_read_once(tmp_path: Path):
    file = tmp_path / "all.json"
    file.write_text(json.dumps([{"kind": "?"}, RUN, TIMING]))
    records = read_records([tmp_path, file])
    assert (len(records.runs), len(records.timings), len(records.skipped)) == (1, 2, 1)
    with pytest.raises(LowRankError, match=r"no file or folder .*nowhere"):
        read_records([tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ("text", "a record must be of type dict, not 'text'"),
        ({"items": []}, "no kind"),
        ({"kind": "shopping"}, "'shopping' has no training run"),
        ({"kind": "training"}, "names no network"),
        ({"kind": "training", "model": {"name": ["x"]}}, r"name must be of type str.* not \['x'\]"),
        ({"kind": "timing", "name": "nin"}, "without any time"),
        ({**RUN, "history": 5}, "history must be of type list"),
        ({**RUN, "data": {"image": [3, None, 30]}}, "image must be a whole number"),
        ({**RUN, "result": {"details": {"per_class": [{"n": 1}], "confusion": [[1], [2]]}}}, "confusion matrix"),
        ({**RUN, "result": {"details": {"per_class": [{"n": 1}], "confusion": [[{}]]}}}, "confusion matrix"),
        ({**RUN, "seed": DEEP}, "seed must be a number"),
        *(({**RUN, "result": {"top1": value}}, "top1 must be a number") for value in (-1, 2.0, "0.9", True, [1])),
    ],
)
def test_what_does_not_fit_is_skipped_with_one_sentence(values: object, says: str):
    records = records_of(values, RUN)
    (skipped,) = records.skipped
    with pytest.raises(LowRankError, match=says):
        raise LowRankError(skipped.reason)
    assert len(skipped.reason.splitlines()) == len(records.runs) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_what_was_not_measured_is_unknown(value: object):
    """As in the record of a run that diverged."""
    assert run_of({**RUN, "history": [], "result": {"top1": value}}).top1 is None


def test_half_of_a_surrogate_pair_is_escaped():
    values = {**RUN, "model": {"name": "net\ud800"}, "environment": {"cpu\udfff": "\ud800"}}
    records = records_of(values)
    assert records.runs[0].network.name == "net\\ud800"
    assert b"net\\ud800" in render(records).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["name", "image", "width", "stride", "ms", "top1", "n", "macs", "dense", "conversion", "details"]


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


@settings(max_examples=10, deadline=None)
@given(st.lists(mutated(RUN) | mutated(CONVERTED) | mutated(TIMING), max_size=4))
def test_whatever_a_record_holds_the_page_can_be_made(found: list[dict]):
    records = records_of(*found, RUN)
    assert all(len(problem.reason.splitlines()) == 1 for problem in records.skipped)
    assert "nin-c3-lr" in render(records)


def test_a_run_is_read():
    run = run_of(RUN)
    assert (run.network.label, run.data) == ("nin-c3-lr width 0.5", "cifar10")
    assert (run.recipe, run.seed) == ("nin-paper", 3)
    assert (run.top1, run.macs, run.params, run.finished) == (0.9, 1000, 100, True)
    assert [row.accuracy for row in run.history] == [0.4, None]
    on_the_way = run_of({**RUN, "result": {}, "status": "interrupted"})
    assert (on_the_way.top1, on_the_way.macs, on_the_way.finished) == (0.4, None, False)
    least = run_of({"kind": "training", "model": {"name": "mine"}})
    assert (least.network.name, least.data, least.recipe, least.top1) == ("mine", "unnamed data", "custom", None)


def test_a_converted_network_is_read_with_what_it_was_before():
    run = run_of(CONVERTED)
    assert (run.network.label, run.network.base, run.n) == ("Mine+lr", "Mine", 500)
    assert run.dense == {"macs": 2000, "params": 150}
    config = {"name": "nin", "width": 0.5, "stride": 1}
    ours = run_of({**CONVERTED, "model": {**CONVERTED["model"], "name": "nin+lr", "config": config}})
    assert (ours.network.label, ours.network.base) == ("nin+lr width 0.5", "nin")
    assert run_of({**CONVERTED, "result": {**CONVERTED["result"], "dense": None}}).dense is None


def test_the_size_of_the_images_is_that_of_the_crops():
    assert run_of({**RUN, "recipe": {"name": "r", "crop": 28}}).network.image == (3, 28, 28)
    sized = {**RUN, "model": {"name": "nin", "image_size": 24}, "recipe": {"name": "r", "crop": 28}}
    assert run_of(sized).network.image == (3, 24, 24)


@pytest.mark.parametrize(
    ("data", "called", "label"),
    [
        ({"name": "uoft-cs/cifar10", "train": 50_000, "test": 10_000}, "uoft-cs/cifar10", "CIFAR-10"),
        ({"name": "CIFAR-10"}, "CIFAR-10", "CIFAR-10"),
        ({"name": "cifar10", "train": 512, "test": 512}, "a part of CIFAR-10 (512 + 512 images)", None),
        ({"name": "cifar10", "train": 50_000, "test": 512}, "a part of CIFAR-10 (50,000 + 512 images)", None),
        ({"name": "data", "classes": list(CLASSES), "train": 50_000, "test": 10_000}, "cifar10", "CIFAR-10"),
        ({"name": "data", "classes": list(CLASSES), "train": 45_000, "test": 10_000}, "data", "data"),
        ({"name": "data", "classes": ["cat", "dog"], "train": 50_000, "test": 10_000}, "data", "data"),
        ({"name": "imagenet-1k", "train": 1_281_100, "test": 49_990}, "imagenet-1k", "ILSVRC"),
        ({"name": "imagenet-1k", "train": 100_000}, "a part of ILSVRC (100,000 + 0 images)", None),
        ({"name": "my/set", "train": 12, "test": 3}, "my/set", "my/set"),
    ],
)
def test_data_sets_have_one_name_and_a_part_is_called_so(data: dict, called: str, label: str | None):
    run = run_of({**RUN, "data": data})
    assert (run.data, data_label(run.data)) == (called, label or called)


def test_a_timing_brings_its_twin_and_counts_one_image():
    ours, twin = records_of(TIMING).timings
    assert (ours.batch, ours.macs, ours.ms_per_image, ours.device) == (4, 1000, 2.0, "GPU")
    assert (twin.network.name, twin.macs, twin.ms_per_image) == ("nin", 2000, 4.0)
    assert [(layer.name, layer.macs) for layer in ours.layers] == [("a", 750)]


def test_what_the_command_time_prints_is_read():
    devices = {"cpu": "CPU", "cuda:1": "GPU", "mps": "GPU", "": "CPU"}
    timings = [{**TIMING, "kind": None, "twin": None, "device": device} for device in devices]
    found = records_of({"environment": {"cpu": "a fast one"}, "timings": timings}).timings
    assert [timing.device for timing in found] == list(devices.values())
    assert (found[0].hardware, found[1].hardware) == ("a fast one", "GPU")


def evaluated(seed: int, images: int = 200) -> EvaluationDetails:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(images, 3, generator=draw)
    labels = torch.randint(0, 3, (images,), generator=draw)
    split = ResidentSplit.of(torch.zeros(images, 1, 4, 4, dtype=torch.uint8), labels)
    return details_of(answers(logits, labels), ("cat", "dog", "cow"), split)


def answers_of(details: dict):
    answers = run_of({**RUN, "result": {"details": details}}).details
    assert answers is not None
    return answers


def test_the_answers_of_runs_are_added_up_as_one_evaluation_of_all_their_images():
    told, first = evaluated(0), answers_of(evaluated(0).to_dict())
    assert first.classes == told.classes
    assert torch.equal(first.confusion, told.confusion)
    assert first.calibration_error == pytest.approx(told.calibration_error)
    assert [image.image for image in first.worst] == [image.image for image in told.worst]
    total = pool_answers([first, answers_of(evaluated(1).to_dict())])
    confusion = told.confusion + evaluated(1).confusion
    assert torch.equal(total.confusion, confusion)
    assert total.per_class.sum(0).tolist() == pytest.approx([400, int(confusion.diagonal().sum())])
    assert total.pairs[0][2] == int(confusion.masked_fill(torch.eye(3).bool(), 0).max())
    losses = [image.loss for image in total.worst]
    assert losses == sorted(losses, reverse=True)
    assert len({image.image for image in total.worst}) == len(losses) == 20
    other = answers_of({"per_class": [{"class": "x", "n": 9}]})
    assert torch.equal(pool_answers([first, other]).per_class, first.per_class)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (PICTURE, PICTURE),
        ("data:image/svg+xml;base64,AAAA", None),
        ("javascript:alert(1)", None),
        (PICTURE + "A" * LARGEST_THUMBNAIL, None),
        (5, None),
    ],
)
def test_a_thumbnail_is_a_small_picture_or_nothing(given: object, kept: str | None):
    worst = [{"image": "a.png", "true": "cat", "predicted": "dog", "thumbnail": given}]
    assert answers_of({"per_class": [{"class": "cat", "n": 1}], "worst": worst}).worst[0].thumbnail == kept
