"""Which outputs of a training graph each program computes, and what it replaces."""

from __future__ import annotations

from ortgraph.errors import InputError
from ortgraph.graph import Signature

_PER_RUN = ("random_step",)  # states that advance at every run that commits, not only at optimizer steps


def training_program(signature: Signature) -> str:
    """The program whose memory and order a plan is for: the one that trains."""
    if signature.reduces:
        return "backward"
    return "step" if any(p.update is not None for p in signature.parameters) else "gradients"


def committing_programs(signature: Signature) -> tuple[str, str]:
    """The programs that replace persistent values."""
    return ("backward", "update") if signature.reduces else ("accumulate", "step")


def program_pairs(signature: Signature, kind: str) -> list[tuple[str, str]]:
    """(input, output) that program ``step``, ``accumulate``, ``backward`` or ``update`` replaces.

    ``backward`` and ``update`` are the two parts of a step between which processes sum gradients. ``step`` does
    everything but the accumulators, which it only reads. ``accumulate`` advances the accumulators, the module buffers and
    what advances at every run.
    """
    buffers = [(b.name, b.update) for b in signature.buffers if b.update is not None]
    parameters = [(p.name, p.update) for p in signature.parameters if p.update is not None]
    states = [(s, s.output) for s in signature.states if s.output is not None]
    if kind == "backward":
        sums = [(p.reduced, p.contribution) for p in signature.parameters if p.reduced and p.contribution]
        return buffers + sums + [(s.input, new) for s, new in states if s.kind in _PER_RUN]
    if kind == "update":
        return parameters + [(s.input, new) for s, new in states if s.kind not in _PER_RUN]
    if kind == "accumulate":
        return buffers + [(s.input, new) for s, new in states if s.kind in ("accumulator", *_PER_RUN)]
    return parameters + buffers + [(s.input, new) for s, new in states if s.kind != "accumulator"]


def wanted_outputs(signature: Signature, kind: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Names of the outputs that a program computes (the loss among them), and its (input, output) pairs.

    Raises:
        InputError: A step in one run, of a graph whose gradients are summed over processes before the update.
    """
    if signature.reduces and kind in ("step", "accumulate"):
        raise InputError(
            f"{kind}: gradients of this graph are summed over processes before the update",
            "ortgraph.distributed.DistributedSession runs it; or optimize without distributed=True",
        )
    pairs = program_pairs(signature, kind) if kind in ("step", "accumulate", "backward", "update") else []
    further = {
        "loss": (),
        "evaluate": signature.outputs,
        "gradients": tuple(signature.gradients.values()),
        "input_gradients": tuple(signature.input_gradients.values()),
        "results": tuple(name for _, name in signature.graph_outputs()),
    }
    names = further.get(kind, tuple(new for _, new in pairs))
    first = () if kind == "update" else (signature.loss,)
    return list(dict.fromkeys((*first, *names))), pairs
