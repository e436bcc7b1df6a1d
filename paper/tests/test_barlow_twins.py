"""Every claim of paper/methods/barlow_twins.py."""
import itertools

import pytest
import torch
from torch import nn

import ser
from paper.methods import barlow_twins
from paper.tests.test_addon import check_defaults, slow_norm
from paper.tests.test_dino import SHAPE, check_ranks, toy_views, train
from test_ser import close, seeded, shake, trained

FLAGS = [*SHAPE, "--hidden", "16"]


def slow_loss(z1, z2, w):
    """Zbontar et al., Eq. 1 and 2, as loops over features and images, divided by K."""
    images, features = z1.shape
    total = 0
    for i, j in itertools.product(range(features), repeat=2):
        c = sum(z1[b, i] * z2[b, j] for b in range(images)) / images
        total = total + ((1 - c) ** 2 if i == j else w * c ** 2)
    return total / features


def slow_projector(projector, x):
    """Linear layers without bias; BatchNorm and ReLU between them, BatchNorm after the last."""
    for i in (0, 3, 6):
        x = x @ projector[i].weight.T
        x = slow_norm(x, projector[i + 1]).clamp(min=0) if i < 6 else slow_norm(x)
    return x


def test_the_loss_is_the_papers_on_standardised_features():
    """Value and gradient, from [CLS]. DDP demands a gradient for all that is trained."""
    args = barlow_twins.settings([*FLAGS, "--off-diagonal", "0.3"])
    model = shake(barlow_twins.build(args))
    base = model.base
    assert len(base.projector) == 8
    cls = torch.randn(2, 12, 16, generator=seeded()).requires_grad_()
    fast = base([], list(cls))
    slow = slow_loss(*[slow_projector(base.projector, x) for x in cls], 0.3)
    close({"loss": fast}, {"loss": slow})
    close(torch.autograd.grad(fast, cls), torch.autograd.grad(slow, cls))
    model(toy_views(args))["loss"].backward()
    for name, p in model.named_parameters():     # the patch embedding, too
        assert p.grad.abs().sum() > 0, name


def test_a_step_sets_the_rate_and_clips():
    """8e-4 at batch 2048, down to a thousandth; a gradient of K L_inv has norm .3 at most."""
    model = nn.Linear(2, 1, bias=False)
    args = barlow_twins.settings(["--data", "some", "--hidden", "16"])
    optimizer = barlow_twins.optimizer(model, args)
    for epoch, rate, gradient, clipped in ((5, 4e-4, [3 / 16, 4 / 16], [0.18, 0.24]),
                                           (10, 8e-4, [3 / 16, 4 / 16], [0.18, 0.24]),
                                           (100, 8e-7, [0.003, 0.004], [0.048, 0.064])):
        barlow_twins.schedule(optimizer, args, epoch)
        model.weight.grad = torch.tensor([gradient])
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate), f"epoch {epoch}"
        close({f"epoch {epoch}": model.weight.grad}, {f"epoch {epoch}": torch.tensor([clipped])})


def test_the_defaults_are_those_of_the_paper_the_release_and_barlow_twins():
    check_defaults(barlow_twins, dict(
        out="runs/barlow", weight=0.5, temperature=0.3, base_lr=1e-4, weight_decay=0.1,
        hidden=8192, off_diagonal=0.0051))
    with torch.device("meta"):
        projector = barlow_twins.build(barlow_twins.settings(["--data", "imagenet"])).base.projector
    assert [layer.weight.shape for layer in projector[::3]] == [(8192, 384)] + [(8192, 8192)] * 2


def test_it_trains_from_the_command_line(tmp_path, monkeypatch):
    """The optimizer follows the release's schedule: half-way, the rate is half-way."""
    flags = [*FLAGS, "--warmup-epochs", "0"]
    log, state = train(barlow_twins, flags, tmp_path, monkeypatch)
    assert log[0]["method"] == "SER on BarlowTwins"
    group, = state["optimizer"]["param_groups"]
    assert group["lr"] == log[2]["lr"] == pytest.approx(0.5005 * 1e-3 * 12 / 256, rel=1e-5)


def test_two_ranks_train_as_one_process(tmp_path):
    """Each rank's features meet those of the other."""
    check_ranks("barlow_twins", tmp_path)
