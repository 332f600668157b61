"""Draw the tables and figures of the pages of Results from their CSV files, or those of any run folders.

``write_results(docs/results, docs/_results)`` reads every ``NAME.csv`` and writes each of its tables as a Markdown file
``NAME-TABLE.md``. It also writes the table of claims, ``claims.md``, and the figures. The build of the documentation
calls this function, and the pages include the files.

The text of a page or of ``claims.csv`` can refer to a number: ``{digits.adjoint: hbnode; nfe_backward_mean}`` is
replaced by the value of that metric for the model "hbnode" in the table "adjoint" of ``digits.csv``, or by its median
over the seeds. The case and the statistic may follow: ``{transformer-copy.48-symbols: linear; test_accuracy; 750
batches}``, ``{speech.15-epochs: plain; test_mse; range}``. Each reference must match exactly one value.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks.common.figures import legend_beside, line_style
from tasks.common.files import write_figure, write_whole
from tasks.models import recurrent
from tasks.rows import COLUMNS, Group, Row, number, read_csv

REFERENCE = re.compile(r"\{([a-z0-9-]+)(?:\.([\w.-]+))?: ([^{}]+)\}")
CENTRES, LOW, HIGH = ("", "median", "mean", "sum"), ("min", "q10", "low"), ("max", "q90", "high")
RECURRENT = {name: recurrent.title(name, "lstm") for name in recurrent.VARIANTS}
RECURRENT |= {"adaptive": "adaptive momentum", "memoryless": "without memory"}
TITLES = {
    **{name: name.upper() for name in ("node", "anode", "sonode", "hbnode", "ghbnode", "lstm", "gru", "gru-d", "cnf")},
    **{"nesterovnode": "NesterovNODE", "adamnode": "AdamNODE", "cfc": "CfC", "port_hamiltonian": "PortHamiltonian"},
    **{"ncde": "neural CDE", "logistic": "logistic regression", "momentum_lstm": "MomentumLSTM"},
    **{"minirocket": "MiniRocket", "rnn": "RNN", "last": "logistic regression on last values"},
    **{"ridge": "ridge regression", "boosting": "gradient boosting"},
    **{"mingru": "minGRU", "selective, swinging": "selective, half with a frequency"},
    **{"oscillator_stack": "oscillator stack"},
    **{"linear_gain": "linear × 1/(1 − β)", "gated_delta": "Gated DeltaNet", "heavy_ball": "heavy ball"},
    **{"still": "the cell alone, h", "still pair": "the cell alone, h and m", "kalman": "noisy oscillators"},
}
METRICS = {
    "nfe_forward": "NFE, forward",
    "nfe_backward": "NFE, backward",
    "test_nfe": "NFE, test",
    "seconds_per_epoch": "s/epoch",
    "ms_per_step": "ms per step",
    "test_forecast_mse": "test MSE",
    "train_forecast_mse": "training MSE",
    "validation_forecast_mse": "validation MSE",
    "test_acceleration_mse": "test MSE, accelerations",
    "walk_mse": "MSE over 48 frames",
    "separates": "separates %",
    "value": "",
}
ABBREVIATIONS = {"mse": "MSE", "rmse": "RMSE", "nll": "NLL", "kl": "KL", "nfe": "NFE", "auroc": "AUROC", "bleu": "BLEU"}
ABBREVIATIONS |= {"mV": "in mV", "percent": "in %"}
# Columns that are printed as conditions below a table, and their titles.
CONDITIONS = {name: name for name in ("data", "size", "solver", "gradient", "tolerance")} | {"epochs_done": "epochs"}
CONDITIONS |= {"seeds": "seeds", "cpu": "CPU"} | {
    name: name for name in ("threads", "torch", "date", "command", "origin")
}
MOMENTUM_LAYERS = ("adding", "copying", "pixels", "speech", "language-model")  # pages whose models have these titles
Files = Mapping[str, Sequence[Row]]


def read_results(root: Path) -> dict[str, list[Row]]:
    """Return a dictionary from the name of each CSV file in a folder to its rows."""
    return {path.stem: read_csv(path) for path in sorted(root.glob("*.csv")) if path.stem != "claims"}


def finished(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of finished runs. An unfinished run has a single row with the number of epochs done so far."""
    return [row for row in rows if row["statistic"] != "unfinished"]


