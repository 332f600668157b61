"""Associative recall: the model stores key-value pairs and later predicts the value of a given key.

The task tests the capacity of a recurrent state of fixed size. It follows the multi-query associative recall of Arora
et al., Zoology (arXiv:2312.04927). A sequence contains keys, each followed by its value; then each key appears once
more at a random position, where the model predicts its value. There are three kinds of sequences:

- "once": each key has one value.
- "again": each key appears --times with a different value. The last value is the answer. The table also shows how often
  a model answers with the first value.
- "noisy": each key appears 2 * --times with the same value, which is replaced by a random value with some probability.
  The table also shows the accuracy of answering with the most frequent value of each key.

Training alternates between several numbers of pairs (and noise probabilities), one for each step. The test uses each of
these settings and larger ones. All models have the same embedding, convolution over two symbols, and width. By default
they have equal numbers of parameters, except for a few gates, and states of equal size: models that store one matrix
per head have half as many heads of twice the size. The state of softmax attention grows with the sequence.

Each model is trained with every learning rate of --rates and the first seed. The rate with the best validation accuracy
is used for the other seeds. ``python -m tasks.recall --preset table`` trains the models of the page Results, and
``python -m tasks.results show runs/recall/table`` prints their table. The preset "zoology" uses the numbers of pairs,
the vocabulary and the model sizes of the Zoology paper.
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
VALIDATION_SEED, TEST_SEED = 2**62, 2**62 + 1  # seeds that training data never uses


@dataclasses.dataclass(frozen=True)
class RecallConfig(ContenderConfig):
    """Command-line options of associative recall."""

    positive = "iterations test_size most keys values times"

    model: str = option("all", "one of {models}, several with commas between, or all")
    kind: str = option("once", f"one of {', '.join(KINDS)}, several with commas between, or all")
    rates: str = option("", "learning rates to choose from, with commas between; empty: --lr", may_change=True)
    epochs: int = option(5, "epochs, each of --iterations batches", may_change=True)
    iterations: int = option(100, "batches in an epoch")
    batch_size: int = option(32, "sequences in a batch")
    lr: float = option(1e-2, "AdamW's learning rate")
    schedule: str = option("cosine", "learning rate: constant, cosine or step", ("constant", "cosine", "step"))
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    weight_decay: float = option(0.1, "AdamW's weight decay")
    d_model: int = option(32, "size of a symbol's embedding")
    heads: int = option(2, "number of attention heads")
    layers: int = option(2, "layers")
    feedforward: int = option(64, "hidden units of each layer's feedforward network")
    equal: str = option("state", "what the models have in common besides the number of parameters", ("heads", "state"))
    most: int = option(16, "largest number of pairs in training; 1/2, 1/4 and 1/8 of it are used too", least=8)
    keys: int = option(32, "number of different keys")
    values: int = option(32, "number of different values")
    times: int = option(2, "values per key of the kind again; noisy has twice as many")
    test_size: int = option(200, "test sequences for each data setting")

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of sequences that ``--kind`` names."""
        return names_in(self.kind, KINDS, "--kind")

    def learning_rates(self) -> tuple[float, ...]:
        """Return the learning rates to try."""
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
        """Return the data settings for training, which consecutive steps use in turn."""
        pairs = [self.most // part for part in (8, 4, 2, 1)]
        if self.kind == "once":
            return [self._bindings(n) for n in pairs]
        if self.kind == "again":
            return [self._bindings(n, self.times, changing=True) for n in pairs[:-1]]
        return [self._bindings(n, 2 * self.times, noise=x) for n in pairs[:-1] for x in (0.0, 0.2, 0.4)]

    def tested(self) -> list[Bindings]:
        """Return the data settings for tests: the training settings and harder ones with more pairs or more noise."""
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
    """An embedding, a causal convolution over two symbols, and a transformer that predicts values."""

    def __init__(self, config: RecallConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1 + config.keys + config.values, config.d_model)
        self.convolution = nn.Conv1d(config.d_model, config.d_model, 2, padding=1)
        self.transformer = config.make_transformer(None, output_size=config.values, norm_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, values) for symbols (batch, length)."""
        x = self.convolution(self.embedding(tokens).transpose(1, 2))[..., :-1].transpose(1, 2)
        scores: Tensor = self.transformer(x)
        return scores


class FreshMixture:
    """Training data: a newly drawn batch in each step, from each data setting in turn."""

    unit = "batch"

    def __init__(self, run: Run, config: RecallConfig) -> None:
        self.config, self.device, self.per_epoch = config, run.workers.device, config.iterations
        self.settings = config.trained()

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return the batch of one training step."""
        step = epoch * self.per_epoch + start
        generator = torch.Generator().manual_seed(1_000_000_007 * self.config.seed + step)
        tokens, targets, _ = self.settings[step % len(self.settings)].draw(self.config.batch_size, generator)
        batch = tokens.to(self.device), targets.to(self.device)
        return Minibatch(batch, len(tokens), weight=1.0, rate=1.0, length=1, place=f"batch {start + 1}")


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of the answers, and their accuracy."""
    tokens, targets, *stale = batch
    is_query = targets != IGNORED
    scores, wanted = model(tokens)[is_query], targets[is_query]
    shares = accuracy(scores, wanted)
    if stale:
        shares["stale"] = accuracy(scores, stale[0][is_query])["accuracy"]
    return nn.functional.cross_entropy(scores, wanted), shares


def train(config: RecallConfig) -> None:
    """Train one model on one kind of sequences with one learning rate and one seed, and test it."""
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
    """Return the name of the run folder."""
    return f"{config.kind}-{config.equal}-{config.model}-lr{config.lr:g}-seed{config.seed}"


def single_runs(
    config: RecallConfig, root: Path, rates: Sequence[float], seeds: Sequence[int]
) -> Iterator[RecallConfig]:
    """Yield a configuration for each kind, model, learning rate and seed."""
    for kind, model, rate, seed in itertools.product(config.kinds(), config.chosen(), rates, seeds):
        one = dataclasses.replace(config, kind=kind, model=model, lr=rate, rates="", seed=seed, seeds=1)
        yield dataclasses.replace(one, out=str(root / folder_name(one)))


def main(argv: Sequence[str] | None = None) -> None:
    """Train every model with each learning rate for the first seed, and with the best rate for the other seeds."""
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
