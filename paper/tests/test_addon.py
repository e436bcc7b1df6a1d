"""What AugSelf, EquiMod, STL and E-SSL share, at toy size."""
import pytest
import torch.nn.functional as F

import ser
from paper.methods import essl
from paper.tests.test_methods import ADDONS, recipe, settings, toy, toy_views
from test_ser import close, sentence


@pytest.mark.parametrize("name", ADDONS)
@pytest.mark.parametrize("layer", [2, 4])
def test_the_loss_is_moco_v3s_plus_weight_times_the_methods_own(name, layer):
    args, model = toy(name, f"--weight 0.7 --layer {layer}")
    views = toy_views(name, args)
    losses = model(views)

    features = []
    for view in essl.turned(views) if name == "essl" else views:
        f, _, cls_at = model.base.encoder(view.b1, [2])
        if layer == 2:
            f = F.layer_norm(cls_at[2], (16,), model.norm.weight, model.norm.bias, 1e-6)
        features.append(f)
    inv = ser.SER(model.base, [])(views[:2])["loss"]
    equiv = model.equivariance_loss(features, views)
    close(losses, {"loss": inv + 0.7 * equiv, "inv": inv.detach(), "equiv": equiv.detach()})


@pytest.mark.parametrize("name", ADDONS)
def test_views_1_and_2_are_moco_v3s_but_for_blur_and_solarization(name):
    words = " --image-size 32 --crop-min 0.2 --blur 0.3 0.4 --solarize 0.5 0.6"
    first, second, *_ = recipe(name)[1]([], settings(name, words)).view_settings
    assert first == ser.ViewSettings(32, (0.2, 1.0), 0.3, 0.5)
    assert second == ser.ViewSettings(32, (0.2, 1.0), 0.4, 0.6)


@pytest.mark.parametrize("flags", ["--ratio 0.25", "--layer 5", "--layer 2 --cls-layer 2"])
def test_settings_without_l_eq_are_refused(flags):
    assert flags.startswith(sentence(toy, "augself", flags).split()[0])
