"""Speech, audio and video models of ``transformers``."""

from __future__ import annotations

import functools
from typing import Any

import torch

from bench.coverage.registry import ATTENTION, DROPOUT, Built, family
from bench.coverage.texts import DROPS, SIZES, WORDS, configured, model, words

_WHISPER = {
    "vocab_size": WORDS, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_source_positions": 10, "max_target_positions": 16, "dropout": DROPOUT, "attention_dropout": DROPOUT,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
    "apply_spec_augment": False,
}  # fmt: skip
_WAVE = {
    **SIZES, "conv_dim": [8, 8], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "hidden_dropout": DROPOUT, "attention_dropout": DROPOUT,
    "activation_dropout": DROPOUT, "feat_proj_dropout": DROPOUT, "final_dropout": DROPOUT, "layerdrop": 0.0,
    "apply_spec_augment": False, "classifier_proj_size": 16,
}  # fmt: skip

# name: (model, configuration, attention implementations, options)
WAVES: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any]]] = {
    "wav2vec2-sequence": ("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", ATTENTION, _WAVE),
    "wav2vec2-ctc": (
        "Wav2Vec2ForCTC", "Wav2Vec2Config", ("sdpa",),
        {**_WAVE, "feat_extract_norm": "layer", "do_stable_layer_norm": True},
    ),
    "hubert-sequence": ("HubertForSequenceClassification", "HubertConfig", ("sdpa",), _WAVE),
    "wavlm-sequence": ("WavLMForSequenceClassification", "WavLMConfig", (), {**_WAVE, "num_buckets": 8, "max_bucket_distance": 16}),
    "unispeech-sequence": ("UniSpeechForSequenceClassification", "UniSpeechConfig", ("sdpa",), _WAVE),
    "sew-sequence": ("SEWForSequenceClassification", "SEWConfig", ("sdpa",), {**_WAVE, "squeeze_factor": 2}),
    "data2vec-audio-sequence": (
        "Data2VecAudioForSequenceClassification", "Data2VecAudioConfig", ("sdpa",),
        {**_WAVE, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2},
    ),
    "wav2vec2-conformer-sequence": (
        "Wav2Vec2ConformerForSequenceClassification", "Wav2Vec2ConformerConfig", (),
        {**_WAVE, "conv_depthwise_kernel_size": 5, "conformer_conv_dropout": DROPOUT},
    ),
}  # fmt: skip


def _connectionist(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """CTC over whole rows; the model's own loss asks for values of its labels."""
    scores, spoken = outputs.logits.log_softmax(-1).transpose(0, 1), batch["spoken"]
    rows, words = spoken.shape
    frames = torch.full((rows,), scores.shape[0], dtype=torch.long)
    return torch.nn.functional.ctc_loss(scores, spoken, frames, torch.full((rows,), words, dtype=torch.long))


def wave_model(name: str, config: str, attention: str = "", **options: Any) -> Built:
    """A model over raw sound: classes of whole pieces, or CTC."""
    module = model(name, configured(config, attention, num_labels=3, **options))
    sound = {"input_values": torch.randn(3, 200)}
    if name.endswith("CTC"):
        return Built(module, {**sound, "spoken": torch.randint(1, 12, (3, 5))}, loss=_connectionist)
    return Built(module, {**sound, "labels": torch.tensor([1, 2, 0])})


for _name, (_model, _config, _attention, _options) in WAVES.items():
    family(_name, kind="speech and video", requires=("transformers",), attention=_attention)(
        functools.partial(wave_model, _model, _config, **_options)
    )


@family("whisper", kind="speech and video", requires=("transformers",), attention=ATTENTION)
def whisper(attention: str) -> Built:
    module = model("WhisperForConditionalGeneration", configured("WhisperConfig", attention, **_WHISPER))
    labels = words(length=6)
    labels[1, 4:] = -100
    return Built(module, {"input_features": torch.randn(3, 8, 20), "labels": labels})


@family("speech-to-text", kind="speech and video", requires=("transformers",), attention=("eager",))
def speech_to_text(attention: str) -> Built:
    options = {k: v for k, v in _WHISPER.items() if k not in ("num_mel_bins", "apply_spec_augment")}
    config = configured(
        "Speech2TextConfig", attention, **{**options, "max_source_positions": 40}, input_feat_per_channel=8,
        conv_channels=16, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
    )  # fmt: skip
    module = model("Speech2TextForConditionalGeneration", config)
    return Built(module, {"input_features": torch.randn(3, 20, 8), "labels": words(length=6)})


@family("audio-spectrogram", kind="speech and video", requires=("transformers",), attention=ATTENTION)
def audio_spectrogram(attention: str) -> Built:
    config = configured(
        "ASTConfig", attention, **SIZES, **DROPS, patch_size=4, max_length=16, num_mel_bins=8, frequency_stride=4,
        time_stride=4, num_labels=3,
    )  # fmt: skip
    module = model("ASTForAudioClassification", config)
    return Built(module, {"input_values": torch.randn(3, 16, 8), "labels": torch.tensor([1, 2, 0])})


@family("videomae", kind="speech and video", requires=("transformers",), attention=ATTENTION)
def videomae(attention: str) -> Built:
    config = configured(
        "VideoMAEConfig", attention, **SIZES, **DROPS, image_size=16, patch_size=8, num_frames=4, tubelet_size=2,
        num_labels=3,
    )  # fmt: skip
    module = model("VideoMAEForVideoClassification", config)
    return Built(module, {"pixel_values": torch.randn(2, 4, 3, 16, 16), "labels": torch.tensor([1, 2])})


@family("timesformer", kind="speech and video", requires=("transformers",))
def timesformer() -> Built:
    config = configured("TimesformerConfig", **SIZES, **DROPS, image_size=16, patch_size=8, num_frames=2, num_labels=3)
    module = model("TimesformerForVideoClassification", config)
    return Built(module, {"pixel_values": torch.randn(2, 2, 3, 16, 16), "labels": torch.tensor([1, 2])})


@family("vivit", kind="speech and video", requires=("transformers",), attention=("sdpa",))
def vivit(attention: str) -> Built:
    config = configured(
        "VivitConfig", attention, **SIZES, **DROPS, image_size=16, num_frames=4, tubelet_size=[2, 8, 8], num_labels=3
    )
    module = model("VivitForVideoClassification", config)
    return Built(module, {"pixel_values": torch.randn(2, 4, 3, 16, 16), "labels": torch.tensor([1, 2])})
