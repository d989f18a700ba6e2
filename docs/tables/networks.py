"""The weights that come with the package."""

from __future__ import annotations

from tables.form import markdown


def weights() -> str:
    """The cards of the weights that come with the package."""
    from lowrank_cnn.models.network_file import list_pretrained, read_pretrained

    rows: list[list[object]] = []
    for name, data in list_pretrained():
        card = read_pretrained(name, data).card
        trained, halved = card["trained"], card["halved"]
        shares = f"{trained['top1']:.2%}", f"{halved['top1']:.2%}"
        made = f"`{card['recipe']['name']}`", trained["epochs"], card["seed"], card["environment"]["commit"]
        rows.append([f"`{name}`", data, *made, *shares])
    columns = ["network", "<data", "<recipe", "epochs", "seed", "commit", "as trained, GPU", "as shipped, CPU"]
    return markdown(columns, rows) + "\nTop-1 on the 10,000 test images.\n"
