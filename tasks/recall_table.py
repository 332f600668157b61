"""The table and the figure of recall, from finished runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from tasks.common.figures import line_style, panels
from tasks.common.files import read_json
from tasks.common.run import write_study
from tasks.data.recall import IGNORED, Bindings
from tasks.models.contenders import TITLES

logger = logging.getLogger("tasks.recall")
NAMES = ["kind", "equal", "model"]
AXES = {"once": "pairs", "again": "pairs", "noisy": "noise"}


def best_rate(folders: Sequence[Path]) -> float | None:
    """The learning rate of the run with the best validation accuracy; None if none has finished."""
    finished = [folder for folder in folders if (folder / "summary.json").exists()]
    if not finished:
        return None
    best = max(finished, key=lambda folder: float(read_json(folder / "summary.json")["best_validation_accuracy"]))
    return float(read_json(best / "config.json")["lr"])


def read_table(root: Path) -> pd.DataFrame:
    """A row for each kind, contender and test: mean, least and largest share over the seeds.

    They are those of the learning rate whose first seed is best by validation.
    """
    folders = [path.parent for path in sorted(root.rglob("summary.json")) if read_json(path)["task"] == "recall"]
    if not folders:
        return pd.DataFrame()
    runs = pd.DataFrame([{**read_json(one / "config.json"), **read_json(one / "summary.json")} for one in folders])
    first = runs.sort_values("seed").drop_duplicates([*NAMES, "lr"])
    best = first.sort_values("best_validation_accuracy").drop_duplicates(NAMES, keep="last")
    runs = runs.merge(best[[*NAMES, "lr"]])
    tests = [name for name in runs if name.startswith("test_") and name.endswith(("accuracy", "stale"))]
    about = [*NAMES, "lr", "parameters", "state", "keys", "values", "times"]
    found = runs.melt(about, tests, "test").dropna(subset="value")
    found[["pairs", "noise", "share"]] = found["test"].str.extract(r"test_(\d+)_(?:([\d.]+)_)?(\w+)")
    found = found.astype({"pairs": int, "noise": float}).fillna({"noise": 0.0})
    found["model"] = pd.Categorical(found["model"], list(TITLES))
    of_test = found.groupby([*about, "pairs", "noise", "share"], observed=True)["value"]
    table = of_test.agg(seeds="count", mean="mean", least="min", largest="max").reset_index()
    table["counting"] = [counted(row) if row["kind"] == "noisy" else None for row in table.to_dict("records")]
    return table.drop(columns=["keys", "values", "times"]).sort_values([*NAMES, "pairs", "noise", "share"])


@functools.cache
def right_by_counting(setting: Bindings, count: int = 500) -> float:
    """How often the value that is shown most often for a key, one of several by chance, is the true one."""
    tokens, targets, _ = setting.draw(count, torch.Generator().manual_seed(0))
    told = tokens[:, : 2 * setting.pairs * setting.times]
    shown = torch.nn.functional.one_hot(told[:, 1::2] - 1 - setting.keys, setting.values)
    sequence, place = (targets != IGNORED).nonzero(as_tuple=True)
    of_key = told[sequence, ::2] == tokens[sequence, place, None]
    votes = (shown[sequence] * of_key.unsqueeze(2)).sum(1)  # that of equal votes the first wins is by chance
    return (votes.argmax(1) == targets[sequence, place]).float().mean().item()


def counted(row: dict) -> float:
    """How often counting is right in a test of the kind "noisy"."""
    times = 2 * row["times"]
    length = 2 * row["pairs"] * (times + 1)
    return right_by_counting(Bindings(row["pairs"], length, row["keys"], row["values"], times, noise=row["noise"]))


def printed(table: pd.DataFrame) -> str:
    """The table as text: for each kind a line for each contender, a column for each test, in percent."""
    parts = []
    for (kind, equal), found in table.groupby(["kind", "equal"]):
        spread = found[["mean", "least", "largest"]].mul(100).round().astype(int).astype(str)
        cells = spread["mean"] + " [" + spread["least"] + "," + spread["largest"] + "]"
        named = found.assign(cell=cells.where(found["seeds"] > 1, (100 * found["mean"]).round(1).astype(str)))
        index = ["model", "lr", "seeds", "parameters", "state"]
        wide = named.pivot(index=index, columns=["pairs", "noise", "share"], values="cell")
        parts.append(f"\n{kind}, equal {equal}: % right\n{wide.rename(index=TITLES).to_string()}")
        if kind == "noisy":
            counting = found.drop_duplicates(["pairs", "noise"])["counting"].mul(100).round(1)
            parts.append(f"counting: {', '.join(map(str, counting))}")
    return "\n".join(parts)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Accuracy against pairs, or against noise with the most pairs, a panel for each kind, a line for each contender.

    The range over the seeds is shaded; lines of contenders of unequal state are broken.
    """
    right = table[table["share"] == "accuracy"]
    kinds = [kind for kind in AXES if kind in set(right["kind"])]
    with panels(path, 1, len(kinds), size=(2 + 4 * len(kinds), 4)) as (_, axes):
        for ax, kind in zip(axes[0], kinds, strict=True):
            found, name = right[right["kind"] == kind], AXES[kind]
            most = found["pairs"].max()
            if kind == "noisy":
                found = found[found["pairs"] == most]
            for (model, equal), line in found.groupby(["model", "equal"], observed=True):
                place = list(TITLES).index(model)
                style = line_style(place, len(TITLES), len(line)) | {"color": f"C{place}"}
                label = TITLES[model] + (", equal heads" if equal == "heads" else "")
                ax.plot(line[name], line["mean"], "--" if equal == "heads" else "-", label=label, **style)
                ax.fill_between(line[name], line["least"], line["largest"], color=f"C{place}", alpha=0.12, lw=0)
            if kind == "noisy":
                counting = found.drop_duplicates("noise")
                ax.plot(counting["noise"], counting["counting"], ":", color="0.4", label="counting")
                ax.set(title=f"noisy, {most} pairs", xlabel="chance of a wrong value")
            else:
                ticks = sorted(set(found["pairs"]))
                ax.set_xscale("log", base=2)
                ax.set_xticks(ticks, map(str, ticks))
                ax.set(title=f"bound {kind}", xlabel="pairs")
            ax.set_ylim(-0.02, 1.02)
        axes[0, 0].set_ylabel("answers right")


def report(root: Path) -> None:
    """Print the table of the finished runs under a folder, and write it and its figure there."""
    table = read_table(root)
    if table.empty:
        logger.warning("no finished run of recall under %s", root)
        return
    print(printed(table))
    rows = table.astype(object).where(table.notna(), "").to_dict("records")
    write_study(root, "recall", rows, task="recall")
    draw(table, root / "recall.png")
    print(f"table and figure: {root / 'recall.csv'}, {root / 'recall.png'}")
