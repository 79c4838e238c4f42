"""Each operator on the data path: loss and gradients against central differences in float64, at 1 and 2 threads."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import zlib

import numpy as np
import pytest

# name -> (shape of the weight, text of y as a function of w, extra declarations, extra values)
SMOOTH = {
    "Acos": "y = Acos(s)", "Acosh": "t = Add(w2, four) y = Acosh(t)", "Asin": "y = Asin(s)", "Asinh": "y = Asinh(w)",
    "Atan": "y = Atan(w)", "Atanh": "y = Atanh(s)", "Celu": "y = Celu<alpha=0.7>(w)", "Cosh": "y = Cosh(w)",
    "Elu": "y = Elu<alpha=0.6>(w)", "HardSigmoid": "y = HardSigmoid(w)", "HardSwish": "y = HardSwish(w)",
    "LeakyRelu": "y = LeakyRelu<alpha=0.1>(w)", "LeakyRelu_negative": "y = LeakyRelu<alpha=-0.3>(w)",
    "Mish": "y = Mish(w)", "Selu": "y = Selu(w)", "Shrink": "y = Shrink<bias=0.1,lambd=0.3>(w)", "Sinh": "y = Sinh(w)",
    "Softplus": "y = Softplus(w)", "Softsign": "y = Softsign(w)", "Tan": "y = Tan(s)",
    "ThresholdedRelu": "y = ThresholdedRelu<alpha=0.2>(w)",
    "Abs": "y = Abs(w)", "Cos": "y = Cos(w)", "Exp": "y = Exp(w)", "Sin": "y = Sin(w)",
    "Log": "t = Add(w2, three) y = Log(t)", "Sqrt": "t = Add(w2, three) y = Sqrt(t)", "Neg": "y = Neg(w)",
    "Reciprocal": "t = Add(w2, three) y = Reciprocal(t)", "Relu": "y = Relu(w)", "Sigmoid": "y = Sigmoid(w)",
    "Tanh": "y = Tanh(w)", "Identity": "y = Identity(w)", "Softmax": "y = Softmax<axis=1>(w)",
    "LogSoftmax": "y = LogSoftmax<axis=0>(w)", "Clip": "y = Clip(w, low, high)", "Clip_one": "y = Clip(w, low)",
    "Clip_upper": "y = Clip(w, , high)",
    "Pow_2": "y = Pow(w, two)", "Pow_3": "y = Pow(w, three)", "Pow_half": "t = Add(w2, three) y = Pow(t, half)",
    "Pow_other": "t = Add(w2, three) y = Pow(t, high)",
    "Floor": "f = Floor(w) y = Mul(f, w)", "Round_Sign": "r = Round(w) g = Sign(w) t = Add(r, g) y = Mul(t, w)",
    "Sum": "y = Sum(w, w2, v)", "Sum_one": "y = Sum(w)", "Mean": "y = Mean(w, v, w2)", "Max": "y = Max(w, v, low)",
    "Min": "y = Min(w, v)", "Max_one": "y = Max(w)", "PRelu": "y = PRelu(w, v)", "Add": "y = Add(w, v)",
    "Sub": "y = Sub(v, w)", "Mul": "y = Mul(w, v)", "Div": "t = Add(w2, three) y = Div(v, t)", "Where": "c = Greater(w, v) y = Where(c, w, w2)",
    "CastLike": "y = CastLike(w, v)", "Expand": "sh = Constant<value_ints=[2,4,6]>() y = Expand(w, sh)",
    "CumSum": "ax = Constant<value_int=1>() y = CumSum(w, ax)",
    "CumSum_exclusive_reverse": "ax = Constant<value_int=0>() y = CumSum<exclusive=1,reverse=1>(w, ax)",
    "Transpose": "y = Transpose<perm=[1,0]>(w)", "Concat": "y = Concat<axis=1>(w, w2)", "Flatten": "y = Flatten<axis=0>(w)",
    "Tile": "r = Constant<value_ints=[2,3]>() y = Tile(w, r)", "Trilu": "y = Trilu<upper=0>(w)",
    "Slice": "a = Constant<value_ints=[1]>() b = Constant<value_ints=[3]>() ax = Constant<value_ints=[-1]>() y = Slice(w, a, b, ax)",
    "Slice_step": "a = Constant<value_ints=[5]>() b = Constant<value_ints=[0]>() ax = Constant<value_ints=[1]>() st = Constant<value_ints=[-2]>() y = Slice(w, a, b, ax, st)",
    "Split": "p, q = Split<axis=1,num_outputs=2>(w) t = Mul(p, q) y = Sub(t, p)",
    "Squeeze": "ax = Constant<value_ints=[0]>() t = Unsqueeze(w, ax) z = Mul(t, t) y = Squeeze(z, ax)",
    "Reshape": "sh = Constant<value_ints=[-1,8]>() y = Reshape(w, sh)",
    "Pad": "p = Constant<value_ints=[1,0,0,2]>() y = Pad(w, p)",
    "Gather_rows": "i = Constant<value_ints=[0,2,2,-1]>() y = Gather(w, i)",
    "Gather_columns": "i = Constant<value_ints=[0,2,2,-1]>() y = Gather<axis=1>(w, i)",
    "GatherElements": "i = Constant<value=int64[2,6] {0,1,-1,3,3,2,0,0,1,1,2,-2}>() y = GatherElements<axis=0>(w, i)",
    "GatherND": "i = Constant<value=int64[2,2] {0,1,3,2}>() y = GatherND(w, i)",
    "ScatterElements": "i = Constant<value=int64[1,2] {1,3}>() u = Constant<value=float[1,2] {1.0,2.0}>() t = ScatterElements<axis=1>(w, i, u) y = Mul(t, w)",
    "ScatterND": "i = Constant<value=int64[1,1] {1}>() a = Constant<value_ints=[0]>() b = Constant<value_ints=[1]>() u = Slice(w2, a, b) y = ScatterND(w, i, u)",
    "TopK": "kk = Constant<value_ints=[2]>() y, i = TopK(w, kk)",
    "Einsum_matmul": 'y = Einsum<equation="ij,kj->ik">(w, w2)', "Einsum_outer": 'y = Einsum<equation="ij,ij->ji">(w, w2)',
    "Einsum_sum": 'y = Einsum<equation="ij->j">(w)', "Einsum_implicit": 'y = Einsum<equation="ji,jk">(w, w2)',
    "Einsum_three": 'y = Einsum<equation="ij,kj,kl->il">(w, w2, w)', "Einsum_broadcast": 'y = Einsum<equation="...j,j->...">(w, v)',
    "MatMul_vector": "y = MatMul(w, v)", "MatMul_vectors": "y = MatMul(v, v)", "Slice_far": "a = Constant<value_ints=[-3]>() b = Constant<value_ints=[9223372036854775807]>() ax = Constant<value_ints=[1]>() y = Slice(w, a, b, ax)", "Where_scalar": "m = ReduceSum<keepdims=0>(w) c = Greater(m, low) y = Where(c, m, low)", "Where_broadcast": "c = Greater(w, v) y = Where(c, v, w2)", "Where_both": "c = Greater(w, v) y = Where(c, v, v)", "Gemm": "y = Gemm<transB=1,alpha=0.5>(w, w2)",
    "Gemm_column": "c = Slice(w, zero1, one1, one1) y = Gemm<transB=1,beta=2.0>(w, w2, c)",
}  # fmt: skip
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def _weights(shape: tuple[int, ...], seed: str) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(seed.encode()))
    return (rng.permutation(np.linspace(-1.5, 1.5, int(np.prod(shape)))) + 0.01).reshape(shape).astype(np.float32)


PRELUDE = """
    two = Constant<value=float {2.0}>() three = Constant<value=float {3.0}>() half = Constant<value=float {0.5}>() four = Constant<value=float {4.0}>()
    low = Constant<value=float {-0.4}>() high = Constant<value=float {0.7}>() zero1 = Constant<value_ints=[0]>()
    one1 = Constant<value_ints=[1]>() w2 = Mul(w, k) s = Mul(w, half)
