"""Pixel MNIST: classify an image whose pixels are given to a recurrent network one at a time, in order or permuted.

Section 3.1 and appendix A.1 of Nguyen, Baraniuk, Bertozzi, Osher and Wang, MomentumRNN (2020), tables 1, 11 and 13,
figures 3, 6, 9 and 11: the inputs are 784 grey values in [0, 1]. A linear layer maps the last hidden state to the
classes. Training uses cross-entropy, RMSprop and gradient norms clipped to 1. The presets have the hyperparameters of
tables 6 to 10. If the tables do not have a size, the values for the nearest size are used. NAG and adaptive momentum,
which are not in the tables, have the step size of momentum. RMSprop's alpha is 0.9 for cells with gates, as in appendix
A.1, and torch's 0.99 for DTRIV, as in the authors' code.

There are two differences from the paper. The paper reports the best of 150 test accuracies; here the last 10,000 of the
60,000 training images are for validation, and the weights of the best validation epoch are tested once. The paper's
code draws a permutation for each seed; here --permuted uses one permutation for all runs,
numpy.random.RandomState(92916).permutation(784), as in the code of expRNN. "sr" is the paper's equation (9) with
scheduled momentum, which differs from the cell in the paper's LSTM tables.

By default 10,000 images are used, reduced to 14 x 14 pixels by average pooling. This size is for two CPU cores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

import hbnode
from hbnode.nn.recurrent import parameter_groups
from tasks.common.config import option
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, accuracy, fit_and_test
from tasks.data.images import read_digits, read_mnist
from tasks.models.recurrent import OSCILLATORS, VARIANTS, LayerWithReadout, RecurrentConfig, RuleOptions, title

READ = {"mnist": read_mnist, "digits": read_digits}
EDGE = {"mnist": 28, "digits": 8}  # side length of an image in pixels
SIDE = {"mnist": 14, "digits": 8}  # the default of --side
HELD_OUT = 6  # the last 1/6 of the training images are for validation
CLASSES = 10
EVAL_BATCH_SIZE = 250  # small, because adam needs memory for every sample, pixel and gate

# Hyperparameters for an LSTM from tables 7 to 10 of the paper, by (permuted, hidden size).
GATED: dict[tuple[bool, int], dict[str, RuleOptions]] = {
    (False, 128): {
        "momentum": RuleOptions(momentum=0.6, step_size=0.6),
        "adam": RuleOptions(momentum=0.6, step_size=0.6, beta=0.1),
        "rmsprop": RuleOptions(step_size=0.6, beta=0.99),
        "sr": RuleOptions(restart=2, step_size=1.0),
    },
    (True, 128): {
        "momentum": RuleOptions(momentum=0.6, step_size=1.0),
        "adam": RuleOptions(momentum=0.6, step_size=1.0, beta=0.01),
        "rmsprop": RuleOptions(step_size=1.0, beta=0.01),
        "sr": RuleOptions(restart=6, step_size=0.01),
    },
}
GATED[False, 256] = GATED[False, 128] | {"rmsprop": RuleOptions(step_size=0.6, beta=0.9)}
GATED[True, 256] = GATED[True, 128] | {"sr": RuleOptions(restart=40, step_size=0.9)}
# Hyperparameters for DTRIV on permuted MNIST. Those of rules other than momentum are for size 512.
ORTHOGONAL: dict[int, dict[str, RuleOptions]] = {
    size: {
        "momentum": momentum,
        "adam": RuleOptions(momentum=0.3, step_size=0.3, beta=0.8),
        "rmsprop": RuleOptions(step_size=0.3, beta=0.9),
        "sr": RuleOptions(restart=2, step_size=0.3),
    }
    for size, momentum in {
        170: RuleOptions(momentum=0.6, step_size=0.9),
        360: RuleOptions(momentum=0.3, step_size=0.3),
        512: RuleOptions(momentum=0.3, step_size=0.3),
    }.items()
}


@dataclasses.dataclass(frozen=True)
class PixelMnistConfig(RecurrentConfig):
    """Command-line options of pixel MNIST."""

    models = (*VARIANTS, OSCILLATORS)
    positive = "orthogonal_lr"

    dataset: str = option("mnist", "which images", tuple(READ))
    permuted: bool = option(False, "read the pixels in a fixed random order")
    side: int | None = option(None, "side length after average pooling; none: 14 for mnist, 8 for digits")
    train_size: int = option(10_000, "train only on the first N images; 0: all")
    test_size: int = option(2_000, "validate and test only on the first N images; 0: all")
    batch_size: int = option(128, "images in a batch")
    clip: float = option(1.0, "largest norm of the gradient; 0 does not clip")
    hidden: int = option(128, "size of the hidden state")
    orthogonal_lr: float = option(2e-4, "learning rate of DTRIV's orthogonal weight")
    rebase: int = option(0, "move the basis of DTRIV's orthogonal weight every N steps; 0: never")

    def __post_init__(self) -> None:
        edge = EDGE[self.dataset]
        if self.pixels_on_edge < 1 or edge % self.pixels_on_edge:
            raise ValueError(f"--side must divide {edge}, the edge of {self.dataset}, got {self.side}")

    @property
    def pixels_on_edge(self) -> int:
        """The side length of the reduced images: --side or its default."""
        return SIDE[self.dataset] if self.side is None else self.side

    @property
    def memory(self) -> int:
        """The number of pixels, which is the number of steps to remember."""
        return self.pixels_on_edge**2

    def rules(self) -> Mapping[str, RuleOptions]:
        """Return the hyperparameters for this cell, pixel order and hidden size."""
        sizes = ORTHOGONAL if self.cell == "dtriv" else (128, 256)
        nearest = min(sizes, key=lambda size: abs(size - self.hidden))
        return ORTHOGONAL[nearest] if self.cell == "dtriv" else GATED[self.permuted, nearest]

    def make_model(self) -> LayerWithReadout:
        """Return the model that the options describe."""
        return LayerWithReadout(self.make_layer(1, self.rules(), batch_first=True), self.hidden, CLASSES, last=True)


WHOLE = "--dataset mnist --side 28 --train-size 0 --test-size 0 --epochs 150"
_DTRIV = f"{WHOLE} --cell dtriv"  # lower half of table 6; K = infinity there is rebase 0 here
PRESETS = {
    "mnist-128": f"{WHOLE} --hidden 128",
    "mnist-256": f"{WHOLE} --hidden 256",
    "pmnist-128": f"{WHOLE} --permuted --hidden 128",
    "pmnist-256": f"{WHOLE} --permuted --hidden 256",
    "mnist-dtriv-170": f"{_DTRIV} --hidden 170 --rebase 1 --lr 1e-3 --orthogonal-lr 1e-4",
    "mnist-dtriv-360": f"{_DTRIV} --hidden 360 --lr 5e-4 --orthogonal-lr 1e-4",
    "mnist-dtriv-512": f"{_DTRIV} --hidden 512 --rebase 100 --lr 5e-4 --orthogonal-lr 1e-4",
    "pmnist-dtriv-170": f"{_DTRIV} --permuted --hidden 170 --rebase 1 --lr 7e-4 --orthogonal-lr 2e-4",
    "pmnist-dtriv-360": f"{_DTRIV} --permuted --hidden 360 --lr 7e-4 --orthogonal-lr 5e-5",
    "pmnist-dtriv-512": f"{_DTRIV} --permuted --hidden 512 --lr 3e-4 --orthogonal-lr 7e-5",
}


# Data


def load_data(config: PixelMnistConfig) -> dict[str, Samples]:
    """Return the training, validation and test data: pixel sequences (N, pixels, 1) and labels (N,)."""
    (x, y), test = (READ[config.dataset](split) for split in ("train", "test"))
    first = len(x) - len(x) // HELD_OUT
    some = config.test_size or None
    parts = {
        "train": (x[:first][: config.train_size or None], y[:first][: config.train_size or None]),
        "validation": (x[first:][:some], y[first:][:some]),
        "test": (test[0][:some], test[1][:some]),
    }
    return {name: (sequences(images, config), labels) for name, (images, labels) in parts.items()}


def sequences(images: Tensor, config: PixelMnistConfig) -> Tensor:
    """Turn images (N, 1, edge, edge) into pixel sequences (N, pixels, 1), after average pooling and permutation."""
    pixels = nn.functional.avg_pool2d(images, images.shape[-1] // config.pixels_on_edge).flatten(1)
    if config.permuted:
        pixels = pixels[:, permutation(pixels.shape[1])]
    return pixels.unsqueeze(2)


def permutation(pixels: int) -> Tensor:
    """Return the pixel order (pixels,), from numpy's legacy generator, whose numbers never change."""
    return torch.from_numpy(np.random.RandomState(92916).permutation(pixels))


