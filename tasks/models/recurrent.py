"""Recurrent layers with a momentum rule, and controls without momentum.

A rule also changes the scale of the input and the bias of the forget gate. The controls separate these effects:

- "plain": the layer without a momentum rule (momentum 0, step size 1).
- "gain": the same step size s as "momentum", but momentum 0.
- "forget": without momentum, but with the forget-gate bias that "momentum" approaches; only for an LSTM. An LSTM has
  two forget-gate biases b. The rule filters the input bias, which grows to b s / (1 - mu), so the sum is b + b s / (1 -
  mu). In "forget" each bias is half of this sum.
- "momentum", "nag", "sr" (scheduled restart), "adam", "rmsprop", "adaptive": the rules.

Some tasks also have "oscillators", :func:`make_oscillators`, with as many parameters as the plain LSTM.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn import rules
from hbnode.optim import tanh_hidden
from tasks.common.config import TaskConfig, option

VARIANTS: tuple[str, ...] = ("plain", "gain", "forget", "momentum", "nag", "sr", "adam", "rmsprop", "adaptive")
OSCILLATORS = "oscillators"
CELLS = ("lstm", "rnn", "gru", "dtriv")
# Variants that exist only for --cell lstm, with the reason.
LSTM_ONLY = {"forget": "which has a forget gate", OSCILLATORS: "whose number of parameters they have"}
# The fields of RuleOptions that each variant uses.
USES = {
    "plain": (),
    "gain": ("step_size",),
    "forget": ("momentum", "step_size"),
    "momentum": ("momentum", "step_size"),
    "nag": ("step_size",),
    "sr": ("step_size", "restart"),
    "adam": ("momentum", "step_size", "beta"),
    "rmsprop": ("step_size", "beta"),
    "adaptive": ("step_size",),
    OSCILLATORS: (),
}
LAYERS = {
    "lstm": hbnode.nn.MomentumLSTM,
    "rnn": hbnode.nn.MomentumRNN,
    "gru": hbnode.nn.MomentumGRU,
    "dtriv": hbnode.nn.MomentumDTRIV,
}
# The rules other than momentum, with the prefixes of their layers' names in the papers.
RULES = {
    "nag": (rules.NAG, "NAG"),
    "sr": (rules.ScheduledRestart, "SR"),
    "adam": (rules.Adam, "Adam"),
    "rmsprop": (rules.RMSProp, "RMSProp"),
    "adaptive": (rules.AdaptiveMomentum, "AdaptiveMomentum"),
}


@dataclasses.dataclass(frozen=True)
class RuleOptions:
    """The hyperparameters of a momentum rule.

    Attributes:
        momentum: the coefficient mu; 0 without momentum, or if the rule computes mu.
        step_size: the factor s of the input.
        beta: decay of the running mean of the squared input.
        restart: number of time steps between two restarts.
        forget_scale: factor of an LSTM's forget-gate bias.
    """

    momentum: float = 0.0
    step_size: float = 1.0
    beta: float = 0.9
    restart: int = 40
    forget_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(TaskConfig):
    """Command-line options of tasks with recurrent layers."""

    models = VARIANTS
    positive = "step_size restart hidden"

    model: str = option("momentum", "one of {models}, several with commas between, or all")
    cell: str = option("lstm", "the layer that the rule is put into", CELLS)
    momentum: float | None = option(None, "mu of momentum and adam; default: from the task's table", below=1)
    step_size: float | None = option(None, "s of all models except plain; default: from the task's table")
    beta: float | None = option(None, "decay of the mean square in adam and rmsprop; default: the table", below=1)
    restart: int | None = option(None, "samples between two restarts in sr; default: the table")
    hidden: int = option(128, "size of the hidden state")
    forget_bias: float = option(1.0, "initial value of both biases of an LSTM's forget gate", least=None)

    def chosen(self) -> tuple[str, ...]:
        """Return the variants that ``--model`` selects. "all" selects those that exist for the cell."""
        names = super().chosen()
        if self.cell == "lstm":
            return names
        for name, reason in LSTM_ONLY.items():
            if name in names and self.model != "all":
                raise ValueError(f"--model {name} is for --cell lstm, {reason}, got {self.cell}")
        return tuple(name for name in names if name not in LSTM_ONLY)

    @property
    def memory(self) -> int:
        """The approximate number of time steps that oscillators must remember."""
        return 100

    def check(self) -> None:
        """Raise ValueError for invalid options, and for a hyperparameter that no selected model uses."""
        super().check()
        used = {name for model in self.chosen() for name in USES[model]}
        for name in ("momentum", "step_size", "beta", "restart"):
            if getattr(self, name) is not None and name not in used:
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"--model {self.model} does not use {flag}. Fix: leave it out.")

    def rule_options(self, table: Mapping[str, RuleOptions]) -> RuleOptions:
        """Return the hyperparameters of the model's rule: those of the table, unless options replace them.

        Arguments:
            table: the task's hyperparameters by model. Models that are not in the table use those of "momentum".
        """
        wanted = table.get(self.model, table["momentum"])
        given = {name: getattr(self, name) for name in USES[self.model]}
        values = {name: getattr(wanted, name) if value is None else value for name, value in given.items()}
        if self.model == "forget":
            return RuleOptions(forget_scale=(1 + values["step_size"] / (1 - values["momentum"])) / 2)
        return RuleOptions(**values)

    def make_layer(
        self, input_size: int, table: Mapping[str, RuleOptions], *, hidden_size: int = 0, **options: Any
    ) -> nn.Module:
        """Return the recurrent layer that the options describe.

        Arguments:
            input_size: features of a sample.
            table: see :meth:`rule_options`.
            hidden_size: size of h; 0: the size in the options.
            options: further arguments of the layer, such as ``batch_first``.
        """
        if self.model == OSCILLATORS:
            return make_oscillators(input_size, hidden_size or self.hidden, self.memory)
        rule = self.rule_options(table)
        names = USES[self.model] if self.model in RULES else ("momentum", "step_size")
        kind: Any = RULES[self.model][0] if self.model in RULES else rules.Momentum
        if self.cell == "lstm":
            options["forget_bias"] = self.forget_bias * rule.forget_scale
        numbers = {name: getattr(rule, name) for name in names}
        return LAYERS[self.cell](input_size, hidden_size or self.hidden, rule=kind(**numbers), **options)


def make_oscillators(input_size: int, hidden_size: int, memory: int) -> hbnode.nn.OscillatorStack:
    """Return two blocks of oscillators and a linear readout with the output size and the parameters of an LSTM.

    Arguments:
        input_size: features of a sample.
        hidden_size: features of the output.
        memory: the slowest oscillators have a cycle of ten times this number of samples.
    """
    slowest = 0.1 / memory
    frequency, decay = (slowest, max(0.25, slowest)), (slowest, max(0.1, slowest))

    def stack(width: int) -> hbnode.nn.OscillatorStack:
        return hbnode.nn.OscillatorStack(input_size, width, output_size=hidden_size, frequency=frequency, decay=decay)

    with torch.device("meta"):
        parameters = sum(p.numel() for p in nn.LSTM(input_size, hidden_size).parameters())
    return hbnode.nn.match_parameters(stack, parameters)


def title(model: str, cell: str) -> str:
    """Return the title of a model variant in tables and figures."""
    if model == OSCILLATORS:
        return "oscillators"
    controls = {"plain": "", "gain": ", same input scale", "forget": ", same forget bias"}
    if model in controls:
        return cell.upper() + controls[model]
    return (RULES[model][1] if model in RULES else "Momentum") + cell.upper()


class LayerWithReadout(nn.Module):
    """A recurrent layer, and a linear output layer that takes h.

    Arguments:
        layer: the recurrent layer, with batch_first=True.
        hidden: size of h.
        outputs: number of features of an output.
        last: whether there is a single output, after the last step, instead of one after each step.
    """

    def __init__(self, layer: nn.Module, hidden: int, outputs: int, *, last: bool = False) -> None:
        super().__init__()
        self.layer, self.last = layer, last
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (batch, T, outputs), or (batch, outputs), for inputs (batch, T, features)."""
        h, _ = self.layer(x)
        return self.head(h[:, -1] if self.last else h)

    def with_hidden(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the outputs, and h with the weights of the squared changes of h in structural damping.

        The weights of a tanh RNN are 1 / (1 - h²), see :func:`hbnode.optim.tanh_hidden`; those of other layers are 1.
        """
        h, _ = self.layer(x)
        is_tanh = isinstance(self.layer, hbnode.nn.MomentumRNN)
        return self.head(h), tanh_hidden(h) if is_tanh else (h, torch.ones_like(h))
