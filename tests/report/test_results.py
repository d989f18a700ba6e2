"""What a network is compared with, how runs are averaged and named, and which runs test the paper's accuracies."""

import json
from dataclasses import replace

import pytest
from record_examples import RESULTS, gathered, run_of
from torch import nn

from lowrank_cnn.deploy.timing import time_model
from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.thin import thin
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import dense_cost, run_entry
from lowrank_cnn.paper.published import rows
from lowrank_cnn.report import read_records
from lowrank_cnn.report.page import cards, certainty, headline, render, summary_table
from lowrank_cnn.report.records import Records, Run
from lowrank_cnn.report.results import (
    RECIPES,
    NetworkResult,
    accuracies,
    comparable,
    gather,
    is_twin,
    kind_of,
    of_paper,
    twin_known,
)
from lowrank_cnn.report.style import network_looks
from lowrank_cnn.report.trade import our_point, trade_chart
from lowrank_cnn.train.recipes import get_recipe

SIZE = [3, 30, 30]


def run(name: str, top1: float, *, macs: int = 100, seed: int = 0, recipe: dict | None = None, **model) -> dict:
    return {
        "kind": "training",
        "model": {"name": name, "num_classes": 10, **model},
        "recipe": {"name": "r", **(recipe or {})},
        "data": {"name": "cifar10", "image": SIZE},
        "seed": seed,
        "result": {"top1": top1, "macs": macs, "params": 10 * macs, "seconds": 5.0},
        "status": "finished",
    }


def timing(name: str, ms: float, *, batch: int = 1, device: str = "cpu", **more: object) -> dict:
    inside = {"input": [batch, *SIZE], "device": device, "total": {"ms": ms}, "macs": 50 * batch}
    return {"kind": "timing", "name": name, **inside, **more}


def entries_of(*values: dict) -> dict[str, NetworkResult]:
    return {entry.label: entry for entry in gathered(*values)}


def test_seeds_are_averaged_and_repeated_ones_count_once():
    entry = entries_of(run("nin", 0.8), run("nin", 0.9, seed=1))["nin"]
    assert (entry.top1, entry.top1_spread) == (pytest.approx(0.85), pytest.approx(0.0707, abs=1e-4))
    twice = entries_of(run("nin", 0.8, seed=1), run("nin", 0.8, seed=1))["nin"]
    assert (len(twice.runs), twice.seeds, twice.top1_spread) == (2, 1, None)
    three = entries_of(run("nin", 0.7, seed=1), run("nin", 0.9, seed=1), run("nin", 0.9, seed=2))["nin"]
    assert three.top1 == pytest.approx(0.85)


def test_unfinished_runs_count_only_where_none_has_finished():
    cut = {**run("nin", 0.2, seed=1), "status": "failed"}
    assert entries_of(run("nin", 0.9), cut)["nin"].top1 == 0.9
    alone = entries_of(cut)["nin"]
    assert (alone.top1, alone.finished) == (0.2, False)


def test_a_network_is_compared_with_its_dense_twin():
    found = entries_of(run("nin", 0.9, macs=200), run("nin-c3-lr", 0.88, macs=108))
    assert found["nin-c3-lr"].ratios == pytest.approx({"macs": 0.54, "params": 0.54, "top1": -2.0})
    assert found["nin"].ratios == pytest.approx({"macs": 1.0, "params": 1.0, "top1": 0.0})
    other = {**run("nin", 0.5), "recipe": {"name": "another"}}
    assert "top1" not in entries_of(other, run("nin-c3-lr", 0.88))["nin-c3-lr"].ratios


def test_a_twin_that_was_not_trained_has_the_cost_that_the_record_states():
    ratios = entries_of(trained(create_model("nin-c3-lr", width=0.1)))["nin-c3-lr width 0.1"].ratios
    networks = (create_model(name, width=0.1) for name in ("nin-c3-lr", "nin"))
    assert ratios["macs"] == pytest.approx(share(*networks))
    assert "top1" not in ratios
    assert entries_of(run("nin-c3-lr", 0.9))["nin-c3-lr"].ratios == {}  # an older record


