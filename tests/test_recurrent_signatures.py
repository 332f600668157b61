"""Signatures and docstrings of the recurrent layers and cells: literal, complete, and checked at the call."""

import dataclasses
import inspect
import re

import pytest
import torch

import hbnode
from hbnode import recurrent
from hbnode.recurrent import rules

PREFIXES = {
    "Momentum": rules.Momentum,
    "NAG": rules.NAG,
    "SR": rules.ScheduledRestart,
    "Adam": rules.Adam,
    "RMSProp": rules.RMSProp,
    "AdaptiveMomentum": rules.AdaptiveMomentum,
}
GENERIC = [cell + suffix for cell in ("RNN", "LSTM", "GRU", "DTRIV") for suffix in ("", "Cell")]
NAMED = [(prefix, name) for prefix in PREFIXES for name in GENERIC]
ALL = [*GENERIC, *(prefix + name for prefix, name in NAMED)]
every_name = pytest.mark.parametrize("name", ALL)


def parameters(name):
    return [p.replace(annotation=p.empty) for p in inspect.signature(getattr(recurrent, name)).parameters.values()]


def test_all_names_are_covered():
    kinds = (recurrent.base.RecurrentLayer, recurrent.base.RecurrentCell)
    found = {name for name, kind in vars(recurrent).items() if inspect.isclass(kind) and issubclass(kind, kinds)}
    assert found == set(ALL)
    assert set(ALL) <= set(recurrent.__all__)
    assert set(ALL) - set(hbnode.__all__) == set(GENERIC) - {"DTRIV", "DTRIVCell"}


@every_name
def test_a_signature_is_written_out(name):
    kind = getattr(recurrent, name)
    assert not {p.kind for p in parameters(name)} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert "__init__" in vars(kind)
    assert "__signature__" not in vars(kind)
    assert inspect.signature(kind).parameters["hidden_size"].annotation is int  # help() shows it without quotes
    found = inspect.getsource(kind.__init__)
    assert all(re.search(rf"^        {p.name}: .*,$", found, re.MULTILINE) for p in parameters(name))


@pytest.mark.parametrize(("prefix", "generic"), NAMED)
def test_a_named_class_takes_the_coefficients_in_place_of_the_rule(prefix, generic):
    keyword = inspect.Parameter.KEYWORD_ONLY
    usual = parameters(generic)
    coefficients = [
        inspect.Parameter(field.name, keyword, default=field.default) for field in dataclasses.fields(PREFIXES[prefix])
    ]
    if generic.endswith("Cell"):  # by position after the sizes
        coefficients = [p.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in coefficients]
        expected = [*usual[:2], *coefficients, *(p for p in usual[2:] if p.name != "rule")]
    else:
        at = [p.name for p in usual].index("rule")
        expected = [*usual[:at], *coefficients, *usual[at + 1 :]]
    assert parameters(prefix + generic) == expected


@every_name
def test_the_docstring_has_every_argument_with_its_default(name):
    text = inspect.getdoc(getattr(recurrent, name))
    section = re.search(r"^Arguments:\n((?:    .*\n)+)", text, re.MULTILINE)[1]
    entries = re.findall(r"^    (\w+): ((?:.|\n      )*)", section, re.MULTILINE)
    assert [name for name, _ in entries] == [p.name for p in parameters(name)]
    for (_, meaning), parameter in zip(entries, parameters(name), strict=True):
        default = re.search(r"\(default: (.*?)\)\.$", meaning.replace("\n", " "))
        if parameter.default is parameter.empty:
            assert not default
        elif parameter.default is None:
            assert default[1] == "torch's"
        elif parameter.name != "rule":
            assert eval(default[1]) == parameter.default
    for part in ("t = ", "Shape:", "Raises:"):
        assert part in text


def test_each_rule_has_an_example():
    for prefix in PREFIXES:
        assert ">>> " in getattr(recurrent, prefix + "LSTM").__doc__
        assert ">>> " in getattr(recurrent, prefix + "LSTMCell").__doc__


@every_name
def test_a_misspelt_argument_is_named_with_the_class(name):
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) got an unexpected keyword argument 'hiden_size'"):
        getattr(recurrent, name)(3, hiden_size=4)


def test_torchs_compile_is_not_hidden_by_the_argument():
    layer, x = hbnode.MomentumLSTM(3, 4), torch.ones(5, 2, 3)
    expected, _ = layer(x)
    layer.compile(backend="eager")
    assert torch.equal(layer(x)[0], expected)


@every_name
def test_every_argument_arrives(name):
    """Values off the defaults, each found on the module."""
    values = {"hidden_size": 4, "num_layers": 2, "nonlinearity": "relu", "bias": False, "batch_first": True}
    values |= {"dropout": 0.25, "bidirectional": True, "momentum_space": "hidden", "init": "henaff", "forget_bias": 3.0}
    coefficients = {"momentum": 0.5, "step_size": 0.7, "restart": 7, "beta": 0.8, "eps": 1e-3, "delta": 0.2}
    names = [p.name for p in parameters(name)]
    given = {key: value for key, value in {**values, **coefficients, "compile": True}.items() if key in names}
    options = {"rule": rules.Adam(eps=0.1)} if "rule" in names else {}
    module = getattr(recurrent, name)(3, **given, **options, device="meta", dtype=torch.float64)
    assert module.rule == options.get("rule", module.rule)
    if not options:
        assert dataclasses.asdict(module.rule) == {key: value for key, value in given.items() if key in coefficients}
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert all(p.is_meta for p in module.parameters())
    for key in ("num_layers", "batch_first", "dropout", "bidirectional", "momentum_space", "init", "forget_bias"):
        if key in given:
            assert getattr(module, key) == given[key], key
    assert module.hidden_size == 4
    assert not any(key.startswith("bias_ih") for key, _ in module.named_parameters())
    assert ("compile=True" in repr(module)) == ("compile" in given)
    assert ("nonlinearity" in given) == (type(module.step).__name__ == "ReLUStep")
