"""TrainingSession: runs a training graph of any stage, keeps parameters and states, and never allocates in a step."""

from __future__ import annotations

import json
import logging
import math
import pathlib
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortgraph.analysis.size_conditions import check_sizes, size_conditions
from ortgraph.errors import BatchError, InputError, NonFiniteLossError, SignatureError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.index_note import from_metadata
from ortgraph.graph.verify import verify
from ortgraph.ops.targets import target_of
from ortgraph.runtime import inference_export, labelled_rows, padded_rows, selection
from ortgraph.runtime.batch import Batch, bind_dims, check_bound, check_dtype, check_limits, named
from ortgraph.runtime.buckets import Buckets, Sizes, size_limits
from ortgraph.runtime.chosen_rows import Buffers, ChosenRows
from ortgraph.runtime.detect import detect_runtime
from ortgraph.runtime.device import check_for_device, device_of
from ortgraph.runtime.index_range import check_indices
from ortgraph.runtime.padding_check import PaddingCheck
from ortgraph.runtime.planned import Planned
from ortgraph.runtime.prepare import prepare
from ortgraph.runtime.profile import NodeTime, read_profile
from ortgraph.runtime.program import Program
from ortgraph.runtime.session_state import SessionState

logger = logging.getLogger(__name__)
MAX_SHAPES = 8
RENAMED = "renamed_inputs"  # written by capture: the user's name by the name in the graph, where they differ


