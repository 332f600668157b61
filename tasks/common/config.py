"""Options of a task: a dataclass whose fields become command-line options."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import hbnode
from hbnode.solve.methods import ALL_METHODS, TORCHDIFFEQ_METHODS

KINDS = hbnode.NODE, hbnode.ANODE, hbnode.SONODE, hbnode.HBNODE, hbnode.GHBNODE, hbnode.NesterovNODE, hbnode.AdamNODE
FIELDS: dict[str, Callable[..., hbnode.Field]] = {kind.__name__.lower(): kind for kind in KINDS}
LATER = ("nesterovnode", "adamnode")  # models that were published after the paper's five
MODELS = tuple(name for name in FIELDS if name not in LATER)
SECOND_ORDER = ("sonode", "hbnode", "ghbnode")  # their state is a pair (h, m)
SCHEDULES = ("constant", "cosine", "step")
GRADIENTS = ("", "direct", "checkpoint", "reversible", "adjoint")
REQUIRED = dataclasses.MISSING  # marks an option without a default, which becomes a positional argument
T = typing.TypeVar("T", bound="Options")
C = typing.TypeVar("C", bound="TaskConfig")


def make_field(model: str, func: Callable[..., Tensor], **options: Mapping[str, typing.Any]) -> hbnode.Field:
    """Return the field (right-hand side of the ODE) of one of the models.

    Arguments:
        model: one of :data:`FIELDS`.
        func: the network f in the equation of the model.
        options: for each model's name, further keyword arguments of its field.
    """
    return FIELDS[model](func, **options.get(model, {}))


def names_in(text: str, known: Sequence[str], flag: str, later: Sequence[str] = ()) -> tuple[str, ...]:
    """Split a list of names, check them, and return each name once, in the given order.

    Arguments:
        text: names separated by commas, or "all".
        known: the valid names.
        flag: the name of the option, for error messages.
        later: further valid names, which "all" does not include.
    """
    names = tuple(known) if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in (*known, *later):
            choices = ", ".join((*known, *later, "all"))
            raise ValueError(f"argument {flag}: invalid choice: {name!r} (choose from {choices})")
    return names


def option(
    default: object, text: str, choices: Sequence[str] = (), *, may_change: bool = False, **limits: float | None
) -> typing.Any:
    """Return a dataclass field that defines a command-line option.

    Arguments:
        default: the default value, which the help shows unless it is None. REQUIRED makes a positional argument.
        text: the help text.
        choices: the valid values; empty: any.
        may_change: whether a run may be resumed with another value.
        limits: ``least``, the smallest allowed number (None for no limit), and ``below``, an exclusive upper limit.
    """
    metadata = {"help": text, "choices": choices or None, "may_change": may_change, "least": 0, "below": math.inf}
    return dataclasses.field(default=default, metadata=metadata | limits)


@dataclasses.dataclass(frozen=True)
class Options:
    """Command-line options as a dataclass."""

    positive: ClassVar[str] = ""  # names of further options that must not be 0, besides those of the base classes

    @classmethod
    def read(cls: type[T], described: Mapping[str, typing.Any], **changes: object) -> T:
        """Return options from the content of a run's ``config.json``, with some of them changed."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in described.items() if name in names} | changes)

    def check(self) -> None:
        """Raise ValueError if a number is out of range. It is called before any file is written."""
        positive = {name for kind in type(self).__mro__ for name in vars(kind).get("positive", "").split()}
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if not isinstance(value, (int, float)):
                continue
            least, below = field.metadata["least"], field.metadata["below"]
            if not -math.inf < value < math.inf:
                raise ValueError(f"{flag} is {value}")
            if least is not None and value < least:
                raise ValueError(f"{flag} must {f'be {least} or more' if least else 'not be negative'}, got {value}")
            if field.name in positive and value == 0:
                raise ValueError(f"{flag} must be positive, got 0")
            if value >= below:
                raise ValueError(f"{flag} must be below {below}, got {value}")


@dataclasses.dataclass(frozen=True)
class TaskConfig(Options):
    """Options that all tasks have."""

    models: ClassVar[tuple[str, ...]] = ()  # names of the task's models
    later: ClassVar[tuple[str, ...]] = ()  # names of further models, which "all" does not include
    swept: ClassVar[str] = "model"  # name of the option that selects one or several models
    positive = "seeds epochs batch_size lr"

    model: str = option("all", "one of {models}, several with commas between, or all")
    preset: str = option("default", "a set of defaults, see below; other options override it")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    seeds: int = option(1, "how many seeds to run, counting up from --seed", may_change=True)
    jobs: int = option(0, "largest number of runs at the same time; 0: one per core, or one on a GPU", may_change=True)
    epochs: int = option(20, "passes over the training data", may_change=True)
    batch_size: int = option(64, "samples in a batch")
    lr: float = option(1e-3, "learning rate")
    schedule: str = option("constant", "schedule: constant, cosine to 0, or 5 %% less per 1,000 steps", SCHEDULES)
    clip: float = option(0.0, "largest norm of the gradient; 0 does not clip")
    device: str = option("auto", "cpu, cuda, or auto", may_change=True)
    checkpoint_seconds: float = option(30.0, "time between checkpoints within an epoch", may_change=True)
    out: str = option("", "run folder, or parent folder of several runs; empty: in runs/", may_change=True)

    @property
    def label(self) -> str:
        """The value of ``--model``, or of the option that selects the models instead."""
        return str(getattr(self, self.swept))

    def with_model(self: C, name: str) -> C:
        """Return a copy of the options that selects a single model."""
        chosen: dict[str, typing.Any] = {self.swept: name}
        return dataclasses.replace(self, **chosen)

    def chosen(self) -> tuple[str, ...]:
        """Return the selected models, each once, in the given order."""
        return names_in(self.label, self.models, f"--{self.swept}", self.later)

    def check(self) -> None:
        """Raise an error for invalid options. It is called before any file is written."""
        super().check()
        if self.seed + self.seeds > 2**32:
            raise ValueError(f"--seed must be below 2**32, got {self.seed + self.seeds - 1}")
        if self.device != "auto":
            torch.device(self.device)
        self.chosen()


