"""Networks of other libraries, small and with random weights: how to build each, and the inputs that it takes.

Images, segmentation, detection, depth, keypoints, super-resolution, diffusion, speech and medical volumes, from
pytorchcv, transformers, diffusers, monai and efficientnet_pytorch. A family is a table and one builder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

PACKAGES = ("pytorchcv", "transformers", "diffusers", "monai", "efficientnet_pytorch")
Inputs = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Foreign:
    """A network of another library: how to build it, and the inputs it takes."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Inputs


def networks() -> Iterator[Foreign]:
    """Every network of the tables below."""
    for name in _PYTORCHCV:
        size = 32 if "cifar" in name else 224 if name == "darknet_tiny" else 64
        yield Foreign(f"pytorchcv:{name}", lambda name=name: _pytorchcv(name), _image(size))
    yield Foreign("efficientnet_pytorch:b0", _efficientnet, _image())
    for name, (options, inputs) in _TRANSFORMERS.items():
        yield Foreign(f"transformers:{name}", lambda n=name, o=options: _transformer(n, o), inputs)
    for name, (options, inputs) in _DIFFUSERS.items():
        yield Foreign(f"diffusers:{name}", lambda n=name, o=options: _made("diffusers", n, o), inputs)
    for name, (options, inputs) in _MONAI.items():
        yield Foreign(f"monai:{name}", lambda n=name, o=options: _made("monai.networks.nets", n, o), inputs)


def _image(size: int = 64, channels: int = 3, *, axes: int = 2) -> Inputs:
    return lambda: (torch.randn(1, channels, *[size] * axes),)


def _values(*shape: int) -> Inputs:
    return lambda: (torch.randn(1, *shape),)


def _noisy(*shape: int, condition: Callable[[], Tensor] | None = None) -> Inputs:
    """A sample and its time step, the inputs of diffusion networks, and other conditioning."""
    return lambda: (torch.randn(1, *shape), torch.tensor([10]), *([condition()] if condition else []))


def _pytorchcv(name: str) -> nn.Module:
    """Adapt a network to images smaller than 224 pixels: the last pool becomes adaptive."""
    network = import_module("pytorchcv.model_provider").get_model(name, pretrained=False)
    if hasattr(network.features, "final_pool"):
        network.features.final_pool = nn.AdaptiveAvgPool2d(1)
    return network


def _efficientnet() -> nn.Module:
    return import_module("efficientnet_pytorch").EfficientNet.from_name("efficientnet-b0", num_classes=5)


_HEADS = (
    "ForImageClassification", "ForSemanticSegmentation", "ForObjectDetection", "ForDepthEstimation",
    "ForSequenceClassification", "ForAudioClassification", "ForKeypointDetection", "ForImageSuperResolution",
    "Encoder",
)  # fmt: skip


def _transformer(name: str, options: dict[str, Any]) -> nn.Module:
    library = import_module("transformers")
    family = next(name.removesuffix(head) for head in _HEADS if name.endswith(head))
    backbone = options.get("backbone_config")
    if isinstance(backbone, tuple):
        options = options | {"backbone_config": getattr(library, backbone[0])(**backbone[1])}
    config = getattr(library, f"{family}Config")(**options)
    if name.endswith("Encoder"):
        return getattr(library, f"{family}Model")(config).encoder
    return getattr(library, name)(config)


def _made(library: str, name: str, options: dict[str, Any]) -> nn.Module:
    return getattr(import_module(library), name.partition(" ")[0])(**options)


_PYTORCHCV = (
    "resnet10", "preresnet10", "seresnet10", "resneta10", "resnext14_16x4d", "darknet_tiny", "mobilenet_wd4",
    "shufflenet_g1_wd4", "bagnet9", "vovnet27s", "diracnet18v2", "mnasnet_small", "cgnet_cityscapes",
    "nin_cifar10", "resnet20_cifar10", "diaresnet20_cifar10", "seresnet20_cifar10", "preresnet20_cifar10",
)  # fmt: skip

