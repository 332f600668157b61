"""Pixel MNIST, gradients through time: the norm of dL/dh_t during training, with momentum and without.

Figure 2 and appendix A.5 of Nguyen et al., MomentumRNN (2020): |dL/dh_t| at every iteration, for DTRIV and
MomentumDTRIV on permuted MNIST. The paper concludes from equation (13) that momentum prevents vanishing gradients. But
that equation does not describe the cell: v_t = mu v_{t-1} + s (W x_t + b) does not depend on h. So h_t changes the loss
only through the next state, dL/dh_t = U^T D_{t+1} dL/dh_{t+1} with D = diag(sigma'), with and without momentum. Like
the scale of the input, momentum changes the norm only through the states in D and through the learned weights. The
share of the gradient through the rule is measured, by detaching it, and printed: it is zero.

    python -m tasks.studies.pixel_mnist_gradients                 # DTRIV
    python -m tasks.studies.pixel_mnist_gradients --preset lstm

The results are medians over validation images, each with the gradient of its own loss, in float64. It is the total
derivative: the layer reads one sample at a time, and h_t is a part of its state. It is exactly 0, and white in the
figure, in a DTRIV as long as all pixels were black, since the state is 0. In an untrained LSTM the recurrent weight
changes only the input gate, so it is 0 if the next pixel is black and the cell's input is tanh(0); with momentum this
input is that of earlier pixels.

The controls are a layer with the same step size, "gain", and for a MomentumLSTM, whose step size is 1 on PMNIST, one
with the same asymptotic forget bias, "forget", which sets the decay of its cell state. Sizes and learning rates are
those of PMNIST with 170 units (DTRIV) or 128 (LSTM). The authors' arrays behind figure 2 are named after mu 0.9, s 0.1
(DTRIV) and mu 0.999, s 0.6 (MomentumDTRIV), which is not in their tables: --momentum 0.999 --step-size 0.6.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tasks import pixel_mnist
from tasks.common.config import option, parse
from tasks.common.figures import panels
from tasks.common.run import write_study
from tasks.common.train import Samples
from tasks.models.recurrent import LayerWithReadout, title
from tasks.pixel_mnist import PixelMnistConfig, load_data, make_optimizer, rebase

LEVELS = {"median": 0.5, "q10": 0.1, "q90": 0.9}
LINES = 5  # iterations that are drawn as lines
_SMALL = "--side 14 --train-size 10000 --cell"
PRESETS = {  # the paper's settings with smaller images
    "default": f"{pixel_mnist.PRESETS['pmnist-dtriv-170']} {_SMALL} dtriv --model plain,gain,momentum",
    "lstm": f"{pixel_mnist.PRESETS['pmnist-128']} {_SMALL} lstm --model plain,forget,momentum",
}


@dataclasses.dataclass(frozen=True)
class GradientConfig(PixelMnistConfig):
    """Options of the study: those of pixel MNIST, and what is measured."""

    positive = "iterations every measured"

    iterations: int = option(200, "training steps")
    every: int = option(10, "steps between two measurements")
    measured: int = option(32, "validation images")


@dataclasses.dataclass(frozen=True)
class GradientNorms:
    """The measurements of one layer.

    Attributes:
        iterations: the numbers of training steps, (n,).
        norms: of each image, (n, images, T).
        loss: the training loss of the last step.
        share: the largest share of a gradient through the rule.
    """

    iterations: Tensor
    norms: Tensor
    loss: float
    share: float


def gradients(model: LayerWithReadout, batch: Samples, *, cut: bool = False) -> Tensor:
    """Return the total derivatives dL/dh_t of every image's cross-entropy L, (images, T, H).

    Arguments:
        model: of one layer, in one direction.
        batch: sequences (images, T, 1) and labels.
        cut: whether to detach the rule's memory.
    """
    x, y = batch
    state, states = None, []
    with parametrize.cached():
        for sample in x.split(1, dim=1):
            _, state = model.layer(sample, state)
            if cut:
                state = dataclasses.replace(state.detach(), h=state.h, c=state.c)
            states.append(state.h)
        logits = model.head(states[-1][-1])
    loss = nn.functional.cross_entropy(logits, y, reduction="sum")  # the images are independent
    return torch.stack([gradient[-1] for gradient in torch.autograd.grad(loss, states)], dim=1)


def share_of_rule(model: LayerWithReadout, batch: Samples) -> float:
    """Return the largest of |dL/dh_t - the same without the rule's memory| / |dL/dh_t| over the images."""
    whole = gradients(model, batch)
    difference = (whole - gradients(model, batch, cut=True)).norm(dim=-1)
    return (difference / whole.norm(dim=-1).clamp(min=torch.finfo(whole.dtype).tiny)).max().item()


