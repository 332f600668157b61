"""Tables and figures of the pages of Results, drawn from the files that ``tasks.results`` collects.

``write_results(docs/results, docs/_results)`` writes for each ``NAME.csv`` a Markdown table of each of its tables,
``NAME-TABLE.md``, the table of claims, ``claims.md``, and the figures. The build of the documentation calls it, and
pages include what it wrote.

A number in the text of a page or of ``claims.csv`` is a reference: ``{digits.adjoint: hbnode; nfe_backward_mean}`` is
the value of that file, table, model and metric; of several seeds the median. A case and a statistic may follow:
``{transformer-copy.48-symbols: linear; test_accuracy; 750 batches}``, ``{speech.15-epochs: plain; test_mse; range}``.
A reference to nothing, or to more than one thing, is an error.
"""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hbnode.diagnostics._shared import ticks_of_short_axis
from tasks.common.files import write_figure, write_whole
from tasks.result_rows import Row, read_rows

REFERENCE = re.compile(r"\{([a-z0-9-]+)(?:\.([\w.-]+))?: ([^{}]+)\}")
CENTRES, LOW, HIGH = ("", "median", "mean", "sum"), ("min", "q10", "low"), ("max", "q90", "high")
RECURRENT = {
    "plain": "LSTM",
    "gain": "LSTM, same input scale",
    "forget": "LSTM, same forget bias",
    "momentum": "MomentumLSTM",
    "nag": "NAGLSTM",
    "sr": "SRLSTM",
    "adaptive": "adaptive momentum",
    "adam": "AdamLSTM",
    "rmsprop": "RMSPropLSTM",
    "memoryless": "without memory",
}
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
    "nfe_forward_mean": "NFE, forward",
    "nfe_backward_mean": "NFE, backward",
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
CONDITIONS = {
    "data": "data",
    "size": "size",
    "solver": "solver",
    "gradient": "gradient",
    "tolerance": "tolerance",
    "epochs_done": "epochs",
    "seeds": "seeds",
    "cpu": "CPU",
    "threads": "threads",
    "torch": "torch",
    "date": "date",
    "command": "command",
    "origin": "origin",
}
Files = Mapping[str, Sequence[Row]]


def read_results(root: Path) -> dict[str, list[Row]]:
    """Return the rows of every file of results in a folder, by its name."""
    return {path.stem: read_rows(path) for path in sorted(root.glob("*.csv")) if path.stem != "claims"}


# Numbers


def shown(value: str, metric: str) -> str:
    """Return a value as tables show it: shares of accuracy in %, thousands apart, at most four digits of a fraction."""
    try:
        number = Decimal(value)
    except InvalidOperation:
        return value
    if not number.is_finite():
        return value
    if is_share(metric):
        number = number.scaleb(2)
        return f"{number:f}" if -number.as_tuple().exponent <= 1 else f"{number:.1f}"  # type: ignore[operator]
    if number == number.to_integral() and abs(number) < 10**9 and "e" not in value.lower() and "." not in value:
        return f"{int(number):,}" if abs(number) >= 1000 else str(int(number))
    digits = len(number.as_tuple().digits)
    if digits > 4:
        number = Decimal(f"{number:.3g}")
    if abs(number) >= 10**9:
        return f"{float(number):.2g}"
    if abs(number) >= 1000:
        return f"{number:,.0f}"
    return f"{number:f}" if Decimal("1e-4") <= abs(number) or not number else f"{float(number):.2g}"


def is_share(metric: str) -> bool:
    """Whether a metric is a share, shown in %."""
    return metric.endswith(("accuracy", "separates"))


def title(metric: str) -> str:
    """Return what a metric is called at the head of a column."""
    words = (ABBREVIATIONS.get(word, word) for word in metric.split("_"))
    return METRICS.get(metric, " ".join(words) + (" %" if is_share(metric) else ""))


def name_of(model: str, titles: Mapping[str, str] = TITLES) -> str:
    """Return what a model is called, such as "NODE, λ = 0.1" for "node, λ = 0.1"."""
    if model in titles:
        return titles[model]
    kind, comma, rest = model.partition(", ")
    return titles.get(kind, kind) + comma + rest


