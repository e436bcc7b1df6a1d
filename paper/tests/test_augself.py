"""AugSelf: what it predicts, in closed form and against the pixels of the views, and its loss.

    python -m pytest -q paper/tests/test_augself.py
"""
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from torch.utils.data import default_collate

import ser
from paper.methods import augself
from paper.tests.test_addon import drawn, settings, toy
from ser import Crop, Jitter, Key
from test_ser import close, seeded

def one(draw):
    """A batch of one Crop or Jitter."""
    return default_collate([draw])

# ==== Targets =====================================================================================
@pytest.mark.parametrize("flip1, flip2, own, first", [
    (False, False, 0.25 - 0.7, 0.25 - 0.7), (True, False, 0.75 - 0.7, 0.75 - 0.3),
    (False, True, 0.25 - 0.3, 0.25 - 0.7), (True, True, 0.75 - 0.3, 0.75 - 0.3)])
def test_the_crop_target_of_two_known_boxes(flip1, flip2, own, first):
    """Centers (.3, .25) and (.6, .7), sizes (.4, .3) and (.2, .6); a flip mirrors center x."""
    a = one(Crop(0.1, 0.1, 0.4, 0.3, flip1))
    b = one(Crop(0.5, 0.4, 0.2, 0.6, flip2))
    close(augself.crops(a, b), torch.tensor([[0.3 - 0.6, own, 0.2, -0.3]]))
    close(augself.crops(a, b, "first"), torch.tensor([[0.3 - 0.6, first, 0.2, -0.3]]))

def test_a_recorded_box_is_what_torchvision_cuts():
    """A box of whole pixels: resized_crop of (top, left, height, width), then hflip."""
    image = torch.randint(256, (3, 40, 20), generator=seeded(), dtype=torch.uint8)
    box = Crop(10 / 40, 4 / 20, 24 / 40, 12 / 20, flip=False)
    wanted = TF.resized_crop(image, 10, 4, 24, 12, [16, 16], antialias=True).float()
    assert (ser.cut(image, box, 16).float() - wanted).abs().max() <= 1     # of 255, by rounding
    flipped = ser.cut(image, box._replace(flip=True), 16)
    assert (flipped.float() - TF.hflip(wanted)).abs().max() <= 1

def test_the_crop_target_is_what_the_pixels_of_the_views_say():
    """Each pixel holds its own place, so that the mean of a view is the center of its box, and its
    spread the box's size; in the mirrored image center x is 1 minus that."""
    places = (torch.arange(200) + 0.5) / 200
    image = torch.zeros(3, 200, 200)
    image[0] = places[:, None]
    image[1] = places
    cfg = settings("augself")
    data = cfg.dataset(image[None])
    flips = set()
    for index in range(12):
        draws = data.draw(Key(0, index, index, False), image)
        measured = []
        for box, _ in draws:
            ys, xs, _ = ser.cut(image, box, 64)
            height = ys[-1, 0] - ys[0, 0]
            width = xs[0, -1] - xs[0, 0]
            x = xs.mean()
            if width < 0:     # mirrored
                x = 1 - x
            measured.append(torch.stack([ys.mean(), x, height, width.abs()]))
            flips.add(bool(width < 0))
        (first, _), (second, _) = draws
        target = augself.crops(one(first), one(second))
        close(target[0], measured[0] - measured[1], 0.02)
    assert flips == {False, True}

def test_the_color_target_is_the_factors_place_in_its_range():
    """(factor - 1) / width of the range, hue / width, of the factor that the pixels show."""
    a = one(Jitter(brightness=0.7, contrast=1.4, saturation=0.9, hue=-0.05))
    plain = one(Jitter())
    close(augself.colors(a, plain), torch.tensor([[-0.375, 0.5, -0.25, -0.25]]))
    close(augself.colors(a, plain, 0.4), torch.tensor([[-0.375, 0.5, -0.125, -0.25]]))
    gray = torch.full((1, 3, 4, 4), 0.5)
    shown = ser.photometric(gray, one(Jitter(brightness=0.7))) * ser.STD + ser.MEAN
    factor = shown.mean() / 0.5
    close((factor - 1) / 0.8, torch.tensor(-0.375), 1e-4)

@pytest.mark.parametrize("strength", [0.2, 0.4])
def test_the_color_target_is_a_difference_of_uniform_draws(strength):
    """In [-1/2, 1/2] for one view, 0 in the fifth of the views that T does not jitter."""
    data = settings("augself", saturation=strength).dataset(torch.zeros(1, 3, 8, 8))
    image = torch.zeros(3, 8, 8)
    found = []
    for index in range(400):
        for _, jitter in data.draw(Key(0, index, index, False), image):
            found.append(jitter)
    w = augself.colors(default_collate(found), one(Jitter()), strength)
    assert (w.abs() <= 0.5).all()
    assert (w.abs().amax(0) > 0.48).all()
    assert abs((w == 0).all(1).float().mean() - 0.2) < 0.05
    assert ((w.square().mean(0) / (0.8 / 12) - 1).abs() < 0.13).all()     # four deviations

