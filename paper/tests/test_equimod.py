import torch
from torch.utils.data import default_collate

import ser
from paper.methods import equimod
from paper.tests.test_methods import check_gradients, layers, settings, toy_on_views
from test_ser import close, noise, pixels, same, seeded, slow_info_nce


def test_the_parameters_of_known_augmentations():
    """In the order of the list; the order of the view is that of its jittered images alone."""
    box = 0.1, 0.2, 0.3, 0.4, True
    factors = 0.7, 1.2, 0.9, -0.05
    made = ser.Augmentation(*box, *factors, True, 1.5, True)
    both = default_collate([made, ser.Augmentation()])
    view = ser.View(torch.empty(2, 3, 1, 112), None, None, both, torch.tensor([2, 0, 3, 1]))
    found = equimod.parameters(view) * equimod.STD + equimod.MEAN
    close(found, torch.tensor([
        [*box, 1, 2, 0, 3, 1, *factors, 1, 1, 3, 1],     # 1.5 pixels of 112 are 3 of 224
        [0, 0, 1, 1, 0, 0, 0, 1, 2, 3, 1, 1, 1, 0, 0, 0, 0, 0]]))


def test_mean_and_deviation_of_the_parameters_are_those_under_moco_v3s_t():
    image = torch.empty(3, 375, 500, device="meta")
    data = ser.two_view_dataset([image] * 1200, equimod.settings(["--data", "x"]))
    drawn = default_collate([data[0, i, False] for i in range(1200)])
    order = torch.rand(1200, 4, generator=seeded(5)).argsort(1)     # of each image
    views = [ser.View(pixels, None, None, aug, order) for pixels, aug in drawn]
    found = torch.cat([equimod.parameters(view) for view in views])
    std, mean = torch.std_mean(found, dim=0)
    close(mean, torch.zeros(18), 0.08)
    close(std, torch.ones(18), 0.07)


def test_the_third_view_is_the_plain_center_and_the_others_are_those_of_t():
    args = settings("equimod", "--image-size 28")
    key = 1, 0, False
    high = pixels(3, 50, 32)
    for image, centre in ((high, high[:, 11:39, 2:30]), (high.mT, high.mT[:, 2:30, 11:39])):
        *two, (plain, record) = equimod.dataset(image[None], args)[key]
        assert same(plain, centre)
        assert record == ser.Augmentation()
        assert same(two, ser.two_view_dataset(image[None], args)[key])


def test_each_view_finds_its_prediction_among_all_and_back():
    model, views = toy_on_views("equimod", "--temperature 0.3")
    heads = model.heads
    f = list(noise(3, 12, 16).requires_grad_())     # of views 1, 2, plain
    assert layers(heads["project"]) == layers(model.base.projector)
    assert layers(heads["predict"]) == "Linear:1 BatchNorm1d:0"

    y1, y2, y0 = [heads["project"](x) for x in f]

    p = heads["action"](torch.cat([equimod.parameters(view) for view in views[:2]]))
    yhat = heads["predict"](torch.cat([y0.repeat(2, 1), p], dim=1))
    y = torch.cat([y1, y2])
    both_ways = slow_info_nce(y, yhat, 0.3) + slow_info_nce(yhat, y, 0.3)
    check_gradients(model.equivariance_loss(f, views), both_ways / 2, f)
