"""Translation: English to German, all words at once, refined a few times.

Section 4.4.4 and table 9 of Wang et al. (2022), after Lee et al., Deterministic Non-Autoregressive Neural Sequence
Modeling by Iterative Refinement (2018). An encoder reads the English sentence and predicts by how much the German one
is longer. A first decoder turns the English words, spread over that length, into German ones; a second one turns these
into better ones, --iterations - 1 times. It reads the words and the first decoder's, later its own, output vectors. In
training there are --refinements passes, whose losses count alike. With a chance of a half, a pass reads the true
translation, corrupted, in the place of what the pass before made of it: some of its words, fewer with every pass and
10 % in the last, are repeated in the place of the next, replaced, or swapped with the next.

The models are those of all tasks of attention, in the encoder, in the decoders and between them, none of them causal:
"momentum" is equation 74, where the last keys weigh less. Memories read in an order, so they do not apply here.

Sentences: Tatoeba where ``HBNODE_DATA`` has tatoeba-deu-eng/deu-eng.zip, else a made-up language. No sentence of the
test is in training, in either language. Subwords of both languages share one vocabulary. BLEU is sacrebleu's, of text
as it was written, on sentences that a run reads once, in the end, with the weights of the best validation BLEU: after
each pass, and for the true length ("oracle"). A word several times in a row is written once, as in their code.

The preset "paper" has the sizes of Lee et al. for IWSLT'16 (278, 507, 5 layers, 2 heads, 40,000 subwords, 8 passes);
from their code are 4 passes in training, Adam's rate, the kinds of corruption and its chance. Ours departs from it: no
teacher's translations to learn from, but those of people; one weight for all embeddings and readouts; no positional
attention and no highways, but sinusoids and the layers of hbnode; a cosine for the rate; each word is corrupted by
chance, and not a fixed number. The length is learned at the same time, from vectors that it does not change. The
default preset is for two cores: short sentences, small layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

import hbnode
from tasks.common.config import TaskConfig, option
from tasks.common.files import exit_on
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, evaluate
from tasks.data.subwords import PADDING, SPECIAL, decode, learn_subwords
from tasks.data.tatoeba import SOURCES, Pair, Translations, read_pairs
from tasks.models.contenders import CONTENDERS, attention_of

MAX_OFFSET = 20  # the most that a translation is longer or shorter by, in subwords
SHOWN = 8  # translations in the summary


@dataclasses.dataclass(frozen=True)
class TranslationConfig(TaskConfig):
    """Options of translation."""

    models = tuple(name for name, of in CONTENDERS.items() if not of.causal_only)
    positive = "vocabulary d_model heads layers feedforward refinements iterations"

    epochs: int = option(10, "passes over the training data", may_change=True)
    schedule: str = option("cosine", "learning rate: constant, cosine or step", ("constant", "cosine", "step"))
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    data: str = option("auto", "the sentences; auto is Tatoeba if it is there", SOURCES)
    max_words: int = option(5, "most words of a sentence; longer pairs are left out; 0: any")
    max_length: int = option(10, "most subwords of a sentence in training, likewise")
    train_size: int = option(20_000, "pairs to train on; 0: all")
    test_size: int = option(500, "pairs of the validation data and of the test; 0: all")
    vocabulary: int = option(2000, "subwords of both languages")
    d_model: int = option(64, "features of a subword")
    heads: int = option(4, "heads")
    layers: int = option(2, "layers of the encoder and of each decoder")
    feedforward: int = option(128, "hidden units of a layer's network")
    dropout: float = option(0.1, "dropout", below=1)
    refinements: int = option(3, "passes of the decoders in training")
    iterations: int = option(8, "passes in translating")

    def check(self) -> None:
        """Refuse what no run can have."""
        super().check()
        if self.d_model % self.heads or self.d_model % 2:
            raise ValueError(f"--d-model must be even and a multiple of --heads, got {self.d_model} and {self.heads}")

    def layer_options(self) -> dict[str, Any]:
        """The arguments of a layer that the options describe; positions are in the embedding."""
        options = attention_of(self.model)
        if options["attention"] == "softmax":
            options["attention_options"] = {"rotary": False}
        return {"batch_first": True, "causal": False, **options}


PRESETS = {
    "paper": "--d-model 278 --feedforward 507 --layers 5 --heads 2 --vocabulary 40000 --refinements 4 --lr 0.0003 "
    "--batch-size 100 --epochs 30 --max-words 0 --max-length 0 --train-size 0 --test-size 0"
}


# Samples


def as_samples(pairs: Sequence[Pair], subwords: Tokenizer) -> Samples:
    """Numbers of the subwords of English and of German, (N, longest) both, with padding behind them."""
    return tuple(
        torch.tensor([text.ids for text in subwords.encode_batch(list(texts))]) for texts in zip(*pairs, strict=True)
    )


def at_most(samples: Samples, length: int) -> Samples:
    """The pairs of at most that many subwords in either language; 0: all."""
    if not length:
        return tuple(map(trimmed, samples))
    kept = torch.stack([(x != PADDING).sum(1) <= length for x in samples]).all(0)
    if not kept.any():
        raise SystemExit(f"no pair has at most {length} subwords. Fix: a larger --max-length, or 0 for all.")
    return tuple(trimmed(x[kept]) for x in samples)


def trimmed(tokens: Tensor) -> Tensor:
    """Without the columns that hold padding only."""
    return tokens[:, : int((tokens != PADDING).sum(1).max())]


def corrupt(tokens: Tensor, share: float, words: int) -> Tensor:
    """Subwords (batch, length) of which a share is changed, in one of three ways each: see the top of the file.

    A subword is repeated in the place of the next, replaced by any, or swapped with the next.
    """
    kind = torch.rand(tokens.shape, device=tokens.device) * 3 / share
    is_pair = (tokens[:, :-1] != PADDING) & (tokens[:, 1:] != PADDING)
    left, right = tokens[:, :-1], tokens[:, 1:]
    repeated, swapped = is_pair & (kind[:, :-1] < 1), is_pair & (kind[:, :-1] >= 1) & (kind[:, :-1] < 2)
    out = tokens.clone()
    out[:, 1:] = torch.where(repeated | swapped, left, out[:, 1:])
    out[:, :-1] = torch.where(swapped, right, out[:, :-1])
    replaced = (tokens != PADDING) & (kind >= 2) & (kind < 3)
    return torch.where(replaced, torch.randint_like(tokens, len(SPECIAL), words), out)


# The model


class Translator(nn.Module):
    """Encoder, two decoders, and a prediction of the length.

    Arguments:
        words: size of the vocabulary.
        config: model and sizes.
    """

    def __init__(self, words: int, config: TranslationConfig) -> None:
        super().__init__()
        self.config, self.words = config, words
        sizes = config.d_model, config.heads, config.feedforward, config.dropout
        options = config.layer_options()
        self.embedding = nn.Embedding(words, config.d_model, padding_idx=PADDING)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.encoder = nn.ModuleList(
            hbnode.nn.MomentumTransformerLayer(*sizes, **options) for _ in range(config.layers)
        )
        decoder = hbnode.nn.MomentumTransformerDecoderLayer
        self.first = nn.ModuleList(decoder(*sizes, **options) for _ in range(config.layers))
        self.second = nn.ModuleList(decoder(*sizes, **options) for _ in range(config.layers))
        self.bias = nn.Parameter(torch.zeros(words))
        self.length = nn.Linear(config.d_model, 2 * MAX_OFFSET + 1)
        self.dropout = nn.Dropout(config.dropout)

    def embed(self, tokens: Tensor) -> Tensor:
        """Vectors (batch, length, d_model) of subwords, with their variance 1 at first."""
        return self.embedding(tokens) * self.config.d_model**0.5

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoders attend to (batch, length, d_model), and scores of the length's offset (batch, 41)."""
        padding = source == PADDING
        x, depth = self.dropout(self.embed(source) + positions(source.shape[1], self.embedding.weight)), None
        for layer in self.encoder:
            x, depth = layer(x, depth, key_padding_mask=padding)
        mean = x.detach().masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True)
        return x, self.length(mean)

    def decode(self, index: int, x: Tensor, padding: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """A pass of the decoder whose turn it is: vectors to vectors (batch, length, d_model)."""
        x, depth = self.dropout(x + positions(x.shape[1], x)), None
        for layer in self.second if index else self.first:
            x, depth = layer(x, memory, depth, key_padding_mask=padding, memory_key_padding_mask=source == PADDING)
        return x

    def read_out(self, x: Tensor) -> Tensor:
        """Scores (batch, length, words) of the subwords."""
        return nn.functional.linear(x, self.embedding.weight, self.bias)

    def forward(self, source: Tensor, target: Tensor) -> tuple[list[Tensor], Tensor]:
        """Scores of the subwords after each pass, and of the length's offset.

        Arguments:
            source: (batch, length).
            target: likewise; tells the passes how long it is, and in training, corrupted, what to refine.
        """
        memory, offset = self.encode(source)
        padding, passes = target == PADDING, self.config.refinements
        x, scores = self.embed(spread(source, padding)), []
        for index in range(passes):
            out = self.decode(index, x, padding, memory, source)
            scores.append(self.read_out(out))
            tokens = scores[-1].detach().argmax(-1)
            if self.training and index + 1 < passes and torch.rand(()) < 0.5:
                tokens = corrupt(target, 0.9 - 0.8 * (index + 1) / (passes - 1), self.words)
            x = self.embed(tokens) + out
        return scores, offset

    @torch.no_grad()
    def translate(self, source: Tensor, lengths: Tensor | None = None) -> list[Tensor]:
        """Subwords (batch, length) after each pass, with padding behind them.

        Arguments:
            source: (batch, length).
            lengths: of the translations, (batch,); None predicts them.
        """
        memory, offset = self.encode(source)
        if lengths is None:
            lengths = (source != PADDING).sum(1) + offset.argmax(1) - MAX_OFFSET
        lengths = lengths.clamp(min=1)
        padding = torch.arange(int(lengths.max()), device=source.device) >= lengths[:, None]
        x, passes = self.embed(spread(source, padding)), []
        for index in range(self.config.iterations):
            out = self.decode(index, x, padding, memory, source)
            passes.append(self.read_out(out).argmax(-1).masked_fill(padding, PADDING))
            x = self.embed(passes[-1]) + out
        return passes


def positions(length: int, like: Tensor) -> Tensor:
    """Sinusoids (length, d_model) of the places 0, 1, ..., of wavelengths from 2 pi to 20,000 pi."""
    size = like.shape[-1]
    rates = 10_000 ** -(torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


def spread(source: Tensor, padding: Tensor) -> Tensor:
    """The source's subwords (batch, target length), some repeated or left out, evenly, to be as many as the target's.

    Arguments:
        source: (batch, length).
        padding: (batch, target length), True behind the target.
    """
    have, want = (source != PADDING).sum(1, keepdim=True), (~padding).sum(1, keepdim=True)
    places = torch.arange(padding.shape[1], device=source.device) * have // want
    return source.gather(1, places.minimum(have - 1)).masked_fill(padding, PADDING)


# Training


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Mean cross-entropy of the passes, plus that of the length; reported are the former, and the last pass's."""
    source, target = map(trimmed, batch)
    scores, offset = model(source, target)
    losses = [nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), ignore_index=PADDING) for x in scores]
    by = ((target != PADDING).sum(1) - (source != PADDING).sum(1)).clamp(-MAX_OFFSET, MAX_OFFSET)
    loss = torch.stack(losses).mean()
    reported = {"loss": loss.item(), "last_pass": losses[-1].item()}
    return loss + nn.functional.cross_entropy(offset, by + MAX_OFFSET), reported