@pytest.mark.parametrize(
    ("dense", "ours", "otherwise"),
    [
        ({"epochs": 5}, {"epochs": 5}, ()),
        ({"epochs": 9}, {"epochs": 5}, ("for another number of epochs",)),
        ({"dropout": 0.5}, {"dropout": 0.2}, ("with another share of dropout",)),
        ({"evaluate_every": 5}, {"evaluate_every": 9}, ()),
        ({"lr": 0.1}, {"lr": 0.2}, ("at another learning rate",)),
        ({"momentum": 0.5}, {"momentum": 0.9}, None),
    ],
)
def test_a_twin_trained_otherwise_is_told_or_no_twin(dense: dict, ours: dict, otherwise: tuple | None):
    entry = entries_of(run("nin", 0.9, recipe=dense), run("nin-c3-lr", 0.88, recipe=ours))["nin-c3-lr"]
    assert ("top1" in entry.ratios) is (otherwise is not None)
    assert entry.otherwise == (otherwise or ())


def test_a_twin_that_was_trained_as_long_is_preferred_and_named_with_its_settings():
    trained = [("nin", 5, 0.2), ("nin", 9, 0.5), ("nin-c3-lr", 9, 0.2)]
    found = entries_of(
        *(run(name, 0.9, recipe={"epochs": epochs, "dropout": drop}) for name, epochs, drop in trained)
    )
    assert found["nin-c3-lr"].otherwise == ("with another share of dropout",)
    short, long = {"epochs": 1}, {"epochs": 3}
    runs = [run("nin", 0.5, recipe=short), run("nin", 0.8, recipe=long), run("nin-c3-lr", 0.4, recipe=short)]
    found = entries_of(*runs)
    assert found["nin-c3-lr"].twin == "nin, 1 epoch"
    (arrow,) = trade_chart([our_point(entry) for entry in found.values()], "macs", "top1")["arrows"]
    assert (arrow["y"], arrow["y2"]) == (0.5, 0.4)


def foreign(top1: float, params: int) -> dict:
    values = run("Sequential", top1)
    return {**values, "model": {"name": "Sequential"}, "result": {**values["result"], "params": params}}


USUAL = {"freeze": "", "layer_decay": 1.0, "lr": 0.1}


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([run("nin", 0.9, recipe={"lr": lr}) for lr in (0.1, 0.2)], ["nin, lr=0.1", "nin, lr=0.2"]),
        ([run("nin", 0.9, init="torch"), run("nin", 0.8)], ["nin, composite init", "nin, torch init"]),
        ([run("nin", 0.9, recipe={"epochs": n}) for n in (104, 56)], ["nin, 56 epochs", "nin, 104 epochs"]),
        ([run("nin", 0.9, recipe={"dropout": drop}) for drop in (None, 0.2)], ["nin, dropout=0.2", "nin"]),
        ([{**run("nin", 0.9), "begun_from": "a.safetensors"}], ["nin, begun from a.safetensors"]),
        ([{**run("nin", 0.9), "begun_from": ""}], ["nin"]),
        (
            [foreign(0.5, 1000), foreign(0.7, 2000)],
            ["Sequential, 1.00k parameters", "Sequential, 2.00k parameters"],
        ),
        (
            [
                run("nin", 0.9, recipe=USUAL),
                run("nin", 0.8, recipe={**USUAL, "freeze": "features.*", "lr": 0.2}),
            ],
            ["nin, lr=0.1", "nin, freeze=features.*, lr=0.2"],
        ),
    ],
)
def test_runs_with_other_settings_are_kept_apart_and_say_so(values: list[dict], labels: list[str] | None):
    found = [entry.label for entry in gathered(*values)]
    assert sorted(found) == sorted(labels or found)
    assert len(set(found)) == len(values)


def test_the_page_opens_with_data_that_show_a_gain_and_the_best_recipe():
    other = {**run("nin-c3-lr", 0.5), "data": {"name": "a few photographs", "image": SIZE}}
    found = gathered(other, run("nin", 0.9, macs=200), run("nin-c3-lr", 0.88, macs=108))
    assert [entry.data for entry in found] == ["cifar10", "cifar10", "a few photographs"]
    ablation = [
        {**run("nin-c3-lr", top1, init=init), "recipe": {"name": "ablation", "epochs": 10}}
        for top1, init in ((0.1, "torch"), (0.7, "composite"))
    ]
    found = gathered(*ablation, run("nin", 0.9), run("nin-c3-lr", 0.88))
    assert [entry.recipe for entry in found] == ["r", "r", "ablation", "ablation"]
    assert [entry.label for entry in comparable(found)] == ["nin", "nin-c3-lr"]
    alone = gathered(*ablation)
    assert comparable(alone) == alone


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
    trained, timed = gathered(run("nin", 0.9), timing("nin", 10.0, input=[3, 224, 224]))
    assert (trained.timings, len(timed.timings), timed.data) == ((), 1, "")


