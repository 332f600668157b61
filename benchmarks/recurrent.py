"""Speed of momentum recurrent layers compared with torch.nn and the papers' loops: ``python -m benchmarks.recurrent``.

Five tables. *training*: a step of each rule's LSTM over that of ``nn.LSTM``, from rest, and carried on with the state
of an earlier chunk. *cells*: the same over the per-step Python cell of the MomentumRNN paper's appendix F, as the batch
shrinks. *orthogonal*: DTRIV layers over a plain loop with the same parametrisation. *inference*: a forward pass without
gradient over that of ``nn.LSTM``. *memory*: what they add to the peak, as in table 15, each in a fresh process.

A training step is forward, the mean square of all outputs, backward. Times are medians of runs that take turns in one
process, on one thread; ratios are medians over the rounds, each over its own rival. Memory is the process's. Writes
JSON with the machine in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.harness import Options, Row, added_memory, in_fresh_process, interleaved, milliseconds, program, ratio
from hbnode.nn import recurrent
from hbnode.nn.rules import RuleName

# By the papers' names: an AdamLSTM is a MomentumLSTM whose rule is "adam".
RULES: dict[str, RuleName] = {
    "Momentum": "momentum",
    "NAG": "nag",
    "SR": "restart",
    "Adam": "adam",
    "RMSProp": "rmsprop",
}
OURS = [f"{rule}LSTM" for rule in RULES]
CARRIED = [f"{name}, carried" for name in OURS]


@dataclass(frozen=True)
class Setting:
    """The sizes of a benchmark problem."""

    time: int
    batch: int
    hidden: int
    inputs: int

    def __str__(self) -> str:
        """Return the sizes as "T x batch x hidden x inputs"."""
        return f"{self.time} x {self.batch} x {self.hidden} x {self.inputs}"


TINY = Setting(6, 2, 4, 1)
LSTMS = (Setting(784, 64, 128, 1), Setting(200, 32, 158, 129))
BATCHES = tuple(Setting(784, batch, 128, 1) for batch in (64, 8, 1))
ORTHOGONAL = Setting(784, 128, 170, 1)
INFERENCE = (
    Setting(100, 1, 64, 1),
    *(Setting(784, batch, *sizes) for sizes in ((64, 1), (128, 1), (158, 129)) for batch in (1, 8, 32)),
)
PAPER = Setting(784, 128, 256, 1)


class PaperLSTM(nn.Module):
    """The cell of appendix F in a loop over time, as the authors ran it; with ``beta`` that of Adam, equation 15."""

    def __init__(
        self, inputs: int, hidden: int, momentum: float = 0.6, step_size: float = 0.6, beta: float | None = None
    ) -> None:
        super().__init__()
        self.hidden, self.momentum, self.step_size, self.beta = hidden, momentum, step_size, beta
        self.x2h = nn.Linear(inputs, 4 * hidden)
        self.h2h = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The outputs (T, batch, hidden) of x (T, batch, inputs)."""
        h = c = x.new_zeros(x.shape[1], self.hidden)
        v = m = x.new_zeros(x.shape[1], 4 * self.hidden)
        outputs = []
        for sample in x:
            wx = self.x2h(sample)
            drive = v = self.momentum * v + self.step_size * wx
            if self.beta is not None:
                m = self.beta * m + (1 - self.beta) * wx * wx
                drive = v / torch.sqrt(m + 1e-8)
            i, f, g, o = (drive + self.h2h(h)).chunk(4, 1)
            c = c * torch.sigmoid(f) + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), None


class LoopDTRIV(nn.Module):
    """An orthogonal RNN as a plain loop: h = modrelu(B h + v), v = mu v + s W x; without mu, v = W x."""

    def __init__(self, inputs: int, hidden: int, momentum: float | None, step_size: float) -> None:
        super().__init__()
        self.hidden, self.momentum, self.step_size = hidden, momentum, step_size
        self.encoder = nn.Linear(inputs, hidden, bias=False)
        self.recurrent = parametrizations.orthogonal(nn.Linear(hidden, hidden, bias=False))
        self.bias = nn.Parameter(torch.empty(hidden).uniform_(-0.01, 0.01))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """The outputs (T, batch, hidden) of x (T, batch, inputs)."""
        h = v = x.new_zeros(x.shape[1], self.hidden)
        weight, outputs = self.recurrent.weight, []
        for wx in self.encoder(x):
            v = wx if self.momentum is None else self.momentum * v + self.step_size * wx
            z = h @ weight.T + v
            h = z.sign() * torch.relu(z.abs() + self.bias)
            outputs.append(h)
        return torch.stack(outputs), None


MODULES: dict[str, Callable[..., nn.Module]] = {
    "DTRIV": recurrent.DTRIV,
    **{f"{name}LSTM": partial(recurrent.MomentumLSTM, rule=rule) for name, rule in RULES.items()},
    **{f"{name}DTRIV": partial(recurrent.MomentumDTRIV, rule=rule) for name, rule in RULES.items()},
    "nn.LSTM": nn.LSTM,
    "appendix F": PaperLSTM,
    "appendix F, Adam": lambda inputs, hidden: PaperLSTM(inputs, hidden, beta=0.9),
    "DTRIV, loop": lambda inputs, hidden: LoopDTRIV(inputs, hidden, None, 1.0),
    "MomentumDTRIV, loop": lambda inputs, hidden: LoopDTRIV(inputs, hidden, 0.6, 0.6),
}


