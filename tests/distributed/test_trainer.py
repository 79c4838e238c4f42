"""ORTTrainer under torchrun and accelerate launch: losses are those of transformers' Trainer under the same launch."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
from typing import Any

import numpy as np
import pytest

SCRIPT = str(pathlib.Path(__file__).with_name("trainer_ranks.py"))
LAUNCHERS = {
    "torchrun": ("torch.distributed.run", "--standalone", "--nproc-per-node=2"),
    "accelerate": (
        "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
        "--mixed_precision=no", "--dynamo_backend=no", "--num_cpu_threads_per_process=1", "--main_process_port=0",
    ),
}  # fmt: skip


ZERO = {
    "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "size", "deepspeed"),
    [
        ("accelerate", "small", False),
        pytest.param("torchrun", "small", True, id="deepspeed"),
        pytest.param("torchrun", "gpt2", False, marks=pytest.mark.slow),
        pytest.param("accelerate", "gpt2", False, marks=pytest.mark.slow),
        pytest.param("torchrun", "gpt2", True, marks=pytest.mark.slow, id="deepspeed-gpt2"),
    ],
)
def test_losses_are_those_of_trainer(launch: Any, launcher: str, size: str, deepspeed: bool) -> None:
    """Slow ones: ``pytest -m slow tests/distributed/test_trainer.py``. DeepSpeed's short one is a step of ``.ci/run``."""
    arguments = [str(launch.folder), size]
    if deepspeed:
        if importlib.util.find_spec("deepspeed") is None:
            pytest.skip('DeepSpeed is not installed: pip install -e ".[deepspeed]"')
        config = launch.folder / "zero.json"
        config.write_text(json.dumps(ZERO))
        arguments.append(str(config))
    printed = launch.command(sys.executable, "-m", *LAUNCHERS[launcher], SCRIPT, *arguments)
    assert launch.codes == [0], printed[-6000:]
    ranks = launch.results()
    for rank in ranks:
        (theirs, evaluated), (ours, our_evaluated) = rank["theirs"], rank["ours"]
        assert len(ours) == len(theirs) == (4 if rank is ranks[0] else len(ours))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        assert our_evaluated == pytest.approx(evaluated, rel=1e-5)
