"""``remove_padding`` behind the doors of PyTorch: gradients are those of all rows, whatever the masks of the batches."""

from __future__ import annotations

import copy

import pytest
import torch

import ortgraph
from ortgraph.dynamo.by_rows import GraphsByRows
from ortgraph.dynamo.partition import PaddingWarning
from ortgraph.errors import InputError, UnsupportedError

transformers = pytest.importorskip("transformers")
BATCH, LENGTH, WORDS = 4, 32, 61
LENGTHS = ([7, 9, 5, 11], [32, 3, 1, 4], [32, 32, 32, 32], [6, 0, 8, 2], [8, 12, 4, 9])


def bert(head: str, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=3,
        problem_type="single_label_classification",
    )  # fmt: skip
    return getattr(transformers, head)(config).train()


def batch(lengths: list[int], labels: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(sum(lengths))
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, WORDS, (BATCH, LENGTH)) * mask
    counted = mask.bool() & (torch.rand(BATCH, LENGTH) < 0.4) if labels == "masked" else mask.bool()
    y = torch.randint(0, 3, (BATCH,)) if labels == "class" else ids.masked_fill(~counted, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": y}


def gradients(module: torch.nn.Module, given: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    module.zero_grad()
    loss = module(**given).loss
    loss.backward()
    return float(loss.detach()), {n: p.grad.double() for n, p in module.named_parameters() if p.grad is not None}


@pytest.fixture
def used(monkeypatch):
    """The buffers that batches were computed in."""
    found = []
    of = GraphsByRows.of

    def watch(self, args):
        graph, chosen = of(self, args)
        found.append(chosen.packed)
        return graph, chosen

    monkeypatch.setattr(GraphsByRows, "of", watch)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (lambda: bert("BertForSequenceClassification"), "class"),
        (lambda: bert("BertForMaskedLM"), "masked"),
    ],
    ids=["classes", "masked-lm"],
)
def test_gradients_are_those_of_all_rows(make, labels, threads, used) -> None:
    module = make()
    exact = copy.deepcopy(module).double()
    ours = ortgraph.ORTModule(copy.deepcopy(module), remove_padding=True, fallback=False, threads=threads)
    for lengths in LENGTHS:
        given = batch(lengths, labels)
        _, true = gradients(exact, given)
        theirs, plain = gradients(module, given)
        loss, found = gradients(ours, given)
        assert loss == pytest.approx(theirs, rel=1e-6)
        assert found.keys() == plain.keys()
        median = torch.stack([g.norm() for g in true.values()]).median()
        for name, grad in true.items():
            scale = max(float(grad.norm()), float(median))
            allowed = 4 * float((plain[name] - grad).norm()) / scale + 1e-6
            assert float((found[name] - grad).norm()) / scale <= allowed, (name, lengths)
    assert (
        0 < used[0] < BATCH * LENGTH // 2 and used[2] == 0
    )  # packed where there is padding, whole where there is none
    assert len(set(used)) < len(used)  # batches share buffers


def test_draws_over_packed_rows_are_reproducible_and_differ_by_call(used) -> None:
    ours = ortgraph.ORTModule(bert("BertForSequenceClassification", dropout=0.3), remove_padding=True, fallback=False)
    given = batch(LENGTHS[0], "class")
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        found.append(gradients(ours, given))
    assert used[0]
    assert found[0][0] == found[1][0] != found[2][0]
    assert all(torch.equal(g, found[1][1][n]) for n, g in found[0][1].items())


def test_a_gradient_for_scores_of_packed_draws_is_refused_and_then_computed() -> None:
    ours = ortgraph.ORTModule(bert("BertForSequenceClassification", dropout=0.3), remove_padding=True, fallback=False)
    given = batch(LENGTHS[0], "class")
    with pytest.raises(UnsupportedError, match="drew its dropout without padding"):
        ours(**given).logits.sum().backward()
    with pytest.warns(PaddingWarning, match="another result than the loss"):
        ours(**given).logits.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())


def test_says_where_rows_of_padding_are_computed_all_the_same() -> None:
    linear = ortgraph.ORTModule(torch.nn.Linear(4, 2), remove_padding=True, fallback=False)
    with pytest.warns(PaddingWarning, match="returns no loss"):
        linear(torch.randn(3, 4)).square().mean().backward()
    with pytest.warns(PaddingWarning, match="no attention is masked"):
        given = {k: v for k, v in batch(LENGTHS[0], "class").items() if k != "attention_mask"}
        module = ortgraph.ORTModule(bert("BertForSequenceClassification"), remove_padding=True, fallback=False)
        module(**given).loss.backward()
    with pytest.raises(InputError, match="remove_padding goes with O2"):
        ortgraph.ORTModule(torch.nn.Linear(4, 2), remove_padding=True, pipeline="O1")
