"""In-context regression with noise, without training: does momentum help a memory with a delta rule?

Pairs of keys k of norm 1 and values W'k + noise are written to a memory S, one pair per step. After each step the
memory is read with a query q of standard normal entries. The error is the mean square of S'q - W'q over the last tenth
of a sequence. The entries of W, and of "white" keys before normalisation, are standard normal. The coordinates of
"ill-conditioned" keys have log-spaced variances from 1 down to 1/12. The delta rule without and with momentum are
compared, each with its best settings: the momentum mu and the step g = s eta / (1 - mu).

The set "safe" contains the settings whose memory stays bounded for repeated keys, s eta <= 3 (1 - mu)^2. The set "any"
contains all settings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hbnode
from tasks.common.config import Options, option, parse
from tasks.common.figures import panels
from tasks.common.run import write_study
from tasks.data.recall import unit_keys

FEATURES, TARGETS = 8, 16
LENGTHS = (100, 300, 1000)  # sequence lengths; the error is measured over the last tenth of each
MOMENTA = (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
STEPS = tuple(0.01 * 2 ** (index / 3) for index in range(23))  # 0.01 to 1.6
KEYS = {"white": 1.0, "ill-conditioned": 12.0}  # ratio of the largest to the smallest variance of a coordinate
NOISES = (0.0, 0.3)


@dataclasses.dataclass(frozen=True)
class RegressionOptions(Options):
    """Command-line options of the study."""

    positive = "sequences"

    sequences: int = option(64, "number of sequences of each kind, with 16 targets each")
    seed: int = option(0, "random seed")
    out: str = option("runs/recall_regression", "folder for the table and the figure")


def deviations(condition: float) -> Tensor:
    """Return the standard deviations of the keys' coordinates before normalisation."""
    return torch.logspace(0, -math.log10(condition) / 2, FEATURES)


def errors(spread: Tensor, noise: float, sequences: int, seed: int) -> Tensor:
    """Return the error of each setting as a tensor (momenta, steps, lengths), averaged over sequences and targets.

    Arguments:
        spread: standard deviations of the keys' coordinates.
        noise: standard deviation of the noise, relative to that of the values without noise.
        sequences: the number of sequences.
        seed: random seed.
    """
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(sequences, 1, FEATURES, TARGETS, generator=generator)
    k = unit_keys(spread, (sequences, 1, max(LENGTHS)), generator)
    q = torch.randn(k.shape, generator=generator)
    v = k @ w
    v = v + noise * torch.randn(v.shape, generator=generator)
    every = [x.expand(-1, len(STEPS), -1, -1) for x in (q, k, v)]
    rows = []
    for momentum in MOMENTA:
        log_momentum = math.log(momentum) if momentum else None
        step = (1 - momentum) * torch.tensor(STEPS)
        read = hbnode.nn.functional.heavy_ball_memory(*every, log_momentum=log_momentum, step=step)
        wrong = (read - q @ w).square().mean((0, 3))
        rows.append(torch.stack([wrong[:, length - length // 10 : length].mean(1) for length in LENGTHS], 1))
    return torch.stack(rows).nan_to_num(torch.inf, torch.inf)


def settings() -> dict[str, Tensor]:
    """Return, for each set of settings, a mask (momenta, steps)."""
    momenta, steps = torch.tensor(MOMENTA)[:, None], torch.tensor(STEPS)[None]
    safe = (momenta == 0) | (steps <= 3 * (1 - momenta))
    return {"safe": safe, "any": torch.ones_like(safe)}


def best(found: Tensor, allowed: Tensor) -> tuple[float, float, float]:
    """Return the smallest error (momenta, steps) of the allowed settings, and its momentum and step."""
    index = int(found.where(allowed, torch.inf).argmin())
    return found.flatten()[index].item(), MOMENTA[index // len(STEPS)], STEPS[index % len(STEPS)]


def rows(found: Tensor, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Return table rows for each length and set of settings: one without momentum and one with momentum."""
    plain = torch.tensor(MOMENTA)[:, None] == 0
    table = []
    for place, length in enumerate(LENGTHS):
        for name, allowed in settings().items():
            delta, _, step = best(found[..., place], allowed & plain)
            error, momentum, with_step = best(found[..., place], allowed & ~plain)
            chosen = {"delta": delta, "delta_step": step, "momentum_delta": error, "momentum": momentum}
            table.append({**about, "length": length, "settings": name, **chosen, "momentum_step": with_step})
    return table


def draw(found: dict[tuple[str, float], Tensor], path: Path) -> None:
    """Draw the error against the step size at the largest length, with a line for each momentum and a panel for each
    kind of key.

    Lines are dotted where the settings are not safe.
    """
    last = {keys: found[keys, NOISES[-1]][..., -1] for keys in KEYS}
    with panels(path, 1, len(KEYS), size=(11, 4), sharey=True) as (_, axes):
        for ax, (keys, errors_of) in zip(axes[0], last.items(), strict=True):
            for index, momentum in enumerate(MOMENTA):
                color = "black" if momentum == 0 else f"C{index - 1}"
                ax.loglog(STEPS, errors_of[index], ":", color=color, lw=1)
                inside = errors_of[index].where(settings()["safe"][index], torch.nan)
                ax.loglog(STEPS, inside, color=color, label=f"μ = {momentum:g}", lw=2.5 if momentum == 0 else 1.5)
            ax.set(title=f"{keys} keys, noise {NOISES[-1]:g}", xlabel="step g = sη/(1 − μ)")
        least = min(float(errors_of.min()) for errors_of in last.values())
        axes[0, 0].set(ylim=(0.7 * least, 20 * least), ylabel=f"error of the memory after {LENGTHS[-1]} keys")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Try all settings, and write ``regression.csv``, ``regression.json`` and ``regression.png``."""
    options = parse(RegressionOptions, {}, __doc__, argv)
    out = Path(options.out)
    found: dict[tuple[str, float], Tensor] = {}
    table = []
    for keys, condition in KEYS.items():
        for noise in NOISES:
            found[keys, noise] = errors(deviations(condition), noise, options.sequences, options.seed)
            table += rows(found[keys, noise], {"keys": keys, "noise": noise})
    print(*table, sep="\n")
    about = {"task": "recall_regression", "sequences": options.sequences, "seed": options.seed, "table": table}
    write_study(out, "regression", table, **about)
    draw(found, out / "regression.png")
    print(f"figure: {out / 'regression.png'}")


if __name__ == "__main__":
    main()
