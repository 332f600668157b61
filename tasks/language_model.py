"""Language model: the next word of a text, with momentum LSTMs in place of AWD-LSTM's.

Section 3.3 and table 3 of Nguyen et al., MomentumRNN: Integrating Momentum into Recurrent Neural Networks (2020). Like
the paper, this task has the model, the regularisation and the training of Merity et al. (2018). Embedding and readout
share a weight. There is dropout of words, of the embedding, between the layers and of the output, each with one mask
for all times, dropout of the entries of U, and penalties on the last layer's output (AR) and on its change (TAR).
Backpropagation is truncated to chunks of varying length; the state is carried over, and the rate is proportional to the
length. SGD averages its iterates from the epoch in which the validation loss stops falling (NT-ASGD).

The text is Penn Treebank if ``HBNODE_DATA`` has ptb/ptb.train.txt, ptb.valid.txt and ptb.test.txt, otherwise
WikiText-2, otherwise a simulated Markov chain of 40 words with a least perplexity of 3.35. Words beyond --vocabulary
are ``<unk>``; perplexities of different vocabularies cannot be compared. The baseline is a unigram model.

The preset "ptb" has the paper's sizes and tables 6, 7 and 10. Its "momentum" has mu = 0 and s = 0.6: no momentum, and
the same model as "gain". Rules without numbers in the paper have these too. Differences from the authors' code, where
the paper says otherwise or nothing: v and the count of the restart are carried from chunk to chunk; the forget gate's
bias is --forget-bias; weights are initialised as in the appendix for the other tasks; the test text is read in ten
columns, like their validation text. The default preset is for two cores: a part of the text, few words, small layers,
and weak regularisation.

The weights of the epoch with the least validation loss are tested once, in the end.

--model transformer has its own options (--model transformer --help): transformers with momentum over depth, and
controls with equal parameters in width and depth, see tasks/models/depth.py. They read windows of Tiny Shakespeare by
characters if ``HBNODE_DATA`` has tinyshakespeare/input.txt, otherwise of the simulated text, and train with AdamW.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import hbnode
from tasks.common.config import option, parse
from tasks.common.run import Run, sweep
from tasks.common.train import Batches, FreshData, Minibatch, Samples, Trainer, epoch_generator, made_by, require_finite
from tasks.common.train import evaluate as evaluate_samples
from tasks.data.text import SOURCES, Text, in_windows, read_text
from tasks.models import depth
from tasks.models.awd_lstm import Averaging, chunk_lengths, drop_recurrent_weights, embed, locked_dropout, penalty
from tasks.models.depth import DepthConfig
from tasks.models.recurrent import RecurrentConfig, RuleOptions

EVAL_COLUMNS = 10  # columns of the validation text and of the test
States = list["hbnode.nn.RecurrentState | None"]  # of each layer

# Rules without a row use that of momentum. The second table is the paper's, tables 7 and 10.
TABLE = {"momentum": RuleOptions(momentum=0.6, step_size=0.6), "sr": RuleOptions(step_size=0.6, restart=2)}
PTB_TABLE = TABLE | {"momentum": RuleOptions(momentum=0.0, step_size=0.6)}


@dataclasses.dataclass(frozen=True)
class LanguageModelConfig(RecurrentConfig):
    """Options of the language model."""

    positive = "embedding layers bptt"

    cell: str = option("lstm", "the layer that the rule is put into", ("lstm", "rnn", "gru"))
    epochs: int = option(10, "passes over the training text", may_change=True)
    batch_size: int = option(20, "columns of the training text")
    lr: float = option(20.0, "SGD's learning rate, for a chunk of --bptt words")
    schedule: str = option("constant", "learning rate: constant; see --patience", ("constant",))
    clip: float = option(0.25, "largest norm of the gradient; 0 does not clip")
    data: str = option("auto", "the text; auto is the first that is there", SOURCES)
    vocabulary: int = option(5000, "different words; 0: all")
    train_size: int = option(200_000, "words of the training text; 0: all")
    test_size: int = option(50_000, "words of the validation text and of the test; 0: all")
    embedding: int = option(64, "size of a word's vector, and of the last layer")
    layers: int = option(2, "recurrent layers")
    bptt: int = option(35, "words of a chunk, on average; in the paper 70, with probability 0.05 half of it")
    dropout: float = option(0.1, "dropout of the output", below=1)
    dropout_between: float = option(0.1, "dropout between the layers", below=1)
    dropout_input: float = option(0.1, "dropout of the embedding", below=1)
    dropout_words: float = option(0.0, "dropout of words from the embedding", below=1)
    weight_drop: float = option(0.1, "dropout of the entries of U", below=1)
    ar: float = option(0.0, "factor of the output's mean square in the loss")
    tar: float = option(0.0, "factor of the mean square of its change")
    weight_decay: float = option(1.2e-6, "SGD's weight decay")
    patience: int = option(5, "epochs without a better validation loss until iterates are averaged; 0: never")


PRESETS = {
    "ptb": "--data ptb --vocabulary 0 --train-size 0 --test-size 0 --embedding 400 --hidden 1150 --layers 3 --lr 30 "
    "--bptt 70 --epochs 500 --dropout 0.4 --dropout-between 0.25 --dropout-input 0.4 --dropout-words 0.1 "
    "--weight-drop 0.5 --ar 2 --tar 1"
}


# The model


class LanguageModel(nn.Module):
    """Embedding, recurrent layers, the last one as wide as the embedding, and the embedding's weight as readout.

    Arguments:
        words: the size of the vocabulary.
        config: sizes and dropouts.
        make: (input size, hidden size) -> a layer.
    """

    def __init__(self, words: int, config: LanguageModelConfig, make: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        sizes = [config.embedding, *[config.hidden] * (config.layers - 1), config.embedding]
        self.embedding = nn.Embedding(words, config.embedding)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        layers = [make(before, after) for before, after in itertools.pairwise(sizes)]
        self.layers = nn.ModuleList(drop_recurrent_weights(layer, config.weight_drop) for layer in layers)
        self.bias = nn.Parameter(torch.zeros(words))

    def forward(self, words: Tensor, states: States) -> tuple[Tensor, Tensor, Tensor, States]:
        """Return scores (T, batch, words), the last layer's output after and before dropout, and the states.

        Arguments:
            words: (T, batch).
            states: of each layer, None at the beginning of a text.
        """
        config, after = self.config, []
        x = locked_dropout(
            embed(self.embedding, words, config.dropout_words, self.training), config.dropout_input, self.training
        )
        for index, (layer, state) in enumerate(zip(self.layers, states, strict=True)):
            if index > 0:
                x = locked_dropout(x, config.dropout_between, self.training)
            with parametrize.cached():  # one mask of U for all accesses of a layer
                x, state = layer(x, state)
            after.append(state)
        dropped = locked_dropout(x, config.dropout, self.training)
        return nn.functional.linear(dropped, self.embedding.weight, self.bias), dropped, x, after

    def fresh(self) -> States:
        """Return the states at the beginning of a text."""
        return [None] * len(self.layers)


def make_model(words: int, config: LanguageModelConfig) -> LanguageModel:
    """Return the model of these options."""
    table = table_of(config)
    return LanguageModel(words, config, lambda before, after: config.make_layer(before, table, hidden_size=after))


def in_columns(text: Tensor, columns: int) -> Tensor:
    """Return a text (N,) as columns (N // columns, columns), without the remainder."""
    rows = len(text) // columns
    if rows < 2:
        raise ValueError(f"a text of {len(text)} words is too short for {columns} columns. Fix: a longer one.")
    return text[: rows * columns].reshape(columns, rows).T.contiguous()


@torch.no_grad()
def evaluate(model: LanguageModel, text: Tensor, bptt: int) -> float:
    """Return the mean loss over the words of a text in columns, without its first row."""
    model.eval()
    states, total = model.fresh(), 0.0
    for x, y in zip(text[:-1].split(bptt), text[1:].split(bptt), strict=True):
        scores, _, _, states = model(x, states)
        total += nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum").item()
    model.train()
    return total / text[1:].numel()


def table_of(config: LanguageModelConfig) -> Mapping[str, RuleOptions]:
    """Return the rules of the preset."""
    return PTB_TABLE if config.preset == "ptb" else TABLE


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss; infinity instead of an overflow."""
    return math.exp(loss) if loss < 700 else math.inf


# Training


class TextChunks:
    """A text in columns, in chunks of varying length, with the state of the layers carried from one to the next.

    Arguments:
        model: the model.
        text: (rows, columns).
        config: ``bptt``, ``seed``, and the factors of the penalties.
    """

    unit = "word"

    def __init__(self, model: LanguageModel, text: Tensor, config: LanguageModelConfig) -> None:
        self.model, self.text, self.config = model, text, config
        self.per_epoch = len(text) - 1  # predicted words of a column
        self.states = model.fresh()

    def minibatch(self, epoch: int, start: int) -> Minibatch:
        """Return the words of a chunk and those after them; an epoch begins with fresh states."""
        if start == 0:
            self.states = self.model.fresh()
        lengths = chunk_lengths(self.per_epoch, self.config.bptt, self.config.seed, epoch)
        length = lengths[list(itertools.accumulate(lengths, initial=0)).index(start)]
        x, y = self.text[start : start + length], self.text[start + 1 : start + 1 + length]
        rate, place = length / self.config.bptt, f"word {start + 1} of the columns"
        return Minibatch((x, y), samples=y.numel(), weight=1.0, rate=rate, length=length, place=place)

    def loss(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the mean cross-entropy with penalties, and without them to report; store the states."""
        x, y = batch
        scores, dropped, raw, states = model(x, self.states)
        self.states = [state.detach() for state in states]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())
        return loss + penalty(dropped, raw, self.config.ar, self.config.tar), {"loss": loss.item()}

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the layers."""
        return {"states": [state and state.as_dict() for state in self.states]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`state_dict`."""
        states = (state and hbnode.nn.RecurrentState(**state) for state in state["states"])
        self.states = [state and state.map(lambda x: x.to(self.text.device)) for state in states]


