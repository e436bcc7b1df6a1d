from functools import partial

import pytest
import torch

import eval_linear
import ser
from paper.evaluations import matching
from paper.tests.toys import call, class_folders, toy_checkpoint, values
from test_ser import close, sentence, write_image

SIZE, PATCH = 16, 4
AXIS = torch.linspace(0, 1, 2 * SIZE)
PHOTO = torch.stack([*torch.meshgrid(AXIS, AXIS, indexing="ij"), torch.ones(2 * SIZE, 2 * SIZE)])


def place(x):
    """Maps of unit tokens that are the nearer, the nearer their mean red and green are. Both are
    twice those of x, and those of images that were not halved first give no number."""
    red_and_green = torch.nn.functional.avg_pool2d(2 * x, PATCH)[:, :2] - 0.5
    third = (1 - red_and_green.square().sum(1, keepdim=True)).sqrt()
    return torch.cat([red_and_green, third], dim=1)


@pytest.mark.parametrize("name", list(matching.WARPS))
def test_a_patch_is_found_where_it_was_before_the_warp(name, monkeypatch):
    """The red of PHOTO is the row, and the green the column."""
    moved, places = matching.warped(PHOTO, matching.WARPS[name], SIZE)
    close(moved[:2], (places + SIZE / 2 - 0.5) / (2 * SIZE - 1))
    assert moved[2].min() > 0.99, "a corner came in"
    still = (torch.arange(SIZE) + 0.5).expand(SIZE, SIZE)
    assert (places - torch.stack([still.T, still])).abs().max() > 1

    monkeypatch.setattr(eval_linear, "recolour_and_normalise", lambda x, generator: x / 2)
    shares = []
    for shift in (0, 1, 2):
        f1 = lambda x: torch.stack([place(x)[0], place(x)[1].roll(shift, -1)])
        shares.append(matching.matched(f1, PHOTO[None], matching.WARPS[name], SIZE, PATCH, name))
    assert shares[0] == 100 > shares[1] and shares[2] == 0


def test_the_script_matches_recoloured_copies_after_a_block(tmp_path, monkeypatch):
    most = []
    monkeypatch.setattr(eval_linear, "spread", lambda data, n: most.append(n) or data)
    val = class_folders(tmp_path / ".data" / "val", per_class=1, size=40)
    write_image(ser.Path(val, "n00/.ipynb_checkpoints/0.png"), PHOTO)     # none of the photographs
    path = toy_checkpoint(tmp_path)
    for flags in ("--layer 1", ""):
        call(matching, f"--data {val} --checkpoint {path} {flags}")
    rows = values(tmp_path / "matching.json", block=3)
    assert list(rows) == [f"{name} matching %" for name in matching.WARPS]
    assert list(values(tmp_path / "matching.json", block=1)) == list(rows)
    assert most == [512, 512]
    (tmp_path / "train" / "n00").mkdir(parents=True)
    assert "class folders" in sentence(call, matching, f"--checkpoint {path} --data {tmp_path}")

    folder = eval_linear.ClassFolder(val, eval_linear.eval_transform(32))
    images = torch.stack([image for image, _ in folder]) / 255
    assert len(images) == 6
    f1 = partial(eval_linear.map_after, ser.load_encoder(path), 3)
    again = matching.matched(f1, images, matching.WARPS["shear"], 16, 4, "shear")
    assert rows["shear matching %"] == again
