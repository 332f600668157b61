"""A vocabulary of subwords, learned by byte pair encoding (Sennrich et al., 2016) with the package tokenizers."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

PADDING, UNKNOWN = 0, 1  # token ids
SPECIAL = ("<pad>", "<unk>")


def learn_subwords(texts: Iterable[str], size: int) -> Tokenizer:
    """Return a tokenizer of words and runs of punctuation. A decoded text differs from the original only in spaces.

    Batches are padded with :data:`PADDING`; a character that is not in ``texts`` is :data:`UNKNOWN`.

    Arguments:
        texts: the training texts.
        size: size of the vocabulary, including special tokens. It always contains all characters of the texts.
    """
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Split(Regex(r"▁?(?:\w+|[^\w▁]+)"), "isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.enable_padding(pad_id=PADDING, pad_token=SPECIAL[PADDING])
    return tokenizer


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text of token ids, ignoring padding."""
    return tokenizer.decode([n for n in ids if n != PADDING], skip_special_tokens=False)
