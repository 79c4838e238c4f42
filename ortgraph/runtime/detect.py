"""Which ONNX Runtime is installed. All its wheels share one module name: two of them break each other."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import re

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.targets import DEVICE_TARGETS, target_of

TRAINING = "onnxruntime-training"
STOCK = "onnxruntime"
_WHEELS = {
    "onnxruntime-training-cpu": TRAINING,
    "onnxruntime-training": TRAINING,
    "onnxruntime": STOCK,
    "onnxruntime-gpu": STOCK,
    "onnxruntime-rocm": STOCK,
    "onnxruntime-migraphx": STOCK,
}
TRAINING_VERSION = (1, 19, 2)
STOCK_MINIMUM = (1, 22)
TORCH_RANGE = ((2, 13), (2, 14))  # tested: from the first, below the second


@dataclasses.dataclass(frozen=True)
class Runtime:
    """The installed ONNX Runtime.

    Attributes:
        wheel: Name of the installed package.
        target: ``onnxruntime-training`` or ``onnxruntime``: which operators exist.
        version: Its version.
    """

    wheel: str
    target: str
    version: str


def installed_wheels() -> dict[str, str]:
    """Version by name of every installed ONNX Runtime package."""
    found = {}
    for wheel in _WHEELS:
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def choose_runtime(wheels: dict[str, str]) -> Runtime:
    """The one runtime among the installed packages.

    Raises:
        RuntimeSetupError: None or several are installed, or the version is not supported.
    """
    if not wheels:
        raise RuntimeSetupError("ONNX Runtime is not installed", 'pip install "ortgraph[cpu]" (or "ortgraph[stock]")')
    if len(wheels) > 1:
        names = sorted(wheels)
        keep = next((n for n in _WHEELS if n in wheels), names[0])
        raise RuntimeSetupError(
            f"{' and '.join(names)} are both installed; they overwrite each other's files",
            f"pip uninstall -y {' '.join(names)} && pip install {keep}=={wheels[keep]}",
        )
    ((wheel, version),) = wheels.items()
    target = _WHEELS[wheel]
    numbers = _numbers(version)
    if target == TRAINING and numbers[:3] != TRAINING_VERSION:
        raise RuntimeSetupError(
            f"{wheel} {version} is not supported", f"pip install {wheel}=={_dotted(TRAINING_VERSION)}"
        )
    if target == STOCK and numbers[:2] < STOCK_MINIMUM:
        raise RuntimeSetupError(f"{wheel} {version} is too old", f'pip install "{wheel}>={_dotted(STOCK_MINIMUM)}"')
    return Runtime(wheel, target, version)


@functools.lru_cache(maxsize=1)
def detect_runtime() -> Runtime:
    """The installed ONNX Runtime. Raises RuntimeSetupError when there is none, several, or an unsupported version."""
    return choose_runtime(installed_wheels())


def device_targets(runtime: Runtime) -> tuple[str, ...]:
    """Targets on devices whose provider the installed runtime was built with. Imports it."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    found = (target_of(text) for text in DEVICE_TARGETS)
    return tuple(t.text for t in found if t.runtime == runtime.target and t.provider.execution in there)


def check_torch(version: str | None) -> None:
    """Raise RuntimeSetupError when PyTorch is missing (None) or outside the tested range."""
    low, high = TORCH_RANGE
    if version is None:
        raise RuntimeSetupError("PyTorch is not installed", f'pip install "torch>={_dotted(low)},<{_dotted(high)}"')
    if not low <= _numbers(version)[:2] < high:
        raise RuntimeSetupError(
            f"PyTorch {version} is outside the tested range {_dotted(low)} to below {_dotted(high)}",
            f'pip install "torch>={_dotted(low)},<{_dotted(high)}"',
        )


def torch_version() -> str | None:
    """The installed PyTorch version, None when there is none. Does not import it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
