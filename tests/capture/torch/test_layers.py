"""Layers of ``torch.nn`` and losses: results and gradients against PyTorch and float64, many in one graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

L, I, D = (2, 4, 9), (2, 4, 7, 6), (2, 4, 5, 6, 4)  # noqa: E741


def plain(layer, w):
    out = layer(w)
    return out if isinstance(out, torch.Tensor) else out[0]


def made(shape, kind, *args, **options):
    return shape, plain, lambda: kind(*args, **options)


def states(layer, w):
    out, last = layer(w)
    parts = last if isinstance(last, tuple) else (last,)
    return torch.cat([out.flatten(), *(p.flatten() for p in parts)])


CONVOLUTIONS = {}
for _n, _shape in ((1, L), (2, I), (3, D)):
    _conv, _back = getattr(nn, f"Conv{_n}d"), getattr(nn, f"ConvTranspose{_n}d")
    CONVOLUTIONS |= {
        f"conv{_n}": made(_shape, _conv, 4, 6, 3, stride=2, padding=1),
        f"conv{_n}_groups": made(_shape, _conv, 4, 6, 2, groups=2, dilation=2, bias=False),
        f"conv{_n}_depth": made(_shape, _conv, 4, 8, 3, groups=4, padding="same"),
        f"conv{_n}_even": made(_shape, _conv, 4, 3, 2, padding="same"),
        f"conv{_n}_alone": made(_shape[1:], _conv, 4, 3, 3, padding=1),
        f"back{_n}": made(_shape, _back, 4, 6, 3, stride=2, padding=1, output_padding=1),
        f"back{_n}_groups": made(_shape, _back, 4, 6, 3, groups=2, stride=2, bias=False),
        f"back{_n}_dilated": made(_shape, _back, 4, 6, 2, dilation=2, padding=1),
        f"back{_n}_depth": made(_shape, _back, 4, 4, 2, stride=2, groups=4),
    }
RECURRENT = {}
for _kind in ("RNN", "GRU", "LSTM"):
    _class = getattr(nn, _kind)
    RECURRENT |= {
        _kind: ((5, 2, 6), states, lambda k=_class: k(6, 4)),
        f"{_kind}_both": ((5, 2, 6), states, lambda k=_class: k(6, 4, 2, bidirectional=True)),
        f"{_kind}_first": ((2, 5, 6), states, lambda k=_class: k(6, 4, batch_first=True, bias=False)),
        f"{_kind}_alone": ((5, 6), states, lambda k=_class: k(6, 4)),
        f"{_kind}_cell": made((4, 6), getattr(nn, f"{_kind}Cell"), 6, 4),
    }
RECURRENT |= {
    "RNN_relu": ((1, 2, 6), states, lambda: nn.RNN(6, 4, nonlinearity="relu")),
    "LSTM_projected": ((5, 2, 6), states, lambda: nn.LSTM(6, 4, 2, proj_size=3, bidirectional=True)),
}
_small = {"dim_feedforward": 16, "dropout": 0.0}
ATTENTION = {
    "attention": ((5, 2, 8), lambda m, w: m(w, w, w)[0] + m(w, w, w, need_weights=False)[0], lambda: nn.MultiheadAttention(8, 2)),
    "attention_biased": (
        (5, 2, 8), lambda m, w: m(w, w, w)[0], lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True)
    ),
    "attention_evaluated": ((2, 5, 8), lambda m, w: m(w, w, w)[0], lambda: nn.MultiheadAttention(8, 2, batch_first=True).eval()),
    "encoder": ((2, 5, 8), lambda m, w: m(w, src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2])),
                lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True, **_small), 2)),
    "encoder_evaluated": made((2, 5, 8), lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True, **_small).eval()),
    "both_halves": ((5, 2, 8), lambda m, w: m(w, w[:3], tgt_mask=m.generate_square_subsequent_mask(3, dtype=w.dtype)),
                    lambda: nn.Transformer(8, 2, 1, 1, **_small)),
}  # fmt: skip
NORMS = {
    **{f"batch{n}": made(s, getattr(nn, f"BatchNorm{n}d"), 4) for n, s in ((1, L), (2, I), (3, D))},
    "instance": made(I, nn.InstanceNorm2d, 4, affine=True, track_running_stats=True),
    "group": made(I, nn.GroupNorm, 2, 4),
    "layer": made(I, nn.LayerNorm, (7, 6), bias=False),
    "rms": made(I, nn.RMSNorm, (7, 6)),
    "local": made(I, nn.LocalResponseNorm, 3),
    "weight_norm": made(L, lambda: parametrizations.weight_norm(nn.Conv1d(4, 6, 3), dim=0)),
    "weight_norm_1": made((4, 6), lambda: parametrizations.weight_norm(nn.Linear(6, 3), dim=1)),
    "spectral_norm": made((4, 6), lambda: parametrizations.spectral_norm(nn.Linear(6, 3)).eval()),
    "prelu": made(L, nn.PReLU, 4),
    "rrelu": made(L, lambda: nn.RReLU().eval()),
    "bag": ((2, 5), lambda m, w: m(torch.tensor([1, 3, 1, 0, 6, 2]), torch.tensor([0, 2, 6])) * w,
            lambda: nn.EmbeddingBag(7, 5, mode="sum", include_last_offset=True)),
}  # fmt: skip
t = torch.tensor([0, 2, 1, 3])
LABELS = torch.tensor([[1, 2, 2, 1], [3, 1, -100, -100], [4, 4, 4, 4]])


def ctc(w, targets=LABELS.clamp(min=0), lengths=(4, 2, 4), inputs=(9, 4, 8), **options):  # noqa: B008
    return F.ctc_loss(w.log_softmax(2), targets, torch.tensor(inputs), torch.tensor(lengths), **options)


def ctc_as_in_speech_models(w):
    kept = LABELS >= 0
    return F.ctc_loss(w.log_softmax(2), LABELS.masked_select(kept), torch.tensor([9, 4, 8]), kept.sum(-1), blank=0)


LOSSES = {
    **{f"ctc_{r}": ((9, 3, 5), lambda w, r=r: ctc(w, reduction=r)) for r in ("mean", "sum", "none")},
    "ctc_packed": ((9, 3, 5), lambda w: ctc(w, torch.tensor([1, 2, 2, 1, 3, 1, 4, 4, 4, 4]))),
    "ctc_selected": ((9, 3, 5), ctc_as_in_speech_models),
    "ctc_no_way": ((9, 3, 5), lambda w: ctc(w, inputs=(9, 4, 5), zero_infinity=True)),
    "ctc_nothing": ((9, 3, 5), lambda w: ctc(w, lengths=(4, 0, 1), reduction="sum")),
    "ctc_blank": ((9, 3, 5), lambda w: ctc(w, torch.tensor([[1, 2, 2, 1], [3, 1, 0, 0], [0, 0, 3, 3]]), blank=4)),
    "ctc_alone": ((9, 5), lambda w: F.ctc_loss(w.log_softmax(1), torch.tensor([1, 2, 2]), torch.tensor(9), torch.tensor(3))),
    "ctc_long": ((60, 2, 12), lambda w: ctc(w * 3, torch.arange(40).reshape(2, 20) % 11 + 1, (20, 13), (60, 55))),
    "ctc_unnormalized": ((9, 3, 5), lambda w: F.ctc_loss(-w.abs(), LABELS.clamp(min=0), (9, 4, 8), (4, 2, 4))),
    **{
        f"{name}_{r}": ((4, 6), lambda w, r=r, f=f: f(w, r))
        for r in ("mean", "sum", "none")
        for name, f in {
            "gaussian": lambda w, r: F.gaussian_nll_loss(w, w.detach() * 2, w.abs() + 0.5, reduction=r, full=True),
            "labels_margin": lambda w, r: F.multilabel_margin_loss(w, torch.tensor([[0, 2, -1, 0, 0, 0]] * 4), reduction=r),
            "margin": lambda w, r: F.multi_margin_loss(w, t, p=2, margin=0.5, reduction=r),
            "poisson": lambda w, r: F.poisson_nll_loss(w, w.detach().abs(), full=True, reduction=r),
            "triplet": lambda w, r: F.triplet_margin_loss(w, w.flip(0), w.flip(1), swap=True, reduction=r),
            "embedding": lambda w, r: F.cosine_embedding_loss(w, w.flip(0), torch.tensor([1, -1, 1, -1]), 0.1, reduction=r),
            "huber": lambda w, r: F.huber_loss(w, w * w, delta=0.7, reduction=r),
            "ranking": lambda w, r: F.margin_ranking_loss(w, w.flip(0), torch.ones(4, 6, dtype=w.dtype), 0.2, reduction=r),
        }.items()
    },
    "gaussian_clamped": ((4, 6), lambda w: F.gaussian_nll_loss(w, w.detach() * 2, w.abs()[:, :1] * 1e-9, eps=0.3)),
    "labels_margin_alone": ((6,), lambda w: F.multilabel_margin_loss(w, torch.tensor([3, 0, 5, -1, 0, 0]))),
    "smoothed": (
        (4, 6),
        lambda w: F.cross_entropy(
            w, torch.tensor([0, -100, 1, 3]), torch.arange(6).to(w.dtype) + 1, label_smoothing=0.1
        ),
    ),
    "probabilities": ((4, 6), lambda w: F.cross_entropy(w, w.flip(0).softmax(1), label_smoothing=0.1)),
}  # fmt: skip
GROUPS = {
    "convolutions": CONVOLUTIONS, "recurrent": RECURRENT, "attention": ATTENTION, "norms": NORMS, "losses": LOSSES,
}  # fmt: skip


@pytest.mark.parametrize("group", GROUPS)
def test_many_in_one_graph(check_together, group):
    check_together(GROUPS[group])


@pytest.mark.slow
@pytest.mark.parametrize("name", [(g, n) for g, cases in GROUPS.items() for n in cases], ids=lambda v: v[1])
def test_alone(check_together, name):
    group, case = name
    check_together({case: GROUPS[group][case]})
