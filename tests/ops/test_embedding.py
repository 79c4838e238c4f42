"""Embedding gradients against PyTorch autograd in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ortgraph.errors import UnsupportedError


def problem(rows, width, index_shape, padding, dtype=np.int64):
    rng = np.random.default_rng(0)
    indices = rng.integers(0, rows, index_shape)
    dy = rng.standard_normal((*index_shape, width))
    table = torch.zeros((rows, width), dtype=torch.float64, requires_grad=True)
    F.embedding(torch.tensor(indices), table, padding_idx=None if padding < 0 else padding).backward(torch.tensor(dy))
    return dy, indices.astype(dtype), table.grad.numpy()


@pytest.mark.parametrize("padding", [-1, 0, 2])
@pytest.mark.parametrize(
    "rows,width,index_shape", [(5, 3, (9,)), (3, 17, (4, 7)), (3, 1, (2, 3, 2)), (7, 4, ()), (4, 2, (0,))]
)
def test_embedding_gradient(operator_case, rows, width, index_shape, padding):
    dy, indices, want = problem(rows, width, index_shape, padding)
    operator_case("EmbeddingGrad", [dy, indices], rows=rows, padding_idx=padding).check([want])


def test_int32_indices_and_symbolic_rows(operator_case):
    dy, indices, want = problem(5, 3, (4, 2), 1, np.int32)
    shapes = {0: ["batch", "sequence", 3], 1: ["batch", "sequence"]}
    operator_case("EmbeddingGrad", [dy, indices], shapes=shapes, rows=5, padding_idx=1).check([want])


def test_repeated_rows_are_right_at_two_threads(operator_case):
    dy, indices, want = problem(2, 64, (4096,), -1)
    case = operator_case("EmbeddingGrad", [dy, indices], rows=2)
    results = [case.runtime(2)[0] for _ in range(4)]
    assert all(np.array_equal(results[0], r) for r in results)
    np.testing.assert_allclose(results[0], want, rtol=1e-4, atol=1e-3)


def test_symbolic_width_is_refused_by_name(operator_case):
    dy, indices, _ = problem(5, 3, (4,), -1)
    with pytest.raises(UnsupportedError, match="EmbeddingGrad.*dY(.|\n)*bind the symbolic dimensions first"):
        operator_case("EmbeddingGrad", [dy, indices], shapes={0: ["n", "width"]}, rows=5).expanded(np.float32)
