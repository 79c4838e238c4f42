"""Small PyTorch models in low precision, and what must hold of every cast graph."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.graph import TrainingGraph
from ortgraph.ops.precision import LOW

torch = pytest.importorskip("torch")
UPTO_OPTIMIZED = "mark-optimized"


def optimized(graph: TrainingGraph, level: str = "O2") -> TrainingGraph:
    """The graph after the preset's canonical and fusion passes."""
    from ortgraph.manager import pipeline_text, registry

    options = {"optimizer": None, "target": "onnxruntime-training", "shapes": {}, "accumulation_steps": 1}
    preset = registry.preset(level, **options)
    last = next(i for i, p in enumerate(preset) if getattr(p, "name", "") == UPTO_OPTIMIZED)
    return ortgraph.optimize(graph, pipeline_text(preset[: last + 1])).graph


def cast(graph: TrainingGraph, text: str = "cast-precision") -> Any:
    """The graph after the pass, and the record of what it did."""
    result = ortgraph.optimize(graph, text, verify="types")
    return result.graph, result.report.passes[0]


def is_low_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.outputs[0].dtype in LOW


def round_trips(graph: TrainingGraph) -> list[str]:
    """Casts to float32 of a value that was float32 in the same half."""
    from ortgraph.passes.precision.assign import _backward

    late = _backward(graph, list(graph.graph))
    found = []
    for node in graph.graph:
        inner = node.inputs[0].producer() if node.op_type == "Cast" and node.inputs[0] is not None else None
        if inner is None or node.outputs[0].dtype != ir.DataType.FLOAT or not is_low_cast(inner):
            continue
        read_late = any(use.node in late for use in node.outputs[0].uses())  # a cast alone depends on no seed
        if read_late == (inner in late):
            found.append(f"{inner.name} -> {node.name}")
    return found


@dataclasses.dataclass
class Sample:
    """A module, a batch and what PyTorch makes of them."""

    module: Any
    batch: dict[str, Any]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        return {k: v.numpy() for k, v in self.batch.items()}

    def gradients(self, dtype: Any = None, autocast: Any = None) -> dict[str, np.ndarray]:
        module = copy.deepcopy(self.module)
        batch = self.batch
        if dtype is not None:
            module = module.to(dtype)
            batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
        with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
            loss = module(**batch)["loss"]
        loss.backward()
        return {n: p.grad.double().numpy() for n, p in module.named_parameters()}

    def capture(self) -> TrainingGraph:
        return ortgraph.capture(self.module, self.batch, loss="loss")


class Loss(torch.nn.Module):
    """Cross-entropy of a network's scores."""

    def __init__(self, *layers: Any) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.layers(x), labels)}


def mlp() -> Sample:
    torch.manual_seed(0)
    nn = torch.nn
    net = Loss(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 10))
    return Sample(net, {"x": torch.randn(48, 32), "labels": torch.randint(0, 10, (48,))})


def cnn() -> Sample:
    torch.manual_seed(0)
    nn = torch.nn
    net = Loss(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip
    return Sample(net, {"x": torch.randn(16, 3, 16, 16), "labels": torch.randint(0, 10, (16,))})


def bert(layers: int = 2, **config: Any) -> Sample:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=256, vocab_size=100,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **config,
    )  # fmt: skip
    module = transformers.BertForSequenceClassification(config).train()
    ids = torch.randint(0, 100, (4, 16))
    mask = torch.ones(4, 16, dtype=torch.long)
    mask[1, 9:] = 0
    return Sample(module, {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(0, 2, (4,))})


def vit() -> Sample:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256, image_size=32, patch_size=8,
        num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = transformers.ViTForImageClassification(config).train()
    return Sample(module, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))})


SAMPLES = {"mlp": mlp, "cnn": cnn, "bert": bert, "vit": vit}


@pytest.fixture(scope="session")
def samples():
    """Samples and their captured graphs, made once: ``samples("bert")`` -> (Sample, graph)."""
    made: dict[str, tuple[Sample, TrainingGraph]] = {}

    def get(name: str) -> tuple[Sample, TrainingGraph]:
        if name not in made:
            sample = SAMPLES[name]()
            made[name] = sample, sample.capture()
        return made[name]

    return get


@pytest.fixture(scope="session")
def tools():
    """Functions of this file by name."""
    import types

    return types.SimpleNamespace(
        optimized=optimized, cast=cast, is_low_cast=is_low_cast, round_trips=round_trips, Sample=Sample, bert=bert
    )
