"""Shared code of the diagnostics: a base class of results, trajectories of a block, and helpers for figures.

matplotlib is optional. Only functions that draw import it.
"""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hbnode._tree import parts
from hbnode.nfe import NFE
from hbnode.nn.blocks import ODEBlock
from hbnode.solve.odeint import solve
from hbnode.solve.settings import Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.lines import Line2D


class Result:
    """The base class of results of diagnostics: dataclasses whose attributes are the columns of a table."""

    def columns(self) -> dict[str, Sequence[Any]]:
        """Return a dict from the names of columns to lists of equal length. Attributes that are None are omitted."""
        return {name: column for name, column in vars(self).items() if column is not None}

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the columns to a CSV file. If the call is interrupted, an existing file at ``path`` does not change."""
        path = Path(path)
        columns = self.columns()
        partial = path.with_name(path.name + ".partial")
        with partial.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        partial.replace(path)


@contextmanager
def evaluation_mode(field: nn.Module | Callable) -> Iterator[None]:
    """A context in which a module is in evaluation mode. At exit, the modes of all its submodules are restored."""
    modes = [(part, part.training) for part in field.modules()] if isinstance(field, nn.Module) else []
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def check_block(block: nn.Module, caller: str) -> ODEBlock:
    if not isinstance(block, ODEBlock):
        fix = "pass the block inside of the model, or ODEBlock(field) for a field"
        raise TypeError(f"{caller} expected an ODEBlock, got {type(block).__name__}. Fix: {fix}.")
    return block


def as_input(block: nn.Module, x: object) -> Tensor:
    """Return the input x of a block as a tensor without graph.

    An array or a list is converted to a tensor with the dtype and device of the block.
    """
    if x is None:
        raise TypeError(f"{type(block).__name__} needs an input x, got None. Fix: pass x after the block.")
    if isinstance(x, Tensor):
        return x.detach()
    dtype, device = dtype_and_device(block.field)
    return torch.as_tensor(x).to(device=device, dtype=dtype)


def dtype_and_device(field: object) -> tuple[torch.dtype, torch.device | None]:
    """Return the dtype and device of the parameters of ``field.func``, or of the field if func has none.

    Without parameters, return the default dtype and None.
    """
    for module in (getattr(field, "func", None), field):
        for parameter in module.parameters() if isinstance(module, nn.Module) else ():
            if parameter.is_floating_point():
                return parameter.dtype, parameter.device
    return torch.get_default_dtype(), None


def schedule(block: ODEBlock, t: Tensor | Sequence[float] | None, points: int = 200) -> tuple[Tensor, Settings]:
    """Return the output times (T,) at which a diagnostic solves a block, and the settings of this solve.

    If ``t`` is None, the times are the ends of all steps for a block with fixed steps, and ``points`` equally spaced
    times of ``t_span`` for other blocks.
    """
    settings = block.settings()
    if t is not None:
        times = torch.as_tensor(t, dtype=torch.float64).detach().cpu()
        if times.dim() != 1 or len(times) < 2:
            shape = tuple(times.shape)
            raise ValueError(f"t must hold two or more times (T,), got shape {shape}. Fix: [0.0, 0.5, 1.0].")
        return times, settings
    if settings.steps is not None:  # n + 1 output times with one step between them
        points = settings.steps + 1
        settings = dataclasses.replace(settings, steps=1)
    return torch.linspace(*block.t_span, points, dtype=torch.float64), settings


def states(block: ODEBlock, x: object, t: Tensor | Sequence[float] | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Solve a block with the input x. Return the times (T,) and the states h, or h and m, (T, batch, ...) each."""
    times, settings = schedule(block, t)
    with torch.no_grad(), evaluation_mode(block):
        start = block.start(as_input(block, x))
        trajectory = solve(block.field, start, times, settings, NFE())  # block.nfe does not change
    return times, parts(trajectory)


def axes(ax: Axes | None) -> Axes:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plotting needs matplotlib. Fix: pip install matplotlib.") from error
    if ax is None:
        return plt.subplots(layout="constrained")[1]
    if not hasattr(ax, "get_xlim"):
        raise TypeError(f"ax must be matplotlib Axes, got {type(ax).__name__}. Fix: one of them, such as axes[0].")
    return ax


def style(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of a matplotlib line: the user's properties ``given``, completed by ``defaults``.

    Aliases in ``given``, such as ``lw``, are replaced by full names, so that they override the defaults.
    """
    from matplotlib.cbook import normalize_kwargs
    from matplotlib.lines import Line2D

    return normalize_kwargs(dict(defaults), Line2D) | normalize_kwargs(dict(given), Line2D)


def legend(ax: Axes, handles: Sequence[Line2D] | None = None) -> None:
    """Draw a legend to the right of the axes if the figure has a layout engine, which makes room for it.

    Otherwise draw the legend above axes that have a twin, and inside of other axes.
    """
    from matplotlib.transforms import ScaledTranslation

    found = list(handles) if handles is not None else ax.get_legend_handles_labels()[0]
    right = twin_axes(ax)
    figure = ax.figure
    place: dict[str, Any] = {}
    if figure.get_layout_engine() is not None:
        gap = ScaledTranslation((5 if right is None else 55) / 72, 0.0, figure.dpi_scale_trans)  # room for tick labels
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1), "bbox_transform": ax.transAxes + gap, "frameon": False}
    elif right is not None:  # loc="best" ignores the curves of the twin axes
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 4, "frameon": False}
    if found:
        ax.legend(handles=found, fontsize="small", **place)


def ticks_of_short_axis(axis: Axis) -> None:
    """Add tick labels between powers of ten, such as 2 and 5, to a logarithmic axis of less than two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if low > 0 and high / low < 100:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low > 5 else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def twin_axes(ax: Axes) -> Axes | None:
    """Return the second axes that ``ax.twinx()`` created at the same place; None if there are none."""
    shared = ax.get_shared_x_axes().get_siblings(ax)
    return next((a for a in shared if a is not ax and a.get_position().bounds == ax.get_position().bounds), None)


def as_float64(values: object) -> Tensor:
    if isinstance(values, (list, tuple)) and any(isinstance(value, Tensor) for value in values):
        return torch.stack([as_float64(value) for value in values])
    return torch.as_tensor(values).detach().to("cpu", torch.float64)
