import ser
from paper.methods import turned
from test_ser import equal, pixels, same


def test_views_of_b1_are_those_of_ser_and_turned_and_those_of_b2_are_not():
    images = pixels(100, 3, 32, 32)
    turns = []
    for flag, epoch in (("--seed=0", 3), ("--seed=0", 4), ("--seed=1", 3)):
        plain = ser.two_view_dataset(images, turned.settings([flag]))
        data = turned.dataset(images, turned.settings([flag]))
        for item in [(epoch, index, False) for index in range(100)]:
            for (x, aug), (y, own) in zip(plain[item], data[item]):
                assert aug == own
                turns.append([equal(x.rot90(t, (1, 2)), y) for t in range(4)].index(True))
            assert same(plain[(*item[:2], True)], data[(*item[:2], True)])     # of b2
    assert all(125 < turns.count(t) < 175 for t in range(4)) and turns[::2] != turns[1::2]
    assert turns[:200] not in (turns[200:400], turns[400:])     # of other epochs and seeds
