"""Lowering for providers on devices: by rules of operators and types, with numbers from the reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import ortgraph
from ortgraph.errors import InputError
from ortgraph.graph import TrainingGraph
from ortgraph.manager import parse_pipeline, registry
from ortgraph.ops.builder import Builder
from ortgraph.ops.precision import LOW
from ortgraph.ops.spec import COMPOSITE, GENERATED, KERNELS
from ortgraph.ops.targets import (
    CPU_TARGETS,
    DEVICE_TARGETS,
    TARGETS,
    beside_reason,
    low_reason,
    reason_not_run,
    target_of,
)
from ortgraph.runtime.reference_evaluator import evaluate_reference

torch = pytest.importorskip("torch")
CUDA = "onnxruntime-training:cuda"
BF16, FP16, FLOAT = ir.DataType.BFLOAT16, ir.DataType.FLOAT16, ir.DataType.FLOAT
LIMITS = {"fp32": 1e-5, "bf16": 3e-2, "fp16": 5e-3}
PRODUCTS = ("MatMul", "FusedMatMul", "Gemm")


class Encoder(torch.nn.Module):
    """BERT's layer, small: embedding, attention, GELU, layer norm, a head over a vocabulary."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, activation="gelu", batch_first=True)
        self.head = torch.nn.Linear(16, 11)

    def forward(self, ids, labels):
        scores = self.head(self.layer(self.table(ids)))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Residual(torch.nn.Module):
    """ResNet's block, small: convolutions, batch norm, max and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.conv = torch.nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, image, labels):
        h = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.stem(image))), 2)
        h = torch.nn.functional.adaptive_avg_pool2d(h + torch.relu(self.conv(h)), 1).flatten(1)
        return torch.nn.functional.cross_entropy(self.head(h), labels)


def _captured(kind: str) -> tuple[TrainingGraph, dict]:
    torch.manual_seed(0)
    if kind.startswith("encoder"):
        batch = {"ids": torch.randint(0, 11, (2, 6)), "labels": torch.randint(0, 11, (2, 6))}
        module = Encoder(0.1 if kind == "encoder-dropout" else 0.0)
    else:
        batch = {"image": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}
        module = Residual()
    return ortgraph.capture(module, batch), {k: v.numpy() for k, v in batch.items()}


@pytest.fixture(scope="module")
def models():
    """Graph, batch and exact gradients by name of the model."""
    found = {}
    for kind in ("encoder", "encoder-dropout", "residual"):
        graph, batch = _captured(kind)
        wanted = list(graph.signature.gradients.values())
        found[kind] = graph, batch, evaluate_reference(graph, batch, rounded=False, outputs=wanted).values
    return found


def _left(graph: TrainingGraph, target: str) -> list[str]:
    reasons = [reason_not_run(n, target, 18) or low_reason(n, target) for n in graph.graph.all_nodes()]
    return [r for r in reasons if r is not None]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("target", DEVICE_TARGETS)
@pytest.mark.parametrize("kind", ["encoder", "residual"])
def test_every_node_runs_and_gradients_are_right(models, kind, target, precision):
    graph, batch, exact = models[kind]
    made = ortgraph.optimize(graph, "O2", target=target, precision=precision, verify="types").graph
    assert _left(made, target) == []
    assert not any(n.domain in (COMPOSITE, KERNELS, GENERATED) for n in made.graph)
    wanted = list(made.signature.gradients.values())
    values = evaluate_reference(made, batch, outputs=wanted).values
    largest = max(np.linalg.norm(exact[n]) for n in wanted)
    for name in wanted:
        error = np.linalg.norm(values[name] - exact[name])
        assert error <= LIMITS[precision] * max(np.linalg.norm(exact[name]), 0.1 * largest), name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("target", DEVICE_TARGETS)
def test_a_whole_step_is_lowered(models, target, precision):
    graph, _, _ = models["encoder-dropout"]
    optimizer = ortgraph.optim.AdamW(lr=1e-3, max_grad_norm=1.0)
    made = ortgraph.optimize(graph, "O2", optimizer=optimizer, target=target, precision=precision).graph
    assert made.stage == "planned" and _left(made, target) == []
    assert not any(n.domain in (COMPOSITE, KERNELS, GENERATED) for n in made.graph)


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_the_other_presets_lower_too(models, level):
    graph, _, _ = models["encoder"]
    made = ortgraph.optimize(graph, level, target=CUDA, precision="bf16").graph
    assert _left(made, CUDA) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_products_on_cuda_are_in_the_low_type(models, precision):
    graph, _, _ = models["encoder"]
    made = ortgraph.optimize(graph, "O2", target=CUDA, precision=precision).graph
    low = BF16 if precision == "bf16" else FP16
    products = [n for n in made.graph if n.op_type in PRODUCTS]
    assert len(products) > 10 and all(n.outputs[0].dtype == low for n in products)
    assert all(v is None or v.dtype == low for n in products for v in n.inputs)


def test_where_a_type_is_missing_products_are_in_float32_on_rounded_operands(models):
    graph, _, _ = models["encoder"]
    made = ortgraph.optimize(graph, "O2", target="onnxruntime-training:rocm", precision="bf16").graph
    assert {n.outputs[0].dtype for n in made.graph if n.op_type in PRODUCTS} == {FLOAT}


def test_operators_beside_the_device_are_told(models):
    graph, _, _ = models["encoder-dropout"]
    result = ortgraph.optimize(graph, "O2", target=CUDA)
    beside = {n.op_type for n in result.graph.graph if beside_reason(n, CUDA)}
    assert beside == {"BitShift", "BitwiseOr", "BitwiseXor"}
    lower = next(p for p in result.report.passes if p.name.startswith("lower"))
    told = [r.reason for r in lower.refusals if "runs on the processor, between copies" in r.reason]
    assert any("CUDAExecutionProvider has no kernel for BitShift" in reason for reason in told)


def test_passes_that_ask_for_compiled_kernels_are_off():
    options = {"optimizer": None, "shapes": {}, "accumulation_steps": 1, "precision": "cast-precision{precision=bf16}"}
    made = registry.preset("O2", target=CUDA, **options)
    names = [p.name for p in made]
    assert "use-transpose-kernel" not in names and "zero-empty-rows" not in names
    assert all(p.kernels is False for p in made if hasattr(p, "kernels"))
    assert str(made[names.index("legalize-precision")]) == f"legalize-precision{{target={CUDA}}}"
    lowered = names[names.index("lower") :]
    assert "fuse-matmul-transpose" in lowered
    other = [p.name for p in registry.preset("O2", target="onnxruntime:migraphx", **options)]
    assert "fuse-matmul-transpose" not in other[other.index("lower") :]
    assert "fuse-matmul-transpose" in other[: other.index("lower")]
    plain = [p.name for p in registry.preset("O2", target="onnxruntime-training", **options)]
    assert "use-transpose-kernel" in plain


def test_text_of_targets():
    assert [target_of(t).text for t in TARGETS] == list(TARGETS)
    assert target_of("onnxruntime-training:cpu").text == "onnxruntime-training" == CPU_TARGETS[0]
    assert target_of(CUDA).provider.execution == "CUDAExecutionProvider" and not target_of(CUDA).on_cpu
    for text in ("moon", "onnxruntime:moon", "cuda", "onnxruntime:", "onnxruntime:cuda:0", "onnxruntime:rocm", ":cuda"):
        with pytest.raises(InputError, match="--target: unknown target"):
            target_of(text, "--target: ")
    assert str(registry.get("lower")(target=CUDA)) == f"lower{{target={CUDA}}}"
    (again,) = parse_pipeline(f"lower{{target={CUDA}}}")
    assert again.target == CUDA


def _node(op_type, *dtypes, out=FLOAT, domain=""):
    inputs = [ir.Value(name=f"x{i}", type=ir.TensorType(t), shape=ir.Shape([2, 2])) for i, t in enumerate(dtypes)]
    node = ir.Node(domain, op_type, inputs, num_outputs=1, name="n")
    node.outputs[0].name, node.outputs[0].dtype = "y", out
    return node


@pytest.mark.parametrize(
    ("op_type", "dtypes", "out", "reason"),
    [
        ("MatMul", (BF16, BF16), BF16, None),
        ("MatMul", (BF16, FLOAT), BF16, "takes A and B and Y of one type"),
        ("Mul", (FP16, FP16), FP16, None),
        ("Exp", (FP16,), FP16, None),
        ("Exp", (BF16,), BF16, "Exp has no kernel for BFLOAT16 in CUDAExecutionProvider"),
        ("Conv", (BF16, BF16), BF16, "Conv has no kernel for BFLOAT16"),
        ("Cast", (BF16,), FLOAT, None),
        ("Add", (FLOAT, FLOAT), FLOAT, None),
        ("Gather", (BF16, ir.DataType.INT64), BF16, None),
        ("LayerNormalization", (BF16, FLOAT, FLOAT), BF16, "of one type"),
        ("BitShift", (FP16, FP16), FP16, "no kernel"),
    ],
)
def test_low_types_by_the_table(op_type, dtypes, out, reason):
    found = low_reason(_node(op_type, *dtypes, out=out), CUDA)
    assert (found is None) if reason is None else (found is not None and reason.split(" and ")[0] in found), found


def test_operators_by_the_table():
    assert reason_not_run(_node("FusedMatMul", FLOAT, FLOAT, domain="com.microsoft"), "onnxruntime:cuda", 18) is None
    assert "no kernel" in (
        reason_not_run(_node("GeluGrad", FLOAT, FLOAT, domain="com.microsoft"), "onnxruntime:cuda", 18) or ""
    )
    assert reason_not_run(_node("GeluGrad", FLOAT, FLOAT, domain="com.microsoft"), CUDA, 18) is None
    assert "domain" in (reason_not_run(_node("Product", FLOAT, FLOAT, domain=KERNELS), CUDA, 18) or "")
    assert "domain" in (reason_not_run(_node("Fused_1", FLOAT, domain=GENERATED), CUDA, 18) or "")
    for target in DEVICE_TARGETS[2:]:
        assert reason_not_run(_node("FusedMatMul", FLOAT, FLOAT, domain="com.microsoft"), target, 18)
        assert reason_not_run(_node("MatMul", FLOAT, FLOAT), target, 18) is None


FORMS = [
    {"transA": 1}, {"transB": 1, "alpha": 0.5}, {"activation": "gelu"}, {"activation": "relu", "to": BF16},
    {"precision": "fp16", "to": FP16}, {"precision": "fp32"}, {"precision": "bf16", "to": BF16, "transA": 1, "transB": 1},
]  # fmt: skip


@pytest.mark.parametrize("target", [CUDA, "onnxruntime:migraphx"])
@pytest.mark.parametrize("form", FORMS, ids=[str(i) for i in range(len(FORMS))])
@pytest.mark.parametrize("extras", [0, 2])
def test_products_are_what_their_expansion_is(target, form, extras):
    rng = np.random.default_rng(3)
    to = form.get("to", FLOAT)
    shapes = [(2, 4, 4), (2, 4, 4), (4,), (2, 4, 4)][: 2 + extras]
    types = [FLOAT, FLOAT, FLOAT, to]
    results = []
    for lowered in (False, True):
        inputs = [ir.val(n, dtype=t, shape=list(s)) for n, t, s in zip("abcd", types, shapes, strict=False)]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": 18, COMPOSITE: 1}, name="g")
        y, z = Builder(graph, "t").multi("Product", *inputs, outputs=2, domain=COMPOSITE, **form)
        y.name, z.name = "y", "z"
        graph.outputs.extend([y, z])
        signature = ortgraph.graph.Signature(loss="y", inputs=tuple(v.name for v in inputs))
        made = TrainingGraph(ir.Model(graph, ir_version=10), signature, {})
        if lowered:
            registry.get("lower")(target=target).call(made.model)
            assert not any(n.domain == COMPOSITE for n in made.graph)
            assert _left(made, target) == []
        batch = {v.name: rng.standard_normal(s).astype(np.float32) for v, s in zip(inputs, shapes, strict=True)}
        batch = {k: v.astype(to.numpy()) if k == "d" else v for k, v in batch.items()}
        rng = np.random.default_rng(3)
        results.append(evaluate_reference(made, batch, outputs=["y", "z"]).values)
    low = form.get("precision", "fp32") != "fp32" or to in LOW
    for name in "yz":
        np.testing.assert_allclose(
            results[1][name], results[0][name], rtol=3e-2 if low else 1e-5, atol=5e-2 if low else 1e-5
        )