"""
FINISH = " f1 = Sin(y) f2 = Mul(f1, y) loss = ReduceMean<keepdims=0>(f2) }"


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient(name, onnx_tools):
    text = "g (float[4,6] w, float[4,6] k, float[6] v) => (float loss) {" + PRELUDE + SMOOTH[name] + FINISH
    values = {"w": _weights((4, 6), name), "k": _weights((4, 6), name + "k"), "v": _weights((6,), name + "v")}
    onnx_tools.check_model(
        onnx_tools.make_model(text, **values),
        {},
        trainable=["w", "v"] if "v" in SMOOTH[name].replace("value", "") else ["w"],
    )


@pytest.mark.parametrize("kind", REDUCTIONS)
def test_reduction(kind, onnx_tools):
    """Six forms in one model, each on a weight of its own: with axes, negative axes and none; dimensions kept or not."""
    forms = [(keep, axes) for keep in (0, 1) for axes in ("[1]", "[0, -1]", None)]
    parts, losses = [], []
    for i, (keep, axes) in enumerate(forms):
        parts.append(f"p{i} = {'Exp' if 'Log' in kind else 'Identity'}(w{i})")
        given = f", ax{i}" if axes else ""
        parts.append(f"ax{i} = Constant<value_ints={axes or [0]}>() y{i} = Reduce{kind}<keepdims={keep}>(p{i}{given})")
        parts.append(f"s{i} = Sin(y{i}) m{i} = ReduceMean<keepdims=0>(s{i})")
        losses.append(f"m{i}")
    inputs = ", ".join(f"float[2,3,4] w{i}" for i in range(len(forms)))
    text = f"g ({inputs}) => (float loss) {{ {' '.join(parts)} loss = Sum({', '.join(losses)}) }}"
    weights = {f"w{i}": _weights((2, 3, 4), f"{kind}{i}") for i in range(len(forms))}
    onnx_tools.check_model(onnx_tools.make_model(text, **weights), {}, tolerance=5e-5)
