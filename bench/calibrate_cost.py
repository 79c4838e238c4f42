"""Measure the cost table of lowering on this machine.

    python -m bench.calibrate_cost [--out FILE] [--threads 2] [--target onnxruntime-training]

Prints one line per alternative and writes JSON; without --out it rewrites the table shipped in ops/.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from ortgraph.ops.alternatives import SHIPPED_TABLE
from ortgraph.ops.calibrate import machine, measure
from ortgraph.ops.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(SHIPPED_TABLE))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    options = parser.parse_args()
    entries = {}
    for name, entry in measure(options.target, options.threads):
        entries[name] = entry
        print(f"{name:36s} {entry['fixed_us']:10.1f} us + {entry['ns_per_element']:8.3f} ns per element")
    table = {"machine": machine(options.threads), "entries": dict(sorted(entries.items()))}
    pathlib.Path(options.out).write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(f"written: {options.out}")


if __name__ == "__main__":
    main()
