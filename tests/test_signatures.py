"""What an editor, ``help`` and an error show of the front of the library."""

import inspect
import re
from typing import get_args

import pytest
import torch
from torch import nn

import hbnode
from hbnode.solve import settings
from hbnode.solve.methods import ALL_METHODS, METHODS, TORCHDIFFEQ_METHODS, NativeMethod, TorchdiffeqMethod

MODULES = [
    *(hbnode, hbnode.nn, hbnode.nn.functional, hbnode.nn.rules, hbnode.solve, hbnode.optim, hbnode.distributions),
    *(hbnode.data, hbnode.diagnostics, hbnode.diagnostics.plot, hbnode.errors),
]
NAMES = {f"{module.__name__}.{name}": getattr(module, name) for module in MODULES for name in module.__all__}


def _with_methods(public):
    """A public function or class, and what a class adds to its bases under a public name."""
    yield public
    for name, method in vars(public).items() if isinstance(public, type) else ():
        if not name.startswith("_") and (inspect.isfunction(method) or isinstance(method, (property, classmethod))):
            yield getattr(public, name)


PUBLIC = list(
    dict.fromkeys(
        each
        for public in NAMES.values()
        if inspect.isfunction(public) or (isinstance(public, type) and public.__module__.startswith("hbnode"))
        for each in _with_methods(public)
    )
)


def _parameters(public):
    return {name: p for name, p in inspect.signature(public).parameters.items() if name != "self"}


@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: getattr(public, "__qualname__", "property"))
def test_what_is_public_and_every_argument_with_its_default_is_documented(public):
    assert inspect.getdoc(public)
    if isinstance(public, property) or "Arguments:\n" not in inspect.getdoc(public):
        return
    parameters = _parameters(public)
    if public.__module__ != hbnode.diagnostics.plot.__name__ and public.__name__ != "plot":  # these go to matplotlib
        assert not [p for p in parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    text = inspect.getdoc(public).split("Arguments:\n")[1]
    entries = dict(re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\w+:|\Z)", text, re.M | re.S))
    for name, parameter in parameters.items():
        described = " ".join(entries[name].split())
        if parameter.default is parameter.empty:
            assert "Default:" not in described, name
        else:
            default = parameter.default
            shown = f'"{default}"' if isinstance(default, str) else {1e-5: "1e-5", 1e-6: "1e-6"}.get(default, default)
            shown = default.__name__ if callable(default) else str(shown)
            assert shown in described.replace("``", "").partition("Default: ")[2], (name, described)


def test_a_heavy_ball_block_has_every_argument_of_its_block_and_of_its_fields():
    of_block, own = _parameters(hbnode.ODEBlock), _parameters(hbnode.HeavyBallODEBlock)
    assert of_block.keys() - own.keys() == {"field"}
    assert _parameters(hbnode.GHBNODE).keys() <= own.keys()
    for other in (own, _parameters(hbnode.odeint)):
        for name in (of_block.keys() & other.keys()) - {"field"}:
            assert of_block[name].replace(kind=other[name].kind) == other[name]


def test_the_literals_are_the_registries():
    assert get_args(NativeMethod) == tuple(METHODS)
    assert get_args(TorchdiffeqMethod) == tuple(TORCHDIFFEQ_METHODS)
    assert get_args(settings.Method) == tuple(ALL_METHODS)
    assert get_args(settings.Gradient) == settings.GRADIENTS


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"method": "nystrom_8"}, "method='nystrom8'"),
        ({"method": "rk45"}, "method='dopri5'"),
        ({"gradient": "backprop"}, "gradient='direct'"),
        ({"gradient": "adjoint_method", "method": "dopri5"}, "gradient='adjoint'"),
        ({"gradient": "checkpoint", "method": "dopri5"}, "gradient='direct'"),
        ({"per_sample": "sample"}, "per_sample=True"),
        ({"steps": "four"}, "steps=8"),
    ],
    ids=str,
)
def test_an_unknown_name_suggests_the_nearest(given, fix):
    for solve, arguments in (
        (hbnode.odeint, (lambda t, h: -h, X, [0.0, 1.0])),
        (hbnode.HeavyBallODEBlock, (nn.Identity(),)),
        (hbnode.ODERNN, (1, 4)),
    ):
        with pytest.raises(ValueError, match=rf"Fix: {re.escape(fix)}"):
            solve(*arguments, **given)


