"""Arguments of the trainers: what is mapped to passes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ortgraph.errors import InputError
from ortgraph.optim import FusedAdam, FusedLAMB
from ortgraph.trainer import ORTSeq2SeqTrainingArguments, ORTTrainer, ORTTrainingArguments


def arguments(tmp_path: Any, **given: Any) -> ORTTrainingArguments:
    return ORTTrainingArguments(str(tmp_path), report_to=[], **given)


@pytest.mark.parametrize(("given", "precision"), [({}, "fp32"), ({"bf16": True}, "bf16"), ({"fp16": True}, "fp16")])
def test_flags_become_the_graphs_precision(tmp_path: Any, given: dict[str, bool], precision: str) -> None:
    args = arguments(tmp_path, **given)
    assert args.precision == precision
    assert args.mixed_precision == "no"  # Accelerate casts nothing a second time
    assert (args.bf16, args.fp16) == (precision == "bf16", precision == "fp16")


def test_the_launchers_precision_is_the_graphs(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = arguments(tmp_path)
    assert (args.precision, args.mixed_precision) == ("bf16", "no")


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_becomes_a_budget(tmp_path: Any, name: str) -> None:
    args = arguments(tmp_path, **{name: True})
    assert args.memory_budget == "50%"
    assert not args.budget_required
    assert not getattr(args, name)  # PyTorch's own stays off
    given = arguments(tmp_path, memory_budget="70%", **{name: True})
    assert (given.memory_budget, given.budget_required) == ("70%", True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bf16": True, "fp16": True}, "choose one"),
        ({"precision": "bf16", "fp16": True}, "leave one of them out"),
        ({"precision": "int8"}, "one of fp32"),
        ({"save_onnx": True}, "onnx_prefix"),
        ({"onnx_log_level": "LOUD"}, "one of VERBOSE"),
        ({"torch_compile": True}, "leave torch_compile out"),
    ],
)
def test_contradictions_are_refused(tmp_path: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        arguments(tmp_path, **given)


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw_ort_fused", FusedAdam), ("lamb_ort", FusedLAMB), ("sgd_ort", torch.optim.SGD)]
)
def test_optimizers_by_name(tmp_path: Any, name: str, kind: type) -> None:
    args = arguments(tmp_path, optim=name)
    made, options = ORTTrainer.get_optimizer_cls_and_kwargs(args)
    assert made is kind
    assert options["lr"] == args.learning_rate
    assert json.loads(args.to_json_string())["optim"] == name  # as a checkpoint keeps it


def test_optimizer_arguments(tmp_path: Any) -> None:
    args = arguments(tmp_path, optim="sgd_ort", optim_args="momentum=0.9, nesterov=true")
    _, options = ORTTrainer.get_optimizer_cls_and_kwargs(args)
    assert (options["momentum"], options["nesterov"]) == (0.9, True)
    for wrong in ("speed=3", "momentum", "momentum=fast"):
        with pytest.raises(InputError, match="optim_args"):
            ORTTrainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="sgd_ort", optim_args=wrong))


def test_transformers_optimizers_stay(tmp_path: Any) -> None:
    made, _ = ORTTrainer.get_optimizer_cls_and_kwargs(arguments(tmp_path, optim="adamw_torch"))
    assert made is torch.optim.AdamW


def test_seq2seq_arguments_have_both(tmp_path: Any) -> None:
    args = ORTSeq2SeqTrainingArguments(str(tmp_path), predict_with_generate=True, precision="bf16", report_to=[])
    assert (args.predict_with_generate, args.precision) == (True, "bf16")
