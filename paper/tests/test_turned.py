"""Quarter turns in T."""
import runpy
import sys

import torch

import ser
from paper.methods import turned
from test_ser import pixels


def test_views_of_b1_are_those_of_ser_and_turned_and_those_of_b2_are_not():
    for args in (turned.settings(["--data", "D"]), turned.settings([])):
        assert (args.ratio, args.cls_layer, args.turns_in_t) == (0, 0, True)
    images = pixels(8, 3, 32, 32)
    plain = ser.two_views(images, args)
    data = turned.dataset(images, args)

    turns = []
    for index in range(8):
        for (x, aug), (y, own) in zip(plain[0, index, False], data[0, index, False]):
            assert aug == own
            turns.append([torch.equal(x.rot90(t, (1, 2)), y) for t in range(4)].index(True))
        assert torch.equal(plain[0, index, True][0][0], data[0, index, True][0][0])
    assert set(turns) == {0, 1, 2, 3} and turns[::2] != turns[1::2]


def test_the_command_trains_on_turned_views(monkeypatch):
    given = {}
    monkeypatch.setattr(sys, "argv", ["turned"])
    monkeypatch.setattr(ser, "train", lambda args, **others: given.update(others))
    runpy.run_path(turned.__file__, run_name="__main__")
    made = given["make_dataset"]([], turned.settings([]))
    assert type(made).__name__ == "Turned"
