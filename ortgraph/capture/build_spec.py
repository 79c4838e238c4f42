"""``file.py:build``: a user's own file that says what to train."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import linecache
import pathlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType, TracebackType
from typing import Any

from ortgraph.errors import InputError, OrtgraphError

REQUIRED = ("module", "batch")
OPTIONAL = ("loss", "dynamic", "optimizer", "data", "evaluate")
_EXAMPLE = "def build(): return {'module': module, 'batch': example_batch}"


@dataclasses.dataclass(frozen=True)
class BuildSpec:
    """What a build function returned.

    Attributes:
        source: ``file.py:build``.
        file: The file.
        module: The ``torch.nn.Module``.
        batch: Example batch, a dict or tuple of tensors.
        loss: Output name, index or callable; None when the module returns its loss.
        dynamic: Dimension names by input and axis.
        optimizer: An optimizer of ``ortgraph.optim``.
        data: Iterable of batches; the example batch alone when the function gave none.
        evaluate: Iterable of held-out batches, or a function of the TrainingSession that returns a number or a dict of
            numbers.
    """

    source: str
    file: pathlib.Path
    module: Any
    batch: Any
    loss: Any = None
    dynamic: Mapping[str, Any] | None = None
    optimizer: Any = None
    data: Iterable[Any] | None = None
    evaluate: Any = None

    def batches(self, limit: int | None = None) -> Iterator[Any]:
        """One pass over ``data``, at most ``limit`` batches.

        Raises:
            InputError: The user's iterable raises.
        """
        if self.data is None:
            yield self.batch
            return
        with_context = UserCode(self.file, f"{self.source}: data")
        with with_context:
            iterator = iter(self.data)
        count = 0
        while limit is None or count < limit:
            with with_context:
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch
            count += 1


_END = object()


def split_target(target: str) -> tuple[pathlib.Path, str]:
    """``file.py:build`` to the file and the function's name (``build`` when left out).

    Raises:
        InputError: The text does not name a Python file.
    """
    file, colon, name = target.rpartition(":")
    if not colon or "/" in name or name.endswith(".py"):
        file, name = target, "build"
    if not file.endswith(".py") or not name.isidentifier():
        hint = "give a Python file and a function in it, such as model.py:build"
        if target.endswith(".onnx"):
            hint = "train a saved graph from Python: ortgraph.TrainingSession(ortgraph.load(path)) (docs/training.md)"
        raise InputError(f"{target}: is not FILE.py:FUNCTION", hint)
    path = pathlib.Path(file)
    if not path.is_file():
        raise InputError(f"{file}: no such file", "check the path; the form is FILE.py:FUNCTION")
    return path, name


def load_build(target: str) -> BuildSpec:
    """Run the build function of ``file.py:build``. The file's folder is importable, as when the file is run.

    Raises:
        InputError: The file or function is missing, raises (the message shows the user's own lines), or returns
            something else than the documented dict.
    """
    path, name = split_target(target)
    module = _run_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [n for n, v in vars(module).items() if callable(v)], n=1)
        hint = f"did you mean {path}:{near[0]}?" if near else _EXAMPLE
        raise InputError(f"{path}: has no function called {name!r}", hint)
    with UserCode(path, target):
        made = function()
    return _checked(target, path, made)


def _run_file(path: pathlib.Path) -> ModuleType:
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"ortgraph_build_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up there
    with UserCode(path, str(path)):
        spec.loader.exec_module(module)
    return module


def _checked(target: str, path: pathlib.Path, made: Any) -> BuildSpec:
    if not isinstance(made, Mapping):
        raise InputError(f"{target}: returned {type(made).__name__}, not a dict", _EXAMPLE)
    known = (*REQUIRED, *OPTIONAL)
    for key in made:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known entries: {', '.join(known)}"
            raise InputError(f"{target}: the dict has an unknown entry {key!r}", hint)
    for key in REQUIRED:
        if made.get(key) is None:
            raise InputError(f"{target}: the dict has no {key!r}", _EXAMPLE)
    if not hasattr(made["module"], "named_parameters"):
        raise InputError(f"{target}: 'module' is {type(made['module']).__name__}, not a torch.nn.Module", _EXAMPLE)
    if made.get("data") is not None and not isinstance(made["data"], Iterable):
        raise InputError(
            f"{target}: 'data' is {type(made['data']).__name__}, not an iterable of batches", "a list or a DataLoader"
        )
    return BuildSpec(source=target, file=path, **made)


class UserCode:
    """Turns what the user's code raises into an InputError that shows the user's own lines and nothing of ours.

    Args:
        file: The user's file; frames of files in its folder (but not of installed packages) are shown.
        what: Where the message says it happened.
    """

    def __init__(self, file: pathlib.Path, what: str) -> None:
        self.folder, self.what = file.resolve().parent, what

    def __enter__(self) -> UserCode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, OrtgraphError):
            return
        lines = [f"{self.what}: {type(error).__name__}: {error}", *self._own_lines(error, trace)]
        raise InputError(
            "\n".join(lines), "mend the build file; running it with python shows the whole traceback"
        ) from error

    def _own_lines(self, error: Exception, trace: TracebackType | None) -> list[str]:
        if isinstance(error, SyntaxError) and error.filename:
            return [f"  {error.filename}:{error.lineno}", f"    {(error.text or '').strip()}"]
        frames = [f for f in traceback.extract_tb(trace) if self._is_own(f.filename)]
        lines = []
        for frame in frames:
            lines.append(f"  {frame.filename}:{frame.lineno} in {frame.name}")
            lines.append(f"    {linecache.getline(frame.filename, frame.lineno or 0).strip()}")
        return lines

    def _is_own(self, filename: str) -> bool:
        path = pathlib.Path(filename).resolve()
        return path.is_relative_to(self.folder) and "site-packages" not in path.parts and _OURS not in path.parents


_OURS = pathlib.Path(__file__).resolve().parents[1]
