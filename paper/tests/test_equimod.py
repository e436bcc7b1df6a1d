"""EquiMod: the parameters of an augmentation, the plain view, the loss."""
import torch
from torch.testing import assert_close
from torch.utils.data import default_collate

import ser
from paper.methods import equimod
from paper.tests.test_addon import views_of, slow_info_nce, toy
from ser import Augmentation

def test_the_parameters_of_known_augmentations():
    """In the order of the list; the order of the view is that of its jittered images alone."""
    order = torch.tensor([2, 0, 3, 1])
    made = Augmentation(0.1, 0.2, 0.3, 0.4, True, 0.7, 1.2, 0.9, -0.05, order, True, 1.5, True)
    both = default_collate([made, Augmentation(order=order)])
    p = equimod.parameters(both)
    wanted = [[0.1, 0.2, 0.3, 0.4, 1, 1, 2, 0, 3, 1, 0.7, 1.2, 0.9, -0.05, 1, 1, 1.5, 1],
              [0.0, 0.0, 1.0, 1.0, 0, 0, 0, 1, 2, 3, 1.0, 1.0, 1.0, 0.0, 0, 0, 0, 0]]
    assert_close(p * equimod.STD + equimod.MEAN, torch.tensor(wanted))

def test_the_parameters_are_standardised_under_moco_v3s_t():
    """Mean 0 and deviation 1, both views together, on images of 500 x 375 (without pixels)."""
    image = torch.empty(3, 375, 500, device="meta")
    data = ser.two_views([image] * 1500, equimod.settings(["--data", "x"]))
    made = [one._replace(order=torch.randperm(4))     # as make_views does in a step
            for index in range(1500) for _, one in data[0, index, False]]
    p = equimod.parameters(default_collate(made))
    assert p.mean(0).abs().max() < 0.08
    assert (p.std(0) - 1).abs().max() < 0.07

def test_the_third_view_is_the_plain_center():
    """256 pixels of the shorter side, of which 224 are cut out."""
    args, _ = toy("equimod", "--image-size 28")
    image = torch.randint(256, (3, 32, 50), dtype=torch.uint8)
    pixels, record = equimod.dataset(image[None], args)[0, 0, False][2]
    assert torch.equal(pixels, image[:, 2:30, 11:39])
    assert str(record) == str(Augmentation())

def test_the_loss_equals_a_slow_loop():
    """y finds its yhat among all 2B, and back; the mean of both. No gradient is stopped."""
    args, model = toy("equimod", "--temperature 0.3")
    model.eval()     # so that a row can be told alone
    views = views_of("equimod", args)
    f = torch.randn(3, 8, 16, requires_grad=True)     # of views 1 and 2 and the plain image
    y1, y2, y0 = model.heads["project"](f.flatten(0, 1)).chunk(3)
    y = torch.cat([y1, y2])
    yhat = []
    for view in views[:2]:
        p = model.heads["action"](equimod.parameters(view.augmentation))
        for i in range(8):
            pair = torch.cat([y0[i], p[i]])
            yhat.append(model.heads["predict"](pair[None]))
    yhat = torch.cat(yhat)
    wanted = (slow_info_nce(y, yhat, 0.3) + slow_info_nce(yhat, y, 0.3)) / 2
    loss = model.equivariance_loss(f, views)
    assert_close(loss, wanted)
    assert_close(torch.autograd.grad(loss, f), torch.autograd.grad(wanted, f))
