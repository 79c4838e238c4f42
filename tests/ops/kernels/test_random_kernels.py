"""Dropout and uniform numbers against the reference generator, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from ortgraph.ops.random import reference_mask, reference_uniform

SHAPES = [(), (1,), (255,), (257,), (3, 0), (5, 67), (40, 33, 21)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("key,step,node", [(0, 0, 0), (-(2**63), 2**62, 7), (123456789, 41, 2**40)])
def test_uniform_is_the_reference(kernel, shape, key, step, node):
    if shape == ():
        pytest.skip("an empty list attribute has no type")
    (got,) = kernel("RandomUniform", [np.int64(key), np.int64(step)], 1, node=node, shape=list(shape)).run()
    assert np.array_equal(got, reference_uniform(key, step, node, shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 0.75, 1.0])
def test_dropout_is_the_reference(kernel, shape, ratio):
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    feeds = [x, np.int64(9), np.int64(4)]
    y, mask = kernel("Dropout", feeds, 2, node=3, ratio=ratio).run()
    expected = reference_mask(9, 4, 3, shape, ratio)
    scale = np.float32(0 if ratio == 1 else 1 / (1 - ratio))
    assert mask.dtype == bool and np.array_equal(mask, expected)
    assert np.array_equal(y, x * expected.astype(np.float32) * scale)
    (dx,) = kernel("DropoutGrad", [x, mask], 1, ratio=ratio).run()
    (again,) = kernel("Dropout", feeds, 1, node=3, ratio=ratio).run()
    assert np.array_equal(dx, y) and np.array_equal(again, y)


def test_another_step_or_node_draws_another_mask(kernel):
    x = np.ones((64, 64), np.float32)
    masks = [
        kernel("Dropout", [x, np.int64(1), np.int64(step)], 2, node=node, ratio=0.5).run()[1]
        for step, node in ((1, 1), (2, 1), (1, 2))
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert 0.4 < np.mean(masks[a] != masks[b]) < 0.6
