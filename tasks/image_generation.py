"""Image generation: the pixels of digits, MNIST and CIFAR-10, one after the other.

Section 4.4.2 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), tables 6 and
7, figure 15. A causal transformer reads the levels of the pixels so far, row by row, in CIFAR-10 red, green and blue in
turn. It predicts the next level by a discretized mixture of logistics. The models are compared by bits per dimension,
the mean of -log2 P over all pixels. The first pixel follows a start symbol.

The presets "mnist" and "cifar10" have the paper's sizes: 8 and 16 layers of 8 heads with 32 features each, a
feedforward size of 1,024, 10 logistics, RAdam. The rest is from the authors' code: weight decay 0.01, batches of 10 and
4, beta 0.6 and 0.1, gamma 0.9, and for CIFAR-10 a learning rate of 2e-4. By default a model that is small enough for
one core learns scikit-learn's digits. The preset "mnist-small" is MNIST averaged down to 14 x 14.

In the end images are drawn one pixel at a time from the recurrent state; samples.png shows them above test images. The
test images choose no epoch: the result is that of the last one. tasks.studies.image_throughput measures images per
second.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import torch
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn

import hbnode
from tasks.common.config import option
from tasks.common.figures import figure_at
from tasks.common.run import Run, command
from tasks.common.train import Samples, fit, made_by
from tasks.data.images import READ, SHAPE
from tasks.models import logistic_mixture
from tasks.models.contenders import TITLES, ContenderConfig

LEVELS = {"digits": 17, "mnist": 256, "cifar10": 256}


@dataclasses.dataclass(frozen=True)
class ImageGenerationConfig(ContenderConfig):
    """Options of image generation."""

    positive = "logistics"

    dataset: str = option("digits", "which images", tuple(READ))
    side: int | None = option(None, "pixels of an edge after averaging; none: all")
    train_size: int = option(0, "train only on the first N images; 0: all")
    test_size: int = option(0, "test only on the first N images; 0: all")
    batch_size: int = option(32, "images in a step")
    weight_decay: float = option(0.01, "RAdam's, decoupled from the gradient")
    logistics: int = option(5, "components of the mixture")
    drawn: int = option(10, "images to draw in the end; 0: none", may_change=True)

    def __post_init__(self) -> None:
        edge = SHAPE[self.dataset][1]
        if self.side is not None and (self.side < 1 or edge % self.side):
            raise ValueError(f"--side must divide {edge}, the edge of {self.dataset}, got {self.side}")

    @property
    def levels(self) -> int:
        """Levels of a pixel."""
        return LEVELS[self.dataset]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and channels of an image."""
        channels, edge, _ = SHAPE[self.dataset]
        return self.side or edge, self.side or edge, channels

    def make_model(self) -> hbnode.nn.MomentumTransformer:
        """Return the model, from levels and the start symbol to parameters of mixtures."""
        return self.make_transformer(self.levels + 1, output_size=3 * self.logistics)


_PAPER = "--d-model 256 --heads 8 --feedforward 1024 --logistics 10 --step-size 0.9 --dropout 0.1"
PRESETS = {
    "mnist": f"--dataset mnist --layers 8 --lr 1e-4 --batch-size 10 --epochs 250 --momentum 0.6 {_PAPER}",
    "cifar10": f"--dataset cifar10 --layers 16 --lr 2e-4 --batch-size 4 --momentum 0.1 {_PAPER}",
    "mnist-small": "--dataset mnist --side 14 --logistics 10 --batch-size 16 --schedule cosine --train-size 10000 "
    "--test-size 1000 --epochs 2",
}


# Data


def load_data(config: ImageGenerationConfig) -> tuple[Samples, Samples]:
    """Return sequences of levels for training and for testing, (N, pixels) uint8 each."""
    train, test = (READ[config.dataset](split)[0] for split in ("train", "test"))
    train, test = train[: config.train_size or None], test[: config.test_size or None]
    return (sequences(train, config),), (sequences(test, config),)


