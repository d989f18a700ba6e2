import pytest
from record_examples import CONVERTED, HERE, RUN

from lowrank_cnn.core.files import sealed
from lowrank_cnn.data.small_sets import CLASSES
from lowrank_cnn.report.reading import read_record
from lowrank_cnn.report.records import Run


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


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -1, 2.0, "0.9", True, None, [0.9], 10**400])
def test_an_impossible_accuracy_is_no_accuracy(nonsense: object):
    assert run_of({**RUN, "history": [], "result": {"top1": nonsense}}).top1 is None


def test_a_run_is_unsealed_without_a_checksum():
    assert run_of(sealed(RUN)).sealed
    assert not run_of(RUN).sealed
