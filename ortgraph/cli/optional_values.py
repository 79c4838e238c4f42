"""Options whose value may be left out: ``--print-after`` alone means every pass.

The option parser knows options with a value and options without, not both. So a bare one gets its default value here,
before parsing.
"""

from __future__ import annotations

from collections.abc import Sequence

EVERY = "every"
_DEFAULTS = {"--print-after": EVERY}


def join_optional_values(words: Sequence[str]) -> list[str]:
    """``--print-after`` becomes ``--print-after=every``; ``--print-after fuse-gelu`` keeps its known pass name."""
    from ortgraph.manager import registry

    joined: list[str] = []
    known: set[str] | None = None
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*joined, word, *rest]
        if word not in _DEFAULTS:
            joined.append(word)
            continue
        known = set(registry.names()) if known is None else known
        value = rest.pop(0) if rest and rest[0] in known else _DEFAULTS[word]
        joined.append(f"{word}={value}")
    return joined
