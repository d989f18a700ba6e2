"""Weak points of a network: how gradients fade or grow with depth, and dead filters and branches.

    python -m benchmarks.depth_flow --data FOLDER [--networks vgg11-gmp vgg11-gmp-lr ...] [--norms none batch] \
        [--seeds 3] [--run RUN_DIRECTORY ...] [--images 256] [--out benchmarks/results/depth_flow.json]

Networks are examined at initialisation, by name and over seeds, or after training, by the directory of a run. For
every layer the record has the norm of the gradient at its output, which pools preserve and good initialisation
keeps level, and the norm of its weight gradient relative to the weights. For every filter group (and every branch
of an inception module, whose convs are its groups) it has the share of dead filters: their output is zero for all
images, or less than a ten-thousandth of the layer's most active filter. Basis filters, which no ReLU follows, are
judged in the same way. Layers are recorded for the first seed, the rest of a row for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import parser, write_record
from lowrank_cnn.core.errors import LowRankError
from lowrank_cnn.data import Data, Preprocess, make_loader, open_data
from lowrank_cnn.method.init import weight_layers
from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.method.schemes import FactoredConv2d
from lowrank_cnn.models import create_model, list_models
from lowrank_cnn.train import get_recipe
from lowrank_cnn.train.evaluate import load_checkpoint
from lowrank_cnn.train.inputs import augmentation, image_size, preprocessing
from lowrank_cnn.train.recipe import Recipe

DEAD = 1e-4
BATCH = 64
SUMMARY = ("first_to_last", "least", "most", "dead_share", "worst_group", "dead_groups")
"""The fields that are recorded for every seed."""


@dataclass
class Watch:
    """Gradients at the outputs of weight layers, and the largest output of every filter."""

    gradients: dict[str, list[float]] = field(default_factory=dict)
    activity: dict[str, Tensor] = field(default_factory=dict)

    def see_gradient(self, name: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        def note(gradient: Tensor) -> None:
            self.gradients.setdefault(name, []).append(float(gradient.float().norm()))

        if output.requires_grad:
            output.register_hook(note)

    def see_activity(self, name: str, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        if output.dim() == 4:
            answered = output.detach().float().abs().amax(dim=(0, 2, 3))
            before = self.activity.get(name)
            self.activity[name] = answered if before is None else torch.maximum(before, answered)


def sites(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers at which filters are judged: ReLUs, and bases, which no ReLU follows."""
    for name, module in network.named_modules():
        if isinstance(module, nn.ReLU):
            yield name.removesuffix("_relu"), module
        if isinstance(module, FactoredConv2d) and isinstance(basis := next(module.children()), CompositeConv2d):
            yield f"{name}, basis", basis


def groups(network: nn.Module, site: str) -> list[tuple[str, int]]:
    """The filter groups of a composite layer, by shape, in the order of its channels; [] for other layers."""
    name, _, basis = site.partition(", ")
    try:
        layer = network.get_submodule(name)
    except AttributeError:
        return []
    if basis:
        layer = next(layer.children())
    if not isinstance(layer, CompositeConv2d):
        return []
    return [(f"{group.height}x{group.width}", group.filters) for group in layer.composite.groups]


