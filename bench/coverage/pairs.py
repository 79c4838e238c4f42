"""Two towers, adapters, diffusion, detection: what is neither one encoder nor one decoder."""

from __future__ import annotations

from typing import Any

import torch

from bench.coverage.registry import ATTENTION, DROPOUT, Built, family
from bench.coverage.texts import DROPS, POSITIONS, SIZES, WORDS, configured, ends_early, model, words

_GROUPED = {
    **SIZES, **POSITIONS, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "use_cache": False,
    "attention_dropout": DROPOUT,
}  # fmt: skip
_UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4,
    "attention_head_dim": 4,
}  # fmt: skip


def _pair(name: str, config: str, attention: str, **options: Any) -> Built:
    text = {**SIZES, **POSITIONS, "attention_dropout": DROPOUT, "projection_dim": 16}
    image = {**SIZES, "image_size": 16, "patch_size": 8, "attention_dropout": DROPOUT, "projection_dim": 16}
    text |= {"eos_token_id": WORDS - 1, "pad_token_id": 1, "bos_token_id": 0}
    module = model(name, configured(config, attention, text_config=text, vision_config=image, **options))
    ids = words(count=WORDS - 1)
    ids[:, -1] = WORDS - 1
    batch = {"input_ids": ids, "attention_mask": ends_early(), "pixel_values": torch.randn(3, 3, 16, 16)}
    return Built(module, {**batch, "return_loss": True})


@family("clip", kind="pairs", requires=("transformers",), attention=ATTENTION)
def clip(attention: str) -> Built:
    return _pair("CLIPModel", "CLIPConfig", attention, projection_dim=16)


@family("siglip", kind="pairs", requires=("transformers",), attention=ATTENTION)
def siglip(attention: str) -> Built:
    return _pair("SiglipModel", "SiglipConfig", attention)


@family("blip", kind="pairs", requires=("transformers",), attention=("eager",))
def blip(attention: str) -> Built:
    return _pair("BlipModel", "BlipConfig", attention, projection_dim=16)


@family("two-towers", kind="pairs")
def two_towers() -> Built:
    """Two embedding bags of words, contrasted within the batch."""

    class Towers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = torch.nn.Embedding(WORDS, 16), torch.nn.Embedding(WORDS, 16)
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, question: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
            a = torch.nn.functional.normalize(self.left(question).mean(1), dim=-1)
            b = torch.nn.functional.normalize(self.right(answer).mean(1), dim=-1)
            scores = a @ b.T * self.scale.exp()
            wanted = torch.arange(scores.shape[0])
            cross = torch.nn.functional.cross_entropy
            return (cross(scores, wanted) + cross(scores.T, wanted)) / 2

    return Built(Towers(), {"question": words(4), "answer": words(4, 6)})


@family("vision-encoder-decoder", kind="pairs", requires=("transformers",), attention=ATTENTION)
def vision_encoder_decoder(attention: str) -> Built:
    import transformers

    encoder = configured("ViTConfig", **SIZES, **DROPS, image_size=16, patch_size=8)
    decoder = configured(
        "GPT2Config", n_embd=32, n_layer=1, n_head=4, vocab_size=WORDS, n_positions=40, use_cache=False
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    config._attn_implementation = attention
    module = transformers.VisionEncoderDecoderModel(config)
    return Built(module, {"pixel_values": torch.randn(3, 3, 16, 16), "labels": words(length=6)})


@family("llava", kind="pairs", requires=("transformers",), attention=("sdpa",))
def llava(attention: str) -> Built:
    text = configured("LlamaConfig", **{**_GROUPED, "vocab_size": WORDS})
    vision = configured("CLIPVisionConfig", **SIZES, image_size=16, patch_size=8)
    config = configured("LlavaConfig", attention, text_config=text, vision_config=vision, image_token_index=WORDS - 1)
    module = model("LlavaForConditionalGeneration", config)
    ids = words(2, 10, WORDS - 1)
    ids[:, 1:5] = WORDS - 1
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 16, 16)}
    return Built(module, {**batch, "labels": ids.masked_fill(ids == WORDS - 1, -100)})


