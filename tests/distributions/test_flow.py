"""Heavy-ball flows: exact densities on phase space, bounds on data, samples, conditions and use."""

import copy
import functools
import gc
import math
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

import hbnode
from hbnode.solve.tableaus import BLANES_MOAN4, STRANG
from tests.pretend_device import pretended_device

SPLITTINGS = {"leapfrog": STRANG, "blanes_moan4": BLANES_MOAN4}
FORMS = ["plain", "per feature", "conditioned generalized", "backwards"]


def make_flow(form="plain", *, dim=2, dtype=torch.float64, **options):
    """A flow of moderate nonlinearity, with a time-dependent f and a q that is not the standard normal."""
    torch.manual_seed(0)
    given = {"damping": 0.4, "steps": 5} | options
    if "generalized" in form:
        given |= {"generalized": True, "xi": 0.3, "activation": torch.sigmoid}
    if "conditioned" in form:
        given["condition_dim"] = 3
    if form == "per feature":
        given["damping"] = torch.linspace(0.2, 0.7, dim)
    if form == "backwards":
        given["t_span"] = (1.5, 0.25)
    size = given.get("condition_dim", 0)
    func = hbnode.nn.MLP(dim + size, [16], dim, activation=nn.Tanh, time_dependent=True)
    flow = hbnode.distributions.HeavyBallFlow(func, dim, **given).to(dtype)
    for p in flow.posterior_net.parameters():
        nn.init.normal_(p, std=0.2)
    return flow


def make_points(flow, *batch):
    """h, m and the condition that the flow takes, by name, in its dtype."""
    torch.manual_seed(1)
    dtype = next(flow.parameters()).dtype
    h, m = torch.randn(2, *batch, flow.dim, dtype=dtype)
    condition = torch.randn(*batch, flow.condition_dim, dtype=dtype) if flow.condition_dim else None
    return h, m, {"condition": condition}


def reference_push(flow, h, m, condition=None):
    """The drifts and kicks of push one after another, with their log-determinants."""
    drifts, kicks = SPLITTINGS[flow.method].drifts, SPLITTINGS[flow.method].kicks
    (start, end), field = flow.t_span, flow.field
    tau, gamma, generalized = (end - start) / flow.steps, field.damping, isinstance(field, hbnode.GHBNODE)
    sigma = getattr(field.activation, "activation", field.activation) if generalized else lambda x: x
    condition = [] if condition is None else [condition]
    gamma = gamma.double().expand(flow.dim)
    log_determinant = torch.zeros(h.shape[:-1], dtype=h.dtype)
    for step in range(flow.steps):
        t = torch.tensor(start + step * tau, dtype=h.dtype)
        h = h + drifts[0] * tau * sigma(m)
        for kick, before, after in zip(kicks, drifts[:-1], drifts[1:], strict=True):
            t = t + before * tau
            f = field.func(t, h, *condition) - (field.xi * h if generalized else 0)
            decay = torch.exp(-gamma * kick * tau)
            m = decay * m + (1 - decay) / gamma * f
            log_determinant = log_determinant - (gamma * kick * tau).sum()
            h = h + after * tau * sigma(m)
    return h, m, log_determinant


