"""FusedAdam and FP16_Optimizer against PyTorch's optimizers; overflow, recovery and resume in between."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch", reason="optimizers for PyTorch scripts")

from ortgraph.errors import InputError, RuntimeSetupError  # noqa: E402
from ortgraph.ops import updates  # noqa: E402
from ortgraph.optim import FP16_Optimizer, FusedAdam, LossScale, fused_adam, script_optimizer  # noqa: E402

SHAPES = [(70, 5), (5,), (), (0, 3), (41000,), (3, 4, 5, 6)]
LOW = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def one_thread():
    """PyTorch's threads wait for each other on busy machines; a test below shows that their number is of no matter."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["kernel", "torch"])
def way(request, monkeypatch):
    """Both ways of updating; without a compiler only the second one."""
    if request.param == "torch":
        monkeypatch.setattr(script_optimizer, "compiled", lambda: False)
    elif not script_optimizer.compiled():
        pytest.skip("no compiler")
    return request.param


def weights(seed: int = 0, dtype=torch.float32):
    made = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=made).to(dtype)) for s in SHAPES]


def gradients(step: int):
    made = torch.Generator().manual_seed(step)
    return [torch.randn(s, generator=made) * 10.0 ** (step % 4 - 2) for s in SHAPES]


def grouped(parameters, **second):
    return [{"params": parameters[:2]}, {"params": parameters[2:], **second}]


