"""Options of a task: a dataclass whose fields become the command line."""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

import hbnode
from hbnode.solve.settings import FIXED, TORCHDIFFEQ

MODELS = ("node", "anode", "sonode", "hbnode", "ghbnode")
SCHEDULES = ("constant", "cosine", "step")
C = typing.TypeVar("C", bound="TaskConfig")
GRADIENTS = ("", "direct", "checkpoint", "reversible", "adjoint")


def option(
    default: object, text: str, choices: Sequence[str] = (), *, may_change: bool = False, is_signed: bool = False
) -> typing.Any:
    """A field of a task's configuration.

    Arguments:
        default: its default value; the help does not show None.
        text: its help.
        choices: the values it can have; empty: any.
        may_change: whether a run may be resumed with another value.
        is_signed: whether it may be negative.
    """
    metadata = {"help": text, "choices": choices or None, "may_change": may_change, "is_signed": is_signed}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """Options that all tasks have, and what is fixed for a task."""

    models: ClassVar[tuple[str, ...]] = ()  # those it can train
    swept: ClassVar[str] = "model"  # the option that names them, of which a command may run several
    positive: ClassVar[tuple[str, ...]] = ("seeds", "epochs", "batch_size", "lr")  # numbers that must not be 0

    model: str = option("all", "one of {models}, several with commas between, or all")
    preset: str = option("default", "a set of defaults, see below; other options override it")
    seed: int = option(0, "seed of the initial weights and of the order of the data")
    seeds: int = option(1, "how many seeds to run, counting up from --seed", may_change=True)
    jobs: int = option(0, "of several runs, how many at a time; 0: one a core, one alone on a GPU", may_change=True)
    epochs: int = option(20, "passes over the training data", may_change=True)
    batch_size: int = option(64, "samples in a step")
    lr: float = option(1e-3, "learning rate")
    schedule: str = option(
        "constant",
        "learning rate: constant, falling to 0 as a cosine, or 5 %% less after every 1,000 steps",
        SCHEDULES,
    )
    clip: float = option(0.0, "largest norm of the gradient; 0 does not clip")
    device: str = option("auto", "cpu, cuda, or auto", may_change=True)
    checkpoint_seconds: float = option(30.0, "time between checkpoints within an epoch", may_change=True)
    out: str = option(
        "", "run folder, of several runs the folder of theirs; empty makes it under runs/", may_change=True
    )

    @property
    def label(self) -> str:
        """What ``--model``, or what else the task sweeps over, says."""
        return str(getattr(self, self.swept))

    def of(self: C, name: str) -> C:
        """The same options with one of the models."""
        chosen: dict[str, typing.Any] = {self.swept: name}
        return dataclasses.replace(self, **chosen)

    def chosen(self) -> tuple[str, ...]:
        """The models that ``--model`` names, or what else the task sweeps over, in its order and each once."""
        names = self.models if self.label == "all" else tuple(dict.fromkeys(self.label.split(",")))
        for name in names:
            if name not in self.models:
                known = ", ".join((*self.models, "all"))
                raise ValueError(f"argument --{self.swept}: invalid choice: {name!r} (choose from {known})")
        return names

    def check(self) -> None:
        """Refuse options that no run can have, before anything is written."""
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            if not isinstance(value, (int, float)):
                continue
            if not -math.inf < value < math.inf:
                raise ValueError(f"{flag} is {value}")
            if value < 0 and not field.metadata["is_signed"]:
                raise ValueError(f"{flag} must not be negative, got {value}")
            if field.name in self.positive and value == 0:
                raise ValueError(f"{flag} must be positive, got 0")
        if self.seed + self.seeds > 2**32:
            raise ValueError(f"--seed must be below 2**32, got {self.seed + self.seeds - 1}")
        if self.device != "auto":
            torch.device(self.device)
        self.chosen()


