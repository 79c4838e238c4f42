"""Forward models in ONNX form through every preset: the loss and every gradient by the design's measure."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import dataclasses
import functools
import io
import warnings
from collections.abc import Callable

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch", reason="the peer of this comparison")

import ortgraph  # noqa: E402
from ortgraph.graph import TrainingGraph  # noqa: E402
from ortgraph.ops import kernels  # noqa: E402

F = torch.nn.functional
LEVELS = ("O0", "O1", "O2")
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A graph, a batch, its exact loss and gradients, and those of PyTorch in float32."""

    graph: TrainingGraph
    batch: Arrays
    loss: float
    exact: Arrays
    near: Arrays
    renamed: dict[str, tuple[str, bool]] = dataclasses.field(default_factory=dict)


def differentiate(loss_of: Callable[[torch.dtype], tuple[torch.Tensor, dict[str, torch.Tensor]]]):
    """Loss and gradients in float64, then gradients in float32."""
    found = []
    for dtype in (torch.float64, torch.float32):
        loss, parameters = loss_of(dtype)
        loss.backward()
        found.append({k: p.grad.numpy().copy() for k, p in parameters.items() if p.grad is not None})
        exact = loss.item() if dtype == torch.float64 else exact  # noqa: F821
    return exact, *found


def name_in(module: torch.nn.Module, given: str, value: np.ndarray) -> tuple[str, bool]:
    """The module's name of a weight, and whether it is transposed: the exporter renames, transposes and ties."""
    known = dict(module.named_parameters())
    if given in known:
        return given, False
    for name, parameter in known.items():
        array = parameter.detach().numpy()
        for turned in (False, True):
            if np.array_equal(array.T if turned else array, value):
                return name, turned
    raise AssertionError("a weight that the module does not have")


def exported(make, inputs: dict[str, torch.Tensor], loss: str, target: torch.Tensor, **options) -> Case:
    """A module exported by torch.onnx.export(dynamo=True), its loss added by from_onnx."""
    torch.manual_seed(0)
    module = make()
    train = options.pop("train", False)
    values = {k: v.clone() for k, v in module.state_dict().items()}
    module.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, kwargs=inputs, dynamo=True, verbose=False, **{"opset_version": 18, "optimize": False, **options}
        )
    stream = io.BytesIO()
    program.save(stream)
    graph = ortgraph.from_onnx(stream.getvalue(), loss)

    def loss_of(dtype):
        twin = make().to(dtype).train(train)
        twin.load_state_dict(values)
        wide = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        output = twin(**wide)
        output = getattr(output, "logits", output)
        function = F.cross_entropy if loss == "cross_entropy" else F.mse_loss
        wanted = target.to(dtype) if target.is_floating_point() else target
        return function(output, wanted), dict(twin.named_parameters())

    renamed = {p.name: name_in(module, p.name, graph.values[p.name]) for p in graph.signature.trainable}
    name = "labels" if loss == "cross_entropy" else "targets"
    batch = {**{k: v.numpy() for k, v in inputs.items()}, name: target.numpy()}
    return Case(graph, batch, *differentiate(loss_of), renamed)


class Encoder(torch.nn.Module):
    def __init__(self, activation: str, norm_first: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(30, 16)
        layer = torch.nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)).mean(1))


class Convolutions(torch.nn.Module):
    def __init__(self, tail: str = "max") -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 6, 3, padding=1, bias=False), torch.nn.BatchNorm2d(6)
        self.second, self.again = torch.nn.Conv2d(6, 8, 3, stride=2), torch.nn.BatchNorm2d(8)
        self.short = torch.nn.Conv2d(3, 6, 1)
        self.head = torch.nn.Linear(8, 4)
        self.pool = torch.nn.MaxPool2d(2) if tail == "max" else torch.nn.AvgPool2d(2)

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x)) + self.short(x))
        h = torch.relu(self.again(self.second(self.pool(h))))
        return self.head(h.mean((2, 3)))


