"""What a session keeps between runs: parameters, buffers, optimizer states, the learning rate; and its checkpoints."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortgraph.errors import InputError, SignatureError
from ortgraph.graph import Signature, TrainingGraph, static_shape
from ortgraph.runtime import checkpoint, inference_export
from ortgraph.runtime.arena import Memory
from ortgraph.runtime.device import HOST, Device

LEARNING_RATE = "learning_rate"
# What a checkpoint was made with, as the graph's metadata say it: two graphs of one model may differ in nothing else.
_MADE_WITH = {"optimizer": "no optimizer", "precision": "fp32", "accumulation_steps": "1"}


class SessionState:
    """Persistent values of a training graph, by module name and by state name.

    Args:
        graph: Its values are copied; states start at their initial value unless the graph holds one.
        device: Where they are kept.

    Raises:
        InputError: A parameter or buffer has no value, or its shape does not fit.
    """

    def __init__(self, graph: TrainingGraph, device: Device = HOST) -> None:
        self.graph = graph
        self.signature: Signature = graph.signature
        self.steps = 0
        self._memory = Memory(device)
        self._inputs = {v.name: v for v in graph.graph.inputs}
        self._load_values(graph)

    @property
    def has_optimizer(self) -> bool:
        """Whether ``step`` can be called."""
        return LEARNING_RATE in self.signature.scalars

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step. Raises InputError when the graph has no optimizer."""
        self._require_optimizer("learning_rate")
        return float(self._memory.persistent[LEARNING_RATE])

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._require_optimizer("learning_rate")
        if not 0 <= float(value) < math.inf:
            raise InputError(f"the learning rate is {float(value)}", "give a number that is not negative")
        self._memory.persistent[LEARNING_RATE][...] = value

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per update."""
        text = self.signature.metadata.get("accumulation_steps", "1")
        if not text.isdecimal() or int(text) < 1:
            raise SignatureError(f"the stored accumulation_steps is {text!r}", "attach the optimizer again")
        return int(text)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss in the backward half of the next step; 1 without loss scaling."""
        return float(self._scalar_state("loss_scale", 1.0))

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients overflowed, so that nothing was updated; 0 without loss scaling."""
        return int(self._scalar_state("skipped_steps", 0))

    def _scalar_state(self, kind: str, default: float) -> float:
        found = next((s for s in self.signature.states if s.kind == kind), None)
        return default if found is None else self._memory.persistent[found.input].item()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all parameters and buffers by module name, tied names included, as in PyTorch's ``state_dict``."""
        return {name: self._memory.persistent[source].copy() for name, source in self._module_names().items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Set parameters and buffers by module name. Tied names must agree.

        Raises:
            InputError: Names are missing or unknown, a shape or dtype differs, or tied names hold different values.
        """
        names = self._module_names()
        checkpoint.check_names("state_dict", names, state)
        checkpoint.assign("state_dict", [(n, self._memory.persistent[s]) for n, s in names.items()], state)

    def optimizer_state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all states by name (``exp_avg/<parameter>``, ``step``, random key and step, accumulators)."""
        return {s.name: self._memory.persistent[s.input].copy() for s in self.signature.states}

    def load_optimizer_state_dict(self, state: Mapping[str, object]) -> None:
        """Set all states. Raises InputError when names, shapes or dtypes differ."""
        names = {s.name: s.input for s in self.signature.states}
        checkpoint.check_names("optimizer_state_dict", names, state)
        checkpoint.assign("optimizer_state_dict", [(n, self._memory.persistent[s]) for n, s in names.items()], state)

    def save_checkpoint(self, folder: str | os.PathLike[str], position: Any = None) -> pathlib.Path:
        """Write everything that the next step depends on, atomically. See ``ortgraph.runtime.checkpoint``.

        Args:
            folder: Made, or updated when it is a checkpoint. Its parent folder must exist.
            position: What the caller wants back: where the data stands (epoch, batch, a sampler's state). JSON values.
        """
        rates = {name: float(self._memory.persistent[name]) for name in self.signature.scalars}
        extra = {"steps": self.steps, "scalars": rates, "position": position, "made_with": self._made_with()}
        return checkpoint.save(folder, self._checkpoint_values(), extra)

    def load_checkpoint(self, folder: str | os.PathLike[str], strict: bool = True) -> Any:
        """Continue where ``save_checkpoint`` stopped, bit for bit. Nothing changes when it does not fit.

        Args:
            folder: What ``save_checkpoint`` wrote.
            strict: Refuse a checkpoint of another precision, number of accumulation steps, or optimizer, also where
                names and shapes are the same; False: take its values.

        Returns:
            The ``position`` that was saved.

        Raises:
            InputError: Not a checkpoint, or of another model, optimizer or precision.
        """
        values, extra = checkpoint.load(folder)
        own = self._checkpoint_values()
        checkpoint.check_made_with(str(folder), self._made_with(), extra.get("made_with", {}) if strict else {})
        checkpoint.check_names(str(folder), own, values)
        checkpoint.assign(str(folder), list(own.items()), values)
        self.steps = int(extra["steps"])
        for name, value in extra["scalars"].items():
            if name in self.signature.scalars:
                self._memory.persistent[name][...] = value
        return extra.get("position")

    def torch_state_dict(self, groups: Sequence[Sequence[str]] | None = None) -> dict[str, Any]:
        """The present state for a PyTorch loop: ``model``, ``optimizer`` and, with a loss scale, ``scaler``.

        Each is what ``load_state_dict`` of the module, of ``torch.optim.AdamW`` or ``SGD`` (of ``FusedLAMB`` for LAMB) and
        of ``torch.amp.GradScaler`` takes (with ``strict=False`` where a module has buffers that it does not save: they are
        among these). Random numbers are not of it: they are drawn in another way there.

        Args:
            groups: Names of the optimizer's parameters, group by group, as ``torch_layout.groups_of(module, optimizer)``
                gives them. None: a group for each set of hyperparameters, with all parameters of the module in its order.

        Raises:
            InputError: Parameters of one group have other hyperparameters here, or gradients are being accumulated.
        """
        from ortgraph.runtime import torch_layout

        return torch_layout.state_dict(self, groups)

    def load_torch_state_dict(self, state: Mapping[str, Any], groups: Sequence[Sequence[str]] | None = None) -> None:
        """Continue where a PyTorch loop stopped. Nothing changes when the state does not fit.

        Args:
            state: ``model``, ``optimizer``, ``scaler``, each optional: state dicts as of ``torch_state_dict``.
            groups: As for ``torch_state_dict``; not needed where the optimizer was made from named parameters.

        Raises:
            InputError: Names, shapes, the optimizer or its hyperparameters are not the graph's.
        """
        from ortgraph.runtime import torch_layout

        torch_layout.load_state_dict(self, state, groups)

    def save_hugging_face(
        self,
        folder: str | os.PathLike[str],
        module: Any,
        schedule: Callable[[int], float] | None = None,
        epoch: float = 0.0,
        batch_size: int = 8,
    ) -> pathlib.Path:
        """Write a checkpoint that ``Trainer.train(resume_from_checkpoint=folder)`` goes on from, atomically.

        ``model.safetensors`` and ``config.json``, ``optimizer.pt`` (in Trainer's two groups), ``scheduler.pt``,
        ``rng_state.pth``, with a loss scale ``scaler.pt``, and ``trainer_state.json``.

        Args:
            folder: Must not exist, its parent must: ``out/checkpoint-100``.
            module: The captured model of transformers; its class, configuration and names are used, not its values.
            schedule: Learning rate by number of updates; None: it stays.
            epoch: Passes over the data so far, for the record: Trainer finds its place by the number of steps.
            batch_size: Rows of a step, for the record.

        Raises:
            InputError: The folder exists or cannot be written, or the graph's optimizer has other groups than Trainer's.
        """
        from ortgraph.runtime import hugging_face

        return hugging_face.save(self, folder, module, schedule, epoch, batch_size)

    def load_hugging_face(self, folder: str | os.PathLike[str], module: Any) -> dict[str, Any]:
        """Go on where a ``Trainer``, or ``save_hugging_face``, stopped. Nothing changes when it does not fit.

        Also sets the random states of Python, numpy and PyTorch, as Trainer does. Masks of dropout are those of the straight
        run only where ``save_hugging_face`` wrote the folder.

        Args:
            folder: A ``checkpoint-N`` folder with optimizer.
            module: The captured model of transformers; its class and names are used.

        Returns:
            The contents of ``trainer_state.json``: ``global_step``, ``epoch``, and so on.

        Raises:
            InputError: A file is missing or damaged, or of another model, optimizer or loss scale.
        """
        from ortgraph.runtime import hugging_face

        return hugging_face.load(self, folder, module)

    def parameter_inputs(self) -> dict[str, str]:
        """Graph input by name of a parameter or buffer, tied names included."""
        return self._module_names()

    def buffer(self, name: str) -> Any:
        """The memory of a graph input that stays between runs."""
        return self._memory.persistent[name]

    def export_inference(self, path: str | os.PathLike[str]) -> pathlib.Path:
        """Write the model in evaluation mode with its present values. See ``ortgraph.runtime.inference_export``."""
        values = {n: np.asarray(self._memory.persistent[n]) for n in self._module_sources()}
        return inference_export.export_inference(self.graph, values, path)

    def trained_graph(self) -> TrainingGraph:
        """A copy of the graph whose values are the present ones (to save, or to go on with another pipeline)."""
        graph = self.graph.clone()
        states = {s.input for s in self.signature.states}
        names = [*self._module_sources(), *sorted(states)]
        graph.values = {**self.graph.values, **{n: self._memory.persistent[n].copy() for n in names}}
        return graph

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and buffers."""
        return sum(self._memory.persistent[n].nbytes for n in self._module_sources())

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer and random states."""
        return sum(self._memory.persistent[s.input].nbytes for s in self.signature.states)

    def _load_values(self, graph: TrainingGraph) -> None:
        """Persistent buffers for everything but the batch; states at their initial value unless the graph holds one."""
        signature = self.signature
        for role, name in signature.graph_inputs():
            if role in ("input", "tangent"):
                continue
            value = self._inputs.get(name)
            shape = None if value is None else static_shape(value)
            if value is None or shape is None or value.dtype is None:
                raise InputError(
                    f"{role} %{name} is not a graph input with a static shape", "`ortgraph verify` shows what is wrong"
                )
            buffer = self._memory.add(name, value.dtype.numpy(), shape)
            if role in ("parameter", "frozen", "buffer") and name not in graph.values:
                raise InputError(
                    f"{role} {name!r} has no value", "keep the .safetensors beside the .onnx, or set graph.values"
                )
            if name in graph.values:
                checkpoint.assign("the graph's values", [(name, buffer)], graph.values)
        for name, default in signature.scalars.items():
            self._memory.persistent[name][...] = default
        for state in signature.states:
            if state.input not in graph.values:
                self._memory.persistent[state.input][...] = state.initial

    def _module_sources(self) -> list[str]:
        return [*(p.name for p in self.signature.parameters), *(b.name for b in self.signature.buffers)]

    def _module_names(self) -> dict[str, str]:
        """Graph input by module name, tied names included."""
        parameters = {n: p.name for p in self.signature.parameters for n in (p.name, *p.tied)}
        return parameters | {n: b.name for b in self.signature.buffers for n in (b.name, *b.tied)}

    def _checkpoint_values(self) -> dict[str, np.ndarray]:
        persistent = self._memory.persistent
        values = {n: persistent[n] for n in self._module_sources()}
        values.update({f"state/{s.name}": persistent[s.input] for s in self.signature.states})
        return values

    def _made_with(self) -> dict[str, str]:
        return {key: self.signature.metadata.get(key, default) for key, default in _MADE_WITH.items()}

    def _require_optimizer(self, what: str) -> None:
        if not self.has_optimizer:
            raise InputError(
                f"{what}: the graph (stage {self.signature.stage}) has no optimizer",
                "ortgraph.optimize(graph, optimizer=ortgraph.optim.AdamW(...)), or session.gradients(batch)",
            )
