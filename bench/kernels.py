"""Compiled kernels against ONNX Runtime's own operators and reference expansions, at the sizes of a BERT step.

    python -m bench.kernels [--rounds 15] [--only NAME] [--threads 2] [--json]

Workload: BERT 256x4 (hidden 256, 4 layers, 4 heads, feed-forward 1024, vocabulary 30522), batch 8, sequence 128,
float32. Every side runs alone in a session with bound inputs and outputs (nothing is allocated outside ONNX
Runtime's own temporaries; updates lie over their inputs as in a session), in turn within a round. Times are the least
of all rounds (other load on the machine only adds), ratios are taken per round and their median is reported.
``calls`` is how often the operator occurs in a training step, ``saves`` what the kernel saves per step against the
best peer, by least times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from ortgraph.ops import kernels
from ortgraph.ops.builder import Builder
from ortgraph.ops.expand import expand_node
from ortgraph.ops.runtime_forms import RUNTIME_FORMS
from ortgraph.ops.spec import CONTRIB
from ortgraph.ops.targets import TRAINING

B, S, H, HEADS, FF, VOCAB, LAYERS = 8, 128, 256, 4, 1024, 30522, 4
ROWS = B * S
Build = Callable[[Builder, dict[str, ir.Value]], Sequence[ir.Value]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison. ``over`` binds output i of every side over that input."""

    name: str
    calls: int
    feeds: dict[str, np.ndarray]
    sides: dict[str, Build]
    over: tuple[str, ...] = ()


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def f32(*shape: int) -> np.ndarray:
    return _rng().standard_normal(shape, dtype=np.float32)


def kernel(op: str, outputs: int = 1, **attributes: object) -> Build:
    return lambda b, x: b.multi(op, *x.values(), outputs=outputs, domain=kernels.DOMAIN, **attributes)


def composite(op: str, outputs: int, form: str, **attributes: object) -> Build:
    """A composite in its reference expansion or as the runtime's own operator."""

    def build(b: Builder, x: dict[str, ir.Value]) -> Sequence[ir.Value]:
        made = b.multi(op, *x.values(), outputs=outputs, domain="ortgraph", **attributes)
        node = made[0].producer()
        assert node is not None
        if form == "runtime":
            found = [f for f in RUNTIME_FORMS[op] if TRAINING in f.targets and f.applies(node) is None]
            values = list(found[0].build(b, node))
            b.graph.remove(node, safe=True)
            return values
        b.graph.outputs.extend(made)
        expand_node(node)
        values = list(b.graph.outputs)
        b.graph.outputs.clear()
        return values

    return build


def same(op: str, outputs: int, feeds: dict, calls: int, over: tuple[str, ...] = (), **attributes: object) -> Case:
    """A kernel that stands for a composite one to one."""
    expansion = composite(op, outputs, "expansion", **attributes)
    sides = {"kernel": kernel(op, outputs, **attributes), "expansion": expansion}
    if op in RUNTIME_FORMS:
        sides["runtime"] = composite(op, outputs, "runtime", **attributes)
    return Case(op, calls, feeds, sides, over)


def _gelu() -> list[Case]:
    x, bias, dy = f32(ROWS, FF), f32(FF), f32(ROWS, FF)

    def bias_gelu(b, v):
        return [b.op("BiasGelu", v["x"], v["bias"], domain=CONTRIB)]

    def bias_gelu_grad(b, v):
        z = b.op("Add", v["x"], v["bias"])
        dx = b.op("GeluGrad", v["dy"], z, domain=CONTRIB)
        return [dx, b.op("ReduceSum", dx, b.ints([0]), keepdims=0)]

    return [
        same("Gelu", 1, {"x": x}, 0),
        same("Gelu", 1, {"x": x}, 0, approximate="tanh"),
        same("GeluGrad", 1, {"dy": dy, "x": x}, 0),
        same("GeluGrad", 1, {"dy": dy, "x": x}, 0, approximate="tanh"),
        Case("BiasGelu", LAYERS, {"x": x, "bias": bias}, {"kernel": kernel("BiasGelu"), "runtime": bias_gelu}),
        Case(
            "BiasGeluGrad", LAYERS, {"dy": dy, "x": x, "bias": bias},
            {"kernel": kernel("BiasGeluGrad", 2), "Add+GeluGrad+ReduceSum": bias_gelu_grad},
        ),
    ]  # fmt: skip