# Numbers


def shown(value: str, metric: str) -> str:
    """Format a value for tables: accuracies in %, a comma between thousands, about three significant digits."""
    try:
        number = Decimal(value)
    except InvalidOperation:
        return value
    if not number.is_finite():
        return value
    if is_share(metric):
        number = number.scaleb(2)
        return f"{number:f}" if -int(number.as_tuple().exponent) <= 1 else f"{number:.1f}"
    if value.lstrip("-").isdigit() and abs(number) < 10**9:
        return f"{int(number):,}"
    if len(number.as_tuple().digits) > 4:
        number = Decimal(f"{number:.3g}")
    if abs(number) >= 10**9 or 0 < abs(number) < Decimal("1e-4"):
        return f"{float(number):.2g}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:f}"


def is_share(metric: str) -> bool:
    """Return whether a metric is a fraction that tables show in %."""
    return metric.endswith(("accuracy", "separates"))


def title(metric: str) -> str:
    """Return the column title of a metric."""
    words = (ABBREVIATIONS.get(word, word) for word in metric.split("_"))
    return METRICS.get(metric.removesuffix("_mean"), " ".join(words) + (" %" if is_share(metric) else ""))


def name_of(model: str, titles: Mapping[str, str] = TITLES) -> str:
    """Return the title of a model in tables, such as "NODE, λ = 0.1" for "node, λ = 0.1"."""
    if model in titles:
        return titles[model]
    kind, comma, rest = model.partition(", ")
    return titles.get(kind, kind) + comma + rest


