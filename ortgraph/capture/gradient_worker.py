"""The process that differentiates: ``python gradient_worker.py FOLDER``. It imports nothing but ONNX Runtime's core.

Reads ``forward.onnx`` and ``request.json``; writes ``joint.onnx``, or ``error.txt`` when the builder refuses.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import types

MISSING = 3  # exit code: no gradient builder in this environment


def _extension() -> types.ModuleType:
    """ONNX Runtime's extension module alone: the package around it imports PyTorch, which takes seconds."""
    package = importlib.util.find_spec("onnxruntime")
    if package is None or not package.submodule_search_locations:
        raise ImportError("onnxruntime is not installed")
    name = "onnxruntime_pybind11_state"
    folder = pathlib.Path(package.submodule_search_locations[0], "capi")
    for path in sorted(folder.glob(f"{name}*")):
        if path.suffix not in (".so", ".pyd"):
            continue
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"no extension module in {folder}")


def work(folder: pathlib.Path) -> int:
    request = json.loads((folder / "request.json").read_text())
    try:
        builder_type = _extension().GradientGraphBuilder
    except (ImportError, AttributeError) as error:
        (folder / "error.txt").write_text(str(error))
        return MISSING
    try:
        model = (folder / "forward.onnx").read_bytes()
        builder = builder_type(model, {request["loss"]}, set(request["parameters"]), request["loss"])
        builder.build()
        joint = builder.get_model()
    except RuntimeError as error:
        (folder / "error.txt").write_text(str(error))
        return 1
    (folder / "joint.onnx").write_bytes(joint)
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are no top-level packages
    sys.exit(work(pathlib.Path(sys.argv[1])))
