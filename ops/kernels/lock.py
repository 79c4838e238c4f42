"""A lock that processes take before they make what all of them want, so that one makes it and the others find it."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import time
from collections.abc import Iterator

logger = logging.getLogger(__name__)
_PAUSE = 0.05  # seconds between two tries
LONGEST = 600.0  # seconds


@contextlib.contextmanager
def one_at_a_time(path: pathlib.Path, longest: float = LONGEST) -> Iterator[None]:
    """Hold the lock of a file while the body runs; the system lets go of it when the process dies.

    The lock saves work and nothing depends on it: where there is none to be had (a folder that cannot be written, a file
    system or a system without locks, a holder that does not come to an end) the body runs all the same.

    Args:
        path: The file; made when it is not there, and never removed, since others may be waiting for it.
        longest: Seconds to wait for another process.
    """
    with contextlib.ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            logger.debug("no lock at %s: %s", path, error)
        else:
            held.callback(os.close, handle)
            _wait(handle, path, longest)
        yield


def _wait(handle: int, path: pathlib.Path, longest: float) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    end = time.monotonic() + longest
    told = False
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                logger.warning("another process has held %s for %.0f s: going on without it", path, longest)
                return
        except OSError as error:
            logger.debug("no lock at %s: %s", path, error)
            return
        if not told:
            logger.info("waiting for another process, which holds %s", path)
            told = True
        time.sleep(_PAUSE)
