"""Files that cannot be written: one error, whatever noticed it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import safetensors

from ortgraph.errors import InputError


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Around what writes beside ``path`` and then takes its place: a full disk or a folder without leave to write.

    Raises:
        InputError: The system refused. What stood at ``path`` still does.
    """
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{path}: cannot be written ({why}); what was there is unchanged", "make room, or give another path"
        ) from error
