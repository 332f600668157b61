"""Non-autoregressive translation from English to German: all words are predicted at once and refined a few times.

Section 4.4.4 and table 9 of Wang et al. (2022), after Lee et al., Deterministic Non-Autoregressive Neural Sequence
Modeling by Iterative Refinement (2018). An encoder reads the English sentence and predicts how much longer the German
one is. A first decoder translates the English words, spread over that length. A second decoder refines the translation
--iterations - 1 times. Its inputs are the words and the output vectors of the previous pass. Training has --refinements
passes with equally weighted losses. With probability 1/2 the input of a pass is a corrupted copy of the true
translation instead of the output of the previous pass. The corruption repeats the previous word, inserts a random word,
or swaps a word with the next one. The share of corrupted words falls from pass to pass, to 10 % in the last pass.

The attention layers in the encoder, in the decoders and between them are those of the other tasks. None is causal.
"momentum" is equation 74, in which the last keys have less weight. Recurrent memories such as gated_delta process
tokens in order, so they are not available here.

The sentences are from Tatoeba if ``HBNODE_DATA`` contains tatoeba-deu-eng/deu-eng.zip, otherwise from a simulated
language. No test sentence occurs in the training data, in either language. Both languages share one subword vocabulary.
BLEU is computed by sacrebleu on the original text. The weights with the best validation BLEU are tested once, at the
end: after each pass, and with the true target length ("oracle"). Immediate repetitions of a word are removed from
translations, as in the authors' code.

The preset "paper" has the sizes of Lee et al. for IWSLT'16 (278 features, 507 hidden units, 5 layers, 2 heads, 40,000
subwords, 8 passes). From their code come the 4 passes in training, Adam's learning rate, and the kinds and
probability of corruption. There are five differences. The training targets are human translations instead of the
outputs of a teacher model. All embeddings and output layers share one weight. Sinusoidal positions and hbnode's layers
replace positional attention and highway connections. The learning rate follows a cosine. Each word is corrupted
independently, instead of a fixed number of words. The length predictor is trained at the same time, without a gradient
into the encoder. The default options have short sentences and small layers, for two CPU cores.
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
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, evaluate
from tasks.data.subwords import PADDING, SPECIAL, decode, learn_subwords
from tasks.data.tatoeba import SOURCES, Pair, read_pairs
from tasks.models.contenders import CONTENDERS, attention_of

MAX_OFFSET = 20  # largest difference between the lengths of a sentence and its translation, in subwords
SHOWN = 8  # number of example translations in the summary


@dataclasses.dataclass(frozen=True)
class TranslationConfig(TaskConfig):
    """Command-line options of the translation task."""

    models = tuple(name for name, model in CONTENDERS.items() if not model.causal_only)
    positive = "vocabulary d_model heads layers feedforward refinements iterations"

    epochs: int = option(10, "passes over the training data", may_change=True)
    schedule: str = option("cosine", "learning rate: constant, cosine or step", ("constant", "cosine", "step"))
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    data: str = option("auto", "the sentences; auto: Tatoeba if its file exists", SOURCES)
    max_words: int = option(5, "most words of a sentence; longer pairs are left out; 0: any")
    max_length: int = option(10, "most subwords of a sentence in training; longer pairs are left out; 0: any")
    train_size: int = option(20_000, "pairs to train on; 0: all")
    test_size: int = option(500, "pairs of the validation data and of the test; 0: all")
    vocabulary: int = option(2000, "subwords of both languages")
    d_model: int = option(64, "size of a subword's embedding")
    heads: int = option(4, "heads")
    layers: int = option(2, "layers of the encoder and of each decoder")
    feedforward: int = option(128, "hidden units of each layer's feedforward network")
    dropout: float = option(0.1, "dropout", below=1)
    refinements: int = option(3, "number of decoder passes in training")
    iterations: int = option(8, "number of decoder passes in translation")

    def check(self) -> None:
        """Raise ValueError for options that cannot be combined."""
        super().check()
        if self.d_model % self.heads or self.d_model % 2:
            raise ValueError(f"--d-model must be even and a multiple of --heads, got {self.d_model} and {self.heads}")

    def layer_options(self) -> dict[str, Any]:
        """Return the keyword arguments of an attention layer, which adds no positions; the embedding does."""
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
    """Return the subword indices of the English and of the German sentences, each (N, longest), padded at the end."""
    return tuple(
        torch.tensor([text.ids for text in subwords.encode_batch(list(texts))]) for texts in zip(*pairs, strict=True)
    )


def at_most(samples: Samples, length: int) -> Samples:
    """Return the sentence pairs with at most ``length`` subwords in both languages; with 0, all pairs."""
    if not length:
        return tuple(map(trimmed, samples))
    kept = torch.stack([(x != PADDING).sum(1) <= length for x in samples]).all(0)
    if not kept.any():
        raise ValueError(f"no pair has at most {length} subwords. Fix: a larger --max-length, or 0 for all.")
    return tuple(trimmed(x[kept]) for x in samples)


def trimmed(tokens: Tensor) -> Tensor:
    """Return the tokens without the columns that contain only padding."""
    return tokens[:, : int((tokens != PADDING).sum(1).max())]


def corrupt(tokens: Tensor, share: float, words: int) -> Tensor:
    """Return a copy of the subwords (batch, length) in which a random share of them is corrupted.

    A corrupted subword is replaced by the previous one, replaced by a random one, or swapped with the next one.
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
    """An encoder, two decoders, and a classifier that predicts the length of the translation.

    Arguments:
        words: size of the vocabulary.
        config: options with the kind of attention and the sizes.
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
        """Return embeddings (batch, length, d_model) of subwords, with an initial variance of 1."""
        return self.embedding(tokens) * self.config.d_model**0.5

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the encoder's outputs (batch, length, d_model), and logits for the length difference (batch, 41)."""
        padding = source == PADDING
        x, depth = self.dropout(self.embed(source) + positions(source.shape[1], self.embedding.weight)), None
        for layer in self.encoder:
            x, depth = layer(x, depth, key_padding_mask=padding)
        mean = x.detach().masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True)
        return x, self.length(mean)

    def decode(self, index: int, x: Tensor, padding: Tensor, memory: Tensor, source: Tensor) -> Tensor:
        """Return the output of one pass of the first or the second decoder, (batch, length, d_model)."""
        x, depth = self.dropout(x + positions(x.shape[1], x)), None
        for layer in self.second if index else self.first:
            x, depth = layer(x, memory, depth, key_padding_mask=padding, memory_key_padding_mask=source == PADDING)
        return x

    def read_out(self, x: Tensor) -> Tensor:
        """Return subword logits (batch, length, words)."""
        return nn.functional.linear(x, self.embedding.weight, self.bias)

    def forward(self, source: Tensor, target: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the subword logits after each pass, and the logits for the length difference.

        Arguments:
            source: subwords (batch, length).
            target: subwords (batch, length), which give the target length and, corrupted, the inputs of training
                passes.
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
        """Return the translation after each pass as subwords (batch, length), padded at the end.

        Arguments:
            source: (batch, length).
            lengths: lengths of the translations, (batch,). With None the model predicts them.
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
    """Return sinusoidal position encodings (length, d_model), with wavelengths from 2 pi to 20,000 pi."""
    size = like.shape[-1]
    rates = 10_000 ** -(torch.arange(0, size, 2, device=like.device) / size)
    angles = torch.arange(length, device=like.device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(like.dtype)


def spread(source: Tensor, padding: Tensor) -> Tensor:
    """Stretch or shorten the source to the target length by evenly repeating or dropping subwords.

    Arguments:
        source: (batch, length).
        padding: (batch, target length), True after the end of each target.
    """
    have, want = (source != PADDING).sum(1, keepdim=True), (~padding).sum(1, keepdim=True)
    places = torch.arange(padding.shape[1], device=source.device) * have // want
    return source.gather(1, places.minimum(have - 1)).masked_fill(padding, PADDING)


# Training


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of all passes plus that of the length, and the metrics to report."""
    source, target = map(trimmed, batch)
    scores, offset = model(source, target)
    losses = [nn.functional.cross_entropy(x.flatten(0, 1), target.flatten(), ignore_index=PADDING) for x in scores]
    offsets = ((target != PADDING).sum(1) - (source != PADDING).sum(1)).clamp(-MAX_OFFSET, MAX_OFFSET)
    loss = torch.stack(losses).mean()
    reported = {"loss": loss.item(), "last_pass": losses[-1].item()}
    return loss + nn.functional.cross_entropy(offset, offsets + MAX_OFFSET), reported


def without_repeats(sentence: str) -> str:
    """Return the sentence without immediate repetitions of a word."""
    return " ".join(word for word, _ in itertools.groupby(sentence.split()))


class Judge:
    """Translates sentences and compares the results with reference translations.

    Arguments:
        pairs: the sentences and their translations.
        subwords: the vocabulary.
        batch_size: number of sentences in a batch.
        device: device of the model.
    """

    def __init__(self, pairs: Sequence[Pair], subwords: Tokenizer, batch_size: int, device: torch.device) -> None:
        self.pairs, self.subwords, self.batch_size = pairs, subwords, batch_size
        self.samples = tuple(x.to(device) for x in as_samples(pairs, subwords))

    def translations(self, model: Translator, is_oracle: bool = False) -> list[list[str]]:
        """Return the translations of all sentences after each pass.

        Arguments:
            model: the model.
            is_oracle: whether the model gets the true target lengths.
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
        """Return the BLEU score, in percent, of translations of all sentences."""
        import sacrebleu

        return float(sacrebleu.corpus_bleu(list(sentences), [[german for _, german in self.pairs]]).score)

    def results(self, model: Translator) -> dict[str, object]:
        """Return the test results for the summary."""
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
    """Train for the configured epochs, load the weights of the epoch with the best BLEU, and return both."""
    config, device = model.config, run.workers.device
    judge = Judge(pairs["validation"], subwords, config.batch_size, device)

    def validate() -> dict[str, float]:
        losses = evaluate(run, model, judge.samples, cross_entropy, "validation", config.batch_size)
        return losses | {"validation_bleu": judge.bleu(judge.translations(model)[-1])}

    train = Batches(run, at_most(as_samples(pairs["train"], subwords), config.max_length))
    adam = functools.partial(torch.optim.Adam, lr=config.lr, betas=(0.9, 0.98))
    trainer = Trainer(run, model, train, cross_entropy, lambda model: adam(model.parameters()))
    return trainer.fit(validate, best="validation_bleu")


def train(config: TranslationConfig) -> None:
    """Train one model with one seed, and test the weights of the best epoch once."""
    sizes = {name: getattr(config, name) for name in ("max_words", "train_size", "test_size")}
    parts, source = read_pairs(config.data, **sizes)
    config = dataclasses.replace(config, data=source)  # a run cannot be resumed with other data
    run = Run("translation", config, f"{config.preset}-{source}-{config.model}-seed{config.seed}")
    subwords = learn_subwords((text for pair in parts["train"] for text in pair), config.vocabulary)
    words = subwords.get_vocab_size()
    model = Translator(words, config)
    counts = "/".join(f"{len(part):,}" for part in parts.values())
    run.announce(model, config.model, f"sentences: {source}, {counts}; {words:,} subwords")
    results: dict[str, object] = {**fit(run, model, parts, subwords)}
    if not run.is_finished:
        judge = Judge(parts["test"], subwords, config.batch_size, run.workers.device)
        results |= judge.results(model)
        if run.workers.rank == 0:
            print(f"{config.model}: test BLEU {results['test_bleu']:.4g}, epoch {results['best_epoch']}")
    run.finish(model, source=source, subwords=words, **results)


main = command(TranslationConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