def spread(rows: Sequence[Row]) -> tuple[str, str, str]:
    """Return centre, least and largest value of rows of one metric; the last two are empty where they are not known."""
    metric = rows[0]["metric"]
    centre = [row["value"] for row in rows if row["statistic"] in CENTRES]
    low = [row["value"] for row in rows if row["statistic"] in LOW]
    high = [row["value"] for row in rows if row["statistic"] in HIGH]
    if len(centre) > 1 and metric == "separates":  # 0 or 1 for each seed
        return shown(f"{statistics.fmean(map(float, centre)):.4g}", metric), "", ""
    if len(centre) > 1:
        numbers = sorted(centre, key=_number)
        middle = statistics.median(map(_number, numbers))
        found = next((value for value in numbers if _number(value) == middle), f"{middle:.6g}")
        centre, low, high = [found], numbers[:1], numbers[-1:]
    return tuple(shown(part[0], metric) if part else "" for part in (centre, low, high))  # type: ignore[return-value]


def _number(value: str) -> float:
    try:
        return float(value)
    except ValueError:  # "diverged" is worse than any number
        return float("inf")


def cell(rows: Sequence[Row]) -> str:
    """Return a cell of a table: the value, or the centre over the seeds and the range."""
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
    """Return how many runs of how many solved their problem: a sum, or a row of 0 or 1 for each seed."""
    total = sum(int(row["value"]) for row in rows)
    return f"{total} of {rows[0]['seeds'] or len(rows)}"


# References


def lookup(files: Files, name: str, table: str, path: str) -> str:
    """Return the number that a reference names, see above."""
    asked = f"{{{name}{'.' + table if table else ''}: {path}}}"
    if name not in files:
        raise ValueError(f"{asked}: there is no file {name}.csv. Fix: one of {', '.join(files)}.")
    model, metric, *rest = (part.strip() for part in path.split(";"))
    statistic = rest.pop() if rest and rest[-1] in ("range", "min", "max") else ""
    case = rest[0] if rest else ""
    rows = [row for row in files[name] if row["metric"] == metric and row["model"] == model and row["case"] == case]
    rows = [row for row in rows if (not table or row["table"] == table) and row["statistic"] != "unfinished"]
    if not rows:
        near = sorted({(row["table"], row["model"], row["metric"], row["case"]) for row in files[name]})
        near = [entry for entry in near if model in entry or metric in entry][:12]
        raise ValueError(f"{asked}: nothing found. Fix: table, model, metric and case, such as {near}.")
    if len({row["table"] for row in rows}) > 1:
        raise ValueError(f"{asked}: in tables {sorted({row['table'] for row in rows})}. Fix: name one, FILE.TABLE.")
    centre, low, high = spread(rows)
    centre = solved(rows) if metric == "solved" else centre
    found = {"": centre, "min": low, "max": high, "range": f"{low}–{high}"}[statistic]
    if not found.strip("–"):
        raise ValueError(f"{asked}: has no {statistic or 'centre'}; it has {[row['statistic'] for row in rows]}.")
    return found


def substitute(text: str, files: Files) -> str:
    """Return a text with every reference replaced by its number."""
    return REFERENCE.sub(lambda match: lookup(files, match[1], match[2] or "", match[3]), text)


# Tables


def tables(name: str, rows: Sequence[Row]) -> dict[str, str]:
    """Return a Markdown table, with its conditions below, for each table of a file."""
    names = dict.fromkeys(row["table"] for row in rows)
    return {table: _table(name, [row for row in rows if row["table"] == table]) for table in names}


def _table(name: str, rows: Sequence[Row]) -> str:
    facts = [row for row in rows if row["statistic"] != "unfinished"]
    models = list(dict.fromkeys(row["model"] for row in facts))
    columns = list(dict.fromkeys((row["metric"], row["case"]) for row in facts))
    cases = list(dict.fromkeys(case for _, case in columns))
    columns.sort(key=lambda column: cases.index(column[1]))
    sizes = {row["model"]: row["parameters"] for row in facts if row["parameters"]}
    titles = TITLES | (RECURRENT if name in ("adding", "copying", "pixels", "speech", "language-model") else {})
    heads = [", ".join(part for part in (title(metric), case) if part) or metric for metric, case in columns]
    seeds = {model: len({row["seed"] for row in facts if row["model"] == model} - {""}) for model in models}
    grid = [["", *(["parameters"] if len(set(sizes.values())) > 1 else []), *heads]]
    for model in models:
        few = f", {seeds[model]} of {max(seeds.values())} seeds" if 0 < seeds[model] < max(seeds.values()) else ""
        line = [name_of(model, titles) + few]
        line += [shown(sizes.get(model, ""), "")] if len(set(sizes.values())) > 1 else []
        mine = [row for row in facts if row["model"] == model]
        line += [cell([row for row in mine if (row["metric"], row["case"]) == column]) for column in columns]
        grid.append(line)
    if len(grid[0]) > 8 and len(grid) < len(grid[0]):
        grid = [list(line) for line in zip(*grid, strict=True)]
    lines = ["| " + " | ".join(line) + " |" for line in grid]
    text = "\n".join([lines[0], "|" + "---|" * len(grid[0]), *lines[1:]]) if facts else "No run has ended yet."
    return f"{text}\n\n{conditions(name, facts or rows)}{_unfinished(rows)}\n"


