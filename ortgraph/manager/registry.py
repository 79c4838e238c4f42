"""Pass names to classes: a lazy table, entry points (group ``ortgraph.passes``) and plugin files."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import pathlib
import sys
from collections.abc import Iterator

import onnx_ir as ir

from ortgraph.errors import InputError, PassError, PipelineSyntaxError
from ortgraph.manager.base import GraphPass

ENTRY_POINTS = "ortgraph.passes"
PRESETS = "ortgraph.passes.pipelines"
DEVICE = "ortgraph.passes.device_pipeline"

TABLE: dict[str, str] = {
    "mark-optimized": "ortgraph.passes.canonical.mark_optimized:MarkOptimized",
    "bind-shapes": "ortgraph.passes.canonical.bind_shapes:BindShapes",
    "attach-optimizer": "ortgraph.passes.lowering.attach_optimizer:AttachOptimizer",
    "cast-precision": "ortgraph.passes.precision.cast_precision:CastPrecision",
    "legalize-precision": "ortgraph.passes.precision.legalize_precision:LegalizePrecision",
    "lower": "ortgraph.passes.lowering.lower:Lower",
    "fuse-loss-gradient": "ortgraph.passes.lowering.fuse_loss_gradient:FuseLossGradient",
    "use-product-kernel": "ortgraph.passes.lowering.use_product_kernel:UseProductKernel",
    "absorb-kernel-casts": "ortgraph.passes.lowering.absorb_kernel_casts:AbsorbKernelCasts",
    "use-transpose-kernel": "ortgraph.passes.lowering.use_transpose_kernel:UseTransposeKernel",
    "fuse-add-norm": "ortgraph.passes.lowering.fuse_add_norm:FuseAddNorm",
    "fuse-attention-gradient": "ortgraph.passes.lowering.fuse_attention_gradient:FuseAttentionGradient",
    "fuse-masked-softmax": "ortgraph.passes.lowering.fuse_masked_softmax:FuseMaskedSoftmax",
    "zero-empty-rows": "ortgraph.passes.lowering.zero_empty_rows:ZeroEmptyRows",
    "absorb-parameter-casts": "ortgraph.passes.precision.absorb_parameter_casts:AbsorbParameterCasts",
    "group-updates": "ortgraph.passes.lowering.group_updates:GroupUpdates",
    "fuse-embedding-update": "ortgraph.passes.lowering.fuse_embedding_update:FuseEmbeddingUpdate",
    "select-recompute": "ortgraph.passes.memory.select_recompute:SelectRecompute",
    "select-labelled-rows": "ortgraph.passes.memory.select_labelled_rows:SelectLabelledRows",
    "remove-padding": "ortgraph.passes.memory.remove_padding:RemovePadding",
    "chunk-loss": "ortgraph.passes.memory.chunk_loss:ChunkLoss",
    "add-embedding-gradient": "ortgraph.passes.memory.add_embedding_gradient:AddEmbeddingGradient",
    "slice-early": "ortgraph.passes.memory.slice_early:SliceEarly",
    "redraw-dropout": "ortgraph.passes.memory.redraw_dropout:RedrawDropout",
    "plan-memory": "ortgraph.passes.memory.plan_memory:PlanMemory",
    "eliminate-dead-code": "ortgraph.passes.canonical.eliminate_dead_code:EliminateDeadCode",
    "eliminate-identity": "ortgraph.passes.canonical.eliminate_identity:EliminateIdentity",
    "eliminate-common-subexpressions": "ortgraph.passes.canonical.eliminate_common_subexpressions:EliminateCommonSubexpressions",
    "eliminate-cast-pairs": "ortgraph.passes.canonical.eliminate_cast_pairs:EliminateCastPairs",
    "simplify-transposes": "ortgraph.passes.canonical.simplify_transposes:SimplifyTransposes",
    "simplify-reshapes": "ortgraph.passes.canonical.simplify_reshapes:SimplifyReshapes",
    "fold-constants": "ortgraph.passes.canonical.fold_constants:FoldConstants",
    "fold-shapes": "ortgraph.passes.canonical.fold_shapes:FoldShapes",
    "inline-constant-if": "ortgraph.passes.canonical.inline_constant_if:InlineConstantIf",
    "inline-functions": "ortgraph.passes.canonical.inline_functions:InlineFunctions",
    "sort-nodes": "ortgraph.passes.canonical.sort_nodes:SortNodes",
    "fuse-gemm-bias": "ortgraph.passes.fusion.gemm_bias:FuseGemmBias",
    "fuse-matmul-transpose": "ortgraph.passes.fusion.matmul_transpose:FuseMatmulTranspose",
    "fuse-matmul-scale": "ortgraph.passes.fusion.matmul_scale:FuseMatmulScale",
    "fuse-weight-gradient": "ortgraph.passes.fusion.weight_gradient:FuseWeightGradient",
    "fuse-product": "ortgraph.passes.fusion.product:FuseProduct",
    "narrow-rows": "ortgraph.passes.fusion.narrow_rows:NarrowRows",
    "fuse-gelu": "ortgraph.passes.fusion.gelu:FuseGelu",
    "fuse-activation-gradient": "ortgraph.passes.fusion.activation_gradient:FuseActivationGradient",
    "raise-contrib": "ortgraph.passes.fusion.raise_contrib:RaiseContrib",
    "fuse-layer-norm": "ortgraph.passes.fusion.layer_norm:FuseLayerNorm",
    "fuse-attention": "ortgraph.passes.fusion.attention:FuseAttention",
    "absorb-head-transposes": "ortgraph.passes.fusion.head_transposes:AbsorbHeadTransposes",
    "simplify-attention": "ortgraph.passes.fusion.attention_composites:SimplifyAttention",
    "fuse-softmax": "ortgraph.passes.fusion.softmax:FuseSoftmax",
    "fuse-cross-entropy": "ortgraph.passes.fusion.cross_entropy:FuseCrossEntropy",
    "fuse-embedding-gradient": "ortgraph.passes.fusion.embedding_gradient:FuseEmbeddingGradient",
    "fuse-regions": "ortgraph.passes.fusion.fuse_regions:FuseRegions",
    "fuse-stack-gradient": "ortgraph.passes.fusion.stack_gradient:FuseStackGradient",
    "fuse-bias-gradient": "ortgraph.passes.fusion.bias_gradient:FuseBiasGradient",
    "lift-batch-views": "ortgraph.passes.fusion.batch_views:LiftBatchViews",
}
_plugins: dict[str, type[GraphPass]] = {}


def names() -> Iterator[str]:
    """Every known pass name, sorted."""
    yield from sorted({*TABLE, *_plugins, *(e.name for e in _entry_points())})


def get(name: str) -> type[GraphPass]:
    """The class of a pass.

    Raises:
        PipelineSyntaxError: No pass has this name; the message names the nearest ones.
    """
    if name in _plugins:
        return _plugins[name]
    if name in TABLE:
        return _load(name, TABLE[name])
    for entry in _entry_points():
        if entry.name == name:
            return _checked(name, entry.load())
    near = difflib.get_close_matches(name, list(names()), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`ortgraph passes` lists all"
    raise PipelineSyntaxError(f"unknown pass {name!r}", hint)


def _load(name: str, target: str) -> type[GraphPass]:
    module, _, attribute = target.partition(":")
    return _checked(name, getattr(importlib.import_module(module), attribute))


def _checked(name: str, cls: object) -> type[GraphPass]:
    if not (isinstance(cls, type) and issubclass(cls, GraphPass)) or cls.name != name:
        raise PassError(
            f"pass {name!r} is registered with {cls!r}, which is not a GraphPass of that name", "fix its name"
        )
    return cls


def _entry_points() -> tuple[importlib.metadata.EntryPoint, ...]:
    return tuple(importlib.metadata.entry_points(group=ENTRY_POINTS))


def register(cls: type[GraphPass]) -> type[GraphPass]:
    """Make a pass known by its name. Usable as a decorator.

    Raises:
        PassError: The name is empty or belongs to another pass.
    """
    if not cls.name:
        raise PassError(f"{cls.__name__} has no name", "set `name: ClassVar[str]`")
    known = _plugins.get(cls.name)
    same_source = known is not None and (known.__module__, known.__qualname__) == (cls.__module__, cls.__qualname__)
    if cls.name in TABLE or (known is not None and not same_source):
        raise PassError(f"a pass called {cls.name!r} exists already", "choose another name")
    _plugins[cls.name] = cls
    return cls


def load_plugin(path: str | pathlib.Path) -> list[type[GraphPass]]:
    """Run a plugin file and register every concrete GraphPass that it defines.

    Returns:
        The passes found. A pass with ``after`` set to a stage is inserted there by the manager.

    Raises:
        InputError: The file is missing, raises, or defines no pass.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such plugin file", "give the path of a Python file that defines a GraphPass")
    # why a hash: files of one name in two folders are two modules
    name = f"ortgraph_plugin_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # why: dataclasses look up annotations that are strings there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a plugin may raise anything; the cause is chained
        sys.modules.pop(name, None)
        raise InputError(
            f"{path}: the plugin raised {type(error).__name__}: {error}", "run it with python to see where"
        ) from error
    found = [c for c in vars(module).values() if _is_plugin_pass(c, module.__name__)]
    if not found:
        raise InputError(f"{path}: defines no pass", "subclass ortgraph.manager.GraphPass, or decorate with @fusion")
    return [register(c) for c in found]


def _is_plugin_pass(item: object, module: str) -> bool:
    return isinstance(item, type) and issubclass(item, GraphPass) and item.__module__ == module and bool(item.name)


def preset_names() -> tuple[str, ...]:
    """Names of the preset pipelines, sorted."""
    return tuple(sorted(importlib.import_module(PRESETS).PRESETS))


def preset(name: str, **options: object) -> tuple[ir.passes.PassBase, ...]:
    """A preset pipeline (``O0`` ... ``O3``) from ``ortgraph.passes.pipelines``, as its ``target`` takes it.

    Raises:
        InputError: There is no such target.
        PipelineSyntaxError: There is no preset of that name.
    """
    presets = importlib.import_module(PRESETS).PRESETS
    if name not in presets:
        raise PipelineSyntaxError(
            f"unknown preset {name!r}", f"one of {', '.join(sorted(presets))}, or a list of passes"
        )
    passes = presets[name](**options)
    return importlib.import_module(DEVICE).for_target(passes, str(options["target"]))
