"""A compiled graph on PyTorch's tensors: arguments and results by pointer, saved values in an arena per forward call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch

from ortgraph.capture.torch_translate import DTYPES
from ortgraph.dynamo.arena_pool import Results, arenas, typed
from ortgraph.dynamo.bound_half import BoundHalf, Name
from ortgraph.dynamo.halves import Half, cut
from ortgraph.dynamo.joint_graph import JointGraph
from ortgraph.graph import TrainingGraph, static_shape
from ortgraph.plan.memory.problem import ALIGNMENT
from ortgraph.runtime.index_range import check_indices

_TORCH = {onnx: kind for kind, onnx in DTYPES.items()}
_DRAW = ALIGNMENT  # bytes behind the arena for the random key and step
Source = tuple[str, int]  # ("argument" | "result" | "tangent" | "gradient", position) or ("arena", offset)


@dataclasses.dataclass(frozen=True)
class Result:
    """One result of a half.

    Attributes:
        own: Under which name it has memory of its own; None where it is a copy.
        copy_of: Where its bytes are, when it is no value with memory of its own.
        offset: Where it lies in the arena, when it is handed out there.
        constant: Its value, when it is the same in every run.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    own: Source | None = None
    copy_of: Source | None = None
    constant: torch.Tensor | None = None
    offset: int | None = None


