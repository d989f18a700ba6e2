"""What a network is compared with: ours by its name, any other by what its record tells."""

import pytest
from record_examples import gathered
from torch import nn

from lowrank_cnn.method.convert import convert
from lowrank_cnn.method.count import count
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.models import create_model
from lowrank_cnn.models.build import dense_cost, run_entry
from lowrank_cnn.report.page import cards, summary_table
from lowrank_cnn.report.records import NetworkId, NetworkResult
from lowrank_cnn.report.results import is_twin, twin_id, twin_known

SIZE = (3, 30, 30)


def own(filters: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, filters, 3), nn.ReLU(), nn.Conv2d(filters, 4, 3))


def trained(network: nn.Module, top1: float = 0.5, *, seed: int = 0) -> dict:
    """The record of a run, as far as a report reads it."""
    cost, dense = count(network, SIZE), dense_cost(network, SIZE)
    told = {"macs": dense[0], "params": dense[1]} if dense else None
    return {
        "kind": "training",
        "model": run_entry(network),
        "recipe": {"name": "r"},
        "data": {"name": "set", "image": list(SIZE)},
        "seed": seed,
        "result": {"top1": top1, "macs": cost.macs, "params": cost.params, "dense": told},
        "status": "finished",
    }


def timed(network: nn.Module, ms: float, twin: dict | None = None) -> dict:
    """A timing, as `lowrank time --json` prints it: a network that is not ours is called by its class."""
    name = str(getattr(network, "config", {}).get("name", type(network).__name__))
    about = {
        "kind": "timing",
        "name": name,
        "input": [1, *SIZE],
        "device": "cpu",
        "total": {"ms": ms},
        "twin": twin,
    }
    return {**about, "macs": count(network, SIZE).macs}


def by_name(*values: dict) -> dict[str, NetworkResult]:
    return {entry.label: entry for entry in gathered(*values)}


def share(network: nn.Module, dense: nn.Module) -> float:
    return count(network, SIZE).macs / count(dense, SIZE).macs


def test_a_converted_network_of_ones_own_is_held_against_the_unconverted_one():
    low_rank = convert(own(), "lr-join")
    alone = by_name(trained(low_rank))["Sequential+lr-join"]
    assert alone.ratios["macs"] == pytest.approx(share(low_rank, own()))
    assert alone.ratios["params"] < 1
    assert not is_twin(alone)
    beside = by_name(trained(low_rank, 0.5), trained(own(), 0.6))
    assert beside["Sequential+lr-join"].ratios["top1"] == pytest.approx(-10.0)
    assert is_twin(beside["Sequential"])


def test_another_network_of_the_same_class_is_no_twin():
    low_rank, other = convert(own(), "lr-join"), own(filters=16)
    found = by_name(trained(low_rank, 0.5), trained(other, 0.6))["Sequential+lr-join"]
    assert "top1" not in found.ratios
    assert found.ratios["macs"] == pytest.approx(share(low_rank, own()))


def test_networks_of_one_class_are_not_taken_for_seeds_of_one():
    assert len(gathered(trained(own()), trained(own(16)), trained(own(), seed=1))) == 2
    finer, coarser = (convert(own(), f"lr-join(m={m})") for m in (4, 2))
    assert len(gathered(trained(finer), trained(coarser))) == 2


def test_a_converted_network_of_ours_keeps_its_options():
    dense = create_model("nin", width=0.1, norm="batch")
    low_rank = convert(dense, "separable")
    found = by_name(trained(low_rank, 0.5), trained(dense, 0.6))["nin+separable width 0.1"]
    assert found.ratios["macs"] == pytest.approx(share(low_rank, dense))
    assert found.ratios["top1"] == pytest.approx(-10.0)


def test_where_the_twin_cannot_be_known_the_page_says_so():
    by_hand = nn.Sequential(CompositeConv2d(3, [(3, 1, 4), (1, 3, 4)]), nn.ReLU(), nn.Conv2d(8, 4, 3))
    (entry,) = gathered(trained(by_hand))
    assert not twin_known(entry)
    assert entry.ratios == {}
    (row,) = summary_table([entry]).rows
    assert "not known" in [cell.shown for cell in row]
    assert not any("1.000" in cell.small for cell in row)
    before = trained(convert(own(), "lr"))
    del before["result"]["dense"]  # as records were written once
    (entry,) = gathered(before)
    assert (twin_known(entry), entry.ratios) == (False, {})


def test_a_timing_of_a_converted_network_is_not_that_of_its_twin():
    low_rank = convert(own(), "lr-join")
    timing = timed(low_rank, 4.0, timed(own(), 10.0))
    found = by_name(trained(low_rank), trained(own()), timing)
    assert found["Sequential+lr-join"].ratios["CPU"] == pytest.approx(0.4)
    alone = by_name(timing)
    expected = {"macs": share(low_rank, own()), "CPU": 0.4}
    assert alone["Sequential, converted"].ratios == pytest.approx(expected)
    assert is_twin(alone["Sequential"])


@pytest.mark.parametrize(
    ("name", "twin"),
    [
        ("vgg11-gmp-lr-join", "vgg11-gmp"),
        ("vgg11", "vgg11"),
        ("nin-c3-lr", "nin"),
        ("googlenet-lr-conv1", "googlenet"),
        ("resnet18", "resnet18"),
    ],
)
def test_dense_twins(name: str, twin: str):
    assert twin_id(NetworkId(name, scheme="lr", width=0.5)) == NetworkId(twin, width=0.5)


@pytest.mark.parametrize(
    ("change", "told"), [({"train": 1000}, None), ({"epochs": 1}, "another number of epochs")]
)
def test_a_twin_trained_otherwise_is_not_held_against_it_unsaid(change, told):
    runs = [trained(own(), 0.4), trained(convert(own(), "lr"), 0.8)]
    for run in runs:
        run["data"]["train"], run["recipe"]["epochs"] = 4000, 5
    runs[0]["data" if "train" in change else "recipe"] |= change
    entries = gathered(*runs)
    low_rank = next(entry for entry in entries if not is_twin(entry))
    assert ("top1" in low_rank.ratios) is (told is not None)
    assert [told in card.sure for card in cards(entries) if told] == [True] * (told is not None)
