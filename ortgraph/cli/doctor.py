"""``ortgraph doctor``: is this machine set up, and does a build file capture?"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import platform
from typing import Annotated, Any

import typer

from ortgraph.cli import options
from ortgraph.cli.output import FAILED, Output, verb
from ortgraph.errors import CaptureError, OrtgraphError, RuntimeSetupError
from ortgraph.manager import graph_cache

_LIBRARIES = ("numpy", "onnx", "onnx-ir", "onnxscript", "safetensors", "transformers")


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the diagnosis. ``state`` is ``ok``, ``note`` (works without) or ``problem``."""

    what: str
    state: str
    detail: str
    hint: str = ""


@verb
def run(
    target: Annotated[
        str | None, typer.Argument(metavar="[FILE.py:BUILD]", help="Also capture this and compare its gradients.")
    ] = None,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Remove the compiled graphs that are kept.")
    ] = False,
    as_json: bool = options.JSON,
) -> None:
    """Check Python, libraries, runtime, compiler and kernels; with a build file, also capture it and compare."""
    out = Output(as_json)
    if clear_cache:
        out.say(f"{graph_cache.clear()} compiled graphs removed")
    findings = [
        *_libraries(),
        _torch(),
        _runtime(),
        *_devices(),
        _kernels(out),
        _generated(),
        _planners(),
        _graphs(),
        _processor(),
        *_blas(),
    ]
    if target is not None and not any(f.state == "problem" for f in findings):
        findings += _try_build(out, target)
    out.table("Setup", ("what", "state", "detail"), [(f.what, f.state, f.detail) for f in findings])
    problems = [f for f in findings if f.state == "problem"]
    for f in problems:
        out.say(f"{f.what}: {f.detail}" + (f"\n  try: {f.hint}" if f.hint else ""))
    out.say("everything needed is there" if not problems else f"{len(problems)} problems")
    out.result({"ok": not problems, "findings": [dataclasses.asdict(f) for f in findings]})
    if problems:
        raise typer.Exit(FAILED)


def _libraries() -> list[Finding]:
    import importlib.metadata

    from ortgraph import __version__

    findings = [
        Finding("ortgraph", "ok", __version__),
        Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}"),
    ]
    for name in _LIBRARIES:
        try:
            findings.append(Finding(name, "ok", importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            optional = name == "transformers"
            hint = "" if optional else f"pip install {name}"
            findings.append(Finding(name, "note" if optional else "problem", "not installed", hint))
    return findings


def _torch() -> Finding:
    from ortgraph.runtime.detect import check_torch, torch_version

    version = torch_version()
    if version is None:
        return Finding(
            "torch", "note", "not installed: graphs run, but models cannot be captured", 'pip install "ortgraph[cpu]"'
        )
    try:
        check_torch(version)
    except RuntimeSetupError as error:
        return Finding("torch", "problem", error.what, error.hint)
    return Finding("torch", "ok", version)


def _runtime() -> Finding:
    from ortgraph.runtime.detect import detect_runtime

    try:
        runtime = detect_runtime()
    except RuntimeSetupError as error:
        return Finding("onnxruntime", "problem", error.what, error.hint)
    try:
        import onnxruntime
    except ImportError as error:
        return Finding(
            "onnxruntime", "problem", f"{runtime.wheel} {runtime.version} does not import: {error}", "install it again"
        )
    loaded = onnxruntime.__version__
    if loaded.split("+")[0] != runtime.version.split("+")[0]:
        what = f"{runtime.wheel} {runtime.version} is installed but version {loaded} is imported"
        return Finding(
            "onnxruntime", "problem", what, f"pip install --force-reinstall {runtime.wheel}=={runtime.version}"
        )
    return Finding("onnxruntime", "ok", f"{runtime.wheel} {runtime.version}, target {runtime.target}")


def _devices() -> list[Finding]:
    """Providers beside the processor's; nothing where the runtime itself is missing."""
    from ortgraph.runtime.detect import detect_runtime, device_targets

    try:
        found = device_targets(detect_runtime())
    except (RuntimeSetupError, ImportError):
        return []
    detail = (
        f"targets {', '.join(found)} (docs/gpu.md)" if found else "none: this ONNX Runtime computes on the processor"
    )
    return [Finding("devices", "ok", detail)]


def _planners() -> Finding:
    if importlib.util.find_spec("scipy") is None:
        return Finding(
            "planners", "note", "SciPy is absent: recompute plans come from search alone (pip install scipy)"
        )
    return Finding("planners", "ok", "SciPy: integer programs for recompute plans")


def _graphs() -> Finding:
    kept = graph_cache.entries()
    size = sum(size for _, size in kept) / 1e6
    return Finding(
        "compiled graphs", "ok", f"{len(kept)} kept, {size:.1f} MB in {graph_cache.folder()} (--clear-cache)"
    )


def _kernels(out: Output) -> Finding:
    from ortgraph.ops import kernels

    with out.progress("building kernels"):
        there = kernels.available()
    if there:
        return Finding("kernels", "ok", str(kernels.library_path()))
    return Finding("kernels", "note", f"not available, lowering goes without: {kernels.reason()}")


def _generated() -> Finding:
    from ortgraph.ops import generated
    from ortgraph.ops.kernels.library import find_compiler

    why = generated.reason()
    if not why:
        return Finding("generated kernels", "ok", f"fused regions are compiled with {find_compiler()}")
    lost = "element-wise and row-wise regions run as single operators, each through memory"
    return Finding("generated kernels", "note", f"not available, {lost}: {why}")


def _processor() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Finding("processor", "ok", f"{processor_name()}, {usable} usable cores")


def processor_name() -> str:
    """The processor's model name, or the machine type where the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _blas() -> list[Finding]:
    if "AMD" not in processor_name():
        return []
    return [
        Finding(
            "PyTorch on AMD",
            "note",
            "its float32 products take MKL's slow path here: compare with `python -m bench.step`",
        )
    ]


def _try_build(out: Output, target: str) -> list[Finding]:
    from ortgraph.cli.capturing import all_obstacles, capture_build, gradients_against_torch

    try:
        spec, graph = capture_build(out, target)
        with out.progress("comparing gradients with PyTorch"):
            errors = gradients_against_torch(spec, graph)
    except CaptureError as error:
        return [Finding("build", "problem", what, hint) for what, hint in all_obstacles(target, error)]
    except OrtgraphError as error:
        return [Finding("build", "problem", error.what, error.hint)]
    worst = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
    detail: Any = f"{graph.node_count()} nodes; largest gradient difference to PyTorch {worst[1]:.1e} (%{worst[0]})"
    return [
        Finding(
            "build", "ok" if worst[1] <= 1e-4 else "problem", detail, "" if worst[1] <= 1e-4 else "report this model"
        )
    ]
