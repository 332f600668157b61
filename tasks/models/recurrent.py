"""Recurrent layers with a momentum rule, and the layers without one that they are to be compared with.

A rule changes how the input reaches the gates, and with it the size of the input and the bias of the forget gate. The
comparison tells the three apart:

- "plain": the layer without a rule: momentum 0, step size 1.
- "gain": the input at the same step size s, without momentum.
- "forget": the forget gate's bias that "momentum" has in the long run, without momentum; of an LSTM only. Of its two
  biases b, the rule filters the input's, which grows to b s / (1 - mu); here each is half of b + b s / (1 - mu).
- "momentum", "nag", "sr" (scheduled restart), "adam", "rmsprop", "adaptive": the rules.

Of some tasks there is also "oscillators", which has no cell: :func:`make_oscillators`, with as many parameters as the
plain LSTM has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import hbnode
from hbnode.nn import rules
from tasks.common.config import TaskConfig, option

VARIANTS: tuple[str, ...] = ("plain", "gain", "forget", "momentum", "nag", "sr", "adam", "rmsprop", "adaptive")
OSCILLATORS = "oscillators"
CELLS = ("lstm", "rnn", "gru", "dtriv")
# Of --cell lstm alone, with the reason.
LSTM_ONLY = {"forget": "which has a forget gate", OSCILLATORS: "whose parameters they equal; they have no cell"}
# The values of a RuleOptions that a variant is made from; others say nothing to it.
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
# The rules beside momentum, with the papers' names of the layers that have them.
RULES = {
    "nag": (rules.NAG, "NAG"),
    "sr": (rules.ScheduledRestart, "SR"),
    "adam": (rules.Adam, "Adam"),
    "rmsprop": (rules.RMSProp, "RMSProp"),
    "adaptive": (rules.AdaptiveMomentum, "AdaptiveMomentum"),
}


@dataclasses.dataclass(frozen=True)
class RuleOptions:
    """What a variant runs with.

    Attributes:
        momentum: mu; 0 where there is none, or where the rule sets it itself.
        step_size: s, the factor of the input.
        beta: decay of the running mean of the squared input.
        restart: samples between two restarts.
        forget_scale: factor of the bias of an LSTM's forget gate.
    """

    momentum: float = 0.0
    step_size: float = 1.0
    beta: float = 0.9
    restart: int = 40
    forget_scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class RecurrentConfig(TaskConfig):
    """Options of the tasks of recurrent layers."""

    models = VARIANTS
    positive = "step_size restart hidden"

    model: str = option("momentum", "one of {models}, several with commas between, or all")
    cell: str = option("lstm", "the layer that the rule is put into", CELLS)
    momentum: float | None = option(None, "mu of momentum and adam; if not given, as the task's table has it", below=1)
    step_size: float | None = option(None, "s of all but plain, likewise")
    beta: float | None = option(None, "decay of the mean square in adam and rmsprop, likewise", below=1)
    restart: int | None = option(None, "samples between two restarts in sr, likewise")
    hidden: int = option(128, "size of h")
    forget_bias: float = option(1.0, "bias of an LSTM's forget gate at first, each of the two", least=None)

    def chosen(self) -> tuple[str, ...]:
        """The variants that ``--model`` names; all are those that the cell has."""
        names = super().chosen()
        if self.cell == "lstm":
            return names
        for name, reason in LSTM_ONLY.items():
            if name in names and self.model != "all":
                raise ValueError(f"--model {name} is for --cell lstm, {reason}, got {self.cell}")
        return tuple(name for name in names if name not in LSTM_ONLY)

    @property
    def memory(self) -> int:
        """For how many samples something is to be remembered, about, which oscillators go by."""
        return 100

    def check(self) -> None:
        """Refuse what no run can have, and values of a rule that no variant asked for would look at."""
        super().check()
        used = {name for model in self.chosen() for name in USES[model]}
        for field in dataclasses.fields(RuleOptions):
            value, flag = getattr(self, field.name, None), "--" + field.name.replace("_", "-")
            if value is None:
                continue
            if field.name not in used:
                raise ValueError(f"{flag} says nothing to --model {self.model}. Fix: leave it out.")

    def rule_options(self, table: Mapping[str, RuleOptions]) -> RuleOptions:
        """What the variant ``model`` runs with.

        Arguments:
            table: the task's values by variant; "gain" and "forget" go by those of "momentum", as a rule
                does that the table leaves out. Values that the options give come first.
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
        """The layer that the options describe.

        Arguments:
            input_size: features of a sample.
            table: see :meth:`rule_options`.
            hidden_size: size of h; 0 is that of the options.
            options: further ones of the layer, such as ``batch_first``.
        """
        if self.model == OSCILLATORS:
            return make_oscillators(input_size, hidden_size or self.hidden, self.memory)
        return make_layer(
            self.model,
            self.cell,
            input_size,
            hidden_size or self.hidden,
            self.rule_options(table),
            forget_bias=self.forget_bias,
            **options,
        )


def make_layer(
    model: str,
    cell: str,
    input_size: int,
    hidden_size: int,
    rule: RuleOptions,
    *,
    forget_bias: float = 1.0,
    init: str = "cayley",
    **options: Any,
) -> nn.Module:
    """A layer of :mod:`hbnode.nn.recurrent`.

    Arguments:
        model: one of :data:`VARIANTS`.
        cell: one of :data:`CELLS`.
        input_size: features of a sample.
        hidden_size: size of h.
        rule: what :meth:`RecurrentConfig.rule_options` returned.
        forget_bias: of an LSTM, the bias of its forget gate, before the rule's factor; other cells have none.
        init: of a DTRIV, how its orthogonal weight starts.
        options: further ones of the layer, such as ``num_layers``, ``batch_first``.
    """
    names = USES[model] if model in RULES else ("momentum", "step_size")
    kind = RULES[model][0] if model in RULES else rules.Momentum
    if cell == "lstm":
        options["forget_bias"] = forget_bias * rule.forget_scale
    if cell == "dtriv":
        options["init"] = init
    numbers = {name: getattr(rule, name) for name in names}
    return LAYERS[cell](input_size, hidden_size, rule=kind(**numbers), **options)


def make_oscillators(input_size: int, hidden_size: int, memory: int) -> hbnode.nn.OscillatorStack:
    """Two blocks of oscillators with a linear readout as large as an LSTM's h, and as many parameters as it has.

    Arguments:
        input_size: features of a sample.
        hidden_size: features of the output.
        memory: the slowest oscillators have a cycle in ten times as many samples.
    """
    slowest = 0.1 / memory
    frequency, decay = (slowest, max(0.25, slowest)), (slowest, max(0.1, slowest))

    def stack(width: int) -> hbnode.nn.OscillatorStack:
        return hbnode.nn.OscillatorStack(input_size, width, output_size=hidden_size, frequency=frequency, decay=decay)

    with torch.device("meta"):
        parameters = sum(p.numel() for p in nn.LSTM(input_size, hidden_size).parameters())
    return hbnode.nn.match_parameters(stack, parameters)


def title(model: str, cell: str) -> str:
    """What a variant is called in tables and figures."""
    if model == OSCILLATORS:
        return "oscillators"
    controls = {"plain": "", "gain": ", same step size", "forget": ", same forget bias"}
    if model in controls:
        return cell.upper() + controls[model]
    return (RULES[model][1] if model in RULES else "Momentum") + cell.upper()