def fit(run: Run, model: LanguageModel, parts: Mapping[str, Tensor], config: LanguageModelConfig) -> dict[str, float]:
    """Train for the configured epochs, load the best weights, and return their epoch and perplexity."""
    train, validation = (
        in_columns(parts[name], columns).to(run.workers.device)
        for name, columns in (("train", config.batch_size), ("validation", EVAL_COLUMNS))
    )
    chunks = TextChunks(model, train, config)
    averaging = Averaging(list(model.parameters()), config.patience)

    def validate() -> dict[str, float]:
        loss, is_averaged = evaluate(model, validation, config.bptt), averaging.is_on
        require_finite({"loss": loss}, "validation data", run)
        averaging.note(loss)
        losses = {"validation_loss": loss, "validation_perplexity": perplexity(loss)}
        return losses | {"is_averaged": int(is_averaged), "batch_size": config.batch_size}

    sgd = made_by(torch.optim.SGD, lr=config.lr, weight_decay=config.weight_decay)
    trainer = Trainer(run, model, chunks, chunks.loss, sgd, {"averaging": averaging, "chunks": chunks})
    return trainer.fit(
        validate, after_step=lambda position: averaging.step(), best="validation_perplexity", weights=averaging.used
    )


# The run


def train(config: LanguageModelConfig) -> None:
    """Train one model with one seed, and test the best epoch's weights once."""
    text = read(config)
    config = dataclasses.replace(config, data=text.source)  # a run cannot be resumed with another text
    run = Run("language_model", config, f"{config.preset}-{text.source}-{config.cell}-{config.model}-seed{config.seed}")
    if run.workers.size > 1:
        raise SystemExit("a language model trains in one process. Fix: no torchrun.")
    model = make_model(len(text.words), config)
    run.announce(model, config.model, about(text))
    results = fit(run, model, text.parts, config)
    if not run.is_finished:
        test = in_columns(text.parts["test"], EVAL_COLUMNS).to(run.workers.device)
        results |= tested(run, config.model, evaluate(model, test, config.bptt), results)
    rule = dataclasses.asdict(config.rule_options(table_of(config)))
    finish(run, model, text, rule=rule, **results)


