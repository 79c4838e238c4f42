"""Recurrent layers: dropout between them, and packed sequences.

PyTorch's own decomposition of several layers leaves their dropout out. The size of packed sequences depends on values;
in a trace they stay padded, with their lengths beside them, and steps behind the end of a row change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ortgraph.capture.torch_substitutes import substitute
from ortgraph.errors import UnsupportedError

_CELLS: dict[Any, Callable[..., Any]] = {
    torch.lstm: torch.lstm_cell, torch.gru: torch.gru_cell, torch.rnn_tanh: torch.rnn_tanh_cell,
    torch.rnn_relu: torch.rnn_relu_cell,
}  # fmt: skip


def _refusal(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} of the data of a packed sequence, whose size depends on values, has no translation to ONNX",
        "unpack it first: pad_packed_sequence(packed, total_length=x.shape[1]), with a mask for the padding",
    )


class _Stand:
    """No operator takes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _refusal(getattr(func, "__name__", str(func)))


class PackedRows(_Stand):
    """Stands in a trace for the data of a packed sequence, which only recurrent layers and unpacking read.

    Args:
        padded: Steps, rows, features.
        lengths: Of the rows.
    """

    def __init__(self, padded: torch.Tensor, lengths: torch.Tensor) -> None:
        self.padded, self.lengths = padded, lengths
        self.dtype, self.device, self.is_cuda = padded.dtype, padded.device, padded.is_cuda

    def dim(self) -> int:
        return 2

    def size(self, axis: int) -> Any:
        if axis not in (-1, 1):
            raise _refusal("size")
        return self.padded.shape[-1]

    def to(self, *args: Any, **kwargs: Any) -> PackedRows:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(name)


class _Sizes(_Stand):
    """Stands for ``batch_sizes``. Its one step says that unpacking was given no total length."""

    device = torch.device("cpu")

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def size(self, axis: int) -> int:
        return 1

    def __getitem__(self, step: int) -> int:
        return self._rows

    def to(self, *args: Any, **kwargs: Any) -> _Sizes:
        return self


@substitute(torch._VF._pack_padded_sequence)
def pack(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    padded = input.transpose(0, 1) if batch_first else input
    return PackedRows(padded, lengths), _Sizes(padded.shape[1])


@substitute(torch._VF._pad_packed_sequence)
def unpack(data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: int) -> Any:
    if not isinstance(data, PackedRows):
        return NotImplemented
    steps = data.padded.shape[0]
    if total_length < steps:
        raise UnsupportedError(
            "pad_packed_sequence to the longest row has no translation to ONNX: its size depends on values",
            "give it the length of the padded input: total_length=x.shape[1] (x.shape[0] unless batch_first)",
        )
    inside = torch.arange(steps).unsqueeze(1) < data.lengths
    padded = torch.where(inside.unsqueeze(-1), data.padded, padding_value)
    padded = F.pad(padded, (0, 0, 0, 0, 0, total_length - steps), value=padding_value)
    return padded.transpose(0, 1) if batch_first else padded, data.lengths


def _replacement(function: Any) -> Callable[..., Any]:
    def apply(*given: Any) -> Any:
        if isinstance(given[0], PackedRows):
            return _packed(function, given[0], *given[2:])
        return _between(function, *given) if isinstance(given[2], (list, tuple)) else NotImplemented

    return apply


for _function in _CELLS:
    substitute(_function)(_replacement(_function))


def _between(
    function: Any, x: torch.Tensor, hx: Any, weights: Sequence[torch.Tensor], biases: bool, layers: int, dropout: float,
    train: bool, both: bool, batch_first: bool,
) -> Any:  # fmt: skip
    """One layer after the other, with dropout between them."""
    if not train or dropout == 0 or layers == 1:
        return NotImplemented
    ways, step = 1 + both, len(weights) // layers
    lasts = []
    x = x.transpose(0, 1) if batch_first else x  # PyTorch draws with steps first
    for layer in range(layers):
        x = F.dropout(x, dropout) if layer else x
        part = slice(layer * ways, (layer + 1) * ways)
        state = tuple(h[part] for h in hx) if isinstance(hx, (tuple, list)) else hx[part]
        own = list(weights[layer * step : (layer + 1) * step])
        x, *last = function(x, state, own, biases, 1, 0.0, train, both, False)
        lasts.append(last)
    return x.transpose(0, 1) if batch_first else x, *(torch.cat(parts) for parts in zip(*lasts, strict=True))


def _packed(
    function: Any, rows: PackedRows, hx: Any, weights: Sequence[torch.Tensor], biases: bool, layers: int,
    dropout: float, train: bool, both: bool,
) -> Any:  # fmt: skip
    """All steps of the padded rows; a row's state stays as it is where the row has no such step."""
    ways, count = 1 + both, 4 if biases else 2
    if len(weights) != layers * ways * count:
        raise UnsupportedError("nn.LSTM(proj_size=...) over a packed sequence has no translation", "take proj_size out")
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    inside = (torch.arange(rows.padded.shape[0]).unsqueeze(1) < rows.lengths).unsqueeze(-1)
    x, lasts = rows.padded, []
    for layer in range(layers):
        x = F.dropout(x, dropout, train) if layer and dropout else x
        made = []
        for n in range(layer * ways, (layer + 1) * ways):
            own = weights[n * count : (n + 1) * count]
            out, last = _walk(function, x, tuple(s[n] for s in states), own, inside, backward=n % ways == 1)
            made.append(out)
            lasts.append(last)
        x = torch.cat(made, -1)
    return PackedRows(x, rows.lengths), *(torch.stack(parts) for parts in zip(*lasts, strict=True))


def _walk(
    function: Any, x: torch.Tensor, state: tuple[torch.Tensor, ...], weights: Sequence[torch.Tensor],
    inside: torch.Tensor, backward: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:  # fmt: skip
    """Results of every step, and the last state of every row."""
    steps = range(x.shape[0])
    made: list[Any] = [None for _ in steps]
    for t in reversed(steps) if backward else steps:
        new = _CELLS[function](x[t], state if len(state) > 1 else state[0], *weights)
        new = new if isinstance(new, tuple) else (new,)
        state = tuple(torch.where(inside[t], after, before) for after, before in zip(new, state, strict=True))
        made[t] = new[0]
    return torch.stack(made), state
