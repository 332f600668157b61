"""Invalid command lines: each ends with status 2 and a message that names the option."""

import importlib

import pytest

COMMANDS = """
adding --model forget --cell gru | --model forget is for --cell lstm
adding --momentum 1 | --momentum must be below 1, got 1.0
annealing --out run --targets funel | funel
image_classification --regularize both | --regularize is for --model node and anode, got hbnode
image_generation --side 5 | --side must divide 8, the edge of digits, got 5
lra --epochs 1 --iterations 5 --warmup 5 | --warmup must be below the 5 steps of the run, got 5
pathological --optimizer hf --schedule step | --schedule step changes a learning rate, and hf has none
point_cloud --steps 5 --solver torchdiffeq | steps=5 needs fixed steps
walker2d --model gru,ghbnode --method nystrom4 | nystrom4
"""


@pytest.mark.parametrize("line", COMMANDS.strip().splitlines())
def test_invalid_options_are_refused(line, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, message = line.split(" | ")
    task, *options = command.split()
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"tasks.{task}").main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