def test_swapped_views_negate_all_targets_and_equal_views_give_zero():
    cfg, model = toy("augself")
    first, second = drawn(cfg).views
    for task in ("crop", "color"):
        forth = model.target(task, first, second)
        assert forth.shape == (8, 4) and forth.abs().sum() > 0
        assert torch.equal(model.target(task, second, first), -forth)
        assert model.target(task, first, first).abs().sum() == 0

# ==== Loss ========================================================================================
def test_a_head_that_says_0_has_the_loss_of_chance():
    """.5 * (mean of squared crop targets + that of color), the weight of each task on top."""
    cfg, model = toy("augself")
    for head in model.heads.values():
        head[-1].weight.data.zero_()
        head[-1].bias.data.zero_()
    batch = drawn(cfg)
    losses = model(batch)
    expected = 0.0
    for task in ("crop", "color"):
        expected = expected + model.target(task, *batch.views).square().mean()
    close(losses["equiv"], expected)
    close(losses["loss"] - losses["inv"], 0.5 * expected)
    close(losses["equiv_chance"], expected)

def test_the_loss_is_the_mean_over_both_orders_of_the_views():
    """Slow: image by image, [f_1 | f_2] against (1, 2) and [f_2 | f_1] against (2, 1)."""
    cfg, model = toy("augself")
    model.eval()     # so that a row can be told alone
    views = drawn(cfg).views
    features = torch.randn(2, 8, 16, generator=seeded(1))
    total = 0.0
    for task, i, (a, b) in itertools.product(("crop", "color"), range(8), ((0, 1), (1, 0))):
        said = model.heads[task](torch.cat([features[a, i], features[b, i]])[None])[0].tanh()
        target = model.target(task, views[a], views[b])[i]
        total = total + (said - target).square().sum() / 4 / 16
    close(model.equivariance_loss([*features], views)[0], total)

def test_a_head_is_three_layers_of_512():
    head = augself.build(settings("augself")).heads["crop"]
    kinds = [type(layer).__name__ for layer in head]
    assert kinds == ["Linear", "BatchNorm1d", "ReLU"] * 2 + ["Linear"]
    shapes = [tuple(head[i].weight.shape) for i in (0, 3, 6)]
    assert shapes == [(512, 32), (512, 512), (4, 512)]
    assert head[0].bias is None
    assert head[3].bias is None
    assert head[6].bias is not None

# ==== The rotation variant ========================================================================
def test_rotation_turns_the_views_and_predicts_the_difference():
    """Counter-clockwise; both the base method and the head see the turned views."""
    cfg, model = toy("augself", tasks=("rotation",))
    batch = drawn(cfg)
    seen = []
    model.base.encoder.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0]))
    keys = []
    model.base.momentum_encoder.register_forward_pre_hook(lambda _, inputs: keys.extend(inputs[0]))
    torch.manual_seed(0)
    model(batch)
    torch.manual_seed(0)
    views = model.views(batch)
    for turned, view, x, key in zip(views, batch.views, seen, keys):
        assert torch.equal(x, turned.images[0]) and torch.equal(key, x)
        for image, base, k in zip(x, view.images[0], turned.geometry.turns):
            assert torch.equal(image, torch.rot90(base, int(k), (1, 2)))
    k1 = views[0].geometry.turns
    k2 = views[1].geometry.turns
    target = model.target("rotation", *views)
    for a, b, k in zip(k1, k2, target):     # k turns more take view 2 to the turns of view 1
        assert (int(b) + int(k)) % 4 == int(a)
    assert len(k1.unique()) > 1 and not torch.equal(k1, k2)

def test_rotations_chance_is_that_of_its_draws():
    """k is 0 with probability 1/2 + 1/8, and 1, 2, 3 with 1/8 each."""
    p = [5 / 8, 1 / 8, 1 / 8, 1 / 8]
    difference = [0.0, 0.0, 0.0, 0.0]
    for a, b in itertools.product(range(4), range(4)):
        difference[(a - b) % 4] += p[a] * p[b]
    assert augself.ROTATION_TOP1_CHANCE == pytest.approx(difference[0])
    entropy = -sum(q * math.log(q) for q in difference)
    assert augself.ROTATION_CHANCE == pytest.approx(entropy)
    torch.manual_seed(0)
    view = ser.View([torch.zeros(4000, 3, 4, 4)], None, None, None)
    found = torch.bincount(augself.turn(view).geometry.turns, minlength=4) / 4000
    assert ((found - torch.tensor(p)).abs() < 0.02).all()     # four deviations

def test_rotations_loss_is_cross_entropy_over_both_orders():
    cfg, model = toy("augself", tasks=("rotation",))
    model.eval()
    torch.manual_seed(5)
    views = model.views(drawn(cfg))
    f1, f2 = torch.randn(2, 8, 16, generator=seeded(1))
    forth = model.heads["rotation"](torch.cat([f1, f2], 1))
    back = model.heads["rotation"](torch.cat([f2, f1], 1))
    k = views[0].geometry.turns - views[1].geometry.turns
    wanted = (F.cross_entropy(forth, k % 4) + F.cross_entropy(back, -k % 4)) / 2
    loss, found = model.equivariance_loss([f1, f2], views)
    close(loss, wanted)
    right = torch.cat([forth.argmax(1) == k % 4, back.argmax(1) == -k % 4]).float().mean()
    close(found["rotation_top1"], right)
