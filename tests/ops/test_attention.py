"""Attention and its gradient against PyTorch's scaled_dot_product_attention in float64."""

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F

from ortgraph.errors import UnsupportedError
from ortgraph.ops.random import reference_mask


def problem(batch, heads, rows, keys, width, out, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(batch, heads, rows, width), (batch, heads, keys, width), (batch, heads, keys, out)]
    return [rng.standard_normal(s) for s in shapes]


def run_torch(qkv, mask, causal, scale):
    tensors = [torch.tensor(x, requires_grad=True) for x in qkv]
    bias = None if mask is None else torch.tensor(mask)
    if causal and bias is not None:
        rows, keys = qkv[0].shape[-2], qkv[1].shape[-2]
        bias = bias + torch.full((rows, keys), -torch.inf, dtype=torch.float64).triu(1)
    y = F.scaled_dot_product_attention(*tensors, attn_mask=bias, is_causal=causal and mask is None, scale=scale)
    dy = torch.tensor(np.random.default_rng(5).standard_normal(y.shape))
    y.backward(dy)
    scores = tensors[0] @ tensors[1].mT * (scale or qkv[0].shape[-1] ** -0.5)
    if bias is not None:
        scores = scores + bias
    elif causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=torch.float64).triu(1)
    total = torch.logsumexp(scores, -1)
    return [t.detach().numpy() for t in (y, total, dy, *(t.grad for t in tensors))]


def check(operator_case, qkv, mask, causal, scale):
    y, total, dy, *gradients = run_torch(qkv, mask, causal, scale)
    attributes = {"is_causal": int(causal), "scale": scale or qkv[0].shape[-1] ** -0.5}
    total = None if np.isneginf(total).any() else total  # nobody can use the value of a row without keys
    operator_case("Attention", [*qkv, mask], 2, **attributes).check([y, total], rtol=2e-6)
    case = operator_case("AttentionGrad", [dy, *qkv, y, np.zeros(y.shape[:-1]), mask], 3, **attributes)
    case.check(gradients, rtol=5e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "sizes", [(2, 3, 5, 5, 4, 4), (1, 2, 7, 3, 5, 2), (1, 1, 2, 9, 3, 3), (2, 2, 16, 16, 8, 8)], ids=str
)
def test_without_mask(operator_case, sizes, causal):
    check(operator_case, problem(*sizes), None, causal, None)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (2, 1, 6, 6), (6, 6), (2, 3, 6, 6)])
@pytest.mark.parametrize("low", [-np.inf, -3.4e38, -2.0])
def test_with_mask(operator_case, shape, low, causal):
    mask = np.where(np.random.default_rng(1).random(shape) < 0.3, low, 0.0)
    mask[..., 0] = 0.0
    check(operator_case, problem(2, 3, 6, 6, 4, 5), mask, causal, 0.25)


@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (2, 1, 6, 6)])
def test_fully_masked_rows_are_zero_as_in_pytorch(operator_case, shape):
    mask = np.zeros(shape)
    mask[1, ..., -1, :] = -np.inf
    qkv = problem(2, 3, 6, 6, 4, 4)
    assert not np.isnan(run_torch(qkv, mask, False, None)[0]).any()
    check(operator_case, qkv, mask, False, None)


def test_left_padding_with_causal_mask(operator_case):
    mask = np.zeros((2, 1, 1, 5))
    mask[1, ..., :2] = -np.inf  # the first rows of sample 1 see no key at all
    check(operator_case, problem(2, 2, 5, 5, 4, 4), mask, True, None)


def test_both_expansions_share_their_probabilities(operator_case):
    qkv = problem(1, 2, 4, 4, 3, 3)
    mask, y = np.zeros((1, 1, 1, 4)), np.zeros((1, 2, 4, 3))
    forward = operator_case("Attention", [*qkv, mask], 1, is_causal=1, scale=0.5).expanded(np.float32).graph
    inputs = [y, *qkv, y, np.zeros(y.shape[:-1]), mask]
    backward = operator_case("AttentionGrad", inputs, 3, is_causal=1, scale=0.5).expanded(np.float32).graph

    def chain(graph):
        nodes = list(graph)
        last = next(i for i, n in enumerate(nodes) if n.op_type == "Softmax")
        return [
            (n.op_type, tuple(sorted((k, str(a.value)) for k, a in n.attributes.items()))) for n in nodes[: last + 1]
        ]

    assert chain(forward) == chain(backward)
    assert not any(n.op_type == "ReduceLogSumExp" for n in forward)


