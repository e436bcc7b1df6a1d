"""E-SSL: the four turns of a small crop and their labels."""
import torch
import torch.nn.functional as F

import ser
from paper.methods import essl
from paper.tests.test_addon import check_gradients, toy
from test_ser import sentence


def test_label_k_means_k_counter_clockwise_quarter_turns():
    """The literal 2 x 2 matrices, in the order of the labels, after views 1 and 2."""
    small = ser.View(torch.tensor([[1., 2], [3, 4]])[None, None], None, None, None)
    _, _, crops = essl.turned([None, None, small])
    assert crops.b1[:, 0].tolist() == [
        [[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


def test_the_third_view_is_a_small_crop_with_moco_v3s_jitter():
    """--local-size and --local-area are its own; T of views 1 and 2 stays."""
    flags = ["--data", "x", "--local-size", "64", "--local-area", "0.2", "0.3"]
    args = essl.settings(flags)
    small = ser.ViewSettings(64, [0.2, 0.3], blur=0.1, solarize=0.0)
    wanted = [*ser.two_views([], args).view_settings, small]
    assert essl.dataset([], args).view_settings == wanted
    assert "--local-size 9: " in sentence(essl.settings, ["--local-size", "9"])


def test_the_loss_is_cross_entropy_of_the_turn_of_every_crop():
    """Crop by crop and turn by turn, with the layers written out."""
    _, model = toy("essl")
    crops = torch.randn(48, 16, requires_grad=True)
    head = model.heads["turns"]
    assert [head[i].out_features for i in (0, 3, 6, 8)] == [16, 16, 256, 4]
    total = 0.0
    for row, x in enumerate(crops):
        for i in (0, 3, 6):
            norm = head[i + 1]
            x = head[i].weight @ x + head[i].bias
            x = F.layer_norm(x, x.shape, norm.weight, norm.bias, 1e-5)
            x = x.clamp(min=0) if i < 6 else x
        said = head[8].weight @ x + head[8].bias
        total = total - said.log_softmax(0)[row // 12] / 48
    check_gradients(model.equivariance_loss([None, None, crops], []), total, [crops])
