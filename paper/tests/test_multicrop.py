import ser
from paper.tests.test_methods import check_gradients, toy_on_views
from test_ser import close, slow_info_nce


def test_l_inv_sums_the_ten_pairs_and_l_equiv_the_global_and_the_two_local_pairs():
    model, views = toy_on_views("multicrop", "--weight 0.7")
    base = model.base
    assert base.projector[0].out_features == 32
    assert all(max(view.geometry.grid) <= 3 for view in views[2:])     # of 2 x 2, scaled
    cls, maps = zip(*[ser.encode_view(base.encoder, view, [1]) for view in views])
    queries = [base.predictor(base.projector(x)) for x in cls]
    key1, key2 = [base.key(view) for view in views[:2]]
    pairs = [(0, key2), (1, key1), *[(i, key) for i in range(2, 6) for key in (key1, key2)]]
    inv = sum(slow_info_nce(queries[i], key, 0.2) for i, key in pairs)

    equiv = sum(model.equiv_of_views(*views[i:i + 2], *maps[i:i + 2]) for i in (0, 2, 4))
    loss = inv + 0.7 * equiv
    close(model(views), {"loss": loss, "inv": inv.detach(), "equiv": equiv.detach()})
    check_gradients(base(views, cls), inv, cls)
    check_gradients(model(views)["loss"], loss, [base.encoder.pos_embed])
