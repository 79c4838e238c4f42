"""Compiles the kernel library at first use into the user's cache folder.

The folder's name is a hash of everything that the binary depends on (sources, compiler, flags, processor), so that a
stale binary is never loaded and machines that share a home folder do not share binaries. The library is written
under a temporary name and renamed, so that readers find a whole file or none; of processes that want it at the same time
one compiles, the others wait. Its last bytes are a checksum of the others (loaders and linkers read no further than the
headers say): what a crash of the machine or a bad disk leaves is compiled again, where loading it would end the process or
compute something else.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import hashlib
import logging
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

from ortgraph.errors import RuntimeSetupError
from ortgraph.ops.kernels.lock import one_at_a_time

logger = logging.getLogger(__name__)

_SOURCES = pathlib.Path(__file__).parent
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast",
    "-fPIC", "-fvisibility=hidden", "-Wno-psabi",
)  # fmt: skip
_LIBRARY = "libortgraph_kernels.so"
LOCK = "lock"  # a file beside the library
_TIMEOUT = 300  # seconds
_STALE = 24 * 3600  # seconds
_CPU_FIELDS = ("model name", "flags", "Features", "CPU part")
_SEAL = b"ortgraph whole"  # followed by the checksum


def cache_folder() -> pathlib.Path:
    """Where compiled libraries live: ``$ORTGRAPH_CACHE_DIR``, else the user's cache folder (XDG)."""
    chosen = os.environ.get("ORTGRAPH_CACHE_DIR")
    if chosen:
        return pathlib.Path(chosen) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "ortgraph" / "kernels"


def find_compiler() -> str:
    """The C++ compiler: ``$CXX``, g++, c++ or clang++.

    Raises:
        RuntimeSetupError: None is found, or the system is Windows.
    """
    if sys.platform == "win32":
        raise RuntimeSetupError("compiled kernels are not built on Windows", "use Linux, or go on without them")
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        path = shutil.which(name)
        if path is not None:
            return path
    raise RuntimeSetupError(f"no C++ compiler found (looked for {', '.join(names)})", "install g++ or set CXX")


def sources() -> list[pathlib.Path]:
    """All C++ files of the library, sorted by name."""
    return sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")])


def build() -> pathlib.Path:
    """The path of the compiled kernel library; see ``build_library``."""
    return build_library(_LIBRARY, sources())


def build_library(name: str, files: Sequence[pathlib.Path]) -> pathlib.Path:
    """The path of a compiled library; compiles it when the cache has none for this machine and these sources.

    Args:
        name: File name of the library.
        files: Its sources and headers; every ``.cpp`` is one unit.

    Raises:
        RuntimeSetupError: No compiler, a compiler error, or a cache folder that cannot be written.
    """
    compiler = find_compiler()
    options, link = flags(), ("-shared", *link_flags())
    library = cache_folder() / content_key(compiler, (*options, *link), files) / name
    if intact(library):
        return library
    with one_at_a_time(library.with_name(LOCK)):
        if not intact(library):  # another process may have made it meanwhile
            _compile(library, compiler, options, link, files)
    return library


def _compile(
    library: pathlib.Path, compiler: str, options: Sequence[str], link: Sequence[str], files: Sequence[pathlib.Path]
) -> None:
    units = [file for file in files if file.suffix == ".cpp"]
    level = logging.WARNING if len(units) > 1 else logging.INFO  # why: nobody should wait and not know for what
    logger.log(level, "compiling %s (%d C++ files) into %s, once", library.name, len(units), library.parent)
    logger.info("with %s %s", compiler, " ".join(options))
    with written(library) as fresh:
        objects = {unit: fresh.with_name(f"{unit.stem}.o") for unit in units}
        compile_units(compiler, options, objects)
        call(compiler, *link, *map(str, objects.values()), "-o", str(fresh))