def read(config: LanguageModelConfig | DepthConfig, **options: Any) -> Text:
    """Return the text of these options."""
    sizes = {name: getattr(config, name) for name in ("vocabulary", "train_size", "test_size")}
    return read_text(config.data, **sizes, **options)


def about(text: Text) -> str:
    """Return a line about a text."""
    counts = "/".join(f"{len(part):,}" for part in text.parts.values())
    said = f"{counts} words, {len(text.words):,} different; unigram perplexity {text.unigram_perplexity():.4g}"
    return f"text: {text.source}, {said}"


def tested(run: Run, name: str, loss: float, results: Mapping[str, float]) -> dict[str, float]:
    """Return test loss and perplexity for the summary."""
    require_finite({"loss": loss, "perplexity": perplexity(loss)}, "test data", run)
    if run.workers.rank == 0:
        print(f"{name}: test perplexity {perplexity(loss):.4g}, epoch {results['best_epoch']}")
    return {"test_loss": loss, "test_perplexity": perplexity(loss)}


def finish(run: Run, model: nn.Module, text: Text, **results: Any) -> None:
    """Write the summary, with the size of the vocabulary and the unigram perplexity."""
    words, unigram = len(text.words), text.unigram_perplexity()
    run.finish(model, source=text.source, words=words, unigram_perplexity=unigram, **results)


