"""Layout of a region: which loop nest its rows are walked in, and the sizes that a kernel gets for given shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ortgraph.ops.generated.expressions import ROW, Access, Region, Width

Leading = tuple[tuple[str | int, bool], ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The loop nest.

    Attributes:
        tiled: Rows may be cut in tiles: nothing is reduced and no columns change places. Leading dimensions that all
            inputs walk as they walk the row then count as part of the row.
        merged: Number of those leading dimensions; None: all of them, there is one row.
        patterns: Leading dimensions of inputs whose rows repeat along some of them.
    """

    tiled: bool
    merged: int | None
    patterns: tuple[Leading, ...]

    def pattern(self, access: Access) -> int | None:
        """Position in ``patterns`` of an access with its own row offsets, None for dense and uniform ones."""
        leading = self._kept(access)
        varying = [varies for size, varies in leading if size != 1]
        return self.patterns.index(leading) if any(varying) and not all(varying) else None

    def dense(self, access: Access) -> bool:
        """Whether each row that is walked has numbers of its own."""
        leading = self._kept(access)
        return all(varies for size, varies in leading if size != 1)

    def _kept(self, access: Access) -> Leading:
        if self.merged is None:
            return ()
        return access.leading[: len(access.leading) - self.merged]


def layout(region: Region) -> Layout:
    """The layout of a region."""
    mixed = {tuple(size for size, _ in a.leading) for a in region.accesses if a.mixed}
    tiled = not region.has_rows and not any(r.column for r in region.results) and len(region.widths) == 1
    merged: int | None = 0
    if tiled and not mixed:
        narrow = any(not _walks_alike(a) for a in region.accesses)
        merged = 0 if narrow else None
    elif tiled and len(mixed) == 1:
        merged = _merged(region, next(iter(mixed)))
    patterns: dict[Leading, None] = {}
    for access in region.accesses:
        leading = access.leading[: len(access.leading) - (merged or 0)] if merged is not None else ()
        varying = [varies for size, varies in leading if size != 1]
        if any(varying) and not all(varying):
            patterns[leading] = None
    return Layout(tiled, merged, tuple(patterns))


def _walks_alike(access: Access) -> bool:
    """Whether the leading dimensions are walked as the row is: all numbers in order, or one for all."""
    return access.dense if access.varies else access.uniform


def _merged(region: Region, space: tuple[str | int, ...]) -> int:
    flags = []
    for a in region.accesses:
        if a.mixed:
            flags.append(([varies for _, varies in a.leading], a.varies))
        elif tuple(size for size, _ in a.leading) != space and not _walks_alike(a):
            return 0
        else:
            flags.append(([a.dense and not a.uniform] * len(space), a.varies))
    count = 0
    for d in range(len(space) - 1, -1, -1):
        if space[d] != 1 and any(leading[d] != varies for leading, varies in flags):
            break
        count += 1
    return count


def collapsed(leading: Leading, size: Mapping[Any, int]) -> tuple[list[int], list[int]]:
    """(sizes, strides) of the leading dimensions of an input, neighbours that are walked alike as one.

    The number of entries depends on the pattern only, not on the sizes.
    """
    groups: list[tuple[int, bool]] = []
    for dim, varies in leading:
        if dim == 1:
            continue
        n = dim if isinstance(dim, int) else size[dim]
        if groups and groups[-1][1] == varies:
            groups[-1] = (groups[-1][0] * n, varies)
        else:
            groups.append((n, varies))
    strides, step = [], 1
    for n, varies in reversed(groups):
        strides.append(step if varies else 0)
        step *= n if varies else 1
    return [n for n, _ in groups], strides[::-1]


def group_count(leading: Leading) -> int:
    """Number of entries that ``collapsed`` gives."""
    flags = [varies for dim, varies in leading if dim != 1]
    return sum(i == 0 or flags[i] != flags[i - 1] for i in range(len(flags)))


def sizes(region: Region, plan: Layout, size: Mapping[Any, int]) -> dict[str, list[int]]:
    """The attributes of a kernel node that say how large everything is.

    Args:
        region: What it computes.
        plan: Its layout.
        size: Length by name of each symbolic dimension.
    """

    def number(dim: Width) -> int:
        return dim if isinstance(dim, int) else size[dim]

    rows = next(_count(dims, size) for dims in region.rows if all(isinstance(d, int) or d in size for d in dims))
    widths = [number(w) for w in region.widths]
    if plan.merged is None:
        rows, widths = 1, [rows * widths[0]]
    elif plan.merged:
        inner = math.prod(number(d) for d in _space(region)[-plan.merged :])
        rows, widths = (rows // inner if inner else 0), [inner * widths[0]]
    made = {"rows": [rows], "widths": widths}
    for i, leading in enumerate(plan.patterns):
        made[f"sizes{i}"], made[f"strides{i}"] = collapsed(leading, size)
    return made


def _space(region: Region) -> Sequence[str | int]:
    """Leading dimensions of the one space in which inputs repeat."""
    return next(tuple(size for size, _ in a.leading) for a in region.accesses if a.mixed)


def completed(region: Region, size: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths by name with those that only the target -1 of a reshape tells."""
    found = dict(size)

    def unknown(dims: Sequence[str | int]) -> list[str]:
        return [d for d in dims if not isinstance(d, int) and d not in found]

    whole = [dims for dims in region.rows if not unknown(dims)]
    if not whole or any(not isinstance(v, int) for v in found.values()):
        return found
    rows = _count(whole[0], found)
    for dims in region.rows:
        missing = unknown(dims)
        if len(missing) == 1 and dims.count(missing[0]) == 1:
            known = _count([d for d in dims if d != missing[0]], found)
            found[missing[0]] = rows // known if known else 0
    return found


def _count(dims: Sequence[str | int], size: Mapping[str, int]) -> int:
    return math.prod(d if isinstance(d, int) else size[d] for d in dims)


def input_count(region: Region, plan: Layout, index: int, size: Mapping[Any, int]) -> int:
    """Number of elements that a kernel expects in an input."""
    for e in region.exprs:
        if isinstance(e.data, Access) and e.data.input == index:
            access = e.data
            dims = [d for d, varies in access.leading if varies]
            dims += [access.last] if access.varies else []
            return math.prod(d if isinstance(d, int) else size[d] for d in dims)
    return 1


def main_width(region: Region) -> Width:
    """The first width; ROW when there is none."""
    return region.widths[0] if region.widths else ROW
