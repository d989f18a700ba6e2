"""`fit` on a tiny set: it learns, it repeats, its record says what happened; mistakes and doubts are sentences."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.train import load_record
from lowrank_cnn.train.failure import StopRequest
from lowrank_cnn.train.loop import Trainer
from tests.support import assert_equal_weights

CPU = torch.device("cpu")
QUIET = {"progress": False, "device": "cpu"}


def test_it_learns_and_the_record_says_so(driver, tmp_path):
    _, record = driver.train(tmp_path, epochs=6, seed=5)
    assert load_record(tmp_path) == record
    assert json.loads((tmp_path / "recipe.json").read_text()) == record.recipe
    assert (record.status, record.result["top1"], record.result["n"]) == ("finished", 1.0, 24)
    assert record.history[-1]["train_loss"] < record.history[0]["train_loss"]
    assert (record.seed, record.watched, record.precision, record.device) == (5, "holdout", "fp32", "cpu")
    assert (record.data["name"], record.data["digest"]) == ("tiny", driver.tiny_data().digest)
    assert record.data["problems"] == {"train": {}, "test": {}}
    assert record.environment["torch"] == torch.__version__
    assert [row["epoch"] for row in record.history] == [1, 2, 3, 4, 5, 6]
    assert record.result["params"] == 116
    assert record.result["macs"] > 0


def test_equal_seeds_give_equal_weights_whatever_is_saved(driver, tmp_path):
    first, _ = driver.train(None, epochs=2)
    second, _ = driver.train(tmp_path, epochs=2, checkpoint_every=0.0)
    third, _ = driver.train(None, epochs=2, seed=1)
    assert_equal_weights(first, second)
    assert not torch.equal(first.state_dict()["0.weight"], third.state_dict()["0.weight"])
    saved = driver.last_weights(tmp_path)  # the network ends with its averaged weights
    assert torch.equal(second.state_dict()["0.weight"], saved["average.0.weight"])
    assert not torch.equal(saved["model.0.weight"], saved["average.0.weight"])


def test_levelling_off_drops_and_ends_the_run_and_the_drops_can_be_replayed(driver):
    recipe = dataclasses.replace(driver.STATEFUL, patience=2, levels=1)
    learnt = lr.fit(driver.tiny_net(stateful=True), driver.tiny_data(), recipe, **QUIET)
    [drop] = learnt.result["drop_epochs"]
    assert learnt.result["epochs"] == len(learnt.history) < recipe.epochs
    rates = [row["lr"] for row in learnt.history]
    assert rates[drop] == pytest.approx(rates[drop - 1] / 10, rel=0.01)
    replay = dataclasses.replace(recipe, holdout=0.0, levels=0, drop_epochs=(drop,), epochs=drop + 1)
    record = lr.fit(driver.tiny_net(stateful=True), driver.tiny_data(), replay, **QUIET)
    assert (record.watched, len(record.history)) == ("test", drop + 1)
    assert record.history[drop]["lr"] == pytest.approx(record.history[drop - 1]["lr"] / 10, rel=0.01)
    early = dataclasses.replace(driver.PLAIN, epochs=40, lr=1e-9, holdout=0.2, early_stop=2)
    assert len(driver.train(None, early)[1].history) == 3


def test_what_is_held_out_is_not_trained_on(driver):
    for watched, holdout, images in (("holdout", 0.2, 64), ("test", 0.0, 80)):
        _, record = driver.train(None, dataclasses.replace(driver.PLAIN, holdout=holdout, epochs=1))
        row = record.history[0]
        assert record.watched == watched
        assert round(row["images_per_second"] * row["seconds"]) == images


def test_auxiliary_heads_are_trained(driver):
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.side = driver.tiny_net(), driver.tiny_net(seed=1)

        def forward(self, x):
            return (self.main(x), self.side(x)) if self.training else self.main(x)

    network = TwoHeads()
    before = network.side[0].weight.clone()
    record = lr.fit(network, driver.tiny_data(), driver.PLAIN, **QUIET)
    assert not torch.equal(network.side[0].weight, before)
    assert record.result["n"] == 24


def test_settings_change_the_recipe_and_the_run(driver):
    network, record = driver.train(
        None, epochs="1", batch_size=8, lr=0.02, precision="bf16", dropout=0.4, compile=False, workers="0"
    )
    assert (record.recipe["epochs"], record.recipe["batch_size"], record.recipe["lr"]) == (1, 8, 0.02)
    assert (record.recipe["dropout"], record.recipe["precision"], record.precision) == (0.4, "bf16", "bf16")
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == [0.4]


def test_data_may_be_named(driver, monkeypatch):
    monkeypatch.setattr("lowrank_cnn.train.inputs.open_data", {"tiny": driver.tiny_data()}.__getitem__)
    record = lr.fit(driver.tiny_net(), "tiny", driver.PLAIN, epochs=1, **QUIET)
    assert record.data["name"] == "tiny"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The iteration after every step of the runs of a test, and whether the network was in training mode."""
    taken: list[tuple[int, bool]] = []
    look_around = Trainer._look_around

    def look(self: Trainer, stop: StopRequest) -> None:
        taken.append((self.iteration, self.network.training))
        look_around(self, stop)

    monkeypatch.setattr(Trainer, "_look_around", look)
    return taken