def next_word_loss(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of the words of windows (batch, context + 1) after the first ones."""
    (windows,) = batch
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()), {}


def train_transformer(config: DepthConfig) -> None:
    """Train one transformer with one seed, and test the best epoch's weights once."""
    text = read(config, order=("tinyshakespeare",))
    config = dataclasses.replace(config, data=text.source)
    run = Run("language_model", config, f"{config.preset}-{text.source}-{config.connection}-seed{config.seed}")
    model = config.make_model(len(text.words))
    run.announce(model, f"transformer, {config.connection}", about(text))
    windows = {name: (in_windows(text.parts[name], config.context),) for name in ("validation", "test")}
    samples = len(in_windows(text.parts["train"], config.context, config.context - 1))

    def windows_of(epoch: int) -> Samples:
        start = int(torch.randint(config.context, (), generator=epoch_generator(config.seed, epoch)))
        return (in_windows(text.parts["train"], config.context, start)[:samples],)

    def validate() -> dict[str, float]:
        losses = evaluate_samples(run, model, windows["validation"], next_word_loss, "validation", config.batch_size)
        return losses | {"validation_perplexity": perplexity(losses["validation_loss"])}

    batches = Batches(run, FreshData(samples, windows_of))
    adamw = made_by(torch.optim.AdamW, lr=config.lr, weight_decay=config.weight_decay)
    results = Trainer(run, model, batches, next_word_loss, adamw).fit(validate, best="validation_perplexity")
    if not run.is_finished:
        losses = evaluate_samples(run, model, windows["test"], next_word_loss, "test", config.batch_size)
        results |= tested(run, config.connection, losses["test_loss"], results)
    finish(run, model, text, **results)


def main(argv: Sequence[str] | None = None) -> None:
    """Train the models that the command line names."""
    which = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    which.add_argument("--model")
    if which.parse_known_args(argv)[0].model == "transformer":
        sweep(parse(DepthConfig, {}, depth.__doc__ or "", argv), train_transformer)
    else:
        sweep(parse(LanguageModelConfig, PRESETS, __doc__, argv), train)


if __name__ == "__main__":
    main()
