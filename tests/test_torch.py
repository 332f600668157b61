"""The private functions of torch that hbnode calls exist and mean what they are used for; freed memory is kept."""

import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from hbnode import _torch


def test_transforms_are_noticed():
    seen = []

    def function(x):
        seen.append((not _torch.may_look(), _torch.plain(x).shape))
        return x.sum()

    x = torch.zeros(3, 2)
    function(x)
    torch.func.vmap(function, in_dims=1)(x)
    torch.func.grad(function)(x)
    assert seen == [(False, (3, 2)), (True, (2, 3)), (True, (3, 2))]


def test_forward_mode_is_noticed():
    assert not _torch.is_transformed()
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_transformed()


def test_gradients_that_stand_for_many_are_noticed():
    seen = []
    x = torch.zeros(3, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda g: seen.append(_torch.is_batched(g)))
    torch.autograd.grad(y, x, torch.eye(3), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(y.sum(), x)
    assert seen == [True, False]


def test_backward_passes_have_numbers():
    seen = [_torch.backward_pass()]
    for _ in range(2):
        x = torch.ones(1, requires_grad=True)
        x.register_hook(lambda _: seen.append(_torch.backward_pass()))
        (2 * x).backward()
    assert seen[0] == -1
    assert seen[1] != seen[2]
    assert -1 not in seen[1:]


def test_later_nodes_have_larger_numbers():
    x = torch.ones(1, requires_grad=True)
    earlier, later = x + 1, x + 2
    assert _torch.sequence_number(earlier.grad_fn) < _torch.sequence_number(later.grad_fn)


def test_fused_layers_are_those_of_torch():
    lstm = nn.LSTM(3, 4).double()
    x, h, c = torch.randn(5, 2, 3).double(), torch.randn(1, 2, 4).double(), torch.randn(1, 2, 4).double()
    expected, (h_end, c_end) = lstm(x, (h, c))
    found = _torch.fused_layer("lstm", x, (h, c), list(lstm.parameters()))
    for mine, theirs in zip(found, (expected, h_end, c_end), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_passes_that_keep_the_graph_are_noticed():
    if not hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph"):  # torch 2.4
        return
    seen = []
    y = 2 * torch.ones(1, requires_grad=True)
    y.register_hook(lambda g: seen.append(_torch.keeps_graph()))
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]


SCRIPT = """
import resource, sys, torch
from hbnode._torch import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory(torch.device("cpu"))
for turn in range(4):
    if turn == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**18) for _ in range(24)]  # a mebibyte each
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_blocks_that_come_and_go_are_not_taken_from_the_system_again(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run([sys.executable, "-c", SCRIPT, how], check=True, capture_output=True, text=True)
        faults[how] = int(done.stdout)
    assert faults["keep"] < 0.3 * faults["leave"]  # near 0, but for pages that the system moves