def sequences(images: Tensor, config: ImageGenerationConfig) -> Tensor:
    """Return images (N, channels, edge, edge) in [0, 1], averaged down, as levels (N, pixels), row by row."""
    small = nn.functional.avg_pool2d(images, images.shape[-1] // config.shape[0])
    return (small * (config.levels - 1)).round().to(torch.uint8).permute(0, 2, 3, 1).flatten(1)


# Model and training


def with_start(x: Tensor, levels: int) -> Tensor:
    """Return the inputs for levels (N, pixels): a start symbol, and all pixels except the last one."""
    return torch.cat([torch.full_like(x[:, :1], levels), x[:, :-1]], dim=1)


def bits_per_dimension(model: nn.Module, batch: Samples, levels: int) -> tuple[Tensor, dict[str, float]]:
    """Return the mean of -ln P over pixels and images, and the same in bits."""
    x = batch[0].long()
    loss = -logistic_mixture.log_probability(model(with_start(x, levels)), x, levels).mean()
    return loss, {"bits_per_dim": loss.item() / math.log(2)}


def draw_pixels(
    model: hbnode.nn.MomentumTransformer, count: int, pixels: int, levels: int, generator: torch.Generator
) -> Tensor:
    """Draw levels (count, pixels), one pixel after the other.

    Arguments:
        model: returns parameters of mixtures.
        count: the number of images.
        pixels: of an image, in all channels.
        levels: of a pixel.
        generator: of all random numbers, on the model's device.
    """
    sample = functools.partial(logistic_mixture.sample, levels=levels, generator=generator)
    start = torch.full((count, 1), levels, device=next(model.parameters()).device)
    return model.generate(start, pixels, sample=sample)[:, 1:]


def draw_rows(figure: Figure | SubFigure, rows: Mapping[str, Tensor], config: ImageGenerationConfig) -> None:
    """Draw rows of images, levels (N, pixels) each, with their names on the left."""
    columns = max(len(images) for images in rows.values())
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, images) in zip(axes, rows.items(), strict=True):
        for ax in line:
            ax.set(xticks=[], yticks=[])
            ax.spines[:].set_visible(False)
        for ax, image in zip(line, images, strict=False):
            pixels = image.reshape(config.shape).float() / (config.levels - 1)
            ax.imshow(pixels.squeeze(2).numpy(), cmap="gray_r", vmin=0, vmax=1)
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")


def train(config: ImageGenerationConfig) -> None:
    """Train one model with one seed."""
    data, test = load_data(config)
    run = Run("image_generation", config, f"{config.preset}-{config.dataset}-{config.model}-seed{config.seed}")
    model = config.make_model()
    rows, columns, channels = config.shape
    shape = f"{rows} x {columns}" + (f" x {channels}" if channels > 1 else "")
    about = f"{len(data[0]):,}/{len(test[0]):,} images of {shape} pixels, {config.levels} levels"
    run.announce(model, TITLES[config.model], about)
    loss = functools.partial(bits_per_dimension, levels=config.levels)
    radam = made_by(torch.optim.RAdam, lr=config.lr, weight_decay=config.weight_decay, decoupled_weight_decay=True)
    fit(run, model, data, test, loss, optimizer=radam, eval_batch_size=config.batch_size)
    if run.workers.rank == 0 and config.drawn and not run.is_finished:
        generator = torch.Generator(run.workers.device).manual_seed(config.seed)
        drawn = draw_pixels(model, config.drawn, math.prod(config.shape), config.levels, generator).cpu()
        title = f"{TITLES[config.model]} on {config.dataset}"
        with figure_at(run.folder / "samples.png", (9, 2.1), title) as figure:
            draw_rows(figure, {"drawn": drawn, "test images": test[0][: config.drawn]}, config)
    run.finish(
        model,
        training_images=len(data[0]),
        test_images=len(test[0]),
        pixels=math.prod(config.shape),
        levels=config.levels,
    )


main = command(ImageGenerationConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
