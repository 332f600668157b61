"""The copy task of transformers."""

import json
import math

import pytest
import torch

pytest.importorskip("tqdm")
pytest.importorskip("matplotlib")

from hbnode.nn.attention import KeyValueCache
from tasks import plot, transformer_copy
from tasks.common.batches import FreshData
from tasks.common.config import parse
from tasks.common.run import Run, count_parameters
from tasks.data.transformer_copy import SEPARATOR, doubled, is_copied
from tasks.models.contenders import TITLES
from tasks.models.transformers import CONTENDERS
from tests.tasks.small_runs import read_metrics

TINY = (
    "--device cpu --length 12 --d-model 8 --heads 2 --layers 2 --feedforward 8 --iterations 3 --batch-size 4 "
    "--test-size 6"
).split()


def options_of(*argv):
    return parse(transformer_copy.CopyConfig, transformer_copy.PRESETS, "", ["--device", "cpu", *argv])


@pytest.mark.parametrize(("length", "least", "most"), [(8, 2, 2), (48, 12, 22), (128, 32, 62)])
def test_sequences_hold_everything_twice(length, least, most):
    tokens, sizes = doubled(2000, length, 10, torch.Generator().manual_seed(0))
    assert tokens.shape == (2000, length)
    assert (sizes.min(), sizes.max()) == (least, most)
    copied = is_copied(sizes, length)
    for row, n, part in zip(tokens[:200].tolist(), sizes.tolist(), copied, strict=False):
        word = row[:n]
        assert SEPARATOR not in word
        assert row == [*word, SEPARATOR, *word, *[SEPARATOR] * (length - 2 * n - 1)]
        assert part.nonzero().flatten().tolist() == list(range(n + 1, 2 * n + 1))
    counts = tokens[tokens > 0].bincount(minlength=11)[1:]
    assert counts.min() > 0.9 * counts.float().mean()


def test_a_short_sequence_is_refused(capsys):
    with pytest.raises(ValueError, match=r"length must be 8 or more, got 7\. Fix: a longer sequence"):
        doubled(1, 7, 10, torch.Generator())
    with pytest.raises(SystemExit):
        options_of("--length", "7")
    assert "--length must be 8 or more, got 7" in capsys.readouterr().err


class Copier(torch.nn.Module):
    """Says with certainty what stood n + 1 places before the next symbol, or nothing in particular."""

    def __init__(self, sizes, certain):
        super().__init__()
        self.sizes, self.certain = sizes, certain

    def forward(self, tokens):
        source = (torch.arange(tokens.shape[1]) - self.sizes[:, None]).clamp(min=0)
        scores = torch.nn.functional.one_hot(tokens.gather(1, source), 11).double()
        return 1e3 * scores if self.certain else 0 * scores


def test_loss_and_accuracy_are_those_of_the_second_word():
    tokens, sizes = batch = doubled(50, 20, 10, torch.Generator().manual_seed(0))
    loss, means = transformer_copy.cross_entropy(Copier(sizes, certain=True), batch)
    assert loss.item() == 0
    assert means == {"accuracy": 1.0}
    loss, means = transformer_copy.cross_entropy(Copier(sizes, certain=False), batch)
    assert loss.item() == pytest.approx(math.log(11))
    assert means == {"accuracy": 0.0}  # the separator is not in the word
    changed = tokens.masked_fill(~is_copied(sizes, 20) & (torch.arange(20) > sizes[:, None]), 3)
    assert transformer_copy.cross_entropy(Copier(sizes, certain=True), (changed, sizes))[0].item() == 0


def test_the_paper_preset():
    config = options_of("--preset", "paper", "--model", "momentum")
    assert (config.length, config.symbols, config.batch_size, config.lr, config.drop_after) == (128, 10, 64, 1e-3, 3000)
    assert config.epochs * config.iterations > 3000
    width, hidden = 8 * 32, 1024
    attention, norms = 4 * (width**2 + width), 4 * width
    layer = attention + norms + 2 * width * hidden + width + hidden
    with torch.device("meta"):
        model = config.make_transformer(1 + config.symbols)
    assert count_parameters(model) == 4 * layer + 11 * width + 11 * width + 11


