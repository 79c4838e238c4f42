"""AdamW as a value: text form, groups, range checks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortgraph.errors import InputError
from ortgraph.optim import AdamW, Group

positive = st.floats(1e-9, 10.0)
betas = st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999))
patterns = st.lists(st.text("abz.*?[]_-0/", min_size=1, max_size=8), min_size=1, max_size=3).map(tuple)
groups = st.builds(
    Group, patterns, lr=st.none() | positive, betas=st.none() | betas, eps=st.none() | positive,
    weight_decay=st.none() | st.just(0.0) | positive,
)  # fmt: skip
optimizers = st.builds(
    AdamW, lr=positive, betas=betas, eps=positive, weight_decay=st.just(0.0) | positive,
    max_grad_norm=st.none() | positive, no_decay=patterns | st.just(()), groups=st.lists(groups, max_size=3).map(tuple),
)  # fmt: skip


@given(optimizers)
@settings(max_examples=200, deadline=None)
def test_text_round_trip(optimizer: AdamW) -> None:
    text = str(optimizer)
    assert AdamW.parse(text) == optimizer
    assert not any(c in text for c in " {}|,")


def test_text_of_defaults() -> None:
    assert str(AdamW()) == "adamw" and AdamW.parse("AdamW()") == AdamW() == AdamW.parse("adamw")
    assert AdamW.parse("adamw(lr=1e-2; betas=0.8:0.9)") == AdamW(lr=0.01, betas=(0.8, 0.9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sgd", "does not parse"),
        ("adamw(lr=0.1", "does not parse"),
        ("adamw(rate=0.1)", "no option 'rate=0.1'(?s:.*)lr, betas"),
        ("adamw(lr=fast)", "lr=fast is no number"),
        ("adamw(lr=0.1:0.2)", "is no number"),
        ("adamw(betas=0.9)", "betas"),
        ("adamw(lr=0.1;lr=0.2)", "lr is given twice"),
        ("adamw(group(lr=0.1))", "group without match"),
        ("adamw(group(match=a;lr=0.1;lr=0.2))", "given twice"),
        ("adamw(lr=-1)", "not negative"),
    ],
)
def test_text_that_does_not_parse(text, words) -> None:
    with pytest.raises(InputError, match=words):
        AdamW.parse(text)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1e-3}, {"lr": float("nan")}, {"lr": float("inf")}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)},
        {"eps": -1.0},
        {"weight_decay": -0.1}, {"max_grad_norm": 0.0}, {"max_grad_norm": float("nan")}, {"no_decay": ("a b",)},
        {"groups": (Group("x", lr=-1.0),)}, {"lr": 0.0, "groups": (Group("x", lr=0.1),)}, {"groups": (Group("a;b"),)},
    ],
)  # fmt: skip
def test_out_of_range(options) -> None:
    with pytest.raises(InputError, match="AdamW"):
        AdamW(**options)


def test_first_matching_group_applies() -> None:
    optimizer = AdamW(
        lr=0.1,
        weight_decay=0.5,
        no_decay=("*.bias", "*norm*"),
        groups=(
            Group("head.*", lr=0.2),
            Group(("head.bias", "embed*"), weight_decay=0.25),
            Group("norm2*", weight_decay=1.0),
        ),
    )
    assert [optimizer.group_of(n) for n in ("body.w", "head.bias", "embed.w", "norm2.weight")] == [0, 1, 2, 3]
    assert optimizer.settings("head.w").lr_scale == 2.0 and optimizer.settings("head.w").weight_decay == 0.5
    assert optimizer.settings("head.bias").weight_decay == 0.0, "no_decay holds where the group says nothing"
    assert optimizer.settings("embed.bias").weight_decay == 0.25, "a group's own decay goes first"
    assert optimizer.settings("norm2.weight").weight_decay == 1.0
    assert optimizer.settings("body.bias").weight_decay == 0.0 and optimizer.settings("Body.BIAS").weight_decay == 0.5


def test_strings_stand_for_one_pattern() -> None:
    assert AdamW(no_decay="*.bias").no_decay == ("*.bias",) and Group("a").match == ("a",)
    assert AdamW(groups=({"match": "a", "lr": 0.1},)) == AdamW(groups=(Group("a", lr=0.1),))


def test_attributes_by_a_function_of_the_name() -> None:
    """The 2020 SDK's mapping; a group of the optimizer holds where the function says nothing."""
    base = AdamW(lr=0.1, weight_decay=0.5, no_decay="*.bias", groups=(Group("head.*", eps=1e-3, lr=0.2),))
    names = ("body.w", "body.bias", "head.w", "head.bias", "odd[0].w", "odd0.w")
    given = {
        "body.w": {"lr": 0.01, "betas": [0.5, 0.9]}, "head.w": {"lr": 0.05}, "head.bias": {"weight_decay": 0.25},
        "odd[0].w": {"lr": 0.0},
    }  # fmt: skip
    made = base.per_parameter(given.get, names)
    found = {n: made.settings(n) for n in names}
    assert found["body.w"].lr_scale == pytest.approx(0.1) and found["body.w"].betas == (0.5, 0.9)
    assert found["body.w"].weight_decay == 0.5 and found["body.bias"] == base.settings("body.bias")
    assert (found["head.w"].lr_scale, found["head.w"].eps) == (0.5, 1e-3)
    assert (found["head.bias"].lr_scale, found["head.bias"].weight_decay) == (2.0, 0.25)
    assert found["odd[0].w"].lr_scale == 0.0 and found["odd0.w"].lr_scale == 1.0, "names are no patterns"
    assert base.per_parameter(lambda name: None, names) == base
    for wrong, words in (({"alpha": 0.9}, "'alpha' for 'body.w'"), ({"lr": -1.0}, "lr=-1.0")):
        with pytest.raises(InputError, match=words):
            base.per_parameter(lambda name, wrong=wrong: wrong, names)
