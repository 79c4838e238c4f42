"""The Product kernel against float64: types, transposes, odd sizes, batches, epilogues, threads, in place, non-finite."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

onnxruntime = pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper  # noqa: E402

from ortgraph.ops import kernels  # noqa: E402

RNG = np.random.default_rng(11)
TYPES = {"f": (TensorProto.FLOAT, np.float32), "b": (TensorProto.BFLOAT16, ml_dtypes.bfloat16),
         "h": (TensorProto.FLOAT16, np.float16)}  # fmt: skip
UNIT = {"f": 2**-24, "b": 2**-9, "h": 2**-12}
ROUNDED = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


class ProductRunner:
    """One Product: float32 feeds are cast before and results behind it, since NumPy has no bfloat16."""

    def __init__(self, types, inputs, outputs=1, threads=2, **attributes):
        if not kernels.available():
            pytest.skip(kernels.reason())
        a, b, y = types
        self.feeds = {f"i{i}": np.array(x, np.float32, order="C") for i, x in enumerate(inputs) if x is not None}
        letters = {0: a, 1: b, 2: "f", 3: y}
        nodes, given = [], []
        for i, x in enumerate(inputs):
            low = x is not None and letters[i] != "f"
            if low:
                nodes.append(helper.make_node("Cast", [f"i{i}"], [f"c{i}"], to=TYPES[letters[i]][0]))
            given.append("" if x is None else f"c{i}" if low else f"i{i}")
        name = "Product" if y == "f" else f"Product_{y}"
        made = [f"r{o}" for o in range(outputs)]
        nodes.append(helper.make_node(name, given, made, domain="ortgraph.kernels", **attributes))
        nodes += [helper.make_node("Cast", [f"r{o}"], [f"o{o}"], to=TensorProto.FLOAT) for o in range(outputs)]
        graph = helper.make_graph(
            nodes,
            "product",
            [helper.make_tensor_value_info(k, TensorProto.FLOAT, x.shape) for k, x in self.feeds.items()],
            [helper.make_empty_tensor_value_info(f"o{o}") for o in range(outputs)],
        )
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("ortgraph.kernels", 1)]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4
        options.register_custom_ops_library(str(kernels.library_path()))
        self.session = onnxruntime.InferenceSession(
            helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString(),
            options, providers=["CPUExecutionProvider"],
        )  # fmt: skip

    def run(self):
        return self.session.run(None, self.feeds)


def rounded(x, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x, np.float32).astype(dtype).astype(np.float32)


def erf(x):
    return np.vectorize(math.erf, otypes=[np.float64])(x) if x.size else x


ACTIVATIONS = {
    "none": lambda z: z,
    "gelu": lambda z: z * 0.5 * (1 + erf(z / math.sqrt(2))),
    "gelu_tanh": lambda z: 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "relu": lambda z: np.maximum(z, 0),
    "silu": lambda z: z / (1 + np.exp(-z)),
    "tanh": np.tanh,
}


def reference(types, inputs, trans_a=0, trans_b=0, alpha=1.0, precision="fp32", activation="none"):
    """(Y, Z, bound of the error) in float64, from operands rounded to their types and to the precision."""
    a, b, bias, addend = [*inputs, None, None][:4]
    a, b = (rounded(rounded(x, TYPES[t][1]), ROUNDED[precision]).astype(np.float64)
            for x, t in zip((a, b), types, strict=False))  # fmt: skip
    a = a.swapaxes(-1, -2) if trans_a else a
    b = b.swapaxes(-1, -2) if trans_b else b
    z = alpha * (a @ b)
    bound = abs(alpha) * (np.abs(a) @ np.abs(b)) * 2**-22
    if bias is not None:
        z, bound = z + bias.astype(np.float64), bound + np.abs(bias) * 2**-22
    y = ACTIVATIONS[activation](z)
    if addend is not None:
        addend = rounded(addend, TYPES[types[2]][1]).astype(np.float64)
        y, bound = y + addend, bound + np.abs(addend) * 2**-22
    unit = UNIT[types[2]]
    return y, z, 1.2 * bound + 2 * unit * np.abs(y) + 1e-6 * (activation != "none"), 1.2 * bound + 2 * unit * np.abs(z)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def operands(m, n, k, trans_a, trans_b, batch_a=(), batch_b=()):
    a = numbers(*batch_a, *((k, m) if trans_a else (m, k)))
    b = numbers(*batch_b, *((n, k) if trans_b else (k, n)))
    return a, b


def check(types, inputs, outputs=1, threads=(1, 2), **attributes):
    named = {{"transA": "trans_a", "transB": "trans_b"}.get(k, k): v for k, v in attributes.items()}
    y, z, y_bound, z_bound = reference(types, inputs, **named)
    results = [ProductRunner(types, inputs, outputs, t, **attributes).run() for t in threads]
    for one in results[1:]:
        for first, other in zip(results[0], one, strict=True):
            assert np.array_equal(first, other)
    for found, wanted, bound in zip(results[0], (y, z), (y_bound, z_bound), strict=False):
        assert found.shape == wanted.shape
        assert (np.abs(found - wanted) <= bound).all(), np.abs(found - wanted).max()


SIZES = [(1, 1, 1), (7, 5, 3), (6, 64, 2), (13, 65, 31), (50, 130, 33), (5, 17, 0)]
LONG = [(97, 70, 2100), (300, 200, 1100), (3, 700, 1025)]


@pytest.mark.parametrize("trans", list(itertools.product((0, 1), (0, 1))))
@pytest.mark.parametrize("types,precision", [
    ("fff", "fp32"), ("fff", "bf16"), ("fff", "fp16"), ("bbb", "bf16"), ("hhh", "fp16"), ("bff", "bf16"),
])  # fmt: skip
def test_sizes_and_transposes(types, precision, trans):
    for m, n, k in SIZES:
        inputs = operands(m, n, k, *trans)
        check(types, inputs, threads=(2,), transA=trans[0], transB=trans[1], precision=precision)


@pytest.mark.parametrize("trans", list(itertools.product((0, 1), (0, 1))))
@pytest.mark.parametrize("types,precision", [("fff", "fp32"), ("bfb", "bf16"), ("fbf", "bf16")])
def test_several_blocks_and_pieces_at_any_number_of_threads(types, precision, trans):
    for m, n, k in LONG:
        inputs = operands(m, n, k, *trans)
        check(types, inputs, threads=(1, 2, 3), transA=trans[0], transB=trans[1], precision=precision)


@pytest.mark.parametrize("types", ["".join(t) for t in itertools.product("fbh", repeat=3)])
def test_every_combination_of_types(types):
    for precision in ("fp32", "bf16", "fp16"):
        a, b = operands(14, 35, 9, 0, 1)
        check(types, (a, b, numbers(35), numbers(14, 35)), 2, (2,), transB=1, precision=precision, activation="silu")


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("types", ["fff", "bbb"])
def test_epilogue(activation, types):
    a, b = operands(40, 70, 1030, 0, 0)
    bias, addend = numbers(70), numbers(40, 70)
    for given in ((a, b), (a, b, bias), (a, b, None, addend), (a, b, bias, addend)):
        check(types, given, 2, (1, 2), alpha=0.125, precision="bf16", activation=activation)


def test_activations_far_out_and_near_zero():
    x = np.concatenate([np.linspace(-30, 30, 1201), np.geomspace(1e-30, 1, 200), -np.geomspace(1e-30, 1, 199)])
    x = x.astype(np.float32)[:, None]
    for activation, function in ACTIVATIONS.items():
        y = ProductRunner("fff", (x, np.ones((1, 1), np.float32)), activation=activation).run()[0]
        wanted = function(x.astype(np.float64))
        assert (np.abs(y - wanted) <= 4e-6 * np.abs(wanted) + 1e-37).all() or activation in ("gelu_tanh", "gelu")
        assert (np.abs(y - wanted) <= 2e-6 * np.abs(wanted) + 2e-7).all(), activation


@pytest.mark.parametrize("batch_a,batch_b", [
    ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), ()), ((), (4,)), ((2, 1), (1, 3)), ((1,), (5, 2)), ((40,), (40,)),
    ((2, 3), (3,)), ((0,), (0,)), ((2, 0), ()),
])  # fmt: skip
def test_batches_broadcast(batch_a, batch_b):
    for trans in itertools.product((0, 1), (0, 1)):
        a, b = operands(9, 17, 6, *trans, batch_a, batch_b)
        shape = (*np.broadcast_shapes(batch_a, batch_b), 9, 17)
        inputs = (a, b, numbers(17), numbers(*shape))
        check("fff", inputs, threads=(1, 2), transA=trans[0], transB=trans[1])
        check("bbf", inputs, threads=(2,), transA=trans[0], transB=trans[1], precision="bf16")


@pytest.mark.parametrize("sizes", [(0, 5, 3), (4, 0, 3), (0, 0, 0), (4, 5, 0)])
def test_empty(sizes):
    m, n, _ = sizes
    a, b = operands(*sizes, 0, 0)
    bias = numbers(n)
    y = ProductRunner("fbf", (a, b, bias), precision="bf16").run()[0]
    assert np.array_equal(y, np.broadcast_to(bias, (m, n)))


@pytest.mark.parametrize("types,precision", [("fff", "fp32"), ("fff", "bf16"), ("bbb", "bf16"), ("hff", "fp16")])
def test_values_that_are_not_finite_stay_in_their_row_and_column(types, precision):
    a, b = operands(20, 70, 33, 0, 0)
    a[3, 4], a[7, 32], b[5, 60], b[32, 69] = np.nan, np.inf, -np.inf, np.nan
    y = ProductRunner(types, (a, b), precision=precision).run()[0]
    wanted = a.astype(np.float64) @ b.astype(np.float64)
    assert np.array_equal(np.isnan(y), np.isnan(wanted))
    infinite = np.isinf(wanted)
    assert infinite.any() and np.array_equal(y[infinite], wanted[infinite])
    assert np.isfinite(y[np.isfinite(wanted)]).all()


def test_rounding_to_the_precision_is_to_nearest_even_and_overflows():
    a = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, 65520, 1e-41]], np.float32)
    for precision in ("bf16", "fp16"):
        y = ProductRunner("fff", (a.T, np.ones((1, 1), np.float32)), precision=precision).run()[0][:, 0]
        wanted = rounded(a[0], ROUNDED[precision])
        wanted[-1] = 0 if precision == "bf16" else wanted[-1]
        # A subnormal bfloat16 may count as zero in the processor's own bfloat16 products.
        assert np.array_equal(y[:4], wanted[:4]) and y[4] in (wanted[4], rounded(a[0, 4], ROUNDED[precision]))


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_result_over_the_addend(kernel, activation):
    a, b = operands(130, 70, 1100, 1, 0)
    addend = numbers(130, 70)
    runner = kernel("Product", [a, b, None, addend], 1, transA=1, precision="bf16", activation=activation)
    expected = runner.run()
    assert np.array_equal(runner.run_inplace([(3, 0)], expected)[0], expected[0])


@pytest.mark.parametrize("outputs,read", [(2, "o1"), (2, "o0")])
def test_absent_outputs(kernel, outputs, read):
    a, b = operands(10, 70, 5, 0, 0)
    both = kernel("Product", [a, b], 2, activation="relu").run()
    one = kernel("Product", [a, b], outputs, activation="relu", absent=[f"o{1 - int(read[1])}"]).run()
    assert np.array_equal(one[0], both[int(read[1])])


def test_refusals(kernel):
    a, b = operands(4, 5, 6, 0, 0)
    for inputs, attributes in (
        ((a, b.T), {}), ((a, b, numbers(4)), {}), ((a, b, None, numbers(1, 5)), {}), ((a[0], b), {}),
        ((np.stack([a, a]), np.stack([b, b, b])), {}),
    ):  # fmt: skip
        with pytest.raises(Exception, match="Product"):
            kernel("Product", list(inputs), 1, **attributes).run()
    for attributes in ({"precision": "fp8"}, {"activation": "elu"}):
        with pytest.raises(Exception, match=next(iter(attributes))):
            kernel("Product", [a, b], 1, **attributes)


def test_scratch_bounds_grow_with_the_block_only():
    import onnx_ir as ir

    from ortgraph.ops.kernels.product_scratch import thread_bytes

    def of(m, n, k):
        a, b = (ir.val(name, ir.DataType.FLOAT, shape) for name, shape in (("a", [m, k]), ("b", [k, n])))
        return thread_bytes(ir.node("Product", [a, b], domain="ortgraph.kernels"))

    assert of(8, 8, 8) < of(64, 8, 8) < of(64, 64, 64) < of(4096, 4096, 4096) == of(9999, 9999, 9999) < 1.1 * 2**20


@pytest.mark.parametrize("types", ["fff", "bbb"])
@pytest.mark.parametrize("trans_a", [0, 1])
def test_bits_do_not_depend_on_pieces(types, trans_a):
    """Rows and columns of a product are those of the whole, however each is cut; k takes two blocks."""
    m, n, k = 300, 200, 1100
    a, b = RNG.standard_normal((m, k)), RNG.standard_normal((k, n))
    attributes = {"transA": trans_a, "precision": "bf16" if types == "bbb" else "fp32"}

    def run(rows, columns):
        left, right = a[rows], b[:, columns]
        (y,) = ProductRunner(types, [left.T if trans_a else left, right], **attributes).run()
        return y

    whole = run(slice(None), slice(None))
    for rows, columns in [
        (slice(0, 7), slice(None)),
        (slice(131, 300), slice(64, 128)),
        (slice(0, 299), slice(0, 192)),
    ]:
        np.testing.assert_array_equal(run(rows, columns), whole[rows, columns])
