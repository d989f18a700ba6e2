from dataclasses import replace
from pathlib import Path

import pytest

from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.paper.published import rows
from lowrank_cnn.report import read_records
from lowrank_cnn.report.figures import FigureOptions, draw_figure
from lowrank_cnn.report.records import Records

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["big-picture-macs", "big-picture-params"])
def test_no_network_of_the_big_picture_goes_unnamed(name: str, tmp_path: Path, text_of):
    named = text_of(draw_figure(name, tmp_path / "out.svg"))
    ilsvrc = {row.network for row in rows() if row.dataset == "ilsvrc12" and row.top5 is not None}
    assert ilsvrc <= named


def test_records_join_the_published_points(records: Records, tmp_path: Path, text_of):
    text = text_of(draw_figure("nin", tmp_path / "a.svg", FigureOptions(records=records)))
    assert {"dense, trained here", "low-rank, trained here"} <= text
    text = text_of(draw_figure("vgg", tmp_path / "b.svg", FigureOptions(records=records)))
    assert "The same networks trained here on tiny-imagenet-100" in text
    text = text_of(draw_figure("timings", tmp_path / "c.svg", FigureOptions(records=records)))
    assert "nin-c3-lr, measured here" in text


def test_the_committed_runs_stand_beside_the_published(tmp_path: Path, text_of):
    committed = read_records([ROOT / "benchmarks" / "results" / "cifar10"])
    text = text_of(draw_figure("nin", tmp_path / "nin.svg", FigureOptions(records=committed)))
    assert {"dense, trained here", "low-rank, trained here", "published, baseline"} <= text
    assert [words for words in text if words.startswith("nin-c3-lr, 150 epochs")]
    assert not [words for words in text if "init" in words]  # the ablation is another question
    assert text_of(ROOT / "docs" / "images" / "nin.svg") == text, "make figures draws it anew"


def test_timings_of_records_without_any_are_refused(records: Records, tmp_path: Path):
    untimed = replace(records, timings=[])
    with pytest.raises(LowRankError, match="no record among these has times of layers"):
        draw_figure("timings", tmp_path / "t.svg", FigureOptions(records=untimed))
    assert not (tmp_path / "t.svg").exists()


def test_curves_need_runs(tmp_path: Path):
    for found, says in ((None, "--runs"), (Records(), "no run")):
        with pytest.raises(LowRankError, match=says):
            draw_figure("curves", tmp_path / "b.svg", FigureOptions(records=found))


def test_networks_of_several_recipes_say_by_which_they_were_trained(records: Records, tmp_path: Path, text_of):
    others = [replace(run, recipe="another") for run in records.runs]
    text = text_of(
        draw_figure("nin", tmp_path / "a.svg", FigureOptions(records=Records([*records.runs, *others])))
    )
    assert {"nin-c3-lr (nin-paper)", "nin-c3-lr (another)", "nin-c3-lr"} <= text


def test_test_images_need_runs_that_tell_of_them(records: Records, tmp_path: Path):
    silent = Records([replace(run, details=None) for run in records.runs])
    for found, says in ((None, "--runs"), (silent, "what confusion shows")):
        with pytest.raises(LowRankError, match=says):
            draw_figure("confusion", tmp_path / "b.svg", FigureOptions(records=found))
