"""Image models of ``transformers``: classification, and some other heads."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bench.coverage.registry import ATTENTION, DROPOUT, Built, family
from bench.coverage.texts import DROPS, SIZES, configured, model

_VIT = {**SIZES, **DROPS, "image_size": 16, "patch_size": 8}
_SWIN = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4,
    "mlp_ratio": 2.0, **DROPS, "drop_path_rate": 0.0,
}  # fmt: skip
_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 2]}
_CLASSES = {"num_labels": 4}

# name: (model, configuration, attention implementations, pixels, options)
TABLE: dict[str, tuple[str, str, tuple[str, ...], int, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", ATTENTION, 16, _VIT),
    "deit": ("DeiTForImageClassification", "DeiTConfig", ATTENTION, 16, _VIT),
    "dinov2": (
        "Dinov2ForImageClassification", "Dinov2Config", ATTENTION, 16,
        {**SIZES, **DROPS, "mlp_ratio": 2, "image_size": 16, "patch_size": 8, "drop_path_rate": 0.0},
    ),
    "dinov3": (
        "DINOv3ViTModel", "DINOv3ViTConfig", ("sdpa",), 16,
        {**SIZES, "image_size": 16, "patch_size": 8, "num_register_tokens": 2, "pos_embed_rescale": None},
    ),
    "beit": ("BeitForImageClassification", "BeitConfig", ATTENTION, 16, {**_VIT, "use_relative_position_bias": True}),
    "swin": ("SwinForImageClassification", "SwinConfig", (), 32, _SWIN),
    "swin-drop-path": ("SwinForImageClassification", "SwinConfig", (), 32, {**_SWIN, "drop_path_rate": 0.2}),
    "swin-v2": ("Swinv2ForImageClassification", "Swinv2Config", (), 32, _SWIN),
    "resnet-basic": (
        "ResNetForImageClassification", "ResNetConfig", (), 32,
        {"embedding_size": 8, **_STAGES, "layer_type": "basic"},
    ),
    "resnet-bottleneck": ("ResNetForImageClassification", "ResNetConfig", (), 32, {"embedding_size": 8, **_STAGES}),
    "regnet": ("RegNetForImageClassification", "RegNetConfig", (), 32, {"embedding_size": 8, "groups_width": 4, **_STAGES}),
    "mobilenet-v1": (
        "MobileNetV1ForImageClassification", "MobileNetV1Config", (), 32,
        {"depth_multiplier": 0.25, "image_size": 32, "classifier_dropout_prob": DROPOUT},
    ),
    "mobilenet-v2": (
        "MobileNetV2ForImageClassification", "MobileNetV2Config", (), 32,
        {"depth_multiplier": 0.25, "image_size": 32, "classifier_dropout_prob": DROPOUT},
    ),
    "efficientnet": (
        "EfficientNetForImageClassification", "EfficientNetConfig", (), 32,
        {"image_size": 32, "initializer_range": 0.2,  # with less its gradients vanish
         "width_coefficient": 0.2, "depth_coefficient": 0.2, "hidden_dim": 256, "dropout_rate": DROPOUT,
         "drop_connect_rate": DROPOUT, "in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "kernel_sizes": [3, 3, 5],
         "strides": [1, 2, 2], "num_block_repeats": [1, 1, 1], "expand_ratios": [1, 6, 6], "depthwise_padding": []},
    ),
    "convnext": (
        "ConvNextForImageClassification", "ConvNextConfig", (), 32,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.0},
    ),
    "convnext-v2": (
        "ConvNextV2ForImageClassification", "ConvNextV2Config", (), 32,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.2},
    ),
    "poolformer": (
        "PoolFormerForImageClassification", "PoolFormerConfig", (), 32,
        {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2],
         "padding": [2, 1]},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation", "SegformerConfig", (), 32,
        {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3],
         "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, **DROPS,
         "classifier_dropout_prob": DROPOUT, "drop_path_rate": 0.0},
    ),
    "mobilevit": (
        "MobileViTForImageClassification", "MobileViTConfig", (), 64,
        {"image_size": 64, "initializer_range": 0.1,
         "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 32], **DROPS,
         "num_attention_heads": 4, "mlp_ratio": 2.0, "expand_ratio": 2.0, "classifier_dropout_prob": DROPOUT},
    ),
    "levit": (
        "LevitForImageClassification", "LevitConfig", (), 64,
        {"image_size": 64, "hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1],
         "key_dim": [8, 8, 8], "drop_path_rate": 0},
    ),
    "pvt": (
        "PvtForImageClassification", "PvtConfig", (), 32,
        {"image_size": 32, "num_encoder_blocks": 4, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], **DROPS,
         "num_attention_heads": [1, 1, 2, 2], "mlp_ratios": [2, 2, 2, 2]},
    ),
    "focalnet": (
        "FocalNetForImageClassification", "FocalNetConfig", (), 32,
        {"image_size": 32, "embed_dim": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "focal_levels": [2, 2],
         "focal_windows": [3, 3], "hidden_dropout_prob": DROPOUT, "drop_path_rate": 0.0},
    ),
    "bit": (
        "BitForImageClassification", "BitConfig", (), 32,
        {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4},
    ),
    "dpt": (
        "DPTForSemanticSegmentation", "DPTConfig", ("eager",), 32,
        {**SIZES, **DROPS, "num_hidden_layers": 4, "image_size": 32, "patch_size": 8, "backbone_out_indices": [0, 1, 2, 3],
         "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8, "reassemble_factors": [4, 2, 1, 0.5],
         "use_auxiliary_head": True},
    ),
    "depth-anything": (
        "DepthAnythingForDepthEstimation", "DepthAnythingConfig", (), 28,
        {"patch_size": 14, "reassemble_hidden_size": 32, "neck_hidden_sizes": [8, 8, 16, 16], "fusion_hidden_size": 8,
         "head_hidden_size": 8},
    ),
    "upernet": ("UperNetForSemanticSegmentation", "UperNetConfig", (), 32, {"hidden_size": 16}),
    "vit-mae": (
        "ViTMAEForPreTraining", "ViTMAEConfig", ("sdpa",), 16,
        {**_VIT, "decoder_num_attention_heads": 2, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1,
         "decoder_intermediate_size": 24, "patch_size": 4},
    ),
    "data2vec-vision": ("Data2VecVisionForImageClassification", "Data2VecVisionConfig", ("sdpa",), 16, _VIT),
    "hiera": (
        "HieraForImageClassification", "HieraConfig", (), 32,
        {"image_size": [32, 32], "patch_size": [7, 7], "patch_stride": [4, 4], "patch_padding": [3, 3], "embed_dim": 8,
         "depths": [1, 1], "num_heads": [1, 2], "masked_unit_size": [4, 4], "num_query_pool": 1},
    ),
}  # fmt: skip


def image_model(name: str, config: str, pixels: int, attention: str = "", **options: Any) -> Built:
    """A model over square images, with the labels of its head."""
    if config == "DepthAnythingConfig":
        options["backbone_config"] = configured(
            "Dinov2Config", **{**SIZES, "num_hidden_layers": 4}, mlp_ratio=2, image_size=28, patch_size=14,
            reshape_hidden_states=False, out_features=["stage1", "stage2", "stage3", "stage4"], apply_layernorm=True,
        )  # fmt: skip
    labelled = "Classification" in name or "Segmentation" in name
    module = model(name, configured(config, attention, **options, **(_CLASSES if labelled else {})))
    batch = {"pixel_values": torch.randn(3, 3, pixels, pixels)}
    if "Segmentation" in name:
        labels = torch.randint(0, 4, (3, pixels, pixels))
        labels[0, :4] = 255
        return Built(module, {**batch, "labels": labels})
    if "Classification" in name:
        return Built(module, {**batch, "labels": torch.tensor([1, 3, 0])})
    if "PreTraining" in name:
        return Built(module, batch)
    return Built(module, batch, loss=lambda outputs: outputs[0].square().mean())


for _name, (_model, _config, _attention, _pixels, _options) in TABLE.items():
    family(_name, kind="images", requires=("transformers",), attention=_attention)(
        functools.partial(image_model, _model, _config, _pixels, **_options)
    )
