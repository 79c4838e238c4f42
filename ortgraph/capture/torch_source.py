"""Where an FX node comes from: module path, source line, half of the graph."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from types import FrameType

import torch
from torch.fx import Node

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_FOREIGN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
ROOT = "module"  # attribute under which capture holds the user's module


def module_path(node: Node) -> str:
    """Path of the innermost module in the user's model (``encoder.layer.0.attention``), "" at the root."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [entry[0] if isinstance(entry, tuple) else str(entry) for entry in stack.values()]
    return user_path(paths[-1]) if paths else ""


def user_path(path: str) -> str:
    """A path inside the traced wrapper as the user knows it."""
    if path == ROOT:
        return ""
    return path.removeprefix(f"{ROOT}.")


def source_line(node: Node) -> str:
    """``file:line`` of the innermost frame in the user's code."""
    return user_frame(node.meta.get("stack_trace") or node.meta.get("fwd_stack_trace") or "")


def user_frame(trace: str) -> str:
    """``file:line`` of the innermost frame outside torch and this package, "" if a trace has none.

    The file is given by its two last parts, so that a graph's text does not depend on where things are installed.
    """
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(trace)]
    own = [f for f in frames if not f[0].startswith((*_FOREIGN, "<string>", "<eval_with_key>"))]
    if not own:
        return ""
    file, line = own[-1]
    return f"{'/'.join(file.replace(os.sep, '/').split('/')[-2:])}:{line}"


def running_module(frames: Iterable[FrameType], root: torch.nn.Module) -> str:
    """Path of the innermost module of ``root`` that the frames, outermost first, run; "" at the user's own root."""
    paths = {id(part): path for path, part in root.named_modules()}
    owners = [paths[id(f.f_locals["self"])] for f in frames if id(f.f_locals.get("self")) in paths]
    return user_path(owners[-1]) if owners else ""


def phase_of(node: Node) -> str:
    """``forward`` or ``backward``."""
    return "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
