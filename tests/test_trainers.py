"""Series in the training loops of Lightning and skorch, as docs/forecasting.md shows them."""

import importlib.metadata
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import hbnode

pytestmark = pytest.mark.slow


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = hbnode.ODERNN(1, 8, time_unit=5.0, steps=1)
        self.head = nn.Linear(8, 2)

    def forward(self, series):
        _, state = self.rnn(**series.inputs())
        return self.head(state.h)


def waves(seed):
    random = np.random.default_rng(seed)
    labels = np.arange(64) % 2
    times = [np.sort(random.uniform(0, 10, random.integers(15, 30))) for _ in labels]
    pairs = [(t, np.sin((1 + y) * t)) for t, y in zip(times, labels, strict=True)]
    return hbnode.data.as_series(pairs, dtype=torch.float32), torch.from_numpy(labels)


def version_without_torchvision(name, version=importlib.metadata.version):
    """Lightning's metrics import any torchvision that is installed, even one for another build of torch."""
    if name == "torchvision":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)


def test_lightning(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", version_without_torchvision)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports
        lightning = pytest.importorskip("lightning")

    # page: Lightning
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier()

        def training_step(self, batch, index):
            series, target = batch
            return nn.functional.cross_entropy(self.model(series), target)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.02)

    # end: Lightning
    series, labels = waves(0)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=25,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a loader without workers
        trainer.fit(module, hbnode.data.Dataset(series, labels).batches(16))
    series, labels = waves(1)
    with torch.no_grad():
        assert float((module.model(series).argmax(1) == labels).float().mean()) > 0.9


def test_skorch():
    skorch = pytest.importorskip("skorch")
    series, labels = waves(0)

    # page: skorch
    def dataset(series, y=None):
        return hbnode.data.Dataset(series, torch.zeros(len(series)) if y is None else y)

    class Net(skorch.NeuralNetClassifier):
        def infer(self, series):
            return self.module_(series.to(self.device))

    net = Net(
        Classifier,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=0.02,
        max_epochs=25,
        batch_size=16,
        dataset=dataset,
        iterator_train__collate_fn=hbnode.data.collate,
        iterator_valid__collate_fn=hbnode.data.collate,
        callbacks=[skorch.callbacks.EarlyStopping(patience=10)],
        verbose=0,
    )
    net.fit(series, labels)
    # end: skorch
    series, labels = waves(1)
    assert float((net.predict(series) == labels.numpy()).mean()) > 0.9
