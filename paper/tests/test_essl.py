"""E-SSL: the four turns of a small crop, their labels, and the control without them.

    python -m pytest -q paper/tests/test_essl.py
"""
import itertools
import math

import torch
from torch import nn

import ser
from paper.methods import essl
from paper.tests.test_addon import drawn, settings, toy
from ser import Batch, Key, View
from test_ser import close, seeded

def test_label_k_means_k_counter_clockwise_quarter_turns():
    """The literal 2 x 2 matrices, in the order of the labels."""
    _, model = toy("essl")
    x = torch.tensor([[1., 2], [3, 4]])[None, None]
    views = model.views(Batch([View([x], None, None, None)] * 3))
    assert len(views) == 6
    assert [view.images[0][0, 0].tolist() for view in views[2:]] == [
        [[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]

def test_the_loss_is_cross_entropy_of_the_turn_of_every_crop():
    """Slow: crop by crop and turn by turn; the two whole views play no part."""
    cfg, model = toy("essl")
    views = model.views(drawn(cfg))
    features = [*torch.randn(6, 8, 16, generator=seeded(2))]
    total = 0.0
    hits = 0
    for k, i in itertools.product(range(4), range(8)):
        said = model.heads["turns"](features[2 + k][i])
        total = total - said.log_softmax(0)[k] / 32
        hits += int(said.argmax() == k)
    loss, found = model.equivariance_loss(features, views)
    close(loss, total)
    assert found["turns_top1"] == hits / 32 and found["turns_top1_chance"] == 0.25
    features[0] = features[1] = torch.zeros(8, 16)
    close(model.equivariance_loss(features, views)[0], loss)

def test_an_ignorant_head_has_the_loss_of_chance():
    cfg, model = toy("essl")
    model.heads["turns"][-1].weight.data.zero_()
    model.heads["turns"][-1].bias.data.zero_()
    losses = model(drawn(cfg))
    close(losses["equiv"], torch.tensor(math.log(4)))
    assert losses["equiv_chance"] == math.log(4)

def test_a_head_that_sees_the_light_learns_the_turns():
    """Images lit from above, features that are the mean brightness of the four halves."""
    model = toy("essl")[1]
    light = torch.linspace(1, 0, 8).view(8, 1).expand(16, 3, 8, 8) + 0.1 * torch.randn(
        16, 3, 8, 8, generator=seeded(1))
    views = model.views(Batch([View([light], None, None, None)] * 3))
    features = []
    for view in views:
        x = view.images[0].mean(1)
        halves = [x[:, :4].mean((1, 2)), x[:, 4:].mean((1, 2)), x[:, :, :4].mean((1, 2)),
                  x[:, :, 4:].mean((1, 2))]
        features.append(torch.stack(halves * 4, dim=1) - 0.5)
    optimizer = torch.optim.Adam(model.heads.parameters(), 1e-2)
    for _ in range(30):
        loss, found = model.equivariance_loss(features, views)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert found["turns_top1"] == 1

def test_the_small_crop_is_e_ssls():
    """96 pixels of 5% to 14% of the image, blurred in a tenth of the images, never solarized."""
    small = essl.Settings().policies[2]
    assert small == ser.Policy(96, (0.05, 0.14), 0.1, 0.0)
    assert essl.Settings().policies[:2] == ser.Config().policies
    data = essl.Settings().dataset(torch.zeros(1))
    shares = [data.draw(Key(0, i, i, False), torch.zeros(3, 200, 200))[2][0] for i in range(100)]
    areas = [box.height * box.width for box in shares]
    assert 0.045 < min(areas) < 0.06 and 0.13 < max(areas) < 0.15

def test_mode_inv_contrasts_the_turned_crops_with_both_keys():
    """Ten terms in all, of 6 queries and 2 keys: every pair but a whole view with itself."""
    cfg, model = toy("essl", mode="inv")
    batch = drawn(cfg)
    views = model.views(batch)
    base = model.base
    queries = [base.predictor(base.projector(base.encoder(v.images)[0].cls)) for v in views]
    keys = [base.key(view) for view in views[:2]]
    total = 0.0
    terms = 0
    for (a, q), (b, k) in itertools.product(enumerate(queries), enumerate(keys)):
        if a != b:
            total = total + ser.info_nce(q, k, 0.2)[0]
            terms += 1
    losses = model(batch)
    close(losses["loss"], total)
    assert terms == 10 and len(model.heads) == 0
    close(losses["equiv_chance"] + losses["inv_chance"], 10 * 0.4 * math.log(8))
    assert len(base.keys) == 2     # of this step alone, made once

def test_the_head_has_the_releases_shape():
    with torch.device("meta"):
        head = essl.build(essl.Settings()).heads["turns"]
    kinds = [type(layer).__name__ for layer in head]
    assert kinds == ["Linear", "LayerNorm", "ReLU"] * 2 + ["Linear", "LayerNorm", "Linear"]
    widths = [tuple(m.weight.shape) for m in head if isinstance(m, nn.Linear)]
    assert widths == [(384, 384), (384, 384), (256, 384), (4, 256)]
    assert all(m.bias is not None for m in head if isinstance(m, nn.Linear))
