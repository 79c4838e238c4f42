"""docs/benchmarks.md, from the files that the benchmarks write.

python -m bench.step --all --precision both --json step.json
python -m bench.optimizer --json optimizer.json
python -m bench.tables step.json [--optimizer optimizer.json] [--note TEXT] > docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Iterable, Sequence
from typing import Any

from bench.step_rows import ALL, BEST, COMPILE, EAGER, PEAK_TARGETS, RAW, STOCK, Result, Row, peaks, read_json, results
from bench.workloads import MEASURED

COLUMNS = ((EAGER, BEST), (COMPILE, BEST), (EAGER, STOCK), (COMPILE, STOCK), (RAW, ALL))
DESCRIPTIONS = {
    "bert-256x4": "BERT sequence classification, hidden 256, 4 layers, batch 8, sequence 128",
    "bert-768x4": "BERT sequence classification, hidden 768, 4 layers, batch 4, sequence 128",
    "gpt2-256x4": "GPT-2 language model, hidden 256, 4 layers, batch 8, sequence 128, 8,192 words",
    "t5-256x3": "T5, hidden 256, 3 + 3 layers, batch 8, sequence 64, 8,192 words",
    "llama-256x4": "Llama, hidden 256, 4 layers, batch 4, sequence 128, 8,192 words",
    "vit-192x6": "ViT, hidden 192, 6 layers, batch 8, 96 pixels in patches of 8",
    "resnet-18-b8": "ResNet-18 with batch statistics, batch 8, 96 pixels",
    "bert-mlm-256x4": "BERT masked language model, as the first, 30,522 words, tied head, 15 % of positions labelled",
}
_PACKAGES = ("torch", "transformers", "onnxruntime-training-cpu", "onnxruntime-training", "onnxruntime", "onnx-ir")
_PRECISIONS = {"fp32": "float32", "bf16": "bf16"}


def page(rows: Sequence[Row], optimizer: dict[str, Any] | None = None, note: str = "") -> str:
    """The whole page."""
    parts = [_head(rows, note), _targets(rows)]
    parts += [_precision(rows, p) for p in _PRECISIONS if any(r.precision == p for r in rows)]
    if optimizer is not None:
        parts.append(_optimizer(optimizer))
    parts.append(_commands())
    return "\n\n".join(parts) + "\n"


def _head(rows: Sequence[Row], note: str) -> str:
    first = rows[0]
    versions = ", ".join(f"{n} {v}" for n, v in versions_of(_PACKAGES).items())
    described = "; ".join(f"`{n}`: {DESCRIPTIONS[n]}" for n in _workloads(rows) if n in DESCRIPTIONS)
    lines = [
        "# Benchmarks",
        f"{first.machine}; {first.threads} threads; Python {platform.python_version()}, {versions}.",
        f"A whole training step: forward, backward and AdamW, random weights, dropout off. Every side is a process of its"
        f" own; our steps and a peer's alternate, {first.steps} each, for {max(r.rounds for r in rows)} rounds. A figure"
        " is the median of the rounds' ratios, peer's time over ours: above 1 ortgraph is faster. Quartiles are in"
        " brackets.",
        "PyTorch counts with the faster of `sdpa` and `eager` attention and with fused AdamW; bf16 is `torch.autocast`."
        " Its float32 products go through MKL, which takes a slow path on AMD processors: *best* tells MKL that the"
        " processor is an Intel one, *stock* does not. The raw joint graph is what capture gives, AdamW in the graph,"
        " with all of ONNX Runtime's own optimizations on.",
        "*Matrix peak*: products and convolutions of the captured graph, before any optimization, per second of our"
        " step, over the machine's best rate on products of the same shapes (the best of ONNX Runtime, PyTorch and our"
        " kernel). Work that need not be done counts, so that it can exceed what products alone would give.",
        f"Workloads: {described}." if described else "",
    ]
    if note:
        lines.insert(1, f"> {note}")
    return "\n\n".join(line for line in lines if line)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _workloads(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(r.workload for r in rows)
    return [n for n in MEASURED if n in names] + [n for n in names if n not in MEASURED]


def _targets(rows: Sequence[Row]) -> str:
    lines = ["## Against the targets", "", "| against | geometric mean | target | worst workload | target |"]
    lines.append("|---|---|---|---|---|")
    lines += [_target_line(r) for r in results(rows)]
    shares = [
        f"{share:.0%} of the matrix peak on `{n}` in {_PRECISIONS[p]} (target {PEAK_TARGETS[n, p]:.0%})"
        for (n, p), share in sorted(peaks(rows).items())
        if (n, p) in PEAK_TARGETS
    ]
    return "\n".join(lines) + (f"\n\n{'; '.join(shares)}." if shares else "")


def _target_line(result: Result) -> str:
    target = result.target
    mean = f"{result.mean:.2f}" if result.mean is not None else "-"
    worst = f"{result.worst[1]:.2f} (`{result.worst[0]}`)" if result.worst is not None and target.worst else "-"
    missing = f" (without {', '.join(f'`{n}`' for n in result.missing)})" if result.missing else ""
    asked = f"{target.worst:g}" if target.worst is not None else "-"
    name = f"{target.against}, float32" if target.precision == "fp32" else target.against
    return f"| {name}{missing} | {mean} | {target.mean:g} | {worst} | {asked} |"


def _precision(rows: Sequence[Row], precision: str) -> str:
    rows = [r for r in rows if r.precision == precision]
    columns = [c for c in COLUMNS if any((r.peer, r.setting) == c for r in rows)]
    heads = " | ".join(f"{peer}, {setting}" for peer, setting in columns)
    lines = [f"## {_PRECISIONS[precision]}", "", f"| workload | ortgraph, ms | matrix peak | {heads} |"]
    lines.append("|---|---|---|" + "---|" * len(columns))
    errors: dict[str, None] = {}
    for name in _workloads(rows):
        own = [r for r in rows if r.workload == name]
        times = [r.ms_ortgraph for r in own if r.ms_ortgraph is not None]
        shares = [r.peak_fraction for r in own if r.peak_fraction is not None]
        cells = [_cell([r for r in own if (r.peer, r.setting) == c]) for c in columns]
        share = f"{shares[0]:.0%}" if shares else "-"
        lines.append(f"| `{name}` | {f'{times[0]:.1f}' if times else '-'} | {share} | {' | '.join(cells)} |")
        errors |= {f"`{name}`, {r.peer}, {r.setting}: {r.error}": None for r in own if r.error}
    return "\n".join(lines) + ("\n\nFailed: " + "; ".join(errors) + "." if errors else "")


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    row = rows[0]
    if row.ratio_median is None:
        return "failed"
    return f"{row.ratio_median:.2f} ({row.ratio_low:.2f} to {row.ratio_high:.2f})"


def _optimizer(found: dict[str, Any]) -> str:
    share, gain, rates = found["share_of_copy"], found["against_pytorch"], found["gb_per_s"]
    listed = ", ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items())
    return (
        f"## AdamW over {found['parameters'] / 1e6:.0f} million parameters\n\n"
        f"{share['median']:.0%} of the copy bandwidth (quartiles {share['low']:.0%} to {share['high']:.0%}; target"
        f" {found['target_share']:.0%}) and {gain['median']:.2f} times the speed of PyTorch's fused AdamW"
        f" ({gain['low']:.2f} to {gain['high']:.2f}; target above 1), at 28 bytes per parameter. Measured: {listed}."
    )


def _commands() -> str:
    return (
        "## Commands\n\n```sh\npython -m bench.step --all --precision both --json step.json\n"
        "python -m bench.optimizer --json optimizer.json\n"
        "python -m bench.tables step.json --optimizer optimizer.json > docs/benchmarks.md\n```\n\n"
        "`--workload file.py:build` runs any other model the same way; `python -m bench.profile --workload NAME` says"
        " where a step's time goes, by group of operators, for us and for PyTorch."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", help="files of bench.step --json; later rows replace earlier ones")
    parser.add_argument("--optimizer", help="file of bench.optimizer --json")
    parser.add_argument("--note", default="", help="a remark on top")
    options = parser.parse_args()
    rows = {(r.workload, r.precision, r.peer, r.setting): r for path in options.rows for r in read_json(path)}
    optimizer = json.loads(pathlib.Path(options.optimizer).read_text()) if options.optimizer else None
    print(page(list(rows.values()), optimizer, options.note), end="")


if __name__ == "__main__":
    main()
