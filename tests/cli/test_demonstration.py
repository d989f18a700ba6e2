from functools import partial

import pytest

from lowrank_cnn.cli import demonstration as module
from lowrank_cnn.cli.demonstration import demo
from lowrank_cnn.data import open_data
from lowrank_cnn.train import load_record


@pytest.fixture
def few_digits(monkeypatch):
    monkeypatch.setattr(module, "open_data", partial(open_data, limit=200))


def test_it_trains_both_twins_compares_them_and_writes_a_report(few_digits, tmp_path):
    said: list[str] = []
    (dense, low_rank), report = demo(tmp_path, epochs=1, device="cpu", say=said.append)
    assert [line.split(" network")[0] for line in said] == ["Training the dense", "Training the low-rank"]
    assert (dense.name, low_rank.name) == ("dense", "low-rank")
    assert low_rank.macs < 0.5 * dense.macs
    assert low_rank.params < dense.params
    assert min(dense.ms_per_image, low_rank.ms_per_image) > 0
    assert load_record(tmp_path / "low-rank" / "record.json").result["macs"] == low_rank.macs
    page = report.read_text()
    assert "nin lr width 0.25" in page


def test_the_second_time_it_takes_what_is_there(few_digits, tmp_path):
    (first, _), _ = demo(tmp_path, epochs=1, device="cpu")
    before = (tmp_path / "dense" / "record.json").stat().st_mtime_ns
    (second, _), _ = demo(tmp_path, epochs=1, device="cpu")
    assert first.top1 == second.top1
    assert (tmp_path / "dense" / "record.json").stat().st_mtime_ns == before
