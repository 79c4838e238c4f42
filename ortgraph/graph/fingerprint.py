"""What a pass must leave alone, compared between the graph before and after it. docs/invariants.md has the ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import onnx_ir as ir

from ortgraph.errors import VerificationError
from ortgraph.graph.signature import Signature
from ortgraph.graph.training_graph import TrainingGraph
from ortgraph.graph.verify import live_nodes, producers, reads


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """What must survive a pass within a stage: the signature, which inputs reach an output, which parameters reach
    the loss, which nodes draw, and which draws form the loss and the backward half."""

    signature: Signature
    reaching: frozenset[str]
    forming_loss: frozenset[str]
    draws: tuple[str, ...]
    input_types: tuple[tuple[str, str], ...]
    output_types: tuple[tuple[str, ir.DataType | None, tuple[int | str | None, ...] | None], ...] = ()
    drawn_for_loss: frozenset[str] = frozenset()
    drawn_for_gradients: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Draws:
    """What the fingerprint asks about random nodes.

    Attributes:
        of: Identities of what a node draws (its number or its operator); none for others.
        shown_by: Those that show in an output of a drawing node; none in its mask.
        undone_by: Identities of the draws whose gradient a node computes; none for others.
    """

    of: Callable[[ir.Node], tuple[str, ...]]
    shown_by: Callable[[ir.Value], tuple[str, ...]]
    undone_by: Callable[[ir.Node], tuple[str, ...]]


def fingerprint(graph: TrainingGraph, draws: Draws) -> Fingerprint:
    """What must survive the next pass."""
    live = live_nodes(graph)
    for_loss = producers([v for v in graph.graph.outputs if v.name == graph.signature.loss])
    read = {v for n in for_loss for v in reads(n)} | {v for v in graph.graph.outputs if v.name == graph.signature.loss}
    loss_reads = {v.name or "" for v in read}
    forming = frozenset(p.name for p in graph.signature.parameters if p.name in loss_reads)
    reaching = {v.name or "" for n in live for v in reads(n)} | {v.name or "" for v in graph.graph.outputs}
    names = [v.name or "" for v in graph.graph.inputs]
    of = {n: found for n in graph.graph if n in live and (found := draws.of(n))}
    drawn = sorted(d for found in of.values() for d in found)
    if graph.stage in ("lowered", "planned") or graph.model.functions:
        # a numbered draw may be made again: recomputed, or redrawn for the backward half (in fused regions too)
        drawn = sorted([*{d for d in drawn if "#" in d}, *(d for d in drawn if "#" not in d)])
    types = tuple((v.name or "", f"{v.dtype}{v.shape}") for v in graph.graph.inputs)
    shown = [d for n in of if n in for_loss for v in n.outputs if v in read for d in draws.shown_by(v)]
    late = [n for n in live if n not in for_loss]
    read = {v for n in late for v in reads(n)} | set(graph.graph.outputs)
    backward = [d for n in late if n in of for v in n.outputs if v in read for d in draws.shown_by(v)]
    backward += [d for n in late for d in draws.undone_by(n)]
    return Fingerprint(
        graph.signature,
        frozenset(n for n in names if n in reaching),
        forming,
        tuple(drawn),
        types,
        tuple((v.name or "", v.dtype, _sizes(v)) for v in graph.graph.outputs),
        frozenset(shown),
        frozenset(backward),
    )


def _sizes(value: ir.Value) -> tuple[int | str | None, ...] | None:
    """Dimensions as numbers and names; None where nothing is known."""
    if value.shape is None:
        return None
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def compare(
    before: Fingerprint, after: Fingerprint, by: str, *, moves_stage: bool = False, binds_inputs: bool = False
) -> None:
    """Raise VerificationError when a pass changed what it may not change.

    Args:
        by: The pass.
        moves_stage: The pass moves the graph to another stage: it may add entries, and may replace drawing nodes.
        binds_inputs: The pass binds symbolic dimensions, so input shapes may change.
    """
    lost = sorted(before.reaching - after.reaching)
    if lost:
        what = f"%{lost[0]} no longer reaches any output: it was merged with another input, baked or dropped"
        raise VerificationError(
            f"invariant inputs-keep-their-effect is broken after pass {by}: {what}", "remove the pass"
        )
    idle = sorted(before.forming_loss - after.forming_loss)
    if idle:  # from "stepped" on a parameter reaches its own update whatever became of its readers
        what = f"%{idle[0]} no longer reaches the loss: it was merged with another parameter, baked or dropped"
        raise VerificationError(
            f"invariant inputs-keep-their-effect is broken after pass {by}: {what}", "remove the pass"
        )
    if not moves_stage and before.draws != after.draws:
        gone = sorted(set(before.draws) - set(after.draws)) or sorted(set(after.draws) - set(before.draws))
        what = f"random nodes {', '.join(gone) or 'were duplicated'}: merged, folded, removed or duplicated"
        raise VerificationError(f"invariant random-nodes-are-kept is broken after pass {by}: {what}", "remove the pass")
    unseen = sorted(before.drawn_for_loss - after.drawn_for_loss)
    if unseen and not moves_stage:
        what = f"what {unseen[0]} draws no longer reaches the loss: the node was bypassed"
        raise VerificationError(
            f"invariant draws-keep-their-effect is broken after pass {by}: {what}", "remove the pass"
        )
    unseen = sorted(before.drawn_for_gradients - after.drawn_for_gradients)
    if unseen and not moves_stage:
        what = f"no gradient reads what {unseen[0]} draws any more: its gradient was bypassed, or reads another mask"
        raise VerificationError(
            f"invariant draws-keep-their-effect is broken after pass {by}: {what}", "remove the pass"
        )
    if not moves_stage and before.signature != after.signature:
        raise VerificationError(f"invariant signature-is-kept is broken after pass {by}", "remove the pass")
    changed = dict(before.input_types).items() - dict(after.input_types).items()
    if changed and not (moves_stage or binds_inputs):
        name, was = sorted(changed)[0]
        now = dict(after.input_types).get(name, "gone")
        what = f"input %{name} was {was}, is {now}"
        raise VerificationError(
            f"invariant inputs-keep-their-type is broken after pass {by}: {what}", "remove the pass"
        )
    what = "" if moves_stage else _changed_output(before, after, binds_inputs)
    if what:
        raise VerificationError(
            f"invariant outputs-keep-their-type is broken after pass {by}: {what}", "remove the pass"
        )


def _changed_output(before: Fingerprint, after: Fingerprint, binds_inputs: bool) -> str:
    """Which output has another type or size than before; empty when none has. What is not recorded is not compared."""
    now = {name: (dtype, shape) for name, dtype, shape in after.output_types}
    for name, dtype, shape in before.output_types:
        if name not in now:
            continue  # outputs-are-named tells
        new_dtype, new_shape = now[name]
        if None not in (dtype, new_dtype) and dtype != new_dtype:
            return f"output %{name} was {dtype}, is {new_dtype}"
        if shape is None or new_shape is None:
            continue
        bound = [b for a, b in zip(shape, new_shape, strict=False) if isinstance(b, int) and a not in (b, None)]
        if len(shape) != len(new_shape) or (bound and not binds_inputs):
            return f"output %{name} was {list(shape)}, is {list(new_shape)}"
    return ""
