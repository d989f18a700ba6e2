"""Make the notebooks from pages of the documentation.

    python docs/notebooks.py            write notebooks/*.ipynb
    python docs/notebooks.py --check    exit with 1 if one is out of date

Prose becomes Markdown cells, Python blocks become code cells. The tests run the pages, and so the notebooks.
`make notebooks` also runs the notebooks and stores their outputs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"ten-minutes.md": "ten_minutes.ipynb", "paper-claims.md": "paper_claims.ipynb"}
_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OUTPUT = re.compile(r"^```text\n.*?^```$\n*", re.MULTILINE | re.DOTALL)
"""What a page shows of outputs: a notebook has its own."""
_LINK = re.compile(r"\[([^\]]+)\]\((?!http)([\w-]+\.md[^)]*|images/[\w.-]+)\)")


def cells(page: str) -> list[dict[str, Any]]:
    """The cells of a page, without outputs."""
    found: list[dict[str, Any]] = []
    for place, text in enumerate(_CODE.split(_OUTPUT.sub("", page))):
        text = text.strip()
        if not text:
            continue
        kind = "code" if place % 2 else "markdown"
        source = text if place % 2 else _LINK.sub(r"[\1](../docs/\2)", text)
        more = {"execution_count": None, "outputs": []} if place % 2 else {}
        found.append({"cell_type": kind, "id": f"cell-{len(found)}", "metadata": {}, "source": source, **more})
    return found


def notebook(page: str) -> str:
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    found = {"cells": cells(page), "metadata": about, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def stale() -> list[str]:
    """The notebooks that differ from their pages."""
    return [name for page, name in PAGES.items() if _sources(ROOT / "notebooks" / name) != _expected(page)]


def _expected(page: str) -> list[str]:
    return [cell["source"] for cell in cells((ROOT / "docs" / page).read_text())]


def _sources(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"]]


def main() -> None:
    names = stale()
    if "--check" not in sys.argv:
        for page, name in PAGES.items():
            if name in names:
                (ROOT / "notebooks" / name).write_text(notebook((ROOT / "docs" / page).read_text()))
    for name in names:
        print(f"{'out of date' if '--check' in sys.argv else 'written'}: notebooks/{name}")
    sys.exit(1 if names and "--check" in sys.argv else 0)


if __name__ == "__main__":
    main()