def intact(path: pathlib.Path) -> bool:
    """Whether ``written`` wrote a file, and its bytes are still the same; one that is damaged is told in the log."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    body = content[: -len(_SEAL) - hashlib.sha256().digest_size]
    if content == body + _SEAL + hashlib.sha256(body).digest():
        return True
    logger.warning("%s is damaged, or of another release, and is compiled again", path)
    return False


def _seal(path: pathlib.Path) -> None:
    checksum = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(_SEAL + checksum)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def written(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A path to write to, in an empty folder of its own; gets its checksum and is renamed to ``target`` at the end.

    Raises:
        RuntimeSetupError: The folder of ``target`` cannot be written.
    """
    try:
        with scratch(target.parent) as folder:
            fresh = folder / target.name
            yield fresh
            _seal(fresh)
            os.replace(fresh, target)
    except OSError as error:
        raise RuntimeSetupError(
            f"{target.name} cannot be written to {target.parent}: {error}",
            "set ORTGRAPH_CACHE_DIR to a writable folder",
        ) from error


@contextlib.contextmanager
def scratch(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """An empty folder inside a folder of the cache, removed at the end. Raises OSError where that cannot be written.

    What processes that were killed left there goes, once it is older than any build takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{tempfile.gettempprefix()}*"):
        with contextlib.suppress(OSError):  # another process removes it, too
            if left.is_dir() and time.time() - left.stat().st_mtime > _STALE:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        yield pathlib.Path(made)


def compile_units(compiler: str, options: Sequence[str], units: Mapping[pathlib.Path, pathlib.Path]) -> None:
    """Compile sources to the objects that they are mapped to, as many at once as there are processors.

    Raises:
        RuntimeSetupError: The compiler fails on one, or takes too long.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [pool.submit(call, compiler, *options, "-c", str(u), "-o", str(made)) for u, made in units.items()]
        for job in jobs:
            job.result()


def call(compiler: str, *arguments: str) -> None:
    """Run the compiler.

    Raises:
        RuntimeSetupError: It fails, or takes too long.
    """
    command = [compiler, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeSetupError(f"{compiler} took longer than {_TIMEOUT} s", "set CXX to another compiler") from error
    if done.returncode < 0:
        raise RuntimeSetupError(
            f"{compiler} was ended by signal {-done.returncode}", "try again, with more memory if it was ended for that"
        )
    if done.returncode != 0:
        raise RuntimeSetupError(
            f"{compiler} failed on the sources:\n{done.stderr[-2000:]}", "set CXX to g++ 9 or newer"
        )


def content_key(compiler: str, options: Sequence[str], files: Sequence[pathlib.Path]) -> str:
    """A hash of everything that a binary depends on."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for fact in (version(compiler), *options, platform.machine(), *_processor()):
        digest.update(fact.encode() + b"\0")
    return digest.hexdigest()[:24]


@functools.cache
def version(compiler: str) -> str:
    """What a compiler says of itself."""
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeSetupError(f"{compiler} --version failed: {done.stderr[-500:]}", "set CXX to a working compiler")
    return done.stdout


@functools.cache
def _processor() -> tuple[str, ...]:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return (platform.processor(),)
    return tuple(sorted({line for line in lines if line.partition("\t")[0].strip() in _CPU_FIELDS}))


def flags() -> tuple[str, ...]:
    """Compiler flags of a unit."""
    return (*_FLAGS, *_width_flags())


def _width_flags() -> tuple[str, ...]:
    # Compilers prefer 256 bits by default even where 512 are as fast per instruction.
    wide = platform.machine() == "x86_64" and any(" avx512f" in fact for fact in _processor())
    return ("-mprefer-vector-width=512",) if wide else ()


def link_flags() -> tuple[str, ...]:
    """Linker flags."""
    # Sessions keep pointers to the operator definitions, so the library must survive the options that loaded it.
    return ("-Wl,-z,nodelete",) if sys.platform == "linux" else ()
