"""What notebooks show of results: tables whose text is escaped, and pages as notebooks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from torch import nn

import lowrank_cnn as lr
from lowrank_cnn.core.text import html_table
from lowrank_cnn.train.run_folder import Record

ROOT = Path(__file__).resolve().parent.parent


def test_text_in_a_table_is_escaped_and_numbers_stand_to_the_right():
    shown = html_table(("name", ">n"), [("<b>x", 5)], "a & b")
    assert "&lt;b&gt;x" in shown
    assert '<td style="text-align:right">5</td>' in shown
    assert "<caption>a &amp; b</caption>" in shown


def test_a_count_and_a_conversion_show_their_layers():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1))
    assert "<caption>One image of 3x8x8</caption>" in lr.count(model, (3, 8, 8))._repr_html_()
    assert repr(lr.count(model, (3, 8, 8))) == "3x8x8: 17.9k MACs, 296 parameters, 0.00 MiB in 2 layers"
    shown = lr.notes(lr.convert(model, "lr")).conversion._repr_html_()
    assert "3x1,4 + 1x3,4" in shown
    assert "Left as they were" in shown


def test_a_record_shows_its_result_and_its_last_epochs():
    names = ("epoch", "train_loss", "train_accuracy", "accuracy", "lr", "images_per_second")
    history = [dict.fromkeys(names, float(epoch)) | {"accuracy": None} for epoch in range(1, 9)]
    about = ({"name": "nin"}, {"name": "digits"}, {"name": "digits"}, 0, "test", "fp32", "cpu")
    record = Record(
        *about, history=history, result={"top1": 0.5, "n": 10, "macs": 10**6, "params": 5, "seconds": 3.0}
    )
    shown = record._repr_html_()
    assert "seed 0: running, top-1 50.00% (23.7 to 76.3), n 10, macs 1.00M, params 5, 3 s" in shown
    assert repr(record) in shown
    assert shown.count("<tr>") == 6


@pytest.mark.parametrize("name", ["ten_minutes", "paper_claims"])
def test_a_notebook_is_valid_and_has_code(name: str):
    found = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
    kinds = [cell["cell_type"] for cell in found["cells"]]
    assert (found["nbformat"], kinds[0]) == (4, "markdown")
    assert kinds.count("code") >= 5
    outputs = [json.dumps(cell["outputs"]) for cell in found["cells"] if cell["cell_type"] == "code"]
    assert sum(text != "[]" for text in outputs) >= 5, "run make notebooks: hosting sites show stored outputs"
    assert not any(place in text for text in outputs for place in ("/tmp/", "/home/", "/root/"))
    if importlib.util.find_spec("nbformat"):
        importlib.import_module("nbformat").validate(found)
