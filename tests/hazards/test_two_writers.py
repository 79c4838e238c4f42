"""Two writers of one checkpoint folder: whatever their order, what is left loads."""

from __future__ import annotations

import os

import numpy as np

from ortgraph.runtime import checkpoint

EXTRA = {"steps": 1, "scalars": {}}


def test_a_checkpoint_written_in_between_keeps_its_values(tmp_path, monkeypatch):
    """The second writer comes after the first one's record and before its cleaning up."""
    folder = tmp_path / "run"
    checkpoint.save(folder, {"w": np.zeros(3, np.float32)}, EXTRA)
    replace, state = os.replace, {"inside": False}

    def interrupted(source, target):
        replace(source, target)
        if str(target).endswith(checkpoint.RECORD) and not state["inside"]:
            state["inside"] = True
            checkpoint.save(folder, {"w": np.full(3, 2.0, np.float32)}, EXTRA)

    monkeypatch.setattr(os, "replace", interrupted)
    checkpoint.save(folder, {"w": np.ones(3, np.float32)}, EXTRA)
    values, _ = checkpoint.load(folder)
    np.testing.assert_array_equal(values["w"], np.full(3, 2.0, np.float32))
