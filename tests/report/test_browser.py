"""The page in a real browser: charts, choices, hover, keys, downloads, print, and what must not happen."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from record_examples import RESULTS

from lowrank_cnn.report import read_records, write_report
from lowrank_cnn.report.style import kind_colours

DOTS = ".points_marks path"
PIXEL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6"
PIXEL += "kgAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def address(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([runs], tmp_path_factory.mktemp("page") / "report.html").as_uri()


@pytest.fixture(scope="module")
def committed_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_report([RESULTS], tmp_path_factory.mktemp("page") / "report.html").as_uri()


RESET = """async () => {
    clearPrint(), hideTip(), choose(DEFAULTS);
    document.querySelectorAll("details").forEach((d) => { d.open = false; });
    document.querySelectorAll("*").forEach((e) => { e.scrollTo({ top: 0, behavior: "instant" }); });
    document.activeElement.blur();
    drawAll();
}"""


class Tab:
    """A page in the browser, and what went wrong there or went out."""

    def __init__(self, browser: Any, address: str, width: int, scheme: str) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.context.set_default_timeout(300_000)  # a busy machine draws slowly
        self.page, self.address = self.context.new_page(), address
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda sent: self.requests.append(sent.url))
        self.page.goto(address)
        self.wait()

    def wait(self) -> None:
        self.page.locator("body[data-drawn]").wait_for()

    def reset(self, width: int, scheme: str) -> None:
        """Undo what a test chose, at a width and in a theme: loading the page again would take far longer."""
        self.complaints.clear()
        self.page.emulate_media(media="screen", color_scheme=scheme)
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.mouse.move(0, 0)
        self.page.evaluate(RESET)
        self.wait()

    def check(self) -> None:
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith(("blob:", "data:"))] == [self.address]


@pytest.fixture(scope="module")
def tabs(browser: Any) -> Iterator[Callable[..., Tab]]:
    """The page as it opens, at a width and in a theme, loaded once."""
    kept: dict[str, Tab] = {}

    def tab(address: str, width: int, scheme: str) -> Tab:
        if address in kept:
            kept[address].reset(width, scheme)
        else:
            kept[address] = Tab(browser, address, width, scheme)
        return kept[address]

    yield tab
    for one in kept.values():
        one.context.close()


@pytest.fixture
def page(tabs: Callable[..., Tab], address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page, at the width that a test asks for; at the end, nothing may have gone wrong or gone out."""
    tab = tabs(address, *getattr(request, "param", (1200, "light")))
    yield tab.page
    tab.check()