@pytest.mark.parametrize(("form", "method"), [*((form, "leapfrog") for form in FORMS), (FORMS[2], "blanes_moan4")])
def test_values_and_gradients_are_those_of_the_reference(form, method):
    results = []
    for push in (hbnode.distributions.HeavyBallFlow.push, reference_push):
        flow = make_flow(form, method=method)
        h, m, given = make_points(flow, 4)
        inputs = [x.requires_grad_() for x in (h, m, given["condition"]) if x is not None]
        moved = push(flow, h, m, **given)
        value = sum((x * x.cos()).sum() for x in moved)
        found = torch.autograd.grad(value, [*inputs, *flow.field.parameters()], allow_unused=True)
        results.append([*moved, *(x for x in found if x is not None)])
    assert len(results[0]) == len(results[1]) >= 3 + 2 + 5
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_pull_undoes_push_and_the_log_determinant_is_that_of_the_jacobian(form):
    flow = make_flow(form)
    h, m, given = make_points(flow)
    for there, back in ((flow.push, flow.pull), (flow.pull, flow.push)):
        *point, forth = there(h, m, **given)
        assert (point[0] - h).abs().max() > 0.1
        *returned, home = back(*point, **given)
        assert torch.equal(home, -forth)
        torch.testing.assert_close(returned, [h, m], rtol=0, atol=1e-10)

        def moved(z, there=there):
            return torch.cat(there(*z.split(flow.dim), **given)[:2])

        jacobian = torch.autograd.functional.jacobian(moved, torch.cat([h, m]))
        assert abs(jacobian.slogdet().logabsdet - forth) < 1e-8


def test_a_linear_force_gives_the_normal_in_closed_form_and_with_the_exact_posterior_every_bound_its_density():
    func, weight = nn.Linear(2, 2, bias=False), torch.diag(torch.tensor([1.0, 0.5]).double())
    func.weight.data = -weight
    options = {"damping": 0.5, "learn_damping": False, "steps": 40, "method": "blanes_moan4"}
    flow = hbnode.distributions.HeavyBallFlow(func, 2, **options).double()
    generator = torch.zeros(4, 4, dtype=torch.float64)
    generator[:2, 2:], generator[2:, :2], generator[2:, 2:] = torch.eye(2), -weight, -0.5 * torch.eye(2)
    matrix = torch.linalg.matrix_exp(generator)
    covariance, (h, m, _) = matrix @ matrix.T, make_points(flow, 6)
    exact = MultivariateNormal(torch.zeros(4).double(), covariance)
    assert torch.allclose(flow.log_prob(h, m), exact.log_prob(torch.cat([h, m], 1)), atol=1e-7)
    started = flow.posterior(h)
    assert not started.mean.any()
    assert (started.variance == 1).all()
    gain = covariance[2:, :2] @ covariance[:2, :2].inverse()
    log_std = (covariance[2:, 2:] - gain @ covariance[:2, 2:]).diagonal().log() / 2
    del flow.posterior_net
    flow.posterior_net = lambda h: torch.cat([h @ gain.T, log_std.expand_as(h)], -1)
    exact = MultivariateNormal(torch.zeros(2).double(), covariance[:2, :2]).log_prob(h)
    assert torch.allclose(flow.elbo(h), exact, atol=1e-6)
    assert torch.allclose(flow.log_prob_bound(h, 3), exact, atol=1e-6)


def test_bounds_of_another_posterior_average_weights():
    flow = make_flow()
    h, *_ = make_points(flow, 4)
    torch.manual_seed(3)
    q = flow.posterior(h.expand(5, 4, 2))
    m = q.rsample()
    weights = flow.log_prob(h.expand(5, 4, 2), m) - q.log_prob(m)
    torch.manual_seed(3)
    torch.testing.assert_close(flow.log_prob_bound(h, 5), weights.logsumexp(0) - math.log(5))
    torch.manual_seed(3)
    torch.testing.assert_close(flow(h.expand(5, 4, 2)), weights)


def test_samples_are_pushed_normal_variables_with_their_density():
    flow = make_flow()
    torch.manual_seed(2)
    noise = torch.randn(2, 20, 2, dtype=torch.float64)
    torch.manual_seed(2)
    h, m, log_prob = flow.rsample_and_log_prob(20)
    torch.testing.assert_close(log_prob, flow.log_prob(h, m))
    torch.testing.assert_close(torch.stack(flow.pull(h, m)[:2]), noise)


