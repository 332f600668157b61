"""Image classification with the five models, NesterovNODE and AdamNODE: digits (8x8, offline), MNIST and CIFAR-10.

Section 3.4.2 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), figures 6, 10
and 11: a convolutional f with the time as an extra channel, a learned initial state, and a linear head on h(1).

The presets "paper-mnist" and "paper-cifar10" use the paper's solver, torchdiffeq's dopri5 with its adjoint and the full
error norm. The paper gives channels, parameter counts, batch size 64, learning rate 1e-3 and, for CIFAR-10, the
tolerance 1e-5. The rest is from the authors' code: hidden sizes and 40 epochs; for MNIST the tolerance 1e-4 and
gradient norms clipped to 10 (the paper says that the adjoint state is clipped); for CIFAR-10 gradient norms clipped to
1, a learning rate that decreases by 5 % every 1,000 steps, and a constant xi = 1.5. (The authors' logs for CIFAR-10
show a batch size of 256.) The presets differ from the code in two points: for MNIST xi starts at ln 2 instead of 2.13,
and the sign of f is that of the paper.

The paper trained models at each tolerance for figure 11. --curve solves one trained model at each tolerance instead, so
that only the tolerance differs, and also measures errors.

Regularisation is an alternative to momentum: --regularize adds kinetic and Jacobian penalties (Finlay et al. 2020) to
the loss of NODE and ANODE.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hbnode
from tasks.common.config import LATER, SECOND_ORDER, ODEConfig, make_field, option
from tasks.common.files import read_json, read_tensors, written_whole
from tasks.common.run import Run, command
from tasks.common.train import EVAL_BATCH_SIZE, Samples, accuracy, fit
from tasks.data.images import READ, SHAPE
from tasks.models.regularization import Regularized

# Channels of h and of f's hidden layers. MNIST and CIFAR-10 have the sizes of Xia et al. (section 3.4.2, footnote 6 and
# Table 5) and of their code. Digits: MNIST's channels, and hidden sizes with about equal parameter counts.
GREY = {"node": 1, "anode": 6, "sonode": 5, "hbnode": 5, "ghbnode": 6}
CHANNELS = {
    "digits": GREY,
    "mnist": GREY,
    "cifar10": {"node": 3, "anode": 13, "sonode": 12, "hbnode": 12, "ghbnode": 12},
}
HIDDEN = {
    "digits": {"node": 38, "anode": 33, "sonode": 24, "hbnode": 24, "ghbnode": 23},
    "digits-small": {"node": 28, "anode": 21, "sonode": 16, "hbnode": 16, "ghbnode": 15},
    "mnist": {"node": 92, "anode": 64, "sonode": 50, "hbnode": 50, "ghbnode": 45},
    "cifar10": {"node": 125, "anode": 64, "sonode": 50, "hbnode": 51, "ghbnode": 51},
}
TRAINING_IMAGES = {"digits": 1437, "mnist": 60_000, "cifar10": 50_000}
CURVE_IMAGES = 16  # few, because the float64 reference solution stores the graph of hundreds of function evaluations
for sizes in (*HIDDEN.values(), *CHANNELS.values()):
    sizes |= dict.fromkeys(LATER, sizes["hbnode"])
XI: dict[str, dict[str, Any]] = {"digits": {}, "mnist": {}, "cifar10": {"xi": 1.5, "learn_xi": False}}


@dataclasses.dataclass(frozen=True)
class ImageConfig(ODEConfig):
    """Command-line options of image classification."""

    later = LATER

    dataset: str = option("digits", "which images", tuple(READ))
    small: bool = option(False, "a smaller f, for digits only")
    subset: int = option(0, "train only on the first N images; 0: all")
    test_subset: int = option(0, "test only on the first N images; 0: all")
    regularize: str = option("none", "penalties of node and anode", ("none", "kinetic", "jacobian", "both"))
    penalty: float = option(0.01, "weight of the penalties of --regularize")
    bfloat16: bool = option(False, "networks in bfloat16 (autocast), states in float32")
    curve: bool = option(False, "measure evaluations and errors against tolerance (figure 11)", may_change=True)

    def __post_init__(self) -> None:
        if self.small and self.dataset != "digits":
            raise ValueError("--small is for --dataset digits; mnist and cifar10 have the paper's sizes")
        if self.regularize != "none" and not {"node", "anode"}.issuperset(self.chosen()):
            raise ValueError(f"--regularize is for --model node and anode, got {self.model}")
        if self.curve and self.steps:
            raise ValueError("--curve varies the tolerance, which a fixed grid (--steps) does not have")

    def make_model(self) -> Classifier:
        """Return the model that the options describe."""
        return Classifier(
            self.model,
            self.dataset,
            small=self.small,
            bfloat16=self.bfloat16,
            is_regularized=self.regularize != "none",
            **self.ode_options(),
        )


_PAPER = "--epochs 40 --lr 1e-3 --solver torchdiffeq --adjoint-norm full"
PRESETS = {
    "demo": "--dataset digits --small --epochs 8 --batch-size 32 --lr 8e-3 --schedule cosine",
    "full": "--dataset digits --epochs 12 --batch-size 32 --lr 8e-3 --schedule cosine",
    "paper-mnist": f"{_PAPER} --dataset mnist --tol 1e-4 --clip 10",
    "paper-cifar10": f"{_PAPER} --dataset cifar10 --tol 1e-5 --clip 1 --schedule step",
}


class InitialState(nn.Module):
    """The learned initial state (h, m) of models with momentum. h has the channels of x and learned channels; m is
    learned.

    With ``moments`` the state is (h, m, 1), for AdamNODE.
    """

    def __init__(self, in_channels: int, hidden: int, channels: int, *, moments: bool = False) -> None:
        super().__init__()
        self.channels, self.moments = channels, moments
        self.net = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 1),
            nn.LeakyReLU(0.3),
            nn.Conv2d(hidden, hidden, 3, padding=1),
            nn.LeakyReLU(0.3),
            nn.Conv2d(hidden, 2 * channels - in_channels, 1),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map images ``(batch, in_channels, H, W)`` to a state of two or three tensors ``(batch, channels, H, W)``."""
        h, m = torch.cat([x, self.net(x)], dim=1).split(self.channels, dim=1)
        return (h, m, torch.ones_like(m)) if self.moments else (h, m)