def conditions(name: str, rows: Sequence[Row]) -> str:
    """Return a paragraph of the conditions that rows were measured under."""
    said = []
    for column, text in CONDITIONS.items():
        found = list(dict.fromkeys(row[column] for row in rows if row[column]))
        if column == "seeds" and not found:
            named = {row["seed"] for row in rows if row["seed"]}
            found = [str(len(named))] if named else []
        if found:
            quoted = [f"`{value}`" if column == "command" else value for value in found]
            said.append(f"{text} {'; '.join(quoted) if len(found) < 4 else 'differs'}")
    sizes = {row["parameters"] for row in rows if row["parameters"]}
    said += [f"parameters {sizes.pop()}"] if len(sizes) == 1 else []
    return f"*Conditions:* {' · '.join(said)} · [{name}.csv]({name}.csv)"


def _unfinished(rows: Sequence[Row]) -> str:
    runs = [row for row in rows if row["statistic"] == "unfinished"]
    told = [f"{row['model']}, seed {row['seed']}, {row['epochs_done']} of {row['epochs_asked']} epochs" for row in runs]
    return f"\n\n*Not finished:* {'; '.join(told)}." if told else ""


def claims(path: Path, files: Files) -> str:
    """Return the table of claims: claim, verdict, what was measured, conditions and page."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    head = "| claim | verdict | measured | conditions | page |"
    text = [head, "|---|---|---|---|---|"]
    for row in rows:
        link = f"[{row['page'].rpartition('/')[2]}]({row['page']}.md)" if row["page"] else ""
        entries = (row["claim"], row["verdict"], row["measured"], row["conditions"])
        text.append("| " + " | ".join(substitute(entry, files) for entry in entries) + f" | {link} |")
    return "\n".join(text) + "\n"


# Figures


def values(rows: Iterable[Row], table: str, metric: str, case: str = "") -> dict[str, tuple[float, float, float]]:
    """Return centre, least and largest value of each model."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if (row["table"], row["metric"], row["case"]) == (table, metric, case) and row["statistic"] != "unfinished":
            found.setdefault(row["model"], []).append(row)
    result = {}
    for model, mine in found.items():
        parts = {part: [_number(r["value"]) for r in mine if r["statistic"] in part] for part in (CENTRES, LOW, HIGH)}
        centre, low, high = parts[CENTRES], parts[LOW], parts[HIGH]
        middle = statistics.median(centre) if centre else (low[0] * high[0]) ** 0.5
        every = [*centre, *low, *high]
        result[model] = middle, min(every), max(every)
    return result


def draw_equal_error(files: Files) -> Figure:
    """Evaluations at equal error, and time of a training step at equal gradient error."""
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
    settings = ("setting A", "setting B")
    names = {
        "hbnode checkpoint": "hbnode",
        "torchdiffeq odeint": "torchdiffeq, direct",
        "odeint_adjoint dopri5, full norm": "torchdiffeq, adjoint",
        "torchode AutoDiffAdjoint": "torchode",
        "diffrax checkpoint, jit": "diffrax under jit",
    }
    for place, setting in enumerate(settings):
        found = values(rows, "training-step", "ms_per_step", setting)
        for index, name in enumerate(names):
            bars = right.barh(place + 0.16 * index, found[name][0], 0.14, color=f"C{index}")
            right.bar_label(bars, fmt="%.1f", fontsize="small", padding=2)
            if not place:
                bars.set_label(names[name])
    right.set(yticks=[0.32, 1.32], yticklabels=[s.removeprefix("setting ") for s in settings], ylabel="setting")
    right.set(xlabel="ms per training step, equal gradient error", xlim=(0, 31))
    right.legend(frameon=False, fontsize="small", loc="center right")
    return figure