class CompiledGraph:
    """The two halves of a graph as functions of lists of tensors.

    ``forward`` returns the results, then what ``backward`` takes first: the arena, arguments and results that it reads.

    Args:
        joint: Says which graph values are arguments, tangents, results and gradients.
        graph: ``joint.graph``, optimized and lowered.
        threads: Threads of one operator.

    Raises:
        UnsupportedError: A size depends on data.
        RuntimeSetupError: ONNX Runtime refuses a half.
    """

    def __init__(self, joint: JointGraph, graph: TrainingGraph, threads: int | None) -> None:
        self._joint, self.in_arena = joint, joint.in_arena
        self.halves, sessions = cut(joint, graph, threads)
        placement = self.halves.placement
        self.arena_bytes = placement.solution.arena_bytes
        self._values = {v.name: v for half in self._both for v in (*half.computed, *half.inputs)}
        self._values.update((v.name, v) for v in (*graph.graph.inputs, *graph.graph.outputs))
        tail = -(-self.arena_bytes // ALIGNMENT) * ALIGNMENT
        self._draw_at = tail
        self._arena_bytes = tail + _DRAW
        self._arguments = {n: i for i, n in enumerate(joint.primals) if n is not None}
        self._tangents = {n: i for i, n in enumerate(joint.tangents)}
        forward, backward = self.halves.forward, self.halves.backward
        self.results = _results([o for o in joint.outputs], self, "result", forward)
        self._gradients = _results(joint.gradients, self, "gradient", backward)
        reads_f = self._reads(forward, self.results)
        reads_b = self._reads(backward, self._gradients)
        self._forward_args = sorted(i for kind, i in reads_f if kind == "argument")
        self.saved_args = sorted(i for kind, i in reads_b if kind == "argument")
        self.saved_results = sorted(i for kind, i in reads_b if kind == "result")
        self._backward_tangents = sorted(i for kind, i in reads_b if kind == "tangent")
        own_f, own_b = _own(self.results), _own(self._gradients)
        self._slots_f: list[Source] = [*(("argument", i) for i in self._forward_args), *(s for s, _ in own_f)]
        self._slots_b: list[Source] = [
            *(("argument", i) for i in self.saved_args),
            *(("result", i) for i in self.saved_results),
            *(("tangent", i) for i in self._backward_tangents),
            *(s for s, _ in own_b),
        ]
        self._memory_f = Results([(r.shape, r.dtype) for _, r in own_f])
        self._memory_b = Results([(r.shape, r.dtype) for _, r in own_b])
        self._forward = self._bind(forward, sessions[0], self._slots_f)
        self._backward = self._bind(backward, sessions[1], self._slots_b)
        self._notes = [(n, self._arguments[n.input]) for n in joint.notes]

    def __deepcopy__(self, memo: Any) -> CompiledGraph:
        return self  # why: AOTAutograd copies the graph modules that carry it

    @property
    def _both(self) -> tuple[Half, Half]:
        return self.halves.forward, self.halves.backward

    @property
    def token_bytes(self) -> int:
        """Bytes of the tensor that stands for the saved values of one forward call."""
        return self._arena_bytes

    saved_types: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()  # all that is saved lies in the arena

    # --- running -------------------------------------------------------------------------------------------------

    def forward(self, args: list[Any], key: torch.Tensor | None = None) -> list[Any]:
        """Results, the arena of this call, and the arguments and results that ``backward`` reads.

        Args:
            args: Of the function.
            key: What draws are made from, two int64; PyTorch's generator gives one when it is left out.

        Raises:
            BatchError: An index is out of range, or an operator refuses what it is given.
        """
        for note, i in self._notes:
            check_indices(note, args[i].detach().numpy(), {}, note.input)
        arena = arenas.take(self._arena_bytes)
        base = arena.data_ptr()
        if self._joint.random is not None:
            arena[self._draw_at : self._draw_at + 16].view(torch.int64).copy_(random_key() if key is None else key)
        tensors = [_dense(args[i]) for i in self._forward_args]
        tensors += self._memory_f.take()
        self._forward.run(base, [t.data_ptr() for t in tensors])
        sources = dict(zip(self._slots_f, tensors, strict=True))
        results = [self._finish(r, sources, arena) for r in self.results]
        for i, strides in self._joint.strides.items():  # why: what runs next was compiled for PyTorch's layout
            results[i] = torch.empty_strided(results[i].shape, strides, dtype=results[i].dtype).copy_(results[i])
        saved = [sources["result", i] for i in self.saved_results]
        return [*results, arena, *(args[i] for i in self.saved_args), *saved]

    def backward(self, args: list[Any]) -> list[Any]:
        """Gradients by argument, of the arena, the saved arguments and results, and the tangents."""
        count = 1 + len(self.saved_args) + len(self.saved_results)
        arena, saved, tangents = args[0], args[1:count], args[count:]
        if torch._C._autograd._get_current_graph_task_keep_graph() or arena.data_ptr() % ALIGNMENT:
            # why: the backward half writes over saved values that it needs no more
            arena = arenas.take(self._arena_bytes).copy_(arena)
        tensors = [_dense(t) for t in (*saved, *(tangents[i] for i in self._backward_tangents))]
        tensors += self._memory_b.take()
        self._backward.run(arena.data_ptr(), [t.data_ptr() for t in tensors])
        sources = dict(zip(self._slots_b, tensors, strict=True))
        return [self._finish(r, sources, arena) for r in self._gradients]

    def infer(self, args: list[Any]) -> list[Any]:
        """Results alone."""
        return self.forward(args)[: len(self.results)]

    @staticmethod
    def _finish(result: Any, sources: dict[Source, torch.Tensor], arena: torch.Tensor) -> Any:
        if not isinstance(result, Result):
            return result
        if result.own is not None:
            return sources[result.own]
        if result.constant is not None:
            return result.constant.clone()
        if result.offset is not None:
            return typed(arena, result.shape, result.dtype, result.offset)
        assert result.copy_of is not None
        kind, at = result.copy_of
        if kind != "arena":
            return sources[kind, at].detach().clone().reshape(result.shape)
        nbytes = torch.empty(result.shape, dtype=result.dtype, device="meta").nbytes
        return arena[at : at + nbytes].view(result.dtype).reshape(result.shape).clone()

    # --- setting up ----------------------------------------------------------------------------------------------

    def source_of(self, value: ir.Value) -> Source:
        """Where the bytes of a graph value are."""
        name = value.name or ""
        placement = self.halves.placement
        if name in placement.offsets:
            return "arena", placement.offsets[name]
        root = self.halves.storage[name].name or ""
        if root in self._arguments:
            return "argument", self._arguments[root]
        if root in self._tangents:
            return "tangent", self._tangents[root]
        return self._owners[root]

    @property
    def _owners(self) -> dict[str, Source]:
        """Which result has the memory of a storage."""
        found = self.__dict__.get("_owner_map")
        if found is None:
            found = {}
            for kind, names in (("result", self._joint.outputs), ("gradient", self._joint.gradients)):
                for i, name in enumerate(names):
                    if isinstance(name, str):
                        found.setdefault(self.halves.storage[name].name or "", (kind, i))
            self._owner_map = found
        return found

    def _reads(self, half: Half, results: Sequence[Any]) -> set[Source]:
        """What a half needs from outside of the arena, its own results left out."""
        found = {self.source_of(v) for v in (*half.inputs, *half.computed) if v.name not in self._random}
        found.update(r.copy_of for r in results if isinstance(r, Result) and r.copy_of is not None)
        return found

    @property
    def _random(self) -> dict[str, int]:
        """Offsets of the random inputs."""
        names = self._joint.random or ()
        return {n: self._draw_at + 8 * i for i, n in enumerate(names)}

    def _bind(self, half: Half, session: Any, order: Sequence[Source]) -> BoundHalf:
        slots: dict[Source, list[Name]] = {s: [] for s in order}
        fixed = []
        for value, read in (*((v, True) for v in half.inputs), *((v, False) for v in half.computed)):
            name = Name.of(value, read)
            if name.name in self._random:
                fixed.append((name, self._random[name.name]))
                continue
            source = self.source_of(value)
            if source[0] == "arena":
                fixed.append((name, source[1]))
            else:
                slots[source].append(name)
        return BoundHalf(half.name, session, list(slots.values()), fixed)


def _results(names: Sequence[Any], compiled: CompiledGraph, kind: str, half: Half) -> list[Any]:
    """How each result comes about; numbers and None as they are."""
    made: list[Any] = []
    computed = {v.name for v in half.computed}
    owned: set[str] = set()
    graph = compiled.halves.graph.graph
    outputs = {v.name: v for v in (*graph.inputs, *graph.outputs)}
    for i, name in enumerate(names):
        if not isinstance(name, str):
            made.append(name)
            continue
        value = outputs[name]
        shape, dtype = static_shape(value) or (), _TORCH[ir.DataType(value.dtype)]  # type: ignore[arg-type]
        if value.const_value is not None and value.producer() is None:
            array = value.const_value.numpy()
            made.append(Result(shape, dtype, constant=torch.from_numpy(array.copy())))
            continue
        source = compiled.source_of(value)
        root = compiled.halves.storage[name].name or ""
        if name in compiled.in_arena and source[0] == "arena" and root not in owned:
            owned.add(root)
            made.append(Result(shape, dtype, offset=source[1]))
        elif name in computed and source == (kind, i) and root not in owned:
            owned.add(root)
            made.append(Result(shape, dtype, own=source))
        else:
            made.append(Result(shape, dtype, copy_of=source))
    return made


def random_key() -> torch.Tensor:
    """A random key and step 0, from PyTorch's generator: ``torch.manual_seed`` and saved states of it reproduce the draws."""
    drawn = torch.empty(2, dtype=torch.int64).random_()
    drawn[1] = 0
    return drawn


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() and not tensor.is_neg() else tensor.resolve_neg().contiguous()


def _own(results: Sequence[Any]) -> list[tuple[Source, Result]]:
    """The results that have memory of their own, each with its name."""
    return [(r.own, r) for r in results if isinstance(r, Result) and r.own is not None]
