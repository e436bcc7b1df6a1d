"""Every claim of paper/methods/barlow_twins.py."""
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import ser
from paper.methods import barlow_twins
from paper.tests.test_dino import SHAPE, train

def slow_loss(z1, z2, w):
    """Zbontar et al., Eq. 1 and 2, as loops over features and images, divided by K."""
    images, features = z1.shape
    total = 0
    for i, j in itertools.product(range(features), repeat=2):
        c = sum(z1[b, i] * z2[b, j] for b in range(images)) / images
        total = total + ((1 - c) ** 2 if i == j else w * c ** 2)
    return total / features

@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_is_the_papers_and_that_of_all_ranks(monkeypatch, ranks):
    """Value and gradient; two ranks with the same images are one process with either's."""
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (ranks, 0))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.mul_(2))
    base = barlow_twins.build(barlow_twins.settings([*SHAPE, "--hidden", "16"])).base
    projector = base.projector
    base.projector = nn.Identity()
    z = torch.randn(2, 6, 5, generator=ser.rng(0)).requires_grad_()
    fast = base([], z)
    slow = slow_loss(z[0], z[1], 0.02)
    assert_close(fast, slow)
    assert [layer.weight.shape for layer in projector[::3]] == [(16, 16)] * 3
    assert all(p.requires_grad for p in base.parameters())     # the patch embedding, too
    assert base.chance(64) == pytest.approx(1 + 1 / 64 + 0.02 * 15 / 64)     # C_ij^2 is 1 / 64
    assert_close(torch.autograd.grad(fast, z), torch.autograd.grad(slow, z))

def test_it_trains_from_the_command_line(tmp_path, monkeypatch):
    """With the paper's lambda and tau; the optimizer follows the release's schedule."""
    flags = [*SHAPE, "--hidden", "16", "--warmup-epochs", "0"]
    log, group = train(barlow_twins, flags, tmp_path, monkeypatch)
    assert (log[0]["weight"], log[0]["temperature"]) == (0.5, 0.3)
    assert group["lr"] == pytest.approx(0.5005 * 1e-3 * 64 / 256, rel=1e-5)     # half-way

def test_a_step_sets_the_rate_and_clips():
    """8e-4 at batch 2048, down to a thousandth; a gradient of K L_inv has norm .3 at most."""
    model = nn.Linear(2, 1, bias=False)
    model.base = nn.Module()
    args = barlow_twins.settings(["--data", "some", "--hidden", "16"])
    optimizer = barlow_twins.optimizer(model, args)
    for progress, rate, gradient, clipped in ((0.1, 8e-4, [3 / 16, 4 / 16], [0.18, 0.24]),
                                              (1, 8e-7, [0.003, 0.004], [0.048, 0.064])):
        model.weight.grad = torch.tensor([gradient])
        model.base.progress = progress
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        assert_close(model.weight.grad, torch.tensor([clipped]))
