"""The measures of the proof find what they are for."""

from __future__ import annotations

import numpy as np

from bench.coverage import measure

RNG = np.random.default_rng(0)
EXACT = {n: RNG.standard_normal(50) for n in ("a", "b", "c")}
FLOAT32 = {n: g.astype(np.float32) for n, g in EXACT.items()}


def test_rounding_is_right_and_a_small_error_is_wrong():
    assert measure.gradients(FLOAT32, FLOAT32, EXACT).share <= 1
    wrong = {**FLOAT32, "b": FLOAT32["b"] * np.float32(1 + 1e-5)}
    found = measure.gradients(wrong, FLOAT32, EXACT)
    assert found.share > 1
    assert found.worst == "b"
    assert 5e-6 < found.error < 2e-5


def test_nan_missing_and_additional_gradients_are_wrong():
    nan = {**FLOAT32, "a": FLOAT32["a"] * np.float32(np.nan)}
    assert not measure.gradients(nan, FLOAT32, EXACT).share <= 1
    assert measure.gradients({n: FLOAT32[n] for n in "ab"}, FLOAT32, EXACT).share > 1
    assert measure.gradients({**FLOAT32, "d": FLOAT32["a"]}, FLOAT32, EXACT).share > 1


def test_a_zero_gradient_may_be_noise_of_the_size_of_rounding():
    exact = {**EXACT, "z": np.full(50, 1e-17)}
    float32 = {**FLOAT32, "z": np.full(50, 2e-8, np.float32)}
    noise = {**FLOAT32, "z": np.full(50, -5e-8, np.float32)}
    assert measure.gradients(noise, float32, exact).share <= 1
    assert measure.gradients({**noise, "z": np.full(50, 1e-3, np.float32)}, float32, exact).share > 1


def test_where_pytorch_is_far_from_float64_its_float32_is_the_reference():
    exact = {**EXACT, "b": EXACT["b"] * 1.5}
    assert measure.gradients(FLOAT32, FLOAT32, exact).doubted == ("b",)
    wrong = {**FLOAT32, "b": FLOAT32["b"] * np.float32(1.001)}  # would pass by 4 times PyTorch's own error
    assert measure.gradients(wrong, FLOAT32, exact).share > 1


def test_states_may_differ_as_pytorch_differs_from_itself():
    one, exact = {"w": np.ones(4, np.float32)}, {"w": np.ones(4)}
    assert measure.states({"w": one["w"] + np.float32(5e-7)}, one, one, exact).by_threads
    moved = {"w": one["w"] + np.float32(1e-4)}
    assert measure.states(moved, one, one, exact).share > 1
    by_rounding = measure.states(moved, one, one, {"w": np.ones(4) + 5e-5})
    assert by_rounding.share <= 1
    assert not by_rounding.by_threads
    assert measure.states(moved, one, {"w": one["w"] + np.float32(5e-5)}, exact).by_threads
    assert not measure.states({"w": one["w"] * np.float32(np.nan)}, one, one, exact).share <= 1
