"""Annealed heavy-ball Langevin dynamics against path densities written out by hand and exact normalising constants."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.distributions import (
    Categorical,
    Exponential,
    Independent,
    MixtureSameFamily,
    MultivariateNormal,
    Normal,
    Uniform,
)

import hbnode
from hbnode.distributions import HeavyBallAnnealing
from hbnode.nn.nets import MLP
from tests.models import slow

DOUBLE = {"dtype": torch.float64}
MEAN = torch.tensor([1.0, -0.5], **DOUBLE)
COVARIANCE = torch.tensor([[1.5, 0.4], [0.4, 0.6]], **DOUBLE)


def standard_normal(d=2, dtype=torch.float64):
    return Independent(Normal(torch.zeros(d, dtype=dtype), torch.ones(d, dtype=dtype)), 1)


def gaussian(x):
    """A Gaussian times 3."""
    return MultivariateNormal(MEAN, COVARIANCE).log_prob(x) + math.log(3)


def quartic(x):
    """Wells of unequal depth in each coordinate."""
    return (-x.pow(4) / 4 + x.square() + x / 2).sum(-1)


def network(seed=0, d=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MLP(d, [8], d, activation=nn.Tanh, time_dependent=True).double()


def unequal(steps, **options):
    """One with nothing equal: step sizes, damping, schedule, and a force of random weights."""
    schedule = torch.linspace(0, 1, steps + 1).square()
    values = {"step_size": torch.tensor([0.3, 0.45]), "damping": 0.8, "schedule": schedule, "force": network()}
    return HeavyBallAnnealing(gaussian, standard_normal(), steps, **{**values, **options}).double()


def gradient(log_prob, x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(log_prob(x).sum(), x)[0]


def slow_paths(annealing, n, seed, temperature=1.0):
    """Paths step by step, with their densities in both directions as they are defined.

    The momenta have variance ``temperature``, and units of time are those of that temperature.
    """
    torch.manual_seed(seed)
    prior, beta, root = annealing.prior, annealing.schedule.detach(), math.sqrt(temperature)
    h, gamma = annealing.step_size.detach() / root, torch.as_tensor(annealing.damping).detach() * root
    b = torch.exp(-gamma * h)
    momenta = Normal(torch.zeros((), **DOUBLE), root)

    def force(k, x):
        whole = temperature * gradient(lambda y: beta[k] * gaussian(y) + (1 - beta[k]) * prior.log_prob(y), x)
        if annealing.force is not None:
            whole = whole + temperature * annealing.force(torch.tensor(k / annealing.steps), x).detach()
        return whole

    def refreshed(m):
        return Normal(b * m, root * (1 - b * b).sqrt())

    x = prior.sample((n,))
    m = root * torch.randn_like(x)
    log_weight = -prior.log_prob(x) - momenta.log_prob(m).sum(-1)
    for k in range(1, annealing.steps + 1):
        before, m = m, b * m + (1 - b * b).sqrt() * root * torch.randn_like(m)
        log_weight += (refreshed(m).log_prob(before) - refreshed(before).log_prob(m)).sum(-1)
        # a leapfrog step, which keeps volumes; with the momentum reversed it leads back
        m = m + h / 2 * force(k - 1, x)
        x = x + h * m
        m = m + h / 2 * force(k, x)
    return x, log_weight + gaussian(x) + momenta.log_prob(m).sum(-1)


# The weights


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("damping", [0.8, math.inf])  # with infinite damping it is overdamped Langevin dynamics
def test_a_log_weight_is_the_ratio_of_the_densities_of_the_path_in_both_directions(damping, temperature):
    annealing = unequal(7, damping=damping)
    x, log_weight = annealing.sample(50, seed=3)
    torch.testing.assert_close((x, log_weight), slow_paths(annealing, 50, 3, temperature))


def test_the_mean_weight_is_z():
    annealing = unequal(4)
    estimate, error = annealing.log_z(40_000, seed=0)
    assert abs(estimate - math.log(3)) < 3 * error
    weight = annealing.sample(40_000, seed=0)[1].exp()
    torch.testing.assert_close(estimate, weight.mean().log())
    torch.testing.assert_close(error, weight.std() / 200 / weight.mean())
    assert error < 0.05


# Training


@pytest.mark.parametrize("damping", [torch.tensor([0.5, 1.5]), *slow(math.inf)], ids=["underdamped", "overdamped"])
def test_gradients_are_those_of_finite_differences(damping):
    annealing = unequal(5, damping=damping)
    names = [name for name, p in annealing.named_parameters() if p.requires_grad]
    assert {"log_step_size", "log_increments"} < set(names)
    assert ("log_damping" in names) == (damping is not math.inf)
    state = [annealing.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def bound(*values):
        return torch.func.functional_call(annealing, dict(zip(names, values, strict=True)), (6,), {"seed": 0})

    assert torch.autograd.gradcheck(bound, state, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("steps", [1, 10])
def test_checkpoints_change_nothing_and_store_less(steps):
    results, stored = [], []
    for checkpoint in (False, True):
        annealing = unequal(steps, checkpoint=checkpoint)
        torch.manual_seed(5)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=sizes: to.append(x.numel()) or x, lambda x: x):
            bound = annealing.bound(16)
        bound.backward()
        stored.append(sum(sizes))
        results.append([bound, torch.rand(1), *(p.grad for p in annealing.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert steps == 1 or stored[1] < stored[0] / 2


def test_what_is_learned():
    prior = standard_normal()
    annealing = HeavyBallAnnealing(gaussian, prior, 3, learn_step_size=False, damping=math.inf, learn_schedule=False)
    assert not any(p.requires_grad for p in annealing.parameters())
    fixed = HeavyBallAnnealing(gaussian, prior, 3, schedule=[0, 0.5, 0.5, 1], learn_schedule=False)
    fixed.bound(4).backward()
    assert fixed.log_step_size.grad.isfinite()
    assert len(list(HeavyBallAnnealing(nn.Linear(2, 1), prior, 3).parameters())) == 3  # the target is no part of it


# As others use it


def test_a_seed_determines_the_paths_and_leaves_the_generators_alone():
    annealing, state = unequal(3), torch.get_rng_state()
    first = annealing.sample(5, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    for same in (annealing.sample(5, seed=7), annealing.rsample(5, seed=7)):
        assert all(torch.equal(*pair) for pair in zip(first, same, strict=True))
    assert annealing.bound(5, seed=7) == annealing(5, seed=7) == first[1].mean()
    assert not torch.equal(annealing.sample(5, seed=8)[0], first[0])
    assert not torch.equal(annealing.sample(5)[0], annealing.sample(5)[0])


def test_samples_have_no_graph_and_rsamples_do():
    annealing = unequal(3)
    assert not any(part.requires_grad for part in annealing.sample(4))
    assert all(part.requires_grad for part in annealing.rsample(4))
    with torch.inference_mode():
        assert annealing.sample(4)[0].shape == (4, 2)
        assert annealing.log_z(4).estimate.isfinite()
        assert not annealing.bound(4).requires_grad


def test_copies():
    annealing, other = unequal(3), unequal(3)
    with torch.no_grad():
        annealing.log_damping += 0.3
    other.load_state_dict(annealing.state_dict())
    for same in (copy.deepcopy(annealing), pickle.loads(pickle.dumps(annealing)), other):
        assert all(torch.equal(*pair) for pair in zip(same.sample(4, seed=0), annealing.sample(4, seed=0), strict=True))


def test_priors():
    means, shares = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], **DOUBLE), Categorical(torch.ones(2, **DOUBLE))
    mixture = MixtureSameFamily(shares, Independent(Normal(means, torch.ones(2, 2, **DOUBLE)), 1))
    for prior in (mixture, MultivariateNormal(MEAN, COVARIANCE)):
        annealing = HeavyBallAnnealing(gaussian, prior, 5, step_size=0.3)
        annealing.bound(10).backward()
        estimate, error = annealing.log_z(5000, seed=0)
        assert abs(estimate - math.log(3)) < 3 * error


# What is refused


@pytest.mark.parametrize(("n", "dtype"), [(0, torch.float32), (1, torch.float64)])
def test_shapes_and_dtypes_of_few_paths(n, dtype):
    force = nn.Linear(3, 3).to(dtype)  # without the time
    annealing = HeavyBallAnnealing(quartic, standard_normal(3, dtype), 3, force=force)
    x, log_weight = annealing.sample(n)
    assert (x.shape, log_weight.shape) == ((n, 3), (n,))
    assert {part.dtype for part in (x, log_weight, annealing.bound(2), *annealing.log_z(2))} == {dtype}


WRONG = {
    "events": ({"prior": Normal(torch.zeros(2), torch.ones(2))}, r"got \(2,\) and \(\)\. Fix: .*Independent\(prior, 1"),
    "batch": ({"prior": MultivariateNormal(torch.zeros(3, 2), torch.eye(2))}, r"got \(3,\) and \(2,\)\. Fix: .*Normal"),
    "support": ({"prior": Independent(Uniform(torch.zeros(2), torch.ones(2)), 1)}, "on all of R"),
    "damping": ({"damping": 0}, r"damping must be positive.*Fix: damping=1.0"),
    "schedule": ({"schedule": [0.0, 0.6, 0.5, 1.0]}, "schedule must increase from 0 to 1"),
    "equal": ({"schedule": [0.0, 0.5, 0.5, 1.0]}, "Fix: learn_schedule=False"),
    "column": (
        {"log_prob": lambda x: gaussian(x)[:, None]},
        r"got \(4, 1\). Fix: .*squeeze\(-1\)",
    ),
    "sum": ({"log_prob": lambda x: -x.square()}, r"got \(4, 2\). Fix: log_prob\(x\).sum\(-1\)"),
    "graph": ({"log_prob": lambda x: gaussian(x).detach()}, r"with a graph to x. Fix: remove .detach\(\)"),
    "outside": ({"log_prob": lambda x: positive(x - 100).sum(-1)}, r"on all of R\^d, got a point outside"),
    "force": ({"force": nn.Linear(2, 1).double()}, r"the shape of x, \(4, 2\), got \(4, 1\). Fix: 2 outputs"),
}


def positive(x):
    return Exponential(torch.ones(2), validate_args=True).log_prob(x)  # torch.compile turns the validation off


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused(name):
    options, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message):
        HeavyBallAnnealing(**{"log_prob": gaussian, "prior": standard_normal(), "steps": 3} | options).sample(4)


def test_transforms_of_functions_and_the_error_of_one_path_are_refused():
    annealing = HeavyBallAnnealing(gaussian, standard_normal(), 3)
    with pytest.raises(ValueError, match="n must be an integer >= 2"):  # the error of one weight is unknown
        annealing.log_z(1)
    with pytest.raises(ValueError, match=r"torch.func.*Fix: rsample\(n\) or bound\(n\) outside"):
        torch.func.grad(lambda p: torch.func.functional_call(annealing, p, (4,)))(dict(annealing.named_parameters()))


@pytest.mark.parametrize(
    ("log_prob", "options", "message"),
    [
        (quartic, {"steps": 64, "step_size": 3.0}, r"\d+ of 100 paths (overflow|, first in step).*smaller step_size"),
        (lambda x: x[:, 0].sqrt() - x.square().sum(-1), {}, r"the force is not finite on \d+ of 100 paths, first in"),
        (lambda x: gaussian(x).where(x[:, 0] < 0, math.inf), {}, r"log weights of \d+ of 100 paths are nan or inf"),
    ],
)
def test_what_is_not_finite_is_named(log_prob, options, message):
    annealing = HeavyBallAnnealing(log_prob, standard_normal(), **{"steps": 4, **options})
    with pytest.raises(hbnode.errors.NonFiniteError, match=message) as error:
        annealing.bound(100, seed=0)
    assert 0 < error.value.t <= 1


def test_weights_of_zero():
    def half(x, start=0):
        return torch.where(x[:, 0] > start, standard_normal().log_prob(x), -math.inf)

    annealing = HeavyBallAnnealing(half, standard_normal(), 4, step_size=0.3)
    estimate, error = annealing.log_z(20_000, seed=0)
    assert abs(estimate - math.log(0.5)) < 3 * error
    with pytest.raises(hbnode.errors.NonFiniteError, match=r"of 100 log weights are -inf, so the bound is -inf"):
        annealing.bound(100, seed=0)
    with pytest.raises(hbnode.errors.NonFiniteError, match="all 50 weights are 0"):
        HeavyBallAnnealing(lambda x: half(x, 100), standard_normal(), 4).log_z(50)