def spread(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Return the median (or single value), the minimum and the maximum of one metric; "" for those that are missing."""
    metric = rows[0]["metric"]
    parts = [[row["value"] for row in rows if row["statistic"] in part] for part in (CENTRES, LOW, HIGH)]
    centre = parts[0]
    if len(centre) > 1 and metric == "separates":  # the rows have 0 or 1 for each seed
        return shown(f"{statistics.fmean(map(float, centre)):.4g}", metric), "", ""
    if len(centre) > 1:
        numbers = sorted(centre, key=_number)
        middle = statistics.median(map(_number, numbers))
        found = next((value for value in numbers if _number(value) == middle), f"{middle:.6g}")
        parts = [[found], numbers[:1], numbers[-1:]]
    centres, low, high = (shown(part[0], metric) if part else "" for part in parts)
    return centres, low, high


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:  # "diverged" is worse than any number
        return float("inf")


def cell(rows: Sequence[Row]) -> str:
    """Return the text of a table cell: a value with its standard error, or the median over the seeds with the range."""
    if not rows:
        return ""
    if rows[0]["metric"] == "solved":
        return solved(rows)
    centre, low, high = spread(rows)
    errors = [shown(row["value"], row["metric"]) for row in rows if row["statistic"] == "stderr"]
    if errors:
        return f"{centre} ± {errors[0]}"
    if low and high and (low != high or not centre):
        return f"{centre} [{low}, {high}]" if centre else f"{low} to {high}"
    return centre


def solved(rows: Sequence[Row]) -> str:
    """Return how many runs solved their problem. The rows have either the sum, or 0 or 1 for each seed."""
    return f"{sum(int(row['value']) for row in rows)} of {rows[0]['seeds'] or len(rows)}"


# References


def lookup(files: Files, name: str, table: str, path: str) -> str:
    """Return the number that a reference stands for; the module docstring describes references."""
    asked = f"{{{name}{'.' + table if table else ''}: {path}}}"
    if name not in files:
        raise ValueError(f"{asked}: there is no file {name}.csv. Fix: one of {', '.join(files)}.")
    model, metric, *rest = (part.strip() for part in path.split(";"))
    statistic = rest.pop() if rest and rest[-1] in ("range", "min", "max") else ""
    rows = matching(finished(files[name]), asked, model, metric, rest[0] if rest else "", table)
    centre, low, high = spread(rows)
    centre = solved(rows) if metric == "solved" else centre
    found = {"": centre, "min": low, "max": high, "range": f"{low}–{high}"}[statistic]
    if not found.strip("–"):
        raise ValueError(f"{asked}: has no {statistic or 'center'}; it has {[row['statistic'] for row in rows]}.")
    return found


def matching(rows: Sequence[Row], asked: str, model: str, metric: str, case: str, table: str) -> list[Row]:
    """Return the rows of one model, metric and case. With an empty ``table`` the rows must be of a single table."""
    found = [row for row in rows if (row["model"], row["metric"], row["case"]) == (model, metric, case)]
    found = [row for row in found if table in ("", row["table"])]
    if not found:
        near = sorted({(row["table"], row["model"], row["metric"], row["case"]) for row in rows})
        near = [entry for entry in near if model in entry or metric in entry][:12]
        raise ValueError(f"{asked}: nothing found. Fix: table, model, metric and case, such as {near}.")
    if len(names := {row["table"] for row in found}) > 1:
        raise ValueError(f"{asked}: in tables {sorted(names)}. Fix: name one, FILE.TABLE.")
    return found


def substitute(text: str, files: Files) -> str:
    """Return the text with every reference replaced by its number."""
    return REFERENCE.sub(lambda match: lookup(files, match[1], match[2] or "", match[3]), text)


# Tables


def tables(name: str, rows: Sequence[Row]) -> dict[str, str]:
    """Return a dictionary with every table of a file as Markdown. Each has its conditions below."""
    titles = TITLES | (RECURRENT if name in MOMENTUM_LAYERS else {})
    texts = {}
    for table in dict.fromkeys(row["table"] for row in rows):
        mine = [row for row in rows if row["table"] == table]
        facts = finished(mine)
        text = markdown(grid(facts, titles)) if facts else "No run has ended yet."
        about = f"*Conditions:* {' · '.join([*conditions(facts or mine), f'[{name}.csv]({name}.csv)'])}"
        texts[table] = f"{text}\n\n{about}{_unfinished(mine)}\n"
    return texts


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown. The first line contains the column titles."""
    head, *rest = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def grid(rows: Sequence[Row], titles: Mapping[str, str] = TITLES) -> list[list[str]]:
    """Return the cells of a table, with a line for each model and a column for each metric and case.

    The table is transposed if it has more than eight columns and more columns than lines.
    """
    models = {
        model: [row for row in rows if row["model"] == model] for model in dict.fromkeys(r["model"] for r in rows)
    }
    cases = list(dict.fromkeys(row["case"] for row in rows))
    columns = sorted(dict.fromkeys((row["metric"], row["case"]) for row in rows), key=lambda c: cases.index(c[1]))
    sizes = {row["model"]: row["parameters"] for row in rows if row["parameters"]}
    seeds = {model: len({row["seed"] for row in mine} - {""}) for model, mine in models.items()}
    lines = [["", "parameters", *(", ".join(filter(None, (title(m), case))) or m for m, case in columns)]]
    for model, mine in models.items():
        few = f", {seeds[model]} of {max(seeds.values())} seeds" if 0 < seeds[model] < max(seeds.values()) else ""
        cells = [cell([row for row in mine if (row["metric"], row["case"]) == column]) for column in columns]
        lines.append([name_of(model, titles) + few, shown(sizes.get(model, ""), ""), *cells])
    if len(set(sizes.values())) < 2:  # the conditions below the table contain the size
        lines = [[line[0], *line[2:]] for line in lines]
    is_wide = len(lines[0]) > max(8, len(lines))
    return [list(line) for line in zip(*lines, strict=True)] if is_wide else lines


def conditions(rows: Sequence[Row]) -> list[str]:
    """Return the conditions under which rows were measured, such as "solver native"."""
    said = []
    for column, text in CONDITIONS.items():
        found = list(dict.fromkeys(row[column] for row in rows if row.get(column)))
        if column == "seeds" and not found and (seeds := {row["seed"] for row in rows} - {""}):
            found = [str(len(seeds))]
        if found:
            quoted = [f"`{value}`" if column == "command" else value for value in found]
            said.append(f"{text} {'; '.join(quoted) if len(found) < 4 else 'differs'}")
    sizes = {row["parameters"] for row in rows if row["parameters"]}
    return said + ([f"parameters {sizes.pop()}"] if len(sizes) == 1 else [])


def _unfinished(rows: Sequence[Row]) -> str:
    runs = [row for row in rows if row["statistic"] == "unfinished"]
    told = [f"{row['model']}, seed {row['seed']}, {row['epochs_done']} of {row['epochs_asked']} epochs" for row in runs]
    return f"\n\n*Not finished:* {'; '.join(told)}." if told else ""


def claims(path: Path, files: Files) -> str:
    """Return the table of claims as Markdown: claim, verdict, measurement, conditions and page."""
    columns = ("claim", "verdict", "measured", "conditions")
    lines = [[*columns, "page"]]
    for row in read_csv(path):
        link = f"[{row['page'].rpartition('/')[2]}]({row['page']}.md)" if row["page"] else ""
        lines.append([*(substitute(row[name], files) for name in columns), link])
    return markdown(lines) + "\n"


# Figures of the pages


def values(rows: Iterable[Row], table: str, metric: str, case: str = "") -> dict[str, tuple[float, float, float]]:
    """Return (median, minimum, maximum) for each model.

    If there is no median, the geometric mean of the range is used.
    """
    found: dict[str, list[Row]] = {}
    for row in finished(rows):
        if (row["table"], row["metric"], row["case"]) == (table, metric, case):
            found.setdefault(row["model"], []).append(row)
    result = {}
    for model, mine in found.items():
        parts = ([_number(r["value"]) for r in mine if r["statistic"] in part] for part in (CENTRES, LOW, HIGH))
        centre, low, high = parts
        middle = statistics.median(centre) if centre else (low[0] * high[0]) ** 0.5
        every = [*centre, *low, *high]
        result[model] = middle, min(every), max(every)
    return result


def draw_equal_error(files: Files) -> Figure:
    """Draw the function evaluations at equal error, and the time of a training step at equal gradient error."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    rows, levels = files["solvers"], ("1e-3", "1e-5", "1e-7")
    for method in ("nystrom4", "nystrom6", "nystrom8", "tsit5", "dopri5", "DOP853"):
        counts = [values(rows, "evaluations", "nfe_forward", f"RMS error {level}")[method][0] for level in levels]
        style = "-o" if method.startswith("nystrom") else "--s"
        left.plot([float(level) for level in levels], counts, style, label=method, ms=4)
    left.set(xscale="log", yscale="log", xlabel="RMS error", ylabel="evaluations of f")
    left.invert_xaxis()
    ticks_of_short_axis(left.yaxis)
    left.legend(frameon=False, fontsize="small")
    names = {
        "hbnode checkpoint": "hbnode",
        "torchdiffeq odeint": "torchdiffeq, direct",
        "odeint_adjoint dopri5, full norm": "torchdiffeq, adjoint",
        "torchode AutoDiffAdjoint": "torchode",
        "diffrax checkpoint, jit": "diffrax under jit",
    }
    for index, (name, label) in enumerate(names.items()):
        for place, setting in enumerate(("setting A", "setting B")):
            milliseconds = values(rows, "training-step", "ms_per_step", setting)[name][0]
            bars = right.barh(
                place + 0.16 * index, milliseconds, 0.14, color=f"C{index}", label=None if place else label
            )
            right.bar_label(bars, fmt="%.1f", fontsize="small", padding=2)
    right.set(yticks=[0.32, 1.32], yticklabels=["A", "B"], ylabel="setting")
    right.set(xlabel="ms per training step, equal gradient error", xlim=(0, 31))
    right.legend(frameon=False, fontsize="small", loc="center right")
    return figure


def draw_reversible(files: Files) -> Figure:
    """Draw how much memory each gradient method stores, and its error relative to the gradient of stored steps."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows = [row for row in files["exactness"] if row["table"] == "reversible"]
    steps = sorted({int(row["case"].split()[1]) for row in rows})
    labels = {"stored_mib": "MiB alive after the forward pass", "gradient_error": "relative error of the gradient"}
    for ax, (metric, label) in zip(axes, labels.items(), strict=True):
        for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
            found = [values(rows, "reversible", metric, f"steps {n}")[model][0] for n in steps]
            style = "--s" if "reversible" not in model else "-o"
            if any(found):  # "direct" is the reference of the others, so its errors are 0
                ax.plot(steps, found, style, label=model, color=f"C{index}", ms=8 - 2 * index)
        ax.set(xscale="log", yscale="log", xlabel="steps", ylabel=label)
        ax.set_xticks(steps, [str(n) for n in steps])
        ax.minorticks_off()
    axes[1].set_ylim(1e-16, 1e-12)
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def draw_memory(files: Files) -> Figure:
    """Draw the float32 error of linear-attention memories against the decay factor per step."""
    figure, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
    rows = [row for row in files["exactness"] if row["table"] == "memory"]
    decays = list(dict.fromkeys(row["case"] for row in rows))
    for index, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        found = {row["case"]: _number(row["value"]) for row in rows if row["model"] == model}
        finite = [place for place, decay in enumerate(decays) if found[decay] < float("inf")]
        style = "--s" if model == "divided keys" else "-o"
        ax.plot(finite, [found[decays[place]] for place in finite], style, label=model, color=f"C{index}", ms=4)
        failed = [place for place in range(len(decays)) if place not in finite]
        if failed:
            ax.plot(failed, [8e-7] * len(failed), "x", color=f"C{index}", label=f"{model}: NaN")
    ax.set_xticks(range(len(decays)), [decay.removeprefix("decay ") for decay in decays])
    ax.set(xlabel="decay of the memory in a step", ylabel="relative error, float32", yscale="log", ylim=(5e-8, 1e-6))
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_oscillators(files: Files) -> Figure:
    """Draw the test error against training seconds on irregular samples of an aircraft's vibration."""
    figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
    rows = files["plane-vibration"]
    seconds = values(rows, "tuned", "seconds")
    for model, found in values(rows, "tuned", "test_forecast_mse").items():
        x = seconds[model][0]
        _bar(ax, x, found, color="C3" if model in ("oscillators", "kalman") else "C0")
        place, side = {"gru": ((6, -9), "left"), "sonode": ((-6, -3), "right")}.get(model, ((6, 3), "left"))
        label: dict[str, Any] = {"xytext": place, "textcoords": "offset points", "fontsize": 9, "ha": side}
        ax.annotate(name_of(model), (x, found[0]), **label)
    _lines(ax, files, {"last value": ":", "ridge": "--"})
    ax.set(xscale="log", yscale="log", xlabel="processor seconds of training", ylabel="test MSE, eight rows ahead")
    ax.set(xlim=(9, 400))
    ax.set_xticks([10, 30, 100, 300], ["10", "30", "100", "300"])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize="small", loc="upper right", bbox_to_anchor=(1.0, 0.9))
    return figure


