"""What the figures of runs share: lines that do not hide each other, and legends that hide no line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