class Contender:
    """A layer at a setting, ready to be timed.

    Arguments:
        name: that in :data:`MODULES`, with ", carried" after it for a call with an initial state.
        setting: the sizes.
    """

    def __init__(self, name: str, setting: Setting) -> None:
        torch.manual_seed(0)
        self.module = MODULES[name.removesuffix(", carried")](setting.inputs, setting.hidden)
        self.inputs = [torch.randn(setting.time, setting.batch, setting.inputs)]
        if name.endswith("carried"):
            self.inputs.append(self.module(self.inputs[0][:2])[1].detach())

    def training(self) -> None:
        """Run a training step without the optimizer step."""
        self.module.zero_grad()
        self.module(*self.inputs)[0].square().mean().backward()

    @torch.no_grad()
    def evaluation(self) -> None:
        """Run a forward pass without gradients."""
        self.module(*self.inputs)


def timed(
    names: Sequence[str], setting: Setting, repeats: int, what: str = "training", rivals: dict[str, str] | None = None
) -> list[Row]:
    """A row for each layer; its ratio is over the rival that its name begins with, else over the first."""
    times = interleaved({name: getattr(Contender(name, setting), what) for name in names}, repeats)
    rows = []
    for name, mine in times.items():
        over = next((rival for start, rival in (rivals or {}).items() if name.startswith(start)), names[0])
        row = {"setting": str(setting), "layer": name, "over": over}
        rows.append(row | {"ms": milliseconds(mine), "ratio": ratio(mine, times[over])})
    return rows


def training(options: Options) -> Iterator[list[Row]]:
    """Yield the time of training steps of each rule's LSTM relative to nn.LSTM."""
    for setting in (TINY,) if options.quick else (*LSTMS, PAPER):
        carried = CARRIED if setting is not PAPER else []
        yield timed(["nn.LSTM", *OURS, *carried], setting, options.repeats)


def cells(options: Options) -> Iterator[list[Row]]:
    """Yield the time of training steps relative to the per-step cell, for smaller and smaller batches."""
    names = ["appendix F", "appendix F, Adam", "nn.LSTM", *OURS]
    rivals = {"Adam": "appendix F, Adam", "RMSProp": "appendix F, Adam"}
    for setting in (TINY,) if options.quick else BATCHES:
        yield timed(names, setting, options.repeats, rivals=rivals)


def orthogonal(options: Options) -> Iterator[list[Row]]:
    """Yield the time of training steps of DTRIV layers relative to a Python loop."""
    names = ["DTRIV", *(f"{rule}DTRIV" for rule in RULES)]
    setting, rivals = TINY if options.quick else ORTHOGONAL, {"DTRIV": "DTRIV, loop"}
    yield timed(["MomentumDTRIV, loop", "DTRIV, loop", *names], setting, options.repeats, rivals=rivals)


def inference(options: Options) -> Iterator[list[Row]]:
    """Yield the time of forward passes without gradients relative to nn.LSTM, for small batches."""
    for setting in (TINY,) if options.quick else (*INFERENCE, PAPER):
        yield timed(["nn.LSTM", "MomentumLSTM", "AdamLSTM", "RMSPropLSTM"], setting, options.repeats, "evaluation")


def peak(name: str, setting: Setting) -> dict[str, float]:
    """Return the MiB that evaluation and a training step add to the peak memory of this fresh process."""
    small = Setting(2, 1, setting.hidden, setting.inputs)
    Contender(name.removesuffix(", carried"), small).training()  # what libraries keep for good
    contender = Contender(name, setting)
    return added_memory({"evaluation": contender.evaluation, "training": contender.training})


def memory(options: Options) -> Iterator[list[Row]]:
    """Yield the peak memory of each layer at the setting of table 15, each in a separate process."""
    setting = TINY if options.quick else PAPER
    names = ["nn.LSTM", "appendix F", "appendix F, Adam", *OURS, *CARRIED]
    rows = [{"setting": str(setting), "layer": name, **in_fresh_process(peak, name, setting)} for name in names]
    for row in rows:
        for what in ("training", "evaluation"):
            first = rows[0][f"{what}_MiB"]
            row[f"{what}_ratio"] = row[f"{what}_MiB"] / first if first else None
    yield rows


SECTIONS: dict[str, Callable[[Options], Iterator[list[Row]]]] = {
    found.__name__: found for found in (training, cells, orthogonal, inference, memory)
}


def measured(options: Options) -> Iterator[tuple[str, list[Row]]]:
    """Yield the selected sections."""
    return ((name, rows) for name in options.sections for rows in SECTIONS[name](options))


main = program(
    __doc__, "recurrent", measured, repeats=7, sections=list(SECTIONS), quick="tiny sizes, to see that it runs"
)


if __name__ == "__main__":
    main()
