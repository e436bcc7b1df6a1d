"""EquiMod: the parameters of an augmentation, the plain view, the loss, and eqgain.

    python -m pytest -q paper/tests/test_equimod.py
"""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import eval_linear
import ser
from paper.methods import equimod
from paper.tests.test_addon import drawn, settings, toy
from ser import Crop, Jitter, Key, View
from test_ser import close, seeded

def collated(draws):
    """A list of (Crop, Jitter) -> a view without images."""
    crops, jitters = zip(*draws)
    columns = [torch.stack([torch.as_tensor(v) for v in column]) for column in zip(*jitters)]
    return View([], Crop(*(torch.tensor(column) for column in zip(*crops))), Jitter(*columns), None)

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
    assert not crop.flip and all(torch.equal(torch.as_tensor(a), torch.as_tensor(b))
                                 for a, b in zip(jitter, Jitter()))

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
    y, yhat = [], []
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
    loss, found = model.extra([f1, f2, f0], views)
    close(loss, total)
    hits = [max(range(16), key=lambda j: F.cosine_similarity(y[i], yhat[j], 0).item()) == i
            for i in range(16)]
    close(found["equiv_top1"], torch.tensor(hits).float().mean())
    gain = [F.cosine_similarity(y[i], yhat[i], 0)
            - F.cosine_similarity(y[i], project(f0[i % 8][None])[0], 0) for i in range(16)]
    close(found["eqgain"], torch.stack(gain).mean())
    assert found["equiv_chance"] == pytest.approx(0.6 * math.log(16))
    assert found["equiv_top1_chance"] == 1 / 16

def test_no_view_is_detached():
    cfg, model = toy("equimod")
    features = [*torch.randn(3, 8, 16, generator=seeded(2)).requires_grad_()]
    loss, _ = model.extra(features, drawn(cfg).views)
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
        gain = model.extra([f1, f2, f0], views)[1]["eqgain"]
        alone = torch.cat([F.cosine_similarity(f, f0) for f in (f1, f2)]).mean()
        close(gain, (1 - alone) * used)
        assert gain > 0.1 or not used

def test_the_heads_have_the_releases_shapes():
    """384-384-384-128 without affine part at the end, 18-128 without ReLU, 256-128 linear."""
    with torch.device("meta"):
        heads = equimod.build(equimod.Settings()).heads
    shapes = {name: [(type(m).__name__, *m.weight.shape) if m.weight is not None
                     else type(m).__name__ for m in head if hasattr(m, "weight")]
              for name, head in heads.items()}
    assert shapes == {
        "project": [("Linear", 384, 384), ("BatchNorm1d", 384), ("Linear", 384, 384),
                    ("BatchNorm1d", 384), ("Linear", 128, 384), "BatchNorm1d"],
        "action": [("Linear", 128, 18), ("BatchNorm1d", 128)],
        "predict": [("Linear", 128, 256), "BatchNorm1d"]}
    assert all(m.bias is None for head in heads.values() for m in head if isinstance(m, nn.Linear))
