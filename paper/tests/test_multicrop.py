import ser
from paper.tests.test_methods import check_gradients, toy_on_views
from test_ser import close, slow_info_nce


def test_l_inv_sums_the_ten_pairs_and_l_equiv_the_global_and_the_two_local_pairs():
    model, views = toy_on_views("multicrop", "--weight 0.7")
    base = model.base
    assert base.projector[0].out_features == 32
    assert all(max(view.geometry.grid) <= 3 for view in views[2:])     # of 2 x 2, scaled
    cls = [ser.encode_view(base.encoder, view)[0] for view in views]
    queries = [base.predictor(base.projector(x)) for x in cls]
    key1, key2 = [base.key(view) for view in views[:2]]
    pairs = [(0, key2), (1, key1), *[(i, key) for i in range(2, 6) for key in (key1, key2)]]
    inv = sum(slow_info_nce(queries[i], key, 0.2) for i, key in pairs)

    plain = ser.SER(base, [1], temperature=model.temperature)
    plain.projectors = model.projectors
    equiv = sum(plain(views[start:start + 2])["equiv"] for start in (0, 2, 4))
    close(model(views), {"loss": inv + 0.7 * equiv, "inv": inv.detach(), "equiv": equiv})
    check_gradients(base(views, cls), inv, cls)