def test_every_epoch_takes_its_steps_in_training_mode_and_is_evaluated_as_often_as_asked(driver, steps):
    _, record = driver.train(None, dataclasses.replace(driver.PLAIN, epochs=5, evaluate_every=2))
    per_epoch = len(steps) // 5
    assert [step for step, _ in steps] == list(range(1, 5 * per_epoch + 1))
    assert all(training for _, training in steps)
    assert [row["accuracy"] is not None for row in record.history] == [False, True, False, True, True]


@pytest.mark.parametrize(("changes", "tests"), [({"evaluate_every": 3}, 1), ({}, 3), ({"holdout": 0.2}, 4)])
def test_the_last_weights_are_tested_once(driver, monkeypatch, changes: dict, tests: int):
    """An average of the weights is what is tested, and which answers were right is known."""
    evaluate, found = Trainer._evaluate, []

    def counted(self: Trainer, loader, *, details: bool = False):
        result = evaluate(self, loader, details=details)
        found.append(result.top1)
        return result

    monkeypatch.setattr(Trainer, "_evaluate", counted)
    network, record = driver.train(None, dataclasses.replace(driver.PLAIN, ema=0.9, **changes))
    assert len(found) == tests
    assert record.result["top1"] == found[-1] == pytest.approx(float(record.right.double().mean()))
    again = lr.evaluate(network, driver.tiny_data(), **QUIET)
    assert again.top1 == pytest.approx(record.result["top1"])


def test_callbacks_see_the_network_before_it_is_tested(driver):
    def spoil(_, network: nn.Module) -> None:
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.zero_()

    _, record = driver.train(None, driver.PLAIN, callbacks=[spoil])
    assert record.result["loss"] == pytest.approx(math.log(len(record.data["classes"])), abs=1e-4)


def test_a_run_goes_on_only_if_there_is_one_and_a_finished_one_stays(driver, tmp_path, capsys):
    _, record = driver.train(tmp_path, driver.PLAIN, resume=True, progress=True)
    assert "There is nothing to resume" in capsys.readouterr().out
    with pytest.raises(LowRankError, match="already holds a run"):
        driver.train(tmp_path, driver.PLAIN)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    _, again = driver.train(tmp_path, driver.PLAIN, resume=True, progress=True)
    assert "nothing is left to do" in capsys.readouterr().out
    assert (again, again.status) == (record, "finished")
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(LowRankError, match=r"has finished with lr=.*, not lr=0\.7"):
        driver.train(tmp_path, driver.PLAIN, lr=0.7, resume=True)
    driver.train(tmp_path, driver.PLAIN, epochs=1, resume=True, progress=True)
    assert "has finished its 3 epochs" in capsys.readouterr().out
    before = (tmp_path / "record.json").read_text()
    for path in [*tmp_path.glob("step-*"), *tmp_path.glob("best-*")]:
        path.unlink()
    with pytest.raises(LowRankError, match="kept no weights"):
        driver.train(tmp_path, driver.PLAIN, epochs=4, resume=True)
    assert (tmp_path / "record.json").read_text() == before


