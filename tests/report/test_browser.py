"""The page in a real browser: charts, sorting, hover, keys, and what must not happen."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lowrank_cnn.report import read_records, write_report
from lowrank_cnn.report.entries import gather

playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs the package playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium found: install Debian's chromium")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "cifar10"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([runs], tmp_path_factory.mktemp("page") / "report.html").as_uri()


@pytest.fixture
def page(browser: Any, address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, at the width that a test asks for; at the end, nothing may have gone wrong or gone out."""
    width, scheme = getattr(request, "param", (1200, "light"))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda sent: requests.append(sent.url))
    opened.goto(address)
    yield opened
    context.close()
    assert complaints == []
    assert requests == [address]


def column(page: Any, index: int) -> list[str]:
    cells = page.locator(f"#summary > .scroll tbody tr td:nth-child({index})")
    return [text.partition("\n")[0] for text in cells.all_inner_texts()]


def choose(page: Any, name: str) -> None:
    page.locator(".choices label", has_text=name).click()


def shown_tip(page: Any) -> str:
    tip = page.locator("#tip")
    assert tip.is_visible()
    return tip.inner_text()


def test_every_chart_has_its_points(page: Any):
    for axis, ours, published in (("macs", 3, 3), ("params", 3, 3), ("CPU", 3, 0), ("GPU", 3, 0)):
        chart = page.locator(f"[data-chart=scatter-{axis}]")
        assert chart.locator(".point[data-source=ours] circle.dot").count() == ours
        assert chart.locator(".point[data-source=published] path.dot").count() == published
        assert chart.locator("path.front").count() == 1
    assert page.locator("[data-chart=curves-accuracy] path.curve").count() == 9
    assert page.locator("[data-chart=curves-loss] path.curve").count() == 9
    assert page.locator("[data-chart=layers] .row").count() == 9
    assert page.locator("[data-chart=layers] rect.bar").count() == 27
    assert "r = " in page.locator("[data-chart=layers] figcaption").inner_text()


def test_no_mark_leaves_its_chart_and_no_label_lies_on_another(page: Any):
    overlaps = page.evaluate("""() => [...document.querySelectorAll("#trade-charts svg")].map((chart) => {
        const boxes = [...chart.querySelectorAll("text.label")].map((t) => t.getBoundingClientRect());
        return boxes.filter((a, i) => boxes.slice(i + 1).some((b) =>
            a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length; })""")
    assert overlaps == [0, 0, 0, 0]
    assert page.locator("[data-chart=scatter-macs] text.label").count() == 6
    outside = page.evaluate("""() => [...document.querySelectorAll(".point .dot")].filter((dot) => {
        const inner = dot.getBoundingClientRect(), outer = dot.closest("svg").getBoundingClientRect();
        return inner.left < outer.left || inner.right > outer.right || inner.top < outer.top; }).length""")
    assert outside == 0


def test_headings_sort_by_mouse_and_by_key(page: Any):
    heading = page.locator("#summary > .scroll th button", has_text="top-1")
    heading.click()
    assert page.locator("#summary > .scroll th[aria-sort=ascending]").inner_text().startswith("top-1")
    shares = [float(text.rstrip("%")) for text in column(page, 2)]
    assert shares == sorted(shares)
    heading.press("Enter")
    assert [float(text.rstrip("%")) for text in column(page, 2)] == sorted(shares, reverse=True)


def test_what_is_missing_sorts_last_both_ways(page: Any):
    heading = page.locator("#summary > .scroll th button", has_text="CPU ms")
    for _ in range(2):
        heading.click()
        times = column(page, 7)
        assert times[3:] == ["\N{EN DASH}"] * 6
        assert "\N{EN DASH}" not in times[:3]


def test_points_explain_themselves_on_hover_and_on_focus(page: Any):
    point = page.locator("[data-chart=scatter-macs] .point[data-source=ours]").first
    point.hover()
    assert "Multiply-accumulates per image" in shown_tip(page)
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()
    point.focus()
    assert "MACs of the dense twin" in shown_tip(page)
    assert "Top-1 accuracy" in point.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


@pytest.fixture
def committed(browser: Any, tmp_path: Path) -> Iterator[Any]:
    opened = browser.new_page(viewport={"width": 390, "height": 900})
    opened.goto(write_report([RESULTS], tmp_path / "report.html").as_uri())
    yield opened
    opened.close()


def test_recipes_are_shown_apart_or_together(committed: Any):
    entries = gather(read_records([RESULTS]))
    ours = committed.locator("[data-chart=scatter-macs] .point[data-source=ours]")
    for recipe in dict.fromkeys(entry.recipe for entry in entries):
        committed.locator("#trade-choices label", has_text=recipe).click()
        assert ours.count() == sum(entry.recipe == recipe for entry in entries)
        assert committed.locator("[data-chart=scatter-macs] .whisker").count() > 0
    committed.locator("#trade-choices label", has_text="all").click()
    assert ours.count() == len(entries)
    assert "(nin-modern)" in committed.locator("[data-chart=scatter-macs]").inner_html()
    assert committed.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_runs_that_were_tested_once_have_a_dot_and_the_curve_of_their_training(committed: Any):
    chart = committed.locator("[data-chart=curves-accuracy]")
    committed.locator("#training-choices label", has_text="nin-modern").click()
    assert chart.locator("circle.end").count() == 12
    assert all(path.get_attribute("d") for path in chart.locator("path.curve.thin").all())
    assert "training images (thin)" in chart.inner_html()
    chart.locator("svg").focus()
    tip = shown_tip(committed)
    modern = [record for record in read_records([RESULTS]).runs if record.recipe == "nin-modern"]
    assert len(modern) == 12
    assert all(f"{record.top1:.2%}" in tip for record in modern)