X = torch.ones(3, 2)
NORMAL = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)
SERIES = torch.ones(3, 4, 2), [0.0, 0.1, 0.3, 1.0]
SOLVERS = {  # what each module solves with these arguments, which are also its attributes
    "ODEBlock": (lambda **s: hbnode.ODEBlock(hbnode.NODE(nn.Linear(2, 2)), **s), lambda block: block(X)),
    "HeavyBallODEBlock": (
        lambda **s: hbnode.HeavyBallODEBlock(nn.Linear(2, 2), **s),
        lambda block: block(X, [0.0, 1.0, 3.0]),
    ),
    "ODERNN": (lambda **s: hbnode.ODERNN(2, 3, **s), lambda rnn: rnn(*SERIES)[0]),
    "LatentODE": (lambda **s: hbnode.nn.LatentODE(2, 2, 3, **s), lambda model: model.elbo(*SERIES).value),
    "LatentSDE": (lambda **s: hbnode.nn.LatentSDE(2, 2, 3, **s), lambda model: model.elbo(*SERIES).value),
    "HeavyBallFlow": (
        lambda **s: hbnode.distributions.HeavyBallFlow(hbnode.nn.MLP(2, [3], 2), 2, **s),
        lambda flow: flow(X),
    ),
    "HeavyBallAnnealing": (
        lambda **s: hbnode.distributions.HeavyBallAnnealing(NORMAL.log_prob, NORMAL, **{"steps": 2} | s),
        lambda sampler: sampler.log_z(3).estimate,
    ),
}
CHANGES = {
    "method": ["tsit5", "dopri5", "blanes_moan4"], "rtol": [1e-6], "atol": [1e-6], "steps": [3], "max_steps": [1],
    "gradient": ["checkpoint", "direct", "adjoint"], "per_sample": [True, False], "save": ["exact"],
    "jump_times": [[0.5]], "options": [{"max_nfe": 1}, {"step_size": 0.1}, {"wrong": 1}], "adjoint_options": [{}],
    "compile": [True], "t_span": [(0.0, 2.0), (1.0, 1.0)], "dt": [0.01, -1.0], "checkpoint": [True], "step_size": [0.5],
}  # fmt: skip


@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_setting_that_is_set_later_is_used_or_refused(name, monkeypatch):
    make, call = SOLVERS[name]

    def cannot_compile(*_, **__):
        raise RuntimeError("compiled")

    def attempt(function, *arguments, **settings):
        try:
            return function(*arguments, **settings)
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:
            return str(error)

    def shown(module):
        module.load_state_dict(state, strict=False)
        torch.manual_seed(0)
        return f"{module} {call(module).tolist()} {getattr(module, 'nfe', None)}"

    monkeypatch.setattr(torch, "compile", cannot_compile)
    for setting in [setting for setting in CHANGES if setting in inspect.signature(type(make())).parameters]:
        for value in CHANGES[setting]:
            later = make()
            state, first = later.state_dict(), attempt(make, **{setting: value})
            error = attempt(setattr, later, setting, value)
            if error is None:  # it was set
                expected = first if isinstance(first, str) else attempt(shown, first)
                assert attempt(shown, later) == expected, (setting, value)
            else:
                assert re.search(r"Fix: |has no setter", error), (setting, value, error)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: hbnode.HeavyBallODEBlock(nn.Identity(), tol=1e-3),
            "HeavyBallODEBlock.*Fix: rtol=1e-3, atol",
        ),
        (lambda: hbnode.odeint(lambda t, y: -y, X, [0.0, 1.0], adjoint_params=()), "Fix: leave it out"),
        (lambda: hbnode.ODEBlock(hbnode.NODE(nn.Identity()), solver="rk4"), "Fix: method='tsit5'"),
        (lambda: hbnode.HBNODE(nn.Identity(), dampings=0.1), "Fix: damping= for dampings="),
        (lambda: hbnode.ODERNN(1, 2, batch_first=True), r"Fix: leave it out, x is \(batch, T, features\)"),
        (lambda: hbnode.ODERNN(1, 2, field="anod"), "Fix: 'anode'"),
        (lambda: hbnode.nn.MomentumLSTM(1, 2, proj_size=1), "Fix: a torch.nn.Linear after"),
        (lambda: hbnode.odeint_adjoint, r"Fix: hbnode.odeint\(.*gradient='adjoint'\)"),
        (lambda: hbnode.MomentumLSTM, "Fix: hbnode.nn.MomentumLSTM"),
        (lambda: hbnode.odeint(hbnode.HeavyBallODEBlock(nn.Identity()), X, [0.0, 1.0]), "Fix: block.field"),
        (lambda: hbnode.odeint(nn.Linear(2, 2), X, [0.0, 1.0]), r"Linear takes \(input\). Fix: hbnode.NODE"),
        (lambda: hbnode.odeint(lambda h: -h, X, [0.0, 1.0]), r"takes \(h\). Fix: hbnode.NODE\(f\)"),
        (lambda: hbnode.odeint(hbnode.NODE, X, [0.0, 1.0]), r"the class NODE. Fix: NODE\(net\)"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Tanh), r"the class Tanh. Fix: Tanh\(\)"),
        (lambda: hbnode.HeavyBallODEBlock(hbnode.NODE(nn.Identity())), r"NODE. Fix: HBNODE\(field"),
        (lambda: hbnode.ODERNN(1, 2, cell=nn.LSTMCell), "cell must map .* got LSTMCell. Fix: cell='gru'"),
        (lambda: hbnode.ODERNN(1, 2, cell=nn.GRUCell(1, 2)), r"Fix: cell=torch.nn.GRUCell\(1, 4\)"),
        (lambda: hbnode.HeavyBallODEBlock(nn.Linear(3, 3))(X), r"h of shape \(3, 2\).*Fix: a first and a"),
        (lambda: hbnode.ODERNN(2, 3)(torch.ones(4, 3, 2), [0, 1, 2, 3]), r"Fix: x.transpose\(0, 1\)"),
        (lambda: hbnode.nn.HeavyBallMemory(64, 5), "Fix: num_heads=4, or embed_dim=65"),
        (lambda: hbnode.odeint(lambda t, y: y + "a", X, [0.0, 1.0]), "^unsupported operand"),
    ],
)
def test_a_natural_mistake_is_told_what_to_write(call, message):
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        call()