@pytest.mark.parametrize(
    ("sets", "names"),
    [
        ([{"digest": "a1"}, {"digest": "b2"}], ["photos (set 1)", "photos (set 2)"]),
        ([{"digest": "a1"}, {"digest": "a1"}], ["photos"]),
        ([{"digest": name, "held_out_of": "c3"} for name in ("a1", "b2")], ["photos, images held out"]),
        ([{"train": 10}, {"train": 20}], ["photos (10 images)", "photos (20 images)"]),
        (
            [{"classes": [name], "train": 10} for name in "ab"],
            ["photos (10 images set 2)", "photos (10 images)"],
        ),
    ],
)
def test_runs_of_other_images_under_one_name_are_never_averaged(sets: list[dict], names: list[str]):
    values = [{**run("nin", 0.5, seed=i), "data": {"name": "photos", **data}} for i, data in enumerate(sets)]
    assert [entry.data for entry in gathered(*values)] == names


def own(filters: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, filters, 3), nn.ReLU(), nn.Conv2d(filters, 4, 3))


def trained(network: nn.Module, top1: float = 0.5, *, seed: int = 0) -> dict:
    """The record of a run of any network, as far as a report reads it."""
    cost, dense = count(network, tuple(SIZE)), dense_cost(network, tuple(SIZE))
    told = {"macs": dense[0], "params": dense[1]} if dense else None
    result = {"top1": top1, "macs": cost.macs, "params": cost.params, "dense": told}
    return {**run("", top1, seed=seed), "model": run_entry(network), "result": result}


def timed(network: nn.Module, ms: float, twin: dict | None = None) -> dict:
    """A timing, as `lowrank time --json` prints it: a network that is not ours is called by its class."""
    return timing(type(network).__name__, ms, twin=twin, macs=count(network, tuple(SIZE)).macs)


def share(network: nn.Module, dense: nn.Module) -> float:
    return count(network, tuple(SIZE)).macs / count(dense, tuple(SIZE)).macs


def test_a_converted_network_of_ones_own_is_held_against_the_unconverted_one():
    low_rank = convert(own(), "lr-join")
    alone = entries_of(trained(low_rank))["Sequential+lr-join"]
    assert alone.ratios["macs"] == pytest.approx(share(low_rank, own()))
    assert alone.ratios["params"] < 1
    assert not is_twin(alone)
    beside = entries_of(trained(low_rank, 0.5), trained(own(), 0.6))
    assert beside["Sequential+lr-join"].ratios["top1"] == pytest.approx(-10.0)
    assert is_twin(beside["Sequential"])
    found = entries_of(trained(low_rank, 0.5), trained(own(filters=16), 0.6))["Sequential+lr-join"]
    assert "top1" not in found.ratios  # another network of the same class
    assert found.ratios["macs"] == pytest.approx(share(low_rank, own()))


def test_networks_of_one_class_are_not_taken_for_seeds_of_one():
    assert len(gathered(trained(own()), trained(own(16)), trained(own(), seed=1))) == 2
    finer, coarser = (convert(own(), f"lr-join(m={m})") for m in (4, 2))
    assert len(gathered(trained(finer), trained(coarser))) == 2


def test_a_converted_network_of_ours_keeps_its_options():
    dense = create_model("nin", width=0.1, norm="batch")
    low_rank = convert(dense, "separable")
    found = entries_of(trained(low_rank, 0.5), trained(dense, 0.6))["nin+separable width 0.1"]
    assert found.ratios["macs"] == pytest.approx(share(low_rank, dense))
    assert found.ratios["top1"] == pytest.approx(-10.0)


