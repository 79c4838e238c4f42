"""What the kernel says about this process's memory, and how to make that exact (Linux)."""

from __future__ import annotations

import ctypes
import gc
import pathlib

from ortgraph.errors import RuntimeSetupError

_STATUS, _CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")
_M_MMAP_THRESHOLD, _PR_SET_THP_DISABLE, _MADV_DONTNEED = -3, 41, 4
PAGE = 4096


def prepare_process() -> None:
    """Make resident memory follow what is used, page by page; to be called before anything large is allocated.

    Every allocation of 64 KiB and more gets pages of its own, which go back when it is freed, and no huge pages are used.

    Raises:
        RuntimeSetupError: The system cannot do it.
    """
    if not _CLEAR.exists():
        raise RuntimeSetupError("memory is measured on Linux only", "run where /proc/self/clear_refs exists")
    library = _libc()
    if not hasattr(library, "mallopt"):
        raise RuntimeSetupError("memory is measured with glibc's malloc only", "run on a system with glibc")
    library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    library.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def release_free_memory() -> None:
    """Collect garbage and give all free heap pages back."""
    gc.collect()
    _libc().malloc_trim(0)


def drop_pages(address: int, nbytes: int) -> None:
    """Give the whole pages of an address range back; they read as zeros until they are written again."""
    first = -(-address // PAGE) * PAGE
    end = (address + nbytes) // PAGE * PAGE
    if end > first and _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_DONTNEED) != 0:
        raise RuntimeSetupError("madvise failed", "report the kernel's version")


def reset_peak() -> None:
    """Start a new high-water mark at the present resident size."""
    _CLEAR.write_text("5")


def resident() -> int:
    """Resident bytes now."""
    return _field("VmRSS")


def peak() -> int:
    """High-water mark of resident bytes since the start or ``reset_peak``."""
    return _field("VmHWM")


def _field(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeSetupError(f"/proc/self/status has no {name}", "memory is measured on Linux only")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
