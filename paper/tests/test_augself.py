"""AugSelf: what it predicts, in closed form, and its loss."""
import pytest
import torch
from torch.utils.data import default_collate

from paper.methods import augself
from paper.tests.test_methods import check_gradients, slow_layers, toy, toy_views
from ser import Augmentation
from test_ser import close, noise


@pytest.mark.parametrize("flip1, flip2, forth, back", [
    (False, False, -0.45, 0.45),
    (True, False, 0.45, 0.45),
    (False, True, -0.45, -0.45),
    (True, True, 0.45, -0.45)])
def test_the_targets_of_two_known_augmentations(flip1, flip2, forth, back):
    """Of two boxes and factors; the flip of the view that comes first mirrors both x."""
    a = default_collate([Augmentation(0.1, 0.1, 0.4, 0.3, flip1, 0.7, 1.4, 0.9, -0.05)])
    b = default_collate([Augmentation(0.5, 0.4, 0.2, 0.6, flip2)])
    found = [
        augself.crop_difference(a, b),
        augself.crop_difference(b, a),
        augself.color_difference(a, b)]
    wanted = torch.tensor([
        [-0.3, forth, 0.2, -0.3],
        [0.3, back, -0.2, 0.3],
        [-0.375, 0.5, -0.25, -0.25]])
    close(torch.cat(found), wanted)


def test_the_loss_is_the_mean_over_both_orders_of_the_views():
    """Image by image, with the layers written out. Both features carry gradient."""
    args, model = toy("augself")
    views = toy_views("augself", args)
    f1, f2 = list(noise(2, 12, 16).requires_grad_())
    forth = torch.cat([f1, f2], dim=1)
    back = torch.cat([f2, f1], dim=1)
    t1, t2 = [view.augmentation for view in views]
    words = "linear batchnorm relu linear batchnorm relu biased"

    total = 0.0
    for task in ("crop", "color"):
        difference = getattr(augself, f"{task}_difference")
        targets = [*difference(t1, t2), *difference(t2, t1)]
        said = slow_layers(model.heads[task], words, torch.cat([forth, back])).tanh()
        for i in range(24):
            total = total + (said[i] - targets[i]).square().mean() / 24
    check_gradients(model.equivariance_loss([f1, f2], views), total, [f1, f2])
