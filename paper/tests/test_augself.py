"""AugSelf: what it predicts, in closed form, and its loss."""
import pytest
import torch
from torch.utils.data import default_collate

from paper.methods import augself
from paper.tests.test_addon import check_gradients, slow_mlp, toy, views_of
from ser import Augmentation
from test_ser import close


@pytest.mark.parametrize("flip1, flip2, forth, back", [
    (False, False, -0.45, 0.45), (True, False, 0.45, 0.45),
    (False, True, -0.45, -0.45), (True, True, 0.45, -0.45)])
def test_the_targets_of_two_known_augmentations(flip1, flip2, forth, back):
    """Of two boxes and factors; the flip of the view that comes first mirrors both x."""
    a = default_collate([Augmentation(0.1, 0.1, 0.4, 0.3, flip1, 0.7, 1.4, 0.9, -0.05)])
    b = default_collate([Augmentation(0.5, 0.4, 0.2, 0.6, flip2)])
    found = {"forth": augself.crop_difference(a, b), "back": augself.crop_difference(b, a),
             "color": augself.color_difference(a, b)}
    close(found, {"forth": torch.tensor([[-0.3, forth, 0.2, -0.3]]),
                  "back": torch.tensor([[0.3, back, -0.2, 0.3]]),
                  "color": torch.tensor([[-0.375, 0.5, -0.25, -0.25]])})


def test_the_loss_is_the_mean_over_both_orders_of_the_views():
    """Slow, image by image, with the layers written out. Both features carry gradient."""
    args, model = toy("augself")
    views = views_of("augself", args)
    f = [torch.randn(12, 16, requires_grad=True) for view in views]
    pairs = torch.cat([torch.cat([f[0], f[1]], dim=1), torch.cat([f[1], f[0]], dim=1)])
    total = 0.0
    for task in ("crop", "color"):
        head = model.heads[task]
        assert [layer.out_features for layer in head[::3]] == [512, 512, 4]
        said = slow_mlp(head, pairs).tanh()
        difference = getattr(augself, f"{task}_difference")
        for order, (a, b) in enumerate([(0, 1), (1, 0)]):
            target = difference(views[a].augmentation, views[b].augmentation)
            for i in range(12):
                total = total + (said[12 * order + i] - target[i]).square().mean() / 24
    check_gradients(model.equivariance_loss(f, views), total, f)
