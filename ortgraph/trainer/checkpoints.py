"""Which of a Trainer's checkpoints can be gone on from."""

from __future__ import annotations

import json
import logging
import pathlib
import re

logger = logging.getLogger(__name__)
_FOLDER = re.compile(r"checkpoint-(\d+)")
_LAST = "trainer_state.json"  # what Trainer writes when all else of a checkpoint is there


def last_complete(folder: str) -> str | None:
    """The checkpoint of a Trainer's output folder with the most steps that was written to its end; None if there is none."""
    found = {p: _FOLDER.fullmatch(p.name) for p in pathlib.Path(folder).glob("checkpoint-*")}
    steps = {p: int(match[1]) for p, match in found.items() if match}
    for path in sorted(steps, key=lambda p: -steps[p]):
        if _complete(path):
            return str(path)
        logger.warning("%s was not written to its end and is left alone", path)
    return None


def _complete(path: pathlib.Path) -> bool:
    try:
        json.loads((path / _LAST).read_text())
    except (OSError, ValueError):
        return False
    return True
