import torch
from torch.utils.data import default_collate

from paper.methods import augself
from paper.tests.test_methods import check_gradients, random_features, toy_on_views
from ser import Augmentation
from test_ser import close


def test_the_targets_of_two_known_augmentations():
    """Both x are mirrored where a, which is flipped, comes first: .75 - .3, and .7 - .25."""
    one = Augmentation(0.1, 0.1, 0.4, 0.3, True, 0.7, 1.4, 0.9, -0.05)
    two = Augmentation(0.5, 0.4, 0.2, 0.6)
    a, b = map(default_collate, ([one, two, one], [two, one, two._replace(flip=True)]))
    box, back = [-0.3, 0.45, 0.2, -0.3], [0.3, 0.45, -0.2, 0.3]
    close(augself.crop_difference(a, b), torch.tensor([box, back, box]))
    close(augself.color_difference(a, b)[0], torch.tensor([-0.375, 0.5, -0.25, -0.25]))


def test_the_loss_is_the_mean_over_both_orders_of_the_views():
    model, views = toy_on_views("augself")
    first, second = [view.augmentation for view in views]
    f1, f2 = random_features(2)
    both_orders = torch.cat([torch.cat([f1, f2]), torch.cat([f2, f1])], dim=1)
    total = 0.0
    with torch.autocast("cpu", torch.bfloat16):     # in which the heads are, but not the loss
        for task in ("crop", "color"):
            difference = getattr(augself, f"{task}_difference")
            targets = torch.cat([difference(first, second), difference(second, first)])
            predicted = model.heads[task](both_orders).float().tanh()
            total = total + torch.nn.functional.mse_loss(predicted, targets)
        found = model.equivariance_loss([f1, f2], views)
    check_gradients(found, total, [f1, f2])
