"""Benchmarks: one file per question, each against its peers in one run (``python -m bench.NAME`` from the root)."""
