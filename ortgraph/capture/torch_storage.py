"""Tensors that share memory: PyTorch changes both when one is updated, a graph cannot."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ortgraph.errors import CaptureError


def refuse_shared_memory(parameters: Mapping[str, torch.Tensor], buffers: Mapping[str, torch.Tensor]) -> None:
    """Raise CaptureError when a trainable parameter overlaps another tensor of the module, or itself.

    One tensor under several names (tied weights) is no overlap: it is one graph input. What no step writes may
    overlap; buffers that a step writes are refused by the trace.

    Args:
        parameters: By user name, each tensor once.
        buffers: The same.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*parameters.items(), *buffers.items()):
        if tensor.numel() and tensor.layout == torch.strided and tensor.device.type != "meta":
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    for name, tensor in parameters.items():
        if not tensor.requires_grad or not tensor.numel() or tensor.layout != torch.strided:
            continue
        if not tensor.is_contiguous() and _positions(tensor).unique().numel() < tensor.numel():
            raise CaptureError(
                f"parameter {name} holds elements that share memory (strides {tensor.stride()}), as expand() makes "
                "them: an update of one would change the others",
                "make it torch.nn.Parameter(value.clone()), and expand it in forward()",
            )
        for other_name, other in by_storage.get(tensor.untyped_storage().data_ptr(), ()):
            if other is not tensor and _overlap(tensor, other):
                raise CaptureError(
                    f"{name} and {other_name} are different tensors that share memory: PyTorch changes both when "
                    f"{name} is updated",
                    "tie them as one parameter (b.weight = a.weight) and transpose or slice it in forward(), "
                    "or clone() one",
                )


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage have a byte in common."""
    (first, last), (low, high) = _extent(a), _extent(b)
    if last <= low or high <= first:
        return False
    if (a.is_contiguous() and b.is_contiguous()) or a.element_size() != b.element_size():
        return True
    return bool(torch.isin(_positions(a), _positions(b)).any())


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of the storage from the first element to behind the last."""
    size = tensor.element_size()
    start = int(tensor.storage_offset())
    span = sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + span + 1) * size


def _positions(tensor: torch.Tensor) -> torch.Tensor:
    """Position in the storage of every element."""
    positions = torch.zeros((), dtype=torch.int64)
    for axis, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[axis] = n
        positions = positions + (torch.arange(n) * stride).reshape(shape)
    return positions.flatten() + int(tensor.storage_offset())