def test_where_the_twin_cannot_be_known_the_page_says_so():
    by_hand = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)]), nn.ReLU(), nn.Conv2d(8, 4, 3))
    (entry,) = gathered(trained(by_hand))
    assert (twin_known(entry), entry.ratios) == (False, {})
    assert summary_table([entry]).rows[0]["to twin"].shown == "not known"


def test_a_timing_of_a_converted_network_is_not_that_of_its_twin():
    low_rank = convert(own(), "lr-join")
    both = timed(low_rank, 4.0, timed(own(), 10.0))
    found = entries_of(trained(low_rank), trained(own()), both)
    assert found["Sequential+lr-join"].ratios["CPU"] == pytest.approx(0.4)
    alone = entries_of(both)
    expected = {"macs": share(low_rank, own()), "CPU": 0.4}
    assert alone["Sequential, converted"].ratios == pytest.approx(expected)
    assert is_twin(alone["Sequential"])


def test_cards_tell_the_most_accurate_and_the_cheapest_comparable_network():
    best, cheap = cards(gather(read_records([RESULTS / "cifar10"])))
    assert (best["title"], best["network"]) == ("Best of 3 low-rank networks, beside its dense twin", "nin-c3")
    assert (cheap["title"], cheap["network"]) == ("Cheapest of these within 1 point", "nin-c3-lr, 150 epochs")
    assert best["difference"] == "+0.64 points"
    assert "0.75 MACs" in best["cost"]
    assert best["sure"] == "Corrected 95% interval +0.28 to +1.01: more accurate."
    lost = cards(gather(read_records([RESULTS / "tiny-imagenet" / "paper"])))
    assert lost[0]["network"] == "vgg11-gmp-lr-join-wfull"
    assert not any("lde" in card["network"] for card in lost)  # it lost too much, however cheap
    init = gather(read_records([RESULTS / "cifar10" / "init"]))
    assert (cards(init), headline(init)) == ([], "Low-rank networks")
    told = gathered(run("nin", 0.4, recipe={"epochs": 5}), run("nin-c3-lr", 0.8, macs=50, recipe={"epochs": 1}))
    assert "the twin was trained for another number of epochs" in cards(told)[0]["sure"]


def test_a_thin_network_is_compared_with_its_dense_twin_and_has_its_own_card():
    dense = own(32)
    thinner = thin(dense, width=0.5, input_size=SIZE, multiple=4)
    told = gathered(trained(dense, 0.8), trained(thinner, 0.7), trained(convert(dense, "lr"), 0.75))
    assert [kind_of(entry) for entry in told] == ["dense", "low-rank", "thin"]
    assert [round(entry.ratios["top1"]) for entry in told] == [0, -5, -10]
    assert "thin, 0." in told[2].label
    assert [card["title"] for card in cards(told)] == ["Low-rank network", "Thin network"]
    assert headline(told) == "Dense, thin and low-rank networks"
    assert network_looks({entry.label: kind_of(entry) for entry in told})[told[2].label]["light"] == "#7f00ff"


def test_a_timing_finds_the_run_of_its_network():
    net = thin(own(32), width=0.5, input_size=SIZE, multiple=4)
    timed = json.loads(json.dumps({"kind": "timing", **time_model(net, SIZE, repeats=3).to_dict()}))
    (found,) = gathered(trained(net), timed)
    assert found.time("CPU") is not None


@pytest.mark.parametrize(
    ("device", "convs", "says"),
    [
        ("cuda", "our kernels", "by our kernels"),
        ("cuda", "torch's convs", "by torch's convs"),
        ("cuda", "", "as trained"),  # an older record
        ("cpu", "", "by torch's convs"),
    ],
)
def test_a_time_says_whose_convs_ran(device: str, convs: str, says: str):
    timed = json.loads(json.dumps({"kind": "timing", **time_model(convert(own(32), "lr"), SIZE).to_dict()}))
    assert timed["convs"] == "torch's convs"  # on a CPU
    timed |= {"device": device, "convs": convs}
    (row,) = summary_table(gathered(timed)).rows
    cell = row["GPU ms/image" if device == "cuda" else "CPU ms/image"]
    assert cell.small.endswith(says)


