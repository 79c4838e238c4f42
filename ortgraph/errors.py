"""The exception family of ortgraph: every message says what, where and what to try."""

from __future__ import annotations

from collections.abc import Sequence


class OrtgraphError(Exception):
    """Base of every error that ortgraph raises on purpose.

    Args:
        what: What went wrong, with the place (file, node, value, pass).
        hint: What to try. Shown on a line of its own.
    """

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(f"{what}\n  try: {hint}" if hint else what)
        self.what = what
        self.hint = hint


class InputError(OrtgraphError):
    """A file, an option or an argument of the user's cannot be used as given."""


class CaptureError(OrtgraphError):
    """A model cannot be turned into a training graph."""


class UnsupportedError(CaptureError):
    """An operator, an opset or a control-flow form has no translation.

    Args:
        what: As ever.
        hint: As ever.
        obstacles: What and hint of each, where one error stands for several.

    Attributes:
        obstacles: What and hint of each obstacle: one, unless several were given.
    """

    def __init__(self, what: str, hint: str = "", obstacles: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(what, hint)
        self.obstacles = tuple(obstacles) or ((what, hint),)

    @staticmethod
    def of(found: Sequence[UnsupportedError]) -> UnsupportedError:
        """One error for several; the first itself when there is but one."""
        each = list(dict.fromkeys(o for error in found for o in error.obstacles))
        if len(each) == 1:
            return found[0]
        lines = [f"\n  {i}. {what}\n     try: {hint}" for i, (what, hint) in enumerate(each, 1)]
        return UnsupportedError(f"the model has {len(each)} obstacles:{''.join(lines)}", "", each)


class SignatureError(OrtgraphError):
    """A graph does not have the signature that it claims, or has none."""


class VerificationError(OrtgraphError):
    """A graph breaks an invariant (docs/invariants.md) or its numbers changed."""


class PassError(OrtgraphError):
    """A pass raised, lied about its change, or was used at the wrong stage."""


class PipelineSyntaxError(PassError):
    """A text pipeline does not parse, or names an unknown pass or option."""


class PlanError(OrtgraphError):
    """A schedule or memory plan is impossible or invalid."""


class RuntimeSetupError(OrtgraphError):
    """ONNX Runtime, PyTorch or a compiler is missing, doubled or of the wrong version."""


class BatchError(OrtgraphError):
    """A batch does not fit the graph's inputs (name, dtype, shape) or holds values that cannot be used."""


class NonFiniteLossError(OrtgraphError):
    """The loss became NaN or infinite."""


class DistributedError(OrtgraphError):
    """Another process of a distributed training failed or is gone, or processes disagree."""
