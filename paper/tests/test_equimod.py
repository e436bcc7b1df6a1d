"""EquiMod: the parameters of an augmentation, the plain view, the loss, and eqgain.

    python -m pytest -q paper/tests/test_equimod.py
"""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import default_collate

import eval_linear
from paper.methods import equimod
from paper.tests.test_addon import drawn, settings, toy
from ser import Crop, Jitter, Key, View
from test_ser import close, seeded

def collated(draws):
    """A list of (Crop, Jitter) -> a view without images."""
    crop, jitter = default_collate(draws)
    return View([], crop, jitter, None)

def raw(view):
    """The 18 parameters before they are standardised."""
    mean, std = torch.tensor(list(equimod.PARAMETERS.values())).T
    return equimod.parameters(view) * std + mean

# ==== Parameters ==================================================================================
def test_the_parameters_in_their_order():
    """Box and flip; jitter flag, four operations in order of application, four factors, gray; blur
    flag and sigma; solarization."""
    jitter = Jitter(0.7, 1.2, 0.9, -0.05, torch.tensor([2, 0, 3, 1]), True, 1.5, True)
    view = collated([(Crop(0.1, 0.2, 0.3, 0.4, True), jitter)])
    wanted = [0.1, 0.2, 0.3, 0.4, 1, 1, 2, 0, 3, 1, 0.7, 1.2, 0.9, -0.05, 1, 1, 1.5, 1]
    close(raw(view)[0], torch.tensor(wanted), 1e-4)

def test_without_jitter_the_parameters_are_those_that_change_nothing():
    view = collated([(Crop(0.0, 0.0, 1.0, 1.0, False), Jitter())])
    wanted = [0, 0, 1, 1, 0, 0, 0, 1, 2, 3, 1, 1, 1, 0, 0, 0, 0, 0]
    close(raw(view)[0], torch.tensor(wanted).float(), 1e-4)

def test_the_parameters_are_standardised_under_moco_v3s_t():
    """Mean 0 and deviation 1 of all 18, both views together, on images of 500 x 375. The published
    constants give the colors half of that, blur and solarization something else."""
    cfg = equimod.Settings(blur=(1.0, 0.1))
    data = cfg.dataset(torch.zeros(1, 3, 2, 2))
    image = torch.empty(3, 375, 500, device="meta")
    draws = []
    for index in range(2500):
        draws += data.draw(Key(0, index, index, False), image)[:2]
    p = equimod.parameters(collated(draws))
    assert p.shape == (5000, 18)
    for name, mean, std in zip(equimod.PARAMETERS, p.mean(0).tolist(), p.std(0).tolist()):
        assert abs(mean) < 0.06 and abs(std - 1) < 0.05, (name, mean, std)

def test_the_third_view_is_eval_linears_centre_crop():
    """Up to one resampling: to 256, then 224 cut out, against one step. No flip, no jitter."""
    coarse = torch.rand(1, 3, 5, 5, generator=seeded())
    image = F.interpolate(coarse, (300, 260), mode="bicubic").clamp(0, 1)[0]
    image = (image * 255).to(torch.uint8)
    cfg = settings("equimod", image_size=224)
    loaded, _ = cfg.dataset(image[None])[Key(0, 0, 0, False)]
    assert len(loaded) == 3
    pixels, crop, jitter = loaded[2]
    wanted = eval_linear.centre_crop(image, 224)
    assert (pixels.float() - wanted.float()).abs().mean() < 1
    assert not crop.flip
    assert str(jitter) == str(Jitter())

def test_moco_v3_never_sees_the_plain_view():
    cfg, model = toy("equimod")
    seen = []
    model.base.momentum_encoder.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0]))
    batch = drawn(cfg)
    model(batch)
    assert len(seen) == 2
    assert all(torch.equal(x, view.images[0]) for x, view in zip(seen, batch.views))

