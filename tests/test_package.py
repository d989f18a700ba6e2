"""What a user sees before anything runs: the import, its needs, and the names it gives."""

import doctest
import inspect
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import lowrank_cnn

ROOT = Path(__file__).parents[1]
BLOCKED = ["pyarrow", "PIL", "lightning_fabric", "tensorboard", "huggingface_hub", "mlxtend", "onnx"]
BLOCKED += ["onnxruntime", "triton", "typer", "rich", "safetensors", "scipy"]

BARE = f"""
import sys
for name in {BLOCKED}:
    sys.modules[name] = None
import lowrank_cnn as lr
net = lr.create_model("nin-c3-lr")
print(lr.count(net, (3, 30, 30)).macs)
"""
TABLE = """
import sys, lowrank_cnn.cli.app as app
print([app.run(words) for words in (["models"], ["count", "nin"])], "torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("code", "printed"),
    [(BARE, "104260224"), (TABLE, "[0, 0] False")],
    ids=["needs torch alone", "tables do not wait for torch"],
)
def test_the_import(code: str, printed: str):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert printed in (done.stdout.strip(), done.stderr.strip()), done.stderr


def test_functions_are_not_shadowed_by_modules():
    for name in ("cli.train", "cli.plan", "method.convert", "deploy.export", "report"):
        import_module(f"lowrank_cnn.{name}")
    functions = [name for name in lowrank_cnn.__all__ if name[0].islower()]
    assert [name for name in functions if not callable(getattr(lowrank_cnn, name))] == []


def test_every_public_name_is_there():
    for name in lowrank_cnn.__all__:
        assert getattr(lowrank_cnn, name) is not None
    assert {*lowrank_cnn._HOME_OF, "__version__"} == set(lowrank_cnn.__all__)


SKIPPED = {
    "LearnedShapes": "needs the file of a run",
    "compare": "trains",
    "design": "measures",
    "evaluate": "needs a run",
    "find_lr": "trains",
    "fit": "trains",
    "learn_shapes": "trains",
    "load": "needs a run",
    "load_shapes": "needs the file of a run",
    "plan": "measures",
    "predict": "needs a run",
    "push_to_hub": "needs an account on the Hub",
    "register_scheme": "changes the table of schemes for all other examples",
    "time_model": "measures",
    "write_report": "needs runs",
}
"""Names whose examples may all be marked as not to be run, and why."""


@pytest.mark.parametrize("name", sorted(set(lowrank_cnn.__all__) - {"__version__"}))
def test_every_public_name_has_an_example_that_runs(name: str):
    thing = getattr(lowrank_cnn, name)
    names = dict(vars(sys.modules[thing.__module__]))
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(thing) or "", names, name, None, 0)
    assert test.examples, f"{name} has no example"
    skipped = [example.options.get(doctest.SKIP) for example in test.examples]
    assert name in SKIPPED or not all(skipped), f"nothing of {name}'s example is run"
    assert doctest.DocTestRunner().run(test).failed == 0


def requirements() -> dict[str, list[str]]:
    """What each extra installs, `always` for what is installed without any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"always": project["dependencies"], **project["optional-dependencies"]}


def test_every_requirement_has_bounds():
    for extra, wanted in requirements().items():
        for requirement in wanted:
            if not requirement.startswith("lowrank-cnn["):
                assert re.match(r"[\w-]+>=[\d.]+,<[\d.]+", requirement), f"{extra}: {requirement}"


def test_every_requirement_is_listed_with_its_licence():
    page = (ROOT / "docs" / "notes" / "dependencies.md").read_text()
    for wanted in requirements().values():
        for name in (re.split(r"[>\[]", requirement)[0] for requirement in wanted):
            assert name == "lowrank-cnn" or name in page, name


def test_what_the_tests_run_with_is_within_the_bounds():
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    for requirement in requirements()["always"]:
        name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", requirement).groups()  # type: ignore
        below, at, above = ([int(part) for part in text.split(".")] for text in (low, pinned[name], high))
        assert below <= at < above, requirement


def test_every_advised_install_works_in_a_clone():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "lowrank_cnn").rglob("*.py")]
    known = {*requirements(), "..."}
    for page in pages:
        for what in re.findall(r"""pip install (?:--constraint \S+ )?["']?([^\s"'`:;]+)""", page.read_text()):
            name, _, extras = what.rstrip("]").partition("[")
            assert name in (".", "./native", "./tflite") or "{what}" in what, f"{page}: {what}"
            assert not extras or set(extras.split(",")) <= known, f"{page}: {what}"


def test_make_does_not_install_torchvision():
    """An unpinned torchvision may be built for another torch, and then does not import."""
    named = set(re.findall(r'"\.\[([\w,]+)\]"', (ROOT / "Makefile").read_text()))
    found = {extra for words in named for extra in words.split(",")}
    for _ in requirements():  # extras hold extras
        wanted = (each for extra in found for each in requirements()[extra])
        found |= {x for each in wanted if each[:12] == "lowrank-cnn[" for x in each[12:-1].split(",")}
    assert {"train", "dev"} <= found
    assert "zoo" not in found


def test_the_citation_names_this_version_and_the_paper():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {lowrank_cnn.__version__}\n" in text
    assert "https://arxiv.org/abs/1511.06744" in text
