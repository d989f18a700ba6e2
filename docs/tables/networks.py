"""The networks as counted now."""

from __future__ import annotations

from tables.form import markdown

NOTE = """
Top-5 on ILSVRC for VGG and GoogLeNet, top-1 on CIFAR-10 for NiN, all as published. MACs are counted here, for the
images that each network trains on (NiN: crops of 30x30). For `lde` the paper prints another figure. For the
low-rank GoogLeNets it prints those of padded max-pools, and compares them with an unpadded dense network;
`lowrank audit` counts both.
"""


def networks() -> str:
    """Every network with its cost, counted now, beside the dense network of its family."""
    import torch

    from lowrank_cnn.method.count import count
    from lowrank_cnn.models import create_model, family_of, list_models
    from lowrank_cnn.paper.published import published

    rows: list[list[object]] = []
    with torch.device("meta"):
        for name in list_models(paper=True):
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
    return markdown(columns, rows) + NOTE