def draw_ode_rnns(files: Files) -> Figure:
    """Draw the test error of forecasts, with the same learning rate for all models and with tuned rates."""
    figure, ax = plt.subplots(figsize=(8, 3.8), layout="constrained")
    models = ("node", "anode", "sonode", "hbnode", "ghbnode", "lstm", "gru", "gru-d", "cfc")
    for table, label, shift, color in (
        ("200-epochs", "rate 1e-3, 200 epochs", -0.12, "C0"),
        ("tuned", "tuned rates, 100 epochs", 0.12, "C3"),
    ):
        found = values(files["plane-vibration"], table, "test_forecast_mse")
        for place, model in enumerate(models):
            if model in found:
                _bar(ax, place + shift, found[model], color=color, label=None if place else label)
    _lines(ax, files, {"last value": ":", "constant": "-.", "ridge": "--"})
    ax.set_xticks(range(len(models)), [TITLES[model] for model in models], fontsize=8)
    ax.set(yscale="log", ylabel="test MSE, eight rows ahead")
    ticks_of_short_axis(ax.yaxis)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _bar(ax: Axes, x: float, found: tuple[float, float, float], **style: Any) -> None:
    """Draw a median as a point, and the range of the values as a vertical bar."""
    middle, low, high = found
    ax.errorbar(x, middle, [[middle - low], [high - middle]], fmt="o", ms=5, capsize=2, **style)


