"""How much of the image an output really sees: effective receptive fields (Luo et al. 2016), by gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowrank_cnn.method.layers import CompositeConv2d
from lowrank_cnn.models import list_models
from lowrank_cnn.models.network import Network
from lowrank_cnn.report.comparing import twin_id
from lowrank_cnn.report.figures.options import FigureOptions, network_name
from lowrank_cnn.report.figures.style import COLUMN, new_figure
from lowrank_cnn.report.records import NetworkId
from lowrank_cnn.system.errors import LowRankError
from lowrank_cnn.system.provenance import notes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_IMAGE = 160
PIXELS = 3 * LARGEST_IMAGE**2
"""All random images together have this many pixels: more small images are needed to average the noise out."""
SHARE = 0.9


def draw_receptive_field(_name: str, options: FigureOptions) -> Figure:
    """The mean absolute gradient, over the image, of the centre of the last conv's maps; twins side by side."""
    label, network = options.network("vgg11-gmp-lr")
    pairs = [*_twin(network, options), (label, network)]
    fields = [(name, effective_field(net, seed=options.seed)) for name, net in pairs]
    figure = new_figure(COLUMN, 3.9 if len(fields) > 1 else 5.2)
    panels = [figure.add_subplot(1, len(fields), place) for place in range(1, len(fields) + 1)]
    for axes, (name, field) in zip(panels, fields, strict=True):
        # The square root lifts the faint rim, where the twins differ.
        image = axes.imshow(field.sqrt().numpy(), cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
        held = f"{area(field):,} of {field.numel():,} pixels hold {SHARE:.0%}"
        axes.set_title(f"{name}\n{held}", fontsize=9)
        axes.set_xlabel("pixels across", fontsize=8)
        axes.set_ylabel("pixels down" if axes is panels[0] else "", fontsize=8)
        axes.grid(False)
        axes.tick_params(labelsize=7.5)
    bar = figure.colorbar(image, ax=panels, orientation="horizontal", shrink=0.5, aspect=40, pad=0.04)
    bar.set_label("absolute gradient of the centre output, root scale", fontsize=8)
    return figure


def _twin(network: nn.Module, options: FigureOptions) -> list[tuple[str, nn.Module]]:
    """The dense twin, trained if there are weights of it; none for a network that is dense itself."""
    name = network_name(network)
    twin = twin_id(NetworkId(name)).name
    if twin == name or twin not in list_models():
        return []
    return [options.named(twin, trained=options.has_weights(twin), **_size_of(network))]


def _size_of(network: nn.Module) -> dict[str, Any]:
    """The options that decide how large a network is, and the images it sees, for a twin as large."""
    config = network.config if isinstance(network, Network) else {}
    channels, height, width = notes(network).input_size or (3, 0, 1)
    side = {"in_channels": channels, "image_size": height} if height == width else {}
    return {name: config[name] for name in ("width", "norm", "num_classes") if config.get(name)} | side


def effective_field(network: nn.Module, *, seed: int = 0) -> Tensor:
    """[H, W], its largest value one. Random signs over the channels keep their gradients from cancelling."""
    size = notes(network).input_size or (3, LARGEST_IMAGE, LARGEST_IMAGE)
    generator = torch.Generator().manual_seed(seed)
    height, width = (min(side, LARGEST_IMAGE) for side in size[1:])
    images = torch.randn(PIXELS // (height * width), size[0], height, width, generator=generator).requires_grad_()
    maps = _last_maps(network.eval(), images)
    centre = maps[:, :, maps.shape[2] // 2, maps.shape[3] // 2]
    signs = torch.randint(0, 2, centre.shape, generator=generator) * 2 - 1
    (gradient,) = torch.autograd.grad((centre * signs).sum(), images)
    field = gradient.abs().mean(dim=(0, 1))
    return field / field.max().clamp_min(torch.finfo(field.dtype).tiny)


def _last_maps(network: nn.Module, images: Tensor) -> Tensor:
    """The output of the last conv that runs and still has an extent."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        if min(output.shape[2:]) > 1:
            outputs.append(output)

    convs = [module for module in network.modules() if isinstance(module, nn.Conv2d | CompositeConv2d)]
    hooks = [conv.register_forward_hook(keep) for conv in convs]
    try:
        network(images)
    finally:
        for hook in hooks:
            hook.remove()
    if not outputs:
        raise LowRankError(f"{network_name(network)} has no convolution whose field could be shown.")
    return outputs[-1]


def area(field: Tensor) -> int:
    """The fewest pixels that hold the given share of the gradient."""
    ranked = field.flatten().sort(descending=True).values.double().cumsum(0)
    return int((ranked < SHARE * ranked[-1]).sum()) + 1