class TrainingSession(SessionState):
    """Runs a training graph.

    A graph that is not lowered yet is lowered first; one with symbolic dimensions is bound to the batch's shapes and
    planned once per shape (docs/training.md, "Batches of several sizes"). The session copies the graph's values at the
    start and never changes the graph.

    Args:
        graph: At any stage, of any origin.
        threads: Threads of one operator; None means all processors of this process.
        target: ``onnxruntime-training`` or ``onnxruntime``; None means the installed one. With a provider
            (``onnxruntime-training:cuda``) parameters, states, batches and the arena are on the device; what is read is
            copied (docs/gpu.md).
        check_finite: Raise NonFiniteLossError when a step's loss is NaN or infinite.
        poison: Overwrite the arena with NaN before each run, and check after it that no byte changed that belongs to no
            value (debugging: reads of memory that was not written show, writes beyond a buffer raise PlanError).
        max_shapes: Batch shapes whose programs are kept; the one unused for longest goes first.
        on_plan: Called with a ``Planned`` after each program that is made.
        buckets: Sizes by symbolic dimension, a list or ``"powers of two"``: batches are padded to the next one.
        padding: What to pad each data input with that has such a dimension.
        check_padding: Compare the first rows of the first batch that is padded along a dimension with and without
            padding. False declares that padding changes nothing.

    Raises:
        InputError: A parameter or buffer has no value, or its shape does not fit; an argument does not fit the graph.
        VerificationError: The graph breaks an invariant of level ``signature``: nodes out of order, a lost output.
        RuntimeSetupError: No, several or an unsupported ONNX Runtime, or one without the target's provider.
    """

    def __init__(
        self,
        graph: TrainingGraph,
        threads: int | None = None,
        target: str | None = None,
        check_finite: bool = True,
        poison: bool = False,
        max_shapes: int = MAX_SHAPES,
        on_plan: Callable[[Planned], None] | None = None,
        buckets: Mapping[str, Sizes] | None = None,
        padding: Mapping[str, Any] | None = None,
        check_padding: bool = True,
    ) -> None:
        if not isinstance(graph, TrainingGraph):
            hint = "give result.graph" if hasattr(graph, "report") else "ortgraph.load(path) reads one"
            raise InputError(f"a session runs a TrainingGraph, not {type(graph).__name__}", hint)
        verify(graph, "signature")
        if max_shapes < 1:
            raise InputError(f"max_shapes={max_shapes}", "1 or more")
        self.target = target_of(target or detect_runtime().target).text
        device = device_of(self.target)
        if not device.on_host:
            check_for_device(graph, self.target, poison)
        super().__init__(graph, device)
        try:
            self._given_names: dict[str, str] = dict(json.loads(self.signature.metadata.get(RENAMED, "{}")))
        except (ValueError, TypeError) as error:
            raise SignatureError(f"the stored {RENAMED} does not parse: {error}", "capture the graph again") from error
        self._index_notes = from_metadata(self.signature.metadata)
        self.threads = threads
        self._check_finite, self._poison = check_finite, poison
        self._prepared: OrderedDict[tuple, TrainingGraph] = OrderedDict()
        self._evaluation: OrderedDict[tuple, TrainingGraph] = OrderedDict()
        self._programs: OrderedDict[tuple, Program] = OrderedDict()
        self._evaluation_form: TrainingGraph | None = None
        self._rows = ChosenRows(graph)
        self._max_shapes, self._on_plan = max_shapes, on_plan
        self._made: set[tuple[str, tuple]] = set()
        self._limits, self._conditions = size_limits(graph), size_conditions(graph)
        self._buckets = Buckets(graph, buckets or {}, padding or {}) if buckets or padding else None
        self._padding = PaddingCheck(graph, self._memory, self.target) if check_padding else None
        self._outputs = {v.name: v for v in graph.graph.outputs}
        self._sizes: dict[str, int] = {}

    # -- running ------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, learning_rate: float | None = None) -> float:
        """Forward, backward and update in one run. Returns the loss before the update.

        Parameters are updated while the graph runs, so a non-finite loss is found after the fact: load a checkpoint.
        With a loss scale a step whose gradients overflow changes nothing but the scale and ``skipped_steps``, and is no
        error.

        Args:
            batch: Dict by input name, or tuple in the order of the graph's inputs; numpy arrays or torch tensors. It
                is copied: the caller may reuse its memory.
            learning_rate: From now on; None keeps the last one (at first the optimizer's).

        Raises:
            InputError: The graph has no optimizer, or the rate is negative or no number.
            BatchError: The batch does not fit the graph's inputs.
            NonFiniteLossError: The loss is NaN or infinite.
        """
        self._require_optimizer("step")
        if learning_rate is not None:
            self.learning_rate = learning_rate
        self._set_seed(1.0 / self.accumulation_steps)
        program = self._ready("step", batch)
        skipped = self.skipped_steps
        program.run()
        for state in self.signature.states:
            if state.kind == "accumulator":
                self._memory.persistent[state.input].fill(0)
        self.steps += 1
        loss = float(program.value(self.signature.loss))
        if self.skipped_steps != skipped:
            logger.info("step %d: gradients overflow, nothing is updated; loss scale %g", self.steps, self.loss_scale)
        elif self._check_finite and not math.isfinite(loss):
            raise NonFiniteLossError(
                f"the loss is {loss} at step {self.steps}; parameters were updated with it",
                "load the last checkpoint; lower the learning rate or set max_grad_norm (check_finite=False to go on)",
            )
        return loss

    def accumulate(self, batch: Batch) -> float:
        """Forward and backward of one micro-batch; gradients are added up until the next ``step``. Returns the loss.

        Raises:
            InputError: The optimizer was attached without accumulation.
        """
        self._require_optimizer("accumulate")
        if not any(s.kind == "accumulator" for s in self.signature.states):
            raise InputError("this graph cannot accumulate gradients", "attach the optimizer with accumulation_steps=N")
        self._set_seed(1.0 / self.accumulation_steps)
        program = self._ready("accumulate", batch)
        program.run()
        return float(program.value(self.signature.loss))

    def gradients(
        self, batch: Batch, loss_gradient: float = 1.0, tangents: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Gradients of the loss by original parameter name. Works at every stage and commits nothing.

        Args:
            batch: As for ``step``.
            loss_gradient: Factor on the loss.
            tangents: Further seeds by output name, where the graph was captured with them; zero when left out.

        Returns:
            Copies, of the shape and dtype of each trainable parameter.
        """
        self._set_seed(loss_gradient)
        program = self._ready("gradients", batch, tangents)
        program.run()
        return {name: program.value(output).copy() for name, output in self.signature.gradients.items()}

    def input_gradients(self, batch: Batch, loss_gradient: float = 1.0) -> dict[str, np.ndarray]:
        """Gradients of the loss by data input, for the inputs captured with one; copies, nothing is committed."""
        self._set_seed(loss_gradient)
        program = self._ready("input_gradients", batch)
        program.run()
        return {name: self._own(program, output) for name, output in self.signature.input_gradients.items()}

    def loss(self, batch: Batch) -> float:
        """The training loss (dropout and batch statistics as in a step); forward only, commits nothing."""
        program = self._ready("loss", batch)
        program.run()
        return float(program.value(self.signature.loss))

    def evaluate(self, batch: Batch) -> dict[str, np.ndarray]:
        """Loss and outputs in evaluation mode (no Dropout, running statistics); forward only, commits nothing.

        Whatever else draws random numbers in training (Dropout2d, noise of the module's own) does so here: a warning
        is logged.

        Raises:
            InputError: The graph was lowered without keeping its evaluation form, and has training-only operators.
        """
        program = self._ready("evaluate", batch)
        program.run()
        names = dict.fromkeys((self.signature.loss, *self.signature.outputs))
        return {name: self._own(program, name) for name in names}

    def results(self, batch: Batch) -> dict[str, np.ndarray]:
        """Every output of the graph by name, in training mode: outputs, gradients, new values; commits nothing."""
        self._set_seed(1.0 / self.accumulation_steps)
        program = self._ready("results", batch)
        program.run()
        names = dict.fromkeys(name for _, name in self.signature.graph_outputs())
        return {name: self._own(program, name) for name in names}

    def program(self, kind: str, batch: Batch) -> Program:
        """The program of a kind for this batch's shapes, made if need be, with the batch in its input buffers."""
        return self._ready(kind, batch)

    def check_memory(self, batch: Batch, kind: str = "gradients") -> None:
        """Run a program once, node by node, and check every byte that it writes (debugging; slow).

        Lifetimes, in-place results, writes outside of buffers and reads of dead memory are checked without trust in the
        plan. ``step`` and ``accumulate`` change parameters and states.

        Raises:
            PlanError: The plan or a kernel is wrong; names node and value.
        """
        if not self._memory.device.on_host:
            raise InputError(
                f"memory is checked on the host, not on {self.target}", "a session with a target of the CPU"
            )
        self._set_seed(1.0 / self.accumulation_steps if kind in ("step", "accumulate", "results") else 1.0)
        self._ready(kind, batch).check()

    def profile(self, batch: Batch, kind: str = "gradients", runs: int = 10) -> list[NodeTime]:
        """Median kernel time per node of ``gradients``, ``loss``, ``evaluate`` or ``step``, in order of execution.

        Profiling ``step`` trains: parameters and states are put back afterwards.
        """
        before = {name: buffer.copy() for name, buffer in self._memory.persistent.items()}
        source = self._ready(kind, batch)
        with tempfile.TemporaryDirectory() as folder:
            program = source.again(str(pathlib.Path(folder, kind)))
            for _ in range(runs + 1):
                program.run()
            operators = {n.name or "": f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in program.order}
            times = read_profile(program.end_profiling(), operators)
        for name, buffer in before.items():
            self._memory.persistent[name][...] = buffer
        return times

    # -- figures ------------------------------------------------------------------------------------------------

    @property
    def programs(self) -> tuple[Program, ...]:
        """Programs made so far, the latest last."""
        return tuple(self._programs.values())

    @property
    def arena_bytes(self) -> int:
        """Bytes of the shared arena: the largest of the programs made so far."""
        return max((p.arena_bytes for p in self.programs), default=0)

    @property
    def max_load_bytes(self) -> int:
        """The lower bound beside ``arena_bytes``."""
        return max((p.max_load_bytes for p in self.programs), default=0)

    # -- inside -------------------------------------------------------------------------------------------------

    def _set_seed(self, value: float) -> None:
        if self.signature.loss_gradient is not None:
            self._memory.persistent[self.signature.loss_gradient][...] = value
        elif value != 1.0:
            raise InputError(
                "the graph has no loss_gradient input: its gradients cannot be scaled", "capture the graph again"
            )

    def _ready(self, kind: str, batch: Batch, tangents: Mapping[str, np.ndarray] | None = None) -> Program:
        """The program for this batch's shapes, with the batch copied into its input buffers."""
        arrays = named(batch, self.signature.inputs, self._given_names)
        dims: dict[str, int] = {}
        for name, array in arrays.items():
            check_dtype(name, array, self._inputs[name].dtype.numpy())  # type: ignore[union-attr]
            bind_dims(name, array, self._inputs[name], dims)
        for name, array in arrays.items():
            check_bound(name, array, self._inputs[name], dims)
        check_limits(dims, self._limits)
        self._sizes = dims
        if self._buckets is not None:
            if self._padding is not None:
                self._padding.check(self._buckets, arrays, dims, outputs=kind in ("evaluate", "results"))
            dims = self._buckets.sizes(dims)
            arrays = self._buckets.pad(arrays, dims)
        check_sizes(self._conditions, dims)
        program = self._program(kind, self._key(kind, arrays, dims))
        for note in self._index_notes:
            if note.input in program.inputs:
                check_indices(note, arrays[note.input], dims, self._given_names.get(note.input, note.input))
        for name, array in arrays.items():
            buffer = program.inputs.get(name)
            if isinstance(buffer, np.ndarray):
                np.copyto(buffer, array)
            elif buffer is not None:
                buffer[...] = array
        self._feed_tangents(program, tangents or {})
        return program

    def _own(self, program: Program, name: str) -> np.ndarray:
        """A copy of a result, without what belongs to padding."""
        result = program.value(name)
        if self._buckets is not None and name in self._outputs:
            result = self._buckets.cut(name, self._outputs[name], result, self._sizes)
        return result.copy()

    def _key(self, kind: str, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        """What tells programs of a kind apart: sizes of dimensions, and the rows that the batch's mask and labels need."""
        key = tuple(sorted(dims.items()))
        if kind not in labelled_rows.KINDS:
            return key
        chosen = self._rows.of(arrays, dims)
        key = (*key, (padded_rows.KEY, chosen.packed)) if chosen.packed else key
        return (*key, (labelled_rows.KEY, chosen.labelled)) if chosen.labelled else key

    def _feed_tangents(self, program: Program, tangents: Mapping[str, np.ndarray]) -> None:
        unknown = sorted(set(tangents) - set(self.signature.tangents))
        if unknown:
            raise BatchError(f"no tangent for output {unknown[0]!r}", "capture with that output differentiable")
        for output, name in self.signature.tangents.items():
            if name not in program.inputs:
                continue
            buffer, given = program.inputs[name], tangents.get(output)
            if given is not None and np.shape(given) != buffer.shape:
                raise BatchError(
                    f"the tangent of output {output!r} has shape {list(np.shape(given))}", f"give {list(buffer.shape)}"
                )
            buffer[...] = 0 if given is None else given

    def _program(self, kind: str, key: tuple[tuple[str, int], ...]) -> Program:
        found = self._programs.get((kind, key))
        if found is None:
            start = time.perf_counter()
            found = self._make_program(kind, dict(key), key)
            self._programs[kind, key] = found
            self._forget()
            sizes = dict(key)
            rows, seconds = sizes.pop(labelled_rows.KEY, 0), time.perf_counter() - start
            sizes.pop(padded_rows.KEY, 0)
            planned = Planned(kind, sizes, rows, seconds, found.arena_bytes, (kind, key) in self._made)
            self._made.add((kind, key))
            planned.log(self._max_shapes)
            if self._on_plan is not None:
                self._on_plan(planned)
        self._programs.move_to_end((kind, key))
        return found

    def _make_program(self, kind: str, dims: dict[str, int], key: tuple) -> Program:
        wanted, pairs = selection.wanted_outputs(self.signature, kind)
        if kind == "evaluate":
            if self._evaluation_form is None:
                self._evaluation_form = inference_export.evaluation_form(self.graph)
                if (drawing := inference_export.drawn(self._evaluation_form)) is not None:
                    logger.warning("evaluation draws random numbers as training does: %s", drawing)
            source, cache = self._evaluation_form, self._evaluation
        else:
            source, cache = self.graph, self._prepared
        chosen = Buffers(dims.pop(padded_rows.KEY, 0), dims.pop(labelled_rows.KEY, 0))
        if key not in cache:
            cut = self._rows.prepare(chosen, dims, self.target) if chosen else None
            cache[key] = prepare(source, dims, self.target) if cut is None else cut
        return self._new_program(kind, cache[key], wanted, pairs)

    def _new_program(
        self, kind: str, graph: TrainingGraph, wanted: Sequence[str], pairs: Sequence[tuple[str, str]]
    ) -> Program:
        return Program(kind, graph, wanted, pairs, self._memory, self.threads, self._poison)

    def _forget(self) -> None:
        """Drop the programs of the shape that was unused for longest, beyond ``max_shapes``; buffers for labels are none."""
        latest = list(dict.fromkeys(_shape(key) for _, key in reversed(self._programs)))
        for old in latest[self._max_shapes :]:
            logger.info("forgetting the programs for %s", ", ".join(f"{n}={s}" for n, s in old))
            for kind_key in [k for k in self._programs if _shape(k[1]) == old]:
                del self._programs[kind_key]
            for cache in (self._prepared, self._evaluation):
                for key in [k for k in cache if _shape(k) == old]:
                    del cache[key]


def _shape(key: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """The sizes of dimensions in a program's key."""
    return tuple(part for part in key if part[0] not in (labelled_rows.KEY, padded_rows.KEY))
