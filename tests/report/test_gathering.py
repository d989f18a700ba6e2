import time

import pytest
from record_examples import gathered, records_of

from lowrank_cnn.report.records import NetworkResult
from lowrank_cnn.report.results import comparable, gather, variants
from lowrank_cnn.report.trade import our_point, trade_chart

SIZE = [3, 30, 30]


def run(name: str, top1: float, *, macs: int = 100, seed: int = 0, recipe: dict | None = None, **model) -> dict:
    return {
        "kind": "training",
        "model": {"name": name, "num_classes": 10, **model},
        "recipe": {"name": "r", **(recipe or {})},
        "data": {"name": "cifar10", "size": SIZE},
        "seed": seed,
        "result": {"top1": top1, "macs": macs, "params": 10 * macs, "seconds": 5.0},
        "status": "finished",
    }


def timing(name: str, ms: float, *, batch: int = 1, device: str = "cpu", runtime: str = "torch") -> dict:
    inside = {
        "input": [batch, *SIZE],
        "device": device,
        "runtime": runtime,
        "total": {"ms": ms},
        "macs": 50 * batch,
    }
    return {"kind": "timing", "name": name, **inside}


def entries_of(*values: dict) -> dict[str, NetworkResult]:
    return {entry.label: entry for entry in gathered(*values)}


def test_seeds_are_gathered():
    entry = entries_of(run("nin", 0.8), run("nin", 0.9, seed=1))["nin"]
    assert entry.top1 == pytest.approx(0.85)
    assert entry.top1_spread == pytest.approx(0.0707, abs=1e-4)
    assert len(entry.runs) == 2


def test_ratios_to_the_dense_twin():
    found = entries_of(run("nin", 0.9, macs=200), run("nin-c3-lr", 0.88, macs=108))
    assert found["nin-c3-lr"].ratios == pytest.approx({"macs": 0.54, "params": 0.54, "top1": -2.0})
    assert found["nin"].ratios == pytest.approx({"macs": 1.0, "params": 1.0, "top1": 0.0})


def test_the_page_opens_with_a_data_set_that_shows_what_was_gained():
    other = {**run("nin-c3-lr", 0.5), "data": {"name": "a few photographs", "size": SIZE}}
    found = gathered(other, run("nin", 0.9, macs=200), run("nin-c3-lr", 0.88, macs=108))
    assert [entry.data for entry in found] == ["cifar10", "cifar10", "a few photographs"]


def test_a_run_that_began_with_trained_weights_always_says_so():
    assert set(entries_of({**run("nin", 0.9), "begun_from": "a.safetensors"})) == {"nin, begun from a.safetensors"}
    assert set(entries_of({**run("nin", 0.9), "begun_from": ""})) == {"nin"}


def test_a_twin_that_was_not_trained_is_counted():
    ratios = entries_of(run("nin-c3-lr", 0.88, macs=104260224))["nin-c3-lr"].ratios
    assert ratios["macs"] == pytest.approx(0.5406, abs=1e-3)
    assert "top1" not in ratios


def test_a_twin_by_another_recipe_is_no_twin():
    other = {**run("nin", 0.5), "recipe": {"name": "another"}}
    assert "top1" not in entries_of(other, run("nin-c3-lr", 0.88))["nin-c3-lr"].ratios


def test_a_twin_may_have_its_own_schedule():
    found = entries_of(run("nin", 0.9, recipe={"epochs": 9}), run("nin-c3-lr", 0.88, recipe={"epochs": 5}))
    assert found["nin-c3-lr"].ratios["top1"] == pytest.approx(-2.0)


def test_runs_with_other_settings_are_kept_apart_and_say_so():
    found = entries_of(run("nin", 0.9, recipe={"lr": 0.1}), run("nin", 0.8, recipe={"lr": 0.2}))
    assert set(found) == {"nin, lr=0.1", "nin, lr=0.2"}
    found = entries_of(run("nin", 0.9, init="torch"), run("nin", 0.8))
    assert set(found) == {"nin, torch init", "nin, composite init"}
    found = entries_of(run("nin", 0.9, recipe={"epochs": 104}), run("nin", 0.8, recipe={"epochs": 56}))
    assert list(found) == ["nin, 56 epochs", "nin, 104 epochs"]


