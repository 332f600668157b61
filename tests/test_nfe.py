import copy
import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hbnode
from hbnode.nfe import NFE
from hbnode.solve.adjoints import Checkpoint
from hbnode.solve.methods import ALL_METHODS
from tests.models import AGAIN, LATER, MODELS, every_model, make_field, make_input


class Counted(nn.Module):
    """A func that counts its own calls, in the forward and in the backward pass."""

    def __init__(self, func):
        super().__init__()
        self.func = func
        self.time_dependent = getattr(func, "time_dependent", False)
        self.calls = 0

    def forward(self, *args):
        self.calls += 1
        return self.func(*args)


def counted_block(model, **solver):
    field = make_field(model).double()
    field.func = Counted(field.func)
    return hbnode.ODEBlock(field, **{"method": "dopri5", **solver})


@pytest.mark.sparse
@every_model
@pytest.mark.parametrize("tolerance", [1e-2, 1e-7])
@pytest.mark.parametrize("norm", [{"norm": "seminorm"}, {}])
@pytest.mark.parametrize(("outputs", "learn_t"), [(2, False), (6, False), (3, True)])
def test_dopri5_counts_equal_an_independent_counter_and_the_formula(model, tolerance, norm, outputs, learn_t):
    block = counted_block(model, rtol=tolerance, atol=tolerance, gradient="adjoint", adjoint_options=norm)
    func, t = block.field.func, torch.linspace(0, 1, outputs, dtype=torch.float64, requires_grad=learn_t)
    loss = block(make_input(), t).pow(2).sum()
    nfe = block.nfe
    assert nfe.forward == func.calls == 2 + 6 * (nfe.steps + nfe.rejected)
    assert nfe.backward == 0
    loss.backward()
    assert nfe.total == func.calls
    # with a gradient for t, torchdiffeq evaluates the field once more at each output
    starts = (3 if learn_t else 2) * (outputs - 1)
    assert nfe.backward == starts + 6 * (nfe.backward_steps + nfe.backward_rejected)


def counted_field(model):
    """A field and the function that counts its own calls, also for forces that are gradients of potentials."""
    if model in (*MODELS, *LATER):
        field = make_field(model).double()
        field.func = Counted(field.func)
        return field, field.func
    potential = hbnode.nn.MLP(4, [6], 1)
    if model == "port":
        counted = Counted(potential)
        return hbnode.PortHamiltonian(counted, time_dependent=False).double(), counted
    counted = Counted(lambda h: -torch.func.grad(lambda z: potential(z).sum())(h))
    counted.potential = potential
    return hbnode.HBNODE(counted, time_dependent=False).double(), counted


SOLVERS = [
    ("tsit5", {}), ("tsit5", {"per_sample": True}), ("nystrom8", {}), ("exponential", {"steps": 6}), ("rodas5p", {}),
    ("leapfrog", {"steps": 20}), ("dopri5", {}), ("rk4", {"steps": 4}), ("implicit_adams", {"steps": 20}),
    ("scipy_solver", {}),
]  # fmt: skip


@pytest.mark.sparse
@pytest.mark.parametrize(("method", "solver"), SOLVERS, ids=str)
@pytest.mark.parametrize("model", ["hbnode", *MODELS[:3], "ghbnode", *LATER, "port", "torch.func"])
def test_counts_are_the_calls(model, method, solver):
    """In the forward pass they are those of the solve without a gradient; the adjoint may reuse its first one."""
    suits = model in ("hbnode", "port", "torch.func") or (model, method) == ("ghbnode", "leapfrog")
    if method in ("nystrom8", "exponential", "leapfrog") and not suits:
        return
    modes = [*ALL_METHODS[method].gradients]
    if "checkpoint" in modes:
        modes += [Checkpoint(keep_bytes=3000), AGAIN]
    x = make_input()
    for gradient in modes:
        field, func = counted_field(model)
        block = hbnode.ODEBlock(field, method=method, gradient=gradient, **solver)
        with torch.no_grad():
            block(x)
        expected, func.calls = func.calls, 0
        h = block(x)
        assert block.nfe.forward == func.calls
        is_again = gradient in ("reversible", "adjoint") or (isinstance(gradient, Checkpoint) and model == "torch.func")
        assert 0 <= func.calls - expected <= is_again, gradient
        h.square().sum().backward()
        assert block.nfe.total == func.calls, gradient


def test_counts_are_of_the_last_call_and_not_cumulative():
    block, x = counted_block("hbnode", gradient="adjoint"), make_input()
    (first, first_nfe), (second, second_nfe) = ((block(x), block.nfe) for _ in range(2))
    assert second_nfe.forward == first_nfe.forward > 0
    first.sum().backward()  # belongs to the first call, though it comes after the second
    assert first_nfe.backward > second_nfe.backward == 0
    second.sum().backward()
    assert block.nfe.backward == first_nfe.backward


def test_count_nfe_sums_over_two_blocks_and_repeated_calls():
    first, second = counted_block("hbnode", gradient="adjoint"), counted_block("node", gradient="adjoint")
    model, x = nn.Sequential(first, second), make_input()
    with hbnode.count_nfe(model) as both, hbnode.count_nfe(second) as only_second:
        model(x).sum().backward()
        backward = first.nfe.backward + second.nfe.backward
        model(x)
    assert both.total == first.field.func.calls + second.field.func.calls
    assert only_second.total == second.field.func.calls
    assert both.backward == backward > 0
    with pytest.raises(KeyError), hbnode.count_nfe(second) as failed:
        raise KeyError
    model(x)  # outside of the contexts: not counted
    assert both.total < first.field.func.calls + second.field.func.calls
    assert failed.total == 0


