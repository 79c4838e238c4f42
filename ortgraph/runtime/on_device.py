"""A driver for the folder that ``ortgraph artifacts --standard`` writes: numpy and stock onnxruntime, nothing else.

This file is copied into the folder as ``driver.py`` and stands alone there::

    client = Client("artifacts", memory_budget=64 << 20)
    loss = client.step({"x": x, "labels": labels})
    client.weights = average([c.weights for c in clients], [c.seen for c in clients])
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

Arrays = dict[str, np.ndarray]


class Client:
    """One device: its copy of the weights, its optimizer states, and the two models.

    Args:
        folder: The folder.
        threads: Threads of one operator.
        memory_budget: Bytes that a step may take (intermediates, batch, constants, and parameters and states twice, old
            and new). None: no limit.
        seed: Of the random numbers that a step draws (dropout).

    Attributes:
        weights: Parameters and buffers by name, as in ``weights.npz``; may be replaced.
        states: Optimizer states by name.
        learning_rate: Of the next step.
        seen: Rows trained on since ``start_round``.

    Raises:
        MemoryError: A step needs more than the budget, or its sizes are not fixed.
        ValueError: The folder has another format.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        threads: int = 1,
        memory_budget: int | None = None,
        seed: int = 0,
    ) -> None:
        self.folder, self.threads, self.seed = pathlib.Path(folder), threads, seed
        self.manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        if self.manifest["format"] != 1:
            raise ValueError(f"{folder}: format {self.manifest['format']}, this driver knows 1")
        if memory_budget is not None:
            self._check_memory(memory_budget)
        with np.load(self.folder / "weights.npz", allow_pickle=False) as stored:
            self.weights: Arrays = {name: stored[name] for name in stored.files}
        self.learning_rate = float(self.manifest["learning_rate"])
        self._sessions: dict[str, tuple[object, frozenset[str], list[str]]] = {}
        self.states: Arrays = {}
        self.start_round()

    def start_round(self) -> None:
        """Forget optimizer states and the count of rows; weights stay."""
        self.seen = 0
        self.states = {
            name: np.full(s["shape"], self.seed if s["random_key"] else s["initial"], s["dtype"])
            for name, s in self.manifest["states"].items()
        }

    def step(self, batch: Mapping[str, np.ndarray]) -> float:
        """Train on one batch: weights and states become the next ones. Returns the loss."""
        states, weights = self.manifest["states"], {**self.manifest["parameters"], **self.manifest["buffers"]}
        feeds = {**batch, **self.weights, **{s["input"]: self.states[n] for n, s in states.items()}}
        feeds["learning_rate"] = np.array(self.learning_rate, np.float32)
        made = self._run("train_step.onnx", feeds)
        loss = float(made[self.manifest["loss"]])
        self.weights = {n: made[new] if (new := weights[n]) else old for n, old in self.weights.items()}
        self.states = {n: made[s["output"]] if s["output"] else self.states[n] for n, s in states.items()}
        self.seen += len(next(iter(batch.values())))
        return loss

    def evaluate(self, batch: Mapping[str, np.ndarray]) -> Arrays:
        """Loss and outputs of the model in evaluation mode."""
        return self._run("evaluate.onnx", {**batch, **self.weights})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights as ``weights.npz`` has them, whole or not at all."""
        temporary = pathlib.Path(f"{path}.tmp.npz")
        np.savez(temporary, **self.weights)  # type: ignore[arg-type]
        os.replace(temporary, path)

    def _run(self, name: str, feeds: Mapping[str, np.ndarray]) -> Arrays:
        if name not in self._sessions:
            self._sessions[name] = self._load(name)
        session, inputs, outputs = self._sessions[name]
        results = session.run(outputs, {n: v for n, v in feeds.items() if n in inputs})  # type: ignore[attr-defined]
        return dict(zip(outputs, results, strict=True))

    def _load(self, name: str) -> tuple[object, frozenset[str], list[str]]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads
        # The file's order is the order of least memory: nothing may be merged or moved, and freed memory goes back.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        options.enable_cpu_mem_arena = False
        session = onnxruntime.InferenceSession(str(self.folder / name), options, providers=["CPUExecutionProvider"])
        inputs = frozenset(v.name for v in session.get_inputs())
        return session, inputs, [v.name for v in session.get_outputs()]

    def _check_memory(self, budget: int) -> None:
        memory = self.manifest["memory"]
        if memory is None:
            raise MemoryError(
                f"{self.folder}: its sizes are not fixed, so that no budget can be kept (--shapes batch=8)"
            )
        needed = sum(memory.values()) + memory["parameters"] + memory["states"]
        if needed > budget:
            raise MemoryError(f"a step takes {needed} bytes, the budget is {budget}: write smaller artifacts "
                              "(--memory-budget, a smaller batch)")  # fmt: skip


def average(weights: Sequence[Mapping[str, np.ndarray]], counts: Sequence[int]) -> Arrays:
    """The mean of the clients' weights, by the rows that each has seen; integers are the first client's."""
    total = float(sum(counts))
    result: Arrays = {}
    for name, first in weights[0].items():
        if first.dtype.kind != "f":
            result[name] = first
            continue
        parts = (np.float64(c / total) * w[name] for w, c in zip(weights, counts, strict=True))
        result[name] = np.asarray(sum(parts), first.dtype)
    return result


def federated(
    clients: Sequence[Client],
    data: Callable[[int, int], Iterable[Mapping[str, np.ndarray]]],
    rounds: int,
) -> list[float]:
    """Federated averaging: in each round every client trains on its own batches, and all get the mean of the weights.

    Args:
        clients: With equal folders.
        data: The batches of a client (its index) in a round.
        rounds: How many.

    Returns:
        The mean loss of each round.
    """
    history = []
    for number in range(rounds):
        losses = []
        for index, client in enumerate(clients):
            client.start_round()
            losses += [client.step(batch) for batch in data(index, number)]
        shared = average([c.weights for c in clients], [c.seen for c in clients])
        for client in clients:
            client.weights = dict(shared)
        history.append(float(np.mean(losses)))
    return history
