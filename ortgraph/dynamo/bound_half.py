"""One half of a compiled graph, run on memory that is given by address at each call."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortgraph.errors import BatchError
from ortgraph.graph import static_shape
from ortgraph.runtime.binding import bind_input_at, bind_output

_BINDINGS = 8  # arenas whose bindings are kept


@dataclasses.dataclass(frozen=True)
class Name:
    """A value of a session that lies at some address."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: bool

    @staticmethod
    def of(value: ir.Value, read: bool) -> Name:
        shape, dtype = static_shape(value), value.dtype
        assert shape is not None and dtype is not None
        return Name(value.name or "", shape, dtype.numpy(), read)


@dataclasses.dataclass
class _Bound:
    binding: Any
    addresses: list[int]
    lock: Any


class BoundHalf:
    """A session with everything bound by address; what is where it was at the last call is not bound again.

    Args:
        what: Name, for messages.
        session: None where there is nothing to run.
        slots: Per address of a call the values that lie there.
        fixed: Values in the arena, with their offsets.
    """

    def __init__(
        self, what: str, session: Any, slots: Sequence[Sequence[Name]], fixed: Sequence[tuple[Name, int]]
    ) -> None:
        self.what, self._session = what, session
        self._slots, self._fixed = [tuple(s) for s in slots], tuple(fixed)
        self._bound: OrderedDict[int, _Bound] = OrderedDict()
        self._lock = threading.Lock()

    def run(self, arena: int, addresses: Sequence[int]) -> None:
        """Run once.

        Args:
            arena: Address of the arena; its values are read and written.
            addresses: One per slot.

        Raises:
            BatchError: An operator refuses what it is given.
        """
        if self._session is None:
            return
        bound = self._at(arena)
        with bound.lock:
            last = bound.addresses
            for i, given in enumerate(addresses):
                address = given or arena  # why: a tensor without elements is nowhere, and the runtime wants an address
                if address != last[i]:
                    last[i] = -1  # why: a bind that fails leaves nothing that looks bound
                    for name in self._slots[i]:
                        _bind(bound.binding, name, address)
                    last[i] = address
            try:
                self._session.run_with_iobinding(bound.binding)
            except Exception as error:  # noqa: BLE001 - the runtime's exception types are private; the cause is chained
                raise BatchError(
                    f"the {self.what} half of a compiled graph stopped: {str(error).strip()}",
                    "look for indices or labels outside their range; torch.compile(backend='eager') shows PyTorch's error",
                ) from error

    def _at(self, arena: int) -> _Bound:
        with self._lock:
            found = self._bound.get(arena)
            if found is None:
                found = _Bound(self._session.io_binding(), [-1] * len(self._slots), threading.Lock())
                for name, offset in self._fixed:
                    _bind(found.binding, name, arena + offset)
                self._bound[arena] = found
                if len(self._bound) > _BINDINGS:
                    self._bound.popitem(last=False)
            self._bound.move_to_end(arena)
            return found


def _bind(binding: Any, name: Name, address: int) -> None:
    bind = bind_input_at if name.read else bind_output
    bind(binding, name.name, name.dtype, name.shape, address)
