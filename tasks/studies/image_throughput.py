"""Image generation, untrained: images a second from the recurrent state, beside softmax attention with a cache.

Tables 6 and 7 of Wang et al., How Does Momentum Benefit Deep Neural Networks Architecture Design? (2022), compare with
softmax attention that reads the whole image again for every pixel. Here it keeps the keys and values of the pixels
before, as anyone would run it. Every model draws images of the same number of pixels from the same mixture. The weights
are those of the initialisation, since the time does not depend on them. Models take turns: ratios are medians over the
rounds, each over softmax attention in the same round. Beside the time stands the size of the state after the last
pixel.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hbnode.nn import MomentumTransformer
from hbnode.nn.attention import KeyValueCache
from tasks.common.files import write_json
from tasks.common.run import Workers, environment
from tasks.image_generation import ImageGenerationConfig, draw_pixels
from tasks.models.contenders import TITLES

SIZES = ("d_model", "heads", "layers", "feedforward", "logistics")  # options of the models


def state_bytes(state: object) -> int:
    """The bytes of all tensors in a state, of a cache those that are in use."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, KeyValueCache):
        return state_bytes((state.keys, state.values))
    if isinstance(state, Mapping):
        return sum(map(state_bytes, state.values()))
    return sum(map(state_bytes, state)) if isinstance(state, (tuple, list)) else 0


def seconds(model: MomentumTransformer, config: ImageGenerationConfig, batch_size: int, length: int) -> float:
    """The time for a batch of images of ``length`` pixels."""
    device = next(model.parameters()).device
    begun = time.perf_counter()
    draw_pixels(model, batch_size, length, config.levels, torch.Generator(device).manual_seed(0))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def measure(
    config: ImageGenerationConfig,
    names: Sequence[str],
    length: int,
    batch_size: int,
    repeats: int,
    device: torch.device,
) -> list[dict[str, Any]]:
    """A row for each model: images a second, the factor over softmax attention, bytes of the state of an image."""
    models = {}
    for name in names:
        torch.manual_seed(0)
        models[name] = dataclasses.replace(config, model=name).make_model().to(device).eval()
    shuffle, rounds = random.Random(0), []
    for _ in range(1 + repeats):  # the first does not count
        order = shuffle.sample(list(names), len(names))
        rounds.append({name: seconds(models[name], config, batch_size, length) for name in order})
    rows = []
    for name, model in models.items():
        with torch.no_grad():
            _, state = model.prefill(torch.zeros(1, length, dtype=torch.long, device=device))
        rows.append(
            {
                "model": name,
                "length": length,
                "images_per_second": batch_size / statistics.median(times[name] for times in rounds[1:]),
                "over_softmax": statistics.median(times["softmax"] / times[name] for times in rounds[1:]),
                "state_bytes": state_bytes(state.layers),
            }
        )
    return rows


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, ImageGenerationConfig]:
    """The command line, and the options of the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="all", help="several with commas between, softmax among them [all]")
    parser.add_argument("--length", type=int, nargs="+", default=[196, 784, 3072], help="pixels [196 784 3072]")
    parser.add_argument("--batch-size", type=int, default=16, help="images drawn at a time [16]")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count [3]")
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"), help="[cpu]")
    parser.add_argument("--out", type=Path, default=Path("runs/image_throughput"), help="[runs/image_throughput]")
    fields = {field.name: field for field in dataclasses.fields(ImageGenerationConfig)}
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=fields[name].default)
    options = parser.parse_args(argv)
    try:
        sizes = {name: getattr(options, name) for name in SIZES}
        config = ImageGenerationConfig(dataset="mnist", model=options.model, **sizes)
        config.check()
    except ValueError as error:
        parser.error(str(error))
    if "softmax" not in config.chosen():
        parser.error(f"--model must name softmax, which the others are compared with, got {options.model}")
    if min(*options.length, options.batch_size, options.repeats) < 1:
        parser.error("--length, --batch-size and --repeats must be positive")
    return options, config


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what the command line says; print a table and write ``throughput.json``."""
    options, config = parse(argv)
    device = Workers.join(options.device).device
    rows: list[dict[str, Any]] = []
    print(f"{'pixels':>6}  {'model':<24}{'images/s':>10}{'× softmax':>11}{'state, kB an image':>20}")
    for length in options.length:
        for row in measure(config, config.chosen(), length, options.batch_size, options.repeats, device):
            rows.append(row)
            print(
                f"{length:>6}  {TITLES[row['model']]:<24}{row['images_per_second']:>10.3g}{row['over_softmax']:>11.3g}"
                f"{row['state_bytes'] / 1000:>20.4g}"
            )
    sizes = {name: getattr(config, name) for name in SIZES}
    about = {"batch_size": options.batch_size, "repeats": options.repeats, **sizes}
    write_json(
        options.out / "throughput.json", {"task": "image_throughput", **about, "rows": rows, **environment(device)}
    )


if __name__ == "__main__":
    main()
