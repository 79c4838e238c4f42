"""What all updates of a step share: the clip factor, the loss scale, and whether the step is skipped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from ortgraph.errors import PassError
from ortgraph.graph.edit import take_type
from ortgraph.ops.spec import COMPOSITE
from ortgraph.optim.frame import Frame
from ortgraph.optim.loss_scale import LossScale

CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ divides by norm + 1e-6


@dataclasses.dataclass(frozen=True)
class Guard:
    """Scalars that every update reads: ``scale`` (float32) multiplies gradients, ``skip`` (bool) leaves all as it is."""

    scale: ir.Value | None = None
    skip: ir.Value | None = None


def scale_backward(frame: Frame) -> tuple[ir.Value, dict[ir.Value, ir.Value]]:
    """Multiply every seed of the backward half by a new input, the loss scale, and divide gradient outputs by it.

    Returns:
        The scale (float32 scalar graph input), and the scaled gradient by the value that the graph returned before.

    Raises:
        PassError: The graph has no seed input.
    """
    signature = frame.graph.signature
    if signature.loss_gradient is None:
        raise PassError("a graph without loss_gradient input cannot scale its loss", "capture the graph again")
    scale = frame.add_input("optimizer.loss_scale", ir.DataType.FLOAT)
    scaled: dict[ir.Value, ir.Value] = {}
    for name in (signature.loss_gradient, *signature.tangents.values()):
        seed = frame.inputs[name]
        uses = tuple(seed.uses())
        scaled[seed] = frame.early.op("Mul", seed, _like(frame, scale, seed), name="scaled_seed")
        take_type(scaled[seed], seed)
        for use in uses:
            use.node.replace_input_with(use.idx, scaled[seed])
    for name in dict.fromkeys((*signature.gradients.values(), *signature.input_gradients.values())):
        value = frame.outputs.get(name)
        if value is not None and value.producer() is not None:  # a constant gradient is zero at any scale
            scaled[_divided(frame, value, scale)] = value
    return scale, scaled


def _like(frame: Frame, scale: ir.Value, value: ir.Value) -> ir.Value:
    if value.dtype in (None, ir.DataType.FLOAT):
        return scale
    return frame.early.op("Cast", scale, to=value.dtype, name="loss_scale")


def _divided(frame: Frame, value: ir.Value, scale: ir.Value) -> ir.Value:
    """The graph returns value / scale under the value's name; the value itself gets another name."""
    name = value.name or ""
    divisor = scale if value.dtype in (None, ir.DataType.FLOAT) else frame.op("Cast", scale, to=value.dtype, name=name)
    made = frame.op("Div", value, divisor, name="unscaled")
    take_type(made, value)
    outputs = frame.graph.graph.outputs
    value.name = frame.build.names.fresh(f"{name}.scaled")
    made.name = name
    for i, output in enumerate(outputs):
        if output is value:
            outputs[i] = made
    frame.outputs[name] = made
    return made


def scaled_gradient(value: ir.Value, scaled: Mapping[ir.Value, ir.Value]) -> ir.Value:
    """What an update reads in place of the gradient that the graph returns."""
    return scaled.get(value, value)


def make_guard(
    frame: Frame, gradients: Sequence[ir.Value], limit: float | None, policy: LossScale | None, scale: ir.Value | None
) -> Guard:
    """Nodes for the clip factor and the overflow test over all gradients, and the states of the loss scale.

    One sum of squares serves both: it is infinite or NaN when an element of a gradient is. Gradients whose sum of
    squares leaves float32 count as overflow, too.

    Args:
        gradients: Multiplied by the loss scale, if there is one.
        limit: Largest global norm; None: no clipping.
        policy: How the scale moves.
        scale: The input that holds the scale.
    """
    if limit is None and scale is None:
        return Guard()
    total = frame.op("SquaredNorm", *gradients, domain=COMPOSITE, name="squared_norm")
    factor = None
    if limit is not None:
        norm = frame.op("Sqrt", total, name="clip")
        if scale is not None:
            norm = frame.op("Div", norm, scale, name="clip")
        share = frame.op("Add", norm, frame.number(CLIP_EPSILON), name="clip")
        factor = frame.op("Div", frame.number(limit), share, name="clip")
        factor = frame.op("Min", factor, frame.number(1.0), name="clip")
    if scale is None or policy is None:
        return Guard(factor)
    factor = frame.op("Div", frame.number(1.0) if factor is None else factor, scale, name="unscale")
    skip = frame.op("Not", frame.op("Less", total, frame.number(math.inf), name="finite"), name="skip")
    _move_scale(frame, policy, scale, skip)
    return Guard(factor, skip)


def _move_scale(frame: Frame, policy: LossScale, scale: ir.Value, skip: ir.Value) -> None:
    """The next scale, as ``torch.amp.GradScaler`` moves it, and the count of skipped steps."""
    int64 = ir.DataType.INT64
    skipped = frame.add_input("optimizer.skipped_steps", int64)
    counted = frame.op("Add", skipped, frame.op("Cast", skip, to=int64, name="skip"), name="skipped_steps")
    frame.keep("skipped_steps", skipped, counted, "skipped_steps", output="optimizer.skipped_steps.next")
    if not policy.dynamic:
        frame.keep("loss_scale", scale, None, "loss_scale", policy.initial)
        return
    good = frame.add_input("optimizer.good_steps", int64)
    more = frame.op("Add", good, frame.build.const(1, int64), name="good_steps")
    grows = frame.op("Equal", more, frame.build.const(policy.interval, int64), name="grows")
    larger = frame.op("Mul", scale, frame.number(policy.growth), name="grown")
    larger = frame.op("Min", larger, frame.number(policy.maximum), name="grown")
    smaller = frame.op("Mul", scale, frame.number(policy.backoff), name="backed_off")
    smaller = frame.op("Max", smaller, frame.number(policy.minimum), name="backed_off")
    kept = frame.op("Where", grows, larger, scale, name="loss_scale")
    moved = frame.op("Where", skip, smaller, kept, name="loss_scale")
    over = frame.op("Or", skip, grows, name="restart")
    count = frame.op("Where", over, frame.build.const(0, int64), more, name="good_steps")
    frame.keep("loss_scale", scale, moved, "loss_scale", policy.initial, output="optimizer.loss_scale.next")
    frame.keep("good_steps", good, count, "good_steps", output="optimizer.good_steps.next")
