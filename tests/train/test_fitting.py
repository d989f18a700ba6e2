"""`fit` on a tiny set: it learns, it is repeatable, and its record says what happened."""

from __future__ import annotations

import dataclasses
import json
import random
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.models import create_model
from lowrank_cnn.train import fit, get_recipe, load_record


def test_it_learns_and_says_so(driver):
    _, record = driver.train(None, epochs=6)
    assert record.status == "finished"
    assert record.result["top1"] == 1.0
    assert record.result["n"] == 24
    assert record.history[-1]["train_loss"] < record.history[0]["train_loss"]


def test_equal_seeds_give_equal_weights_and_others_do_not(driver):
    first, _ = driver.train(None, epochs=2)
    second, _ = driver.train(None, epochs=2)
    third, _ = driver.train(None, epochs=2, seed=1)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.state_dict()["0.weight"], third.state_dict()["0.weight"])


def test_checkpoints_change_nothing(driver, tmp_path):
    plain, _ = driver.train(None, epochs=2)
    saved, _ = driver.train(tmp_path, epochs=2, checkpoint_every=0.0)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, saved.state_dict()[name])


def test_the_record_beside_the_run(driver, tmp_path):
    _, record = driver.train(tmp_path, epochs=2, seed=5)
    assert load_record(tmp_path) == record
    assert json.loads((tmp_path / "recipe.json").read_text()) == record.recipe
    assert (record.seed, record.watched, record.precision, record.device) == (5, "holdout", "fp32", "cpu")
    assert record.data["name"] == "tiny"
    assert record.data["digest"] == driver.tiny_data().digest
    assert record.data["problems"] == {"train": {}, "test": {}}
    assert record.environment["torch"] == torch.__version__
    assert [row["epoch"] for row in record.history] == [1, 2]
    assert record.result["params"] == 116
    assert record.result["macs"] > 0


def test_levelling_off_drops_and_ends_the_run_and_the_drops_can_be_replayed(driver):
    recipe = dataclasses.replace(driver.STATEFUL, patience=2, levels=1)
    learnt = fit(driver.tiny_net(stateful=True), driver.tiny_data(), recipe, progress=False, device="cpu")
    [drop] = learnt.result["drop_epochs"]
    assert learnt.result["epochs"] == len(learnt.history) < recipe.epochs
    rates = [row["lr"] for row in learnt.history]
    assert rates[drop] == pytest.approx(rates[drop - 1] / 10, rel=0.01)
    replay = dataclasses.replace(recipe, holdout=0.0, levels=0, drop_epochs=(drop,), epochs=drop + 1)
    record = fit(driver.tiny_net(stateful=True), driver.tiny_data(), replay, progress=False, device="cpu")
    assert record.watched == "test"
    assert len(record.history) == drop + 1
    assert record.history[drop]["lr"] == pytest.approx(record.history[drop - 1]["lr"] / 10, rel=0.01)


def test_what_is_held_out_is_not_trained_on(driver):
    data = driver.tiny_data()
    images = {"holdout": 64, "test": 80}
    for watched, holdout in (("holdout", 0.2), ("test", 0.0)):
        recipe = dataclasses.replace(driver.PLAIN, holdout=holdout, epochs=1)
        record = fit(driver.tiny_net(), data, recipe, progress=False, device="cpu")
        row = record.history[0]
        assert record.watched == watched
        assert round(row["images_per_second"] * row["seconds"]) == images[watched]


def test_evaluation_can_be_seldom(driver):
    recipe = dataclasses.replace(driver.PLAIN, epochs=5, evaluate_every=2)
    record = fit(driver.tiny_net(), driver.tiny_data(), recipe, progress=False, device="cpu")
    measured = [row["epoch"] for row in record.history if row["accuracy"] is not None]
    assert measured == [2, 4, 5]


def test_the_model_ends_with_its_averaged_weights(driver, tmp_path):
    network, _ = driver.train(tmp_path, epochs=2)
    saved = driver.last_weights(tmp_path)
    assert torch.equal(network.state_dict()["0.weight"], saved["average.0.weight"])
    assert not torch.equal(saved["model.0.weight"], saved["average.0.weight"])