def watched(network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Watch:
    """Pass images forward and gradients back; nothing is updated."""
    watch = Watch()
    hooks = [m.register_forward_hook(partial(watch.see_gradient, n)) for n, m in weight_layers(network)]
    hooks += [m.register_forward_hook(partial(watch.see_activity, n)) for n, m in sites(network)]
    network.train()
    network.zero_grad()
    for images, labels in batches:
        outputs = network(images)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        weights = (1.0, *(0.3,) * (len(outputs) - 1))
        losses = (w * nn.functional.cross_entropy(out, labels) for w, out in zip(weights, outputs, strict=True))
        sum(losses, torch.zeros((), device=images.device)).backward()
    for hook in hooks:
        hook.remove()
    return watch


@torch.no_grad()
def relative_gradient(module: nn.Module) -> float:
    """The norm of a layer's gradient over that of its weights."""
    weights = [p for p in module.parameters() if p.dim() > 1]
    gradients = [p.grad for p in weights if p.grad is not None]
    return float(nn.utils.get_total_norm(gradients) / nn.utils.get_total_norm(weights))


def examined(label: str, network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How gradients flow through the convs, relative to the last one, and which filters are dead."""
    watch = watched(network, batches)
    flow = {
        name: {"gradient": rounded(mean(watch.gradients[name])), "relative": rounded(relative_gradient(module))}
        for name, module in weight_layers(network)
        if name in watch.gradients
    }
    dead = {site: dead_filters(network, site, answered) for site, answered in watch.activity.items()}
    aside = tuple(getattr(network, "auxiliary", ()))
    convs = [name for name in flow if is_conv(network.get_submodule(name)) and not name.startswith(aside or "?")]
    norms = [flow[name]["gradient"] / flow[convs[-1]]["gradient"] for name in convs]
    groups = {f"{site} {shape}".strip(): n / of for site, row in dead.items() for shape, n, of in parts(row)}
    worst = max(groups, key=lambda name: groups[name])
    filters, lost = (sum(row[key] for row in dead.values()) for key in ("filters", "dead"))
    return {
        "network": label,
        "first_to_last": rounded(norms[0]),
        "least": rounded(min(norms)),
        "most": rounded(max(norms)),
        "dead_share": rounded(lost / filters),
        "worst_group": [worst, rounded(groups[worst])],
        "dead_groups": [group for group, share in groups.items() if share == 1],
        "flow": flow,
        "dead": dead,
    }


def parts(row: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """The groups of a layer, or the layer if it has none: shape, dead filters, filters."""
    yield from ((shape, n, of) for shape, (n, of) in row["groups"].items())
    if not row["groups"]:
        yield "", row["dead"], row["filters"]


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def is_conv(module: nn.Module) -> bool:
    return any(parameter.dim() == 4 for parameter in module.parameters())


def dead_filters(network: nn.Module, site: str, answered: Tensor) -> dict[str, Any]:
    """How many filters of a layer are dead, in all and by group."""
    dead = answered <= DEAD * answered.max()
    rows, first = {}, 0
    for shape, filters in groups(network, site):
        rows[shape] = [int(dead[first : first + filters].sum()), filters]
        first += filters
    return {"filters": len(answered), "dead": int(dead.sum()), "groups": rows}


def batches_of(data: Data, recipe: Recipe, preprocess: Preprocess, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    loader = make_loader(
        data.train,
        batch_size=min(BATCH, len(data.train)),
        preprocess=preprocess,
        augment=augmentation(recipe),
        seed=0,
        device=device,
        train=True,
    )
    return loader.epoch(0)


def fresh(name: str, norm: str | None, data: Data, arguments: argparse.Namespace) -> dict[str, Any]:
    """A network at initialisation, once for every seed."""
    recipe = get_recipe(arguments.recipe)
    channels, height, _ = image_size(data.test, augmentation(recipe))
    options = {"num_classes": len(data.classes), "in_channels": channels, "image_size": height, "dropout": 0.0}
    options["stride"] = 1 if name.startswith("googlenet") and height < 224 else None
    preprocess = preprocessing(data.train, recipe)
    found = []
    for seed in range(arguments.seeds):
        torch.manual_seed(seed)
        network = create_model(name, norm=norm, width=arguments.width, **options)
        batches = batches_of(data, recipe, preprocess, arguments.device)
        found.append(examined(name, network.to(arguments.device), batches))
        say(found[-1])
    return {"norm": norm, **found[0], "seeds": [{key: row[key] for key in SUMMARY} for row in found]}


def trained(run: Path, data: Data, arguments: argparse.Namespace) -> dict[str, Any]:
    """The network of a run, with its last weights."""
    found = load_checkpoint(run)
    if len(found.classes) != len(data.classes):
        raise LowRankError(f"{run} knows {len(found.classes)} classes, and the images have {len(data.classes)}.")
    batches = batches_of(data, found.recipe, found.preprocess, arguments.device)
    for module in found.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    row = examined(f"{run.parent.name}/{run.name}", found.network.to(arguments.device), batches)
    say(row)
    return row


def say(row: dict[str, Any]) -> None:
    group, share = row["worst_group"]
    print(
        f"{row['network']}: gradient of the first conv x{row['first_to_last']:.2g} that of the last; "
        f"{row['dead_share']:.1%} of filters dead, {share:.1%} in {group}; dead groups: {row['dead_groups']}",
        flush=True,
    )


def main() -> None:
    made = parser(__doc__, "depth_flow.json")
    made.add_argument("--data", required=True)
    made.add_argument(
        "--networks", nargs="*", default=[n for n in list_models() if not n.startswith(("nin", "convnext"))]
    )
    made.add_argument("--run", type=Path, nargs="*", default=[])
    made.add_argument("--norms", nargs="*", default=["none"], choices=["none", "batch"])
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--recipe", default="tiny-vgg")
    made.add_argument("--width", type=float, default=1.0)
    made.add_argument("--images", type=int, default=256)
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = made.parse_args()
    data = open_data(arguments.data, limit=arguments.images)
    norms = [None if norm == "none" else norm for norm in arguments.norms]
    rows = [fresh(name, norm, data, arguments) for norm in norms for name in arguments.networks]
    rows += [trained(run, data, arguments) for run in arguments.run]
    setting = {"images": arguments.images, "batch": BATCH, "dead_below": DEAD, "width": arguments.width}
    write_record(arguments.out, "depth-flow", by_line="rows", setting=setting, rows=rows)


if __name__ == "__main__":
    main()