@family("lora-llama", kind="adapters", requires=("transformers", "peft"), attention=ATTENTION)
def lora_llama(attention: str) -> Built:
    """A frozen base with trainable low-rank adapters; both factors start at random numbers."""
    import peft

    base = model("LlamaForCausalLM", configured("LlamaConfig", attention, **_GROUPED))
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=DROPOUT, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    ids, mask = words(), ends_early()
    labels = ids.masked_fill(mask == 0, -100)
    return Built(peft.get_peft_model(base, lora), {"input_ids": ids, "attention_mask": mask, "labels": labels})


@family("lora-bert", kind="adapters", requires=("transformers", "peft"), attention=("sdpa",))
def lora_bert(attention: str) -> Built:
    """Adapters, with a classifier that is trained whole."""
    import peft

    config = configured("BertConfig", attention, **SIZES, **POSITIONS, **DROPS, num_labels=3)
    base = model("BertForSequenceClassification", config)
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=4, lora_dropout=DROPOUT, target_modules=["query", "value"], init_lora_weights=False
    )
    batch = {"input_ids": words(), "attention_mask": ends_early(), "labels": torch.tensor([0, 2, 1])}
    return Built(peft.get_peft_model(base, lora), batch)


def _adapter(kind: str, **options: Any) -> Built:
    import peft

    base = model("LlamaForCausalLM", configured("LlamaConfig", "sdpa", **_GROUPED))
    module = peft.get_peft_model(base, getattr(peft, kind)(**options))
    ids, mask = words(), ends_early()
    return Built(module, {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})


@family("dora-llama", kind="adapters", requires=("transformers", "peft"))
def dora_llama() -> Built:
    return _adapter("LoraConfig", r=4, use_dora=True, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


@family("ia3-llama", kind="adapters", requires=("transformers", "peft"))
def ia3_llama() -> Built:
    return _adapter(
        "IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    )


@family("prompt-tuning-llama", kind="adapters", requires=("transformers", "peft"))
def prompt_tuning() -> Built:
    return _adapter("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=3)


def _noise(module: torch.nn.Module, channels: int = 3, **batch: Any) -> Built:
    """A step of diffusion training: predict the noise in a noisy image."""
    sample, wanted = torch.randn(2, channels, 8, 8), torch.randn(2, channels, 8, 8)

    def loss(outputs: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs.sample, given["noise"])

    return Built(module, {"sample": sample, "timestep": torch.tensor([3, 70]), **batch, "noise": wanted}, loss=loss)


@family("diffusion-unet", kind="diffusion", requires=("diffusers",))
def diffusion_unet() -> Built:
    import diffusers

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return _noise(diffusers.UNet2DModel(**_UNET, **blocks, dropout=DROPOUT))


@family("diffusion-unet-conditioned", kind="diffusion", requires=("diffusers",))
def diffusion_unet_conditioned() -> Built:
    """Stable Diffusion's U-Net, with text to attend to."""
    import diffusers

    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }  # fmt: skip
    module = diffusers.UNet2DConditionModel(**_UNET, **blocks, cross_attention_dim=16, in_channels=4, out_channels=4)
    return _noise(module, 4, encoder_hidden_states=torch.randn(2, 5, 16))


@family("diffusion-transformer", kind="diffusion", requires=("diffusers",))
def diffusion_transformer() -> Built:
    import diffusers

    module = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        patch_size=2, num_embeds_ada_norm=1000, norm_num_groups=4,
    )  # fmt: skip
    built = _noise(module, 4, class_labels=torch.tensor([1, 5]))
    batch = dict(built.batch)
    batch["hidden_states"] = batch.pop("sample")
    return Built(built.module, batch, loss=built.loss)


@family("diffusion-autoencoder", kind="diffusion", requires=("diffusers",))
def diffusion_autoencoder() -> Built:
    import diffusers

    module = diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"), block_out_channels=(8, 16), norm_num_groups=4,
        latent_channels=2, sample_size=16,
    )  # fmt: skip

    def loss(outputs: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(outputs.sample, given["sample"])

    return Built(module, {"sample": torch.randn(2, 3, 16, 16)}, loss=loss)
