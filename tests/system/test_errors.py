import sys

import pytest

from lowrank_cnn.system.errors import MissingExtra, nearest, require


def test_a_missing_extra_names_the_install():
    with pytest.raises(MissingExtra, match=r"^drawing needs no_such_thing: pip install 'lowrank-cnn\[plots\]'$"):
        require("no_such_thing.inside", extra="plots", purpose="drawing")


def test_what_the_module_itself_misses_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(MissingExtra, match=r"^charts needs tensorboard: pip install 'lowrank-cnn\[train\]'$"):
        require("torch.utils.tensorboard", extra="train", purpose="charts")


def test_an_extra_that_is_there_is_imported():
    assert require("json", extra="plots").dumps([]) == "[]"


def test_nearest_names_the_near_or_all():
    assert nearest("separabel", ["separable", "lr"]) == "did you mean separable?"
    assert nearest("zzz", ["b", "a"]) == "known are a, b."
