"""Measured times are found again by everything they depend on, and by nothing else."""

import torch
from torch import nn

from lowrank_cnn.deploy import plan as plan_cache
from lowrank_cnn.deploy.blocks import Block, Epilogue
from lowrank_cnn.deploy.plan import Cache, block_key, network_key

X = torch.randn(1, 3, 8, 8)


def test_times_are_kept_and_found_for_the_same_ways(tmp_path):
    cache = Cache.open(tmp_path / "plans.json")
    cache.keep("a", {"as given": 1.0, "merged": 2.0})
    assert cache.save()
    again = Cache.open(tmp_path / "plans.json")
    assert again.times("a", ["merged", "as given"]) == {"as given": 1.0, "merged": 2.0}
    assert again.times("a", ["as given"]) is None
    assert again.times("b") is None
    assert again.taken == 1
    again.blind = True
    assert again.times("a") is None


def test_without_a_place_nothing_is_kept_and_damage_counts_as_empty(tmp_path):
    cache = Cache.open(False)
    cache.keep("a", {"as given": 1.0})
    assert Cache.open(False).times("a") is None
    path = tmp_path / "plans.json"
    for text in ("{", '{"plans": {"a": {"as given": "x"}}}', '{"plans": {"a": {"as given": NaN}}}'):
        path.write_text(text)
        assert Cache.open(path).times("a") is None


def test_keys_tell_layers_epilogues_inputs_and_layouts_apart():
    conv, last = nn.Conv2d(3, 8, 3), X.contiguous(memory_format=torch.channels_last)
    keys = [
        block_key(Block("a", conv), [X]),
        block_key(Block("a", conv, Epilogue("relu")), [X]),
        block_key(Block("a", nn.Conv2d(3, 8, 5)), [X]),
        block_key(Block("a", conv), [last]),
        block_key(Block("a", conv), [X.double()]),
        block_key(Block("a", conv), [X, X]),
        network_key(conv, X),
        network_key(conv, X, True),
    ]
    assert len(set(keys)) == len(keys)
    assert block_key(Block("b", nn.Conv2d(3, 8, 3)), [X + 1]) == keys[0]


def test_times_from_before_compiled_strips_were_installed_are_not_taken(monkeypatch):
    keys = set()
    for version in (None, "0.1.0", "0.2.0"):
        monkeypatch.setattr(plan_cache, "installed_version", lambda found=version: found)
        plan_cache._machine.cache_clear()
        keys.add(block_key(Block("a", nn.Conv2d(3, 8, 3)), [X]))
    plan_cache._machine.cache_clear()
    assert len(keys) == 3