def test_a_block_inside_the_func_of_a_block():
    inner = counted_block("node", method="rk4", steps=2, gradient="adjoint")
    outer = hbnode.HeavyBallODEBlock(Counted(inner), method="rk4", steps=3, gradient="adjoint").double()
    with hbnode.count_nfe(outer) as nfe:
        h = outer(make_input())
        forward = (outer.field.func.calls, inner.field.func.calls)
        assert forward == (12, 12 * 8)
        assert (nfe.forward, nfe.backward) == (sum(forward), 0)
        h.sum().backward()
    assert outer.nfe.forward == 12
    assert outer.nfe.backward == outer.field.func.calls - 12 == 12
    # whatever the backward pass evaluates is backward: the inner solves replayed by the outer adjoint, and their own
    assert nfe.forward == sum(forward)
    assert nfe.total == outer.field.func.calls + inner.field.func.calls


def test_failed_and_repeated_solves_are_counted():
    block = counted_block("hbnode", max_steps=1, rtol=1e-9, atol=1e-9)
    with pytest.raises(hbnode.errors.MaxStepsError) as error:
        block(make_input())
    assert block.nfe.forward == error.value.nfe == block.field.func.calls == 8
    block = counted_block("hbnode")
    with hbnode.count_nfe(block) as nfe:
        h = checkpoint(block, make_input().requires_grad_(), use_reentrant=False)
        assert nfe.backward == 0
        h.sum().backward()
    assert nfe.forward == nfe.backward > 0


def test_every_backward_pass_has_its_own_limit_of_steps():
    y0 = torch.ones(6, requires_grad=True)
    y = hbnode.odeint(lambda t, y: -y, y0, [0.0, 1.0], gradient="adjoint", max_steps=8)[-1]
    for row in y:
        torch.autograd.grad(row, y0, retain_graph=True)
    many = torch.linspace(0, 1, 31)
    hbnode.odeint(lambda t, y: -y, y0, many, gradient="adjoint", max_steps=8)[-1].sum().backward()
    assert torch.isfinite(y0.grad).all()


@pytest.mark.parametrize(
    "solver", [{"method": "dopri5", "gradient": "adjoint"}, {"method": "tsit5", "gradient": AGAIN}], ids=str
)
def test_the_count_starts_anew_where_it_is_set_to_0(solver):
    """As torchdiffeq's examples do it: read and reset, then the backward pass, then read."""
    block = counted_block("hbnode", **solver)
    y, forward = block(make_input()), block.nfe
    calls = block.field.func.calls
    block.nfe = 0
    assert block.nfe.total == 0
    y.sum().backward()
    assert (forward.forward, forward.backward) == (calls, 0)
    assert (block.nfe.forward, block.nfe.backward) == (0, block.field.func.calls - calls)
    assert block.nfe.backward > 0
    with pytest.raises(ValueError, match=r"can be set to 0 only, got 3. Fix: block.nfe = 0"):
        block.nfe = 3
    assert copy.deepcopy(block).nfe == pickle.loads(pickle.dumps(block)).nfe == block.nfe


def test_fields_count_nothing_unless_a_subclass_does():
    field = make_field("node")
    with pytest.raises(AttributeError, match=r"no count of its own. Fix: block.nfe = 0, or hbnode.count_nfe\(field\)"):
        field.nfe = 0

    class Counting(hbnode.NODE):
        def forward(self, t, h):
            self.nfe += 1
            return super().forward(t, h)

    field = Counting(nn.Linear(2, 2))
    assert not hasattr(field, "nfe")
    field.nfe = 0
    block = hbnode.ODEBlock(field)
    block(torch.ones(1, 2))
    assert field.nfe == block.nfe.forward > 0


# NFE as a number

CALLS = ("nfe == 20", "20 != nfe", "nfe in [20]", "3 < nfe", "nfe <= 20.0", "max(nfe, 30)", "5 + nfe", "nfe - 1",
    "100 - nfe", "2 * nfe", "8 / nfe", "nfe // 3", "70 % nfe", "divmod(nfe, 7)", "2 ** nfe", "pow(nfe, 2, 7)", "-nfe",
    "round(nfe, -1)", "float(nfe)", "range(nfe)", "f'{nfe:.1f}'", "'%d %.1f' % (nfe, nfe)", "json.dumps(int(nfe))",
    "0.99 * nfe + nfe * 0.01", "np.mean([nfe, 5])", "(np.arange(3) + nfe).tolist()", "np.log10(nfe)",
    "(nfe > np.arange(0, 40, 10)).tolist()", "(torch.ones(2) - nfe).tolist()",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_count_answers_as_its_total_wherever_a_number_would(call):
    names = {"np": np, "json": json, "torch": torch}
    assert eval(call, {**names, "nfe": NFE(12, 8, 3)}) == eval(call, {**names, "nfe": 20})


def test_sums_of_counts_are_counts_and_equal_if_all_counts_are():
    one, two = NFE(12, 8, 3), NFE(8, 12, 3)
    for same in (one + 0, 0 + one, sum([one])):
        assert isinstance(same, NFE)
        assert same == one
    assert sum([one, two]) == one + two == NFE(20, 20, 6)
    assert one != two
    assert not NFE()
    with pytest.raises(TypeError, match="unhashable"):  # it changes while a solve runs
        hash(one)
