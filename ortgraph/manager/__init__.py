"""Running passes: base classes, manager, text pipelines, registry, instruments, bisection."""

from ortgraph.manager import rules as _rules  # noqa: F401 - registers verifier rules
from ortgraph.manager.base import Changes, GraphPass, Outcome, Refusal
from ortgraph.manager.pass_manager import PassManager, PassRecord, PipelineReport
from ortgraph.manager.pattern import PatternPass, fusion
from ortgraph.manager.pipeline_text import parse_pipeline, pipeline_text
from ortgraph.manager.registry import load_plugin, register
from ortgraph.manager.rewrite import Match, RewritePass

__all__ = [
    "Changes",
    "GraphPass",
    "Match",
    "Outcome",
    "PassManager",
    "PassRecord",
    "PatternPass",
    "PipelineReport",
    "Refusal",
    "RewritePass",
    "fusion",
    "load_plugin",
    "parse_pipeline",
    "pipeline_text",
    "register",
]
