"""Checks of values that only raise are left out of a trace; other questions about values stay refused."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import ortgraph
from ortgraph.errors import OrtgraphError


def raises(x, y):
    if y is not None and y.max() >= 9:
        raise ValueError("labels")
    if not (y >= 0).all():
        raise ValueError("negative")
    if bool((x == 7).any()) or (y > 8).any().item():
        warnings.warn("odd", stacklevel=1)
        raise ValueError("odd")
    x = x * 2
    assert (x < 1e9).all(), "large"
    return x


def finite(x, y):
    if not torch.isfinite(x).all():
        x = x.clamp(-1, 1)
    if torch.isnan(x).any() or x.isinf().any():
        x = torch.nan_to_num(x)
    if torch.any(torch.isnan(x)):
        x = x * 0
    return x


def branches(x, y):
    if (y > 3).any():
        x = x * 2
    return x


def reads(x, y):
    if y.max().item() > 100:
        raise ValueError("labels")
    return x


def returns(x, y):
    if (y > 3).all():
        return x * 3
    return x


class Checked(nn.Module):
    def __init__(self, check):
        super().__init__()
        self.head, self.check = nn.Linear(4, 5), check

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.check(self.head(x), y), y % 5)


BATCH = {"x": torch.linspace(-1, 1, 12).reshape(3, 4), "y": torch.tensor([0, 4, 2])}


@pytest.mark.parametrize("check", [raises, finite])
def test_checks_are_left_out(check, check_capture):
    torch.manual_seed(0)
    check_capture(Checked(check), BATCH, repeats=2)


@pytest.mark.parametrize("check", [branches, reads, returns])
def test_other_questions_are_refused_with_their_line(check):
    with pytest.raises(OrtgraphError, match=r"test_value_checks\.py:\d+"):
        ortgraph.capture(Checked(check), BATCH)


@pytest.mark.parametrize(("check", "told"), [(raises, False), (finite, True)])
def test_more_than_an_error_is_left_out_with_a_warning(check, told):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ortgraph.capture(Checked(check), BATCH)
    lines = {str(w.message) for w in found if "not finite" in str(w.message)}
    assert len(lines) == (3 if told else 0)
    assert all("test_value_checks.py:" in line for line in lines)
