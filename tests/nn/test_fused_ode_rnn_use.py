"""The fused form of an ODERNN: what users do to a module between its passes, and around them."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import hbnode
from hbnode.errors import NonFiniteError
from hbnode.nn import ode_rnn as layer
from hbnode.solve.methods import METHODS

GRADIENTS = "direct", "checkpoint"


def make_rnn(**options):
    torch.manual_seed(0)
    return hbnode.ODERNN(3, 4, **{"rtol": 1e-3, "atol": 1e-3, **options}).double()


def series():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 7, 3, generator=generator, dtype=torch.float64)
    return x, torch.rand(5, 7, generator=generator, dtype=torch.float64).cumsum(1)


def solved(rnn, call=None):
    """The output and the gradients of all parameters."""
    rnn.zero_grad()
    y = (rnn if call is None else call)(*series())[0]
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in rnn.parameters() if p.grad is not None)]


def assert_alike(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture
def general(monkeypatch):
    """Makes all modules take the plain form."""
    return lambda: monkeypatch.setattr(layer, "fuse", lambda *args: None)


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("options", [{}, {"field": "ghbnode"}, {"cell": "rnn"}], ids=["hbnode", "ghbnode", "rnn"])
def test_data_that_is_replaced_before_the_gradient_does_not_enter_it(options, gradient):
    options = options | {"gradient": gradient}
    expected = solved(make_rnn(**options))
    for name in dict(make_rnn(**options).named_parameters()):
        if name.endswith("chi"):  # autograd itself takes the new one: softplus keeps its input
            continue
        rnn = make_rnn(**options)
        y = rnn(*series())[0]
        parameter = dict(rnn.named_parameters())[name]
        parameter.data = parameter.data + 1.0
        y.square().sum().backward()
        assert_alike([y, *(p.grad for p in rnn.parameters() if p.grad is not None)], expected)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_parameters_changed_in_place_before_the_gradient_are_named_by_torch(gradient):
    for name in ("field.func.layers.0.weight", "field.func.layers.2.bias", "cell.weight_hh"):
        rnn = make_rnn(gradient=gradient)
        y = rnn(*series())[0]
        with torch.no_grad():
            rnn.get_parameter(f"layers.0.{name}").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_second_pass_over_a_graph_that_was_kept_evaluates_nothing():
    rnn = make_rnn()
    loss = rnn(*series())[0].square().sum()
    with hbnode.count_nfe(rnn) as nfe:
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in rnn.parameters() if p.grad is not None]
        rnn.zero_grad()
        loss.backward()
    assert nfe.backward == 0
    assert_alike([p.grad for p in rnn.parameters() if p.grad is not None], first)
    assert loss.grad_fn is not None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("where", ["field.func.layers.0.weight", "field.omega", "cell.weight_hh", "start"])
def test_parameters_that_are_not_finite_are_seen_at_once(where):
    rnn = make_rnn()
    with torch.no_grad():
        rnn.get_parameter(f"layers.0.{where}").view(-1)[0] = torch.nan
    with pytest.raises(NonFiniteError) as failure, hbnode.count_nfe(rnn) as nfe:
        rnn(*series())
    assert nfe.forward <= 6 * (1 + METHODS["nystrom4"].evaluations)  # a step is made smaller five times
    assert failure.value.nfe <= nfe.forward


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_hooks_of_parameters_are_called_once(gradient):
    rnn, calls = make_rnn(gradient=gradient), []
    expected = solved(rnn)
    for p in rnn.parameters():
        p.register_hook(lambda g: calls.append("before"))
        p.register_post_accumulate_grad_hook(lambda p: calls.append("after"))
    assert_alike(solved(rnn), expected)
    assert calls.count("before") == calls.count("after") == len(expected) - 1
    handle = rnn.field.func.layers[0].weight.register_hook(lambda g: 3 * g)
    solved(rnn)
    torch.testing.assert_close(rnn.field.func.layers[0].weight.grad, 3 * expected[3])
    handle.remove()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda rnn: pickle.loads(pickle.dumps(rnn))], ids=["copy", "pickle"])
def test_copies_of_a_module_that_has_run(again):
    rnn = make_rnn()
    y = rnn(*series())[0]
    expected = solved(rnn)
    assert_alike(solved(again(rnn)), expected)
    assert y.requires_grad


def test_threads_may_share_a_module():
    rnn, found = make_rnn(), []
    expected = solved(rnn)
    parameters = [p for p in rnn.parameters() if p.grad is not None]

    def work():
        y = rnn(*series())[0]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), parameters)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for one in found:
        assert_alike(one, expected)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_backward_pass_inside_autocast_is_as_precise_as_its_forward_pass(gradient):
    rnn = make_rnn(gradient=gradient).float()
    x, t = series()
    slopes = []
    for enabled in (False, True):
        loss = rnn(x.float(), t)[0].square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            slopes.append(torch.autograd.grad(loss, [rnn.cell.weight_hh, rnn.field.func.layers[0].weight]))
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_goes_to_the_solver(dtype):
    rnn = make_rnn(rtol=1e-1, atol=1e-1)
    x, t = series()
    expected = rnn(x, t)[0]
    with torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(rnn.float()(x.float(), t)[0].double(), expected, rtol=0.05, atol=0.05)
    low = rnn.to(dtype)(x.to(dtype), t)[0]
    assert low.dtype == dtype
    torch.testing.assert_close(low.double(), expected, rtol=0.05, atol=0.05)


def test_a_module_in_data_parallel():
    rnn = make_rnn()
    assert_alike(solved(rnn, nn.DataParallel(rnn)), solved(make_rnn()))


@pytest.mark.parametrize("options", [{}, {"steps": 1}], ids=["adaptive", "steps"])
def test_a_module_that_torch_compiles(options):
    rnn = make_rnn(**options)
    expected = solved(make_rnn(**options))
    compiled = torch.compile(rnn, backend="aot_eager")
    for _ in range(2):
        assert_alike(solved(rnn, compiled), expected)


def test_the_same_by_the_solver(general):
    expected = solved(make_rnn())
    general()
    torch.testing.assert_close(solved(make_rnn()), expected, rtol=1e-9, atol=1e-11)