@dataclasses.dataclass(frozen=True)
class ODEConfig(TaskConfig):
    """Options of the tasks that solve ODEs."""

    models: ClassVar[tuple[str, ...]] = MODELS
    positive: ClassVar[tuple[str, ...]] = (*TaskConfig.positive, "tol", "loss_scale")

    model: str = option("hbnode", "one of {models}, several with commas between, or all")
    lr: float = option(1e-3, "Adam's learning rate")
    loss_scale: float = option(1.0, "factor of the loss in the backward pass, which an adjoint's evaluations depend on")
    solver: str = option("native", "hbnode's solvers, or torchdiffeq's as in the papers", ("native", "torchdiffeq"))
    method: str = option("", "method; empty is the best native one for the model, or torchdiffeq's dopri5")
    tol: float = option(1e-3, "rtol = atol of an adaptive method")
    steps: int = option(0, "steps of a fixed grid; 0 chooses the steps by the tolerance")
    gradient: str = option(
        "",
        "how to differentiate; empty is checkpoint (native), direct (native, of series) or adjoint (torchdiffeq)",
        GRADIENTS,
    )
    adjoint_norm: str = option(
        "seminorm", "error norm of torchdiffeq's adjoint; the papers used full", ("seminorm", "full")
    )

    def ode_options(self) -> dict[str, typing.Any]:
        """The arguments of an ODEBlock that the options describe."""
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
        """Refuse options that no run can have; a small solve with each model finds the rest."""
        super().check()
        theirs = self.solver == "torchdiffeq"
        if self.method and theirs != (self.method in TORCHDIFFEQ):
            raise ValueError(
                f"--method {self.method} is not one of --solver {self.solver}. "
                f"Fix: --solver {'native' if theirs else 'torchdiffeq'}, or leave --method out."
            )
        if self.method in FIXED and not self.steps:
            raise ValueError(f"--method {self.method} has a fixed grid; say how fine with --steps")
        for model in self.chosen():
            self.try_out(model)

    def try_out(self, model: str) -> None:
        """Solve a small model with these options: method, tolerance, steps and gradient must go together."""
        x = torch.ones(1, 2, requires_grad=True)
        hbnode.ODEBlock(TRIAL_FIELDS[model](), **self.ode_options())(x).sum().backward()


def parse(kind: type[C], presets: Mapping[str, Mapping[str, object]], doc: str, argv: Sequence[str] | None) -> C:
    """Turn a command line into a configuration: defaults, then the preset, then the options given."""
    presets = {"default": {}, **presets}
    named = "\n".join(f"  {name}: " + ", ".join(f"{k}={v}" for k, v in p.items()) for name, p in presets.items() if p)
    parser = argparse.ArgumentParser(
        description=doc, epilog=f"presets:\n{named}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        flag = "--" + field.name.replace("_", "-")
        text = field.metadata["help"].format(models=", ".join(kind.models))
        text += "" if field.default is None else f" [{field.default}]"
        choices = tuple(presets) if field.name == "preset" else field.metadata["choices"]
        if hints[field.name] is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        else:
            of = next(iter(typing.get_args(hints[field.name])), hints[field.name])  # float | None is a float
            parser.add_argument(flag, type=of, default=argparse.SUPPRESS, choices=choices, help=text)
    given = vars(parser.parse_args(argv))
    try:
        config = kind(**{**presets[given.get("preset", "default")], **given})
        config.check()
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        parser.error(str(error))
    return config


# a small field of each model, to try options on
TRIAL_FIELDS: dict[str, Callable[[], nn.Module]] = {
    "node": lambda: hbnode.NODE(lambda h: -h),
    "anode": lambda: hbnode.ANODE(lambda h: -h, augment=1),
    "sonode": lambda: hbnode.SONODE(lambda h, v: -h),
    "hbnode": lambda: hbnode.HBNODE(lambda h: -h),
    "ghbnode": lambda: hbnode.GHBNODE(lambda h: -h),
}