@pytest.mark.parametrize("form", ["conditioned generalized", "backwards"])
def test_gradient_modes_agree(form):
    found = []
    for gradient in ("direct", "checkpoint", "reversible"):
        flow = make_flow(form, gradient=gradient)
        h, _, given = make_points(flow, 4)
        inputs = [x.requires_grad_() for x in (h, given["condition"]) if x is not None]
        torch.manual_seed(2)
        value = flow.log_prob_bound(h, 3, **given).sum() + flow.rsample_and_log_prob(5, **given)[2].sum()
        value.backward()
        found.append([x.grad for x in (*inputs, *flow.parameters())])
    for direct, *others in zip(*found, strict=True):
        for x in others:
            assert torch.allclose(x, direct, rtol=1e-8, atol=1e-9)


def test_a_condition_is_seen_and_broadcasts():
    flow = make_flow("conditioned")
    h, m, _ = make_points(flow, 4, 5)
    condition = torch.randn(5, 3, dtype=torch.float64)
    value = flow.log_prob(h, m, condition)
    assert value.shape == (4, 5)
    assert torch.allclose(value[2, 3], flow.log_prob(h[2, 3], m[2, 3], condition[3]))
    assert not torch.allclose(value, flow.log_prob(h, m, condition + 1))
    assert [x.shape for x in flow.sample((7, 2), condition)] == [(7, 2, 5, 2)] * 2
    assert flow.log_prob_bound(h, 6, condition).shape == flow.elbo(h, condition).shape == (4, 5)


class Conditional(nn.Module):
    def forward(self, t, h, condition):
        return (h + condition).sin() * 0.5 * t


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile reads it
@pytest.mark.parametrize(
    ("func", "takes_time"),
    [
        (lambda h, c: (h + c).sin() * 0.5, False),
        (Conditional().forward, True),
        (functools.partial(lambda t, h, c, scale: (h + c).sin() * scale * t, scale=0.5), True),
        (torch.compile(Conditional(), backend="eager"), True),
    ],
    ids=["without time", "method", "partial", "compiled"],
)
def test_a_condition_goes_to_any_function(func, takes_time):
    """The density is that of a flow whose f closes over the condition."""
    h, m, condition = torch.randn(3, 4, 2)

    def closed(t, h):
        return (h + condition).sin() * 0.5 * (t if takes_time else 1.0)

    given = hbnode.distributions.HeavyBallFlow(func, 2, condition_dim=2)
    own = hbnode.distributions.HeavyBallFlow(closed, 2, gradient="direct")
    torch.testing.assert_close(given.log_prob(h, m, condition), own.log_prob(h, m))


@pytest.mark.parametrize("batch", [(), (0,), (3, 0, 2), (2, 3)])
def test_batch_shapes(batch):
    flow = make_flow()
    h, m, _ = make_points(flow, *batch)
    h, m = h.requires_grad_(), m.transpose(0, -1).contiguous().transpose(0, -1)
    assert [x.shape for x in flow.pull(h, m)] == [(*batch, 2), (*batch, 2), batch]
    assert flow.log_prob(h, m).shape == flow.elbo(h).shape == flow.log_prob_bound(h, 3).shape == batch
    flow.elbo(h).sum().backward()
    assert h.grad.shape == h.shape
    drawn = flow.sample(batch)
    assert [x.shape for x in drawn] == [(*batch, 2)] * 2
    assert (drawn[0].requires_grad, flow.rsample(batch)[0].requires_grad) == (False, True)


def test_values_have_the_dtype_of_the_flow():
    narrow = make_flow(dtype=torch.bfloat16)
    h, m, _ = make_points(narrow, 4)
    values = [*narrow.push(h, m), narrow.log_prob_bound(h, 2), *narrow.sample(3)]
    assert {x.dtype for x in values} == {torch.bfloat16}


def test_copies_states_and_pickles_give_the_same_density():
    flow, another = make_flow("conditioned generalized"), make_flow("conditioned generalized", damping=0.2)
    h, m, given = make_points(flow, 4)
    another.load_state_dict(flow.state_dict())
    for same in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow)), another):
        assert torch.equal(same.log_prob(h, m, **given), flow.log_prob(h, m, **given))