@dataclasses.dataclass(frozen=True)
class ODEConfig(TaskConfig):
    """Options of tasks that solve ODEs."""

    models = MODELS
    positive = "tol"

    model: str = option("hbnode", "one of {models}, several with commas between, or all")
    solver: str = option("native", "hbnode's solvers, or torchdiffeq's as in the papers", ("native", "torchdiffeq"))
    method: str = option("", "method; empty: the best native method for the model, or torchdiffeq's dopri5")
    tol: float = option(1e-3, "rtol = atol of an adaptive method")
    steps: int = option(0, "number of fixed steps; 0: adaptive steps by the tolerance")
    gradient: str = option("", "empty: checkpoint, direct for series, or adjoint for torchdiffeq", GRADIENTS)
    adjoint_norm: str = option("seminorm", "error norm of torchdiffeq's adjoint", ("seminorm", "full"))

    def ode_options(self) -> dict[str, typing.Any]:
        """Return the keyword arguments of an ODEBlock."""
        options: dict[str, typing.Any] = {
            "method": self.method or None,
            "rtol": self.tol,
            "atol": self.tol,
            "gradient": self.gradient or None,
            "steps": self.steps or None,
        }
        if self.solver == "native":
            return options
        norm = {"norm": "seminorm"} if self.adjoint_norm == "seminorm" else {}
        method, gradient = self.method or "dopri5", self.gradient or "adjoint"
        return options | {"method": method, "gradient": gradient, "adjoint_options": norm}

    def check(self) -> None:
        """Raise an error for options that cannot be combined.

        To find such options, it solves a small ODE with each model.
        """
        super().check()
        theirs = self.solver == "torchdiffeq"
        if self.method and theirs != (self.method in TORCHDIFFEQ_METHODS):
            raise ValueError(
                f"--method {self.method} is not one of --solver {self.solver}. "
                f"Fix: --solver {'native' if theirs else 'torchdiffeq'}, or leave --method out."
            )
        if self.method in ALL_METHODS and ALL_METHODS[self.method].needs_fixed_steps and not self.steps:
            raise ValueError(f"--method {self.method} has a fixed grid; say how fine with --steps")
        for model in self.chosen():
            self.try_out(model)

    def try_out(self, model: str) -> None:
        """Solve a small ODE with a model, because not all methods, gradients and models can be combined."""
        x = torch.ones(1, 2, requires_grad=True)
        hbnode.ODEBlock(trial_field(model), **self.ode_options())(x).sum().backward()


def trial_field(model: str) -> hbnode.Field:
    """Return a small field that is solved to check the options."""
    return make_field(model, (lambda h, v: -h) if model == "sonode" else (lambda h: -h), anode={"augment": 1})


def parse(kind: type[T], presets: Mapping[str, str], doc: str | None, argv: Sequence[str] | None) -> T:
    """Return the configuration for a command line: the defaults, changed by the preset, then by the given options.

    Arguments:
        kind: class of the configuration.
        presets: dictionary from the name of a preset to a command line.
        doc: text at the start of the help.
        argv: the command-line arguments; None: those of the process.
    """
    presets = {"default": "", **presets}
    named = "\n".join(f"  {name}: {options}" for name, options in presets.items() if options)
    parser = argparse.ArgumentParser(
        description=doc,
        epilog=f"presets:\n{named}" if named else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].format(models=", ".join(getattr(kind, "models", ())))
        text += "" if field.default in (None, REQUIRED) else f" [{field.default}]"
        choices = tuple(presets) if field.name == "preset" else field.metadata["choices"]
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            value = next(iter(typing.get_args(hints[field.name])), hints[field.name])  # float | None is a float
            name, default = (field.name, None) if field.default is REQUIRED else (flag, argparse.SUPPRESS)
            parser.add_argument(name, type=value, default=default, choices=choices, help=text)
    argv = sys.argv[1:] if argv is None else argv
    preset = getattr(parser.parse_args(argv), "preset", "default")
    given = vars(parser.parse_args([*presets[preset].split(), *argv]))
    try:
        config = kind(**given)
        config.check()
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        parser.error(str(error))
    return config