def test_the_papers_figures_are_shown_beside_its_networks_on_its_data_alone():
    own = run("nin", 0.5) | {"data": {"name": "photos"}}
    photographs, paper = gathered(own), gather(read_records([RESULTS / "cifar10" / "paper"]))
    assert not of_paper(photographs[0].runs)
    assert of_paper(paper[0].runs)
    assert "Audit" not in render(Records(list(photographs[0].runs)))


@pytest.mark.parametrize(
    ("gap", "reach", "says", "mood"),
    [
        (0.5, 0.3, "more accurate", "good"),
        (-0.1, 0.3, "no loss of more than 1 point", "good"),
        (-2.0, 0.3, "less accurate", "bad"),
        (-0.8, 0.9, "not significant", "quiet"),
        (3.0, None, "Too few seeds", "quiet"),
    ],
)
def test_certainty_in_words(gap: float, reach: float | None, says: str, mood: str):
    words, found = certainty(gap, reach)
    assert says in words
    assert found == mood


KEY = ("nin-cifar10", "nin-c3-lr", "top1")
IMAGES = {
    "ilsvrc12": {"name": "ILSVRC/imagenet-1k", "train": 1_281_167, "test": 50_000},
    "places205": {"name": "places205", "train": 2_448_873, "test": 20_500},
    "cifar10": {"name": "cifar10", "train": 50_000, "test": 10_000},
}


@pytest.fixture(scope="module")
def committed() -> Run:
    (found,) = read_records([RESULTS / "cifar10" / "paper" / "nin-c3-lr-seed1"]).runs
    return found


def test_the_committed_runs_of_the_papers_recipe_are_taken_and_no_others():
    found = accuracies(read_records([RESULTS]).runs)
    top1 = {network for table, network, measure in found if (table, measure) == ("nin-cifar10", "top1")}
    assert top1 == {"nin", "nin-c3", "nin-c3-lr"}
    assert {table for table, _, _ in found} == {"nin-cifar10"}  # Tiny-ImageNet is not ILSVRC
    assert all(len(runs) == 3 for runs in found.values())


@pytest.mark.parametrize("table", RECIPES)
def test_every_row_of_every_table_is_found(table: str):
    for row in (row for row in rows() if row.table == table):
        own = {"stride": row.stride} if table == "vgg-places" else {}
        values = {**run(row.network, 0.5, **own), "data": IMAGES[row.dataset]}
        values["recipe"] = get_recipe(RECIPES[table]).to_dict()
        found = accuracies([run_of(values)])
        assert found[table, row.network, "top1"] == (0.5,)
        assert {table for table, _, _ in found} == {row.table}
        part = {**values, "data": {**IMAGES[row.dataset], "train": 5000}}
        assert accuracies([run_of(part)]) == {}


@pytest.mark.parametrize(
    "setting",
    [
        *(("epochs", value) for value in ("179", "None", "many", "nan")),
        ("lr", "0.01"),
        ("preprocess", "standardize"),
        ("norm", "batch"),
        ("pool", "average"),
        ("init", "torch"),
        ("holdout", "0.1"),
        ("begun_from", "weights.safetensors"),
        ("clip_norm", "0.0"),
    ],
)
def test_a_run_by_other_settings_tells_nothing(committed: Run, setting: tuple[str, str]):
    settings = tuple({**dict(committed.settings), setting[0]: setting[1]}.items())
    assert accuracies([committed])[KEY] == (committed.top1,)
    assert KEY not in accuracies([replace(committed, settings=settings)])


def test_what_a_network_or_machine_has_for_itself_may_differ(committed: Run):
    own = {**dict(committed.settings), "epochs": "300", "dropout": "0.4", "precision": "fp32"}
    assert KEY in accuracies([replace(committed, settings=tuple(own.items()))])


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": "nin-modern"}, {"data": "digits"}, {"status": "running"}, {"settings": ()}, {"top1": None},
        *(
            {"network": change}
            for change in ({"width": 0.5}, {"scheme": "lr"}, {"stride": 2}, {"name": "nin-c3"}, {"base": "nin"})
        ),
    ],
)  # fmt: skip
def test_a_run_in_another_way_or_of_another_network_tells_nothing(committed: Run, change: dict):
    if "network" in change:
        change = {"network": replace(committed.network, **change["network"])}
    assert KEY not in accuracies([replace(committed, **change)])
