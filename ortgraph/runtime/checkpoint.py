"""Checkpoints: a folder with ``checkpoint.json`` and the values that it names, ``values-<digest>.safetensors``.

The values are written first, under the name of their content; replacing the JSON file is the one atomic step. A crash
at any point leaves the old or the new checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ortgraph.errors import BatchError, InputError
from ortgraph.graph.writing import writing
from ortgraph.runtime.batch import to_numpy

VERSION = 1
RECORD = "checkpoint.json"
_PARTIAL = ".partial-"
_OURS = re.compile(r"checkpoint\.json|values-[0-9a-f]{64}\.safetensors|\.partial-.*")


def save(folder: str | os.PathLike[str], values: Mapping[str, np.ndarray], extra: Mapping[str, Any]) -> pathlib.Path:
    """Write a checkpoint folder, atomically.

    Args:
        folder: Made, or updated when it is a checkpoint or empty. Its parent folder must exist.
        values: Arrays by name.
        extra: Further facts, kept as JSON.

    Raises:
        InputError: ``folder`` is something else, its parent does not exist, or it cannot be written.
    """
    folder = pathlib.Path(folder)
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder.absolute().parent}: no such folder", "make the folder first")
    if folder.exists() and not (folder.is_dir() and all(_OURS.fullmatch(p.name) for p in folder.iterdir())):
        raise InputError(f"{folder} exists and is no checkpoint", "choose another folder")
    with writing(folder):
        folder.mkdir(exist_ok=True)
    earlier = sorted(folder.glob("values-*.safetensors"))
    with writing(folder), partial_folder(folder) as partial:
        written = pathlib.Path(partial, "values")
        safetensors.numpy.save_file({k: np.asarray(v, order="C") for k, v in values.items()}, written)
        record = pathlib.Path(partial, RECORD)
        digest = _digest(written)
        record.write_text(json.dumps({"version": VERSION, "sha256": digest, **extra}, indent=1, sort_keys=True))
        shutil.copymode(record, written)  # safetensors writes for the owner only
        for file in (written, record):
            _flush(file)
        os.replace(written, folder / _values_name(digest))
        os.replace(record, folder / RECORD)
    for old in earlier:  # not what another process has written meanwhile: its record may be the one that stays
        if old.name != _values_name(digest):
            old.unlink(missing_ok=True)
    return folder


@contextlib.contextmanager
def partial_folder(folder: pathlib.Path, prefix: str = _PARTIAL) -> Iterator[str]:
    """A folder to write in, locked while its process lives; those that killed processes left are removed."""
    for left in folder.glob(f"{prefix}*"):
        with contextlib.suppress(OSError), _locked(left):
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as partial, _locked(partial):
        yield partial


@contextlib.contextmanager
def _locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError when another process does."""
    import fcntl

    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _values_name(digest: str) -> str:
    return f"values-{digest}.safetensors"


def _flush(path: pathlib.Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _digest(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def load(folder: str | os.PathLike[str]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Read a checkpoint folder: (values, extra facts).

    Raises:
        InputError: The folder is missing, incomplete, damaged, or of another version.
    """
    folder = pathlib.Path(folder)
    if not (folder / RECORD).is_file():
        raise InputError(f"{folder}: not a checkpoint (it has no {RECORD})", "give a folder that save_checkpoint wrote")
    try:
        record = json.loads((folder / RECORD).read_text())
        version, wanted = record.pop("version"), record.pop("sha256")
        record["steps"], record["scalars"]  # noqa: B018 - both must be there
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{folder / RECORD} does not parse ({error})", "use another checkpoint") from error
    if version != VERSION:
        raise InputError(f"{folder}: checkpoint version {version}, this release reads {VERSION}", "use that ortgraph")
    values = folder / _values_name(str(wanted))
    if not values.is_file():
        raise InputError(f"{folder}: the values file {values.name} is missing", "use another checkpoint")
    if _digest(values) != wanted:
        raise InputError(f"{values} is damaged (its checksum differs)", "use another checkpoint")
    try:
        return safetensors.numpy.load_file(values), record
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{values} does not load ({error})", "use another checkpoint") from error


def check_made_with(where: str, own: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise InputError unless a checkpoint was made with what the graph has; what it does not say is not checked."""
    for key, value in own.items():
        if given.get(key, value) != value:
            raise InputError(
                f"{where} is of another {key.replace('_', ' ')}: {given[key]}, the graph has {value}",
                f"a graph with that {key.replace('_', ' ')}, or load_checkpoint(folder, strict=False) for its values alone",
            )


def check_names(where: str, own: Iterable[str], given: Iterable[str]) -> None:
    """Raise InputError unless both have the same names; the message lists what is missing and unknown."""
    own, given = set(own), set(given)
    parts = []
    if own - given:
        parts.append(f"missing {_some(own - given)}")
    if given - own:
        parts.append(f"unknown {_some(given - own)}")
    if parts:
        raise InputError(
            f"{where} does not fit the graph: {'; '.join(parts)}", "use the values of this model and optimizer"
        )


def _some(names: set[str]) -> str:
    shown = ", ".join(repr(n) for n in sorted(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def assign(where: str, targets: Sequence[tuple[str, np.ndarray]], given: Mapping[str, object]) -> None:
    """Copy values into buffers, all or nothing. Several names of one buffer (tied) must hold equal values.

    Raises:
        InputError: A shape or dtype differs, or tied names disagree.
    """
    arrays: list[np.ndarray] = []
    seen: dict[int, tuple[str, np.ndarray]] = {}
    for name, buffer in targets:
        try:
            array = to_numpy(name, given[name])
        except BatchError as error:
            raise InputError(f"{where}: {error.what}", error.hint) from error
        if array.shape != buffer.shape or array.dtype != buffer.dtype:
            raise InputError(
                f"{where}: {name!r} is {array.dtype}{list(array.shape)}, "
                f"the graph has {buffer.dtype}{list(buffer.shape)}",
                "use the values of this model",
            )
        first = seen.setdefault(id(buffer), (name, array))
        if first[1] is not array and not np.array_equal(first[1], array, equal_nan=array.dtype.kind == "f"):
            raise InputError(
                f"{where}: {first[0]!r} and {name!r} are one tied tensor but differ", "give both the same values"
            )
        arrays.append(array)
    for (_, buffer), array in zip(targets, arrays, strict=True):
        buffer[...] = array
