"""PatternPass: a custom fusion as a pattern, a condition and a replacement, in onnxscript's pattern language."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import onnx_ir as ir

from ortgraph.errors import PassError
from ortgraph.graph import TrainingGraph
from ortgraph.manager import registry
from ortgraph.manager.base import Refusal
from ortgraph.manager.rewrite import Match, RewritePass
from ortgraph.ops.builder import Builder


@dataclasses.dataclass(frozen=True)
class PatternPass(RewritePass):
    """A RewritePass whose match is an onnxscript pattern.

    Subclasses give three methods over the same named values:

    * ``pattern(op, x, ...)`` builds the pattern; ``op.Add(x, y)``, attributes as in onnxscript;
    * ``condition(x, ...)`` returns a reason to refuse, or None;
    * ``replacement(op, x, ...)`` builds the new nodes with a Builder and returns the new output(s).

    Class attributes:
        commute: Try both operand orders of commutative operators.
        after: Stage after which the pass is inserted when it comes from a plugin.
    """

    commute: ClassVar[bool] = True
    after: ClassVar[str] = "optimized"

    def pattern(self, op: Any, *values: Any) -> Any:
        raise NotImplementedError

    def condition(self, **values: Any) -> str | None:
        return None

    def replacement(self, op: Builder, **values: Any) -> ir.Value | Sequence[ir.Value]:
        raise NotImplementedError

    def match(self, node: ir.Node, graph: TrainingGraph) -> Match | Refusal | None:
        for rule in _rules(self):
            found = rule.match(graph.model, graph.graph, node, check_nodes_are_removable=False)
            if found:
                order = {n: i for i, n in enumerate(found.nodes)}
                nodes = tuple(sorted(found.nodes, key=lambda n: (n is node, -order[n])))
                return Match(nodes, tuple(found.outputs), facts=dict(found.bindings))
        return None

    def check(self, match: Match, graph: TrainingGraph) -> str | None:
        _check_names(self.condition, "condition", self.name, (), match)
        return self.condition(**match.facts)

    def rewrite(self, build: Builder, match: Match) -> Sequence[ir.Value]:
        _check_names(self.replacement, "replacement", self.name, ("op",), match)
        made = self.replacement(build, **match.facts)
        return (made,) if isinstance(made, ir.Value) else tuple(made)


def _check_names(function: Callable[..., Any], role: str, name: str, first: tuple[str, ...], match: Match) -> None:
    """Raises PassError, with the place of the function, where it does not take the names of the pattern."""
    try:
        inspect.signature(function).bind(*first, **match.facts)
    except TypeError as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        place = f"{code.co_filename}:{code.co_firstlineno}: " if code is not None else ""
        raise PassError(
            f"{place}the {role} of pass {name} does not take the values of its pattern: {error}",
            f"name its arguments as the pattern does: ({', '.join((*first, *match.facts))})",
        ) from error


@functools.lru_cache(maxsize=64)
def _rules(p: PatternPass) -> tuple[Any, ...]:
    from onnxscript.rewriter import pattern as patterns  # why here: 19 MB, of use to custom passes alone

    rule = patterns.RewriteRule(p.pattern, _never, name=p.name)
    return tuple(rule.commute()) if p.commute else (rule,)


def _never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("replacement is built by ortgraph, not by onnxscript")


def fusion(
    name: str,
    pattern: Callable[..., Any],
    *,
    condition: Callable[..., str | None] | None = None,
    after: str = "optimized",
) -> Callable[[Callable[..., ir.Value | Sequence[ir.Value]]], type[PatternPass]]:
    """Make a registered PatternPass from a pair of functions: decorate the replacement, name the pattern.

    Args:
        name: Command-line name of the pass.
        pattern: ``pattern(op, x, ...)``.
        condition: ``condition(x, ...)`` returns a reason to refuse, or None.
        after: Stage after which a plugin's pass is inserted.
    """
    if not name:
        raise PassError("a fusion needs a name", "@fusion('fuse-my-pattern', pattern)")

    def wrap(replacement: Callable[..., ir.Value | Sequence[ir.Value]]) -> type[PatternPass]:
        members = {
            "name": name,
            "after": after,
            "pattern": staticmethod(pattern),
            "replacement": staticmethod(replacement),
            "__module__": replacement.__module__,
            "__doc__": replacement.__doc__,
        }
        if condition is not None:
            members["condition"] = staticmethod(condition)
        cls: type[PatternPass] = type(replacement.__name__, (PatternPass,), members)
        cls = dataclasses.dataclass(frozen=True)(cls)
        registry.register(cls)
        return cls

    return wrap
