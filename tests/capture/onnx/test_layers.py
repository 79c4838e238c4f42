"""Convolutions, pools, normalizations, losses and fused operators on the data path, against central differences."""

# ruff: noqa: E501 - a model is one line of text

from __future__ import annotations

import numpy as np
import pytest

FINISH = " f1 = Sin(y) f2 = Mul(f1, y) loss = ReduceMean<keepdims=0>(f2) }"
# name -> (text, trainable)
LAYERS = {
    "Conv": ("y = Conv<pads=[1,0,0,1],strides=[2,1]>(x, c, a)", ["c", "a"]),
    "Conv_group": ("y = Conv<group=2,dilations=[2,1],pads=[2,1,2,1]>(x, kernel)", ["kernel"]),
    "Conv_same": ("y = Conv<auto_pad=\"SAME_UPPER\",strides=[2,2]>(x, c)", ["c"]),
    "Conv_input": ("t = Mul(x, p) y = Conv(t, c)", ["p", "c"]),
    "ConvTranspose": ("t = Mul(x, p) y = ConvTranspose<strides=[2,1],pads=[1,0,0,1],output_padding=[1,0]>(t, c, a)", ["c", "a", "p"]),
    "MaxPool": ("t = Mul(x, p) y = MaxPool<kernel_shape=[2,3],strides=[2,1],pads=[1,0,0,1]>(t)", ["p"]),
    "AveragePool": ("t = Mul(x, p) y = AveragePool<kernel_shape=[2,3],strides=[2,1],pads=[1,0,0,1]>(t)", ["p"]),
    "AveragePool_include": ("t = Mul(x, p) y = AveragePool<kernel_shape=[2,2],pads=[1,1,1,1],count_include_pad=1>(t)", ["p"]),
    "GlobalAveragePool": ("t = Mul(x, p) y = GlobalAveragePool(t)", ["p"]),
    "GlobalMaxPool": ("t = Mul(x, p) y = GlobalMaxPool(t)", ["p"]),
    "InstanceNormalization": ("t = Mul(x, p) y = InstanceNormalization(t, a, b)", ["p", "a", "b"]),
    "LpNormalization": ("t = Mul(x, p) y = LpNormalization<axis=1,p=2>(t)", ["p"]),
    "LpNormalization_1": ("t0 = Mul(x, p) t = Abs(t0) y = LpNormalization<axis=1,p=1>(t)", ["p"]),
    "LayerNormalization": ("t = Mul(x, p) y = LayerNormalization(t, l, l2)", ["p", "l", "l2"]),
    "LayerNormalization_axis": ("t = Mul(x, p) y = LayerNormalization<axis=2>(t, m)", ["p", "m"]),
    "DepthToSpace": ("t = Mul(x, p) y = DepthToSpace<blocksize=2>(t)", ["p"]),
    "DepthToSpace_CRD": ("t = Mul(x, p) y = DepthToSpace<blocksize=2,mode=\"CRD\">(t)", ["p"]),
    "Resize_nearest": ("t = Mul(x, p) sc = Constant<value_floats=[1.0,1.0,2.0,2.0]>() y = Resize<mode=\"nearest\",coordinate_transformation_mode=\"asymmetric\",nearest_mode=\"floor\">(t, , sc)", ["p"]),
    "Resize_linear": ("t = Mul(x, p) sz = Constant<value_ints=[2,4,7,3]>() y = Resize<mode=\"linear\">(t, , , sz)", ["p"]),
    "BatchNormalization_frozen": ("t = Mul(x, p) y = BatchNormalization(t, a, b, mean, var)", ["p", "a", "b"]),
}  # fmt: skip


def _values(rng: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {
        "c": (4, 4, 3, 2), "kernel": (4, 2, 3, 3), "p": (4, 5, 5), "a": (4,), "b": (4,), 
        "l": (5,), "l2": (5,), "m": (5, 5), "mean": (4,), "var": (4,),
    }  # fmt: skip
    values = {
        k: rng.uniform(0.2, 1.2, s).astype(np.float32) * rng.choice([-1, 1], s).astype(np.float32)
        for k, s in shapes.items()
    }
    return {**values, "var": np.abs(values["var"])}


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name, onnx_tools):
    rng = np.random.default_rng(len(name))
    text, trainable = LAYERS[name]
    used = {k: v for k, v in _values(rng).items() if k in trainable or k in ("mean", "var") and "BatchNorm" in name}
    inputs = ", ".join(f"float[{','.join(map(str, v.shape))}] {k}" for k, v in used.items())
    model = onnx_tools.make_model(
        f"g (float[2,4,5,5] x, {inputs}) => (float loss) {{ {text} {FINISH}", opset=21, **used
    )
    batch = {"x": rng.standard_normal((2, 4, 5, 5)).astype(np.float32)}
    onnx_tools.check_model(model, batch, trainable=trainable, train_batch_norm=False, tolerance=5e-5)