class Bag(torch.nn.Module):
    """An embedding classifier whose positions and words are two tables, with a tied projection."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(20, 12), torch.nn.Embedding(6, 12)
        self.norm, self.mix = torch.nn.LayerNorm(12), torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 20, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        h = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        h = self.norm(torch.tanh(self.mix(h)))
        return self.head(h).transpose(1, 2)


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(7, 16), torch.nn.GELU(approximate="tanh"), torch.nn.Linear(16, 16), torch.nn.SiLU(),
            torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Sigmoid(), torch.nn.Linear(16, 3),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def bert() -> torch.nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def tokens(*shape: int, below: int = 20) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(sum(shape)))


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


BATCH = torch.export.Dim("batch", min=2, max=64)
EXPORTED = {
    "encoder": lambda: exported(
        lambda: Encoder("gelu", False), {"ids": tokens(3, 7)}, "cross_entropy", tokens(3, below=5),
        dynamic_shapes={"ids": {0: BATCH}},
    ),
    "encoder_pre_norm_relu_21": lambda: exported(
        lambda: Encoder("relu", True), {"ids": tokens(3, 7)}, "cross_entropy", tokens(3, below=5),
        dynamic_shapes={"ids": {0: BATCH}}, opset_version=21,
    ),
    "convolutions": lambda: exported(
        Convolutions, {"x": floats(4, 3, 9, 9)}, "cross_entropy", tokens(4, below=4), train=True,
    ),
    "convolutions_average_20": lambda: exported(
        lambda: Convolutions("average"), {"x": floats(4, 3, 9, 9)}, "cross_entropy", tokens(4, below=4), train=True,
        opset_version=20, dynamic_shapes={"x": {0: BATCH}},
    ),
    "bag_20": lambda: exported(
        Bag, {"ids": tokens(4, 6)}, "cross_entropy", tokens(4, 6), opset_version=20, dynamic_shapes={"ids": {0: BATCH}},
    ),
    "perceptron": lambda: exported(Perceptron, {"x": floats(5, 7)}, "mse", floats(5, 3), optimize=True),
    "bert": lambda: exported(
        bert, {"input_ids": tokens(3, 6, below=40), "attention_mask": torch.ones(3, 6, dtype=torch.int64)},
        "cross_entropy", tokens(3, below=3),
    ),
}  # fmt: skip


def text_case(body: str, function, x_shape=(4, 6, 8), opset: int = 18, **shapes: tuple[int, ...]) -> Case:
    """A model in ONNX text from x and weights to y, mean squared error, and the same in PyTorch."""
    rng = np.random.default_rng(len(body))
    values = {k: (rng.standard_normal(s) * 0.4).astype(np.float32) for k, s in shapes.items()}
    dims = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in values.items())
    x = rng.standard_normal(x_shape).astype(np.float32)
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[{",".join(map(str, x_shape))}] x, {dims}) => (float{list(x_shape)} y) {{ {body} }}'
    )
    kept = [v for v in model.graph.input if v.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, k) for k, v in values.items())
    target = rng.standard_normal(x_shape).astype(np.float32)

    def loss_of(dtype):
        weights = {k: torch.tensor(v, dtype=dtype, requires_grad=True) for k, v in values.items()}
        y = function(torch.tensor(x, dtype=dtype), **weights)
        return F.mse_loss(y, torch.tensor(target, dtype=dtype)), weights

    return Case(ortgraph.from_onnx(model, "mse"), {"x": x, "targets": target}, *differentiate(loss_of))


def scalar(name: str, value: float) -> str:
    return f"{name} = Constant<value=float {{{value!r}}}>()"


LINEAR, SHAPES = "h = MatMul(x, w)", {"w": (8, 8), "b": (8,)}
GELU_ERF = f"{scalar('s', 2**0.5)} {scalar('one', 1.0)} {scalar('half', 0.5)} {LINEAR} a = Add(h, b) d = Div(a, s) e = Erf(d) f = Add(e, one)"
TANH = f"{scalar('k', 0.044715)} {scalar('c', (2 / np.pi) ** 0.5)} {scalar('one', 1.0)} {scalar('half', 0.5)} {scalar('three', 3.0)} {LINEAR} a = Add(h, b)"
NORM = f"{scalar('two', 2.0)} {scalar('eps', 1e-5)} axes = Constant<value_ints=[-1]>() {LINEAR} u = ReduceMean(h, axes) d = Sub(h, u)"
NORM_SHAPES = {"w": (8, 8), "g": (8,), "b": (8,)}


def gelu(x, w, b):
    return F.gelu(x @ w + b)


def gelu_tanh(x, w, b):
    return F.gelu(x @ w + b, approximate="tanh")


def layer_norm(x, w, g, b):
    return F.layer_norm(x @ w, (8,), g, b, 1e-5)


def attention(x, wq, wk, wv, wo):
    q, k, v = ((x @ m).reshape(4, 6, 2, 4).transpose(1, 2) for m in (wq, wk, wv))
    return (torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1) @ v).transpose(1, 2).reshape(4, 6, 8) @ wo


_SPLIT = " ".join(
    f"{n}0 = MatMul(x, w{n}) {n}1 = Reshape({n}0, split) {n}2 = Transpose<perm={p}>({n}1)"
    for n, p in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
)
ATTENTION = f"split = Constant<value_ints=[0,0,2,4]>() join = Constant<value_ints=[0,0,8]>() {scalar('r', 2.0)} {_SPLIT} s = MatMul(q2, k2) t = Div(s, r) m = Softmax<axis=-1>(t) o = MatMul(m, v2) p = Transpose<perm=[0,2,1,3]>(o) j = Reshape(p, join) y = MatMul(j, wo)"
HANDMADE = {
    "gelu_erf": lambda: text_case(GELU_ERF + " p = Mul(a, f) y = Mul(p, half)", gelu, **SHAPES),
    "gelu_erf_half_first": lambda: text_case(GELU_ERF + " p = Mul(half, a) y = Mul(p, f)", gelu, **SHAPES),
    "gelu_erf_half_last_operand": lambda: text_case(GELU_ERF + " p = Mul(f, half) y = Mul(a, p)", gelu, opset=20, **SHAPES),
    "gelu_tanh_power": lambda: text_case(TANH + " q = Pow(a, three) r = Mul(k, q) i = Add(a, r) j = Mul(c, i) t = Tanh(j) f = Add(one, t) p = Mul(half, a) y = Mul(p, f)", gelu_tanh, **SHAPES),
    "gelu_tanh_products": lambda: text_case(TANH + " q = Mul(a, a) r = Mul(q, k) v = Add(r, one) j = Mul(a, c) i = Mul(j, v) t = Tanh(i) f = Add(t, one) p = Mul(a, f) y = Mul(p, half)", gelu_tanh, **SHAPES),
    "norm_pow": lambda: text_case(NORM + " q = Pow(d, two) v = ReduceMean(q, axes) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) s = Mul(n, g) y = Add(s, b)", layer_norm, **NORM_SHAPES),
    "norm_mul_reciprocal": lambda: text_case(NORM + " q = Mul(d, d) v = ReduceMean(q, axes) e = Add(eps, v) r = Sqrt(e) i = Reciprocal(r) n = Mul(d, i) s = Mul(g, n) y = Add(b, s)", layer_norm, opset=20, **NORM_SHAPES),
    "norm_two_differences": lambda: text_case(NORM + " d2 = Sub(h, u) q = Pow(d2, two) v = ReduceMean(q, axes) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) s = Mul(n, g) y = Add(s, b)", layer_norm, opset=21, **NORM_SHAPES),
    "norm_17": lambda: text_case(NORM.replace("ReduceMean(h, axes)", "ReduceMean<axes=[-1]>(h)") + " q = Pow(d, two) v = ReduceMean<axes=[-1]>(q) e = Add(v, eps) r = Sqrt(e) n = Div(d, r) s = Mul(n, g) y = Add(s, b)", layer_norm, opset=17, **NORM_SHAPES),
    "attention": lambda: text_case(ATTENTION, attention, wq=(8, 8), wk=(8, 8), wv=(8, 8), wo=(8, 8)),
    "vector": lambda: text_case(f"{LINEAR} t = Transpose<perm=[0,2,1]>(h) m = MatMul(t, v) axes = Constant<value_ints=[1]>() n = Unsqueeze(m, axes) y = Mul(h, n)", lambda x, w, v: (x @ w) * ((x @ w).transpose(1, 2) @ v)[:, None], w=(8, 8), v=(6,)),
    "rotated": lambda: text_case("t = Transpose<perm=[1,0,2]>(x) h = MatMul(t, w) y = Transpose<perm=[1,0,2]>(h)", lambda x, w: x @ w, w=(8, 8)),
}  # fmt: skip


@functools.cache
def case_of(name: str) -> Case:
    return {**EXPORTED, **HANDMADE}[name]()


def require_right(case: Case, got: Arrays, where: str) -> float:
    """The design's measure of every gradient. Returns the largest error as a part of what is allowed."""
    named = {k: case.renamed.get(k, (k, False)) for k in got}
    got = {name: got[k].T if turned else got[k] for k, (name, turned) in named.items()}
    assert set(got) == set(case.exact)
    norm = np.linalg.norm
    median, worst = float(np.median([norm(v) for v in case.exact.values()])), 0.0
    for name, want in case.exact.items():
        assert got[name].shape == want.shape and got[name].dtype == np.float32, name
        zero = norm(want) <= 1e-9 * median
        allowed = 1e-6 * median if zero else 4 * norm(case.near[name] - want) + 1e-6 * norm(want)
        error = norm(got[name] - want)
        assert error <= allowed, f"{where}, {name}: error {error:.2e}, allowed {allowed:.2e}, norm {norm(want):.2e}"
        worst = max(worst, error / allowed)
    return worst


def sweep(case: Case, levels=LEVELS) -> float:
    worst = 0.0
    for level in levels:
        optimized = ortgraph.optimize(case.graph, level, verify="types").graph
        for threads in (1, 2):
            session = ortgraph.TrainingSession(optimized, threads=threads, poison=True)
            runs = [session.gradients(case.batch) for _ in range(2)]
            assert session.loss(case.batch) == pytest.approx(case.loss, rel=1e-5, abs=1e-6), level
            assert all(np.array_equal(runs[1][k], v) for k, v in runs[0].items()), f"{level}: runs differ"
            worst = max(worst, require_right(case, runs[0], f"{level}, {threads} threads"))
    return worst


@pytest.fixture(params=["kernels", "no_kernels"])
def with_kernels(request, monkeypatch):
    """With the compiled kernels, and as on a machine without a compiler."""
    if request.param == "no_kernels":
        monkeypatch.setattr(kernels, "_built", lambda: (None, "switched off"))
    elif not kernels.available():
        pytest.skip("no compiler")


QUICK = ("encoder", "bag_20", *HANDMADE)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*EXPORTED, *HANDMADE)]
)
def test_presets(name, with_kernels):
    sweep(case_of(name))
