"""A training loop with early stopping, a learning rate schedule, and checkpoints from which it can resume."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from hbnode._checks import as_count
from hbnode._progress import progress_bar

__all__ = ["train"]

Net = TypeVar("Net", bound=nn.Module)


def train(
    model: Net,
    loss: Callable[..., Tensor],
    batches: Iterable[Any],
    validation: Iterable[Any] | Callable[[Net], float] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    max_epochs: int = 100,
    patience: int | None = 10,
    clip_norm: float | None = 1.0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    name: str = "training",
) -> list[dict[str, float]]:
    r"""Train a module with an optimizer, then load the parameters of the epoch with the least validation loss.

    Batches are moved to the device of the model's parameters, also within dicts, tuples and lists. In each epoch the
    model is in training mode for the training batches and in evaluation mode for the validation. After training it is
    in evaluation mode. Without ``validation``, training runs for all epochs and keeps the last parameters.

    Arguments:
        model: the module.
        loss: ``loss(model, batch)`` returns the mean loss of a batch, a tensor with one element. If a batch is a tuple
            or a list, such as (series, target), it is called as ``loss(model, *batch)``.
        batches: the batches of an epoch, an iterable that can be iterated once per epoch: a DataLoader, such as
            :meth:`hbnode.data.Dataset.batches` returns, or a list.
        validation: batches for the validation loss, or a function of the model that returns the validation loss. The
            loss is the mean over the batches, weighted by their lengths. The length of a dict, tuple or list is that of
            its first array. Default: ``None``.
        optimizer: an optimizer of the model's parameters. None is ``torch.optim.AdamW(model.parameters(), lr=1e-3)``.
            Default: ``None``.
        scheduler: a learning rate scheduler of ``torch.optim.lr_scheduler``, stepped after each epoch.
            ``torch.optim.lr_scheduler.ReduceLROnPlateau`` is stepped with the validation loss. Default: ``None``.
        max_epochs: largest number of epochs. Default: ``100``.
        patience: training ends after this number of epochs without a smaller validation loss. None is no limit.
            Default: ``10``.
        clip_norm: largest 2-norm of the gradient; a larger gradient is scaled down to it. None is no limit.
            Default: ``1.0``.
        checkpoint: path of a file that is replaced after each epoch; an interruption never leaves an incomplete file.
            If the file exists, training resumes from it. The result equals that of an uninterrupted run if all random
            numbers come from torch's default generator on the CPU, or from a ``generator`` of the loader, its sampler
            or its batch sampler. Default: ``None``.
        progress: whether to show a progress bar. None shows it in a terminal, if tqdm is installed.
            Default: ``None``.
        name: the name of the progress bar. Default: ``"training"``.

    Returns:
        A list with a dict per epoch, with the keys ``"epoch"`` (from 0), ``"loss"``, ``"validation"`` (if
        ``validation`` is given) and ``"learning_rate"``. ``pandas.DataFrame`` converts it to a table.

    Raises:
        FloatingPointError: if a loss is infinite or NaN. The model then has the best parameters so far.
        ValueError: if there are no batches, the optimizer has no parameter of the model, the scheduler belongs to
            another optimizer, or the checkpoint belongs to another model or is not a file of this function.

    Example:
        >>> import torch, hbnode
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(1)
        >>> data, net = torch.utils.data.TensorDataset(x, 3 * x), torch.nn.Linear(1, 1)
        >>> loader = torch.utils.data.DataLoader(data, batch_size=16)
        >>> record = hbnode.training.train(
        ...     net, lambda net, x, y: (net(x) - y).square().mean(), loader, loader,
        ...     optimizer=torch.optim.SGD(net.parameters(), lr=0.5),
        ... )
        >>> abs(net.weight.item() - 3) < 1e-3
        True
    """
    as_count(max_epochs, "max_epochs")
    if not callable(loss):
        raise TypeError(f"loss must be a function, got {type(loss).__name__}. Fix: loss=lambda model, x, y: ....")
    if patience is not None:
        as_count(patience, "patience")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if optimizer is None else optimizer
    known = {id(parameter) for parameter in model.parameters()}
    if known.isdisjoint(id(each) for group in optimizer.param_groups for each in group["params"]):
        raise ValueError("optimizer has no parameter of the model. Fix: torch.optim.AdamW(model.parameters()).")
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError("scheduler must be of the optimizer, got one of another. Fix: optimizer=scheduler.optimizer.")
    run = _Run(model, optimizer, scheduler, batches)
    if checkpoint is not None and Path(checkpoint).exists():
        run.load(checkpoint)
    bar = progress_bar(range(len(run.record), max_epochs), progress, name)
    try:
        for epoch in bar:
            if patience is not None and validation is not None and epoch - 1 - run.best_epoch >= patience:
                break
            entry = {"epoch": epoch, "loss": run.step(loss, epoch, clip_norm)}
            if validation is not None:
                entry["validation"] = run.validated(validation, loss, epoch)
            entry["learning_rate"] = optimizer.param_groups[0]["lr"]
            run.finish(entry)
            if hasattr(bar, "set_postfix"):  # without tqdm, bar is a range
                bar.set_postfix(loss=f"{entry.get('validation', entry['loss']):.3g}")
            if checkpoint is not None:
                run.save(checkpoint)
    finally:
        if run.best is not None:
            model.load_state_dict(run.best)
        model.eval()
    return run.record


def write_whole(entries: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Save a dict with torch.save. If the call is interrupted, an existing file at ``path`` does not change."""
    partial = Path(f"{path}.partial")
    try:
        torch.save(entries, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def stored_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a dict that :func:`write_whole` saved; return an empty dict if the file is damaged or has other content."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, LookupError, ValueError):
        return {}
    return stored if isinstance(stored, dict) else {}


class _Run:
    """The state of a training run: model, optimizer, scheduler, losses of all epochs, parameters of the best epoch."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, batches: Any) -> None:
        self.model, self.optimizer, self.scheduler, self.batches = model, optimizer, scheduler, batches
        self.record: list[dict[str, float]] = []
        self.least, self.best_epoch = math.inf, -1
        self.best: dict[str, Any] | None = None
        owners = [batches, getattr(batches, "sampler", None), getattr(batches, "batch_sampler", None)]
        self.generators = [x for x in (getattr(owner, "generator", None) for owner in owners) if x is not None]

    def step(self, loss: Callable[..., Tensor], epoch: int, clip_norm: float | None) -> float:
        """Train the model for one epoch, that is, on all batches once, and return the mean of the loss."""
        self.model.train()
        total, count = 0.0, 0
        for batch, (arguments, size) in enumerate(self._moved(self.batches)):
            self.optimizer.zero_grad()
            with torch.enable_grad():
                error = loss(self.model, *arguments)
                found = float(error.detach())
                self._check(found, f"the loss of batch {batch}", epoch)
                error.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm)
            self.optimizer.step()
            total, count = total + size * found, count + size
        return total / self._count(count, "batches")

    @torch.no_grad()
    def validated(self, validation: Any, loss: Callable[..., Tensor], epoch: int) -> float:
        """Return the validation loss of the model with its current parameters."""
        self.model.eval()
        if callable(validation):
            found = float(validation(self.model))
        else:
            parts = [(size, float(loss(self.model, *arguments))) for arguments, size in self._moved(validation)]
            count = self._count(sum(size for size, _ in parts), "validation")
            found = sum(size * each for size, each in parts) / count
        self._check(found, "the validation loss", epoch)
        return found

    def finish(self, entry: dict[str, float]) -> None:
        """End an epoch: append ``entry`` (its losses) to the record, and step the scheduler.

        Also copy the parameters if their validation loss is the smallest so far.
        """
        self.record.append(entry)
        found = entry.get("validation")
        if found is None or found < self.least:
            self.best_epoch = int(entry["epoch"])
            self.best = None if found is None else copy.deepcopy(self.model.state_dict())
            self.least = math.inf if found is None else found
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(entry["loss"] if found is None else found)
        elif self.scheduler is not None:
            self.scheduler.step()

    def save(self, path: str | os.PathLike[str]) -> None:
        parts = {name: part.state_dict() for name, part in self._stateful_objects().items()}
        states = [torch.get_rng_state(), *(each.get_state() for each in self.generators)]
        best = {"least": self.least, "best_epoch": self.best_epoch, "best": self.best}
        write_whole({**parts, **best, "record": self.record, "random": states}, path)

    def load(self, path: str | os.PathLike[str]) -> None:
        stored = stored_in(path)
        parts = self._stateful_objects()
        if not {*parts, "record", "random"} <= {*stored}:
            raise ValueError(f"{path} must be a checkpoint of the same run. Fix: another file, or remove this one.")
        try:
            for name, part in parts.items():
                part.load_state_dict(stored[name])
        except (RuntimeError, ValueError, KeyError) as error:
            fault = f"{path} is a checkpoint of another model or optimizer: {error}"
            raise ValueError(f"{fault} Fix: another file, or remove this one.") from error
        self.record, self.least = stored["record"], stored["least"]
        self.best_epoch, self.best = stored["best_epoch"], stored["best"]
        torch.set_rng_state(stored["random"][0])
        for generator, state in zip(self.generators, stored["random"][1:], strict=True):
            generator.set_state(state)

    def _stateful_objects(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {name: part for name, part in parts.items() if part is not None}

    def _moved(self, batches: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yield pairs: a batch, moved to the device of the model, as a tuple of arguments for the loss; and its length.

        The length is the number of samples, by which losses are averaged.
        """
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        for batch in batches:
            leaves, tree = _pytree.tree_flatten(batch, is_leaf=lambda each: hasattr(each, "to"))
            leaves = [each.to(device) if hasattr(each, "to") else each for each in leaves]
            batch = _pytree.tree_unflatten(leaves, tree)
            sized = (each for each in leaves if getattr(each, "ndim", hasattr(each, "to")) and hasattr(each, "__len__"))
            yield tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), next(map(len, sized), 1)

    @staticmethod
    def _count(count: int, what: str) -> int:
        if not count:
            raise ValueError(f"{what} must have at least one batch in each epoch, got none. Fix: a DataLoader.")
        return count

    @staticmethod
    def _check(value: float, what: str, epoch: int) -> None:
        if not math.isfinite(value):
            fix = "a smaller learning rate, torch.optim.AdamW(model.parameters(), lr=1e-4), or standardised inputs"
            raise FloatingPointError(f"{what} in epoch {epoch} is {value}. Fix: {fix}.")