def foreign(top1: float, params: int, **more) -> dict:
    values = run("Sequential", top1, **more)
    return {**values, "model": {"name": "Sequential"}, "result": {**values["result"], "params": params}}


def test_networks_of_one_class_are_told_apart_by_their_cost():
    labels = [entry.label for entry in gathered(foreign(0.5, 1000), foreign(0.7, 2000))]
    assert labels == ["Sequential, 1.00k parameters", "Sequential, 2.00k parameters"]


def test_the_twin_is_named_with_its_settings():
    short, long = {"epochs": 1}, {"epochs": 3}
    runs = [run("nin", 0.5, recipe=short), run("nin", 0.8, recipe=long), run("nin-c3-lr", 0.4, recipe=short)]
    found = {entry.label: entry for entry in gathered(*runs)}
    assert found["nin-c3-lr"].twin == "nin, 1 epoch"
    points = [our_point(entry) for entry in found.values()]
    (arrow,) = trade_chart(points, "macs", "top1")["arrows"]
    assert (arrow["y"], arrow["y2"]) == (0.5, 0.4)


def test_a_setting_that_was_not_set_is_not_named():
    assert variants([{"dropout": "None"}, {"dropout": "0.2"}]) == ["", "dropout=0.2"]


def test_settings_at_their_usual_value_are_not_told_where_others_tell_the_runs_apart():
    usual = {"freeze": "", "layer_decay": 1.0, "lr": 0.1}
    found = entries_of(
        run("nin", 0.9, recipe=usual), run("nin", 0.8, recipe={**usual, "freeze": "features.*", "lr": 0.2})
    )
    assert set(found) == {"nin, lr=0.1", "nin, freeze=features.*, lr=0.2"}
    told = entries_of(run("nin", 0.9, recipe={"lr": 0.1}), run("nin", 0.8, recipe=usual))  # the first does not say
    assert len(told) == 2


def test_a_twin_that_was_not_trained_is_counted_on_the_crops_of_the_run():
    data = {"name": "cifar10", "image": [3, 32, 32]}
    whole = {**run("nin-c3-lr", 0.9, macs=104260224), "data": data}
    cropped = {**run("nin-c3-lr", 0.9, macs=104260224, recipe={"crop": 30}, image_size=30), "data": data}
    assert entries_of(whole)["nin-c3-lr"].ratios["macs"] < 0.5
    assert entries_of(cropped)["nin-c3-lr"].ratios["macs"] == pytest.approx(0.5406, abs=1e-3)


def ablation(top1: float, init: str) -> dict:
    return {**run("nin-c3-lr", top1, init=init), "recipe": {"name": "ablation", "epochs": 10}}


def test_the_best_recipe_comes_first_and_what_compares_nothing_is_left_out():
    values = [ablation(0.1, "torch"), ablation(0.7, "composite"), run("nin", 0.9), run("nin-c3-lr", 0.88)]
    found = entries_of(*values)
    assert [entry.recipe for entry in found.values()] == ["r", "r", "ablation", "ablation"]
    assert [entry.label for entry in comparable(list(found.values()))] == ["nin", "nin-c3-lr"]
    alone = entries_of(*values[:2])
    assert comparable(list(alone.values())) == list(alone.values())


def test_it_is_said_how_a_twin_was_trained_otherwise():
    networks = [("nin", 5), ("nin-c3-lr", 5), ("nin-c3-lr", 9)]
    found = entries_of(*(run(name, 0.9, recipe={"epochs": epochs}) for name, epochs in networks))
    otherwise = {label: entry.otherwise for label, entry in found.items()}
    longer = ("for another number of epochs",)
    assert otherwise == {"nin": (), "nin-c3-lr, 5 epochs": (), "nin-c3-lr, 9 epochs": longer}


def test_a_smaller_network_may_have_less_dropout():
    found = entries_of(run("nin", 0.9, recipe={"dropout": 0.5}), run("nin-c3-lr", 0.88, recipe={"dropout": 0.2}))
    assert found["nin-c3-lr"].ratios["top1"] == pytest.approx(-2.0)
    assert found["nin-c3-lr"].otherwise == ("with another share of dropout",)


