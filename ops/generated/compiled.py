"""Compiles generated kernels: each kernel once, cached by content, and one library for the kernels of a graph."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import pathlib
import shutil
import tempfile
from collections.abc import Sequence

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.generated.bodies import body_of
from ortgraph.ops.generated.operators import read_region
from ortgraph.ops.generated.source import Writer
from ortgraph.ops.kernels import library
from ortgraph.ops.kernels.lock import one_at_a_time

logger = logging.getLogger(__name__)
_HERE = pathlib.Path(__file__).parent
_KERNELS = pathlib.Path(library.__file__).parent
_HEADER = _HERE / "generated.h"
_LIBRARY = "libortgraph_generated.so"
_ENTRY = """#include "generated.h"

namespace ortgraph {{
{declarations}
}}  // namespace ortgraph

extern "C" __attribute__((visibility("default"))) ortgraph::Status* RegisterCustomOps(
    ortgraph::SessionOptions* options, const ortgraph::ApiBase* base) {{
  using namespace ortgraph;
  static const Definitions definitions = [] {{
    Definitions made;
{calls}
    return made;
  }}();
  return register_operators(options, base, "ortgraph.generated", definitions);
}}
"""


def kernel_folder() -> pathlib.Path:
    """Where generated kernels are kept."""
    return library.cache_folder().parent / "generated"


def kernel_source(name: str) -> str:
    """C++ of a generated operator whose body is known."""
    body = body_of(name)
    if body is None:
        raise RuntimeSetupError(f"the body of {name} is not known", "load the model that holds its function first")
    return Writer(name, read_region(body)).text()


@functools.lru_cache(maxsize=64)
def build(names: tuple[str, ...]) -> pathlib.Path:
    """The library with these operators; compiles what the cache lacks.

    Raises:
        RuntimeSetupError: No compiler, a compiler error, or a cache folder that cannot be written.
    """
    compiler = library.find_compiler()
    units = {name: kernel_source(name) for name in names}
    units["entry"] = _ENTRY.format(
        declarations="\n".join(f"void add_{n}(Definitions& to);" for n in names),
        calls="\n".join(f"    add_{n}(made);" for n in names),
    )
    units["glue"] = (_KERNELS / "glue.cpp").read_text(encoding="utf-8")
    root = kernel_folder() / _environment_key(compiler)
    key = hashlib.sha256("\0".join(units.values()).encode()).hexdigest()[:24]
    target = root / key / _LIBRARY
    if library.intact(target):
        return target
    place = root if not _unwritable() else _spare_folder()
    target = place / key / _LIBRARY
    with one_at_a_time(place / library.LOCK):  # why one for all libraries: they share objects
        if not library.intact(target):  # another process may have made it meanwhile
            _link(compiler, target, _objects(compiler, root, place, units))
    return target


def _link(compiler: str, target: pathlib.Path, objects: Sequence[pathlib.Path]) -> None:
    with library.written(target) as fresh:
        library.call(compiler, "-shared", *library.link_flags(), *map(str, objects), "-o", str(fresh))


def _flags() -> tuple[str, ...]:
    return (*library.flags(), f"-I{_HERE}", f"-I{_KERNELS}")


def _environment_key(compiler: str) -> str:
    headers = sorted([*_HERE.glob("*.h"), *_KERNELS.glob("*.h")])
    return library.content_key(compiler, _flags(), headers)


def why_absent(name: str, text: str | None = None) -> str:
    """Why the kernel of an operator, whose source may be given, is not there and cannot be kept; empty otherwise."""
    why = _unwritable()
    if not why:
        return ""
    root = kernel_folder() / _environment_key(library.find_compiler())
    return "" if library.intact(_object(root, name, text or kernel_source(name))) else why


def _unwritable() -> str:
    try:
        with library.scratch(kernel_folder()):
            return ""
    except OSError as error:
        return f"{kernel_folder()} cannot be written ({error}); set ORTGRAPH_CACHE_DIR to a writable folder"


@functools.cache
def _spare_folder() -> pathlib.Path:
    """For this process: links of kernels whose cache, in an image for instance, can only be read."""
    folder = tempfile.mkdtemp(prefix="ortgraph-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pathlib.Path(folder)


def _object(root: pathlib.Path, name: str, text: str) -> pathlib.Path:
    return root / "objects" / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.o"


def _objects(compiler: str, root: pathlib.Path, place: pathlib.Path, units: dict[str, str]) -> list[pathlib.Path]:
    """One object per unit, from ``root`` or, those that are missing there, compiled in parallel into ``place``."""
    paths = {name: _object(root, name, text) for name, text in units.items()}
    missing = [name for name, path in paths.items() if not library.intact(path)]
    paths |= {name: _object(place, name, units[name]) for name in missing}
    logger.info("compiling %d of %d generated kernels with %s", len(missing), len(units), compiler)
    options = (*(_precompiled(compiler, place) if missing else ()), *_flags())
    with contextlib.ExitStack() as stack:
        made = {name: stack.enter_context(library.written(paths[name])) for name in missing}
        sources = {name: path.with_suffix(".cpp") for name, path in made.items()}
        for name, source in sources.items():
            source.write_text(units[name], encoding="utf-8")
        library.compile_units(compiler, options, {sources[name]: made[name] for name in missing})
    return list(paths.values())


def _precompiled(compiler: str, folder: pathlib.Path) -> tuple[str, ...]:
    """Flags that let units find the header compiled already: reading it takes twice as long as the rest of a unit."""
    if "Free Software Foundation" not in library.version(compiler):
        return ()  # other compilers do not look for the file beside the header
    target = folder / f"{_HEADER.name}.gch"
    if not library.intact(target):
        with library.written(target) as fresh:
            library.call(compiler, *_flags(), "-x", "c++-header", str(_HEADER), "-o", str(fresh))
    return (f"-I{folder}",)


def sources_of(names: Sequence[str]) -> str:
    """C++ of several operators, for reading."""
    return "\n".join(kernel_source(name) for name in names)
