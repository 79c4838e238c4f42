"""Convolution kernels: which windows they take and what they allocate (``window.h``, ``channels_last.h``, ``winograd.h``,
``weight_gradient.h``)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import onnx_ir as ir

from ortgraph.graph.edit import static_shape
from ortgraph.ops.shapes import attribute, given, wanted

WINDOWED = frozenset({"Conv", "ConvGrad", "MaxPool", "AveragePoolGrad"})
_LANES, _PIXELS = 16, 512  # vector.h; window.h: pixels that are worked on at once
_CHUNK = 24  # weight_gradient.h: filters whose sums a thread keeps
_SHARED, _TURNED, _SLACK = 256 << 10, 2 << 20, 64  # weight_gradient.h
_SOURCE, _COLUMNS = 1 << 18, 64  # channels_last.h: words of images at once; gemm_tile.h: channels of a panel
_POINTS, _PANEL, _SKEW = 16, 64, 16  # winograd.h
_TILES, _WIDEST, _ROUND = 48, 128, 640 << 10
_WEIGHTS, _MOST = 600, 512 * 512
_FEWEST, _BEYOND = 8, 80  # small_groups.h


@dataclasses.dataclass(frozen=True)
class Window:
    """Sizes of a convolution by spatial axis.

    Attributes:
        batch: Images.
        channels: Channels of one group of X.
        filters: Filters of one group.
        size: Spatial sizes of X.
        window: Those of W.
        strides: Steps.
        spreads: Dilations.
        pads: Pads in ONNX order.
        out: Spatial sizes of Y.
        group: Groups.
    """

    batch: int
    channels: int
    filters: int
    size: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...]
    spreads: tuple[int, ...]
    pads: tuple[int, ...]
    out: tuple[int, ...]
    group: int = 1

    @staticmethod
    def of(node: ir.Node, x: Sequence[int], w: Sequence[int]) -> Window:
        """From the node's attributes and the shapes of X and W."""
        dims = len(x) - 2
        strides = tuple(attribute(node, "strides", [1] * dims))
        spreads = tuple(attribute(node, "dilations", [1] * dims))
        pads = tuple(attribute(node, "pads", [0] * (2 * dims)))
        spans = [(k - 1) * d + 1 for k, d in zip(w[2:], spreads, strict=True)]
        out = tuple(max((n + pads[i] + pads[i + dims] - spans[i]) // strides[i] + 1, 0) for i, n in enumerate(x[2:]))
        group = attribute(node, "group", 1)
        return Window(x[0], w[1], w[0] // group, tuple(x[2:]), tuple(w[2:]), strides, spreads, pads, out, group)

    @property
    def in_small_groups(self) -> bool:
        """Whether planes are added up as they lie (``small_groups.h``)."""
        return self.group > 1 and min(self.channels, self.filters) < _FEWEST

    @property
    def images(self) -> int:
        """Images that are worked on at once."""
        pixels = max(math.prod(self.out), 1)
        return max(1, min(self.batch, -(-_PIXELS // pixels)))

    @property
    def padded(self) -> tuple[int, ...]:
        """Sizes of an image with its padding, as far as windows reach."""
        steps = zip(self.out, self.strides, self.window, self.spreads, strict=True)
        return tuple((o - 1) * s + (k - 1) * d + 1 for o, s, k, d in steps)

    def filtered(self, around: bool = False) -> Tiles | None:
        """The tiles of 2x2 results that it is made of (``winograd.h``), those of dX ``around``; None where it is not."""
        plain = self.window == (3, 3) and self.strides == (1, 1) and self.spreads == (1, 1) and self.group == 1
        if not plain or self.channels % _LANES or self.filters % _LANES or min(self.channels, self.filters) < 32:
            return None
        if self.channels * self.filters > _MOST:
            return None
        sides = (self.filters, self.out), (self.channels, self.size)
        (into, size), (of, out) = sides if around else (sides[1], sides[0])
        tiles = Tiles(self.batch, into, of, size[1], out[1], -(-out[0] // 2), -(-out[1] // 2))
        pays = 9 * self.batch * math.prod(out) > _POINTS * tiles.count + _WEIGHTS
        return tiles if 0 < tiles.across <= _WIDEST and tiles.count and pays else None


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles of 2x2 results.

    Attributes:
        batch: Images.
        into: Channels that are read.
        of: Channels that are made.
        width: Columns of an image that is read.
        out: Columns of one that is made.
        down: Rows of tiles of an image.
        across: Tiles of a row.
    """

    batch: int
    into: int
    of: int
    width: int
    out: int
    down: int
    across: int

    @property
    def count(self) -> int:
        """Tiles in all."""
        return self.batch * self.down * self.across

    @property
    def rows(self) -> int:
        """Rows of tiles that a part works on."""
        return max(1, min(self.batch * self.down, _TILES // self.across))

    @property
    def line(self) -> int:
        """Bytes of the images' rows of a part."""
        return 4 * max((2 * self.rows + 2) * self.width * self.into, 2 * self.rows * self.out * self.of)

    @property
    def part(self) -> int:
        """Bytes that a thread keeps."""
        tiles = self.rows * self.across
        return self.line + 4 * (_POINTS * (tiles * (self.into + _PANEL) + 2 * _SKEW) + 4 * tiles * _PANEL)

    @property
    def weights(self) -> int:
        """Bytes of the transformed weights."""
        return 4 * _POINTS * self.into * self.of

    @property
    def round(self) -> int:
        """Bytes that the gradient of the weights keeps between threads."""
        rows = max(1, min(self.batch * self.down, _ROUND // (_POINTS * self.across * (self.into + self.of))))
        floats = rows * self.across * (self.into + self.of) + self.into * self.of + 3 * _SKEW
        return 4 * _POINTS * floats


def _shapes(node: ir.Node, x: int, w: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    found = [static_shape(v) if (v := given(node, i)) is not None else None for i in (x, w)]
    if found[0] is None or found[1] is None or min(len(found[0]), len(found[1])) < 3:
        return None
    return found[0], found[1]


def _converted(node: ir.Node, w: int) -> int:
    """Bytes of W where it is converted to float32, rounded or brought into pairs."""
    weight = given(node, w)
    if weight is None or (weight.dtype == ir.DataType.FLOAT and attribute(node, "precision", "fp32") == "fp32"):
        return 0
    shape = static_shape(weight) or (0,)
    return 4 * (math.prod(shape) + max(shape[:2], default=0))


def _in_pairs(node: ir.Node, a: int, b: int) -> bool:
    """Whether both operands are bfloat16, or rounded to it."""
    types = [v.dtype for i in (a, b) if (v := given(node, i)) is not None]
    return attribute(node, "precision", "fp32") == "bf16" or all(t == ir.DataType.BFLOAT16 for t in types)


def _whole(channels: int) -> int:
    return -(-channels // _LANES) * _LANES


def _fits(channels: int) -> bool:
    return 4 * channels >= 3 * _whole(channels)


def _channels_last(batch: int, sizes: Sequence[int], taps: int, channels: int, results: int, depth: int) -> int:
    """Bytes of turned images and panels of weights."""
    pixel = -(-channels // depth)
    picture = math.prod(sizes) * pixel
    return 4 * (max(1, min(batch, _SOURCE // max(picture, 1))) * picture + taps * pixel * _whole(results))


def conv_scratch(node: ir.Node) -> int:
    """Bytes that a run of Conv allocates."""
    shapes = _shapes(node, 0, 1)
    if shapes is None:
        return 0
    g = Window.of(node, *shapes)
    if g.in_small_groups:
        return 0
    if _in_pairs(node, 0, 1) and _fits(g.filters):
        return _channels_last(g.batch, g.padded, math.prod(g.window), g.channels, g.filters, 2)
    if tiles := g.filtered():
        return tiles.weights + _converted(node, 1)
    *rows, columns = g.padded
    pitch = -(-columns // g.strides[-1]) * g.strides[-1]
    source = 4 * (g.images * g.channels * math.prod(rows) * pitch + _LANES)
    return source + 8 * g.channels * math.prod(g.window) + _converted(node, 1)


def conv_thread_scratch(node: ir.Node) -> int:
    """Bytes that each thread of Conv keeps: of weights that it packs, or of tiles of 2x2 results."""
    shapes = _shapes(node, 0, 1)
    if shapes is None:
        return 0
    g = Window.of(node, *shapes)
    if g.in_small_groups:
        weights = g.filters * g.channels * math.prod(g.window)
        return 4 * (g.channels * _grid(g) + weights + _made(g) + _LANES + g.size[-1])
    if _in_pairs(node, 0, 1) and _fits(g.filters):
        taps = math.prod(g.window)
        chunk = min(g.channels + g.channels % 2, max(256 // taps // 2 * 2, 2))
        return 4 * _LANES * (chunk * taps + _LANES)
    tiles = g.filtered()
    return tiles.part if tiles else 0


def conv_grad_scratch(node: ir.Node) -> int:
    """Bytes that a run of ConvGrad allocates at most at one time: dX and dW are made one after the other."""
    shapes = _shapes(node, 1, 2)
    if shapes is None:
        return 0
    g = Window.of(node, *shapes)
    if g.in_small_groups:
        return 0
    return max(_for_input(node, g) if wanted(node, 0) else 0, _for_weights(node, g)[0] if wanted(node, 1) else 0)


def _input_depth(node: ir.Node, g: Window) -> int:
    """Numbers of a word where dX is made with channels last, else 0."""
    if not _fits(g.channels):
        return 0
    if _in_pairs(node, 0, 2):
        return 2
    return 1 if max(g.strides) > 1 else 0


def _for_input(node: ir.Node, g: Window) -> int:
    sizes = [_behind(g, axis) for axis in range(len(g.out))]
    if depth := _input_depth(node, g):
        return _channels_last(g.batch, sizes, math.prod(g.window), g.filters, g.channels, depth)
    if tiles := g.filtered(around=True):
        return tiles.weights + _converted(node, 2)
    source = 4 * (g.images * g.filters * math.prod(sizes) + _LANES)
    return source + 16 * g.filters * math.prod(g.window) + _converted(node, 2)


def conv_grad_thread_scratch(node: ir.Node) -> int:
    """Bytes that each thread of ConvGrad keeps: of weights that it packs, of tiles of 2x2 results, or the sums of its
    filters."""
    shapes = _shapes(node, 1, 2)
    if shapes is None:
        return 0
    g = Window.of(node, *shapes)
    if g.in_small_groups:
        return 4 * max(_grid_of_input(g) if wanted(node, 0) else 0, _grid_of_weights(g) if wanted(node, 1) else 0)
    kept = 0
    if wanted(node, 0):
        if _input_depth(node, g):
            kept = 4 * (_COLUMNS * math.prod(g.window) + 2 * _LANES)
        elif around := g.filtered(around=True):
            kept = around.part
    return max(kept, _for_weights(node, g)[1] if wanted(node, 1) else 0)


def _parts(g: Window) -> list[int]:
    """Rows and columns of the padded image that have the same rest of the stride."""
    return [-(-n // s) for n, s in zip(g.padded, g.strides, strict=True)]


def _grid(g: Window) -> int:
    """Floats of a padded plane of X."""
    parts = _parts(g)
    return math.prod(g.strides) * math.prod(parts) + parts[-1] + _BEYOND


def _made(g: Window) -> int:
    return math.prod(g.out[:-1]) * _parts(g)[-1] + _BEYOND


def _grid_of_input(g: Window) -> int:
    """Floats that dX of a group takes: dY, the weights twice, and results by rest of the stride."""
    sizes = [_behind(g, axis) for axis in range(len(g.out))]
    rows = math.prod(-(-n // s) for n, s in zip(g.size[:-1], g.strides[:-1], strict=True))
    made = math.prod(g.strides) * (rows * sizes[-1] + _BEYOND)
    source = g.filters * (math.prod(sizes) + sizes[-1] + _BEYOND)
    return source + 2 * g.filters * g.channels * math.prod(g.window) + made + _LANES + g.size[-1]


def _grid_of_weights(g: Window) -> int:
    sums = 2 * g.filters * g.channels * math.prod(g.window)
    return g.channels * _grid(g) + g.filters * math.prod(g.out) + g.size[-1] + _LANES + sums


def _sums(g: Window) -> int:
    """Floats that hold one filter's sums: rows of the window, or single positions, in whole vectors."""
    side_by_side = g.spreads[-1] == 1
    run = g.window[-1] * g.channels if side_by_side else g.channels
    runs = math.prod(g.window[:-1]) if side_by_side else math.prod(g.window)
    return runs * (-(-run // _LANES) * _LANES)


def _for_weights(node: ir.Node, g: Window) -> tuple[int, int]:
    """Bytes of a run and of each thread."""
    depth = 2 if _in_pairs(node, 0, 1) else 1
    if depth == 1 and (tiles := g.filtered()):
        return tiles.round, tiles.line
    words, pixels = -(-g.batch // depth), math.prod(g.out)
    picture, sums = math.prod(g.padded) * g.channels, g.filters * _sums(g)
    together = max(1, min(words, _TURNED // max(4 * (picture + pixels * g.filters), 1)))
    turned = 4 * (together * (picture + pixels * g.filters + pixels) + 2 * _SLACK)
    if words <= together and sums > _SHARED:
        return turned, 4 * min(_CHUNK, g.filters) * _sums(g)
    return turned + 4 * sums, 0


def _behind(g: Window, axis: int) -> int:
    """Rows of dY with the padding that the gradient of X reads, along one axis."""
    size, lead = g.size[axis], (g.pads[axis])
    step, spread = g.strides[axis], g.spreads[axis]
    front, most = 0, 1
    for rest in range(step):
        behind = [(t * spread - rest) // step for t in range(g.window[axis]) if t * spread % step == rest]
        front = max([front, *behind])
    for rest in range(step):
        first = (rest - lead) % step
        count = (size - first - 1) // step + 1 if first < size else 0
        most = max(most, (first + lead - rest) // step + count + front)
    return most


def window_differs(node: ir.Node) -> str | None:
    """Why the kernels do not take a convolution's window; None where they do."""
    if node.op_type == "MaxPool":
        return _max_pool_differs(node)
    if node.op_type == "AveragePoolGrad":
        rows = len(attribute(node, "kernel_shape", ()))
        return None if rows in (1, 2) else "the kernel takes one or two spatial dimensions"
    first = 1 if node.op_type == "ConvGrad" else 0
    x, w = given(node, first), given(node, first + 1)
    if x is None or w is None or x.shape is None or w.shape is None or len(x.shape) not in (3, 4):
        return "the kernel takes one or two spatial dimensions"
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return "the kernel takes pads, not auto_pad"
    if any(p < 0 for p in attribute(node, "pads", [])):
        return "the kernel takes no negative pads"
    return None


def _max_pool_differs(node: ir.Node) -> str | None:
    window, pads = attribute(node, "kernel_shape", ()), attribute(node, "pads", ())
    if len(window) not in (1, 2):
        return "the kernel takes one or two spatial dimensions"
    if any(attribute(node, name, 0) for name in ("ceil_mode", "storage_order")):
        return "the kernel takes no ceil_mode and no storage_order"
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET" or any(d != 1 for d in attribute(node, "dilations", ())):
        return "the kernel takes no auto_pad and no dilations"
    if any(not 0 <= p < window[i % len(window)] for i, p in enumerate(pads)):
        return "the kernel takes pads smaller than the window"
    return None


def pooled(node: ir.Node, size: Sequence[int]) -> tuple[int, ...]:
    """Spatial sizes of a pool's result, from those of X (without ``ceil_mode``)."""
    window, dims = attribute(node, "kernel_shape", ()), len(size)
    pads, strides = attribute(node, "pads", [0] * (2 * dims)), attribute(node, "strides", [1] * dims)
    free = [n + pads[i] + pads[i + dims] - window[i] for i, n in enumerate(size)]
    return tuple(0 if f < 0 else f // s + 1 for f, s in zip(free, strides, strict=True))