def without_repeats(sentence: str) -> str:
    """The sentence, with each of its words once where it stands several times in a row."""
    return " ".join(word for word, _ in itertools.groupby(sentence.split()))


class Judge:
    """Translates a part of the data and compares with its translations.

    Arguments:
        pairs: the sentences and their translations.
        subwords: the vocabulary.
        batch_size: sentences that are translated at once.
        device: of the model.
    """

    def __init__(self, pairs: Sequence[Pair], subwords: Tokenizer, batch_size: int, device: torch.device) -> None:
        self.pairs, self.subwords, self.batch_size = pairs, subwords, batch_size
        self.samples = tuple(x.to(device) for x in as_samples(pairs, subwords))

    def translations(self, model: Translator, is_oracle: bool = False) -> list[list[str]]:
        """The sentences after each pass.

        Arguments:
            model: what translates.
            is_oracle: whether it is told how long the translations are.
        """
        model.eval()
        passes: list[list[str]] = [[] for _ in range(model.config.iterations)]
        for source, target in zip(*(x.split(self.batch_size) for x in self.samples), strict=True):
            lengths = (target != PADDING).sum(1) if is_oracle else None
            for sentences, tokens in zip(passes, model.translate(trimmed(source), lengths), strict=True):
                sentences += [without_repeats(decode(self.subwords, row.tolist())) for row in tokens.cpu()]
        model.train()
        return passes

    def bleu(self, sentences: Sequence[str]) -> float:
        """BLEU of a translation of all sentences, in percent."""
        import sacrebleu

        return float(sacrebleu.corpus_bleu(list(sentences), [[german for _, german in self.pairs]]).score)

    def results(self, model: Translator) -> dict[str, object]:
        """What the summary says of the test."""
        begun = time.perf_counter()
        passes = self.translations(model)
        seconds = time.perf_counter() - begun
        bleu = [self.bleu(sentences) for sentences in passes]
        oracle = self.bleu(self.translations(model, is_oracle=True)[-1])
        made = sum(len(self.subwords.encode(sentence)) for sentence in passes[-1])
        shown = [[*pair, passes[0][i], passes[-1][i]] for i, pair in enumerate(self.pairs[:SHOWN])]
        first = {"test_bleu": bleu[-1], "test_bleu_first_pass": bleu[0], "test_bleu_oracle": oracle}
        return first | {"test_bleu_of_passes": bleu, "tokens_per_second": made / seconds, "examples": shown}


