"""Speed on a GPU: layer by layer, whole networks, training."""

from __future__ import annotations

from typing import Any

from tables.form import markdown, record, source

BATCH = 256


def gpu_layers() -> str:
    """The best tile of each layer of the low-rank VGG beside its floor and the dense twin."""
    found = record("gpu_kernels.json")
    rows: list[list[object]] = []
    for name, layer in found["layers"].items():
        right = {k: v for k, v in layer["tiles"].items() if v.get("right")}
        best = min(right, key=lambda tile: right[tile]["ms"])
        ms = right[best]["ms"]
        rate = 2 * layer["macs"] / ms / 1e9
        rivals = layer["rivals"]
        pool = f" + {rivals['max-pool']['ms']:.2f}" if "max-pool" in rivals else ""
        dense = f"{rivals['dense conv+bias+relu']['ms']:.2f}{pool}"
        rows.append([name, f"{ms:.3f}", right[best]["kernel"], f"{rate:.0f}", f"{layer['floor_ms']:.3f}", dense])
    columns = ["layer", "ms", "kernel", "TFLOP/s", "floor ms", "dense conv + pool ms"]
    return markdown(columns, rows) + source("gpu_kernels.json", found["environment"])


def gpu_backward() -> str:
    found = record("gpu_kernels.json")
    rows: list[list[object]] = []
    for name, layer in found["layers"].items():
        times = layer.get("backward", {})
        if "all" in times:
            ours, naive, dense = (times[way]["ms"] for way in ("all", "naive composite", "dense"))
            rows.append([name, f"{ours:.2f}", f"{naive / ours:.2f}", f"{dense / ours:.2f}"])
    columns = ["layer", "ours ms", "torch, same layer / ours", "torch, dense layer / ours"]
    return markdown(columns, rows) + source("gpu_kernels.json", found["environment"])


def gpu_speed() -> str:
    """Ours against the strongest dense rival of the run, and against the dense network with our own kernels."""
    found = record("gpu_speed.json")
    rows: list[list[object]] = []
    for row in (row for row in found["rows"] if row["mode"] == "inference" and row["batch"] == BATCH):
        place = f"{row['dense']}|{row['mode']}|{row['batch']}|"
        ways = {k.removeprefix(place): v for k, v in found["ways"].items() if k.startswith(place) and "ms" in v}
        rival = min(ways.keys() - {"ours"}, key=lambda way, ways=ways: ways[way]["ms"])
        ratio, own = row["ms"] / ways[rival]["ms"], row["ms"] / ways["ours"]["ms"]
        ours, dense = _range(found, row["network"], row, row["way"]), _range(found, row["dense"], row, rival)
        cells = [f"`{row['network']}`", f"{row['mac_ratio']:.3f}", f"**{ratio:.3f}**", f"{own:.3f}", ours]
        rows.append([*cells, f"{dense} {rival}", f"{row['tflops']:.0f}", f"{row['floor_ms']:.2f}"])
    columns = [
        "network",
        "MAC ratio",
        "time ratio",
        "with our kernels",
        "ms",
        "fastest dense ms",
        "TFLOP/s",
        "floor",
    ]
    limits = found["limits"]
    note = f"\nInference, bf16, batch {BATCH}, 224x224; medians (least to most) of 21 replays, one run.\n"
    note += f"Floors: {limits['tflops']:.0f} TFLOP/s and {limits['tb_per_s']:.2f} TB/s. {found['note']}\n"
    return markdown(columns, rows) + note + source("gpu_speed.json", found["environment"])


def _range(found: dict[str, Any], network: str, row: dict[str, Any], way: str) -> str:
    taken = found["ways"][f"{network}|{row['mode']}|{row['batch']}|{way}"]
    return f"{taken['ms']:.2f} ({taken['least']:.2f} to {taken['most']:.2f})"


def train_speed() -> str:
    found = record("train_speed.json")
    rows: list[list[object]] = []
    for net, ways in found["rows"].items():
        for way, row in ways.items():
            rates = f"{row['images_per_second']:,.0f} ({row['lowest']:,.0f} to {row['highest']:,.0f})"
            epoch = f"{found['setting']['images'] / row['images_per_second']:.2f}"
            share = f"{row['device_share']:.1%}" if "device_share" in row else ""
            rows.append([f"`{net}`", way, rates, epoch, share])
    setting = found["setting"]
    note = (
        f"\nBatch {setting['recipe']['batch_size']}, all {setting['images']:,} images, median epoch and range; "
        f"{setting['workers']} workers feed the plain loop.\nThe share is the time of a step replayed back to "
        "back over the time per step in an epoch: the rest is what\nan epoch does besides its steps.\n"
    )
    columns = ["network", "<loop", "images/s", "s per epoch", "share of the GPU"]
    return markdown(columns, rows) + note + source("train_speed.json", found["environment"])
