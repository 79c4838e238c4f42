"""Where a session's memory is: on the host, in NumPy arrays, or on a device, in arrays that are copied when read.

Only what a session does with a persistent array is there: ``array[...] = value``, ``copy()``, ``fill``, ``float(array)``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ortgraph.errors import InputError, RuntimeSetupError
from ortgraph.graph import TrainingGraph
from ortgraph.ops.providers import CPU
from ortgraph.ops.spec import GENERATED, KERNELS
from ortgraph.ops.targets import TRAINING, Target, target_of

if TYPE_CHECKING:
    import onnxruntime


@dataclasses.dataclass(frozen=True)
class Device:
    """A place for memory, and the providers that compute there.

    Attributes:
        name: What ONNX Runtime's Python interface calls it: ``cpu``, ``cuda``.
        index: Which of several.
        providers: For ``InferenceSession``, first choice first.
        on_host: Whether memory is NumPy's.
    """

    name: str = CPU.device
    index: int = 0
    providers: tuple[str, ...] = (CPU.execution,)
    on_host: bool = True

    def session_providers(self) -> list[Any]:
        """The providers with their options: the device's number for those that have one."""
        return [p if p == CPU.execution else (p, {"device_id": str(self.index)}) for p in self.providers]

    def check_session(self, session: onnxruntime.InferenceSession) -> None:
        """Raise RuntimeSetupError when the runtime fell back on other providers, as it does without its libraries."""
        used = session.get_providers()
        if self.providers[0] not in used:
            raise RuntimeSetupError(
                f"{self.providers[0]} did not start; ONNX Runtime uses {', '.join(used)}",
                "install the device's driver and libraries in the versions that this ONNX Runtime was built for",
            )


HOST = Device()


def device_of(target: str) -> Device:
    """The device of a target.

    Raises:
        InputError: There is no such target.
        RuntimeSetupError: The installed ONNX Runtime has no such provider.
    """
    found = target_of(target)
    if found.on_cpu:
        return HOST
    require_provider(found)
    return Device(found.provider.device, 0, (found.provider.execution, CPU.execution), on_host=False)


def require_provider(target: Target) -> None:
    """Raise RuntimeSetupError when the installed ONNX Runtime lacks the target's provider."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    if target.provider.execution in there:
        return
    raise RuntimeSetupError(
        f"target {target.text}: the installed ONNX Runtime {onnxruntime.__version__} has no {target.provider.execution} "
        f"(it has {', '.join(there)})",
        _package(target),
    )


def _package(target: Target) -> str:
    if target.provider.name == "cuda":
        if target.runtime == TRAINING:
            return 'pip uninstall -y onnxruntime-training-cpu && pip install "ortgraph[cuda]" (Python below 3.12)'
        return 'pip uninstall -y onnxruntime && pip install "ortgraph[stock-gpu]"'
    return f"install a build of {target.runtime} with {target.provider.execution} in place of the present one"


class DeviceArray:
    """An array in device memory. Every read is a copy.

    Args:
        dtype: Any element type with NumPy arrays.
        shape: Its shape.
        device: Not the host.

    Raises:
        RuntimeSetupError: The device has no memory for it, or ONNX Runtime no access to the device.
    """

    def __init__(self, dtype: np.dtype, shape: tuple[int, ...], device: Device) -> None:
        import onnxruntime

        self.dtype, self.shape, self.device = np.dtype(dtype), tuple(shape), device
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize
        try:
            self._value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                [max(self.nbytes, 1)], np.uint8, device.name, device.index
            )
        except Exception as error:  # noqa: BLE001 - the runtime's exception types are private; the cause is chained
            raise RuntimeSetupError(
                f"no memory of {self.nbytes} bytes on {device.name}:{device.index}: {error}",
                "a smaller batch, or a memory budget; when nothing fits, check the driver",
            ) from error

    @property
    def address(self) -> int:
        return self._value.data_ptr()

    def __setitem__(self, key: Any, value: Any) -> None:
        """``array[...] = value``: broadcast, converted, copied to the device."""
        assert key is Ellipsis, "only whole device arrays are written"
        whole = np.empty(self.shape, self.dtype)
        whole[...] = np.asarray(value)
        self._write(whole)

    def fill(self, value: Any) -> None:
        self._write(np.full(self.shape, value, self.dtype))

    def _write(self, whole: np.ndarray) -> None:
        raw = whole.reshape(-1).view(np.uint8)
        self._value.update_inplace(raw if self.nbytes else np.zeros(1, np.uint8))

    def copy(self) -> np.ndarray:
        """The values, on the host."""
        raw = self._value.numpy()[: self.nbytes].copy()  # why: on the host numpy() is a view
        return raw.view(self.dtype).reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.copy()
        return found if dtype is None else found.astype(dtype, copy=False)

    def __float__(self) -> float:
        return float(self.copy())

    def item(self) -> Any:
        return self.copy().item()


Buffer = np.ndarray | DeviceArray


def address_of(buffer: Buffer) -> int:
    """Where the buffer begins, on its device."""
    return buffer.address if isinstance(buffer, DeviceArray) else buffer.ctypes.data


def check_for_device(graph: TrainingGraph, target: str, poison: bool) -> None:
    """Raise InputError where a graph or an option is for the processor only."""
    if poison:
        raise InputError(f"poison=True checks memory of the host, not of {target}", "a target of the CPU")
    lowered = graph.stage in ("lowered", "planned")
    if lowered and any(node.domain in (KERNELS, GENERATED) for node in graph.graph):
        raise InputError(
            f"the graph was lowered to kernels of the processor; {target} does not run them",
            f"ortgraph.optimize(..., target={target!r})",
        )
