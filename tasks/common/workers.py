"""The processes that train one model together, on one machine or several."""

from __future__ import annotations

import dataclasses
import os

import torch
from torch import distributed, nn


@dataclasses.dataclass(frozen=True)
class Workers:
    """The processes that train together, and this one's place among them."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str) -> Workers:
        """Join the processes that torchrun started, or work alone."""
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        size, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
        if device.startswith("cuda"):
            device = f"cuda:{local}" if size > 1 or device == "cuda" else device
            if torch.device(device).index >= torch.cuda.device_count():
                raise SystemExit(
                    f"{device} is not there: this machine has {torch.cuda.device_count()} CUDA devices. "
                    "Fix: --device cpu, or as many processes as devices."
                )
            torch.cuda.set_device(device)
        if size > 1 and not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(distributed.get_rank() if size > 1 else 0, size, torch.device(device))

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model to train: itself, or one whose gradients are averaged over the processes."""
        return model if self.size == 1 else nn.parallel.DistributedDataParallel(model)

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Return each value summed over the processes."""
        if self.size == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        distributed.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))
