import torch
from torch.utils.data import default_collate

import ser
from paper.methods import equimod
from paper.tests.test_methods import both_ways, check_gradients, layers, random_features
from paper.tests.test_methods import settings, toy_on_views
from test_ser import close, pixels, same, seeded


def test_the_parameters_of_known_augmentations():
    """In the order of the list; the order of the view is that of its jittered images alone."""
    box = 0.1, 0.2, 0.3, 0.4, True
    factors = 0.7, 1.2, 0.9, -0.05
    jittered = ser.Augmentation(*box, *factors, True, 1.5, True)
    records = default_collate([jittered, ser.Augmentation()])
    view = ser.View(torch.empty(2, 3, 1, 112), None, None, records, torch.tensor([2, 0, 3, 1]))
    first, second = equimod.parameters(view) * equimod.STD + equimod.MEAN

    close(first, torch.tensor([*box, 1, 2, 0, 3, 1, *factors, 1, 1, 3, 1]))     # 3 of 224 pixels
    close(second, torch.tensor([0.0, 0, 1, 1, 0, 0, 0, 1, 2, 3, 1, 1, 1, 0, 0, 0, 0, 0]))


def test_mean_and_deviation_of_the_parameters_are_those_under_moco_v3s_t():
    image = torch.empty(3, 375, 500, device="meta")
    data = ser.two_view_dataset([image] * 1200, equimod.settings(["--data", "x"]))
    drawn = [data[0, index, False] for index in range(1200)]
    order = torch.rand(1200, 4, generator=seeded(5)).argsort(1)     # of each image
    views = [ser.View(b1, None, None, records, order) for b1, records in default_collate(drawn)]
    found = torch.cat([equimod.parameters(view) for view in views])
    std, mean = torch.std_mean(found, dim=0)
    close(mean, torch.zeros(18), 0.08)
    close(std, torch.ones(18), 0.07)


def test_the_third_view_is_the_plain_center_and_the_others_are_those_of_t():
    args = settings("equimod", "--image-size 20")
    key = 1, 0, False
    high = pixels(3, 50, 32)
    centre = high[:, 11:39, 2:30]
    for image, wanted in ((high, centre), (high.mT, centre.mT)):
        *two, third = equimod.dataset(image[None], args)[key]
        assert same(third, (ser.resize(wanted[None], (20, 20))[0], ser.Augmentation()))
        assert same(two, ser.two_view_dataset(image[None], args)[key])


def test_each_view_finds_its_prediction_among_all_and_back():
    model, views = toy_on_views("equimod", "--temperature 0.05")
    heads = model.heads
    f = random_features(3)     # of views 1, 2, plain
    assert layers(heads["project"]) == layers(model.base.projector)
    assert layers(heads["predict"]) == "Linear:1 BatchNorm1d:0"
    assert layers(heads["action"]) == "Linear:1 BatchNorm1d:2"

    y1, y2, y0 = [heads["project"](x) for x in f]
    first, second, _ = map(equimod.parameters, views)
    p = heads["action"](torch.cat([first, second]))
    yhat = heads["predict"](torch.cat([y0.repeat(2, 1), p], dim=1))
    wanted = both_ways(torch.cat([y1, y2]), yhat, 0.05) / 2
    check_gradients(model.equivariance_loss(f, views), wanted, f)
