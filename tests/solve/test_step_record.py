"""Steps recorded while a solve runs: they are those that it counts, and together they cover its time span."""

import pytest
import torch
from torch import nn

import hbnode
from tests.models import AGAIN, compile_without_back_end

SOLVERS = {
    "nystrom8": {"method": "nystrom8"},
    "tsit5, past outputs": {"method": "tsit5", "save": "interpolate"},
    "grid": {"method": "leapfrog", "steps": 5},
    "compiled grid": {"method": "nystrom8", "steps": 3, "compile": True},
    "dopri5": {"method": "dopri5"},
    "rk4": {"method": "rk4", "steps": 5},
}


class Pulse(nn.Module):
    """A force with a sudden beginning, so that steps are rejected."""

    def forward(self, t, h):
        return torch.exp(-(((t - 0.6) / 0.1) ** 2)) - h


def make_block(**solver):
    return hbnode.HeavyBallODEBlock(Pulse(), damping=0.1, **{"gradient": "direct"} | solver).double()


@pytest.mark.parametrize("t", [[0.0, 0.3, 1.0], [1.0, 0.7, 0.0]])
@pytest.mark.parametrize("name", SOLVERS)
def test_the_accepted_steps_follow_one_another_from_start_to_end(name, t, monkeypatch):
    compile_without_back_end(monkeypatch)
    block = make_block(**SOLVERS[name])
    with torch.no_grad(), hbnode.diagnostics.record_steps(block) as steps:
        block(torch.zeros(2, 1, dtype=torch.float64), t)
    assert len(steps) == block.nfe.steps + block.nfe.rejected
    assert sum(steps.accepted) == block.nfe.steps
    assert not any(steps.backward)
    assert set(steps.sample) == {None}
    taken = [
        (start, size) for start, size, accepted in zip(steps.t, steps.size, steps.accepted, strict=True) if accepted
    ]
    now, sign = t[0], 1 if t[-1] > t[0] else -1
    for start, size in taken:
        assert start == pytest.approx(now, abs=1e-12)
        now = start + sign * size
    if name == "dopri5":  # steps past the last output time
        assert sign * now >= sign * t[-1]
    else:
        assert now == pytest.approx(t[-1], abs=1e-12)


@pytest.mark.parametrize("method", ["tsit5", "nystrom8", "dopri5"])
def test_rejected_steps_are_longer_than_what_follows(method):
    block = make_block(method=method, rtol=1e-8, atol=1e-8)
    with torch.no_grad(), hbnode.diagnostics.record_steps(block.field) as steps:
        block(torch.zeros(1, 1, dtype=torch.float64))
    rejected = [i for i, accepted in enumerate(steps.accepted) if not accepted]
    assert len(rejected) == block.nfe.rejected > 0
    for i in rejected:
        assert steps.t[i + 1] == steps.t[i]
        assert steps.size[i + 1] < steps.size[i]


def test_every_sample_has_steps_of_its_own():
    block = make_block(per_sample=True, method="tsit5")
    x = torch.tensor([[0.0], [30.0], [-1.0]], dtype=torch.float64)
    with torch.no_grad(), hbnode.diagnostics.record_steps(block) as steps:
        block(x)
    for sample in range(len(x)):
        rows = [i for i, of in enumerate(steps.sample) if of == sample]
        assert sum(steps.size[i] for i in rows if steps.accepted[i]) == pytest.approx(1.0, abs=1e-12)
        with torch.no_grad(), hbnode.diagnostics.record_steps(block) as alone:
            block(x[sample : sample + 1])
        assert alone.size == pytest.approx([steps.size[i] for i in rows], rel=1e-9)


