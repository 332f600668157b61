"""The Long Range Arena: ListOps, text, retrieval, pixel CIFAR-10 and Pathfinder, classified from long sequences.

Section 4.4.3 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), table 8, after
Tay et al., Long Range Arena (arXiv:2011.04006): an encoder of 2 layers with 64 features, 2 heads and a feedforward size
of 128, norms before the blocks, the mean over the tokens that are no padding, and a small network on it. It is trained
by AdamW with the linear one-cycle schedule of Xiong et al., Nyströmformer (arXiv:2102.03902): the learning rate rises
from a 25th of its largest value, and falls to a 10,000th of where it began.

The presets have the batch sizes, steps and warm-ups of that paper's code. ListOps is made up by the published rules;
"listops-small" has expressions of 33 to 127 tokens, for one core. Images are those of CIFAR-10 in grey, a pixel a
token. Text (aclImdb), Retrieval (lra_release/tsv_data) and Pathfinder (lra_release/pathfinder32) are read from
HBNODE_DATA.

Beside every accuracy stand those of guesses that need no reading, on the same data: the most frequent class, and on
ListOps the most frequent value for the first operator. On the benchmark's ListOps they are 17.5 and 37.2 %.

Attention is bidirectional where it can be. The memories (gated_linear, gated_delta, heavy_ball) read in order, so a
token sees only those before it, and the mean over all tokens joins what they have read.

Departures from the benchmark: a tenth of the training data of text and images is held out, and picks the epoch whose
weights are tested. The benchmark has no such part of text.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor, nn

from tasks.common.config import option
from tasks.common.files import exit_on
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, accuracy, fit_and_test
from tasks.data.images import read_cifar10
from tasks.data.listops import SYMBOLS, make_listops, trivial_accuracies
from tasks.data.long_range import read_aan, read_imdb, read_pathfinder
from tasks.models.contenders import CONTENDERS, TITLES, ContenderConfig

LISTOPS_SAMPLES = {"validation": 2_000, "test": 2_000, "train": 96_000}  # in this order, whatever the sizes
GREY = (0.299, 0.587, 0.114)  # weights of red, green and blue, ITU-R BT.601
BYTES = 256
DATA_SEED = 0  # of ListOps, and of what is held out: the data is the same for all runs
START, END = 1 / 25, 1 / 25 / 10_000  # of the learning rate's cycle


@dataclasses.dataclass(frozen=True)
class Task:
    """What is fixed for a task of the benchmark.

    Attributes:
        vocabulary: tokens.
        classes: labels.
        length: the most tokens that a sequence has.
        sequences: in a sample.
    """

    vocabulary: int
    classes: int
    length: int
    sequences: int = 1


TASKS = {
    "listops": Task(len(SYMBOLS), 10, 2000),
    "text": Task(BYTES, 2, 4000),
    "retrieval": Task(BYTES, 2, 4000, sequences=2),
    "image": Task(BYTES, 10, 1024),
    "pathfinder": Task(BYTES, 2, 1024),
}


@dataclasses.dataclass(frozen=True)
class LRAConfig(ContenderConfig):
    """Options of the Long Range Arena; an epoch is some batches."""

    positive = "iterations warmup"

    dataset: str = option("listops", "which task", tuple(TASKS))
    min_length: int = option(500, "of listops: expressions have more tokens")
    max_length: int = option(0, "of listops: expressions have fewer tokens; text and retrieval are cut; 0: the task's")
    train_size: int = option(0, "train on the first N samples only; 0: all, of listops 96,000")
    test_size: int = option(0, "validate and test on the first N samples only; 0: all, of listops 2,000")
    epochs: int = option(10, "epochs, each of --iterations batches")
    iterations: int = option(500, "batches in an epoch")
    warmup: int = option(1000, "steps in which the learning rate rises")
    batch_size: int = option(32, "samples in a step")
    lr: float = option(1e-4, "AdamW's largest learning rate")
    d_model: int = option(64, "features of a token")
    heads: int = option(2, "heads of the attention")
    layers: int = option(2, "layers")
    feedforward: int = option(128, "hidden units of a layer's network, and of the classifier's")
    dropout: float = option(0.1, "probability of dropout", below=1)

    def check(self) -> None:
        """Refuse what no run can have."""
        super().check()
        if self.schedule != "constant":
            raise ValueError(
                f"--schedule is the cycle that --warmup describes, got {self.schedule}. Fix: leave it out."
            )
        if self.warmup >= self.steps:
            raise ValueError(f"--warmup must be below the {self.steps} steps of the run, got {self.warmup}")

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return self.epochs * self.iterations

    @property
    def longest(self) -> int:
        """What --max-length says or leaves open."""
        return self.max_length or TASKS[self.dataset].length


PRESETS = {
    "listops": "--dataset listops --batch-size 32 --epochs 10 --iterations 500 --warmup 1000",
    "listops-small": "--dataset listops --batch-size 32 --epochs 8 --iterations 250 --warmup 200 --lr 1e-3 "
    "--min-length 32 --max-length 128 --train-size 20000",
    "text": "--dataset text --batch-size 32 --epochs 40 --iterations 500 --warmup 8000",
    "retrieval": "--dataset retrieval --batch-size 32 --epochs 60 --iterations 500 --warmup 800",
    "image": "--dataset image --batch-size 256 --epochs 70 --iterations 500 --warmup 175",
    "pathfinder": "--dataset pathfinder --batch-size 256 --epochs 120 --iterations 520 --warmup 312",
}


# Data


def load_data(config: LRAConfig) -> dict[str, Samples]:
    """Tokens (N, [2,] longest), lengths (N, [2]) and labels (N,) of training, validation and test.

    Samples of the last two are in the order of their lengths, so that batches have little padding.
    """
    with exit_on(FileNotFoundError, ValueError):
        parts = READ[config.dataset](config)
    cut = {"train": config.train_size, "validation": config.test_size, "test": config.test_size}
    parts = {name: tuple(x[: size or None] for x in parts[name]) for name, size in cut.items()}
    for name in ("validation", "test"):
        order = parts[name][1].reshape(len(parts[name][1]), -1).amax(1).argsort(stable=True)
        parts[name] = tuple(x[order] for x in parts[name])
    return parts


def _listops(config: LRAConfig) -> dict[str, Samples]:
    given = {"train": config.train_size, "validation": config.test_size, "test": config.test_size}
    sizes = {name: given[name] or size for name, size in LISTOPS_SAMPLES.items()}
    count, lengths = sum(sizes.values()), {"min_length": config.min_length, "max_length": config.longest}
    return _split(make_listops(count, DATA_SEED, **lengths), **sizes)


def _text(config: LRAConfig) -> dict[str, Samples]:
    return _held_out(read_imdb("train", config.longest)) | {"test": _shuffled(read_imdb("test", config.longest))}


def _retrieval(config: LRAConfig) -> dict[str, Samples]:
    return {part: read_aan(part, config.longest) for part in ("train", "validation", "test")}


def _image(config: LRAConfig) -> dict[str, Samples]:
    train, test = (_pixels(*read_cifar10(split)) for split in ("train", "test"))
    return _held_out(train) | {"test": test}


def _pixels(images: Tensor, labels: Tensor) -> Samples:
    """Colour images (N, 3, 32, 32) in [0, 1] as sequences of grey levels, row by row."""
    grey = torch.einsum("nchw,c->nhw", images, torch.tensor(GREY))
    tokens = (255 * grey).round().to(torch.uint8).flatten(1)
    return tokens, torch.full((len(tokens),), tokens.shape[1]), labels


def _pathfinder(config: LRAConfig) -> dict[str, Samples]:
    tokens, labels = read_pathfinder()
    data = _shuffled((tokens, torch.full((len(tokens),), tokens.shape[1]), labels))
    first, second, count = 8 * len(labels) // 10, 9 * len(labels) // 10, len(labels)
    return _split(data, train=first, validation=second - first, test=count - second)


READ = {"listops": _listops, "text": _text, "retrieval": _retrieval, "image": _image, "pathfinder": _pathfinder}


def _shuffled(data: Samples) -> Samples:
    """The samples in an order that is the same for all runs."""
    order = torch.randperm(len(data[-1]), generator=torch.Generator().manual_seed(DATA_SEED))
    return tuple(x[order] for x in data)


def _held_out(data: Samples) -> dict[str, Samples]:
    """Training data, and a tenth of it for validation."""
    tenth = len(data[-1]) // 10
    return _split(_shuffled(data), train=len(data[-1]) - tenth, validation=tenth)


def _split(data: Samples, **sizes: int) -> dict[str, Samples]:
    """Parts of the samples by name, one after another."""
    return dict(zip(sizes, zip(*(x.split(list(sizes.values())) for x in data), strict=True), strict=True))


def trivial(config: LRAConfig, data: dict[str, Samples], part: str) -> dict[str, float]:
    """Accuracies on a part of the data that need no reading."""
    if config.dataset == "listops":
        return trivial_accuracies(data["train"], data[part])
    commonest = data["train"][2].mode().values
    return {"majority_accuracy": (data[part][2] == commonest).float().mean().item()}


# Model and training


class SequenceClassifier(nn.Module):
    """An encoder, the mean of its outputs over the tokens that are no padding, and a small network.

    Of two sequences a and b in a sample, the network gets a, b, a * b and a - b.
    """

    def __init__(self, config: LRAConfig) -> None:
        super().__init__()
        task, width = TASKS[config.dataset], config.d_model
        self.encoder = config.make_transformer(
            task.vocabulary, output_size=width, norm_first=True, causal=CONTENDERS[config.model].causal_only
        )
        features = width if task.sequences == 1 else 4 * width
        self.head = nn.Sequential(
            nn.Linear(features, config.feedforward), nn.ReLU(), nn.Linear(config.feedforward, task.classes)
        )

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Scores (batch, classes).

        Arguments:
            tokens: (batch, length), or of pairs (batch, 2, length).
            lengths: how many of them are no padding, (batch,) or (batch, 2).
        """
        encoded = self.pooled(tokens.flatten(0, -2), lengths.flatten())
        if tokens.dim() == 3:
            a, b = encoded.unflatten(0, (-1, 2)).unbind(1)
            encoded = torch.cat([a, b, a * b, a - b], dim=1)
        scores: Tensor = self.head(encoded)
        return scores

    def pooled(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """The mean over the tokens that count, (batch, d_model); 0 where there are none."""
        is_padding = torch.arange(tokens.shape[1], device=tokens.device) >= lengths.unsqueeze(1)
        outputs = self.encoder(tokens, key_padding_mask=is_padding)
        total = outputs.masked_fill(is_padding.unsqueeze(2), 0.0).sum(1)
        return total / lengths.clamp(min=1).unsqueeze(1)


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """The mean cross-entropy of a batch, and the accuracy."""
    tokens, lengths, labels = batch
    scores = model(tokens[..., : int(lengths.max())].long(), lengths)
    return nn.functional.cross_entropy(scores, labels), accuracy(scores, labels)


def one_cycle(step: int, steps: int, warmup: int) -> float:
    """The factor of the learning rate: in a line from START to 1 at the end of the warm-up, and from there to END."""
    peak = warmup - 1
    if step < peak:
        return START + (1 - START) * step / peak
    return 1 + (END - 1) * (step - peak) / (steps - 1 - peak)


def train(config: LRAConfig) -> None:
    """Train one model, and test the weights of the epoch that is best by validation."""
    data = load_data(config)
    run = Run("lra", config, f"{config.preset}-{config.dataset}-{config.model}-seed{config.seed}")
    model, guesses = SequenceClassifier(config), trivial(config, data, "test")
    sizes = "/".join(f"{len(part[2]):,}" for part in data.values())
    order = "each token sees those before it" if model.encoder.causal else "all tokens see each other"
    about = f"{sizes} samples of at most {data['train'][0].shape[-1]} tokens, {order}"
    named = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in guesses.items())
    run.announce(model, f"{TITLES[config.model]} on {config.dataset}", about, f"without reading: {named}")
    rate = functools.partial(one_cycle, steps=config.steps, warmup=config.warmup)
    batches = Batches(run, data["train"], config.iterations, rate)
    trainer = Trainer(run, model, batches, cross_entropy, lambda m: torch.optim.AdamW(m.parameters(), lr=config.lr))
    found = fit_and_test(trainer, data, TITLES[config.model], "accuracy", config.batch_size)
    found |= {f"validation_{name}": value for name, value in trivial(config, data, "validation").items()}
    run.finish(model, **found, **guesses, causal=model.encoder.causal, training_samples=len(data["train"][2]))


main = command(LRAConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
