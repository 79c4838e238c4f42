"""What a session tells when it makes a program for new sizes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping

logger = logging.getLogger("ortgraph.runtime.session")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A program that was made.

    Attributes:
        program: ``step``, ``accumulate``, ``gradients``, ``loss``, ``evaluate`` or ``results``.
        sizes: Of the symbolic dimensions; empty for a static graph.
        labelled_rows: Rows of the buffer for labelled rows; 0: all rows.
        seconds: That lowering, planning and making the runtime's session took.
        arena_bytes: Of its memory plan.
        again: It was there before, and was dropped for others.
    """

    program: str
    sizes: Mapping[str, int]
    labelled_rows: int
    seconds: float
    arena_bytes: int
    again: bool

    def log(self, most: int) -> None:
        """One line; a warning when programs are made over and over."""
        sizes = ", ".join(f"{n}={s}" for n, s in self.sizes.items()) or "the sizes of the graph"
        rows = f", {self.labelled_rows} labelled rows" if self.labelled_rows else ""
        text = f"program {self.program}: planned for {sizes}{rows} in {self.seconds:.2f} s, {self.arena_bytes} bytes"
        if self.again:
            logger.warning(
                "%s, again: the %d latest shapes are kept; try a larger max_shapes=, or buckets= for fewer shapes",
                text,
                most,
            )
        else:
            logger.info("%s", text)