def near(got, want, bound=2e-6):
    for a, b in zip(got, want, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert torch.isfinite(a).all() and (a - b).norm() <= bound * b.norm() + 1e-9


OPTIONS = [
    {}, {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3},
    {"lr": 0.01, "weight_decay": 0.2, "adam_w_mode": False}, {"weight_decay": 0.01, "bias_correction": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_pytorch_over_twenty_steps(way, options) -> None:
    own = weights()
    peer = [torch.nn.Parameter(p.detach().double()) for p in own]
    optimizer = FusedAdam(grouped(own, lr=0.03, weight_decay=0.3), **options)
    kind = torch.optim.AdamW if options.get("adam_w_mode", True) else torch.optim.Adam
    plain = {k: v for k, v in {"weight_decay": 0.0, **options}.items() if k not in ("adam_w_mode", "bias_correction")}
    theirs = kind(grouped(peer, lr=0.03, weight_decay=0.3), **plain)
    corrected = options.get("bias_correction", True)
    for step in range(20):
        for i, (p, q, g) in enumerate(zip(own, peer, gradients(step), strict=True)):
            p.grad, q.grad = (None, None) if i == 1 and step < 3 else (g.clone(), g.double())
        optimizer.step()
        if corrected:
            theirs.step()
        for group in () if corrected else theirs.param_groups:
            _uncorrected(group, theirs.state)
        for group in (*optimizer.param_groups, *theirs.param_groups):
            group["lr"] *= 0.95
    near(own, peer)
    if corrected:
        for p, q in zip(own, peer, strict=True):
            a, b = optimizer.state[p], theirs.state[q]
            near([a["exp_avg"], a["exp_avg_sq"]], [b["exp_avg"], b["exp_avg_sq"]])
            assert a["step"] == b["step"] and a["step"].dtype == b["step"].dtype


def _uncorrected(group, state) -> None:
    """AdamW without bias correction, which PyTorch does not have."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    for p in (p for p in group["params"] if p.grad is not None):
        m, v = state[p].get("m", torch.zeros_like(p)), state[p].get("v", torch.zeros_like(p))
        state[p]["m"], state[p]["v"] = m, v = beta1 * m + (1 - beta1) * p.grad, beta2 * v + (1 - beta2) * p.grad**2
        p.data = p.data * (1 - lr * group["weight_decay"]) - lr * m / (v.sqrt() + group["eps"])


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_parameters_are_their_masters_rounded(way, dtype) -> None:
    own = weights(dtype=dtype)
    masters = [torch.nn.Parameter(p.detach().float()) for p in own]
    optimizer, plain = FusedAdam(own, lr=1e-3, weight_decay=0.1), torch.optim.AdamW(masters, lr=1e-3, weight_decay=0.1)
    for step in range(10):
        for p, q, g in zip(own, masters, gradients(step), strict=True):
            p.grad = g.to(dtype)
            q.grad = p.grad.float()
        optimizer.step()
        plain.step()
    near([optimizer.master(p) for p in own], masters)
    for p in own:
        assert torch.equal(p, optimizer.master(p).to(dtype)) and optimizer.state[p]["exp_avg"].dtype == torch.float32


def test_the_same_bits_at_any_number_of_threads() -> None:
    if not script_optimizer.compiled():
        pytest.skip("no compiler")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            own = weights()
            optimizer = FusedAdam(own, lr=0.01, weight_decay=0.1)
            for step in range(3):
                for p, g in zip(own, gradients(step), strict=True):
                    p.grad = g
                optimizer.step(grad_scale=0.3)
            results.append([*own, torch.tensor(fused_adam.global_norm([p.grad for p in own]))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_layouts_and_views(way) -> None:
    """Transposed, strided and channels-last parameters and gradients; one parameter inside a larger tensor."""
    base = torch.randn(6, 8)
    frame = base.clone()
    own = [
        torch.nn.Parameter(base.clone().t()), torch.nn.Parameter(frame[1:3, ::2]),
        torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
    ]  # fmt: skip
    peer = [torch.nn.Parameter(p.detach().clone()) for p in own]
    optimizer, plain = FusedAdam(own, lr=0.1, weight_decay=0.1), torch.optim.AdamW(peer, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        for p, q in zip(own, peer, strict=True):
            q.grad = torch.randn(p.shape)
            p.grad = q.grad.clone().transpose(0, 1).contiguous().transpose(0, 1)
        optimizer.step()
        plain.step()
    near(own, peer)
    outside = torch.ones_like(frame, dtype=torch.bool)
    outside[1:3, ::2] = False
    assert torch.equal(frame[outside], base[outside]), "nothing outside of the view is touched"


def test_states_go_to_pytorch_and_back() -> None:
    def run(optimizer, own, steps):
        for step in steps:
            for p, g in zip(own, gradients(step), strict=True):
                p.grad = g.clone()
            optimizer.step()

    first, second = weights(), weights()
    ours, theirs = FusedAdam(first, lr=0.01, weight_decay=0.1), torch.optim.AdamW(second, lr=0.01, weight_decay=0.1)
    run(ours, first, range(4))
    run(theirs, second, range(4))
    saved_ours, saved_theirs = copy.deepcopy(ours.state_dict()), copy.deepcopy(theirs.state_dict())
    assert set(saved_ours["state"][0]) == set(saved_theirs["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    swapped_first = [torch.nn.Parameter(p.detach().clone()) for p in second]
    swapped_second = [torch.nn.Parameter(p.detach().clone()) for p in first]
    ours2, theirs2 = FusedAdam(swapped_first, lr=1.0), torch.optim.AdamW(swapped_second, lr=1.0)
    ours2.load_state_dict(saved_theirs)
    theirs2.load_state_dict(saved_ours)
    for optimizer, own in ((ours, first), (theirs, second), (ours2, swapped_first), (theirs2, swapped_second)):
        run(optimizer, own, range(4, 8))
    for other in (first, swapped_first, swapped_second):
        near(other, second)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_resume_keeps_masters(dtype) -> None:
    def run(own, optimizer, steps):
        for step in steps:
            for p, g in zip(own, gradients(step), strict=True):
                p.grad = g.to(dtype)
            optimizer.step()

    whole = weights(dtype=dtype)
    optimizer = FusedAdam(whole, lr=1e-4)
    run(whole, optimizer, range(3))
    saved = optimizer.state_dict()
    other = [torch.nn.Parameter(p.detach().clone()) for p in whole]
    resumed = FusedAdam(other, lr=9.0)
    resumed.load_state_dict(saved)
    run(whole, optimizer, range(3, 6))
    run(other, resumed, range(3, 6))
    for a, b in zip(whole, other, strict=True):
        assert torch.equal(a, b) and torch.equal(optimizer.master(a), resumed.master(b))


def test_without_a_compiler_it_warns_and_works(monkeypatch) -> None:
    def refuse():
        raise RuntimeSetupError("no C++ compiler found", "install g++")

    monkeypatch.setattr(updates, "load", refuse)
    monkeypatch.setattr(script_optimizer, "compiled", script_optimizer.compiled.__wrapped__)
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        FusedAdam([p], lr=0.1).step()
    assert torch.allclose(p, torch.full((3,), 0.9))


def test_refusals() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    for options in ({"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": float("nan")}, {"weight_decay": -0.1}):
        with pytest.raises(InputError, match="FusedAdam"):
            FusedAdam([p], **options)
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(InputError, match="dense"):
        FusedAdam([p]).step()
    other = torch.nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    amsgrad = torch.optim.AdamW([other], amsgrad=True)
    amsgrad.step()
    with pytest.raises(InputError, match="amsgrad"):
        FusedAdam([p]).load_state_dict(amsgrad.state_dict())
    with pytest.raises(InputError, match="takes a FusedAdam"):
        FP16_Optimizer(torch.optim.AdamW([p]))
    with pytest.raises(InputError, match="closure"):
        FP16_Optimizer(FusedAdam([p])).step(lambda: 1.0)
    with pytest.raises(InputError, match="2-norm"):
        FP16_Optimizer(FusedAdam([p])).clip_master_grads(1.0, norm_type=1.0)


def test_autograd_notices_the_update() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    FusedAdam([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_import_needs_no_torch() -> None:
    text = "import sys; sys.modules['torch'] = None; import ortgraph.optim as o; o.AdamW()"
    subprocess.run([sys.executable, "-c", text], check=True)


# -- FP16_Optimizer -------------------------------------------------------------------------------------------------


def played(own, step: int, factor: float = 1.0):
    """A loss with these gradients."""
    return sum((p.float() * g * factor).sum() for p, g in zip(own, gradients(step), strict=True))


def bits(own, optimizer):
    states = [optimizer.optimizer.state[p] for p in own]
    tensors = [*own, *(s[k] for s in states for k in sorted(s))]
    return [t.detach().clone() for t in tensors]


def test_scaled_steps_equal_plain_ones(way) -> None:
    own, peer = weights(), weights()
    optimizer = FP16_Optimizer(FusedAdam(own, lr=0.01, weight_decay=0.1), loss_scale=1024.0)
    plain = torch.optim.AdamW(peer, lr=0.01, weight_decay=0.1)
    for step in range(8):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in (step, step + 50):  # gradients add up
            optimizer.backward(played(own, part))
            played(peer, part).backward()
        want = torch.nn.utils.clip_grad_norm_(peer, 5.0)
        assert optimizer.clip_master_grads(5.0) == pytest.approx(float(want), rel=1e-5)
        optimizer.step()
        plain.step()
    near(own, peer, 1e-5)
    assert optimizer.loss_scale == 1024.0 and optimizer.skipped_steps == 0 and not optimizer.overflow


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_overflow_recovery_and_resume(way, dtype) -> None:
    policy = LossScale(initial=256.0, interval=2)
    bad = {2: float("inf"), 3: float("nan"), 5: float("inf")}

    def step_of(own, optimizer, step):
        optimizer.zero_grad()
        optimizer.backward(played(own, step))
        if step in bad:
            own[4].grad[40990] = bad[step]
        optimizer.clip_master_grads(1.0)
        optimizer.step()

    whole = weights(dtype=dtype)
    optimizer = FP16_Optimizer(FusedAdam(whole, lr=0.01), policy)
    scales = []
    other = resumed = None
    for step in range(9):
        before = bits(whole, optimizer) if step in bad else None
        step_of(whole, optimizer, step)
        if resumed is not None:
            step_of(other, resumed, step)
        scales.append(optimizer.loss_scale)
        assert optimizer.overflow == (step in bad)
        if before is not None:
            after = bits(whole, optimizer)
            assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if step == 2:
            other = [torch.nn.Parameter(p.detach().clone()) for p in whole]
            resumed = FP16_Optimizer(FusedAdam(other, lr=9.0), 1.0)
            resumed.load_state_dict(optimizer.state_dict())
    assert scales == [256.0, 512.0, 256.0, 128.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    assert optimizer.skipped_steps == resumed.skipped_steps == 3 and resumed.loss_scale == optimizer.loss_scale
    assert all(torch.equal(a, b) for a, b in zip(bits(whole, optimizer), bits(other, resumed), strict=True))
    assert float(optimizer.optimizer.state[whole[0]]["step"]) == 6, "skipped steps do not count"


def test_a_scheduler_moves_the_rate() -> None:
    own = weights()
    optimizer = FP16_Optimizer(FusedAdam(own, lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.backward(played(own, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        scheduler.step()
    assert optimizer.optimizer.param_groups[0]["lr"] == 0.05
