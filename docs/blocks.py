"""Fill the tables of README and docs from the records they come from.

    python docs/blocks.py            write them
    python docs/blocks.py --check    leave with 1 where one is out of date

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; `TABLES` says how NAME is made.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- begin ([\w-]+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def markdown(columns: list[str], rows: list[list[object]]) -> str:
    """A table, its first column and those marked `<` to the left, the others to the right."""
    sides = ["---" if not place or name.startswith("<") else "---:" for place, name in enumerate(columns)]
    lines = [[name.removeprefix("<") for name in columns], sides, *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def record(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def source(path: str, environment: dict[str, Any]) -> str:
    """The line under a table: what it was measured with, and where the record is."""
    device = environment.get("gpu") or environment["cpu"]
    where = f"record: `benchmarks/results/{path}`, commit {environment['commit']}"
    return f"\n*{device}, torch {environment['torch']}; {where}.*\n"


def init_depth() -> str:
    found = record("init_depth.json")
    by_name: dict[str, list[str]] = {}
    for row in found["rows"]:
        spread = f"{min(row['gradients']):.2g} to {max(row['gradients']):.2g}"
        by_name.setdefault(row["initialisation"], []).extend([f"{row['gradient']:.2g}", spread])
    columns = ["initialisation", "circular padding", "spread", "zero padding", "spread"]
    seeds = len(found["setting"]["seeds"])
    note = f"\nGeometric mean and range over {seeds} seeds.\n"
    table = markdown(columns, [[name, *values] for name, values in by_name.items()])
    return table + note + source("init_depth.json", found["environment"])


def networks() -> str:
    """Every network with its cost, counted now, beside the dense network of its family."""
    import torch

    from lowrank_cnn.count import count
    from lowrank_cnn.models import create_model, family_of, list_models
    from lowrank_cnn.paper.published import published

    rows: list[list[object]] = []
    with torch.device("meta"):
        for name in list_models():
            dense = "vgg11-gmp" if name.startswith("vgg11-") else next(iter(family_of(name).VARIANTS))
            net, twin = create_model(name), create_model(dense)
            macs = count(net, net.input_size).macs
            ratio = macs / count(twin, twin.input_size).macs
            accuracy = published()[name].top5 or published()[name].top1
            params = count(net, net.input_size).params
            rows.append(
                [f"`{name}`", f"{macs / 1e9:.3f} G", f"{ratio:.3f}", f"{params / 1e6:.2f} M", f"{accuracy:.1%}"]
            )
    columns = ["network", "MACs", "of the dense twin", "parameters", "published accuracy"]
    return (
        markdown(columns, rows)
        + "\nTop-5 on ILSVRC for VGG and GoogLeNet, top-1 on CIFAR-10 for NiN, all as published.\n"
    )


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


def _range(found: dict[str, Any], network: str, row: dict[str, Any], way: str) -> str:
    taken = found["ways"][f"{network}|{row['mode']}|{row['batch']}|{way}"]
    return f"{taken['ms']:.2f} ({taken['least']:.2f} to {taken['most']:.2f})"


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
    for row in found["rows"]:
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
    note = "\nInference, bf16, batch 256, 224x224; medians (least to most) of 21 replays, one run.\n"
    note += f"Floors: {limits['tflops']:.0f} TFLOP/s and {limits['tb_per_s']:.2f} TB/s. {found['note']}\n"
    return markdown(columns, rows) + note + source("gpu_speed.json", found["environment"])


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


def _runs(part: str) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The records of a part of the CIFAR-10 experiment, by network and variant."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for path in sorted((RESULTS / "cifar10" / part).glob("*/record.json")):
        run = json.loads(path.read_text())
        variant = path.parent.name.removeprefix(run["model"]["name"]).rpartition("seed")[0].strip("-")
        found.setdefault((run["model"]["name"], variant), []).append(run)
    return found


def _mean_and_spread(values: list[float]) -> str:
    return f"{mean(values):.2f} ± {stdev(values):.2f}"


def cifar10_modern() -> str:
    """Dense and low-rank twins by one recipe: equal epochs, and equal training compute."""
    from lowrank_cnn.paper.published import published

    rows: list[list[object]] = []
    runs: list[dict[str, Any]] = []
    for part in ("modern", "modern-equal-compute"):
        for (net, _), found in _runs(part).items():
            runs, first = found, found[0]["result"]
            cost = first["macs"] * first["epochs"] / 1e9
            accuracy = _mean_and_spread([100 * run["result"]["top1"] for run in runs])
            stated = f"{100 * (published()[net].top1 or 0):.2f}"
            size = f"{first['macs'] / 1e6:.0f} M", f"{first['params'] / 1e3:.0f} k"
            found_and_stated = f"**{accuracy}**", len(runs), stated
            rows.append([f"`{net}`", *size, first["epochs"], f"{cost:.1f} G", *found_and_stated])
    columns = ["network", "MACs", "parameters", "epochs", "MACs x epochs", "top-1 %", "seeds", "published %"]
    note = (
        "\nMean ± standard deviation over seeds; 50,000 images to train on, the test set met once, at the end.\n"
    )
    return markdown(columns, rows) + note + source("cifar10/", runs[0]["environment"])


def cifar10_init() -> str:
    """The initialisations with and without batch norm: loss on the way, accuracy at the end."""
    rows: list[list[object]] = []
    runs: list[dict[str, Any]] = []
    for (_, variant), found in _runs("init").items():
        runs = found
        losses = [mean(run["history"][epoch - 1]["train_loss"] for run in runs) for epoch in (1, 3, 10)]
        accuracy = _mean_and_spread([100 * run["result"]["top1"] for run in runs])
        init, _, norm = variant.removesuffix("-norm").rpartition("-")
        init = init.removesuffix("-batch").removesuffix("-no")
        rows.append([init, norm, *(f"{loss:.2f}" for loss in losses), accuracy, len(runs)])
    rows.sort(key=lambda row: (row[1] != "no", row[0]))
    columns = ["initialisation", "batch norm", "loss after 1", "3", "10 epochs", "top-1 % then", "seeds"]
    return markdown(columns, rows) + source("cifar10/init/", runs[0]["environment"])


def cpu_speed() -> str:
    """Each network at its best against its dense twin at its best, for every batch size."""
    found = record("cpu_speed.json")
    rows: list[list[object]] = []
    for result in found["batches"]:
        for row in result["rows"]:
            times = (f"{t['ms']:.1f} ({t['low']:.1f} to {t['high']:.1f})" for t in (row["ms"], row["twin_ms"]))
            ratios = f"{row['mac_ratio']:.3f}", f"**{row['ratio']:.3f}**"
            rows.append([f"`{row['network']}`", result["batch"], *ratios, *times, row["way"], row["twin_way"]])
    columns = ["network", "batch", "MAC ratio", "time ratio", "ms", "dense ms", "<run by", "<dense by"]
    env = found["environment"]
    note = (
        f"\nfloat32, {env['threads']} threads for both; median and quartiles, all networks in turns in one run.\n"
    )
    return markdown(columns, rows) + note + source("cpu_speed.json", env)


def cpu_layout() -> str:
    found = record("cpu_layout.json")
    rows: dict[str, list[object]] = {}
    for row in found["rows"]:
        what = f"`{row['network']}`, {'training step' if row['step'] == 'train' else 'inference'}"
        rows.setdefault(what, []).append(f"{row['ms']:.0f} ({row['least']:.0f} to {row['most']:.0f})")
    note = f"\nMilliseconds for 64 images, a quarter of the width: median of {found['rows'][0]['n']}, and range.\n"
    table = markdown(["", "ordinary layout", "channels_last"], [[what, *times] for what, times in rows.items()])
    return table + note + source("cpu_layout.json", found["environment"])


def cifar_search() -> str:
    """Every setting that was tried, in the order in which they were."""
    found = record("cifar_search.json")
    rows: list[list[object]] = []
    for r in found["rows"]:
        shown = " ".join(word for word in r["settings"].split() if not word.startswith("evaluate_every"))
        what = [f"`{r['network']}`", f"`{r['recipe']}`", r["start"], f"`{shown}`" if shown else ""]
        rows.append([*what, f"{r['images']:,}", r["epochs"], f"{r['top1']:.1%}", r["commit"]])
    note = f"\n{found['note']} One run each, seed {found['rows'][0]['seed']}.\n"
    columns = ["network", "<recipe", "<start", "<with", "images", "epochs", "top-1, held out", "commit"]
    return markdown(columns, rows) + note + source("cifar_search.json", found["environment"])


def weights() -> str:
    """The cards of the weights that come with the package."""
    from lowrank_cnn.models.pretrained import list_pretrained, read_pretrained

    rows: list[list[object]] = []
    for name, data in list_pretrained():
        card = read_pretrained(name, data).card
        trained, halved = card["trained"], card["halved"]
        shares = f"{trained['top1']:.2%}", f"{halved['top1']:.2%}"
        made = f"`{card['recipe']['name']}`", trained["epochs"], card["seed"], card["environment"]["commit"]
        rows.append([f"`{name}`", data, *made, *shares])
    columns = ["network", "<data", "<recipe", "epochs", "seed", "commit", "as trained, GPU", "as shipped, CPU"]
    return markdown(columns, rows) + "\nTop-1 on the 10,000 test images.\n"


def records() -> str:
    """Every record, what made it, and what it was made with."""
    rows: list[list[object]] = []
    for path in sorted(RESULTS.glob("*.json")):
        known = record(path.name).get("environment", {})
        where, date = known.get("gpu") or known.get("cpu"), str(known.get("date", ""))[:10]
        rows.append([f"`{path.name}`", _purpose(path.stem), where or "", known.get("torch", ""), date])
    return markdown(["record", "<what is measured", "on", "torch", "date"], rows)


def _purpose(name: str) -> str:
    """The first sentence of the benchmark that writes a record of this name."""
    script = ROOT / "benchmarks" / f"{name}.py"
    text = ast.get_docstring(ast.parse(script.read_text())) if script.exists() else ""
    return (text or "").partition("\n")[0].rstrip(".")


def decompose() -> str:
    """Decomposing and fine-tuning beside training from scratch: a row per scheme and share of the MACs."""
    found = record("decompose.json")
    dense = next(line for line in found["table"] if line["way"] == "dense")
    ways = list(dict.fromkeys((line["way"], line["epochs"]) for line in found["table"] if line["scheme"]))
    lines = {(row["scheme"], row["share"], row["way"], row["epochs"]): row for row in found["table"]}
    rows: list[list[object]] = [
        [found["setting"]["network"], "1", f"{dense['params'] / 1e6:.2f} M", _accuracy(dense), *[""] * len(ways)]
    ]
    for scheme, share in dict.fromkeys((row["scheme"], row["share"]) for row in found["table"] if row["scheme"]):
        made = [lines.get((scheme, share, *way)) for way in ways]
        first = next(row for row in made if row)
        macs, params = f"{first['macs'] / dense['macs']:.3f}", f"{first['params'] / 1e6:.2f} M"
        rows.append([f"`{scheme}`", macs, params, "", *map(_accuracy, made)])
    columns = ["", "of the MACs", "parameters", f"dense, {dense['epochs']} epochs"]
    columns += [way if way == "decomposed" else f"{way}, {epochs} epochs" for way, epochs in ways]
    setting = found["setting"]
    images = "the test set" if "test" in dense else f"{setting['held_out']:,} training images held out"
    note = f"\nTop-1 on {images}: mean and standard deviation over {dense['n']} seeds.\n"
    note += f"Recipe `{setting['recipe']}`; fine-tuning starts at a learning rate of {setting['tune_lr']}.\n"
    return markdown(columns, rows) + note + source("decompose.json", found["environment"])


def _accuracy(line: dict[str, Any] | None) -> str:
    """Of the test set where it was looked at, else of the images held out."""
    if line is None:
        return ""
    value, spread = (line["test"], line["test_stdev"]) if "test" in line else (line["top1"], line["stdev"])
    return f"{100 * value:.2f}" + ("%" if spread is None else f" ± {100 * spread:.2f}%")


TABLES: dict[str, Callable[[], str]] = {
    "cifar-search": cifar_search,
    "cifar10-init": cifar10_init,
    "cifar10-modern": cifar10_modern,
    "cpu-layout": cpu_layout,
    "cpu-speed": cpu_speed,
    "gpu-backward": gpu_backward,
    "gpu-layers": gpu_layers,
    "gpu-speed": gpu_speed,
    "train-speed": train_speed,
    "weights": weights,
    "init-depth": init_depth,
    "networks": networks,
    "records": records,
}


def filled(text: str) -> str:
    return BLOCK.sub(lambda match: match[1] + _table(match[2]) + match[3], text)


@cache
def _table(name: str) -> str:
    return TABLES[name]()


def stale() -> list[Path]:
    """The pages whose tables are not those that the records give now."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if filled(page.read_text()) != page.read_text()]


def main() -> None:
    check, pages = "--check" in sys.argv, stale()
    for page in pages:
        print(f"{'out of date' if check else 'written'}: {page.relative_to(ROOT)}")
        if not check:
            page.write_text(filled(page.read_text()))
    sys.exit(1 if pages and check else 0)


if __name__ == "__main__":
    main()