def batches(data: Samples, size: int, seed: int) -> Iterator[Samples]:
    """Yield batches of shuffled passes over the data, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(data[0]), generator=generator).split(size):
            yield tuple(x[chosen] for x in data)


def measure(config: GradientConfig, data: Mapping[str, Samples]) -> GradientNorms:
    """Train one layer, and measure the norms before, at every ``every``-th step, and after the last."""
    torch.manual_seed(config.seed)
    model = config.make_model()
    optimizer = make_optimizer(model, config)
    measured = tuple(part[: config.measured] for part in data["validation"])
    exact = (measured[0].double(), measured[1])
    steps = batches(data["train"], config.batch_size, config.seed)
    iterations, norms, loss = [], [], math.nan
    for iteration in range(config.iterations + 1):
        if iteration % config.every == 0 or iteration == config.iterations:
            iterations.append(iteration)
            norms.append(gradients(copy.deepcopy(model).double(), exact).norm(dim=-1))
        if iteration < config.iterations:
            loss = step(model, optimizer, next(steps), config, iteration + 1)
    share = share_of_rule(copy.deepcopy(model).double(), exact)
    return GradientNorms(torch.tensor(iterations), torch.stack(norms), loss, share)


def step(
    model: LayerWithReadout, optimizer: torch.optim.Optimizer, batch: Samples, config: PixelMnistConfig, iteration: int
) -> float:
    """Take one training step, and return its loss."""
    loss, _ = pixel_mnist.cross_entropy(model, batch)
    if not bool(torch.isfinite(loss)):
        raise SystemExit(
            f"{title(config.model, config.cell)}: the training loss is {loss.item()} at iteration {iteration}. "
            "Fix: another --step-size or --momentum."
        )
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    rebase(model, config, iteration)
    return loss.item()


def quantiles(norms: Tensor) -> Tensor:
    """Return the quantiles LEVELS over the images: (n, images, T) -> (n, LEVELS, T)."""
    return torch.quantile(norms, torch.tensor(list(LEVELS.values()), dtype=norms.dtype), dim=1).transpose(0, 1)


def sentence(record: GradientNorms) -> str:
    """Return a line with the ratios of the gradient before T to that at T, and the share through the rule."""
    length, said = record.norms.shape[2], []
    for name, index in (("untrained", 0), (f"after {record.iterations[-1]} iterations", -1)):
        norms = record.norms[index]
        left = [(norms[:, t - 1] / norms[:, -1]).median().item() for t in (length // 2, length // 4)]
        said.append(f"{left[0]:.2g} and {left[1]:.2g} {name}")
    return (
        f"|dL/dh_t| / |dL/dh_T| at t = {length // 2} and {length // 4}: {', '.join(said)}; training loss "
        f"{record.loss:.3g}; share through the rule {record.share:.1g}"
    )


def table(records: Mapping[str, GradientNorms]) -> list[dict[str, object]]:
    """Return rows of the quantiles of the norms by model, iteration and t."""
    return [
        {"model": model, "iteration": iteration, "t": t + 1}
        | {name: f"{value:.6g}" for name, value in zip(LEVELS, values, strict=True)}
        for model, record in records.items()
        for iteration, norms in zip(record.iterations.tolist(), quantiles(record.norms), strict=True)
        for t, values in enumerate(norms.T.tolist())
    ]


def draw_norms(records: Mapping[str, GradientNorms], cell: str, about: str, path: Path) -> None:
    """Draw a column for each model: the median by t and iteration as an image, and some iterations as lines."""
    import matplotlib.pyplot as plt

    medians = {model: quantiles(record.norms)[:, 0].log10().numpy() for model, record in records.items()}
    drawn = np.concatenate([median[np.isfinite(median)] for median in medians.values()])  # log10 of 0 is white
    low, high = drawn.min(), max(drawn.max(), drawn.min() + 1)
    size = 1.5 + 3.8 * len(records), 6.5
    with panels(path, 2, len(records), size=size, title=about, sharex=True) as (figure, axes):
        for (upper, lower), (model, median) in zip(axes.T, medians.items(), strict=True):
            iterations, t = records[model].iterations.tolist(), list(range(1, median.shape[1] + 1))
            shown = upper.pcolormesh(t, iterations, median, vmin=low, vmax=high, shading="nearest")
            upper.set_title(title(model, cell))
            for index in torch.linspace(0, len(iterations) - 1, min(LINES, len(iterations))).long().tolist():
                color = plt.get_cmap("plasma")(0.9 * index / max(len(iterations) - 1, 1))
                lower.plot(t, median[index], color=color, lw=1.2, label=f"iteration {iterations[index]}")
            lower.set(xlabel="t in samples", ylim=(low, high))
            lower.grid(alpha=0.3)
        axes[0, 0].set_ylabel("iteration")
        axes[1, 0].set_ylabel("log10 |dL/dh_t|, median")
        figure.colorbar(shown, ax=axes[0], label="log10 |dL/dh_t|, median")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all models; write ``gradients.csv``, ``.json`` and ``.png``, and print the ratios of the gradients."""
    options = parse(GradientConfig, PRESETS, __doc__, argv)
    configs = [options.with_model(model) for model in options.chosen()]
    folder, first = Path(options.out or f"runs/pixel_mnist_gradients-{options.cell}"), configs[0]
    data = load_data(first)
    records, said = {}, []
    for config in configs:
        records[config.model] = measure(config, data)
        said.append(f"{title(config.model, config.cell)}: {sentence(records[config.model])}")
        print(said[-1])
    write_study(
        folder,
        "gradients",
        table(records),
        task="pixel_mnist_gradients",
        configs=[dataclasses.asdict(config) for config in configs],
        rules={config.model: dataclasses.asdict(config.rule_options(config.rules())) for config in configs},
        found=said,
    )
    about = f"permuted {first.dataset}, {data['train'][0].shape[1]} pixels, {first.hidden} units, seed {first.seed}"
    draw_norms(records, first.cell, about, folder / "gradients.png")
    print(f"figure: {folder / 'gradients.png'}")


if __name__ == "__main__":
    main()