# ==== Loss ========================================================================================
def test_the_loss_equals_a_slow_double_loop():
    """Row by row: y finds its yhat among all 2B, and back; the mean of both, each 2T times CE."""
    cfg, model = toy("equimod", temperature=0.3)
    model.eval()     # so that a row can be told alone
    views = drawn(cfg).views
    f1, f2, f0 = torch.randn(3, 8, 16, generator=seeded(2))
    project, action, predict = (model.heads[name] for name in ("project", "action", "predict"))
    y = []
    yhat = []
    for f, view in ((f1, views[0]), (f2, views[1])):
        for i in range(8):
            p = action(equimod.parameters(view)[i][None])
            y.append(project(f[i][None])[0])
            yhat.append(predict(torch.cat([project(f0[i][None]), p], 1))[0])
    total = 0.0
    for a, b in ((y, yhat), (yhat, y)):
        for i in range(16):
            s = [(F.cosine_similarity(a[i], b[j], 0) / 0.3).exp() for j in range(16)]
            total = total - 2 * 0.3 * (s[i] / sum(s)).log() / 16 / 2
    loss, found = model.equivariance_loss([f1, f2, f0], views)
    close(loss, total)
    gain = 0.0
    for i in range(16):
        plain = project(f0[i % 8][None])[0]
        gain += F.cosine_similarity(y[i], yhat[i], 0) - F.cosine_similarity(y[i], plain, 0)
    close(found["eqgain"], gain / 16)
    assert found["equiv_chance"] == pytest.approx(0.6 * math.log(16))
    assert found["equiv_top1_chance"] == 1 / 16

def test_no_view_is_detached():
    cfg, model = toy("equimod")
    features = [*torch.randn(3, 8, 16, generator=seeded(2)).requires_grad_()]
    loss, _ = model.equivariance_loss(features, drawn(cfg).views)
    for gradient in torch.autograd.grad(loss, features):
        assert gradient.abs().sum() > 0

def test_batch_norm_sees_one_view_at_a_time():
    """As in the release: the plain view does not move what the other two are normalised by."""
    cfg, model = toy("equimod")
    sizes = []
    model.heads["project"].register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    model(drawn(cfg))
    assert sizes == [8, 8, 8]

def test_eqgain_is_above_0_for_an_exact_action_and_0_for_one_that_is_not_used():
    cfg, model = toy("equimod")
    views = drawn(cfg).views
    f0 = torch.randn(8, 18, generator=seeded(3))
    f1, f2 = (f0 + equimod.parameters(view) for view in views[:2])
    model.heads["project"] = nn.Identity()
    model.heads["action"] = nn.Identity()
    for used in (True, False):
        predict = nn.Linear(36, 18, bias=False)     # y_0 + p, or y_0
        predict.weight.data = torch.cat([torch.eye(18), used * torch.eye(18)], 1)
        model.heads["predict"] = predict
        gain = model.equivariance_loss([f1, f2, f0], views)[1]["eqgain"]
        alone = torch.cat([F.cosine_similarity(f, f0) for f in (f1, f2)]).mean()
        close(gain, (1 - alone) * used)
        assert gain > 0.1 or not used

def test_the_heads_have_the_releases_shapes():
    """384-384-384-128 without affine part at the end, 18-128 without ReLU, 256-128 linear."""
    with torch.device("meta"):
        heads = equimod.build(equimod.Settings()).heads
    shapes = {}
    for name, head in heads.items():
        shapes[name] = [tuple(p.shape) for p in head.parameters()]
    affine = [(384,), (384,)]     # of a BatchNorm
    assert shapes["project"] == [(384, 384), *affine, (384, 384), *affine, (128, 384)]
    assert shapes["action"] == [(128, 18), (128,), (128,)]
    assert shapes["predict"] == [(128, 256)]
    assert [type(head[-1]) for head in heads.values()] == [nn.BatchNorm1d] * 3