def numbers(state):
    """Of all floating-point tensors in nested tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.is_floating_point()
    if isinstance(state, KeyValueCache):
        return state.keys.numel() + state.values.numel()
    return sum(numbers(part) for part in state) if isinstance(state, tuple) else 0


@pytest.mark.parametrize("model", ["softmax", "momentum", "adaptive", "gated_linear", "gated_delta", "heavy_ball"])
@pytest.mark.parametrize("equal", ["heads", "state"])
def test_the_size_of_the_state_is_what_a_stream_carries(model, equal):
    config = options_of("--model", model, "--equal", equal, "--d-model", "16", "--heads", "2")
    _, state = config.make_transformer(11).prefill(torch.zeros(1, 5, dtype=torch.int64))
    assert numbers(tuple(state)) == config.state_size(5)


def test_states_are_equal_where_they_are_said_to_be():
    for equal in ("heads", "state"):
        sizes = {name: options_of("--model", name, "--equal", equal).state_size(48) for name in CONTENDERS}
        pairs = [("linear", "momentum"), ("linear_gain", "adaptive"), ("gated_delta", "heavy_ball")]
        assert all((sizes[one] == sizes[other]) == (equal == "state") for one, other in pairs)
        assert sizes["softmax"] > 2 * sizes["momentum"]


def test_the_rate_drops_to_a_tenth(tmp_path):
    run = Run("transformer_copy", options_of("--batch-size", "2", "--out", str(tmp_path)), "")
    fresh = FreshData(20, lambda epoch: (torch.zeros(20),))
    for after, rates in ((15, [1.0] * 15 + [0.1] * 5), (0, [1.0] * 20)):
        batches = transformer_copy.DroppedRate(run, fresh, after)
        assert [batches.piece(*divmod(step, 10)).rate for step in range(20)] == rates
    run.lock.release()


def test_a_run_can_be_trained_longer_to_the_same_numbers(tmp_path, capsys):
    options = [*TINY, "--model", "momentum_connection", "--drop-after", "4", "--out"]
    transformer_copy.main([*options, str(tmp_path / "whole"), "--epochs", "3"])
    assert f"{TITLES['momentum_connection']}, seed 0" in capsys.readouterr().out
    for epochs in ("1", "3"):
        transformer_copy.main([*options, str(tmp_path / "parts"), "--epochs", epochs])
    assert read_metrics(tmp_path / "parts") == read_metrics(tmp_path / "whole")
    summary = json.loads((tmp_path / "parts" / "summary.json").read_text())
    assert summary["state"] == 2 * (2 * 8 * 4 + 8)


def test_copying_is_learned_where_it_is_short(tmp_path):
    options = "--device cpu --model softmax --length 8 --symbols 3 --d-model 16 --heads 2 --feedforward 16".split()
    sizes = "--layers 2 --iterations 100 --batch-size 32 --lr 1e-2 --epochs 2 --test-size 200".split()
    transformer_copy.main([*options, *sizes, "--drop-after", "0", "--out", str(tmp_path)])
    assert json.loads((tmp_path / "summary.json").read_text())["test_accuracy"] > 0.9


def test_plot_draws_transformers_by_their_names(tmp_path, capsys):
    for model in ("linear", "heavy_ball"):
        transformer_copy.main([*TINY, "--model", model, "--epochs", "2", "--out", str(tmp_path / model)])
    capsys.readouterr()
    plot.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert "transformer_copy-default-12" in out
    assert {line.split("  ")[0] for line in out.splitlines()} >= {TITLES["linear"], TITLES["heavy_ball"]}
    assert "state" in out
    figure = plot.draw(plot.collect(tmp_path), "")
    assert [ax.get_ylabel() for ax in figure.axes[:2]] == ["train loss", "test accuracy"]
    assert {line.get_label(): line.get_linestyle() for line in figure.axes[0].lines} == {
        TITLES["linear"]: "--",
        TITLES["heavy_ball"]: "-",
    }
    plot.plt.close(figure)
