"""What the figures of runs share: lines that do not hide each other, and legends that hide no line.

The figures themselves are drawn in ``tasks/plot.py``, for all runs, and in the file of each task or study that has
figures of its own. ``hbnode/diagnostics/plot.py`` draws a user's own data and solves.
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
    """Return how the line of one of ``count`` groups is drawn, so that equal lines can be told apart.

    Each has a marker of its own, hollow and smaller than those before it. Lines of many points have theirs at other
    points than one another.
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
    """Return a legend of all lines to the right of the axes; entries of the same name once."""
    entries: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    return figure.legend(entries.values(), entries.keys(), loc="outside right upper", fontsize="small", frameon=False)


@contextmanager
def figure_at(path: Path, size: tuple[float, float], title: str = "", *, legend: bool = False) -> Iterator[Figure]:
    """Yield a new figure, which in the end gets a title, perhaps a legend of all lines beside the axes, and is written.

    Arguments:
        path: of the file.
        size: in inches.
        title: of the figure.
        legend: whether there is one.
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
    """Yield a new figure and its axes (rows, columns), see :func:`figure_at`; options are those of ``subplots``."""
    with figure_at(path, size, title, legend=legend) as figure:
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
