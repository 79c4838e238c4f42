"""Foreign passes that are wrong about random nodes: bypassed halves, swapped and shared masks, at every stage."""

import onnx_ir as ir
import pytest
import torch

import ortgraph
from ortgraph.errors import VerificationError
from ortgraph.graph import TrainingGraph
from ortgraph.graph.verify import live_nodes
from ortgraph.manager import PassManager, parse_pipeline
from ortgraph.manager.draws import draws_in

STAGES = ("captured", "optimized", "stepped", "lowered", "planned")


class Noisy(torch.nn.Module):
    """Dropouts in a row with parameters between, side by side, and of one shape."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x):
        drop = torch.nn.functional.dropout
        hidden = drop(torch.tanh(self.first(x)), 0.2)
        return drop(self.second(hidden), 0.2) + drop(torch.sin(self.third(hidden)), 0.2)


@pytest.fixture(scope="module")
def captured():
    torch.manual_seed(0)
    return ortgraph.capture(Noisy(), (torch.randn(2048, 16), torch.randn(2048, 16)), loss=torch.nn.MSELoss())


class OnGradients(ir.passes.InPlacePass):
    """Lets gradients of dropouts read what they should not."""

    def call(self, model):
        halves = [n for n in model.graph if n.op_type == "DropoutGrad"]
        self.change(halves)
        return ir.passes.PassResult(model, bool(halves))


class SwapMasks(OnGradients):
    def change(self, halves):
        for node, mask in zip(halves[:2], [n.inputs[1] for n in halves[:2]][::-1], strict=True):
            node.replace_input_with(1, mask)


class ShareMask(OnGradients):
    def change(self, halves):
        halves[1].replace_input_with(1, halves[0].inputs[1])


class KeepAll(OnGradients):
    """The gradient of a dropout whose mask is a constant."""

    def change(self, halves):
        graph = halves[0].graph
        shape = ir.node("Shape", [halves[0].inputs[0]])
        mask = ir.node("ConstantOfShape", shape.outputs, {"value": ir.tensor([True])})
        mask.outputs[0].name, shape.outputs[0].name = "all", "all.shape"
        graph.insert_before(halves[0], [shape, mask])
        halves[0].replace_input_with(1, mask.outputs[0])


class Renumber(OnGradients):
    """Numbers of the drawing nodes exchanged, in the forward half only."""

    def change(self, halves):
        drawing = [n.inputs[1].producer() for n in halves[:2]]
        for node, number in zip(drawing, [n.attributes["node"].as_int() for n in drawing][::-1], strict=True):
            node.attributes["node"] = ir.AttrInt64("node", number)


class Bypass(ir.passes.InPlacePass):
    """What a drawing node (forward), or the node that undoes a draw (backward) gives is what it is given."""

    def __init__(self, forward):
        self.forward = forward

    def call(self, model):
        graph = TrainingGraph(model)
        draws = draws_in(graph)
        behind_loss = set()
        stack = [v.producer() for v in model.graph.outputs if v.name == graph.signature.loss]
        while stack:
            node = stack.pop()
            if node is not None and node not in behind_loss:
                behind_loss.add(node)
                stack += [v.producer() for v in node.inputs if v is not None]
        for node in model.graph:
            if node not in live_nodes(graph) or (node in behind_loss) != self.forward:
                continue
            for old in node.outputs:
                if old.is_graph_output() or not (draws.shown_by(old) if draws.of(node) else draws.undone_by(node)):
                    continue
                around = [v for v in (*node.inputs, *node.outputs) if v is not None and not draws_of(draws, v)]
                same = [v for v in around if (v.shape, v.dtype) == (old.shape, old.dtype)]
                if same:
                    ir.convenience.replace_all_uses_with(old, same[0])
                    return ir.passes.PassResult(model, True)
        raise AssertionError("no such node")


def draws_of(draws, value):
    node = value.producer()
    return node is not None and draws.of(node) and draws.shown_by(value)


def optimized(captured, stage, *foreign, level="O2", **options):
    optimizer = ortgraph.optim.AdamW(lr=1e-2)
    return ortgraph.optimize(captured, level, optimizer=optimizer, passes_after={stage: foreign}, **options).graph


@pytest.mark.parametrize("stage", STAGES[:3])
@pytest.mark.parametrize("foreign", [SwapMasks, ShareMask, KeepAll, Renumber])
def test_a_gradient_that_reads_another_mask_is_caught(captured, stage, foreign):
    with pytest.raises(VerificationError, match=f"draws-are-undone-by-their-own.*{foreign.__name__}.*Dropout#"):
        optimized(captured, stage, foreign())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("forward", [True, False])
def test_a_bypassed_half_is_caught(captured, stage, level, forward):
    with pytest.raises(VerificationError, match="draws-keep-their-effect.*Bypass.*Dropout#"):
        optimized(captured, stage, Bypass(forward), level=level)


def test_a_bypassed_half_is_caught_in_fused_regions_and_among_recomputed_nodes(captured):
    graph = optimized(captured, "planned", memory_budget="85%")
    assert any(n.domain == "ortgraph.generated" for n in graph.graph)
    for forward in (True, False):
        with pytest.raises(VerificationError, match="draws-keep-their-effect.*Bypass.*Dropout#"):
            PassManager([Bypass(forward)]).run(graph.clone())


class Seeing(torch.nn.Module):
    """Two layers of attention with dropout."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            q, k, v = (part.view(2, 256, 2, 8).transpose(1, 2) for part in layer(x).chunk(3, -1))
            p = torch.nn.functional.dropout(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1), 0.1)
            x = x + (p @ v).transpose(1, 2).reshape(2, 256, 16)
        return x


