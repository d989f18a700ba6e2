import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lowrank_cnn.report import Records, read_records, write_report
from lowrank_cnn.report.page import environment_table, render

HOSTILE = '</script><img src=x onerror="document.title=1">&\u2028<!--'


class PageReader(HTMLParser):
    """Collects what a browser would see: elements, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.inside = ""
        self.feed(page)

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((name, dict(attributes)))
        self.inside = name
        if name == "script":
            self.scripts.append("")

    def handle_endtag(self, name: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside == "script":
            self.scripts[-1] += data
        self.text += data


@pytest.fixture(scope="module")
def page(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("page") / "deep" / "report.html"
    assert write_report([runs], out) == out
    return out.read_text(encoding="utf-8")


def test_the_page_is_one_small_file_that_fetches_nothing(page: str):
    assert len(page) < 3_000_000
    read = PageReader(page)
    sources = [value for _, attributes in read.tags for key, value in attributes.items() if key in ("src", "href")]
    assert all(value is not None and value.startswith(("#", "data:,")) for value in sources)
    assert not re.search(r"(?:src|href)=[\"']https?://", page)
    assert "@import" not in page


def test_the_summary_has_ratios_and_the_page_all_its_parts(page: str, runs: Path):
    text = PageReader(page).text
    for part in (
        "Dense and low-rank networks",
        "Networks",
        "Training",
        "layer by layer",
        "lowrank audit",
        "Environment",
    ):
        assert part in text
    assert "15 training runs and 6 timings" in text
    assert "\N{MULTIPLICATION SIGN}0.541" in text
    assert "95% interval" in text
    assert "NVIDIA H200" in text
    for name in ("nin-0", "nin-1", "nin-2"):
        assert f"{runs / name / 'record.json'}, seed {name[-1]}: " in text
    assert "3 files could not be shown." in text
    assert "cut.json: it is not JSON, from line 1 on." in text


def test_a_record_with_a_checksum_of_other_values_is_skipped(runs: Path, tmp_path: Path):
    whole = json.loads((runs / "nin-0" / "record.json").read_text())
    edited = {**whole, "result": {**whole["result"], "top1": 0.999}}
    (tmp_path / "edited.json").write_text(json.dumps(edited))  # the checksum is that of other values
    (tmp_path / "whole.json").write_text(json.dumps(whole))
    text = render(read_records([tmp_path]))
    assert re.search(r"edited\.json</code>: its checksum is not the one that was written", text)


def test_only_this_script_and_style_may_run(page: str):
    (policy,) = (a["content"] for name, a in PageReader(page).tags if name == "meta" and "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("sha256-") == 2
    data, script = PageReader(page).scripts
    assert {"trade", "curves", "layers", "specs"} <= set(json.loads(data))
    assert "innerHTML" not in script


def test_records_cannot_inject_markup(tmp_path: Path):
    record = {
        "kind": "training",
        "model": {"name": HOSTILE},
        "data": {"name": HOSTILE},
        "recipe": {"name": HOSTILE, HOSTILE: HOSTILE},
        "history": [{"epoch": 1, "train_loss": 1.0, "accuracy": 0.5}],
        "result": {"top1": 0.5, "macs": 10},
        "environment": {HOSTILE: HOSTILE},
        "status": "finished",
    }
    (tmp_path / "record.json").write_text(json.dumps(record))
    (tmp_path / "bad.json").write_text(json.dumps({"kind": HOSTILE}))
    read = PageReader(write_report([tmp_path], tmp_path / "out.html").read_text(encoding="utf-8"))
    names = [name for name, _ in read.tags]
    assert (names.count("script"), names.count("img")) == (2, 0)
    assert not [key for _, attributes in read.tags for key in attributes if key.startswith("on")]
    assert json.loads(read.scripts[0])["trade"][0]["points"][-1]["label"] == HOSTILE.strip()[:200]


def test_the_table_of_machines(records: Records):
    table = environment_table(records, {"date": "2026-11-16T21:55:32+00:00", "commit": 4 * "0123456789"})
    shown = {row[""].shown: row["this page"].shown for row in table.rows}
    assert (shown["date"], shown["commit"]) == ("2026-11-16 21:55", "012345678901")
