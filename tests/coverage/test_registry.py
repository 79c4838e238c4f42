"""The registry of model families: names, choices, what is missing."""

from __future__ import annotations

import pytest
import torch

from bench.coverage import registry
from bench.coverage.registry import Case, Family, cases, families, rotating
from ortgraph.errors import InputError


def test_a_family_with_implementations_has_a_case_for_each():
    names = [c.name for c in cases(["bert-sequence"])]
    assert names == ["bert-sequence/eager", "bert-sequence/sdpa"]
    assert [c.name for c in cases(["mlp", "bert-qa/sdpa"])] == ["mlp", "bert-qa/sdpa"]


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="no-such-family"):
        cases(["no-such-family"])


def test_names_are_taken_once():
    families()
    with pytest.raises(ValueError, match="twice"):
        registry.family("mlp", kind="again")(lambda: None)


def test_builders_give_the_same_model_each_time():
    (case,) = cases(["transformer-encoder"])
    first, second = case.build(), case.build()
    assert first.module.training
    assert all(torch.equal(a, b) for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True))
    assert torch.equal(first.batch["ids"], second.batch["ids"])


def test_a_key_always_chooses_the_same_cases_and_keys_reach_all():
    every = cases(["mlp", "transformer-encoder", "two-towers"])
    assert rotating(every, "a", 2) == rotating(every, "a", 2)
    assert len(rotating(every, "a", 2)) == 2
    assert {c.name for key in range(20) for c in rotating(every, str(key), 1)} == {c.name for c in every}


def test_cases_without_their_package_are_not_chosen():
    absent = Case(Family("absent", registry.families()["mlp"].build, "x", requires=("no_such_package",)))
    assert absent.family.missing() == ("no_such_package",)
    assert rotating([absent, *cases(["mlp"])], "a", 2) == cases(["mlp"])
