from paper.tests.test_methods import both_ways, check_gradients, layers, random_features, toy


def test_the_loss_finds_each_view_among_the_other_views_of_all_images():
    base = toy("simclr").base
    cls = random_features(2)
    assert layers(base.head) == "Linear:1 BatchNorm1d:2 ReLU:0 Linear:1 BatchNorm1d:0"
    assert (base.head[0].out_features, base.head[3].out_features) == (256, 64)
    z1, z2 = [base.head(x) for x in cls]
    check_gradients(base([], cls), both_ways(z1, z2, 0.1), cls)
