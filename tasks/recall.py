"""Recall: values that were bound to keys, asked for later; how many bindings a state of fixed size holds.

Multi-query associative recall after Arora et al., Zoology (arXiv:2312.04927): keys and their values in turn, then each
key once more at a random place, where its value is to be predicted. Three kinds:

- "once": each key is bound once.
- "again": each key is bound --times, each time to another value. The last is the answer; the table also has how often
  the first is given.
- "noisy": each key is bound twice --times to the same value, but with some chance the value that is shown is another
  one, drawn at random. The table also has the share that is right by counting what was shown for each key.

A model is trained on a mixture of numbers of pairs (and of chances), each step with one of them, and tested at each and
beyond. All have the same embedding, a convolution over two symbols, and the same width. By default they have equal
parameters, but for a few gates, and equal states: contenders that keep one matrix for each head have half the heads, of
twice the size. Softmax keeps all it has read.

Of each contender the learning rates of --rates are tried with the first seed; the best by validation is run with the
other seeds. ``python -m tasks.recall --preset table`` makes the runs of the page Results, and ``python -m tasks.results
show runs/recall/table`` their table; the preset "zoology" has numbers of pairs, vocabulary and sizes of that paper.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.common.config import option, parse
from tasks.common.run import Run, run_side_by_side
from tasks.common.train import Piece, Samples, Trainer, accuracy, evaluate, require_finite
from tasks.data.recall import IGNORED, Bindings
from tasks.models.contenders import TITLES, ContenderConfig
from tasks.readers import best_rates
from tasks.rows import run_folders

KINDS = ("once", "again", "noisy")
VALIDATION_SEED, TEST_SEED = 2**62, 2**62 + 1  # which no training data has


@dataclasses.dataclass(frozen=True)
class RecallConfig(ContenderConfig):
    """Options of recall; an epoch is some fresh batches."""

    positive = "iterations test_size most keys values times"

    model: str = option("all", "one of {models}, several with commas between, or all")
    kind: str = option("once", f"one of {', '.join(KINDS)}, several with commas between, or all")
    rates: str = option("", "learning rates to choose from, with commas between; empty: --lr", may_change=True)
    epochs: int = option(5, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(100, "batches in an epoch")
    batch_size: int = option(32, "sequences in a step")
    lr: float = option(1e-2, "AdamW's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine or step", ("constant", "cosine", "step"))
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    weight_decay: float = option(0.1, "AdamW's weight decay")
    d_model: int = option(32, "features of a symbol")
    heads: int = option(2, "heads of the attention")
    layers: int = option(2, "layers")
    feedforward: int = option(64, "hidden units of a layer's network")
    equal: str = option("state", "what the contenders share besides parameters", ("heads", "state"))
    most: int = option(16, "most pairs in training, which also has a half, a quarter and an eighth of them", least=8)
    keys: int = option(32, "different keys")
    values: int = option(32, "different values")
    times: int = option(2, "how often a key is bound where it is bound again; twice as often where there is noise")
    test_size: int = option(200, "test sequences of each setting")

    def kinds(self) -> tuple[str, ...]:
        """The kinds that ``--kind`` names."""
        names = KINDS if self.kind == "all" else tuple(dict.fromkeys(self.kind.split(",")))
        for name in names:
            if name not in KINDS:
                raise ValueError(f"argument --kind: invalid choice: {name!r} (choose from {', '.join(KINDS)}, all)")
        return names

    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates to choose from."""
        try:
            return tuple(float(rate) for rate in self.rates.split(",")) if self.rates else (self.lr,)
        except ValueError:
            raise ValueError(f"--rates must be numbers with commas between, got {self.rates!r}") from None

    def check(self) -> None:
        """Refuse what no run can have."""
        super().check()
        if not all(0 < rate < math.inf for rate in self.learning_rates()):
            raise ValueError(f"--rates must be positive, got {self.rates}")
        for kind in self.kinds():
            dataclasses.replace(self, kind=kind).tested()

    def trained(self) -> list[Bindings]:
        """What a kind is trained on, a step each in turn."""
        pairs = [self.most // part for part in (8, 4, 2, 1)]
        if self.kind == "once":
            return [self._bindings(n) for n in pairs]
        if self.kind == "again":
            return [self._bindings(n, self.times, changing=True) for n in pairs[:-1]]
        return [self._bindings(n, 2 * self.times, noise=x) for n in pairs[:-1] for x in (0.0, 0.2, 0.4)]

    def tested(self) -> list[Bindings]:
        """What it is tested on: the same and more pairs, or of noise the more pairs and more noise."""
        if self.kind == "once":
            return [*self.trained(), self._bindings(2 * self.most)]
        if self.kind == "again":
            return [*self.trained(), self._bindings(self.most, self.times, changing=True)]
        chances = (0.0, 0.2, 0.4, 0.6)
        return [self._bindings(self.most // part, 2 * self.times, noise=x) for part in (4, 2) for x in chances]

    def _bindings(self, pairs: int, times: int = 1, *, changing: bool = False, noise: float = 0.0) -> Bindings:
        length = 2 * pairs * times + 2 * pairs
        return Bindings(pairs, length, self.keys, self.values, times, changing, noise)


PRESETS = {
    "table": "--kind all --rates 1e-3,3.16e-3,1e-2,3.16e-2",
    "zoology": "--most 64 --keys 4096 --values 4096 --d-model 128 --feedforward 512 --batch-size 256 --iterations 400 "
    "--epochs 64 --rates 1e-3,3.16e-3,1e-2,3.16e-2 --test-size 1000",
}


class Recaller(nn.Module):
    """Embedding, a causal convolution over two symbols, and a contender that predicts values.

    Arguments:
        config: sizes and contender.
    """

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + config.keys + config.values, config.d_model)
        self.convolution = nn.Conv1d(config.d_model, config.d_model, 2, padding=1)
        self.transformer = config.make_transformer(None, output_size=config.values, norm_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores (batch, length, values) from symbols (batch, length)."""
        x = self.convolution(self.embedding(tokens).transpose(1, 2))[..., :-1].transpose(1, 2)
        scores: Tensor = self.transformer(x)
        return scores


class FreshMixture:
    """Training data: a batch for each step, of one setting after another, drawn for that step alone."""

    unit = "batch"

    def __init__(self, run: Run, config: RecallConfig) -> None:
        self.config, self.device, self.per_epoch = config, run.workers.device, config.iterations
        self.settings = config.trained()

    def piece(self, epoch: int, start: int) -> Piece:
        """The batch of a step."""
        step = epoch * self.per_epoch + start
        generator = torch.Generator().manual_seed(1_000_000_007 * self.config.seed + step)
        tokens, targets, _ = self.settings[step % len(self.settings)].draw(self.config.batch_size, generator)
        batch = tokens.to(self.device), targets.to(self.device)
        return Piece(batch, len(tokens), weight=1.0, rate=1.0, length=1, place=f"batch {start + 1}")


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Mean cross-entropy of the values that are asked for, and the share that is right."""
    tokens, targets, *stale = batch
    asked = targets != IGNORED
    scores, wanted = model(tokens)[asked], targets[asked]
    shares = accuracy(scores, wanted)
    if stale:
        shares["stale"] = accuracy(scores, stale[0][asked])["accuracy"]
    return nn.functional.cross_entropy(scores, wanted), shares


def train(config: RecallConfig) -> None:
    """Train one contender on one kind with one learning rate and one seed, and test it."""
    run = Run("recall", config, f"{config.preset}/{folder_name(config)}")
    if run.workers.size > 1:
        raise SystemExit("recall trains in one process. Fix: no torchrun.")
    model, device = Recaller(config), run.workers.device
    state = config.state_size(max(setting.length for setting in config.trained()))
    run.announce(model, f"{TITLES[config.model]}, {config.kind}, rate {config.lr:g}", f"carries {state} numbers")
    generator = torch.Generator().manual_seed(VALIDATION_SEED)
    held_out = [tuple(x.to(device) for x in setting.draw(64, generator)[:2]) for setting in config.trained()]

    def validate() -> dict[str, float]:
        found = [evaluate(run, model, data, cross_entropy, "validation") for data in held_out]
        return {name: sum(row[name] for row in found) / len(found) for name in found[0]}

    trainer = Trainer(run, model, FreshMixture(run, config), cross_entropy, lambda m: optimizer(m, config))
    results = trainer.fit(validate, every=config.epochs, best="validation_accuracy")
    if not run.is_finished:
        generator = torch.Generator().manual_seed(TEST_SEED)
        for setting in config.tested():
            data = tuple(x.to(device) for x in setting.draw(config.test_size, generator))
            found = evaluate(run, model, data, cross_entropy, "test", config.batch_size)
            name = f"{setting.pairs}" + (f"_{setting.noise:g}" if config.kind == "noisy" else "")
            results[f"test_{name}_accuracy"] = found["test_accuracy"]
            if setting.changing:
                results[f"test_{name}_stale"] = found["test_stale"]
        require_finite(results, "test data", run)
    run.finish(model, state=state, **results)


def optimizer(model: nn.Module, config: RecallConfig) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)


def folder_name(config: RecallConfig) -> str:
    """A run's folder in that of the command."""
    return f"{config.kind}-{config.equal}-{config.model}-lr{config.lr:g}-seed{config.seed}"


def single_runs(
    config: RecallConfig, root: Path, rates: Sequence[float], seeds: Sequence[int]
) -> Iterator[RecallConfig]:
    """A configuration for each kind, contender, learning rate and seed."""
    for kind, model, rate, seed in itertools.product(config.kinds(), config.chosen(), rates, seeds):
        one = dataclasses.replace(config, kind=kind, model=model, lr=rate, rates="", seed=seed, seeds=1)
        yield dataclasses.replace(one, out=str(root / folder_name(one)))


def main(argv: Sequence[str] | None = None) -> None:
    """Train what the command line says, with each learning rate for the first seed and the best one for the others."""
    config = parse(RecallConfig, PRESETS, __doc__, argv)
    root = Path(config.out or Path("runs") / "recall" / config.preset)
    first, rates = config.seed, config.learning_rates()
    failed = run_side_by_side(list(single_runs(config, root, rates, [first])), train)
    chosen, best = [], best_rates(run_folders(root))
    for one in single_runs(config, root, rates[:1], range(first + 1, first + config.seeds)):
        if rate := best.get((one.kind, one.equal, one.model)):
            chosen += list(single_runs(one, root, [rate], [one.seed]))
    failed += run_side_by_side(chosen, train)
    if failed:
        raise SystemExit("\n".join([*failed, f"{len(failed)} runs failed"]))


if __name__ == "__main__":
    main()
