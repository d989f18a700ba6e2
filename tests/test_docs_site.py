"""The built documentation: every name has its entry, nothing is asked of the network, pages fit a phone."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lowrank_cnn

for package in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
    pytest.importorskip(package, reason="building the documentation needs the extra docs")

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = re.compile(r"(https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


class Parts(HTMLParser):
    """What a page loads by itself, what it links to, and the names of its places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.formulas = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places.add(given.get("id", ""))
        self.formulas += tag == "math"
        addresses = [given[name] for name in ("src", "href", "srcset", "data", "poster") if name in given]
        (self.links if tag == "a" else self.loads).extend(addresses)


def test_the_site_is_whole_and_loads_nothing_from_elsewhere(site: Path):
    pages = {path.relative_to(site).as_posix(): Parts(path.read_text()) for path in site.rglob("*.html")}
    for name, page in pages.items():
        assert [address for address in page.loads if OUTSIDE.match(address)] == [], name
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", style.read_text()) == [], style
    assert pages["method.html"].formulas >= 10
    assert "\\sum" not in (site / "method.html").read_text()


def test_every_public_name_is_described(site: Path):
    page = (site / "api.html").read_text()
    described = Parts(page).places
    for name in set(lowrank_cnn.__all__) - {"__version__"}:
        thing = getattr(lowrank_cnn, name)
        assert {f"lowrank_cnn.{name}", f"{thing.__module__}.{thing.__qualname__}"} & described, name
    # Some functions have the name of their file: it is they who are described, not the file.
    assert "doc-symbol-module" not in page


def test_examples_of_docstrings_are_code(site: Path):
    page = (site / "api.html").read_text()
    assert "<blockquote>" not in page
    assert "# doctest:" not in page
    assert page.count('<span class="gp">&gt;&gt;&gt; </span>') > 100


def test_the_page_for_missing_addresses_works_from_the_disk(site: Path):
    page = Parts((site / "404.html").read_text())
    inside = [address for address in page.loads + page.links if not OUTSIDE.match(address)]
    assert inside
    for address in inside:
        assert address.startswith("#") or (site / address).is_file(), address


def test_figures_are_dark_in_the_dark(site: Path, browser: Any):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    # The picture of the first page follows the dark by itself.
    for name, inverted in {"depthwise": True, "index": False}.items():
        page.goto((site / f"{name}.html").as_uri())
        look = page.evaluate("getComputedStyle(document.querySelector('.md-typeset img')).filter")
        assert ("invert" in look) == inverted
    context.close()


@pytest.mark.parametrize(
    ("asked", "found"),
    [("speedup", "glossary"), ("ResNet", "schemes"), ("FLOPs", "glossary"), ("fine-tune", "glossary")],
)
def test_the_search_finds_usual_words(site: Path, asked: str, found: str):
    index = json.loads(re.sub(r"^[^{]*|;?\s*$", "", (site / "search" / "search_index.js").read_text()))
    pages = {entry["location"].partition("#")[0] for entry in index["docs"] if asked in entry["text"]}
    assert f"{found}.html" in pages, pages


PHONE, WINDOWS = 390, (1100, 1400)
CUT_OFF = """() => [...document.querySelectorAll('.md-typeset__scrollwrap, .md-typeset__table, pre code')]
    .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.textContent)"""
"""The text of tables and blocks of code that are wider than their column."""


BY_NIGHT = [pytest.param(places, marks=pytest.mark.nightly) for places in ("*.html", "*/**/*.html")]


# By day the first page, and foreign.html, which has the widest tables.
@pytest.mark.parametrize("places", ["[fi][no][dr]e*.html", *BY_NIGHT])
def test_pages_open_from_the_disk_and_nothing_on_them_is_cut_off(site: Path, browser: Any, places: str):
    context = browser.new_context(color_scheme="dark")
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda sent: requests.append(sent.url))
    for path in sorted(site.glob(places)):
        page.set_viewport_size({"width": PHONE, "height": 800})
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE, path.name
        for width in WINDOWS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate(CUT_OFF) == [], (path.name, width)
    page.goto((site / "index.html").as_uri())
    page.locator("input.md-search__input").press_sequentially("torchrun")
    page.locator(".md-search-result__link", has_text="Many GPUs").first.wait_for(timeout=300_000)
    page.locator("input.md-search__input").fill("")
    page.locator("input.md-search__input").press_sequentially("what is a scheme")
    page.locator(".md-search-result__item:first-child", has_text="Choose a scheme").wait_for(timeout=300_000)
    assert complaints == []
    assert [address for address in requests if not address.startswith(("file:", "data:", "about:"))] == []
    context.close()
