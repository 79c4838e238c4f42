"""The preset pipelines: they read like a table of contents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir as ir

from ortgraph.manager.pipeline_text import parse_pipeline
from ortgraph.passes.lowering.attach_optimizer import AttachOptimizer
from ortgraph.passes.memory.chunk_loss import ChunkLoss
from ortgraph.plan.budget import budget_bytes

CLEAN = "eliminate-dead-code,fold-constants,fold-shapes,eliminate-identity,eliminate-common-subexpressions"

CANONICAL = ",".join(
    (
        CLEAN,
        "eliminate-cast-pairs",
        "simplify-reshapes",
        "simplify-transposes",
        "eliminate-identity",  # why here: merged reshapes and transposes are often no-ops
    )
)

FUSION = ",".join(
    (
        "raise-contrib",  # why first: ONNX Runtime's gradient operators become the composites that the rest knows
        "fuse-gelu",
        "fuse-activation-gradient",
        "fuse-layer-norm",
        "fuse-softmax",
        "fuse-cross-entropy",
        "fuse-embedding-gradient",
        "fuse-stack-gradient",  # why after: gradients of tables are no slices
        "eliminate-dead-code",  # why here: decomposed forward chains die once their gradients are fused
    )
)

ATTENTION = ",".join(
    (
        "fuse-attention",  # why here: it reads softmax and its gradient whole, and products before they are changed
        "simplify-attention",
        "eliminate-dead-code",  # why here: repeated heads and masks die
    )
)

MATMUL = ",".join(
    (
        "narrow-rows",  # why here: it knows plain MatMul and Gemm, and whole composites
        "fuse-matmul-transpose",  # why after canonical: cancelled transposes need no flag
        "lift-batch-views",
        "simplify-reshapes",  # why here: views of neighbouring products cancel
        "simplify-transposes",
        "fuse-matmul-transpose",  # why again: backward batched products lose their 3-D views only now
        "fuse-matmul-scale",
        "fuse-gemm-bias",
        "fuse-weight-gradient",
        "fuse-bias-gradient",
        "absorb-head-transposes",  # why after narrow-rows: it knows heads first only
        "simplify-transposes",  # why here: what attention needs no more cancels
        "simplify-reshapes",
        CLEAN,  # why here: keys that were rotated twice are equal now
    )
)

ABSORB = "absorb-parameter-casts"  # why behind the precision: it takes away the casts of weights that products read
PRODUCT = "fuse-product"  # why behind the precision: it knows Product; why before regions: they take activations too
PADDING = "remove-padding"  # why here: as LABELLED, which goes on from the rows that it leaves
LABELLED = "select-labelled-rows"  # why before chunks: it knows the whole loss; why after MATMUL: so does its form
MEMORY = "chunk-loss"  # why before lowering: it knows the composites; why after MATMUL: products carry their transposes
_SHARE = 8  # scores that take more than this part of a budget in bytes are cut, which is cheaper than recomputing

AFTER_LOWERING = ",".join(
    (
        CLEAN,  # why here: expansions of a forward operator and of its gradient share sub-graphs
        "simplify-reshapes",
        "simplify-transposes",
        "fuse-matmul-transpose",
        "fuse-matmul-scale",
        "eliminate-common-subexpressions",  # why here: transposes that went into products leave equal ones behind
        "fuse-embedding-update",
        "group-updates",  # why after: the embedding pass knows single updates only
        "add-embedding-gradient",  # why after: gradients that go into an update have no table at all
        "fuse-add-norm",
        "fuse-attention-gradient",  # why after common subexpressions: it compares values by identity
        "fuse-masked-softmax",
        "zero-empty-rows",  # why here: it knows the softmax kernels only
        "fuse-loss-gradient",
        "use-product-kernel",  # why here: the passes above know the standard operators only
        "absorb-kernel-casts",  # why here: it knows kernels only
        "use-transpose-kernel",  # why last: the passes above know the standard operator only
        "redraw-dropout",
        "eliminate-identity",
        "eliminate-dead-code",  # why here: outputs that nobody reads any more, masks among them, are not written
        "slice-early",  # why last: it only orders
    )
)


def _preset(
    *before: str,
    after: str,
    optimizer: Any,
    target: str,
    shapes: Mapping[str, int],
    accumulation_steps: int,
    distributed: bool = False,
    memory_budget: str | None = None,
    precision: str = "",
    regions: str = "",
) -> tuple[ir.passes.PassBase, ...]:
    bind = (f"bind-shapes{{sizes={'|'.join(f'{k}:{v}' for k, v in sorted(shapes.items()))}}}",) if shapes else ()
    # why precision here: fusions know float32 operators, and updates are float32
    head = parse_pipeline(
        ",".join(
            (*bind, *(b for b in before if b), "mark-optimized", *((precision, ABSORB, PRODUCT) if precision else ()))
        )
    )
    if precision:  # why last: passes that ask for fused kernels may leave low values to operators that have no kernel
        after = f"{after},legalize-precision"
    attach = (AttachOptimizer.of(optimizer, accumulation_steps, distributed),) if optimizer is not None else ()
    plan = "plan-memory"
    if memory_budget is not None:  # why here: later passes would merge what is evaluated twice
        plan = f"select-recompute{{budget={memory_budget}}},plan-memory{{keep_order=true}}"
    tail = parse_pipeline(",".join((*([regions] if regions else []), f"lower{{target={target}}}", after, plan)))
    return (*head, *attach, *tail)


def _memory(budget: str | None) -> str:
    if budget is None or budget.endswith("%"):  # a percentage is of what the graph takes with its usual chunks
        return MEMORY
    return f"{MEMORY}{{least_bytes={min(ChunkLoss.least_bytes, budget_bytes(budget, 0) // _SHARE)}}}"


def o0(**options) -> tuple[ir.passes.PassBase, ...]:
    """Only what running needs: lower and place."""
    return _preset(after="eliminate-dead-code,fold-constants,fold-shapes", **options)


def o1(**options) -> tuple[ir.passes.PassBase, ...]:
    """Canonical passes."""
    return _preset(CANONICAL, after=AFTER_LOWERING, **options)


def o2(**options) -> tuple[ir.passes.PassBase, ...]:
    """Canonical passes and fusions over both halves."""
    memory = _memory(options.get("memory_budget"))
    padding = PADDING if options.pop("remove_padding", False) else ""
    # why regions before lowering: they hold composites; why after the rest: what has a better form is not element-wise
    options = {"regions": "fuse-regions", **options}
    return _preset(
        CANONICAL, FUSION, CANONICAL, ATTENTION, MATMUL, padding, LABELLED, memory, after=AFTER_LOWERING, **options
    )


PRESETS: dict[str, Callable[..., tuple[ir.passes.PassBase, ...]]] = {"O0": o0, "O1": o1, "O2": o2, "O3": o2}
