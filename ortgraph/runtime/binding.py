"""Binding memory to inputs and outputs of an ONNX Runtime session, for every element type that has NumPy arrays.

ONNX Runtime's Python interface takes NumPy element types, which leaves bfloat16 out. Releases from 1.20 on take ONNX
element types too; the training build of 1.19.2 takes a DLPack tensor over the same memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortgraph.errors import RuntimeSetupError
from ortgraph.runtime.device import HOST, Buffer, Device, DeviceArray, address_of

if TYPE_CHECKING:
    import onnxruntime

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_DL_BFLOAT, _DL_NAME = 4, b"dltensor"
_DL_KINDS = {"cpu": 1, "cuda": 2}


def bind_input(binding: onnxruntime.IOBinding, name: str, array: Buffer) -> None:
    """Let a session read an input from the array, which must outlive the binding."""
    device = array.device if isinstance(array, DeviceArray) else HOST
    bind_input_at(binding, name, array.dtype, array.shape, address_of(array), device)


def bind_input_at(
    binding: onnxruntime.IOBinding,
    name: str,
    dtype: np.dtype,
    shape: Sequence[int],
    address: int,
    device: Device = HOST,
) -> None:
    """Let a session read an input at an address of a device."""
    _bind(binding, "input", name, dtype, shape, address, device)


def bind_output(
    binding: onnxruntime.IOBinding,
    name: str,
    dtype: np.dtype,
    shape: Sequence[int],
    address: int,
    device: Device = HOST,
) -> None:
    """Let a session write an output at an address of a device."""
    _bind(binding, "output", name, dtype, shape, address, device)


def _bind(
    binding: onnxruntime.IOBinding,
    kind: str,
    name: str,
    dtype: np.dtype,
    shape: Sequence[int],
    address: int,
    at: Device,
) -> None:
    if dtype == _BFLOAT16:
        _bind_bfloat16(binding, kind, name, shape, address, at)
        return
    bind = binding.bind_input if kind == "input" else binding.bind_output
    bind(name, at.name, at.index, dtype, list(shape), address)


def copy_of(value: onnxruntime.OrtValue) -> np.ndarray:
    """A copy of what the runtime allocated for an output."""
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy().copy()
    shape = tuple(value.shape())
    raw = (ctypes.c_uint8 * (2 * math.prod(shape))).from_address(value.data_ptr())
    return np.frombuffer(raw, _BFLOAT16).reshape(shape).copy()


def _bind_bfloat16(
    binding: onnxruntime.IOBinding, side: str, name: str, shape: Sequence[int], address: int, device: Device
) -> None:
    from ortgraph.runtime.detect import TRAINING, detect_runtime

    if detect_runtime().target == TRAINING:
        from onnxruntime.capi import _pybind_state

        inner: Any = binding._iobinding  # noqa: SLF001 - the public form does not take OrtValues of the C layer
        value = _over_memory(_pybind_state.OrtValue.from_dlpack, shape, address, device)
        getattr(inner, f"bind_ortvalue_{side}")(name, value)
        return
    try:
        bind = binding.bind_input if side == "input" else binding.bind_output
        bind(name, device.name, device.index, int(ir.DataType.BFLOAT16), list(shape), address)
    except (RuntimeError, TypeError) as error:
        raise RuntimeSetupError(
            f"this ONNX Runtime cannot bind %{name}, a bfloat16 {side}: {error}", "onnxruntime 1.22 or later"
        ) from error


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    """DLPack's DLTensor, version 0: row-major where strides are null."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """DLManagedTensor; the deleter is called when ONNX Runtime lets the value go."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_alive: dict[int, tuple[_Managed, Any]] = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _release(managed: int) -> None:
    _alive.pop(managed, None)


def _over_memory(
    from_dlpack: Callable[[Any, bool], Any], shape: Sequence[int], address: int, device: Device = HOST
) -> Any:
    """An OrtValue of bfloat16 over memory that stays the caller's."""
    dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    tensor = _Tensor(
        address, _Device(_DL_KINDS[device.name], device.index), len(shape), _Type(_DL_BFLOAT, 16, 1), dims, None, 0
    )
    managed = _Managed(tensor, None, ctypes.cast(_release, ctypes.c_void_p))
    at = ctypes.addressof(managed)
    _alive[at] = (managed, dims)
    capsule = _new_capsule(at, _DL_NAME, None)
    return from_dlpack(capsule, False)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