@pytest.fixture
def committed(tabs: Callable[..., Tab], committed_address: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page about the committed records, at the width that a test asks for."""
    tab = tabs(committed_address, getattr(request, "param", 1200), "light")
    yield tab.page
    tab.check()


@pytest.fixture
def open_records(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens the page about finished runs with these fields."""
    opened: list[Tab] = []

    def page_of(*records: dict[str, Any]) -> Any:
        for number, record in enumerate(records):
            made = {"kind": "training", "status": "finished", **record}
            (tmp_path / f"{number}.json").write_text(json.dumps(made))
        address = write_report([tmp_path], tmp_path / "report.html").as_uri()
        opened.append(Tab(browser, address, 1200, "light"))
        return opened[-1].page

    yield page_of
    for tab in opened:
        tab.context.close()
        tab.check()


def chart(page: Any, name: str) -> Any:
    return page.locator(f"[data-chart={name}]")


def column(page: Any, index: int) -> list[str]:
    cells = page.locator(f"#table-networks tbody tr td:nth-child({index})")
    return [text.partition("\n")[0] for text in cells.all_inner_texts()]


def choose(page: Any, name: str, within: str = "#trade-choices") -> None:
    page.locator(f"{within} label").filter(has=page.get_by_text(name, exact=True)).click()
    page.wait_for_timeout(50)


def shown_tip(page: Any) -> str:
    tip = page.locator("#tip")
    assert tip.is_visible()
    return tip.inner_text()


def test_the_first_screen_says_what_was_gained_at_which_cost_and_how_sure(committed: Any):
    card = committed.locator(".gain").first
    assert card.bounding_box()["y"] < 400
    text = card.inner_text()
    assert "+0.64 points" in text
    assert "\N{MULTIPLICATION SIGN}0.75 MACs" in text
    assert "more accurate" in text
    assert chart(committed, "trade").bounding_box()["y"] < 900


def test_time_comes_before_counts_and_every_axis_has_its_points(page: Any):
    assert "Milliseconds per image on a GPU" in chart(page, "trade").inner_text()
    for axis, points in (("GPU time", 3), ("CPU time", 3), ("MACs", 6), ("parameters", 6)):
        choose(page, axis)
        assert chart(page, "trade").locator(DOTS).count() == points
    assert chart(page, "trade").locator(".arrows_marks line").count() == 2
    assert chart(page, "layers").locator(".bars_marks path").count() == 27


def test_no_label_lies_on_another_or_on_a_point(page: Any):
    choose(page, "MACs")
    overlaps = page.evaluate("""() => {
        const all = (query) => [...document.querySelectorAll(`[data-chart=trade] ${query}`)];
        const seen = (e) => e.getAttribute("fill-opacity") !== "0" && e.getAttribute("opacity") !== "0";
        const boxes = all(".labels_marks text").filter(seen).map((t) => t.getBoundingClientRect());
        const dots = all(".points_marks path").map((p) => p.getBoundingClientRect());
        const apart = (a, b) => a.left >= b.right - 2 || b.left >= a.right - 2 || a.top >= b.bottom - 3 || b.top >= a.bottom - 3;
        const others = (i) => [...boxes.slice(i + 1), ...dots];
        return [boxes.length, boxes.filter((a, i) => others(i).some((b) => !apart(a, b))).length]; }""")  # noqa: E501
    assert overlaps == [6, 0]


def test_headings_sort_by_mouse_and_by_key_and_what_is_missing_comes_last(page: Any):
    heading = page.locator("#table-networks th button", has_text="top-1")
    heading.click()
    assert page.locator("#table-networks th[aria-sort=ascending]").inner_text().startswith("top-1")
    shares = [float(text.rstrip("%")) for text in column(page, 2)]
    assert shares == sorted(shares)
    heading.press("Enter")
    assert [float(text.rstrip("%")) for text in column(page, 2)] == sorted(shares, reverse=True)
    heading = page.locator("#table-networks th button", has_text="CPU ms")
    for _ in range(2):
        heading.click()
        times = column(page, 7)
        assert times[3:] == ["\N{EN DASH}"] * 6
        assert "\N{EN DASH}" not in times[:3]


def test_points_explain_themselves_on_hover_and_on_focus(page: Any):
    point = chart(page, "trade").locator(DOTS).first
    point.hover()
    assert "Milliseconds per image" in shown_tip(page)
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()
    point.focus()
    assert "Top-1 accuracy" in shown_tip(page)
    assert "Top-1 accuracy" in point.get_attribute("aria-label")
    page.keyboard.press("Escape")
    assert not page.locator("#tip").is_visible()


def test_curves_are_grouped_by_network_and_the_tooltip_is_of_the_epoch_under_it(page: Any):
    curves = chart(page, "curves")
    assert curves.locator(".plot svg path[aria-roledescription*=line]").count() == 3
    curves.locator(".plot").focus()
    assert "Epoch 60" in shown_tip(page)
    page.keyboard.press("ArrowLeft")
    tip = shown_tip(page)
    assert "Epoch 59" in tip
    assert tip.count("at epoch 58") == 3  # watched every other epoch: older values say so


def test_no_two_networks_of_a_chart_look_alike_and_its_tooltip_keeps_the_best(committed: Any):
    choose(committed, "tiny", "#training-choices")
    chart(committed, "curves").locator(".plot").focus()
    tip = shown_tip(committed)
    runs = [run for run in read_records([RESULTS / "tiny-imagenet"]).runs if run.recipe == "tiny-vgg"]
    names = {run.network.name for run in runs}
    assert len(names) == 8
    assert all(name in tip for name in names)
    assert tip.splitlines()[1] == "vgg11-gmp-lr-join-wfull"  # the best first
    looks = committed.evaluate("""() => [...document.querySelectorAll("#training-legend path")]
        .map((p) => `${p.getAttribute("stroke")} ${p.getAttribute("stroke-dasharray")}`)""")
    assert len(set(looks)) == len(looks) == 8


@pytest.mark.parametrize("page", [(1200, "light"), (1200, "dark")], indirect=True)
def test_a_network_has_one_colour_in_all_charts(page: Any, request: pytest.FixtureRequest):
    dense, low = kind_colours("dense"), kind_colours("low-rank")
    theme = request.node.callspec.params["page"][1]
    legend = page.locator("#training-legend path")
    assert [legend.nth(i).get_attribute("stroke") for i in (0, 1)] == [dense[theme], low[theme]]
    fills = {
        p.get_attribute("aria-label").split(" ")[0]: p.get_attribute("fill")
        for p in chart(page, "trade").locator(DOTS).all()
    }
    assert fills == {"nin": dense[theme], "nin-c3": low[theme], "nin-c3-lr": low[theme]}
    bars = chart(page, "classes").locator(".bars_marks path")
    assert bars.first.get_attribute("fill") == dense[theme]
    choose(page, "nin-c3", "#details-choices")
    assert bars.first.get_attribute("fill") == low[theme]


@pytest.mark.parametrize("page", [(1200, "dark")], indirect=True)
def test_a_saved_picture_has_the_colours_of_white_pages_and_a_legend(page: Any):
    spec = page.evaluate("""() => {
        const runs = curvesOf(state.trained, state.by);
        return curvesSpec(runs, looksOf(runs), { measure: "accuracy", print: true });
    }""")
    assert spec["encoding"]["color"]["scale"]["range"][:2] == [
        kind_colours(kind)["light"] for kind in ("dense", "low-rank")
    ]
    assert spec["encoding"]["color"]["legend"]["symbolType"] == "stroke"


@pytest.mark.parametrize("page", [(390, "light")], indirect=True)
def test_no_text_of_a_chart_leaves_a_narrow_page(page: Any):
    out = page.evaluate("""() => [...document.querySelectorAll("figure .plot text")]
        .filter((t) => t.textContent)
        .filter((t) => t.getBoundingClientRect().right > t.closest(".card").getBoundingClientRect().right)
        .map((t) => t.textContent)""")
    assert out == []


@pytest.mark.nightly
def test_long_names_leave_the_chart_its_room_and_pictures_of_a_record_are_shown(open_records: Any):
    worst = [{"image": "a.png", "true": "cat", "predicted": "dog", "loss": 3.0, "thumbnail": PIXEL}]
    details = {"per_class": [{"class": "cat", "n": 2, "accuracy": 0.5}], "worst": worst}
    places = {"short": (16_700_000, 0.9167), "a" * 54: (7_820_000, 0.9167)}
    places |= {"b" * 85: (7_820_000, 0.4375), "c" * 55: (7_820_000, 0.4167)}
    results = {name: {"top1": top1, "macs": macs, "n": 48} for name, (macs, top1) in places.items()}
    results["short"]["details"] = details
    about = {"data": {"name": "photos"}}
    page = open_records(
        *({**about, "model": {"name": name}, "result": result} for name, result in results.items())
    )
    assert page.locator("#details-worst img").evaluate("(shown) => shown.complete && shown.naturalWidth") == 1
    assert "cat (5.0%), taken for dog" in page.locator("#details-worst").inner_text()
    for width in (1200, 400):
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate("drawAll()")
        axis = chart(page, "trade").locator(".role-axis-domain line").first.bounding_box()
        assert axis["width"] > 0.6 * chart(page, "trade").bounding_box()["width"]


def test_networks_can_be_hidden_and_the_address_remembers(browser: Any, page: Any):
    page.locator("#training-legend button").first.click()
    choose(page, "training loss", "#training-choices")
    choose(page, "log", "#training-choices")
    choose(page, "MACs")
    assert {"hidden=nin", "axis=macs", "measure=train_loss", "loss=log"} <= set(
        page.url.partition("#")[2].split("&")
    )
    other = browser.new_page()
    other.goto(page.url)
    assert other.locator("#training-legend button").first.get_attribute("aria-pressed") == "false"
    assert "Mean training loss" in chart(other, "curves").inner_text()
    assert "Multiply-accumulates" in chart(other, "trade").inner_text()
    other.close()


def test_tables_and_charts_can_be_downloaded(page: Any):
    with page.expect_download() as found:
        page.locator("button[data-csv=table-networks]").click()
    lines = Path(found.value.path()).read_text().splitlines()
    assert lines[0].startswith('"network"')
    assert len(lines) == 10
    with page.expect_download() as found:
        chart(page, "trade").get_by_text("PNG").click()
    assert Path(found.value.path()).read_bytes().startswith(b"\x89PNG")
    with page.expect_download() as found:
        chart(page, "curves").get_by_text("CSV").click()
    assert Path(found.value.path()).read_text().startswith('"group","seed","epoch","value"')


def test_printed_it_shows_every_data_set(page: Any):
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    titles = page.locator("#print-all h3").all_inner_texts()
    for data, shown in {"CIFAR-10": True, "tiny-imagenet-100": True, "ILSVRC": False, "Places": False}.items():
        assert any(title.startswith(data) for title in titles) == shown
    assert page.locator("#print-all svg").count() == len(titles)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("#print-all svg").count() == 0


@pytest.mark.nightly
def test_printed_charts_stand_in_two_columns_without_holes(page: Any):
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 with its margins
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    figures = page.locator("#print-all figure")
    first, second = figures.nth(0).bounding_box(), figures.nth(1).bounding_box()
    assert first["y"] == second["y"]
    assert second["x"] > first["x"] + first["width"] - 1
    stretched = page.evaluate("""() => [...document.querySelectorAll(".plot svg")].filter((svg) => {
        const {width, height} = svg.getBoundingClientRect(), {width: w, height: h} = svg.viewBox.baseVal;
        return Math.abs(width / height - w / h) > 0.02 * w / h; }).length""")
    assert stretched == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 720


@pytest.mark.parametrize("committed", [1100, pytest.param(1400, marks=pytest.mark.nightly)], indirect=True)
def test_no_table_is_cut_off(committed: Any):
    box = committed.locator(".scroll:has(#table-networks)")
    assert box.evaluate("(scroll) => scroll.scrollWidth <= scroll.clientWidth")


def test_the_layers_of_the_paper_can_be_chosen_and_each_bar_has_its_own_share(page: Any):
    choose(page, "vgg11-gmp-lr, published", "#layers-choices")
    layers = chart(page, "layers")
    assert layers.locator(".bars_marks path").count() == 48
    assert layers.locator(".shares_marks text").count() == 48
    assert "CPU r = 0.94, GPU r = 0.82" in layers.inner_text()
    layers.scroll_into_view_if_needed()
    page.wait_for_timeout(100)  # scrolling hides the tip
    layers.locator(".bars_marks path").first.hover()
    assert "14.5M MACs" in shown_tip(page)


def test_test_images_are_shown_by_class_by_confusion_and_by_confidence(page: Any):
    box = page.locator("#details-charts")
    assert box.locator("figure").count() == 4
    assert chart(page, "confusion").locator(".cells_marks path").count() > 25
    assert chart(page, "classes").locator(".bars_marks path").count() == 10
    cell = chart(page, "confusion").locator(".cells_marks path").nth(1)
    cell.scroll_into_view_if_needed()
    page.wait_for_timeout(100)  # scrolling hides the tip
    cell.hover()
    assert "class 0 taken for class 1" in shown_tip(page)
    chart(page, "calibration").locator(DOTS).last.focus()
    assert "confidence" in shown_tip(page)
    assert "0007.png" in page.locator("#details-worst").inner_text()
    choose(page, "tiny-imagenet-100, vgg-paper", "#details-choices")
    choose(page, "vgg11-gmp-lr", "#details-choices")
    assert "the 25 hardest of 100" in chart(page, "classes").inner_text()
    assert "details=vgg11-gmp-lr" in page.url


def test_the_theme_follows_the_button(page: Any):
    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    button, light = page.locator("#theme"), background()
    button.click()
    button.click()
    assert button.inner_text() == "Theme: dark"
    assert background() != light
    button.click()  # as the system again
    assert background() == light


@pytest.mark.parametrize("page", [(390, "light"), (1200, "dark")], indirect=True)
def test_the_page_never_scrolls_sideways(page: Any):
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert chart(page, "trade").locator(DOTS).count() == 3
    smallest = page.evaluate("""() => Math.min(...[...document.querySelectorAll("[data-chart=trade] svg text")]
        .map((t) => t.getBoundingClientRect().height))""")
    assert smallest > 9  # text stays readable however narrow the page


@pytest.mark.nightly
def test_everything_that_acts_can_be_reached_by_key(page: Any):
    page.evaluate("""() => { window.reached = new Set(); addEventListener("focusin", ({ target: e }) =>
        reached.add(e.id || (e.closest("[data-chart]") || {dataset: {}}).dataset.chart || e.tagName)); }""")
    for _ in range(150):
        page.keyboard.press("Tab")
    reached = set(page.evaluate("[...reached]"))
    assert {"theme", "trade", "curves", "layers", "SUMMARY", "INPUT"} <= reached
