"""How long capture and ``optimize -O2`` take on BERT-base, and whether time per node stays flat from 12 to 48 layers.

python -m bench.compile_time [--layers 12,24,48] [--rounds 3] [--json]

BERT-base (hidden 768) is captured and optimized once with AdamW; the growth with depth is measured at hidden 64, since
it depends on nodes and not on sizes. Rounds alternate over the depths; the least time per depth is reported.
"""

from __future__ import annotations

import argparse
import json
import time

from bench.processes import machine
from bench.workloads import bert


def capture_and_optimize(hidden: int, layers: int) -> dict[str, float]:
    import ortgraph

    made = bert(hidden, layers, 2, 32)
    started = time.perf_counter()
    graph = ortgraph.capture(made["module"], made["batch"])
    captured = time.perf_counter()
    result = ortgraph.optimize(graph, "O2", optimizer=ortgraph.optim.AdamW())
    return {
        "nodes": result.report.nodes_before,
        "nodes_after": result.report.nodes_after,
        "capture_s": captured - started,
        "optimize_s": time.perf_counter() - captured,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="12,24,48")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    depths = [int(n) for n in options.layers.split(",")]
    capture_and_optimize(64, 1)  # imports and caches
    base = capture_and_optimize(768, 12)
    growth: dict[int, dict[str, float]] = {}
    for _ in range(options.rounds):
        for depth in depths:
            row = capture_and_optimize(64, depth)
            best = growth.setdefault(depth, row)
            best["capture_s"] = min(best["capture_s"], row["capture_s"])
            best["optimize_s"] = min(best["optimize_s"], row["optimize_s"])
    if options.json:
        print(json.dumps({"machine": machine(), "bert_base": base, "layers": growth}))
        return
    print(machine())
    print(
        f"BERT-base: {base['nodes']} nodes, capture {base['capture_s']:.1f} s, optimize -O2 {base['optimize_s']:.1f} s"
    )
    for depth, row in growth.items():
        per_node = 1e3 * row["optimize_s"] / row["nodes"]
        print(
            f"{depth:3} layers: {row['nodes']:5} nodes, optimize {row['optimize_s']:.2f} s, {per_node:.2f} ms per node"
        )


if __name__ == "__main__":
    main()
