"""Helpers for figures: distinct line styles, legends beside the axes, and contexts that write a figure when they end.

``tasks/result_tables.py`` draws the curves of all runs. A task or study draws its special figures in its own file.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tasks.common.files import write_figure

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.figure import Figure, SubFigure
    from matplotlib.legend import Legend

MARKERS = "osD^vPX*<>"


def line_style(index: int, count: int, length: int) -> dict[str, Any]:
    """Return the style of line ``index`` out of ``count`` lines, so that overlapping lines can be told apart.

    Each line has its own marker, which is hollow and smaller than those of the lines before it. Lines with many points
    have their markers at different points.
    """
    every = max(count, length // 5) if length >= 2 * count else 1
    return {
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 8.0 - 4.0 * index / max(count - 1, 1),
        "markerfacecolor": "none",
        "markevery": (index % every, every),
        "linewidth": 1.5,
    }


def legend_beside(figure: Figure | SubFigure) -> Legend:
    """Add a legend to the right of all axes, in which each label appears once."""
    entries: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize="small", frameon=False)


@contextmanager
def figure_at(path: Path, size: tuple[float, float], title: str = "", *, legend: bool = False) -> Iterator[Figure]:
    """Yield a new figure. When the context ends, add the title and the legend, and write the file.

    Arguments:
        path: path of the file.
        size: width and height in inches.
        title: title of the figure.
        legend: whether to add a legend of all lines beside the axes.
    """
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=size, layout="constrained")
    yield figure
    figure.suptitle(title, fontsize="medium")
    if legend:
        legend_beside(figure)
    write_figure(figure, path)


@contextmanager
def panels(
    path: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    size: tuple[float, float],
    title: str = "",
    legend: bool = True,
    **options: Any,
) -> Iterator[tuple[Figure, Any]]:
    """Yield a new figure and its array of axes (rows, columns); see :func:`figure_at`.

    ``options`` are passed to ``subplots``.
    """
    with figure_at(path, size, title, legend=legend) as figure:
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
