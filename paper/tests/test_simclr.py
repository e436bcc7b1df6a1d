from paper.tests.test_methods import both_ways, check_gradients, layers, random_features, toy


def test_the_loss_finds_each_view_among_the_other_views_of_all_images():
    base = toy("simclr").base
    cls = random_features(2)
    assert layers(base.head) == "Linear:1 BatchNorm1d:2 ReLU:0 Linear:1 BatchNorm1d:0"
    assert (base.head[0].out_features, base.head[3].out_features) == (256, 64)
    check_gradients(base([], cls), both_ways(*map(base.head, cls), 0.1), cls)