def test_symbolic_shapes(operator_case):
    qkv = problem(2, 2, 4, 4, 3, 3)
    shapes = {0: ["b", 2, "s", 3], 1: ["b", 2, "s", 3], 2: ["b", 2, "s", 3]}
    case = operator_case("Attention", qkv, 1, scale=0.5, shapes=shapes)
    assert str(case.expanded(np.float32).graph.outputs[0].shape) == str(ir.Shape(["b", 2, "s", 3]))
    case.check([run_torch(qkv, None, False, 0.5)[0]])
    with pytest.raises(UnsupportedError, match="Attention"):
        operator_case("Attention", qkv, 1, scale=0.5, is_causal=1, shapes=shapes).expanded(np.float32)


def turned(*arrays):
    return [None if x is None else np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays]


@pytest.mark.parametrize("causal", [False, True])
def test_rows_first(operator_case, causal):
    """Heads as [B, S, H, D]: mask and LogSumExp stay as they are."""
    qkv = problem(2, 3, 5, 7, 4, 6)
    mask = np.where(np.random.default_rng(1).random((2, 1, 5, 7)) < 0.3, -np.inf, 0.0)
    mask[..., 0] = 0.0
    y, total, dy, *gradients = run_torch(qkv, mask, causal, 0.5)
    attributes = {"is_causal": int(causal), "scale": 0.5, "layout": "bshd"}
    operator_case("Attention", [*turned(*qkv), mask], 2, **attributes).check([*turned(y), total], rtol=2e-6)
    inputs = [*turned(dy, *qkv, y), np.zeros(y.shape[:-1]), mask]
    operator_case("AttentionGrad", inputs, 3, **attributes).check(turned(*gradients), rtol=5e-6)
    attributes["layout"] = "bhsd,bshd,bhsd,bshd"

    def lie(q, k, v):
        return [q, *turned(k), v]

    operator_case("Attention", [*lie(*qkv), mask], 2, **attributes).check([*turned(y), total], rtol=2e-6)
    inputs = [*turned(dy), *lie(*qkv), *turned(y), np.zeros(y.shape[:-1]), mask]
    operator_case("AttentionGrad", inputs, 3, **attributes).check(lie(*gradients), rtol=5e-6)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_groups_of_query_heads_share_keys(operator_case, layout):
    q, k, v = problem(2, 6, 5, 7, 4, 3)
    k, v = k[:, :2], v[:, :2]
    wide = [q, np.repeat(k, 3, 1), np.repeat(v, 3, 1)]
    y, total, dy, dq, dk, dv = run_torch(wide, None, False, 0.5)
    dk, dv = (x.reshape(2, 2, 3, *x.shape[2:]).sum(2) for x in (dk, dv))
    lay = turned if layout == "bshd" else (lambda *arrays: list(arrays))
    attributes = {"scale": 0.5, "layout": layout}
    operator_case("Attention", lay(q, k, v), 2, **attributes).check([*lay(y), total], rtol=2e-6)
    inputs = [*lay(dy, q, k, v, y), np.zeros(y.shape[:-1])]
    operator_case("AttentionGrad", inputs, 3, **attributes).check(lay(dq, dk, dv), rtol=5e-6)


def test_dropout_of_probabilities(operator_case):
    q, k, v = (torch.tensor(x, requires_grad=True) for x in problem(2, 3, 9, 17, 4, 4))
    keep = torch.tensor(reference_mask(5, 7, 3, (2, 3, 9, 17), 0.3) / 0.7)
    p = torch.softmax(q @ k.mT * 0.5, -1)
    y = (p * keep) @ v
    dy = torch.tensor(np.random.default_rng(5).standard_normal(y.shape))
    y.backward(dy)
    given = [x.detach().numpy() for x in (q, k, v)]
    draw = [np.array(5), np.array(7)]
    attributes = {"scale": 0.5, "ratio": 0.3, "node": 3}
    operator_case("Attention", [*given, None, *draw], 1, **attributes).check([y.detach().numpy()], rtol=2e-6)
    inputs = [dy.numpy(), *given, y.detach().numpy(), np.zeros(y.shape[:-1]), None, *draw]
    case = operator_case("AttentionGrad", inputs, 3, **attributes)
    case.check([x.grad.numpy() for x in (q, k, v)], rtol=5e-6)