class Classifier(nn.Module):
    """An ODE block with a linear head on h(1)."""

    def __init__(
        self,
        model: str,
        dataset: str,
        *,
        small: bool = False,
        bfloat16: bool = False,
        is_regularized: bool = False,
        **solver: Any,
    ) -> None:
        super().__init__()
        self.uses_bfloat16 = bfloat16
        hidden = HIDDEN["digits-small" if small else dataset][model]
        channels, (image_channels, *size) = CHANNELS[dataset][model], SHAPE[dataset]
        func = hbnode.nn.ConvNet(2 * channels if model == "sonode" else channels, hidden, channels)
        field = make_field(model, func, anode={"augment": channels - image_channels}, ghbnode=XI[dataset])
        start = None
        if model in (*SECOND_ORDER, *LATER):
            start = InitialState(image_channels, hidden, channels, moments=model == "adamnode")
        penalized = Regularized(field) if is_regularized else field
        self.block = hbnode.ODEBlock(penalized, initial_state=start, **solver)
        self.head = nn.Linear(channels * size[0] * size[1], 10)
        # on a CPU this reduces the time of f and its gradient to about two thirds
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's type hints

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits ``(batch, 10)`` for images ``(batch, channels, H, W)``.

        In training a regularised model also returns the kinetic and the Jacobian penalty, ``(batch, 2)``.
        """
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.uses_bfloat16):
            out = self.block(x).flatten(1)
        size = self.head.in_features
        logits = self.head(out[:, :size])
        return logits if out.shape[1] == size else (logits, out[:, size:])


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """The training loss: the mean cross-entropy plus the mean of the selected penalties."""

    regularize: str = "none"
    penalty: float = 0.0

    def __call__(self, model: nn.Module, batch: Samples) -> tuple[Tensor, dict[str, float]]:
        """Return the loss, the accuracy and the penalties."""
        x, y = batch
        out = model(x)
        logits, penalties = out if isinstance(out, tuple) else (out, None)
        loss = nn.functional.cross_entropy(logits, y)
        means = accuracy(logits, y)
        if penalties is not None:
            kinetic, jacobian = penalties.mean(0)
            chosen = {"kinetic": kinetic, "jacobian": jacobian, "both": kinetic + jacobian}[self.regularize]
            means |= {"cross_entropy": loss.item(), "kinetic": kinetic.item(), "jacobian": jacobian.item()}
            loss = loss + self.penalty * chosen
        return loss, means


def load_run(folder: Path) -> tuple[ImageConfig, Classifier]:
    """Return the options and the trained model of a finished run."""
    config = ImageConfig.read(read_json(folder / "config.json"), out=str(folder))
    model = config.make_model()
    model.load_state_dict(read_tensors(folder / "checkpoint.pt")["model"])
    return config, model.eval()


def load_data(config: ImageConfig) -> tuple[Samples, Samples]:
    """Return the training and test data, with the sizes that the options give."""
    train, test = (READ[config.dataset](split) for split in ("train", "test"))
    return tuple(x[: config.subset or None] for x in train), tuple(x[: config.test_subset or None] for x in test)


def save_curve(run: Run, model: nn.Module, test: Samples) -> None:
    """Write the trained model's function evaluations and errors for each tolerance to ``tolerance.csv``."""
    x, y = run.workers.to_device([part[:CURVE_IMAGES] for part in test])
    curve = hbnode.diagnostics.nfe_vs_tolerance(
        model,
        x,
        [10.0**-k for k in range(1, 6)],
        loss=lambda logits: nn.functional.cross_entropy(logits, y),
        reference_tolerance=1e-6,  # not smaller, because f has many kinks
    )
    with written_whole(run.folder / "tolerance.csv") as path:
        curve.to_csv(path)


def train(config: ImageConfig) -> None:
    """Train one model on one data set."""
    data, test = load_data(config)
    run = Run("image_classification", config, f"{config.preset}-{config.dataset}-{config.model}-seed{config.seed}")
    model = config.make_model()
    sizes = f"{len(data[0]):,} of {TRAINING_IMAGES[config.dataset]:,} training images, {len(test[0]):,} test images"
    run.announce(model, f"{config.model} on {config.dataset}", sizes)
    fit(run, model, data, test, CrossEntropy(config.regularize, config.penalty))
    curve = run.folder / "tolerance.csv"
    if run.workers.rank == 0 and not run.is_finished:
        curve.unlink(missing_ok=True)  # an existing file is from fewer epochs
    if run.workers.rank == 0 and config.curve and not curve.exists():
        save_curve(run, model, test)
    run.finish(
        model,
        training_images=len(data[0]),
        training_images_of_all=TRAINING_IMAGES[config.dataset],
        test_images=len(test[0]),
        eval_batch_size=EVAL_BATCH_SIZE,
    )


main = command(ImageConfig, PRESETS, __doc__, train)


if __name__ == "__main__":
    main()