def _norm() -> list[Case]:
    x, scale, bias = f32(ROWS, H), f32(H), f32(H)
    mean, inv = x.mean(1, keepdims=True), 1 / x.std(1, keepdims=True)
    grad = {"dy": x[::-1].copy(), "x": x, "mean": mean, "inv": inv, "scale": scale}

    def layer_norm(b, v):
        return b.multi("LayerNormalization", *v.values(), outputs=3, axis=-1, epsilon=1e-5)

    def add_norm(b, v):
        total = b.op("Add", b.op("Add", v["a"], v["addend"]), v["b"])
        return [total, *b.multi("LayerNormalization", total, v["scale"], v["bias"], outputs=3, axis=-1, epsilon=1e-5)]

    def grad_add(b, v):
        order = [v[k] for k in ("dy", "x", "scale", "mean", "inv")]
        dx, ds, db = b.multi("LayerNormalizationGrad", *order, outputs=3, domain=CONTRIB, axis=-1)
        return [b.op("Add", dx, v["residual"]), ds, db]

    plain = {"x": x, "scale": scale, "bias": bias}
    fused = {"a": x, "b": x[::-1].copy(), "scale": scale, "bias": bias, "addend": bias}
    return [
        Case("LayerNorm", 1, plain, {"kernel": kernel("LayerNorm", 3), "runtime": layer_norm}),
        Case("AddLayerNorm", 2 * LAYERS, fused, {"kernel": kernel("AddLayerNorm", 4), "Add+Add+Norm": add_norm}),
        same("LayerNormGrad", 3, grad, 1, axis=-1),
        Case(
            "LayerNormGradAdd", 2 * LAYERS, {**grad, "residual": x},
            {"kernel": kernel("LayerNormGradAdd", 3), "LayerNormalizationGrad+Add": grad_add},
        ),
    ]  # fmt: skip


def _softmax() -> list[Case]:
    x, mask = f32(B, HEADS, S, S), np.zeros((B, 1, 1, S), np.float32)
    y = np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    def masked(b, v):
        return [b.op("Softmax", b.op("Add", b.op("Mul", v["x"], b.const(0.125, np.float32)), v["mask"]), axis=-1)]

    def added(b, v):
        return [b.op("Softmax", b.op("Add", v["x"], v["mask"]), axis=-1)]

    def plain(b, v):
        return [b.op("Softmax", v["x"], axis=-1)]

    return [
        Case("Softmax", 0, {"x": x}, {"kernel": kernel("Softmax"), "runtime": plain}),
        Case(
            "ScaledMaskedSoftmax", LAYERS, {"x": x, "mask": mask},
            {"kernel": kernel("ScaledMaskedSoftmax", scale=0.125), "Add+Softmax": added, "Mul+Add+Softmax": masked},
        ),
        same("SoftmaxGrad", 1, {"dy": x, "y": y}, LAYERS, axis=-1),
    ]  # fmt: skip


def _parameters() -> list[tuple[int, ...]]:
    layer = [(H, H), (H,)] * 4 + [(H,)] * 4 + [(H, FF), (FF,), (FF, H), (H,)]
    return [(512, H), (2, H), (H,), (H,)] + layer * LAYERS + [(H, H), (H,), (H, 2), (2,)]