def test_on_another_device():
    with pretended_device() as device:
        flow = make_flow("conditioned", dtype=torch.float32)
        h, _, given = make_points(flow, 4)
        flow, h, condition = device.move(flow), device.move(h).requires_grad_(), device.move(given["condition"])
        value = flow.log_prob_bound(h, 2, condition)
        drawn = flow.rsample_and_log_prob(3, condition)
        (value.sum() + drawn[2].sum()).backward()
        assert all(x.is_cuda for x in (value, *drawn, h.grad, flow.field.omega.grad))


def test_second_derivatives_and_transforms_with_the_direct_gradient():
    flow = make_flow(gradient="direct")
    h, m, _ = make_points(flow, 4)
    score = torch.func.vmap(torch.func.grad(flow.log_prob))(h, m)
    x = h.clone().requires_grad_()
    (expected,) = torch.autograd.grad(flow.log_prob(x, m).sum(), x, create_graph=True)
    assert torch.allclose(score, expected)
    expected.square().sum().backward()
    assert x.grad.abs().sum() > 0


def test_the_backward_pass_of_a_reversible_flow_stores_the_ends_alone():
    def saved(steps):
        flow, sizes = make_flow(steps=steps), []
        h, m, _ = make_points(flow, 16)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            flow.log_prob(h.requires_grad_(), m)
        return sum(sizes)

    assert saved(10) == saved(100) > 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"method": "tsit5"}, ValueError, "method must be one of .*got 'tsit5'.*Fix: method='leapfrog'"),
        ({"xi": 1.0}, ValueError, "xi belongs to .*Fix: generalized=True"),
        ({"damping": torch.ones(3)}, ValueError, r"damping must be a number or a tensor \(2,\).*\(3,\)"),
        ({"condition_dim": 1}, TypeError, r"\(h, condition\) or \(t, h, condition\). Fix: let it take h, condition"),
    ],
    ids=["method", "xi", "damping", "condition"],
)
def test_wrong_arguments_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        hbnode.distributions.HeavyBallFlow(**({"func": nn.Linear(2, 2), "dim": 2} | given))


def test_wrong_inputs_are_refused():
    flow, conditioned, h = make_flow(), make_flow("conditioned"), torch.zeros(4, 2, dtype=torch.float64)
    narrow = hbnode.distributions.HeavyBallFlow(nn.Linear(2, 2), 2, posterior=nn.Linear(2, 2))
    for call, error, message in (
        (lambda: flow.log_prob(h[:, :1], h), ValueError, r"h must be \(..., 2\), got shape \(4, 1\)"),
        (lambda: flow.log_prob(h, h[:1]), ValueError, "m must have the dtype and shape of h.*Fix"),
        (lambda: flow.log_prob(h.float(), h.float()), TypeError, "h is torch.float32, the flow is torch.float64"),
        (lambda: flow.elbo(h, h), ValueError, "the flow has condition_dim=0 and got a condition"),
        (lambda: conditioned.elbo(h, h), ValueError, r"condition must broadcast to \(4, 3\), got shape \(4, 2\)"),
        (lambda: flow.log_prob(h * math.nan, h), hbnode.errors.NonFiniteError, "not finite"),
        (lambda: narrow.elbo(h.float()), ValueError, r"posterior returned shape \(4, 2\).*Fix: .* output size 4"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.sparse
@pytest.mark.parametrize("gradient", ["reversible", "checkpoint", "direct"])
@pytest.mark.parametrize("function", ["push", "pull"])
def test_a_network_that_keeps_an_output_is_freed(function, gradient):
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    flow, freed = hbnode.distributions.HeavyBallFlow(net, 2, gradient=gradient), weakref.ref(net)
    net.last = getattr(flow, function)(*torch.randn(2, 3, 2))
    del net, flow
    gc.collect()
    assert freed() is None
