"""Settings of recipes that were tried."""

from __future__ import annotations

from tables.form import markdown, record, source


def search(experiment: str, norm: bool | None = None) -> str:
    """Every setting that was tried, in order, for recipes with or without batch norm."""
    from lowrank_cnn.train import get_recipe

    path = f"{experiment}/search.json"
    found = record(path)
    rows: list[list[object]] = []
    for r in found["rows"]:
        if norm is not None and (get_recipe(r["recipe"]).norm is not None) is not norm:
            continue
        shown = " ".join(word for word in r["settings"].split() if not word.startswith("evaluate_every"))
        what = [f"`{r['network']}`", f"`{r['recipe']}`", f"`{shown}`" if shown else ""]
        rows.append([*what, f"{r['images']:,}", r["epochs"], f"{r['top1']:.1%}", r["commit"]])
    notes = [] if norm else [found["note"]]
    note = "\n" + " ".join([*notes, f"One run each, seed {found['rows'][0]['seed']}."]) + "\n"
    columns = ["network", "<recipe", "<with", "images", "epochs", "top-1, held out", "commit"]
    return markdown(columns, rows) + note + source(path, found["environment"])