def test_another_data_set_and_accuracy_can_be_chosen(page: Any):
    choose(page, "ILSVRC")
    assert page.locator("[data-chart=scatter-macs] .point[data-source=published]").count() == 12
    assert "lowrank time" in page.locator("[data-chart=scatter-CPU]").inner_text()
    choose(page, "top-5")
    assert "Top-5 accuracy" in page.locator("[data-chart=scatter-macs] svg").inner_html()


def test_curves_follow_the_arrow_keys_and_can_be_hidden(page: Any):
    chart = page.locator("[data-chart=curves-accuracy] svg")
    chart.focus()
    assert "Epoch 60" in shown_tip(page)
    page.keyboard.press("ArrowLeft")
    assert "Epoch 59" in shown_tip(page)
    page.locator("#training-legend button").first.click()
    assert page.locator("[data-chart=curves-accuracy] path.curve").count() == 6


def test_the_layers_of_the_paper_can_be_chosen(page: Any):
    choose(page, "vgg11-gmp-lr, published")
    chart = page.locator("[data-chart=layers]")
    assert chart.locator(".row").count() == 16
    assert "CPU r = 0.94, GPU r = 0.82" in chart.inner_text()
    chart.locator(".row").first.hover()
    assert "14.5M MACs" in shown_tip(page)


def test_the_theme_follows_the_button(page: Any):
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    button, light = page.locator("#theme"), background()
    button.click()
    button.click()
    assert button.inner_text() == "Theme: dark"
    assert background() != light


@pytest.mark.parametrize("page", [(390, "light"), (390, "dark"), (1200, "dark")], indirect=True)
def test_the_page_never_scrolls_sideways(page: Any):
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("[data-chart=scatter-macs] .point").count() == 6
    smallest = page.evaluate("""() => Math.min(...[...document.querySelectorAll("figure svg text")]
        .map((t) => t.getBoundingClientRect().height))""")
    assert smallest > 9  # text stays readable however narrow the page


def test_what_a_record_says_stays_text(browser: Any, tmp_path: Path):
    name = '</script><img src=x onerror="document.title=1">'
    record = {"kind": "training", "model": {"name": name}, "data": {"name": name}, "status": "finished"}
    record |= {"history": [{"epoch": 1, "train_loss": 1.0, "accuracy": 0.5}], "result": {"top1": 0.5, "macs": 9}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    opened = browser.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(write_report([tmp_path], tmp_path / "report.html").as_uri())
    opened.locator("[data-chart=scatter-macs] .point").first.hover()
    assert name in shown_tip(opened)
    assert opened.locator("img").count() == 0
    assert opened.title() == "Low-rank networks: report"
    assert complaints == []


def test_everything_that_acts_can_be_reached_by_key(page: Any):
    reached = set()
    for _ in range(150):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("""() => { const e = document.activeElement;
            return e.id || (e.closest("[data-chart]") || {dataset: {}}).dataset.chart || e.tagName; }""")
        )
    assert {"theme", "scatter-macs", "scatter-GPU", "curves-loss", "layers", "SUMMARY", "INPUT"} <= reached


def test_one_image_of_a_thousand_does_not_fill_the_axis(browser: Any, runs: Path, tmp_path: Path):
    """Two networks of nearly all images right: the axis shows them near each other, and ends at 100%."""
    for name, right in (("nin-0", 1.0), ("nin-c3-lr-0", 0.999)):
        record = json.loads((runs / name / "record.json").read_text())
        record["result"] |= {"top1": right, "top5": 1.0, "n": 1000}
        record["data"] |= {"name": "digits"}
        for row in record["history"][-2:]:
            row["accuracy"] = right
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    opened = browser.new_page()
    opened.goto(write_report([tmp_path], tmp_path / "report.html").as_uri())
    choose(opened, "digits")
    chart = opened.locator("[data-chart=scatter-macs]")
    ticks = [float(text.rstrip("%")) for text in chart.locator(".tick text").all_text_contents() if "%" in text]
    assert max(ticks) == 100
    assert 98 <= min(ticks) <= 98.5
    heights = [box["y"] for dot in chart.locator(".point .dot").all() if (box := dot.bounding_box())]
    assert 2 < max(heights) - min(heights) < 30
    opened.close()


def test_ticks_near_each_other_read_apart_and_no_line_strikes_a_label(browser: Any, runs: Path, tmp_path: Path):
    """Two networks of nearly one cost, all images right: their labels lie on the line of 100%."""
    for name, macs in (("nin-0", 13_390_000), ("nin-c3-lr-0", 13_210_000)):
        record = json.loads((runs / name / "record.json").read_text())
        record["result"] |= {"top1": 1.0, "n": 1000, "macs": macs, "params": macs // 112}
        record["data"] |= {"name": "shapes"}
        record["history"] = record["history"][:3]
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    opened = browser.new_page()
    opened.goto(write_report([tmp_path], tmp_path / "report.html").as_uri())
    choose(opened, "shapes")
    for chart in ("scatter-macs", "scatter-params", "curves-accuracy", "curves-loss"):
        for axis in ("middle", "end"):
            texts = opened.locator(f"[data-chart={chart}] .tick text[text-anchor={axis}]").all_text_contents()
            assert len(texts) > 2
            assert len(set(texts)) == len(texts)
    epochs = opened.locator("[data-chart=curves-loss] .tick text[text-anchor=middle]")
    assert epochs.all_text_contents() == ["1", "2", "3"]
    style = opened.locator("[data-chart=scatter-macs] text.label").first.evaluate(
        "(label) => [getComputedStyle(label).paintOrder, getComputedStyle(label).stroke]"
    )
    assert style[0].startswith("stroke")
    assert style[1] == "rgb(255, 255, 255)"
    opened.close()