def _lines(ax: Axes, files: Files, models: Mapping[str, str]) -> None:
    """Draw the test errors of models without a network as horizontal lines."""
    found = values(files["shallow-rows"], "vibration", "test_forecast_mse")
    for model, style in models.items():
        ax.axhline(found[model][0], color="0.5", ls=style, label=TITLES.get(model, model))


FIGURES = {
    "equal-error": draw_equal_error,
    "reversible": draw_reversible,
    "memory": draw_memory,
    "oscillators": draw_oscillators,
    "ode-rnns": draw_ode_rnns,
}


def write_results(root: Path, out: Path) -> list[Path]:
    """Write all tables and figures for a folder of results, and return the paths of the files."""
    files = read_results(root)
    texts = {"claims": claims(root / "claims.csv", files)}
    for name, rows in files.items():
        texts |= {f"{name}-{table}": text for table, text in tables(name, rows).items()}
    written = []
    for name, text in texts.items():
        path = out / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # Sphinx rebuilds files by date
            write_whole(path, text.encode())
        written.append(path)
    for name, draw in FIGURES.items():
        written.append(out / f"{name}.png")
        write_figure(draw(files), written[-1])
    return written


# Tables and figures of run folders


def rows_of(groups: Iterable[Group], shown: tuple[str, ...]) -> list[Row]:
    """Return a row for each result of the groups whose name begins with an entry of ``shown``."""
    rows = []
    for group in groups:
        for run in group.runs:
            about = dict.fromkeys(COLUMNS, "") | run.conditions() | {"model": group.label}
            for name, value in run.results.items():
                is_last = name in run.config or f"{name}_mean" in run.results  # of the last epoch only
                if name.startswith(shown) and not is_last:
                    rows.append(about | {"metric": name, "value": number(value)})
    return rows


