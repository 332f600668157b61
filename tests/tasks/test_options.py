"""Invalid command lines: each ends with status 2 and a message that names the option."""

import importlib

import pytest

COMMANDS = """
adding --model forget --cell gru | --model forget is for --cell lstm
adding --model oscillators --cell gru | --model oscillators is for --cell lstm
adding --model plain --step-size 2 | --model plain does not use --step-size
adding --model nag,sr --beta 0.5 | --model nag,sr does not use --beta
adding --momentum 1 | --momentum must be below 1, got 1.0
adding --step-size 0 | --step-size must be positive, got 0
adding --step-size nan | --step-size is nan
adding --model lstm | invalid choice: 'lstm'
adding --clip -1 | --clip must not be negative
adding --seed 4294967296 | --seed must be below
annealing --out run --targets funel | funel
annealing --out run --paths 3 | paths
classification --drop 1 | --drop must be below 1
image_classification --dataset mnist --small | --small is for --dataset digits
image_classification --regularize both | --regularize is for --model node and anode, got hbnode
image_classification --curve --steps 3 | --curve varies the tolerance
image_classification --model all --method nystrom4 | nystrom4
image_classification --model gru | argument --model: invalid choice: 'gru' (choose from node,
image_generation --side 5 | --side must divide 8, the edge of digits, got 5
image_generation --d-model 10 --heads 4 | --d-model must be a multiple of --heads, got 10 and 4
image_generation --equal state --heads 1 | --heads must be even, got 1
transformer_copy --positions rotary --model linear | --positions rotary needs --model softmax, got linear
language_model --model transformer --connection wider --layers 1 | wider has a layer less, and --layers is 1
language_model --model transformer --d-model 20 --heads 4 | --d-model must be a multiple of twice --heads
lra --schedule cosine | --warmup sets the schedule, got --schedule cosine
lra --epochs 1 --iterations 5 --warmup 5 | --warmup must be below the 5 steps of the run, got 5
pathological --length 9 | length must be 10 or more, got 9
pathological --optimizer hf --schedule step | --schedule step changes a learning rate, and hf has none
pathological --optimizer hf --damping 1e-5 | --damping must be at least --min-damping
pathological --schedule cosine | --schedule cosine falls to 0 within --epochs
pixel_mnist --side 5 | --side must divide 28, the edge of mnist, got 5
point_cloud --steps 5 --solver torchdiffeq | steps=5 needs fixed steps
point_cloud --method foo | unknown method 'foo'
point_cloud --method rk4 | --method rk4 is not one of --solver native
point_cloud --method tsit5 --solver torchdiffeq | Fix: --solver native
point_cloud --method rk4 --solver torchdiffeq | say how fine with --steps
point_cloud --tol 1e-12 | far below the machine epsilon
recall --kind twice | argument --kind: invalid choice: 'twice' (choose from once, again, noisy, all)
recall --rates 1e-3,nan | --rates must be positive, got 1e-3,nan
recall --rates 1e-3,x | --rates must be numbers with commas between, got '1e-3,x'
recall --most 4 | --most must be 8 or more, got 4
silverbox --past 51 | --past must be at most 50
silverbox --validation 10 | --validation must be at least 100
studies.image_throughput --model linear | --model must name softmax
studies.image_throughput --length 0 | must be positive
studies.pixel_mnist_gradients --every 0 | --every must be positive
studies.pixel_mnist_gradients --model plain --momentum 0.5 | --model plain does not use --momentum
transformer_copy --length 7 | --length must be 8 or more, got 7
translation --d-model 30 --heads 4 | --d-model must be even and a multiple of --heads, got 30 and 4
walker2d --model gru,,node | invalid choice: ''
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
