"""The ``precision`` option of ``optimize`` and of the command line: its values, and the pass that it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ortgraph.errors import InputError
from ortgraph.ops.precision import FP32, PRECISIONS

Overrides = Mapping[str, "str | Sequence[str]"] | str
_ALIASES = {
    "bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "half": "fp16", "fp16": "fp16",
    "float32": "fp32", "float": "fp32", "fp32": "fp32",
}  # fmt: skip
_KEYS = ("keep", "low")
_PATTERN = re.compile(r"[^\s,{}|;=]+")


def check_precision(precision: object) -> str:
    """The precision, if it is one of ``fp32``, ``bf16`` and ``fp16``.

    Raises:
        InputError: It is something else.
    """
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}", precision_hint(precision))
    return str(precision)


def precision_hint(precision: object) -> str:
    """What to try in place of an unknown precision: the one meant, and all there are."""
    near = _ALIASES.get(str(precision).lower().removeprefix("torch."))
    meant = f"did you mean {near!r}? " if near else ""
    return f"{meant}one of {', '.join(PRECISIONS)}"


def parse_overrides(overrides: Overrides | None) -> dict[str, tuple[str, ...]]:
    """Patterns by ``keep`` and ``low``, from a mapping or from text.

    Args:
        overrides: ``{"keep": ["layer.3.*", "Gelu"]}``, or ``"keep=layer.3.*|Gelu;low=Softmax"``.

    Raises:
        InputError: Another key, a key twice, or a pattern that a pipeline's text cannot hold.
    """
    if overrides is None:
        return {}
    if isinstance(overrides, str):
        parts = [part.partition("=") for part in overrides.split(";") if part.strip()]
        keys = [key.strip() for key, _, _ in parts]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise InputError(f"precision overrides: {twice}= stands twice", f"{twice}=PATTERN|PATTERN")
        overrides = {key: value for key, (_, _, value) in zip(keys, parts, strict=True)}
    found: dict[str, tuple[str, ...]] = {}
    for key, value in overrides.items():
        if key not in _KEYS:
            raise InputError(f"precision overrides: unknown key {key!r}", "keep=PATTERN|PATTERN;low=PATTERN")
        patterns = tuple(p.strip() for p in (value.split("|") if isinstance(value, str) else value))
        bad = next((p for p in patterns if not _PATTERN.fullmatch(p)), None)
        if bad is not None or not patterns:
            raise InputError(
                f"precision overrides: {bad or ''!r} is no pattern", "an operator or a module: Softmax, layer.3.*"
            )
        found[key] = patterns
    return found


def precision_pass(precision: str, overrides: Overrides | None = None) -> str:
    """The pass that casts to this precision, as text; empty for ``fp32``.

    Raises:
        InputError: An option has a value that cannot be used.
    """
    given = parse_overrides(overrides)
    if check_precision(precision) == FP32:
        if given:
            raise InputError("precision overrides go with a low precision", "precision='bf16'")
        return ""
    patterns = [f"{key}={'|'.join(given[key])}" for key in _KEYS if key in given]
    return f"cast-precision{{{' '.join([f'precision={precision}', *patterns])}}}"
