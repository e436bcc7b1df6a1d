"""E-SSL: the four turns of a small crop and their labels."""
import pytest
import torch
from torch.testing import assert_close

import ser
from paper.methods import essl
from paper.tests.test_addon import toy

def test_label_k_means_k_counter_clockwise_quarter_turns():
    """The literal 2 x 2 matrices, in the order of the labels, after views 1 and 2; the crop."""
    small = ser.View(torch.tensor([[1., 2], [3, 4]])[None, None], None, None, None)
    _, _, crops = essl.turned([None, None, small])
    assert crops.b1[:, 0].tolist() == [
        [[1, 2], [3, 4]], [[2, 4], [1, 3]], [[4, 3], [2, 1]], [[3, 1], [4, 2]]]
    views = essl.dataset([], essl.settings(["--data", "x"])).view_settings
    assert views[2:] == [ser.ViewSettings(96, [0.05, 0.14], blur=0.1, solarize=0.0)]
    with pytest.raises(SystemExit, match="--local-size 9: "):
        essl.settings(["--local-size", "9"])

def test_the_loss_is_cross_entropy_of_the_turn_of_every_crop():
    """Crop by crop and turn by turn; views 1 and 2 play no part."""
    _, model = toy("essl")
    two, crops = torch.randn(2, 8, 16), torch.randn(4, 8, 16)
    total = 0.0
    for k in range(4):
        for i in range(8):
            said = model.heads["turns"](crops[k, i])
            total = total - said.log_softmax(0)[k] / 32
    assert_close(model.equivariance_loss([*two, crops.flatten(0, 1)], []), total)
