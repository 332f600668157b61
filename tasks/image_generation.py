"""Image generation: the pixels of digits, MNIST and CIFAR-10, one after the other.

Section 4.4.2 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), tables 6 and
7, figure 15. A causal transformer reads the levels of all pixels before one, row by row, and of CIFAR-10 red, green and
blue in turn. It predicts the next level by a discretized mixture of logistics. The models are compared by bits per
dimension, the mean of -log2 P over all pixels, the first one included: it follows a start symbol.

The presets "mnist" and "cifar10" have the paper's sizes: 8 and 16 layers of 8 heads with 32 features each, a
feedforward size of 1,024, 10 logistics, RAdam. The rest is the authors' code: weight decay 0.01, batches of 10 and 4,
beta 0.6 and 0.1, gamma 0.9, and for CIFAR-10 a learning rate of 2e-4. By default a model small enough for a core learns
scikit-learn's digits; the preset "mnist-small" does so with MNIST averaged down to 14 x 14.

Every few epochs images are drawn one pixel at a time from the recurrent state, with the same random numbers each time.
They are in samples.pt, and samples.png shows them above test images. No epoch is chosen by the test images: the last
one counts. How many images a second the models draw is what python -m tasks.studies.image_throughput measures.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.figure import Figure, SubFigure
from torch import Tensor, nn

import hbnode
from tasks.common.config import option
from tasks.common.figures import figure_at
from tasks.common.files import damaged, exit_on, write_tensors
from tasks.common.run import Run, command
from tasks.common.train import Batches, Samples, Trainer, evaluate
from tasks.data.images import READ, SHAPE
from tasks.models import logistic_mixture
from tasks.models.contenders import TITLES, ContenderConfig

LEVELS = {"digits": 17, "mnist": 256, "cifar10": 256}
SHOWN_EPOCHS = 6  # rows of the picture


@dataclasses.dataclass(frozen=True)
class ImageGenerationConfig(ContenderConfig):
    """Options of image generation."""

    positive = "logistics draw_every"

    dataset: str = option("digits", "which images", tuple(READ))
    side: int | None = option(None, "pixels on an edge, to which images are averaged down; none: all")
    train_size: int = option(0, "train on the first N images only; 0 is all of them")
    test_size: int = option(0, "test on the first N images only; 0 is all of them")
    batch_size: int = option(32, "images in a step")
    weight_decay: float = option(0.01, "RAdam's, apart from the gradient")
    logistics: int = option(5, "components of the mixture")
    drawn: int = option(10, "images that are drawn at a time; 0 draws none", may_change=True)
    draw_every: int = option(5, "epochs between two drawings; the last epoch has one", may_change=True)

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
        """The model that the options describe: levels and the start symbol go in, parameters of mixtures come out."""
        return self.make_transformer(self.levels + 1, output_size=3 * self.logistics)


_PAPER = "--d-model 256 --heads 8 --feedforward 1024 --logistics 10 --step-size 0.9 --dropout 0.1"
PRESETS = {
    "mnist": f"--dataset mnist --layers 8 --lr 1e-4 --batch-size 10 --epochs 250 --momentum 0.6 {_PAPER}",
    "cifar10": f"--dataset cifar10 --layers 16 --lr 2e-4 --batch-size 4 --momentum 0.1 {_PAPER}",
    "mnist-small": "--dataset mnist --side 14 --logistics 10 --batch-size 16 --schedule cosine --train-size 10000 "
    "--test-size 1000 --epochs 2 --draw-every 1",
}


# Data


def load_data(config: ImageGenerationConfig) -> tuple[Samples, Samples]:
    """Sequences of levels for training and for testing, (N, pixels) uint8 each."""
    with exit_on(FileNotFoundError, ValueError):
        train, test = (READ[config.dataset](split)[0] for split in ("train", "test"))
    train, test = train[: config.train_size or None], test[: config.test_size or None]
    return (sequences(train, config),), (sequences(test, config),)


def sequences(images: Tensor, config: ImageGenerationConfig) -> Tensor:
    """Images (N, channels, edge, edge) in [0, 1], averaged down, as levels (N, pixels), row by row."""
    small = nn.functional.avg_pool2d(images, images.shape[-1] // config.shape[0])
    return (small * (config.levels - 1)).round().to(torch.uint8).permute(0, 2, 3, 1).flatten(1)


# Model and training


def with_start(x: Tensor, levels: int) -> Tensor:
    """What the model reads for levels (N, pixels): a start symbol, and all pixels but the last one."""
    return torch.cat([torch.full_like(x[:, :1], levels), x[:, :-1]], dim=1)


def bits_per_dimension(model: nn.Module, batch: Samples, levels: int) -> tuple[Tensor, dict[str, float]]:
    """The mean of -ln P over pixels and images, and the same in bits."""
    x = batch[0].long()
    loss = -logistic_mixture.log_probability(model(with_start(x, levels)), x, levels).mean()
    return loss, {"bits_per_dim": loss.item() / math.log(2)}


def draw_pixels(
    model: hbnode.nn.MomentumTransformer, count: int, pixels: int, levels: int, generator: torch.Generator
) -> Tensor:
    """Levels (count, pixels), drawn one after the other; the model is left in the mode that it was in.

    Arguments:
        model: whose outputs are the parameters of mixtures.
        count: how many images.
        pixels: of an image, all channels.
        levels: of a pixel.
        generator: of all random numbers, on the model's device.
    """
    sample = functools.partial(logistic_mixture.sample, levels=levels, generator=generator)
    start = torch.full((count, 1), levels, device=next(model.parameters()).device)
    return model.generate(start, pixels, sample=sample)[:, 1:]


class Drawings:
    """The images that were drawn while a run trains, in ``samples.pt`` and ``samples.png`` of its folder."""

    def __init__(self, run: Run, config: ImageGenerationConfig, test: Tensor) -> None:
        self.run, self.config, self.test = run, config, test
        self.path = run.folder / "samples.pt"
        self.by_epoch: dict[int, Tensor] = {}
        if self.path.exists():
            try:
                self.by_epoch = torch.load(self.path, weights_only=True)
            except Exception as error:  # a damaged pickle raises whatever it likes
                raise SystemExit(damaged(self.path, f"cannot be read ({error})")) from error

    def add(self, model: hbnode.nn.MomentumTransformer, epoch: int) -> None:
        """Draw images after an epoch if it is time to, and write both files whole."""
        config = self.config
        is_due = epoch % config.draw_every == 0 or epoch == config.epochs
        if not (is_due and config.drawn and self.run.workers.rank == 0):
            return
        generator = torch.Generator(self.run.workers.device).manual_seed(config.seed)
        drawn = draw_pixels(model, config.drawn, math.prod(config.shape), config.levels, generator)
        self.by_epoch[epoch] = drawn.to("cpu", torch.uint8)
        write_tensors(self.path, self.by_epoch)
        title = f"{TITLES[config.model]} on {config.dataset}: drawn after these epochs"
        write_picture(self.by_epoch, self.test[: config.drawn], config, title, self.path.with_suffix(".png"))


def write_picture(
    by_epoch: Mapping[int, Tensor], test: Tensor, config: ImageGenerationConfig, title: str, path: Path
) -> None:
    """A row of images for each of some epochs, first and last included, and one of test images; written whole."""
    epochs = sorted(by_epoch)
    places = torch.linspace(0, len(epochs) - 1, min(len(epochs), SHOWN_EPOCHS)).round().long().tolist()
    rows = {f"epoch {epochs[place]}": by_epoch[epochs[place]] for place in places} | {"test images": test}
    with figure_at(path, (9, 0.8 * len(rows) + 0.5), title) as figure:
        draw_rows(figure, rows, config)


def draw_rows(figure: Figure | SubFigure, rows: Mapping[str, Tensor], config: ImageGenerationConfig) -> None:
    """Draw rows of images, levels (N, pixels) each, with their names to the left."""
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


def radam(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """RAdam with a weight decay that does not enter the mean of the gradient, as in the authors' code."""
    return torch.optim.RAdam(model.parameters(), lr=lr, weight_decay=weight_decay, decoupled_weight_decay=True)


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
    optimizer = functools.partial(radam, lr=config.lr, weight_decay=config.weight_decay)
    trainer = Trainer(run, model, Batches(run, data), loss, optimizer)
    drawings = Drawings(run, config, test[0])
    held_out = tuple(x.to(run.workers.device) for x in test)
    if trainer.position == 0:
        run.begin(0)
        trainer.save()  # a folder that has samples and no checkpoint could not go on

    def validate() -> dict[str, float]:
        drawings.add(model, len(run.rows) + 1)
        return evaluate(run, model, held_out, loss, "test", config.batch_size)

    trainer.fit(validate)
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
