"""Which outputs of a training graph each program computes, and what it replaces."""

from __future__ import annotations

from ortgraph.graph import Signature

_PER_RUN = ("random_step",)  # states that advance at every run that commits, not only at optimizer steps


def program_pairs(signature: Signature, kind: str) -> list[tuple[str, str]]:
    """(input, output) that program ``step`` or ``accumulate`` replaces.

    ``step`` does everything but the accumulators, which it only reads. ``accumulate`` advances the accumulators, the
    module buffers and what advances at every run.
    """
    buffers = [(b.name, b.update) for b in signature.buffers if b.update is not None]
    parameters = [(p.name, p.update) for p in signature.parameters if p.update is not None]
    states = [(s, s.output) for s in signature.states if s.output is not None]
    if kind == "accumulate":
        return buffers + [(s.input, new) for s, new in states if s.kind in ("accumulator", *_PER_RUN)]
    return parameters + buffers + [(s.input, new) for s, new in states if s.kind != "accumulator"]


def wanted_outputs(signature: Signature, kind: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Names of the outputs that a program computes (the loss among them), and its (input, output) pairs."""
    pairs = program_pairs(signature, kind) if kind in ("step", "accumulate") else []
    further = {
        "loss": (),
        "evaluate": signature.outputs,
        "gradients": tuple(signature.gradients.values()),
        "input_gradients": tuple(signature.input_gradients.values()),
        "results": tuple(name for _, name in signature.graph_outputs()),
    }
    names = further.get(kind, tuple(new for _, new in pairs))
    return list(dict.fromkeys((signature.loss, *names))), pairs
