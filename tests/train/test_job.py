"""What `fit` refuses before it trains, and what a run continues from."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train.fit import about

CROSS_ENTROPY = nn.functional.cross_entropy


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"loss": CROSS_ENTROPY, "class_weights": "balanced"}, "set class_weights=none"),
        ({"loss": CROSS_ENTROPY, "teacher": nn.Identity()}, "ask the teacher within it"),
        ({"compile": "yes"}, 'compile is True, False or "auto"'),
        ({"compile": True, "checkpoint_activations": True}, "exclude each other"),
        ({"quantize": "int8", "checkpoint_activations": True}, "layer by layer"),
        ({"quantize": "int8", "precision": "fp16"}, "fp16 rounds small steps away"),
        ({"resume": True}, "give --out"),
    ],
)
def test_options_that_exclude_each_other_are_refused(driver, options, says):
    weights = options.pop("class_weights", "none")
    with pytest.raises(LowRankError, match=says):
        driver.train(None, dataclasses.replace(driver.PLAIN, class_weights=weights), **options)


def test_a_run_is_identified_by_network_data_and_seed(driver):
    net, data = driver.tiny_net(), driver.tiny_data()
    one = about(net, data, 0)
    assert one["data"]["digest"] == data.digest
    assert one["data"]["train"] == len(data.train)
    assert one != about(net, data, 1)


def test_a_run_goes_on_only_where_there_is_one(driver, tmp_path, capsys):
    _, record = driver.train(tmp_path / "run", driver.PLAIN, resume=True, progress=True)
    assert "There is nothing to resume" in capsys.readouterr().out
    assert record.precision == "fp32"
    with pytest.raises(LowRankError, match="already holds a run"):
        driver.train(tmp_path / "run", driver.PLAIN)
    _, again = driver.train(tmp_path / "run", driver.PLAIN, resume=True, progress=True)
    assert "nothing is left to do" in capsys.readouterr().out
    assert again.status == "finished"
    assert again.history == record.history


def test_the_recipe_sets_the_dropout_of_the_network(driver):
    network = driver.tiny_net(stateful=True)
    recipe = dataclasses.replace(driver.PLAIN, dropout=0.25, epochs=1)
    driver.fit(network, driver.tiny_data(), recipe, progress=False, device="cpu")
    assert [module.p for module in network.modules() if isinstance(module, nn.Dropout)] == [0.25]
