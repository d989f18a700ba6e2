"""Settings of recipes that were tried."""

from __future__ import annotations

from tables.form import markdown, record, source


def search(experiment: str) -> str:
    """Every setting that was tried, in the order in which they were."""
    path = f"{experiment}/search.json"
    found = record(path)
    rows: list[list[object]] = []
    for r in found["rows"]:
        words = [word for word in r["settings"].split() if not word.startswith("evaluate_every")]
        shown = " ".join(words + (["average pool"] if r.get("pool") == "average" else []))
        what = [f"`{r['network']}`", f"`{r['recipe']}`", r["start"], f"`{shown}`" if shown else ""]
        rows.append([*what, f"{r['images']:,}", r["epochs"], f"{r['top1']:.1%}", r["commit"]])
    note = f"\n{found['note']} One run each, seed {found['rows'][0]['seed']}.\n"
    columns = ["network", "<recipe", "<start", "<with", "images", "epochs", "top-1, held out", "commit"]
    return markdown(columns, rows) + note + source(path, found["environment"])