def test_auxiliary_heads_are_trained(driver):
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = driver.tiny_net(), driver.tiny_net(seed=1)

        def forward(self, x):
            return (self.main(x), self.side(x)) if self.training else self.main(x)

    network = TwoHeads()
    before = network.side[0].weight.clone()
    record = fit(network, driver.tiny_data(), driver.PLAIN, progress=False, device="cpu")
    assert not torch.equal(network.side[0].weight, before)
    assert record.result["n"] == 24


def test_dropout_follows_the_recipe(driver):
    recipe = dataclasses.replace(driver.STATEFUL, dropout=0.4, epochs=1)
    network = driver.tiny_net(stateful=True)
    fit(network, driver.tiny_data(), recipe, progress=False, device="cpu")
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == [0.4]


def test_bf16_trains_on_a_cpu(driver):
    _, record = driver.train(None, driver.PLAIN, precision="bf16")
    assert record.precision == "bf16"
    assert record.history[-1]["train_loss"] < record.history[0]["train_loss"]


def test_a_network_of_the_paper_trains(driver):
    network = create_model("nin-c3-lr", num_classes=4, in_channels=1, width=0.05)
    recipe = get_recipe("nin-paper", epochs=1, batch_size=16, crop=6, holdout=0.25)
    record = fit(network, driver.tiny_data(), recipe, progress=False, device="cpu")
    assert record.model == network.config
    assert record.watched == "holdout"


def test_no_epochs_are_refused(driver):
    with pytest.raises(LowRankError, match="epochs lies between 1 and"):
        driver.train(None, driver.PLAIN, epochs=0)


def test_a_run_over_a_file_is_refused(driver, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LowRankError, match="is a file"):
        driver.train(tmp_path / "file")


@pytest.mark.parametrize("options", [{"device": "tpu9"}, {"precision": "fp8"}, {"strategy": "fsdp"}])
def test_what_there_is_not_is_named(driver, options):
    with pytest.raises(LowRankError, match=next(iter(options.values()))):
        driver.train(None, **options)


