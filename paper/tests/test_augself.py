"""AugSelf: what it predicts, in closed form, and its loss."""
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import default_collate

from paper.methods import augself
from paper.tests.test_addon import views_of, toy
from ser import Augmentation

@pytest.mark.parametrize("flip1, flip2, forth, back", [
    (False, False, -0.45, 0.45), (True, False, 0.45, 0.45),
    (False, True, -0.45, -0.45), (True, True, 0.45, -0.45)])
def test_the_targets_of_two_known_augmentations(flip1, flip2, forth, back):
    """Of two boxes and factors; the flip of the view that comes first mirrors both x."""
    a = default_collate([Augmentation(0.1, 0.1, 0.4, 0.3, flip1, 0.7, 1.4, 0.9, -0.05)])
    b = default_collate([Augmentation(0.5, 0.4, 0.2, 0.6, flip2)])
    assert_close(augself.crop_difference(a, b), torch.tensor([[-0.3, forth, 0.2, -0.3]]))
    assert_close(augself.crop_difference(b, a), torch.tensor([[0.3, back, -0.2, 0.3]]))
    assert_close(augself.color_difference(a, b), torch.tensor([[-0.375, 0.5, -0.25, -0.25]]))

def test_the_loss_is_the_mean_over_both_orders_of_the_views():
    """Slow, image by image."""
    args, model = toy("augself")
    model.eval()     # so that a row can be told alone
    views = views_of("augself", args)
    f = torch.randn(2, 8, 16)
    total = 0.0
    for task in ("crop", "color"):
        difference = getattr(augself, f"{task}_difference")
        for a, b in ((0, 1), (1, 0)):
            target = difference(views[a].augmentation, views[b].augmentation)
            for i in range(8):
                pair = torch.cat([f[a, i], f[b, i]])
                said = model.heads[task](pair[None])[0].tanh()
                total = total + (said - target[i]).square().mean() / 16
    assert_close(model.equivariance_loss(f, views), total)
