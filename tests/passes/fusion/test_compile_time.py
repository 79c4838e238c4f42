"""Generated kernels of BERT-base compile within half a minute where nothing is cached."""

from __future__ import annotations

import time

import pytest

import ortgraph
from ortgraph.ops import generated
from ortgraph.ops.generated import compiled

pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.slow
def test_bert_base(tmp_path, monkeypatch):
    from bench.workloads import build

    if not generated.available():
        pytest.skip(generated.reason())
    made = build("bert-base")
    graph = ortgraph.capture(made["module"], made["batch"])
    graph = ortgraph.optimize(graph, "O2", optimizer=ortgraph.optim.AdamW()).graph
    names = {n.op_type for n in graph.graph if n.domain == generated.DOMAIN}
    assert len(names) >= 4
    monkeypatch.setenv("ORTGRAPH_CACHE_DIR", str(tmp_path))
    compiled.build.cache_clear()
    start = time.perf_counter()
    library = generated.library_path(graph.model)
    took = time.perf_counter() - start
    compiled.build.cache_clear()
    assert library.is_relative_to(tmp_path)
    assert took < 30.0, f"{took:.1f} s for {len(names)} kernels"
    print(f"{took:.1f} s for {len(names)} kernels")