_STAGES = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5}
_PYRAMID = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}
_ATTENTION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_VIT = _ATTENTION | {"image_size": 64, "num_labels": 5}
_TRANSFORMERS: dict[str, tuple[dict[str, Any], Inputs]] = {
    "ResNetForImageClassification": (_STAGES | {"embedding_size": 16, "layer_type": "basic"}, _image()),
    "RegNetForImageClassification": (_STAGES | {"embedding_size": 16, "groups_width": 8}, _image()),
    "ConvNextForImageClassification": (_STAGES | {"num_stages": 2}, _image()),
    "ConvNextV2ForImageClassification": (_STAGES | {"num_stages": 2}, _image()),
    "BitForImageClassification": (_STAGES | {"embedding_size": 16, "num_groups": 4}, _image()),
    "MobileNetV1ForImageClassification": ({"depth_multiplier": 0.25, "num_labels": 5}, _image()),
    "MobileNetV2ForImageClassification": ({"depth_multiplier": 0.35, "num_labels": 5}, _image()),
    "MobileViTForImageClassification": (
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32]},
        _image(),
    ),
    "EfficientNetForImageClassification": (
        {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "num_labels": 5}, _image(),
    ),
    "PoolFormerForImageClassification": (_PYRAMID, _image()),
    "SwiftFormerForImageClassification": (
        {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32]}, _image(),
    ),
    "FocalNetForImageClassification": (
        _STAGES | {"image_size": 64, "embed_dim": 16, "focal_levels": [2, 2], "focal_windows": [3, 3]}, _image(),
    ),
    "LevitForImageClassification": (
        {"image_size": 64, "hidden_sizes": [16, 32, 48], "num_attention_heads": [1, 2, 3], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8]}, _image(),
    ),
    "PvtForImageClassification": (
        _PYRAMID | {"image_size": 64, "num_attention_heads": [1, 1, 2, 2]}, _image(),
    ),
    "SwinForImageClassification": (
        {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}, _image(),
    ),
    "ViTForImageClassification": (_VIT, _image()),
    "BeitForImageClassification": (_VIT, _image()),
    "Dinov2ForImageClassification": (_VIT | {"image_size": 56, "patch_size": 14}, _image(56)),
    "TextNetForImageClassification": ({"num_labels": 5}, _image()),
    "SegformerForSemanticSegmentation": (_PYRAMID | {"hidden_sizes": [8, 16, 20, 32]}, _image()),
    "UperNetForSemanticSegmentation": (
        {"backbone_config": ("ConvNextConfig", _PYRAMID | {"out_features": [f"stage{n}" for n in range(1, 5)]}),
         "hidden_size": 16, "auxiliary_in_channels": 16, "auxiliary_channels": 8, "num_labels": 5}, _image(),
    ),
    "YolosForObjectDetection": (_ATTENTION | {"image_size": [64, 64], "num_detection_tokens": 5}, _image()),
    "DetrForObjectDetection": (
        {"backbone_config": ("ResNetConfig", _STAGES | {"layer_type": "basic", "out_features": ["stage2"],
                                                        "embedding_size": 16}),
         "backbone": None, "use_timm_backbone": False, "use_pretrained_backbone": False, "d_model": 32,
         "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
         "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 5}, _image(),
    ),
    "DPTForDepthEstimation": (
        _VIT | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 16, 16, 16],
                "fusion_hidden_size": 16}, _image(),
    ),
    "GLPNForDepthEstimation": (
        _PYRAMID | {"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16}, _image(),
    ),
    "SuperPointForKeypointDetection": ({}, _image()),
    "Swin2SRForImageSuperResolution": (
        {"image_size": 32, "embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4}, _image(32),
    ),
    "Wav2Vec2ForSequenceClassification": (
        _ATTENTION | {"conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        _values(4000),
    ),
    "ASTForAudioClassification": (_ATTENTION | {"max_length": 128, "num_mel_bins": 32}, _values(128, 32)),
    "WhisperEncoder": (
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 50},
        _values(80, 100),
    ),
}  # fmt: skip

_AUTOENCODER = {"block_out_channels": (16,), "norm_num_groups": 8}
_CROSSED = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}
_PLAIN = {"down_block_types": ("DownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "UpBlock2D")}
_DENOISER = {"block_out_channels": (16, 32), "norm_num_groups": 8, "layers_per_block": 1}
_DIFFUSERS: dict[str, tuple[dict[str, Any], Inputs]] = {
    "UNet2DModel": (_PLAIN | _DENOISER | {"sample_size": 32}, _noisy(3, 32, 32)),
    "UNet2DConditionModel": (
        _CROSSED | _DENOISER | {"sample_size": 16, "cross_attention_dim": 16, "attention_head_dim": 4},
        _noisy(4, 16, 16, condition=lambda: torch.randn(1, 4, 16)),
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 1, "sample_size": 8,
         "norm_num_groups": 4}, _noisy(4, 8, 8, condition=lambda: torch.tensor([1])),
    ),
    "AutoencoderKL": (_AUTOENCODER | {"sample_size": 32}, _image(32)),
    "VQModel": (_AUTOENCODER | {"num_vq_embeddings": 16}, _image(32)),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
         "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1)}, _image(32),
    ),
    "AsymmetricAutoencoderKL": (
        {"down_block_out_channels": (32,), "up_block_out_channels": (32,), "layers_per_down_block": 1,
         "layers_per_up_block": 1}, _image(16),
    ),
}  # fmt: skip

