"""Every claim of paper/methods/multicrop.py."""
import torch

import ser
from paper.methods import multicrop
from paper.tests.test_methods import slow_info_nce, toy, toy_views
from test_ser import close, noise, sentence


def test_the_views_are_two_global_and_four_local_crops():
    args = multicrop.settings("--local-size 64 --local-area 0.1 0.3".split())
    local = ser.ViewSettings(64, [0.1, 0.3], p_blur=0.5, p_solarize=0.0)
    wanted = [*ser.two_views([], args).view_settings, local, local, local, local]
    assert list(multicrop.six_views([], args).view_settings) == wanted
    assert "--local-size 9: " in sentence(multicrop.settings, ["--local-size", "9"])


def test_l_inv_is_the_sum_of_infonce_over_the_ten_pairs():
    args, model = toy("multicrop")
    views = toy_views("multicrop", args)
    base = model.base
    assert base.projector[0].out_features == 32
    cls = noise(6, 12, 16)
    queries = [base.predictor(base.projector(x)) for x in cls]
    key1, key2 = [base.key(view) for view in views[:2]]
    wanted = slow_info_nce(queries[0], key2, 0.2) + slow_info_nce(queries[1], key1, 0.2)
    for local in queries[2:]:
        wanted = wanted + slow_info_nce(local, key1, 0.2) + slow_info_nce(local, key2, 0.2)
    close({"loss": base(views, cls)}, {"loss": wanted})


def test_l_equiv_is_added_over_the_global_pair_and_the_two_local_pairs():
    args, model = toy("multicrop", "--weight 0.7")
    views = toy_views("multicrop", args)
    assert all(max(view.geometry.grid) <= 3 for view in views[2:])     # of 2 x 2, scaled
    plain = ser.SER(model.base, [1], temperature=model.temperature)
    plain.projectors = model.projectors
    equiv = 0.0
    for start in (0, 2, 4):
        equiv = equiv + plain(views[start:start + 2])["equiv"]
    cls = [ser.encode_view(model.base.encoder, view)[0] for view in views]
    inv = model.base(views, cls)

    loss = inv + 0.7 * equiv
    close(model(views), {"loss": loss, "inv": inv.detach(), "equiv": equiv})
