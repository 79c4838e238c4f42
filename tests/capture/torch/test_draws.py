"""Random operators of modules: right distributions, other numbers each step and draw, gradients by what was drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ortgraph

N = 1 << 14


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x):
        weights = torch.tensor([0.1, 0.0, 0.6, 0.3])
        drawn = {
            "rand": torch.rand(N),
            "again": torch.rand(N),
            "uniform": torch.empty(N).uniform_(-2, 4),
            "bernoulli": torch.bernoulli(torch.full((N,), 0.3)),
            "bernoulli_p": torch.empty(N).bernoulli_(0.3),
            "randn": torch.randn(N),
            "like": torch.randn_like(x.expand(N)),
            "normal": torch.normal(0.5, 2.0, (N,)),
            "normal_of": torch.normal(torch.full((N,), 0.5), torch.full((N,), 2.0)),
            "exponential": torch.empty(N).exponential_(2.0),
            "log_normal": torch.empty(N).log_normal_(0.0, 0.5),
            "cauchy": torch.empty(N).cauchy_(1.0, 2.0),
            "geometric": torch.empty(N).geometric_(0.3),
            "randint": torch.randint(-3, 4, (N,)),
            "wide": torch.randint(0, 1 << 40, (N,)),
            "order": torch.randperm(N),
            "classes": torch.multinomial(weights, N, replacement=True),
            "pairs": torch.multinomial(weights.expand(N // 4, 4), 2),
            "slopes": F.rrelu(-torch.ones(N), training=True),
            "gumbel": F.gumbel_softmax(torch.log(weights + 1e-9).expand(N, 4), hard=True).argmax(1),
        }
        return {"loss": (self.w * x).sum(), **drawn}


@pytest.fixture(scope="module")
def drawing():
    torch.manual_seed(11)
    return ortgraph.capture(Draws(), {"x": torch.ones(1)})


BATCH = {"x": torch.ones(1)}


def near(values, mean, deviation):
    assert abs(values.mean() - mean) < 5 * deviation / np.sqrt(values.size)
    assert abs(values.std() - deviation) < 0.05 * deviation


def correlation(a, b):
    """Without the last percent on both sides, which heavy tails would be made of."""
    return np.corrcoef(*(np.clip(v.astype(np.float64), *np.quantile(v, [0.01, 0.99])) for v in (a, b)))[0, 1]


def test_distributions(drawing, run_captured):
    got = run_captured(drawing, BATCH)[0]
    near(got["rand"], 0.5, np.sqrt(1 / 12))
    near(got["uniform"], 1, np.sqrt(3))
    for name in ("bernoulli", "bernoulli_p"):
        near(got[name], 0.3, np.sqrt(0.21))
    for name in ("randn", "like"):
        near(got[name], 0, 1)
        assert abs((np.abs(got[name]) < 0.6745).mean() - 0.5) < 0.02
    for name in ("normal", "normal_of"):
        near(got[name], 0.5, 2)
    near(got["exponential"], 0.5, 0.5)
    assert (got["exponential"] > 0).all()
    near(np.log(got["log_normal"]), 0, 0.5)
    assert abs(np.median(got["cauchy"]) - 1) < 0.1 and abs((np.abs(got["cauchy"] - 1) < 2).mean() - 0.5) < 0.02
    near(got["geometric"], 1 / 0.3, np.sqrt(0.7) / 0.3)
    assert got["geometric"].min() == 1
    assert got["randint"].dtype == np.int64 and set(got["randint"]) == set(range(-3, 4))
    near(got["randint"], 0, 2)
    near(got["wide"] / 2**40, 0.5, np.sqrt(1 / 12))
    assert len(set(got["wide"])) > 0.999 * N
    assert sorted(got["order"]) == list(range(N)) and abs(np.corrcoef(got["order"], np.arange(N))[0, 1]) < 0.04
    for name in ("classes", "gumbel"):
        rates = np.bincount(got[name], minlength=4) / N
        np.testing.assert_allclose(rates, [0.1, 0, 0.6, 0.3], atol=0.02)
    assert (got["pairs"][:, 0] != got["pairs"][:, 1]).all() and 1 not in got["pairs"]
    near(-got["slopes"], (1 / 8 + 1 / 3) / 2, (1 / 3 - 1 / 8) / np.sqrt(12))


def test_draws_steps_and_seeds_are_independent(drawing, run_captured):
    key, step = (s.input for s in drawing.signature.states)
    model = {name: np.asarray(value) for name, value in drawing.values.items()}
    first, same = run_captured(drawing, BATCH, repeats=2)
    later = run_captured(drawing, BATCH, **{step: np.asarray(model[step] + 1)})[0]
    other = run_captured(drawing, BATCH, **{key: np.asarray(model[key] + 1)})[0]
    for name in drawing.signature.outputs:
        assert np.array_equal(first[name], same[name])
        if name == "loss":
            continue
        for changed in (later, other):
            assert not np.array_equal(first[name], changed[name])
            assert name == "pairs" or abs(correlation(first[name], changed[name])) < 0.04, name
    for a, b in (("rand", "again"), ("rand", "uniform"), ("randn", "like"), ("rand", "exponential")):
        assert abs(correlation(first[a], first[b])) < 0.04


def test_kernels_draw_the_numbers_of_the_expansion(drawing, run_captured):
    want = run_captured(drawing, BATCH)[0]
    got = ortgraph.TrainingSession(drawing).results(BATCH)
    for name in ("rand", "bernoulli", "randint", "wide", "order"):
        assert np.array_equal(got[name], want[name]), name


def by_rows(x, p=0.3):
    return x / (1 - p) * x.new_empty((x.shape[0], 1)).bernoulli_(1 - p)


def by_floor(x, p=0.3):
    kept = (1 - p) + torch.rand((x.shape[0], 1), dtype=x.dtype)
    return x.div(1 - p) * kept.floor_()


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({
            "dropout": nn.Dropout(0.3), "channels": nn.Dropout1d(0.3), "planes": nn.Dropout2d(0.3),
            "volumes": nn.Dropout3d(0.3), "rrelu": nn.RReLU(),
        })  # fmt: skip
        shapes = {"dropout": (64, 8), "channels": (8, 16, 5), "planes": (8, 16, 3, 2), "volumes": (8, 16, 2, 2, 2)}
        shapes |= {"rrelu": (64, 8), "rows": (256, 3), "floors": (256, 3)}
        self.w = nn.ParameterDict({n: nn.Parameter(torch.randn(s)) for n, s in shapes.items()})

    def forward(self, x):
        out = {name: layer(self.w[name] * x) for name, layer in self.layers.items()}
        out |= {"rows": by_rows(self.w["rows"] * x), "floors": by_floor(self.w["floors"] * x)}
        return {"loss": torch.stack([y.sum() for y in out.values()]).sum(), **out}


def test_gradients_are_those_of_what_was_kept(run_captured):
    torch.manual_seed(2)
    module = Kept()
    graph = ortgraph.capture(module, BATCH)
    got = run_captured(graph, BATCH)[0]
    for name, w in module.w.items():
        factor = (got[name] / w.detach().numpy()).round(5)
        np.testing.assert_allclose(got[graph.signature.gradients[f"w.{name}"]], factor, atol=2e-5)
        if name == "rrelu":
            continue
        whole = factor.reshape(*factor.shape[: 1 if name in ("rows", "floors") else 2], -1)
        assert (whole == whole[..., :1]).all() or name == "dropout"
        kept = whole[..., 0] if name != "dropout" else factor
        assert set(np.unique(kept)) == {0.0, np.float32(1 / 0.7).round(5)}, name
        assert abs((kept > 0).mean() - 0.7) < 5 * np.sqrt(0.21 / kept.size)


def test_alpha_dropout_keeps_mean_and_variance(run_captured):
    class Alpha(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.features = nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)
            self.w = nn.Parameter(torch.randn(512, 64))

        def forward(self, x):
            y, z = self.layer(self.w * x), self.features(self.w.reshape(64, 512, 1) * x)
            return {"loss": y.sum() + z.sum(), "y": y, "z": z}

    torch.manual_seed(4)
    got = run_captured(ortgraph.capture(Alpha(), BATCH), BATCH)[0]
    for name in "yz":
        assert abs(got[name].mean()) < 0.05 and abs(got[name].std() - 1) < 0.05


def test_stochastic_depth_serves_several_batch_sizes(run_captured):
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            kept = by_floor(self.first(x)) + by_rows(x) + 0.0 * torch.randn_like(x)
            return {"loss": self.second(kept).sum(), "kept": by_floor(torch.ones_like(x))}

    graph = ortgraph.capture(Deep(), {"x": torch.ones(4, 6)}, dynamic={"x": {0: "batch"}})
    session = ortgraph.TrainingSession(ortgraph.optimize(graph, "O2").graph)
    for rows in (3, 700):
        batch = {"x": torch.ones(rows, 6)}
        want = run_captured(graph, batch)[0]["kept"]
        np.testing.assert_array_equal(session.results(batch)["kept"], want)
    assert abs((want > 0).mean() - 0.7) < 0.1