def draw_reversible(files: Files) -> Figure:
    """What gradients store and how far they are from the gradient of the stored steps."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    rows = files["exactness"]
    steps = sorted({int(row["case"].split()[1]) for row in rows if row["table"] == "reversible"})
    models = list(dict.fromkeys(row["model"] for row in rows if row["table"] == "reversible"))
    for ax, metric, label in zip(
        axes,
        ("stored_mib", "gradient_error"),
        ("MiB alive after the forward pass", "relative error of the gradient"),
        strict=True,
    ):
        for index, model in enumerate(models):
            found = [values(rows, "reversible", metric, f"steps {n}")[model][0] for n in steps]
            style = "--s" if "reversible" not in model else "-o"
            if any(found):  # direct is what the others are compared with
                ax.plot(steps, found, style, label=model, color=f"C{index}", ms=8 - 2 * index)
        ax.set(xscale="log", yscale="log", xlabel="steps", ylabel=label)
        ax.set_xticks(steps, [str(n) for n in steps])
        ax.minorticks_off()
    axes[1].set_ylim(1e-16, 1e-12)
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def draw_memory(files: Files) -> Figure:
    """The error of memories in float32 against the decay of a step."""
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
    """Error against seconds of training on irregular samples of an aircraft's vibration, all on one machine."""
    figure, ax = plt.subplots(figsize=(7, 3.8), layout="constrained")
    rows = files["plane-vibration"]
    seconds = values(rows, "tuned", "seconds")
    for model, (middle, low, high) in values(rows, "tuned", "test_forecast_mse").items():
        x, bounds = seconds[model][0], [[middle - low], [high - middle]]
        color = "C3" if model in ("oscillators", "kalman") else "C0"
        ax.errorbar(x, middle, bounds, fmt="o", color=color, ms=5, capsize=2)
        place, side = {"gru": ((6, -9), "left"), "sonode": ((-6, -3), "right")}.get(model, ((6, 3), "left"))
        ax.annotate(name_of(model), (x, middle), xytext=place, textcoords="offset points", fontsize=9, ha=side)
    _lines(ax, files, {"last value": ":", "ridge": "--"})
    ax.set(xscale="log", yscale="log", xlabel="processor seconds of training", ylabel="test MSE, eight rows ahead")
    ax.set(xlim=(9, 400))
    ax.set_xticks([10, 30, 100, 300], ["10", "30", "100", "300"])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize="small", loc="upper right", bbox_to_anchor=(1.0, 0.9))
    return figure


def draw_ode_rnns(files: Files) -> Figure:
    """Test error of forecasts at one rate for all, and at tuned rates."""
    figure, ax = plt.subplots(figsize=(8, 3.8), layout="constrained")
    rows = files["plane-vibration"]
    models = ("node", "anode", "sonode", "hbnode", "ghbnode", "lstm", "gru", "gru-d", "cfc")
    labels = {"200-epochs": "rate 1e-3, 200 epochs", "tuned": "tuned rates, 100 epochs"}
    for table, shift, color in (("200-epochs", -0.12, "C0"), ("tuned", 0.12, "C3")):
        found = values(rows, table, "test_forecast_mse")
        for place, model in enumerate(models):
            if model in found:
                middle, low, high = found[model]
                label = labels[table] if model == "node" else None
                bounds = [[middle - low], [high - middle]]
                ax.errorbar(place + shift, middle, bounds, fmt="o", color=color, label=label, capsize=2, ms=5)
    _lines(ax, files, {"last value": ":", "constant": "-.", "ridge": "--"})
    ax.set_xticks(range(len(models)), [TITLES[model] for model in models], fontsize=8)
    ax.set(yscale="log", ylabel="test MSE, eight rows ahead")
    ticks_of_short_axis(ax.yaxis)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _lines(ax: Axes, files: Files, models: Mapping[str, str]) -> None:
    """Draw the test errors of models that are no networks."""
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
    """Write all tables and figures of a folder of results; return their paths."""
    files = read_results(root)
    texts = {"claims": claims(root / "claims.csv", files)} if (root / "claims.csv").exists() else {}
    for name, rows in files.items():
        texts |= {f"{name}-{table}": text for table, text in tables(name, rows).items()}
    written = []
    for name, text in texts.items():
        path = out / f"{name}.md"
        if not path.exists() or path.read_text(encoding="utf-8") != text:  # keeps the build from reading all pages anew
            write_whole(path, text.encode())
        written.append(path)
    for name, draw in FIGURES.items():
        path = out / f"{name}.png"
        write_figure(draw(files), path)
        written.append(path)
    return written
