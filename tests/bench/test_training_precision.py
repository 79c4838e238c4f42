"""The verdict on paired losses."""

import pytest

from bench.training_precision import MARGIN, compare


def test_equal_losses_lie_within():
    found = compare([1.0, 1.2, 0.9], [1.0, 1.2, 0.9])
    assert found["within"] and found["difference"] == 0


def test_a_constant_loss_beyond_the_margin_is_told():
    full = [1.0, 1.2, 0.8]
    found = compare(full, [x + 1.5 * MARGIN for x in full])
    assert not found["within"] and found["low"] == pytest.approx(1.5 * MARGIN)


def test_a_small_mean_that_is_uncertain_is_not_within():
    assert not compare([1.0, 1.0, 1.0], [1.2, 0.8, 1.0])["within"]
