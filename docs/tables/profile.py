"""The kernels that take most of the time of a training step."""

from __future__ import annotations

from tables.form import JsonRecord, from_record, markdown, source

FILE = "training_profile.json"
SHOWN = 12
MEANING = {
    "input_gradient": "the gradient of a conv's input",
    "norm_gradient": "the gradient of a batch norm's input",
    "composite_hopper": "a composite conv",
    "weights_hopper": "the gradient of a conv's weights",
    "stem_gradient": "the gradient of the first conv's weights",
    "gradient_sums": "sums over pixels for a batch norm's gradient",
    "normalise": "batch norm, sum and ReLU",
    "unpooled_gradient": "the gradient through the first pool, ReLU and norm",
    "normalise_pool": "the first norm, ReLU and pool",
    "copy_all": "weights to bf16, many at a time",
    "parts_of_pixels": "statistics of the first norm",
    "composite_overlap": "the first conv",
}


@from_record(FILE)
def training_profile(found: JsonRecord) -> str:
    """The longest kernels of the newest profile of each network."""
    newest = {row["network"]: (run, row) for run in found["runs"] for row in run["rows"]}
    text = ""
    for name, (run, row) in newest.items():
        kernels, total = row["kernels"], row["ms"]
        rows: list[list[object]] = [
            [f"`{one['name'][:32]}`", MEANING.get(one["name"], ""), f"{one['calls']:.0f}", f"{one['ms']:.2f}"]
            for one in kernels[:SHOWN]
        ]
        rows.append(["all others", "", "", f"{total - sum(one['ms'] for one in kernels[:SHOWN]):.2f}"])
        text += f"**`{name}`, batch {row['batch']}: {total:.2f} ms of kernels a step**\n\n"
        text += markdown(["kernel", "<what it computes", "calls", "ms"], rows) + source(FILE, run["environment"])
    return text