def show(groups: Sequence[Group], shown: tuple[str, ...], heading: str) -> tuple[str, dict[str, Figure]]:
    """Return the table of groups of runs as Markdown, and their figures by file suffix.

    The figures draw the columns of ``metrics.csv``, and of ``tolerance.csv`` if the runs have that file.
    """
    rows = rows_of(groups, shown)
    lines = grid(rows)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    figures = {"": draw_runs(groups, "metrics.csv", shown, heading)}
    measured = [group for group in groups if all((run.path / "tolerance.csv").exists() for run in group.runs)]
    if measured:
        columns = ("forward", "backward", "error", "gradient_error")
        figures["-tolerance"] = draw_runs(measured, "tolerance.csv", columns, heading)
    return "\n".join([heading, *text, " · ".join(conditions(rows))]), figures


def draw_runs(groups: Sequence[Group], file: str, shown: tuple[str, ...], heading: str) -> Figure:
    """Draw columns of a CSV file of each run against its first column."""
    tables = [[read_csv(run.path / file) for run in group.runs] for group in groups]
    x, *names = dict.fromkeys(name for runs in tables for name in runs[0][0])
    every = [row for runs in tables for rows in runs for row in rows]
    names = [name for name in names if name.startswith(shown) and any(float(row.get(name) or 0) for row in every)]
    width, height = min(len(names), 4), -(-len(names) // 4)
    figure = plt.figure(figsize=(2 + 3.7 * width, 4 * height), layout="constrained")
    figure.suptitle(heading, fontsize="medium")
    axes = figure.subplots(height, width, squeeze=False).flat
    for ax, name in zip(axes, names, strict=False):
        draw_panel(ax, groups, tables, x, name)
    for ax in axes[len(names) :]:
        ax.remove()
    legend_beside(figure)
    return figure


def draw_panel(ax: Axes, groups: Sequence[Group], tables: Sequence[Sequence[Sequence[Row]]], x: str, name: str) -> None:
    """Draw column ``name`` of the runs' tables against column ``x``: the median over the seeds and their range."""
    for index, (group, runs) in enumerate(zip(groups, tables, strict=True)):
        found = [rows for rows in zip(*runs, strict=False) if all(row.get(name) for row in rows)]
        if found:
            points = [float(rows[0][x]) for rows in found]
            low, median, high = np.quantile([[float(row[name]) for row in rows] for rows in found], [0, 0.5, 1], axis=1)
            ax.plot(points, median, color=group.color, label=group.label, **line_style(index, len(groups), len(points)))
            ax.fill_between(points, low, high, color=group.color, alpha=0.15, lw=0)
    is_positive = all((np.asarray(line.get_ydata()) > 0).all() for line in ax.get_lines())
    is_loss = name.endswith(("loss", "mse", "error", "perplexity"))
    label = " ".join(ABBREVIATIONS.get(word, word) for word in name.split("_"))
    ax.set(xlabel=x, ylabel=METRICS.get(name, label), yscale="log" if is_positive and is_loss else "linear")
    if name in ("nfe_forward", "nfe_backward", "seconds"):
        ax.set_ylim(bottom=0.0)
    if x == "tolerance":
        ax.set_xscale("log")
        ax.invert_xaxis()
