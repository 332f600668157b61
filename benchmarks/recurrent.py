"""Momentum recurrent layers beside torch.nn's and beside the papers' own loops: ``python -m benchmarks.recurrent``.

Six tables. *training*: a step of each rule's LSTM over that of ``nn.LSTM``, from rest, and carried on with the state
of an earlier chunk. *cells*: the same over the per-step Python cell of the MomentumRNN paper's appendix F, as the batch
shrinks. *orthogonal*: DTRIV layers over a plain loop with the same parametrisation. *inference*: a forward
pass of Adam's and RMSProp's LSTM without gradient over that of ``nn.LSTM``. *paper*: training and evaluation at
the setting of the paper's table 14. *memory*: what they add to the peak, as in table 15, each in a fresh process.

A training step is forward, the mean square of all outputs, backward. Times are medians of runs that take turns in one
process, on one thread unless told; ratios are medians over the rounds, each over its own rival. Memory is the
process's, on a GPU that of PyTorch's allocator; on a CPU, where the compiler's would count too, only of eager layers.
Writes JSON with the machine in it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.harness import command, interleaved, milliseconds, peak_bytes, ratio, reset_peak, write
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
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The sizes of a problem."""

    time: int
    batch: int
    hidden: int
    inputs: int

    def __str__(self) -> str:
        """T x batch x hidden x inputs."""
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


@dataclass
class Contender:
    """A layer at a setting, ready to be timed."""

    module: nn.Module
    x: Tensor
    state: Any = None

    @classmethod
    def of(cls, name: str, setting: Setting, device: torch.device, how: str = "") -> Contender:
        """By its name in :data:`MODULES`; ``how`` has "carried" or "compiled" in it."""
        torch.manual_seed(0)
        options = {"compile": True} if "compiled" in how else {}
        module = MODULES[name](setting.inputs, setting.hidden, **options).to(device)
        x = torch.randn(setting.time, setting.batch, setting.inputs, device=device)
        contender = cls(module, x)
        if "carried" in how:
            contender.state = module(x[:2])[1].detach()
        return contender

    def output(self) -> Tensor:
        """The outputs at all times."""
        return (self.module(self.x) if self.state is None else self.module(self.x, self.state))[0]

    def train(self) -> None:
        """A training step without the optimizer's part."""
        self.module.zero_grad()
        self.output().square().mean().backward()
        self.wait()

    @torch.no_grad()
    def evaluate(self) -> None:
        """A forward pass."""
        self.output()
        self.wait()

    def wait(self) -> None:
        """Until the device has done its work."""
        if self.x.is_cuda:
            torch.cuda.synchronize(self.x.device)


def timed(
    contenders: dict[str, Contender], repeats: int, what: str = "train", rivals: dict[str, str] | None = None
) -> list[Row]:
    """A row for each contender; its ratio is over the rival that its name begins with, else over the first."""
    times = interleaved({name: getattr(each, what) for name, each in contenders.items()}, repeats)
    first = next(iter(contenders))
    rows = []
    for name, mine in times.items():
        found = [rival for start, rival in (rivals or {}).items() if name.startswith(start)]
        over = found[0] if found else first
        rows.append({"layer": name, "over": over, "ms": milliseconds(mine), "ratio": ratio(mine, times[over])})
    return rows


def entered(
    names: Sequence[str], setting: Setting, device: torch.device, hows: Sequence[str] = ("",)
) -> dict[str, Contender]:
    """Contenders by name and by how they run."""
    return {
        f"{name}, {how}" if how else name: Contender.of(name, setting, device, how) for how in hows for name in names
    }


def training(options: argparse.Namespace) -> list[Row]:
    """Steps of each rule's LSTM over those of nn.LSTM."""
    rows = []
    for setting in (TINY,) if options.quick else LSTMS:
        names = [f"{rule}LSTM" for rule in RULES]
        contenders = entered(["nn.LSTM"], setting, options.device)
        contenders |= entered(names, setting, options.device, ["", "carried"])
        if options.compiled:  # linear rules have no scan to compile
            contenders |= entered(["AdamLSTM", "RMSPropLSTM"], setting, options.device, ["compiled"])
        rows += [{"setting": str(setting), **row} for row in timed(contenders, options.repeats)]
    return rows


def cells(options: argparse.Namespace) -> list[Row]:
    """Steps over those of the per-step cell, as the batch shrinks."""
    rows = []
    for setting in (TINY,) if options.quick else BATCHES:
        names = ["appendix F", "appendix F, Adam", "nn.LSTM", *(f"{rule}LSTM" for rule in RULES)]
        contenders = entered(names, setting, options.device)
        rivals = {"Adam": "appendix F, Adam", "RMSProp": "appendix F, Adam"}
        rows += [{"setting": str(setting), **row} for row in timed(contenders, options.repeats, rivals=rivals)]
    return rows