def _adam() -> list[Case]:
    head = {"rate": np.float32(1e-4), "step": np.int64(3)}
    table, dense = (VOCAB, H), (H, FF)
    indices = _rng().integers(0, VOCAB, (B, S))

    def states(shape):
        return {"w": f32(*shape), "g": f32(*shape), "m": f32(*shape), "v": f32(*shape) ** 2}

    t = states(table)
    sparse = {**head, "w": t["w"], "dy": f32(B, S, H), "i": indices, "m": t["m"], "v": t["v"]}

    def dense_table(b, v):
        grad = b.op("EmbeddingGrad", v["dy"], v["i"], domain=kernels.DOMAIN, rows=VOCAB)
        return b.multi("AdamW", v["rate"], v["step"], v["w"], grad, v["m"], v["v"], outputs=3, domain=kernels.DOMAIN)

    def expanded_table(b, v):
        grad = composite("EmbeddingGrad", 1, "expansion", rows=VOCAB)(b, {"dy": v["dy"], "i": v["i"]})[0]
        inputs = {"rate": v["rate"], "step": v["step"], "w": v["w"], "g": grad, "m": v["m"], "v": v["v"]}
        return composite("AdamW", 3, "expansion")(b, inputs)

    many = dict(head)
    for n, shape in enumerate(_parameters()):
        many.update({f"{k}{n}": x for k, x in states(shape).items()})

    def multi(b, v):
        x = list(v.values())
        return b.multi("MultiAdamW", x[0], x[1], None, None, *x[2:], outputs=3 * len(x[2:]) // 4, domain=kernels.DOMAIN)

    def one_by_one(form):
        def build(b, v):
            x, made = list(v.values()), []
            for n in range(2, len(x), 4):
                one = dict(zip(("rate", "step", "w", "g", "m", "v"), [*x[:2], *x[n : n + 4]], strict=True))
                made += form(b, one)
            return made

        return build

    return [
        same("AdamW", 3, {**head, **states(dense)}, 0, ("w", "m", "v")),
        Case(
            "MultiAdamW", 1, many,
            {
                "kernel": multi, "AdamW kernels": one_by_one(kernel("AdamW", 3)),
                "expansion": one_by_one(composite("AdamW", 3, "expansion")),
            },
            tuple(f"{k}{n}" for n in range(len(_parameters())) for k in "wmv"),
        ),
        same("EmbeddingGrad", 1, {"dy": f32(B, S, H), "i": indices}, 0, rows=VOCAB),
        Case(
            "EmbeddingAdamW", 1, sparse,
            {
                "kernel": kernel("EmbeddingAdamW", 3), "EmbeddingGrad, AdamW kernels": dense_table,
                "expansion": expanded_table,
            },
            ("w", "m", "v"),
        ),
    ]  # fmt: skip


def _rest() -> list[Case]:
    def reduce(b, v):
        return [b.op("ReduceSum", v["dy"], b.ints([0]), keepdims=0)]

    drop = {"key": np.int64(1), "step": np.int64(2)}
    logits, target = f32(ROWS, VOCAB // 4), _rng().integers(0, VOCAB // 4, ROWS)

    def transpose(perm):
        def runtime(b, v):
            return [b.op("Transpose", v["x"], perm=perm)]

        sides = {"kernel": kernel("Transpose", perm=perm), "runtime": runtime}
        return Case("Transpose", 8 * LAYERS if perm[-1] == 3 else 0, {"x": f32(B, S, HEADS, H // HEADS)}, sides)

    def clip(b, v):
        return [b.op("Sum", *[b.op("ReduceSumSquare", x, keepdims=0) for x in v.values()])]

    gradients = {f"g{n}": f32(*shape) for n, shape in enumerate(_parameters())}

    entropy_grad = {"d": np.float32(1), "p": logits - 9, "t": target, "w": None, "n": np.float32(ROWS)}

    def log_softmax(b, v):
        return [b.op("LogSoftmax", v["x"], axis=-1)]

    return [
        transpose([0, 2, 1, 3]),
        transpose([0, 2, 3, 1]),
        Case("SquaredNorm", 0, gradients, {"kernel": kernel("SquaredNorm"), "runtime": clip}),
        Case("BiasGrad", 5 * LAYERS, {"dy": f32(ROWS, H)}, {"kernel": kernel("BiasGrad"), "runtime": reduce}),
        Case("BiasGrad wide", 0, {"dy": f32(ROWS, FF)}, {"kernel": kernel("BiasGrad"), "runtime": reduce}),
        same("Dropout", 2, {"x": f32(ROWS, H), **drop}, 2 * LAYERS + 1, ratio=0.1, node=1),
        same("DropoutGrad", 1, {"dy": f32(ROWS, H), "mask": f32(ROWS, H) > -1}, 2 * LAYERS + 1, ratio=0.1),
        same("ReluGrad", 1, {"dy": f32(ROWS, FF), "y": f32(ROWS, FF)}, 0),
        same("TanhGrad", 1, {"dy": f32(B, H), "y": f32(B, H)}, 1),
        Case("LogSumExp", 0, {"x": logits}, {"kernel": kernel("LogSumExp"), "log-softmax": log_softmax}),
        same("CrossEntropyGrad", 1, entropy_grad, 0),
    ]  # fmt: skip


def cases() -> list[Case]:
    return [*_adam(), *_gelu(), *_norm(), *_softmax(), *_rest()]


class Side:
    """A session with everything bound."""

    def __init__(self, build: Build, feeds: dict[str, np.ndarray], threads: int, over: tuple[str, ...] = ()) -> None:
        import onnxruntime

        graph = ir.Graph([], [], nodes=[], opset_imports={"": 18}, name="bench")
        inputs: dict[str, ir.Value | None] = {}
        for name, x in feeds.items():
            if x is None:
                inputs[name] = None
                continue
            dtype = ir.DataType.from_numpy(np.asarray(x).dtype)
            inputs[name] = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(np.shape(x)))
            graph.inputs.append(inputs[name])
        graph.outputs.extend(build(Builder(graph, "bench"), inputs))
        for i, output in enumerate(graph.outputs):
            output.name = f"result{i}"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.register_custom_ops_library(str(kernels.library_path()))
        model = ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString()
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        kept = {k: np.array(x, order="C") for k, x in feeds.items() if x is not None}
        for name, x in kept.items():
            self.binding.bind_cpu_input(name, x)
        self.kept = [kept]
        for i, (name, y) in enumerate(zip([o.name for o in graph.outputs], self.session.run(None, kept), strict=True)):
            y = kept[over[i]] if over else np.array(y)
            self.binding.bind_output(name, "cpu", 0, y.dtype, y.shape, y.ctypes.data)
            self.kept.append(y)

    def seconds(self, repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            self.session.run_with_iobinding(self.binding)
        return (time.perf_counter() - start) / repeats


def measure(case: Case, rounds: int, threads: int) -> dict[str, object]:
    """Median microseconds per side and median ratio of each peer to the kernel."""
    sides = {name: Side(build, case.feeds, threads, case.over) for name, build in case.sides.items()}
    repeats = {name: max(1, min(50, int(5e-3 / side.seconds(2)))) for name, side in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            times[name].append(side.seconds(repeats[name]))
    micro = {name: 1e6 * min(t) for name, t in times.items()}
    ratios = {
        name: statistics.median(p / k for p, k in zip(t, times["kernel"], strict=True))
        for name, t in times.items()
        if name != "kernel"
    }
    best = min((n for n in micro if "kernel" not in n), key=micro.__getitem__)
    saved = case.calls * (micro[best] - micro["kernel"])
    return {"name": case.name, "calls": case.calls, "us": micro, "ratio": ratios, "best": best, "saves_us": saved}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not kernels.available():
        raise SystemExit(kernels.reason())
    results = [measure(c, options.rounds, options.threads) for c in cases() if options.only in c.name]
    if options.json:
        print(json.dumps(results))
        return
    for r in results:
        peers = ", ".join(f"{n} {r['us'][n]:.0f} us = {ratio:.2f}x" for n, ratio in r["ratio"].items())  # type: ignore
        saved = r["saves_us"] / 1e3  # type: ignore[operator]
        print(f"{r['name']:28s} {r['us']['kernel']:8.0f} us   {peers}   x{r['calls']} saves {saved:.2f} ms")  # type: ignore
    print(f"saved per step: {sum(r['saves_us'] for r in results) / 1e3:.1f} ms")  # type: ignore


if __name__ == "__main__":
    main()
