"""Losses and their gradients against PyTorch autograd in float64."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

SHAPES = [(5, 7), (1, 3), (2, 4, 3), (2, 3, 2, 5)]
OPTIONS = list(itertools.product(["none", "mean", "sum"], [False, True], ["some", "no", "all"]))


def problem(shape, weighted, ignored, seed=0):
    rng = np.random.default_rng(seed)
    target = rng.integers(0, shape[1], (shape[0], *shape[2:]))
    if ignored == "some":
        target.reshape(-1)[::3] = -100
    if ignored == "all":
        target[...] = -100
    weight = rng.uniform(0.2, 2, shape[1]) if weighted else None
    return rng.standard_normal(shape) * 3, target, weight


def run_torch(function, x, target, weight, reduction, ignore=-100):
    t = torch.tensor(x, requires_grad=True)
    w = None if weight is None else torch.tensor(weight)
    loss = function(t, torch.tensor(target), weight=w, reduction=reduction, ignore_index=ignore)
    seed = torch.tensor(np.random.default_rng(9).standard_normal(loss.shape))
    loss.backward(seed)
    return loss.detach().numpy(), seed.numpy(), t.grad.numpy()


def total_weight(target, weight, ignore=-100):
    kept = target != ignore
    return np.asarray((np.ones(target.shape) if weight is None else weight[np.where(kept, target, 0)])[kept].sum())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction,weighted,ignored", OPTIONS)
def test_nll(operator_case, shape, reduction, weighted, ignored):
    x, target, weight = problem(shape, weighted, ignored)
    log_prob = torch.log_softmax(torch.tensor(x), 1).numpy()
    loss, seed, gradient = run_torch(F.nll_loss, log_prob, target, weight, reduction)
    total = total_weight(target, weight)
    operator_case("NllLoss", [log_prob, target, weight], 2, reduction=reduction).check([loss, total])
    case = operator_case("NllLossGrad", [seed, log_prob, target, weight, total], reduction=reduction)
    case.check([gradient])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("reduction,weighted,ignored", OPTIONS)
def test_cross_entropy(operator_case, shape, reduction, weighted, ignored):
    x, target, weight = problem(shape, weighted, ignored)
    log_prob = torch.log_softmax(torch.tensor(x), 1).numpy()
    loss, seed, gradient = run_torch(F.cross_entropy, x, target, weight, reduction)
    total = total_weight(target, weight)
    case = operator_case("CrossEntropy", [x, target, weight], 3, reduction=reduction, ignore_index=-100)
    case.check([loss, log_prob, total])
    case = operator_case("CrossEntropyGrad", [seed, log_prob, target, weight, total], reduction=reduction)
    case.check([gradient])
    if reduction == "sum":
        operator_case("CrossEntropyAndGrad", [seed, x, target, weight], 2, ignore_index=-100).check([loss, gradient])


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
def test_ignored_class_is_a_real_class(operator_case, dtype):
    x, target, _ = problem((6, 4), False, "no")
    loss, seed, gradient = run_torch(F.cross_entropy, x, target, None, "mean", ignore=2)
    assert (target == 2).any()
    target = target.astype(dtype)
    log_prob = torch.log_softmax(torch.tensor(x), 1).numpy()
    total = total_weight(target, None, 2)
    operator_case("CrossEntropy", [x, target, None], 3, ignore_index=2).check([loss, log_prob, total])
    operator_case("CrossEntropyGrad", [seed, log_prob, target, None, total], ignore_index=2).check([gradient])


def test_ignored_row_with_infinite_score(operator_case):
    log_prob = np.log(np.full((3, 4), 0.25))
    log_prob[1, 0] = -np.inf
    target = np.array([1, -100, 3])
    loss, total = operator_case("NllLoss", [log_prob, target, None], 2, reduction="mean").runtime(1)
    np.testing.assert_allclose([loss, total], [np.log(4), 2], rtol=1e-6)
    gradient = operator_case("NllLossGrad", [np.ones(()), log_prob, target, None, total]).runtime(1)[0]
    np.testing.assert_allclose(gradient, [[0, -0.5, 0, 0], [0, 0, 0, 0], [0, 0, 0, -0.5]])


def test_symbolic_rows(operator_case):
    x, target, _ = problem((5, 7), False, "some")
    log_prob = torch.log_softmax(torch.tensor(x), 1).numpy()
    _, seed, gradient = run_torch(F.nll_loss, log_prob, target, None, "mean")
    total = total_weight(target, None)
    symbolic = {1: ["rows", 7], 2: ["rows"]}
    operator_case("NllLossGrad", [seed, log_prob, target, None, total], shapes=symbolic).check([gradient])
    _, seed, gradient = run_torch(F.cross_entropy, x, target, None, "mean")
    operator_case("CrossEntropyGrad", [seed, log_prob, target, None, total], shapes=symbolic).check([gradient])