class ExchangeAttention(ir.passes.InPlacePass):
    """Gradients of attention that draw the numbers of one another."""

    def call(self, model):
        halves = [n for n in model.graph if n.op_type == "AttentionGrad"]
        for node, number in zip(halves, [n.attributes["node"].as_int() for n in halves][::-1], strict=True):
            node.attributes["node"] = ir.AttrInt64("node", number)
        return ir.passes.PassResult(model, bool(halves))


@pytest.mark.parametrize("stage", ["optimized", "lowered"])
def test_attention_that_redraws_another_number_is_caught(stage):
    torch.manual_seed(0)
    batch = torch.randn(2, 256, 16), torch.randn(2, 256, 16)
    captured = ortgraph.capture(Seeing(), batch, loss=torch.nn.MSELoss())
    optimized(captured, stage)
    with pytest.raises(VerificationError, match="draws-are-undone-by-their-own.*ExchangeAttention.*Dropout#"):
        optimized(captured, stage, ExchangeAttention())


def test_a_draw_in_a_local_function_counts(captured):
    """Outlined, inlined again: neither is a duplicate nor a loss."""
    outlined = captured.clone()
    outline(outlined.model, next(n for n in outlined.graph if n.op_type == "Dropout"))
    PassManager(parse_pipeline("inline-functions,eliminate-dead-code")).run(outlined)
    assert not outlined.model.functions and outlined.text() != ""
    PassManager([Outline()]).run(captured.clone())
    with pytest.raises(VerificationError, match="draws-keep-their-effect.*Bypass"):
        PassManager([Outline(), Bypass(True)]).run(captured.clone())


class Outline(ir.passes.InPlacePass):
    def call(self, model):
        outline(model, next(n for n in model.graph if n.op_type == "Dropout"))
        return ir.passes.PassResult(model, True)


def outline(model, node):
    """The node as a call of a local function that holds it."""
    inputs = [ir.Value(name=f"i{i}") for i in range(len(node.inputs))]
    inner = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), num_outputs=2, name="inner")
    inner.outputs[0].name, inner.outputs[1].name = "y", "mask"
    body = ir.Graph(inputs, inner.outputs, nodes=[inner], opset_imports=dict(model.graph.opset_imports), name="f")
    function = ir.Function("local", "Drop", "", graph=body, attributes=[])
    model.functions[function.identifier()] = function
    model.graph.opset_imports["local"] = 1
    node.domain, node.op_type = "local", "Drop"
    node.attributes.clear()


def test_a_region_may_read_a_mask_that_is_drawn_elsewhere():
    """The last block runs for the first token only: the gradient reads a slice of the mask, inside a fused region."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=384, num_hidden_layers=1, num_attention_heads=6, intermediate_size=384
    )
    batch = {"input_ids": torch.randint(0, 50, (16, 64)), "labels": torch.randint(0, 2, (16,))}
    graph = ortgraph.capture(transformers.BertForSequenceClassification(config).train(), batch)
    result = ortgraph.optimize(graph, "O2").graph
    regions = [n for n in result.graph if n.domain == "ortgraph.generated"]
    undone = {d for n in regions for d in draws_in(result).undone_by(n)}
    assert undone  # what the rule has to see through