LOADER = DataLoader(TensorDataset(torch.rand(8, 1, 8, 8), torch.arange(8) % 4), batch_size=4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epochs": 0}, "epochs lies between 1 and"),
        ({"device": "tpu9"}, "tpu9"),
        ({"precision": "fp8"}, "fp8"),
        ({"seed": -1}, "a seed lies between 0 and 4294967295, not at -1"),
        ({"seed": 2**32}, "a seed lies between 0 and 4294967295, not at 4294967296"),
        ({"checkpoint_every": float("nan")}, "checkpoint_every lies between 0 and"),
        ({"compile": "perhaps"}, "compile wants a value of type bool"),
        ({"quantize": "int4"}, "quantize is one of none, int8, not 'int4'"),
        ({"quantize": "int8", "compile": True}, "layer by layer"),
        ({"quantize": "int8", "precision": "fp16"}, "fp16 rounds small steps away"),
        ({"loss": nn.functional.cross_entropy, "class_weights": "balanced"}, "set class_weights=none"),
        ({"loss": nn.functional.cross_entropy, "teacher": nn.Identity()}, "ask the teacher within it"),
        ({"resume": True}, "give out"),
        ({"data": LOADER, "batch_size": 8}, "makes batches of 4: leave batch_size out"),
        ({"learning_rate": 0.1}, "fit takes no learning_rate: lr sets the learning rate"),
        ({"tensorboard": True}, 'fit takes no tensorboard: log="tensorboard" does the same'),
        ({"strategy": "ddp"}, "fit takes no strategy: processes that torchrun starts"),
        ({"epoch": 3}, "fit takes no epoch: did you mean epochs"),
        ({"model": "nin"}, "fit trains an nn.Module, not a str: create_model makes one"),
        ({"model": SimpleNamespace(network=None)}, "not a SimpleNamespace: give its .network"),
    ],
)
def test_mistakes_are_answered_in_a_sentence(driver, options, says):
    model, data = options.pop("model", driver.tiny_net()), options.pop("data", driver.tiny_data())
    with pytest.raises(LowRankError, match=says):
        lr.fit(model, data, driver.PLAIN, **{**QUIET, **options})


def test_what_cannot_be_trained_on_is_refused_before_anything_is_written(driver, tmp_path):
    data, folder = driver.tiny_data(), tmp_path / "run"
    colour = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    five = dataclasses.replace(data, classes=(*data.classes, "middle"))
    alone = dataclasses.replace(data, classes=("dark",))
    folder.mkdir()
    for network, images, says in (
        (driver.tiny_net(), five, "4 outputs for an image, and the data 5 classes"),
        (driver.tiny_net(), alone, r"fewer than two classes \(dark\)"),
        (colour, data, "cannot take images of 1x8x8"),
        (driver.tiny_net()[0], data, r"gives 4x8x8 for an image, .* needs a loss of your own"),
        (nn.Bilinear(8, 8, 2), data, r"cannot take images of 1x8x8: .* missing 1 required"),
        (driver.tiny_net(), folder, "holds the images to train on: choose another directory"),
    ):
        with pytest.raises(LowRankError, match=says):
            lr.fit(network, images, driver.PLAIN, out=folder, device="cpu")
    assert not list(folder.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(LowRankError, match="is a file"):
        driver.train(tmp_path / "file")


def test_weights_that_a_first_forward_makes_depend_on_the_seed_of_the_run(driver):
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())

    networks = [lazy(), lazy()]
    for network in networks:
        torch.rand(3)
        lr.fit(network, driver.tiny_data(), driver.PLAIN, epochs=1, **QUIET)
    assert_equal_weights(*networks)


def test_showing_progress_draws_no_random_numbers_from_the_run(driver, tmp_path, monkeypatch):
    """A library that is imported lazily may draw on import, which a resumed run would do at another step."""
    whole, _ = driver.train(tmp_path / "quiet", driver.PLAIN)
    quiet = random.getstate()

    def drawing_line(_: object) -> None:
        random.random()
        torch.rand(3)

    monkeypatch.setattr("lowrank_cnn.train.progress.moves", drawing_line)
    drawing, _ = driver.train(tmp_path / "drawing", driver.PLAIN, progress=True)
    assert random.getstate() == quiet
    assert_equal_weights(whole, drawing)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "bf16"}, "bf16 trains many times slower than fp32 on most CPUs"),
        ({"drop_epochs": (5, 9)}, "after 5 and 9 epochs; this run has 1"),
        (
            {"batch_size": 40},
            "This run has 2 steps, 2 batches of 40 images in an epoch: a smaller batch_size",
        ),
        ({}, None),
    ],
)
def test_what_does_not_fit_is_said_and_trained_all_the_same(driver, capsys, changes, says):
    record = lr.fit(driver.tiny_net(), driver.tiny_data(), driver.PLAIN, device="cpu", **{"epochs": 1, **changes})
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("epoch")]
    assert [says in line for line in lines] == ([True] if says else [])
    assert record.status == "finished"


def test_it_is_said_if_a_network_is_not_what_the_recipe_is_for(driver, capsys):
    recipe = lr.get_recipe("nin-modern", epochs=1, batch_size=4, crop="none", pad=0)
    for options, wanted in (({}, ["norm='batch'", "pool='average'"]), (recipe.network(), [])):
        network = lr.create_model("nin", num_classes=4, in_channels=1, width=0.05, **options)
        lr.fit(network, driver.tiny_data(), recipe, device="cpu")
        lines = [line for line in capsys.readouterr().out.splitlines() if "is for networks with" in line]
        assert [words in line for words, line in zip(wanted, lines, strict=True)] == [True] * len(wanted)
