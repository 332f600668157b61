"""Signatures of the recurrent layers and cells: literal, and checked at the call."""

import inspect

import pytest
import torch

import hbnode
from hbnode.nn import recurrent, rules
from tests.momentum_layers import CELLS

ALL = [*("Momentum" + cell + suffix for cell in CELLS.values() for suffix in ("", "Cell")), "DTRIV", "DTRIVCell"]
every_name = pytest.mark.parametrize("name", ALL)


def parameters(name):
    return [*inspect.signature(getattr(recurrent, name)).parameters.values()]


@every_name
def test_a_signature_is_written_out(name):
    kind = getattr(recurrent, name)
    assert not {p.kind for p in parameters(name)} & {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    assert "__init__" in vars(kind)
    assert inspect.signature(kind).parameters["hidden_size"].annotation is int  # help() shows it without quotes
    for part in ("t = ", "Shape:", "Raises:"):
        assert part in inspect.getdoc(kind)


@pytest.mark.parametrize("cell", CELLS.values())
def test_a_cell_has_the_arguments_of_its_layer_for_one_step(cell):
    layer, one = ({p.name: p for p in parameters("Momentum" + cell + suffix)} for suffix in ("", "Cell"))
    assert set(layer) - set(one) == {"num_layers", "batch_first", "dropout", "bidirectional", "compile"}
    assert set(one) <= set(layer)
    assert all(one[name].default == layer[name].default for name in one)
    assert list(one)[:4] == ["input_size", "hidden_size", "momentum", "step_size"]


@every_name
def test_a_misspelt_argument_is_named_with_the_class(name):
    with pytest.raises(TypeError, match=rf"^{name}\.__init__\(\) got an unexpected keyword argument 'hiden_size'"):
        getattr(recurrent, name)(3, hiden_size=4)


def test_torchs_compile_is_not_hidden_by_the_argument():
    layer, x = hbnode.nn.MomentumLSTM(3, 4), torch.ones(5, 2, 3)
    expected, _ = layer(x)
    layer.compile(backend="eager")
    assert torch.equal(layer(x)[0], expected)


@every_name
def test_every_argument_arrives(name):
    """Values off the defaults, each found on the module."""
    values = {"hidden_size": 4, "num_layers": 2, "nonlinearity": "relu", "bias": False, "batch_first": True}
    values |= {"dropout": 0.25, "bidirectional": True, "init": "henaff", "forget_bias": 3.0}
    values |= {"rule": rules.Adam(eps=0.1), "compile": True}
    names = [p.name for p in parameters(name)]
    given = {key: value for key, value in values.items() if key in names}
    module = getattr(recurrent, name)(3, **given, device="meta", dtype=torch.float64)
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert all(p.is_meta for p in module.parameters())
    for key in set(given) - {"nonlinearity", "bias", "compile"}:
        assert getattr(module, key) == given[key], key
    assert not any(key.startswith("bias_ih") for key, _ in module.named_parameters())
    assert ("compile=True" in repr(module)) == ("compile" in given)
    assert ("nonlinearity" in given) == (type(module.step).__name__ == "ReLUStep")
