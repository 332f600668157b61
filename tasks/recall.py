"""Recall: values bound to keys and queried later, a test of the capacity of a state of fixed size.

Multi-query associative recall after Arora et al., Zoology (arXiv:2312.04927): keys and their values in turn, then each
key once more at a random place, where the model predicts its value. There are three kinds:

- "once": each key is bound once.
- "again": each key is bound --times, each time to another value. The last value is the answer. The table also has how
  often a model answers with the first one.
- "noisy": each key is bound twice --times to the same value, but a binding has another random value with some
  probability. The table also has the accuracy of the most frequent value of each key.

A model is trained on a mixture of numbers of pairs (and of probabilities), one per step, and tested on each of them and
on larger ones. All have the same embedding, a convolution over two symbols, and the same width. By default they have
equal parameters, except for a few gates, and equal states: models with one matrix per head have half the heads, of
twice the size. The state of softmax attention grows with the sequence.

Each model trains with the learning rates of --rates and the first seed; the best one by validation is used for the
other seeds. ``python -m tasks.recall --preset table`` makes the runs of the page Results, and ``python -m tasks.results
show runs/recall/table`` their table. The preset "zoology" has the numbers of pairs, the vocabulary and the sizes of
that paper.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.common.config import names_in, option, parse
from tasks.common.run import Run, run_side_by_side
from tasks.common.train import Minibatch, Samples, Trainer, accuracy, evaluate, made_by, require_finite
from tasks.data.recall import IGNORED, Bindings
from tasks.models.contenders import TITLES, ContenderConfig
from tasks.readers import best_rates
from tasks.rows import run_folders

KINDS = ("once", "again", "noisy")
VALIDATION_SEED, TEST_SEED = 2**62, 2**62 + 1  # no training data has these seeds


@dataclasses.dataclass(frozen=True)
class RecallConfig(ContenderConfig):
    """Options of recall."""

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
    equal: str = option("state", "what is equal between the models besides parameters", ("heads", "state"))
    most: int = option(16, "most pairs in training; also a half, a quarter and an eighth of them", least=8)
    keys: int = option(32, "different keys")
    values: int = option(32, "different values")
    times: int = option(2, "bindings of a key of kind again; noisy has twice as many")
    test_size: int = option(200, "test sequences of each setting")

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that ``--kind`` names."""
        return names_in(self.kind, KINDS, "--kind")

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rates to choose from."""
        try:
            return tuple(float(rate) for rate in self.rates.split(",")) if self.rates else (self.lr,)
        except ValueError:
            raise ValueError(f"--rates must be numbers with commas between, got {self.rates!r}") from None

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        super().check()
        if not all(0 < rate < math.inf for rate in self.learning_rates()):
            raise ValueError(f"--rates must be positive, got {self.rates}")
        for kind in self.kinds():
            dataclasses.replace(self, kind=kind).tested()

    def trained(self) -> list[Bindings]:
        """Return the settings of training, one for each step in turn."""
        pairs = [self.most // part for part in (8, 4, 2, 1)]
        if self.kind == "once":
            return [self._bindings(n) for n in pairs]
        if self.kind == "again":
            return [self._bindings(n, self.times, changing=True) for n in pairs[:-1]]
        return [self._bindings(n, 2 * self.times, noise=x) for n in pairs[:-1] for x in (0.0, 0.2, 0.4)]

    def tested(self) -> list[Bindings]:
        """Return the settings of tests: those of training and more pairs, or with noise more pairs and more noise."""
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
    """Embedding, a causal convolution over two symbols, and a transformer that predicts values."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + config.keys + config.values, config.d_model)
        self.convolution = nn.Conv1d(config.d_model, config.d_model, 2, padding=1)
        self.transformer = config.make_transformer(None, output_size=config.values, norm_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores (batch, length, values) for symbols (batch, length)."""
        x = self.convolution(self.embedding(tokens).transpose(1, 2))[..., :-1].transpose(1, 2)
        scores: Tensor = self.transformer(x)
        return scores


class FreshMixture:
    """Training data with a new batch in each step, of each setting in turn."""

    unit = "batch"

    def __init__(self, run: Run, config: RecallConfig) -> None:
        self.config, self.device, self.per_epoch = config, run.workers.device, config.iterations
        self.settings = config.trained()

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return the batch of a step."""
        step = epoch * self.per_epoch + start
        generator = torch.Generator().manual_seed(1_000_000_007 * self.config.seed + step)
        tokens, targets, _ = self.settings[step % len(self.settings)].draw(self.config.batch_size, generator)
        batch = tokens.to(self.device), targets.to(self.device)
        return Minibatch(batch, len(tokens), weight=1.0, rate=1.0, length=1, place=f"batch {start + 1}")


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of the answers, and the accuracy."""
    tokens, targets, *stale = batch
    is_query = targets != IGNORED
    scores, wanted = model(tokens)[is_query], targets[is_query]
    shares = accuracy(scores, wanted)
    if stale:
        shares["stale"] = accuracy(scores, stale[0][is_query])["accuracy"]
    return nn.functional.cross_entropy(scores, wanted), shares


def train(config: RecallConfig) -> None:
    """Train one model on one kind with one learning rate and one seed, and test it."""
    run = Run("recall", config, f"{config.preset}/{folder_name(config)}")
    if run.workers.size > 1:
        raise SystemExit("recall trains in one process. Fix: no torchrun.")
    model = Recaller(config)
    state = config.state_size(max(setting.length for setting in config.trained()))
    run.announce(model, f"{TITLES[config.model]}, {config.kind}, rate {config.lr:g}", f"state of {state} numbers")
    generator = torch.Generator().manual_seed(VALIDATION_SEED)
    held_out = [setting.draw(64, generator)[:2] for setting in config.trained()]

    def validate() -> dict[str, float]:
        found = [evaluate(run, model, data, cross_entropy, "validation") for data in held_out]
        return {name: sum(row[name] for row in found) / len(found) for name in found[0]}

    adamw = made_by(torch.optim.AdamW, lr=config.lr, weight_decay=config.weight_decay)
    trainer = Trainer(run, model, FreshMixture(run, config), cross_entropy, adamw)
    results = trainer.fit(validate, every=config.epochs, best="validation_accuracy")
    if not run.is_finished:
        generator = torch.Generator().manual_seed(TEST_SEED)
        for setting in config.tested():
            drawn = setting.draw(config.test_size, generator)
            found = evaluate(run, model, drawn, cross_entropy, "test", config.batch_size)
            name = f"{setting.pairs}" + (f"_{setting.noise:g}" if config.kind == "noisy" else "")
            results[f"test_{name}_accuracy"] = found["test_accuracy"]
            if setting.changing:
                results[f"test_{name}_stale"] = found["test_stale"]
        require_finite(results, "test data", run)
    run.finish(model, state=state, **results)


def folder_name(config: RecallConfig) -> str:
    """Return the name of a run's folder."""
    return f"{config.kind}-{config.equal}-{config.model}-lr{config.lr:g}-seed{config.seed}"


def single_runs(
    config: RecallConfig, root: Path, rates: Sequence[float], seeds: Sequence[int]
) -> Iterator[RecallConfig]:
    """Yield a configuration for each kind, model, learning rate and seed."""
    for kind, model, rate, seed in itertools.product(config.kinds(), config.chosen(), rates, seeds):
        one = dataclasses.replace(config, kind=kind, model=model, lr=rate, rates="", seed=seed, seeds=1)
        yield dataclasses.replace(one, out=str(root / folder_name(one)))


def main(argv: Sequence[str] | None = None) -> None:
    """Train all models: with each learning rate for the first seed, and with the best one for the other seeds."""
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