@pytest.mark.parametrize("solver", [{"method": "dopri5", "gradient": "adjoint"}, {"gradient": "adjoint"}])
def test_the_steps_of_an_adjoint_are_marked(solver):
    block = make_block(**solver)
    with hbnode.diagnostics.record_steps(block) as steps:
        block(torch.ones(2, 1, dtype=torch.float64)).sum().backward()
    assert steps.backward.count(False) == block.nfe.steps + block.nfe.rejected
    assert steps.backward.count(True) == block.nfe.backward_steps + block.nfe.backward_rejected > 0
    assert steps.t[steps.backward.index(True)] == 1.0


def test_recomputed_steps_are_not_recorded_again():
    block = make_block(gradient=AGAIN, rtol=1e-8, atol=1e-8)
    with hbnode.diagnostics.record_steps(block) as steps:
        block(torch.ones(2, 1, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert block.nfe.backward_steps > 0
    assert not any(steps.backward)


def test_steps_before_a_failure_and_of_one_module_only():
    block, other = make_block(method="tsit5", rtol=1e-10, atol=1e-10, max_steps=7), make_block()
    with pytest.raises(hbnode.errors.MaxStepsError), hbnode.diagnostics.record_steps(block) as steps:  # noqa: PT012
        other(torch.ones(1, 1, dtype=torch.float64))
        block(torch.ones(1, 1, dtype=torch.float64))
    assert len(steps) == 7
    block(torch.ones(1, 1, dtype=torch.float64), [0.0, 1e-3])
    assert len(steps) == 7
    with pytest.raises(TypeError, match=r"record_steps expected a module or a callable field, got int"):
        hbnode.diagnostics.record_steps(3).__enter__()


def test_an_ode_rnn_records_the_gaps_of_each_sequence():
    rnn = hbnode.ODERNN(2, 3)
    t = torch.tensor([[0.0, 1.0, 3.0], [0.0, 0.5, 0.75]])
    with torch.no_grad(), hbnode.diagnostics.record_steps(rnn) as steps:
        rnn(torch.randn(2, 3, 2), t)
    for sample, span in enumerate((3.0, 0.75)):
        sizes = [s for s, of, a in zip(steps.size, steps.sample, steps.accepted, strict=True) if of == sample and a]
        assert sum(sizes) == pytest.approx(span, rel=1e-6)


@pytest.mark.parametrize("method", [None, "rk4", "dopri5"])
def test_a_common_step_of_an_ode_rnn_has_the_samples_and_times_of_the_batch(method):
    """Sequences that have ended take no part; the others keep their numbers and their own times."""
    options = {"method": method, "steps": 2} if method == "rk4" else {"method": method}
    rnn = hbnode.ODERNN(2, 3, per_sample=False, rtol=0.1, atol=0.1, **options)
    t = torch.tensor([[0.0], [100.0], [200.0]]) + 10 * torch.arange(3.0)
    with hbnode.diagnostics.record_steps(rnn) as steps:
        rnn(torch.randn(3, 3, 2), t, lengths=torch.tensor([1, 3, 2]))
    assert set(steps.sample) == {1, 2}
    for sample, start, length in ((1, 100.0, 20.0), (2, 200.0, 10.0)):
        rows = [i for i, other in enumerate(steps.sample) if other == sample and steps.accepted[i]]
        assert steps.t[rows[0]] == start
        total = sum(steps.size[i] for i in rows)
        assert total > length if method == "dopri5" else total == pytest.approx(length, rel=1e-5)  # it passes the end


def test_steps_of_an_adjoint_between_samples_are_in_time():
    rnn = hbnode.ODERNN(2, 3, method="dopri5", per_sample=False, gradient="adjoint", rtol=0.1, atol=0.1)
    with hbnode.diagnostics.record_steps(rnn) as steps:
        rnn(torch.randn(2, 2, 2), torch.tensor([[0.0, 10.0], [100.0, 101.0]]))[0].sum().backward()
    back = [(t, sample) for t, sample, is_back in zip(steps.t, steps.sample, steps.backward, strict=True) if is_back]
    assert (10.0, 0) in back
    assert (101.0, 1) in back
