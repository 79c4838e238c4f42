"""One capture at several sizes: ``python -m bench.coverage.sizes bert-sequence/sdpa t5/sdpa resnet-basic``.

A family is captured with symbolic batch and lengths. At each of a few sizes, batch 1 and the smallest length among them,
every gradient of ``O0`` and ``O2`` at 1 and 2 threads is compared with PyTorch's by the measure of the proofs, and the
draws are the graph's. Without names: one family of each kind.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import ortgraph
from bench.coverage import measure
from bench.coverage.proof import _owners, feeds
from bench.coverage.reference import _double, _settings, loss_of
from bench.coverage.registry import Built, Case, cases
from bench.coverage.replay import Draws, Replay

FAMILIES = (
    "bert-sequence/sdpa", "bert-masked-lm/eager", "gpt2/sdpa", "t5/sdpa", "llama/sdpa", "vit/sdpa", "resnet-basic",
    "lstm-classifier", "whisper/sdpa",
)  # fmt: skip
# (batch, length, length of targets); causal losses have no term at length 1
SIZES = ((3, 8, 6), (1, 2, 2), (5, 3, 4), (1, 16, 14))
UNROLLED = ("lstm", "gru")  # a graph of as many steps as the example has

Dims = Mapping[str, Mapping[int, str]]


def symbolic(case: Case, batch: Mapping[str, torch.Tensor]) -> dict[str, dict[int, str]]:
    """The first axis of every input is the batch; the second of an integer input is a length."""
    found: dict[str, dict[int, str]] = {}
    lengths: dict[int, str] = {}
    for name, tensor in batch.items():
        found[name] = {0: "batch"}
        if tensor.dim() > 1 and not tensor.is_floating_point() and not case.name.startswith(UNROLLED):
            found[name][1] = lengths.setdefault(tensor.shape[1], ("length", "target")[len(lengths)])
    return found


def resized(batch: Mapping[str, torch.Tensor], dims: Dims, sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """The batch at other sizes: cut, or repeated from its start."""
    made = {}
    for name, tensor in batch.items():
        for axis, dim in dims[name].items():
            tensor = tensor.index_select(axis, torch.arange(sizes[dim]) % tensor.shape[axis])
        inside = "positions" in name and tensor.dim() == 1 and "length" in dims.get("input_ids", {}).values()
        made[name] = tensor.clamp(max=sizes["length"] - 1) if inside else tensor.contiguous()
    return made


def reference(case: Case, batch: Any, draws: Draws, *, double: bool) -> tuple[float, dict[str, np.ndarray]]:
    """PyTorch's loss and gradients, by every name of a tied parameter."""
    built = case.build()
    with _settings(1, torch.float64 if double else torch.float32):
        module = built.module.double() if double else built.module
        with Replay(draws, 0, double=double):
            loss = loss_of(built, module, _double(batch) if double else batch)
        loss.backward()
    named = module.named_parameters(remove_duplicate=False)
    return loss.item(), {n: p.grad.numpy().copy() for n, p in named if p.grad is not None}


def check(case: Case) -> list[str]:
    """Lines about one family: a size each."""
    built = case.build()
    dims = symbolic(case, built.batch)
    captured = ortgraph.capture(built.module, built.batch, dims, built.loss)
    draws = Draws.of(captured)
    forms = {preset: ortgraph.optimize(captured, preset, verify="types").graph for preset in ("O0", "O2")}
    sessions = {(p, n): ortgraph.TrainingSession(g, threads=n) for p, g in forms.items() for n in (1, 2)}
    lines = []
    for rows, length, target in SIZES:
        batch = resized(built.batch, dims, {"batch": rows, "length": length, "target": target})
        arrays = feeds(Built(built.module, batch, built.loss))
        (loss, own), (_, exact) = (reference(case, batch, draws, double=d) for d in (False, True))
        worst = 0.0
        for session in sessions.values():
            got = session.gradients(arrays)
            have = {f"gradient/{n}": g for n, g in got.items()}
            found = measure.gradients(got, _owners(have, own), _owners(have, exact))
            wrong = abs(session.loss(arrays) - loss) > 1e-5 * abs(loss) + 1e-6
            worst = float(np.inf) if wrong else max(worst, found.share)
        lines.append(
            f"{case.name:24} batch {rows}, lengths {length}, {target}: {worst:.2f} of the error that is allowed"
        )
        if not worst <= 1:
            lines[-1] += "  WRONG"
    return lines


def main(names: list[str]) -> int:
    """Check families and print a line for each size. Returns how many lines are wrong."""
    wrong = 0
    for case in cases(names or FAMILIES):
        for line in check(case):
            wrong += line.endswith("WRONG")
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
