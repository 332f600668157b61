"""Speed of image generation: images per second of recurrent attention, and of softmax attention with a cache.

Tables 6 and 7 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), compare with
softmax attention that processes the whole image again for every pixel. Here softmax attention caches the keys and
values of earlier pixels, as usual. All models generate images with the same number of pixels from the same kind of
mixture. The weights are random, because they do not affect the speed. In each round every model is measured once. The
reported ratios compare a model with softmax attention in the same round, and are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hbnode.nn import MomentumTransformer
from tasks.common.config import option, parse
from tasks.common.files import write_json
from tasks.common.run import Workers, environment
from tasks.image_generation import ImageGenerationConfig, draw_pixels
from tasks.models.contenders import TITLES

SIZES = ("d_model", "heads", "layers", "feedforward", "logistics")  # names of the options with the models' sizes


@dataclasses.dataclass(frozen=True)
class ThroughputConfig(ImageGenerationConfig):
    """Options of the study: those of the models, and those of the measurement."""

    positive = "repeats"

    model: str = option("all", "several with commas between, softmax among them, or all")
    dataset: str = option("mnist", "the images", ("mnist",))
    length: str = option("196,784,3072", "pixels of an image, several with commas between")
    batch_size: int = option(16, "images in a batch")
    repeats: int = option(3, "measured rounds after a warm-up round")
    device: str = option("cpu", "device: cpu, cuda or auto", ("auto", "cpu", "cuda"))
    out: str = option("runs/image_throughput", "folder for the table")

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        super().check()
        if "softmax" not in self.chosen():
            raise ValueError(f"--model must name softmax, which ratios are relative to, got {self.model}")
        if min(self.lengths()) < 1:
            raise ValueError(f"--length must be positive, got {self.length}")

    def lengths(self) -> list[int]:
        """Return the numbers of pixels to measure."""
        return [int(length) for length in self.length.split(",")]


def seconds(model: MomentumTransformer, config: ImageGenerationConfig, batch_size: int, length: int) -> float:
    """Return the time in seconds to generate a batch of images of ``length`` pixels."""
    device = next(model.parameters()).device
    begun = time.perf_counter()
    draw_pixels(model, batch_size, length, config.levels, torch.Generator(device).manual_seed(0))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def measure(config: ThroughputConfig, length: int, device: torch.device) -> list[dict[str, Any]]:
    """Return a row for each model, with the images per second and the ratio to softmax attention."""
    names, models = config.chosen(), {}
    for name in names:
        torch.manual_seed(0)
        models[name] = dataclasses.replace(config, model=name).make_model().to(device).eval()
    shuffle, rounds = random.Random(0), []
    for _ in range(1 + config.repeats):  # the first round is a warm-up
        order = shuffle.sample(list(names), len(names))
        rounds.append({name: seconds(models[name], config, config.batch_size, length) for name in order})
    return [
        {
            "model": name,
            "length": length,
            "images_per_second": config.batch_size / statistics.median(times[name] for times in rounds[1:]),
            "over_softmax": statistics.median(times["softmax"] / times[name] for times in rounds[1:]),
        }
        for name in names
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all models, print a table, and write ``throughput.json``."""
    config = parse(ThroughputConfig, {}, __doc__, argv)
    device = Workers.join(config.device).device
    rows: list[dict[str, Any]] = []
    print(f"{'pixels':>6}  {'model':<24}{'images/s':>10}{'× softmax':>11}")
    for length in config.lengths():
        for row in measure(config, length, device):
            rows.append(row)
            figures = f"{row['images_per_second']:>10.3g}{row['over_softmax']:>11.3g}"
            print(f"{length:>6}  {TITLES[row['model']]:<24}{figures}")
    about = {name: getattr(config, name) for name in ("batch_size", "repeats", *SIZES)}
    path = Path(config.out) / "throughput.json"
    write_json(path, {"task": "image_throughput", **about, "rows": rows, **environment(device)})


if __name__ == "__main__":
    main()
