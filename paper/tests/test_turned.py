import ser
from paper.methods import turned
from test_ser import equal, pixels


def test_views_of_b1_are_those_of_ser_and_turned_and_those_of_b2_are_not():
    args = turned.settings([])
    images = pixels(8, 3, 32, 32)
    plain = ser.two_view_dataset(images, args)
    data = turned.dataset(images, args)

    turns = []
    for item in [(epoch, index, False) for epoch in (3, 4) for index in range(8)]:
        for (x, aug), (y, own) in zip(plain[item], data[item]):
            assert aug == own
            turns.append([equal(x.rot90(t, (1, 2)), y) for t in range(4)].index(True))
        assert equal(plain[(*item[:2], True)][0][0], data[(*item[:2], True)][0][0])     # of b2
    assert set(turns) == {0, 1, 2, 3} and turns[::2] != turns[1::2] and turns[:16] != turns[16:]
