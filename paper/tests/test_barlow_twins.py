import torch
from pytest import approx

from paper.methods import barlow_twins
from paper.tests.test_methods import check_gradients, layers, random_features, settings, toy
from test_ser import close


def slow_loss(z1, z2, w):
    """Zbontar et al., Eq. 1 and 2, divided by K: the identity minus C, squared and weighted."""
    images, features = z1.shape
    identity = torch.eye(features)
    gap = identity - z1.T @ z2 / images
    return ((identity + w * (1 - identity)) * gap.square()).sum() / features


def test_the_loss_is_the_papers_on_standardised_features():
    model = toy("barlow_twins", "--off-diagonal 0.3")
    projector = model.base.projector
    assert [linear.out_features for linear in projector[::3]] == [24, 24, 24]
    cls = random_features(2)
    assert layers(projector) == "Linear:1 BatchNorm1d:2 ReLU:0 " * 2 + "Linear:1 BatchNorm1d:0"
    check_gradients(model.base([], cls), slow_loss(*map(projector, cls), 0.3), cls)

    with torch.autocast("cpu", torch.bfloat16):
        found = model.base([], cls)
        z1, z2 = [projector(x).float() for x in cls]
    close({"bf16": found}, {"bf16": slow_loss(z1, z2, 0.3)})


def test_the_rate_ends_at_a_thousandth_of_its_peak_and_weights_decay():
    args = barlow_twins.settings(["--data", "some"])
    optimizer = barlow_twins.optimizer(torch.nn.Linear(2, 1), args)
    barlow_twins.schedule(optimizer, args, 32.5)     # a quarter of the way from 8e-4 to 8e-7
    group, = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == approx((6.829598e-4, 0.1))


def test_the_gradient_of_k_l_inv_is_clipped_for_each_parameter():
    model = torch.nn.Linear(2, 1)
    optimizer = barlow_twins.optimizer(model, settings("barlow_twins"))
    model.weight.grad = torch.tensor([[3.0, 4.0]]) / 24
    model.bias.grad = torch.tensor([0.1]) / 24
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg"][0].tolist() == approx([0.018, 0.024], rel=1e-4)
    assert optimizer.state[model.bias]["exp_avg"].item() == approx(0.01)     # a tenth of .1