def fit(run: Run, model: Translator, pairs: Mapping[str, list[Pair]], subwords: Tokenizer) -> dict[str, float]:
    """Train for the configured epochs; what the summary says of the best, whose weights the model then has."""
    config, device = model.config, run.workers.device
    judge = Judge(pairs["validation"], subwords, config.batch_size, device)

    def validate() -> dict[str, float]:
        losses = evaluate(run, model, judge.samples, cross_entropy, "validation", config.batch_size)
        return losses | {"validation_bleu": judge.bleu(judge.translations(model)[-1])}

    train = Batches(run, at_most(as_samples(pairs["train"], subwords), config.max_length))
    adam = functools.partial(torch.optim.Adam, lr=config.lr, betas=(0.9, 0.98))
    trainer = Trainer(run, model, train, cross_entropy, lambda model: adam(model.parameters()))
    return trainer.fit(validate, best="validation_bleu")


def read(config: TranslationConfig) -> Translations:
    """The sentences that the options name."""
    sizes = {name: getattr(config, name) for name in ("max_words", "train_size", "test_size")}
    with exit_on(FileNotFoundError, ValueError):
        return read_pairs(config.data, **sizes)


def train(config: TranslationConfig) -> None:
    """Train one model with one seed, and test the best epoch's weights once."""
    data = read(config)
    config = dataclasses.replace(config, data=data.source)  # a run is of one text, and is not resumed with another
    run = Run("translation", config, f"{config.preset}-{data.source}-{config.model}-seed{config.seed}")
    subwords = learn_subwords((text for pair in data.parts["train"] for text in pair), config.vocabulary)
    words = subwords.get_vocab_size()
    model = Translator(words, config)
    counts = "/".join(f"{len(part):,}" for part in data.parts.values())
    run.announce(model, config.model, f"sentences: {data.source}, {counts}; {words:,} subwords")
    results: dict[str, object] = {**fit(run, model, data.parts, subwords)}
    if not run.is_finished:
        judge = Judge(data.parts["test"], subwords, config.batch_size, run.workers.device)
        results |= judge.results(model)
        if run.workers.rank == 0:
            print(f"{config.model}: test BLEU {results['test_bleu']:.4g}, epoch {results['best_epoch']}")
    run.finish(model, source=data.source, subwords=words, **results)


main = command(TranslationConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
