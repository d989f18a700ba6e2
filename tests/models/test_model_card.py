"""The card of a network: for people, and for the search of the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest

import lowrank_cnn as lr

hf = pytest.importorskip("huggingface_hub")


def test_a_trained_network_says_what_it_costs_and_how_good_it_is(tmp_path: Path):
    network = lr.create_model("nin-c3-lr", pretrained="cifar10")
    card = hf.ModelCard.load(
        lr.save_pretrained(network, tmp_path, licence="mit", name="someone/net") / "README.md"
    )
    assert (card.data.library_name, card.data.license) == ("lowrank-cnn", "mit")
    assert [result.metric_value for result in card.data.eval_results] == [0.9327, 0.9973]
    cost = lr.count(network, network.input_size)
    assert f"{cost.macs / 1e6:.0f}M" in card.text
    assert "its dense twin" in card.text
    assert "airplane" in card.text
    assert 'lr.from_pretrained("someone/net")' in card.text


def test_a_converted_network_names_its_schemes_and_given_metrics(tmp_path: Path):
    network = lr.convert(lr.create_model("nin", width=0.1, num_classes=5), "separable")
    text = (lr.save_pretrained(network, tmp_path, metrics={"top1": 0.5}) / "README.md").read_text()
    assert "`separable`" in text
    assert "value: 0.5" in text
    assert "It has no classes yet" in text
