"""Every claim of paper/methods/dino.py."""
import copy

import pytest
import torch
import torch.nn.functional as F
from pytest import approx
from torch import nn

from paper.methods import dino
from paper.tests.test_methods import settings, slow_layers, toy, toy_views
from test_ser import close, noise, trained


def slow_head(head, x):
    """Caron et al., 3.1: three layers with GELU; then cosines times the lengths of rows."""
    x = slow_layers(head.mlp, "biased gelu biased gelu biased", x)
    rows = head.last.parametrizations.weight
    cosines = F.cosine_similarity(x[:, None], rows.original1[None], dim=-1)
    return cosines * rows.original0[:, 0]


def slow_cross_entropy(t, s, center, tau_t):
    """The mean over images of H(P_t, P_s), as written (Caron et al., Eq. 1 and 2)."""
    teacher = ((t - center) / tau_t).exp()
    student = (s / 0.1).exp()
    p_t = teacher / teacher.sum(1, keepdim=True)
    p_s = student / student.sum(1, keepdim=True)
    return -(p_t * p_s.log()).sum() / len(t)


def test_each_view_learns_from_the_other_and_the_center_moves_after_its_use():
    """Caron et al., Algorithm 1, Eq. 4. The head's gradients are those of the slow loss."""
    args, model = toy("dino")
    views = toy_views("dino", args)
    base = model.base
    base.update(0.05)
    before = 0.1 * noise(20, seed=3)
    base.center.copy_(before)

    s = []
    t = []
    for view in views:
        student = [base.encoder(part).cls for part in (view.b1, view.b2)]
        teacher = [base.teacher(part).cls for part in (view.b1, view.b2)]
        s.append(slow_head(base.head, torch.cat(student)))
        t.append(slow_head(base.teacher_head, torch.cat(teacher)).detach())
    wanted = 0.0
    for i, j in ((0, 1), (1, 0)):
        wanted = wanted + slow_cross_entropy(t[i], s[j], before, base.tau_t) / 2
    center = 0.9 * before + 0.1 * torch.cat(t).mean(0)

    losses = model(views)
    close({"inv": losses["inv"]}, {"inv": wanted.detach()})
    close({"center": base.center}, {"center": center})
    weights = list(base.head.parameters())
    found = torch.autograd.grad(losses["loss"], weights)
    close(found, torch.autograd.grad(wanted, weights))


def test_the_head_begins_as_dinos_and_gives_cosines_in_full_precision():
    """Truncated normal weights of deviation .02, no biases, and rows of length 1."""
    head = dino.Head(64, 128, 50)
    layers = head.mlp[::2]
    assert [layer.out_features for layer in layers] == [128, 128, 256]
    for layer in layers:
        assert layer.weight.std().item() == approx(0.02, rel=0.1)
        assert layer.weight.abs().max() > 0.05 and layer.bias.eq(0).all()

    rows = head.last.parametrizations.weight
    assert rows.original0.eq(1).all()
    x = noise(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        features = head.mlp(x).float()
        found = head(x)
    close(found, F.cosine_similarity(features[:, None], rows.original1[None], dim=-1))


@pytest.mark.parametrize("progress, momentum, tau_t", [
    (0, 0.982, 0.04), (1 / 3, 0.9865, 0.055), (0.5, 0.991, 0.0625), (1, 1, 0.07)])
def test_the_teacher_begins_as_the_student_and_follows_it(progress, momentum, tau_t):
    """Caron et al., 3.1: m from .982 to 1, and tau_t from .04 to .07, here in 6 of 9 epochs."""
    base = dino.build(settings("dino", "--epochs 9 --teacher-temp-epochs 6")).base
    student = nn.ModuleList([base.encoder, base.head])
    teacher = nn.ModuleList([base.teacher, base.teacher_head])
    before = copy.deepcopy(student)
    for (name, p), slow in zip(student.named_parameters(), teacher.parameters(), strict=True):
        assert torch.equal(p, slow), name
        p.data += 1

    base.update(progress)
    assert base.tau_t == approx(tau_t)
    for (name, p), slow in zip(before.named_parameters(), teacher.parameters()):
        close({name: slow}, {name: p + 1 - momentum})


@pytest.mark.parametrize("network, kept", [
    ("encoder", [1.0, 0.75, 0.5]), ("teacher", [1.0, 1.0, 1.0])])
def test_stochastic_depth_drops_a_branch_of_whole_images_and_keeps_the_mean(network, kept):
    """Attention, here 1, and MLP, 10, each by itself, later blocks more; the teacher has none."""
    base = dino.build(settings("dino", "--drop-path 0.5")).base
    torch.manual_seed(0)
    for block, p in zip(getattr(base, network).blocks, kept, strict=True):
        for branch, value in ((block.attn["proj"], 1.0), (block.mlp["fc2"], 10.0)):
            nn.init.zeros_(branch.weight)
            nn.init.constant_(branch.bias, value)

        x = torch.zeros(4000, 3, 16)
        found = p * block(x)
        close(found, found[:, :1, :1].round().expand_as(x))     # the same for all tokens
        shares = []
        for value in (0, 1, 10, 11):
            is_value = found[:, 0, 0].round() == value
            shares.append(is_value.float().mean().item())
        one = p * (1 - p)
        assert shares == approx([(1 - p) ** 2, one, one, p ** 2], abs=0.025)
        assert block.eval()(x).eq(11).all(), "dropped in eval mode"


@pytest.mark.parametrize("epoch, rate, decay, frozen", [
    (1.5, 1.2e-4, 0.04019982, True),
    (2, 1.6e-4, 0.04035519, False),
    (10, 8e-4, 0.04880983, False),
    (99.999, 1e-5, 0.4, False)])
def test_a_step_has_the_rates_of_its_epoch_clips_and_freezes(epoch, rate, decay, frozen):
    """Vectors do not decay; .2 bounds each gradient's norm; the last layer rests at first."""
    flags = "--data some --batch-size 2048 --freeze-epochs 2 --clip 0.2"
    args = settings("dino", flags)
    model = dino.build(args)
    optimizer = dino.optimizer(model, args)
    dino.schedule(optimizer, args, epoch)
    assert optimizer.defaults["betas"] == (0.9, 0.999)

    decays = {}
    for group in optimizer.param_groups:
        assert group["lr"] == approx(rate, rel=1e-4)
        for p in group["params"]:
            decays[p] = group["weight_decay"]

    before = {}
    for i, (name, p) in enumerate(trained(model).items(), start=1):
        assert decays.pop(p) == approx(decay if p.dim() > 1 else 0, rel=1e-4), name
        p.grad = torch.full(p.shape, 0.01 * i)     # norms from 0.1 to 46
        before[name] = p.detach().clone(), p.grad.clone()
    assert not decays, "what is not trained decays"

    optimizer.step()
    for name, p in trained(model).items():
        weight, gradient = before[name]
        rests = frozen and "head.last" in name
        assert torch.equal(p, weight) == rests, name
        if not rests:
            norm = gradient.norm().item()
            close({name: p.grad}, {name: gradient * min(1, 0.2 / norm)})
