"""Prove model families: ``python -m bench.coverage [--only NAME] [--json FILE] [--pipelines O0,O2] [--markdown]``.

python -m bench.coverage --only bert-masked-lm/sdpa
python -m bench.coverage --json bench/coverage/proofs.json          # the whole matrix; keeps rows of other cases
python -m bench.coverage --json bench/coverage/proofs.json --rotate $(git rev-parse HEAD)   # two of the proven ones again
python -m bench.coverage --json bench/coverage/proofs.json --markdown docs/coverage.md   # writes the page's table
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import pathlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bench.coverage.proof import PIPELINES, prove
from bench.coverage.registry import cases, rotating
from bench.coverage.table import BEGIN, END, markdown
from ortgraph.errors import InputError

_PACKAGES = ("torch", "onnxruntime-training-cpu", "transformers", "peft", "diffusers", "onnx")


def main() -> int:
    """Exit status 1 when a family fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a family or case; may be repeated")
    parser.add_argument("--kind", help="only families of a section of the table")
    parser.add_argument("--json", type=pathlib.Path, help="add the rows to this file, which is written after each one")
    parser.add_argument("--pipelines", default=",".join(PIPELINES), help="presets, with commas between")
    parser.add_argument(
        "--rotate", metavar="KEY", help="the few cases, of the proven ones in --json, that this key chooses"
    )
    parser.add_argument("--count", type=int, default=2, help="how many cases --rotate chooses")
    parser.add_argument("--missing", action="store_true", help="only cases that --json has no proven row of")
    parser.add_argument("--no-fresh", action="store_true", help="leave out the fresh process")
    parser.add_argument("--list", action="store_true", help="print the cases")
    parser.add_argument(
        "--markdown", type=pathlib.Path, metavar="PAGE", help="prove nothing: write the table of --json"
    )
    options = parser.parse_args()
    stored = _read(options.json)
    if options.markdown:
        _write_table(options.markdown, list(stored.values()))
        return 0
    chosen = [c for c in cases(options.only) if options.kind in (None, c.family.kind)]
    if options.missing:
        chosen = [c for c in chosen if stored.get(c.name, {}).get("status") not in ("proven", "refused")]
    if options.rotate:
        known = [c for c in chosen if stored.get(c.name, {}).get("status") == "proven"]
        chosen = list(rotating(known, options.rotate, options.count))
        if not chosen:
            raise InputError(f"--rotate finds no proven case in {options.json}", "give the committed rows as --json")
    if options.list:
        print("\n".join(c.name for c in chosen))
        return 0
    failed = 0
    for case in chosen:
        row = prove(case, options.pipelines.split(","), fresh=not options.no_fresh)
        failed += row.status == "failed"
        print(_text(dataclasses.asdict(row)), flush=True)
        stored[case.name] = dataclasses.asdict(row)
        if options.json and not options.rotate:
            _write(options.json, stored)
    return int(failed > 0)


def _text(row: Mapping[str, Any]) -> str:
    if row["status"] != "proven":
        return f"{row['status']:8} {row['case']:32} {row['seconds']:6.1f} s  {row['message']}"
    nodes = " ".join(f"{name} {count}" for name, count in row["nodes"].items())
    moved = row["moved"].get("share", 0.0)
    return (
        f"{row['status']:8} {row['case']:32} {row['seconds']:6.1f} s  {nodes}; error {row['error']:.1e}"
        f" ({row['own_error']:.1e}), {row['share']:.2f} of what is allowed; AdamW {moved:.2f}"
    )


def _read(path: pathlib.Path | None) -> dict[str, dict[str, Any]]:
    if path is None or not path.exists():
        return {}
    return {row["case"]: row for row in json.loads(path.read_text())["rows"]}


def _write(path: pathlib.Path, stored: Mapping[str, Mapping[str, Any]]) -> None:
    order = [c.name for c in cases()]
    rows = [stored[n] for n in order if n in stored]
    versions: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    path.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")


def _write_table(page: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = page.read_text()
    if BEGIN not in text or END not in text:
        raise InputError(f"{page} has no place for the table", f"put {BEGIN} and {END} into it")
    head, rest = text.split(BEGIN, 1)
    page.write_text(f"{head}{BEGIN}\n\n{markdown(rows)}\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    sys.exit(main())
