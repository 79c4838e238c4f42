"""The precision option as a mapping, as text, and as a pass."""

from __future__ import annotations

import pytest
import torch

from ortgraph.errors import InputError
from ortgraph.manager import parse_pipeline
from ortgraph.manager.numerics import lower_precision, tolerance_of
from ortgraph.manager.precision_option import check_precision, parse_overrides, precision_pass


def test_text_and_mapping_mean_the_same():
    want = {"keep": ("layer.3.*", "Gelu"), "low": ("Softmax",)}
    assert parse_overrides("keep=layer.3.*|Gelu;low=Softmax") == want
    assert parse_overrides({"keep": ["layer.3.*", "Gelu"], "low": "Softmax"}) == want
    assert parse_overrides(None) == {} == parse_overrides("")


@pytest.mark.parametrize(
    "bad",
    ["high=Gelu", "keep=Gelu;keep=Add", "keep", "keep=", "keep=a b", "keep=a{b}", {"keep": ["a,b"]}, {"keep": []}],
)
def test_other_overrides_are_refused(bad):
    with pytest.raises(InputError, match="precision overrides"):
        parse_overrides(bad)


def test_the_pass_reads_back():
    assert precision_pass("fp32") == ""
    text = precision_pass("fp16", "low=Softmax;keep=layer.3.*|Gelu")
    (made,) = parse_pipeline(text)
    assert text == str(made) == "cast-precision{precision=fp16 keep=layer.3.*|Gelu low=Softmax}"
    assert made.keep == ("layer.3.*", "Gelu") and made.low == ("Softmax",)


@pytest.mark.parametrize("bad", ["half", "BF16", None, 16])
def test_other_precisions_are_refused(bad):
    with pytest.raises(InputError, match="unknown precision"):
        check_precision(bad)


@pytest.mark.parametrize("given", ["bfloat16", "BF16", torch.bfloat16])
def test_other_names_of_a_precision_are_understood(given):
    with pytest.raises(InputError, match="did you mean 'bf16'"):
        check_precision(given)


def test_tolerances_grow_with_the_unit(linear_graph):
    loss, gradient = tolerance_of("fp32").loss, tolerance_of("fp32").gradient
    for precision in ("fp16", "bf16"):
        found = tolerance_of(precision)
        assert found.loss > loss and found.gradient > gradient and found.noise > 1
        loss, gradient = found.loss, found.gradient
    assert gradient == 1 / 16
    cast = linear_graph.clone()
    cast.signature = cast.signature.replace(metadata={"precision": "fp16"})
    assert lower_precision(linear_graph, cast) == "fp16" and lower_precision(linear_graph) == "fp32"