def orthogonal(options: argparse.Namespace) -> list[Row]:
    """Steps of DTRIV layers over those of a plain loop."""
    setting = TINY if options.quick else ORTHOGONAL
    names = ["DTRIV", *(f"{rule}DTRIV" for rule in RULES)]
    contenders = entered(["MomentumDTRIV, loop", "DTRIV, loop"], setting, options.device)
    contenders |= entered(names, setting, options.device)
    if options.compiled:
        contenders |= entered(names[:2], setting, options.device, ["compiled"])
    rivals = {"DTRIV": "DTRIV, loop"}
    return [{"setting": str(setting), **row} for row in timed(contenders, options.repeats, rivals=rivals)]


def inference(options: argparse.Namespace) -> list[Row]:
    """Forward passes without gradient over those of nn.LSTM, where batches are small."""
    rows = []
    for setting in (TINY,) if options.quick else INFERENCE:
        contenders = entered(["nn.LSTM", "AdamLSTM", "RMSPropLSTM"], setting, options.device)
        rows += [{"setting": str(setting), **row} for row in timed(contenders, options.repeats, "evaluate")]
    return rows


def paper(options: argparse.Namespace) -> list[Row]:
    """Training and evaluation at the setting of table 14, in microseconds for a sample of the batch."""
    setting = TINY if options.quick else PAPER
    names = ["nn.LSTM", *(f"{rule}LSTM" for rule in RULES)]
    contenders = entered(names, setting, options.device)
    rows = []
    for trained, evaluated in zip(
        timed(contenders, options.repeats), timed(contenders, options.repeats, "evaluate"), strict=True
    ):
        row = {"setting": str(setting), "layer": trained["layer"]}
        for name, found in (("training", trained), ("evaluation", evaluated)):
            row |= {f"{name}_us": 1e3 * found["ms"] / setting.batch, f"{name}_ratio": found["ratio"]}
        rows.append(row)
    return rows


def peak(name: str, setting: Setting, device: str, threads: int, how: str) -> dict[str, float]:
    """MiB that evaluation and a training step add to the peak of this process, which must be a fresh one."""
    torch.set_num_threads(threads)
    place = torch.device(device)
    Contender.of(name, Setting(2, 1, setting.hidden, setting.inputs), place).train()  # what libraries keep for good
    contender = Contender.of(name, setting, place, how)
    if "compiled" in how:
        contender.train()
        contender.module.zero_grad()
    start, found = reset_peak(place), {}
    for what, run in (("evaluation", contender.evaluate), ("training", contender.train)):
        run()
        found[f"{what}_MiB"] = (peak_bytes(place) - start) / 2**20
    return found


def memory(options: argparse.Namespace) -> list[Row]:
    """Peaks at the setting of table 15, each layer's in a process of its own."""
    setting = TINY if options.quick else PAPER
    ours = [f"{rule}LSTM" for rule in RULES]
    runs = [
        ("nn.LSTM", ""),
        ("appendix F", ""),
        ("appendix F, Adam", ""),
        *((name, how) for how in ("", "carried") for name in ours),
    ]
    if options.device.type == "cuda" and options.compiled:
        runs += [(name, "compiled") for name in ours]
    rows = []
    for name, how in runs:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            found = pool.submit(peak, name, setting, str(options.device), options.threads, how).result()
        rows.append({"setting": str(setting), "layer": f"{name}, {how}" if how else name, **found})
    for row in rows:
        for what in ("training", "evaluation"):
            first = rows[0][f"{what}_MiB"]
            row[f"{what}_ratio"] = row[f"{what}_MiB"] / first if first else None
    return rows


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "training": training,
    "cells": cells,
    "orthogonal": orthogonal,
    "inference": inference,
    "paper": paper,
    "memory": memory,
}
FORMS = {"ms": ".2f", "ratio": ".3f", "faster": ".2f", "us": ".1f", "s": ".0f", "MiB": ".1f"}


def table(rows: list[Row]) -> str:
    """Rows under the names of their columns."""
    names = list(rows[0])
    lines = [names]
    for row in rows:
        lines.append([_show(row[name], FORMS.get(name.rpartition("_")[2])) for name in names])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ["<" if isinstance(value, str) else ">" for value in rows[0].values()]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True))
        for line in lines
    )


def _show(value: Any, form: str | None) -> str:
    return "n/a" if value is None else format(value, form) if form else str(value)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON."""
    parser = command(__doc__, "recurrent")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on the CPU [1]")
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds [7]")
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="leave compile=True out")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {}
    for section in options.sections:
        report[section] = SECTIONS[section](options)
        print(f"{section}\n{table(report[section])}\n", flush=True)
    write(options.out, report, options.device)


if __name__ == "__main__":
    main()