_PLANE: dict[str, Any] = {"spatial_dims": 2, "in_channels": 1, "out_channels": 2}
_UNET = _PLANE | {"channels": (8, 16, 32), "strides": (2, 2)}
_RESNET = {"block": "basic", "layers": [1, 1, 1, 1], "block_inplanes": [8, 16, 16, 32], "n_input_channels": 1}
_MONAI: dict[str, tuple[dict[str, Any], Inputs]] = {
    "UNet": (_UNET | {"num_res_units": 1}, _image(32, 1)),
    "UNet 3-D": (_UNET | {"num_res_units": 1, "spatial_dims": 3}, _image(16, 1, axes=3)),
    "BasicUNet": (_PLANE | {"features": (8, 8, 16, 16, 32, 8)}, _image(32, 1)),
    "AttentionUnet": (_UNET, _image(32, 1)),
    "DynUNet": (
        _PLANE | {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
                  "filters": [8, 16, 32]}, _image(32, 1),
    ),
    "SegResNet": ({"spatial_dims": 2, "init_filters": 8}, _image(32, 1)),
    "SegResNet 3-D": ({"spatial_dims": 3, "init_filters": 8, "in_channels": 1}, _image(16, 1, axes=3)),
    "SegResNetDS": ({"spatial_dims": 2, "init_filters": 8, "blocks_down": (1, 1, 1)}, _image(32, 1)),
    "HighResNet 3-D": (_PLANE | {"spatial_dims": 3}, _image(16, 1, axes=3)),
    "ResNet 3-D": (_RESNET | {"spatial_dims": 3, "num_classes": 2}, _image(16, 1, axes=3)),
    "DenseNet121": (_PLANE, _image(64, 1)),
    "EfficientNetBN": (
        {"model_name": "efficientnet-b0", "pretrained": False, "spatial_dims": 2, "in_channels": 1,
         "num_classes": 2}, _image(64, 1),
    ),
    "MedNeXt": (
        _PLANE | {"init_filters": 8, "blocks_down": (1, 1), "blocks_bottleneck": 1, "blocks_up": (1, 1)},
        _image(32, 1),
    ),
    "PatchDiscriminator": ({"spatial_dims": 2, "channels": 8, "in_channels": 1, "num_layers_d": 2}, _image(32, 1)),
    "AutoEncoder": (_PLANE | {"channels": (8, 16), "strides": (2, 2)}, _image(32, 1)),
}  # fmt: skip
