"""A run that is killed, stopped, or robbed of its disk goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

import lowrank_cnn as lr
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.core.notes import notes
from lowrank_cnn.data import ResidentSplit
from lowrank_cnn.data.store import SAMPLED_FILES, evenly_spaced
from lowrank_cnn.train import load_record
from lowrank_cnn.train.loop import Trainer
from lowrank_cnn.train.run_folder import check_same_run
from tests.support import assert_equal_weights, locked_elsewhere

TIMES = ("seconds", "images_per_second")


def same_history(one, other) -> bool:
    def without_times(record):
        return [{k: v for k, v in row.items() if k not in TIMES} for row in record.history]

    return without_times(one) == without_times(other)


_look_around = Trainer._look_around


def stop_at_seven(self, stop) -> None:
    stop.received = self.iteration == 7
    _look_around(self, stop)


SHORT = {"levels": 0, "ema": 0.0, "whiten_first": True, "lookahead": 3, "schedule": "triangle", "warmup": 1.0}
STATES = {
    "the usual": {},
    "adamw": {"optimizer": "adamw", "lr": 0.01},
    "muon": {"optimizer": "muon", "lr": 0.02},
    "fp16": {"precision": "fp16"},
    "int8": {"quantize": "int8"},
    "short runs": {**SHORT, "bias_rate": 8.0, "mirror": True, "alternate_mirror": True},
}
"""Settings that have a state of their own."""


@pytest.mark.parametrize("settings", STATES.values(), ids=STATES)
def test_resuming_in_the_middle_of_an_epoch_changes_nothing(driver, tmp_path, monkeypatch, settings):
    network, record = driver.train(tmp_path / "whole", epochs=4, **settings)
    assert record.history[-1]["train_loss"] < record.history[0]["train_loss"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_look_around", stop_at_seven)
        with pytest.raises(KeyboardInterrupt, match=r"all is saved.*resume=True"):
            driver.train(tmp_path / "parts", epochs=4, **settings)
    assert driver.newest(tmp_path / "parts") == 7
    assert load_record(tmp_path / "parts").status == "interrupted"
    again, resumed = driver.train(tmp_path / "parts", epochs=4, resume=True, **settings)
    assert_equal_weights(network, again)
    assert same_history(record, resumed)
    assert notes(network).int8_ranges == notes(again).int8_ranges
    [best] = (tmp_path / "parts").glob("best-*.safetensors")
    assert best.stem == f"best-{resumed.result['best_epoch'] * driver.newest(tmp_path / 'parts') // 4:08d}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_says_how_to_go_on(driver, forked, tmp_path, number):
    process = forked(lambda: driver.train_endlessly(tmp_path / "run"))
    assert process.stdout.readline().startswith("epoch 1/")
    process.send_signal(number)
    said, complaints = process.stdout.read(), process.stderr.read()
    assert process.wait() == 128 + number, complaints
    assert "resume=True" in said
    stopped = load_record(tmp_path / "run")
    assert stopped.status == "interrupted"
    assert driver.newest(tmp_path / "run") > 0


def test_a_full_disk_leaves_the_last_checkpoint_whole(driver, tmp_path, monkeypatch):
    real, written = os.fsync, []

    def fill_up(descriptor):
        written.append(descriptor)
        if len(written) > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr("lowrank_cnn.core.files.os.fsync", fill_up)
        with pytest.raises(LowRankError, match=r"disk is full.*resume=True"):
            driver.train(tmp_path / "run", epochs=3, checkpoint_every=0.0)
    assert not list((tmp_path / "run").glob(".tmp-*"))
    whole, _ = driver.train(tmp_path / "whole", epochs=3)
    again, record = driver.train(tmp_path / "run", epochs=3, resume=True)
    assert record.status == "finished"
    assert_equal_weights(whole, again)


def test_a_finished_run_whose_weights_are_all_damaged_is_not_called_done(driver, tmp_path):
    driver.train(tmp_path, epochs=1)
    for path in tmp_path.glob("step-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(LowRankError, match=r"every checkpoint .* is damaged, and none can be used: train anew"):
        driver.train(tmp_path, epochs=1, resume=True)
    for path in tmp_path.glob("step-*"):  # to save space, once a run has finished
        path.unlink()
    assert driver.train(tmp_path, epochs=1, resume=True)[1].status == "finished"


@pytest.mark.parametrize("status", ["finished", "running"])
@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_damaged_last_weights_are_made_again_with_a_line(driver, tmp_path, capsys, suffix, status):
    driver.train(tmp_path, epochs=2, checkpoint_every=0.0)
    before = driver.last_weights(tmp_path)
    newest = max(tmp_path.glob(f"step-*.{suffix}"))
    newest.write_bytes(newest.read_bytes()[:-5])
    dataclasses.replace(load_record(tmp_path), status=status).save(tmp_path / "record.json")
    driver.train(tmp_path, epochs=2, resume=True, progress=True)
    said = capsys.readouterr().out
    assert newest.name in said
    assert "The one before it is used" in said
    assert_equal_weights(before, driver.last_weights(tmp_path))


@pytest.mark.parametrize("epochs", [1, 2], ids=["finished", "unfinished"])
def test_going_on_with_other_images_is_refused(driver, tmp_path, epochs):
    driver.train(tmp_path, driver.PLAIN, epochs=1)
    options = {"epochs": epochs, "out": tmp_path, "resume": True, "device": "cpu"}
    with pytest.raises(LowRankError, match="the number of training images 80, and cannot go on with 48"):
        driver.fit(driver.tiny_net(), driver.tiny_data(48), driver.PLAIN, **options)
    data = driver.tiny_data()
    smaller = ResidentSplit.of(data.test.images[..., :6, :6], data.test.labels)
    with pytest.raises(LowRankError, match="the image size 1x8x8, and cannot go on with 1x6x6"):
        driver.fit(driver.tiny_net(), dataclasses.replace(data, test=smaller), driver.PLAIN, **options)


def converted(schemes: dict[str, str]) -> dict[str, object]:
    rows = [{"name": name, "scheme": scheme} for name, scheme in schemes.items()]
    return {"name": "Net+lr", "base": "Net", "config": None, "class": "Net", "conversion": {"changed": rows}}


DATA = {"name": "tiny", "classes": ["cat", "dog"], "train": 4, "test": 2, "image": [1, 8, 8], "digest": "1f"}
BEFORE = {"model": converted({"a": "lr", "b": "lr"}), "data": DATA, "seed": 0}
OURS = {**BEFORE, "model": {"name": "nin", "width": 1.0, "norm": None}}
OWN = {**BEFORE, "model": {"name": "old.py:net", "class": "Net"}}


@pytest.mark.parametrize(
    ("before", "change", "says"),
    [
        (BEFORE, {"seed": 1}, "the seed 0, and cannot go on with 1"),
        (BEFORE, {"model": converted({"a": "lr(branches)", "b": "cp"})}, "the layer a as lr, and .* lr.branches."),
        (BEFORE, {"model": converted({"a": "lr"})}, "the layer b as lr, and cannot go on with dense"),
        (BEFORE, {"data": {**DATA, "classes": ["cat", "owl"]}}, "the class number 1 as dog, and .* with owl"),
        (BEFORE, {"data": {**DATA, "classes": ["cat"]}}, "the number of classes 2, and cannot go on with 1"),
        (OURS, {"model": {**OURS["model"], "width": 0.5}}, "the network's width 1.0, and cannot go on with 0.5"),
        (OWN, {"model": {"name": "old.py:net", "class": "Other"}}, "the network Net, and .* with Other"),
    ],
)
def test_another_run_is_not_gone_on_with(before, change, says):
    check_same_run(before, before)
    whole = rf"^this run was started with {says}: leave that as it was, or start a new run in another out\.$"
    with pytest.raises(LowRankError, match=whole):
        check_same_run(before, {**before, **change})


def test_files_may_be_renamed_and_images_may_not_change():
    check_same_run(OWN, {**OWN, "model": {"name": "new.py:net", "class": "Net"}})
    check_same_run({**OWN, "model": {"name": "Net"}}, OWN)
    with pytest.raises(LowRankError, match=r"^the images of tiny are not those that this run was started with"):
        check_same_run(BEFORE, {**BEFORE, "data": {**DATA, "digest": "2e"}})
    check_same_run({**BEFORE, "data": {**DATA, "digest": None}}, BEFORE)


@pytest.mark.parametrize("content", ["", "{", '{"kind": "training", "schema": 1}'])
def test_a_damaged_record_does_not_block_a_run_whose_checkpoints_are_whole(driver, tmp_path, capsys, content):
    whole, first = driver.train(tmp_path, epochs=2)
    (tmp_path / "record.json").write_text(content)
    again, second = driver.train(tmp_path, epochs=2, resume=True, progress=True)
    assert "record.json is not" in capsys.readouterr().out
    assert_equal_weights(whole, again)
    assert same_history(first, second)
    assert load_record(tmp_path).status == "finished"


def test_a_damaged_record_is_kept_aside_before_a_run_starts_anew(driver, tmp_path):
    driver.train(tmp_path, epochs=1)
    for path in tmp_path.glob("step-*"):  # to save space
        path.unlink()
    for path in tmp_path.glob("best-*"):
        path.unlink()
    content = (tmp_path / "record.json").read_text().replace("finished", "finishes")
    (tmp_path / "record.json").write_text(content)
    driver.train(tmp_path, epochs=1, resume=True)
    assert (tmp_path / "record.json.damaged").read_text() == content


@pytest.mark.parametrize("name", ["step-00000008.json", "step-00000008.safetensors", "recipe.json", "record.json"])
def test_a_directory_in_the_place_of_a_file_is_moved_aside(driver, tmp_path, name):
    driver.train(tmp_path / "run", epochs=2, checkpoint_every=0.0)
    before = driver.last_weights(tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name / "within").mkdir(parents=True)
    _, record = driver.train(tmp_path / "run", epochs=2, resume=True)
    assert record.status == load_record(tmp_path / "run").status == "finished"
    assert_equal_weights(before, driver.last_weights(tmp_path / "run"))
    if name != "recipe.json":  # which a finished run does not write again
        assert (tmp_path / "run" / f"{name}.damaged" / "within").is_dir()


def test_a_second_run_in_the_same_directory_is_refused(driver, tmp_path):
    with locked_elsewhere(tmp_path / "run"), pytest.raises(LowRankError, match="in use by another process"):
        driver.train(tmp_path / "run", epochs=1, resume=True)
    assert driver.train(tmp_path / "run", epochs=1, resume=True)[1].status == "finished"


def test_a_folder_that_is_moved_during_a_run_is_not_made_again(driver, tmp_path):
    network, _ = driver.train(tmp_path / "whole", driver.PLAIN)
    moving = [lambda *_: (tmp_path / "run").rename(tmp_path / "moved")]
    with pytest.raises(LowRankError, match=r"its folder was moved or deleted \(training goes on with resume=True"):
        driver.train(tmp_path / "run", driver.PLAIN, callbacks=moving, checkpoint_every=0, log="csv")
    assert not (tmp_path / "run").exists()
    again, record = driver.train(tmp_path / "moved", driver.PLAIN, resume=True)
    assert_equal_weights(network, again)
    assert len(record.history) == 3


def test_the_record_of_another_run_does_not_finish_this_one(driver, tmp_path, capsys):
    """As it was when two runs wrote into one directory: the record of one lay over the weights of the other."""
    driver.train(tmp_path / "one", driver.PLAIN, epochs=1)
    driver.train(tmp_path / "other", driver.PLAIN, epochs=1, seed=1)
    (tmp_path / "other" / "record.json").replace(tmp_path / "one" / "record.json")
    with pytest.raises(LowRankError, match="the seed 0, and cannot go on with 1"):
        driver.train(tmp_path / "one", driver.PLAIN, epochs=1, seed=1, resume=True)
    _, record = driver.train(tmp_path / "one", driver.PLAIN, epochs=1, seed=0, resume=True, progress=True)
    assert "is not the record of the checkpoint beside it" in capsys.readouterr().out
    assert record.seed == load_record(tmp_path / "one").seed == 0


def photos(root: Path) -> list[Path]:
    """Write 80 images to train on, of one file size, and 16 to test on. Return those that are not sampled.

    The set's fingerprint samples the contents of the others: only a look at each file tells of these.
    """
    for number in range(96):
        path = root / ("train" if number < 80 else "val") / "ab"[number % 2] / f"{number:02}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 2 * number, 9)).save(path)
    files = sorted(root.glob("train/*/*"))
    return [files[place] for place in set(range(80)) - set(evenly_spaced(80, SAMPLED_FILES))]


def swap(files: list[Path]) -> None:
    for path in files:
        Image.new("RGB", (8, 8), (255, 0, 0)).save(path)


def train_on_photos(driver, root: Path, out: Path, *, streamed: bool, **options):
    data = lr.open_data(root, resident_bytes=0 if streamed else 2**30, progress=False)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    lr.fit(network, data, dataclasses.replace(driver.PLAIN, epochs=2), out=out, device="cpu", **options)
    return network.state_dict()


@pytest.mark.parametrize("streamed", [False, True])
def test_swapped_images_are_refused_and_copied_ones_are_not(driver, tmp_path, monkeypatch, streamed):
    files = photos(tmp_path / "photos")
    train = partial(train_on_photos, driver, tmp_path / "photos", streamed=streamed)
    whole = train(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_look_around", stop_at_seven)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "run")
    swap(files)
    with pytest.raises(LowRankError, match=r"the contents of train/a/\d\d.bmp and 15 more differ"):
        train(tmp_path / "run", resume=True)
    photos(tmp_path / "photos")
    assert_equal_weights(whole, train(tmp_path / "run", resume=True))


def test_an_image_that_changes_during_a_streamed_run_stops_it(driver, tmp_path):
    photos(tmp_path / "photos")
    swapping = [lambda *_: swap([tmp_path / "photos/val/a/80.bmp"])]
    options = {"streamed": True, "workers": 1, "callbacks": swapping}
    with pytest.raises(LowRankError, match=r"^val/a/80.bmp was changed while it was in use"):
        train_on_photos(driver, tmp_path / "photos", tmp_path / "run", **options)


def test_a_run_killed_before_it_read_an_image_cannot_tell_whether_that_changed(
    driver, tmp_path, monkeypatch, capsys
):
    files = photos(tmp_path / "photos")
    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_train_epoch", None)  # the run ends after its first checkpoint
        with pytest.raises(TypeError):
            train_on_photos(driver, tmp_path / "photos", tmp_path / "run", streamed=True)
    swap(files[:1])
    train_on_photos(driver, tmp_path / "photos", tmp_path / "run", streamed=True, resume=True)
    assert "of 1 image file of photos has changed" in capsys.readouterr().out


def test_a_smaller_learning_rate_is_allowed_and_said(driver, tmp_path, capsys):
    driver.train(tmp_path, epochs=1)
    gentler = dataclasses.replace(driver.STATEFUL, epochs=2, lr=0.01)
    network = driver.tiny_net(stateful=True)
    record = driver.fit(network, driver.tiny_data(), gentler, out=tmp_path, resume=True, device="cpu")
    assert "lr is 0.01; it was 0.05" in capsys.readouterr().out
    assert record.history[1]["lr"] == pytest.approx(0.01, rel=1e-3)
    assert {"epoch": 1, "field": "lr", "from": 0.05, "to": 0.01} in load_record(tmp_path).changes