def test_a_twin_that_was_trained_as_long_is_preferred():
    trained = [("nin", 5, 0.2), ("nin", 9, 0.5), ("nin-c3-lr", 9, 0.2)]
    found = entries_of(
        *(run(name, 0.9, recipe={"epochs": epochs, "dropout": drop}) for name, epochs, drop in trained)
    )
    assert found["nin-c3-lr"].otherwise == ("with another share of dropout",)


def test_how_often_a_run_is_evaluated_sets_nothing_apart():
    found = entries_of(
        run("nin", 0.9, recipe={"evaluate_every": 5}), run("nin-c3-lr", 0.88, recipe={"evaluate_every": 9})
    )
    assert found["nin-c3-lr"].ratios["top1"] == pytest.approx(-2.0)
    assert found["nin-c3-lr"].label == "nin-c3-lr"


def test_the_fastest_runtime_counts_and_batches_must_agree():
    found = entries_of(
        run("nin", 0.9),
        run("nin-c3-lr", 0.9),
        timing("nin", 10.0),
        timing("nin-c3-lr", 8.0),
        timing("nin-c3-lr", 5.0, runtime="onnx"),
        timing("nin-c3-lr", 64.0, batch=64, device="cuda"),
        timing("nin", 1.0, batch=1, device="cuda"),
    )
    assert found["nin-c3-lr"].ratios["CPU"] == pytest.approx(0.5)
    assert "GPU" not in found["nin-c3-lr"].ratios
    fastest = found["nin-c3-lr"].time("CPU")
    assert fastest is not None
    assert fastest.runtime == "onnx"


def test_a_timing_at_another_image_size_belongs_to_nobody_else():
    found = entries_of(run("nin", 0.9), {**timing("nin", 10.0), "input": [3, 224, 224]})
    assert len(found) == 1  # both are called nin; the second is the one that was only timed
    trained, timed = gathered(run("nin", 0.9), {**timing("nin", 10.0), "input": [3, 224, 224]})
    assert (trained.timings, len(timed.timings), timed.data) == ((), 1, "")


def test_unfinished_runs_count_only_where_none_has_finished():
    cut = {**run("nin", 0.2, seed=1), "status": "failed"}
    assert entries_of(run("nin", 0.9), cut)["nin"].top1 == 0.9
    alone = entries_of(cut)["nin"]
    assert (alone.top1, alone.finished) == (0.2, False)


def test_runs_of_other_images_under_one_name_are_never_averaged():
    """Two folders called photos: a run each is no mean of two runs."""
    one, two = (
        {**run("nin", top1), "data": {"name": "photos", "digest": d}}
        for top1, d in ((0.4667, "a1"), (0.7667, "b2"))
    )
    found = {entry.data: entry.top1 for entry in gathered(one, two)}
    assert found == {"photos (1: a1)": 0.4667, "photos (2: b2)": 0.7667}
    same = gathered(one, {**one, "seed": 1})
    assert [(entry.data, entry.seeds) for entry in same] == [("photos", 2)]


def test_without_a_digest_classes_and_sizes_tell_images_apart():
    sets = [
        {"name": "photos", "classes": names, "train": n} for names, n in ((["a"], 10), (["b"], 10), (["a"], 20))
    ]
    found = gathered(*({**run("nin", 0.5), "data": data} for data in sets))
    assert len({entry.data for entry in found}) == 3


def test_two_runs_of_one_seed_have_no_spread():
    entry = entries_of(run("nin", 0.8, seed=1), run("nin", 0.8, seed=1))["nin"]
    assert (len(entry.runs), entry.seeds, entry.top1_spread) == (2, 1, None)
    three = entries_of(run("nin", 0.8, seed=1), run("nin", 0.8, seed=1), run("nin", 0.9, seed=2))["nin"]
    assert three.top1 == pytest.approx(0.85)


def test_four_thousand_records_take_no_more_than_linear_time():
    def seconds(count: int) -> float:
        records = records_of(
            *(
                run(("nin", "nin-c3-lr")[i % 2], 0.5, seed=i // 2 % 3, recipe={"lr": i // 6, "epochs": 9})
                for i in range(count)
            )
        )
        found = []
        for _ in range(3):  # the least: what else the machine does only adds
            begun = time.process_time()
            gather(records)
            found.append(time.process_time() - begun)
        return min(found)

    seconds(200)
    assert seconds(4000) < 10 * max(seconds(1000), 0.02)
