"""Sparse tensors are refused where a trace makes them: some of PyTorch's own conversions end the process there."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from ortgraph.capture.torch_substitutes import Replacement, substitute
from ortgraph.errors import UnsupportedError

_MAKERS = (
    "Tensor.to_sparse", "Tensor.to_sparse_coo", "Tensor.to_sparse_csr", "Tensor.to_sparse_csc", "Tensor.to_sparse_bsr",
    "Tensor.to_sparse_bsc", "sparse_coo_tensor", "sparse_csr_tensor", "sparse_csc_tensor", "sparse_bsr_tensor",
    "sparse_bsc_tensor", "sparse_compressed_tensor",
)  # fmt: skip


def _refusal(name: str) -> Replacement:
    def refused(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return NotImplemented  # not traced
        raise UnsupportedError(
            f"{name} makes a sparse tensor, which has no translation to ONNX",
            "use dense tensors; the product with a sparse matrix is index_select, a multiplication and index_add",
        )

    return refused


for _name in _MAKERS:
    _owner = torch.Tensor if _name.startswith("Tensor.") else torch
    substitute(getattr(_owner, _name.removeprefix("Tensor.")))(_refusal(_name))
