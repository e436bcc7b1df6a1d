"""EquiMod: the parameters of an augmentation, the plain view, the loss."""
import torch
from torch.utils.data import default_collate

import ser
from paper.methods import equimod
from paper.tests.test_methods import (
    check_gradients, settings, slow_info_nce, slow_layers, toy, toy_views)
from ser import Augmentation, View
from test_ser import close, noise, pixels, same, seeded


def parameters(rows, order):
    """Those of a view with these augmentations, as they are before they are standardised."""
    view = View(torch.empty(0), None, None, default_collate(rows), torch.tensor(order))
    return equimod.parameters(view) * equimod.STD + equimod.MEAN


def test_the_parameters_of_known_augmentations():
    """In the order of the list; the order of the view is that of its jittered images alone."""
    made = Augmentation(0.1, 0.2, 0.3, 0.4, True, 0.7, 1.2, 0.9, -0.05, True, 1.5, True)
    found = parameters([made, Augmentation()], [2, 0, 3, 1])
    wanted = torch.tensor([
        [0.1, 0.2, 0.3, 0.4, 1, 1, 2, 0, 3, 1, 0.7, 1.2, 0.9, -0.05, 1, 1, 1.5, 1],
        [0.0, 0.0, 1.0, 1.0, 0, 0, 0, 1, 2, 3, 1.0, 1.0, 1.0, 0.0, 0, 0, 0, 0]])
    close(found, wanted)


def test_mean_and_deviation_of_the_parameters_are_those_under_moco_v3s_t():
    """Both views together, on images of 500 x 375 (without pixels)."""
    image = torch.empty(3, 375, 500, device="meta")
    data = ser.two_views([image] * 1200, equimod.settings(["--data", "x"]))
    generator = seeded(5)
    found = []
    for i in range(1200):     # with orders of their own, as make_views gives to each batch
        for _, aug in data[0, i, False]:
            order = torch.randperm(4, generator=generator).tolist()
            found.append(parameters([aug], order))
    p = (torch.cat(found) - equimod.MEAN) / equimod.STD
    close({"mean": p.mean(0)}, {"mean": torch.zeros(18)}, 0.08)
    close({"deviation": p.std(0)}, {"deviation": torch.ones(18)}, 0.07)


def test_the_third_view_is_the_plain_center_and_the_others_are_those_of_t():
    """256 pixels of the shorter side, of which 224 are cut out; new crops in every epoch."""
    args = settings("equimod", "--image-size 28")
    image = pixels(3, 32, 50)
    data = equimod.dataset(image[None], args)
    crops = set()
    for epoch in (0, 1):
        *two, (plain, record) = data[epoch, 0, False]
        assert torch.equal(plain, image[:, 2:30, 11:39])
        assert record == Augmentation()
        assert same(two, ser.two_views(image[None], args)[epoch, 0, False])
        crops.add(two[0][1])
    assert len(crops) == 2


def test_the_loss_equals_a_slow_loop():
    """y finds its yhat among all 2B, and back; the mean of both. No gradient is stopped."""
    args, model = toy("equimod", "--temperature 0.3")
    views = toy_views("equimod", args)
    heads = model.heads
    f = list(noise(3, 12, 16).requires_grad_())     # of views 1, 2, plain
    words = "linear batchnorm relu linear batchnorm relu linear standardise"
    y1, y2, y0 = [slow_layers(heads["project"], words, x) for x in f]

    values = torch.cat([equimod.parameters(view) for view in views[:2]])
    p = slow_layers(heads["action"], "linear batchnorm", values)
    pairs = []
    for i in range(24):
        pairs.append(torch.cat([y0[i % 12], p[i]]))
    yhat = slow_layers(heads["predict"], "linear standardise", torch.stack(pairs))

    y = torch.cat([y1, y2])
    forth = slow_info_nce(y, yhat, 0.3)
    back = slow_info_nce(yhat, y, 0.3)
    check_gradients(model.equivariance_loss(f, views), (forth + back) / 2, f)
