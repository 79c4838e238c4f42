"""A process that is killed while it saves: what it leaves behind is the checkpoint before or the one after, whole.

The record of 200 kills: ``pytest -m slow -n 0 -s tests/hazards/test_killed_saves.py``.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

# Forks a writer, kills it at a random moment, loads. No PyTorch and no session: a kill takes about 50 ms.
SCRIPT = """
import os, random, signal, sys, time
import numpy as np
from ortgraph.runtime import checkpoint

folder, kills, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def values_of(n):
    return {"w": np.full((300, 400), n, np.float32), "state/step": np.array(n, np.int64)}

def save(n):
    checkpoint.save(folder, values_of(n), {"steps": n, "scalars": {}})

def write(start, pipe):
    for n in range(start, start + 10**6):
        save(n)
        os.write(pipe, n.to_bytes(8, "little"))

draw = random.Random(seed)
begin = time.monotonic()
for n in range(5):
    save(n)
period = (time.monotonic() - begin) / 5
last, torn = 4, 0
for _ in range(kills):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        write(last + 1, writer)
    os.close(writer)
    time.sleep(draw.uniform(0.2, 4.0) * period)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    said = os.fdopen(reader, "rb").read()
    told = int.from_bytes(said[-8:], "little") if said else last
    torn += any(name.startswith(".partial-") for name in os.listdir(folder))
    values, record = checkpoint.load(folder)
    n = record["steps"]
    assert told <= n <= told + 1, (told, n)
    assert all(np.array_equal(v, values[k]) for k, v in values_of(n).items()), n
    last = n
save(last + 1)  # saving goes on in what is left
assert checkpoint.load(folder)[1]["steps"] == last + 1 and len(os.listdir(folder)) == 2
print(f"{kills} kills, {torn} left a partial file, {last} checkpoints, none lost")
sys.exit(torn == 0)  # else no kill hit a save
"""


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_no_kill_loses_a_checkpoint(tmp_path: pathlib.Path, kills: int) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), str(kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