def test_a_network_for_other_classes_or_images_is_refused_before_training(driver, tmp_path):
    data = driver.tiny_data()
    more = dataclasses.replace(data, classes=(*data.classes, "middle"))
    with pytest.raises(LowRankError, match="4 outputs for an image, and the data 5 classes"):
        fit(driver.tiny_net(), more, driver.PLAIN, out=tmp_path, device="cpu")
    colour = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(LowRankError, match="cannot take images of 1x8x8"):
        fit(colour, data, driver.PLAIN, out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_epochs_are_read_as_a_recipe_reads_them(driver):
    _, record = driver.train(None, driver.PLAIN, epochs="1")
    assert len(record.history) == 1
    with pytest.raises(LowRankError, match="epochs wants a value of type int, not 'many'"):
        driver.train(None, driver.PLAIN, epochs="many")


def test_batch_size_and_rate_replace_those_of_the_recipe(driver):
    _, record = driver.train(None, driver.PLAIN, epochs=1, batch_size=8, lr=0.02)
    assert (record.recipe["batch_size"], record.recipe["lr"]) == (8, 0.02)
    loader = DataLoader(TensorDataset(torch.rand(8, 1, 8, 8), torch.arange(8) % 4), batch_size=4)
    with pytest.raises(LowRankError, match="makes batches of 4: leave batch_size out"):
        fit(driver.tiny_net(), loader, driver.PLAIN, batch_size=8)


def test_one_class_is_refused(driver, tmp_path):
    alone = dataclasses.replace(driver.tiny_data(), classes=("dark",))
    with pytest.raises(LowRankError, match=r"fewer than two classes \(dark\)"):
        fit(driver.tiny_net(), alone, driver.PLAIN, out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_a_run_among_its_images_is_refused(driver, tmp_path):
    with pytest.raises(LowRankError, match="holds the images to train on: choose another directory"):
        fit(driver.tiny_net(), tmp_path, driver.PLAIN, out=tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())


def test_data_may_be_named(driver, monkeypatch):
    monkeypatch.setattr("lowrank_cnn.train.inputs.open_data", {"tiny": driver.tiny_data()}.__getitem__)
    record = fit(driver.tiny_net(), "tiny", driver.PLAIN, epochs=1, progress=False, device="cpu")
    assert record.data["name"] == "tiny"


@pytest.mark.parametrize("seed", [-1, 2**32, 10**30])
def test_a_seed_out_of_range_is_refused(driver, seed):
    with pytest.raises(LowRankError, match=f"a seed lies between 0 and 4294967295, not at {seed}"):
        driver.train(None, seed=seed)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_checkpoints_at_no_time_are_refused(driver, seconds):
    with pytest.raises(LowRankError, match=f"checkpoint_every is a number of seconds, 0 or more, not {seconds}"):
        driver.train(None, checkpoint_every=seconds)


def test_checkpointed_activations_cannot_be_compiled(driver):
    with pytest.raises(LowRankError, match="exclude each other"):
        driver.train(None, checkpoint_activations=True, compile=True)


@pytest.mark.parametrize("stateful", [False, True])
def test_checkpointed_activations_change_nothing(driver, stateful):
    recipe = driver.STATEFUL if stateful else driver.PLAIN
    plain, one = driver.train(None, recipe, epochs=2)
    saving, other = driver.train(None, recipe, epochs=2, checkpoint_activations=True)
    assert one.result["loss"] == other.result["loss"]
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, saving.state_dict()[name]), name


def test_it_is_said_where_a_network_is_not_what_the_recipe_is_for(driver, capsys):
    recipe = get_recipe("nin-modern", epochs=1, batch_size=4, crop="none", pad=0)
    for options, wanted in (({}, ["norm='batch'", "pool='average'"]), (recipe.network(), [])):
        network = create_model("nin", num_classes=4, in_channels=1, width=0.05, **options)
        fit(network, driver.tiny_data(), recipe, device="cpu")
        lines = [line for line in capsys.readouterr().out.splitlines() if "is for networks with" in line]
        assert [words in line for words, line in zip(wanted, lines, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize(
    ("model", "hint"), [("nin", "create_model makes one"), (SimpleNamespace(network=None), "give its .network")]
)
def test_what_is_no_network_is_not_trained(driver, model, hint):
    with pytest.raises(LowRankError, match=f"fit trains an nn.Module, not a {type(model).__name__}: {hint}"):
        fit(model, driver.tiny_data(), "modern")


def test_a_finished_record_without_weights_is_not_begun_over(driver, tmp_path):
    driver.train(tmp_path, driver.PLAIN, epochs=1)
    before = (tmp_path / "record.json").read_text()
    for path in [*tmp_path.glob("step-*"), *tmp_path.glob("best-*")]:
        path.unlink()
    with pytest.raises(LowRankError, match="kept no weights"):
        driver.train(tmp_path, driver.PLAIN, epochs=2, resume=True)
    assert (tmp_path / "record.json").read_text() == before


def test_a_finished_run_is_not_taken_for_one_of_another_recipe(driver, tmp_path, capsys):
    driver.train(tmp_path, driver.PLAIN, epochs=2)
    with pytest.raises(LowRankError, match=r"has finished with lr=.*, not lr=0\.7"):
        driver.train(tmp_path, dataclasses.replace(driver.PLAIN, lr=0.7), epochs=2, resume=True)
    driver.train(tmp_path, driver.PLAIN, epochs=1, resume=True, progress=True)
    assert "has finished its 2 epochs" in capsys.readouterr().out


def test_showing_progress_draws_no_random_numbers_from_the_run(driver, tmp_path, monkeypatch):
    """A library that is imported lazily may draw on import, which a resumed run would do at another step."""
    whole, _ = driver.train(tmp_path / "quiet", driver.PLAIN)
    quiet = random.getstate()

    def drawing_line() -> None:
        random.random()
        torch.rand(3)

    monkeypatch.setattr(import_module("lowrank_cnn.train.fit"), "moving_line", drawing_line)
    drawing, _ = driver.train(tmp_path / "drawing", driver.PLAIN, progress=True)
    assert random.getstate() == quiet
    assert all(torch.equal(value, drawing.state_dict()[name]) for name, value in whole.state_dict().items())
