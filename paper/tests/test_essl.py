import torch

import ser
from paper.methods import essl
from paper.tests.test_methods import check_gradients, layers, toy
from test_ser import noise


def test_label_k_means_k_counter_clockwise_quarter_turns():
    small = ser.View(torch.tensor([[[[1, 2], [3, 4]]]]), None, None, None)
    _, _, crops = essl.turned([None, None, small])
    assert crops.b1[:, 0].tolist() == [
        [[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]


def test_the_loss_is_cross_entropy_of_the_turn_of_every_crop():
    model = toy("essl")
    head = model.heads["turns"]
    assert layers(head) == "Linear:2 LayerNorm:2 ReLU:0 " * 2 + "Linear:2 LayerNorm:2 Linear:2"
    crops = noise(48, 16).requires_grad_()
    wanted = torch.nn.functional.cross_entropy(head(crops), torch.arange(48) // 12)
    check_gradients(model.equivariance_loss([None, None, crops], []), wanted, [crops])
