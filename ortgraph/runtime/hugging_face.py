"""A session's checkpoints in the layout of transformers' ``Trainer``: either goes on where the other stopped."""

from __future__ import annotations

import json
import os
import pathlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from ortgraph.errors import InputError
from ortgraph.graph.writing import writing
from ortgraph.runtime import torch_layout
from ortgraph.runtime.checkpoint import partial_folder

if TYPE_CHECKING:
    from ortgraph.runtime.session_state import SessionState

RANDOM_NAME = "rng_state.pth"
_OWN = "ortgraph"  # beside the states of Python, numpy and PyTorch: the session's key and step
_PARTIAL = ".ortgraph-partial-"  # it stands in a folder of the user's, in which nothing else may have this name
_DRAWS = ("random_key", "random_step")


def trainer_groups(module: torch.nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parameters that ``Trainer`` gives weight decay, and of the others: its two parameter groups.

    ``AdamW(weight_decay=0.01, no_decay=trainer_groups(module)[1])`` is the optimizer of a ``Trainer``.
    """
    decay = set(Trainer.get_decay_parameter_names(None, module))  # type: ignore[arg-type]
    names = [n for n, p in module.named_parameters() if p.requires_grad]
    return tuple(n for n in names if n in decay), tuple(n for n in names if n not in decay)


def save(
    session: SessionState,
    folder: str | os.PathLike[str],
    module: PreTrainedModel,
    schedule: Callable[[int], float] | None = None,
    epoch: float = 0.0,
    batch_size: int = 8,
) -> pathlib.Path:
    """See ``TrainingSession.save_hugging_face``."""
    folder = pathlib.Path(folder)
    if not folder.absolute().parent.is_dir():
        raise InputError(f"{folder.absolute().parent}: no such folder", "make the folder first")
    if folder.exists():
        raise InputError(f"{folder} exists", f"a folder for each checkpoint: checkpoint-{session.steps}")
    state = session.torch_state_dict(trainer_groups(module))
    done = session.steps - session.skipped_steps
    rate = session.learning_rate if schedule is None else schedule(done)
    own = torch_layout.optimizer_of(session)
    for group in state["optimizer"]["param_groups"]:
        group["lr"] = rate * (group["initial_lr"] / own.lr if own.lr else 1.0)
    record = TrainerState(global_step=session.steps, epoch=epoch, train_batch_size=batch_size)
    files = {OPTIMIZER_NAME: state["optimizer"], RANDOM_NAME: _random_state(session)}
    files[SCHEDULER_NAME] = _scheduler_state(state["optimizer"]["param_groups"], done)
    if "scaler" in state:
        files[SCALER_NAME] = state["scaler"]
    saved = set(module.state_dict())
    with writing(folder), partial_folder(folder.absolute().parent, _PARTIAL) as partial:
        made = pathlib.Path(partial, folder.name)
        module.save_pretrained(made, state_dict={n: v for n, v in state["model"].items() if n in saved})
        for name, content in files.items():
            _write(made / name, content)
        record.save_to_json(str(made / TRAINER_STATE_NAME))
        for file in made.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        os.rename(made, folder)
    return folder


def load(session: SessionState, folder: str | os.PathLike[str], module: PreTrainedModel) -> dict[str, Any]:
    """See ``TrainingSession.load_hugging_face``."""
    folder = pathlib.Path(folder)
    missing = [n for n in ("config.json", OPTIMIZER_NAME, TRAINER_STATE_NAME) if not (folder / n).is_file()]
    if missing:
        raise InputError(f"{folder}: no checkpoint of a Trainer (it has no {missing[0]})", "a checkpoint-N folder")
    try:
        record = json.loads((folder / TRAINER_STATE_NAME).read_text())
        given = {"optimizer": _read(folder / OPTIMIZER_NAME)}
        given["model"] = type(module).from_pretrained(folder).state_dict()
        if (folder / SCALER_NAME).is_file() and "loss_scale" in {s.kind for s in session.signature.states}:
            given["scaler"] = _read(folder / SCALER_NAME)
        drawn = _read(folder / RANDOM_NAME) if (folder / RANDOM_NAME).is_file() else {}
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise InputError(f"{folder} does not load ({error})", "use another checkpoint") from error
    session.load_torch_state_dict(given, trainer_groups(module))
    session.steps = int(record["global_step"])
    _restore_random_state(session, drawn)
    return record


def _write(path: pathlib.Path, content: Any) -> None:
    try:
        torch.save(content, path)
    except RuntimeError as error:  # what PyTorch makes of a full disk
        raise OSError(str(error).splitlines()[0]) from error


def _read(path: pathlib.Path) -> dict[str, Any]:
    with safe_globals():
        return torch.load(path, map_location="cpu", weights_only=True)


def _scheduler_state(groups: list[dict[str, Any]], done: int) -> dict[str, Any]:
    """As of a ``LambdaLR``, which every schedule of transformers is, after ``done`` steps."""
    tensors = [{**g, "params": [torch.empty(0)]} for g in groups]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(tensors, lr=0.0), lambda step: 1.0)
    now = {"base_lrs": [g["initial_lr"] for g in groups], "_last_lr": [g["lr"] for g in groups]}
    return {**scheduler.state_dict(), **now, "last_epoch": done, "_step_count": done + 1}


def _random_state(session: SessionState) -> dict[str, Any]:
    drawn = {s.kind: int(session.buffer(s.input)) for s in session.signature.states if s.kind in _DRAWS}
    common = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    return {**common, _OWN: drawn}


def _restore_random_state(session: SessionState, state: dict[str, Any]) -> None:
    if not state:
        return
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.random.set_rng_state(state["cpu"])
    for s in session.signature.states:
        if s.kind in state.get(_OWN, {}):
            session.buffer(s.input)[...] = state[_OWN][s.kind]
