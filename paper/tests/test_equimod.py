"""EquiMod: the parameters of an augmentation, the plain view, the loss."""
import torch
from torch.utils.data import default_collate

import ser
from paper.methods import equimod
from paper.tests.test_addon import check_gradients, slow_info_nce, slow_norm, toy, views_of
from ser import Augmentation, View
from test_ser import close, same, seeded


def view_of(rows, order):
    return View(torch.empty(0), None, None, default_collate(rows), torch.tensor(order))


def test_the_parameters_of_known_augmentations():
    """In the order of the list; the order of the view is that of its jittered images alone."""
    made = Augmentation(0.1, 0.2, 0.3, 0.4, True, 0.7, 1.2, 0.9, -0.05, True, 1.5, True)
    p = equimod.parameters(view_of([made, Augmentation()], [2, 0, 3, 1]))
    wanted = [[0.1, 0.2, 0.3, 0.4, 1, 1, 2, 0, 3, 1, 0.7, 1.2, 0.9, -0.05, 1, 1, 1.5, 1],
              [0.0, 0.0, 1.0, 1.0, 0, 0, 0, 1, 2, 3, 1.0, 1.0, 1.0, 0.0, 0, 0, 0, 0]]
    close(p * equimod.STD + equimod.MEAN, torch.tensor(wanted))


def test_the_parameters_are_standardised_under_moco_v3s_t():
    """Mean 0 and deviation 1, both views together, on images of 500 x 375 (without pixels)."""
    image = torch.empty(3, 375, 500, device="meta")
    data = ser.two_views([image] * 1200, equimod.settings(["--data", "x"]))
    generator = seeded(5)
    found = []
    for i in range(1200):     # with orders of their own, as make_views gives to each batch
        for _, aug in data[0, i, False]:
            order = torch.randperm(4, generator=generator).tolist()
            found.append(equimod.parameters(view_of([aug], order)))
    p = torch.cat(found)
    close({"mean": p.mean(0)}, {"mean": torch.zeros(18)}, 0.08)
    close({"deviation": p.std(0)}, {"deviation": torch.ones(18)}, 0.07)


def test_the_third_view_is_the_plain_center_and_the_others_are_those_of_t():
    """256 pixels of the shorter side, of which 224 are cut out; new crops in every epoch."""
    args, _ = toy("equimod", "--image-size 28")
    image = torch.randint(256, (3, 32, 50), generator=seeded(), dtype=torch.uint8)
    data = equimod.dataset(image[None], args)
    for key in ((0, 0, False), (1, 0, False)):
        *two, (pixels, record) = data[key]
        assert torch.equal(pixels, image[:, 2:30, 11:39])
        assert record == Augmentation()
        assert same(two, ser.two_views(image[None], args)[key])
    assert data[0, 0, False][0][1] != data[1, 0, False][0][1]


def test_the_loss_equals_a_slow_loop():
    """y finds its yhat among all 2B, and back; the mean of both. No gradient is stopped."""
    args, model = toy("equimod", "--temperature 0.3")
    views = views_of("equimod", args)
    f = [torch.randn(12, 16, requires_grad=True) for view in views]     # views 1, 2, plain
    linear1, norm1, _, linear2, norm2, _, linear3, _ = model.heads["project"]

    def project(x):
        x = slow_norm(x @ linear1.weight.T, norm1).clamp(min=0)
        x = slow_norm(x @ linear2.weight.T, norm2).clamp(min=0)
        return slow_norm(x @ linear3.weight.T)

    y1, y2, y0 = [project(x) for x in f]
    values = torch.cat([equimod.parameters(view) for view in views[:2]])
    action, norm = model.heads["action"]
    p = slow_norm(values @ action.weight.T, norm)
    predict, _ = model.heads["predict"]
    pairs = [torch.cat([y0[i % 12], p[i]]) for i in range(24)]
    yhat = slow_norm(torch.stack(pairs) @ predict.weight.T)
    y = torch.cat([y1, y2])
    wanted = (slow_info_nce(y, yhat, 0.3) + slow_info_nce(yhat, y, 0.3)) / 2
    check_gradients(model.equivariance_loss(f, views), wanted, f)