# Model and training


def cross_entropy(model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
    """Return the mean cross-entropy of a batch, and the accuracy."""
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits, y), accuracy(logits, y)


def make_optimizer(model: nn.Module, config: PixelMnistConfig) -> torch.optim.Optimizer:
    """Return RMSprop, with a separate learning rate for an orthogonal weight."""
    if config.cell == "dtriv":
        return torch.optim.RMSprop(parameter_groups(model, config.lr, config.orthogonal_lr), lr=config.lr)
    return torch.optim.RMSprop(model.parameters(), lr=config.lr, alpha=0.9)


def rebase(model: LayerWithReadout, config: PixelMnistConfig, steps: int) -> None:
    """Move the basis of an orthogonal weight after every ``config.rebase`` steps."""
    if config.cell == "dtriv" and config.rebase and steps % config.rebase == 0:
        cast(hbnode.nn.MomentumDTRIV, model.layer).rebase()


def train(config: PixelMnistConfig) -> None:
    """Train one model, and test the weights of the best validation epoch."""
    data = load_data(config)
    order = "permuted" if config.permuted else "in-order"
    label = f"{config.preset}-{config.dataset}-{order}-{config.cell}-{config.model}-seed{config.seed}"
    run = Run("pixel_mnist", config, label)
    model, name = config.make_model(), title(config.model, config.cell)
    sizes = "/".join(f"{len(y):,}" for _, y in data.values())
    run.announce(model, name, f"{sizes} images of {data['train'][0].shape[1]} pixels")
    optimizer = functools.partial(make_optimizer, config=config)
    trainer = Trainer(run, model, Batches(run, data["train"]), cross_entropy, optimizer)
    move = functools.partial(rebase, model, config)
    found = fit_and_test(trainer, data, name, "accuracy", EVAL_BATCH_SIZE, after_step=move)
    run.finish(
        model,
        **found,
        rule=dataclasses.asdict(config.rule_options(config.rules())),
        training_images=len(data["train"][0]),
        test_images=len(data["test"][0]),
        pixels=data["train"][0].shape[1],
    )


main = command(PixelMnistConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
