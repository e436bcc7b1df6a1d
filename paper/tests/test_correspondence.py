"""What paper/evaluations/correspondence.py promises."""
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import ser
from paper.evaluations import correspondence
from paper.evaluations.correspondence import (ELEMENTS, centres, destination, draw_element, match,
                                              shares)
from paper.methods import dino
from paper.tests.toys import class_folders, toy_checkpoint
from test_ser import D4, close, element, seeded

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")

class Colours(nn.Module):
    """An encoder that is perfectly equivariant: its tokens are the colours of the patches."""
    grid = 4
    patch_size = 4

    def forward(self, images, map_layers):
        maps = [nn.functional.avg_pool2d(x, 4) for x in images]
        return [ser.Encoded(None, dict.fromkeys(map_layers, z), {}) for z in maps]

class Places(Colours):
    """One that sees nothing but the place in its grid, however the image is moved."""

    def forward(self, images, map_layers):
        codes = ser.sincos_codes(8, 16)
        maps = [codes[:, :, :x.shape[2] // 4, :x.shape[3] // 4] for x in images]
        return [ser.Encoded(None, dict.fromkeys(map_layers, z), {}) for z in maps]

def patches(seed=0):
    """An image (3, 16, 16) whose 16 patches differ in direction of colour."""
    colours = torch.randn(1, 3, 4, 4, generator=seeded(seed))
    return colours.repeat_interleave(4, 2).repeat_interleave(4, 3)[0]

@pytest.mark.parametrize("flip, turns", D4)
def test_places_go_where_rho_brings_the_tokens(flip, turns):
    """All eight elements, on a grid whose token numbers are moved by rho itself."""
    g = element(flip, turns, (4, 4))
    numbers = torch.arange(16.).view(1, 1, 4, 4)
    moved = ser.rho(g, numbers).flatten()
    there = (destination(g, centres((4, 4))) * 4).long()
    assert moved[there[:, 0] * 4 + there[:, 1]].tolist() == list(range(16))

def test_centres_are_rows_first_and_inside_their_tokens():
    close(centres((2, 3)) * torch.tensor([2, 3]),
          torch.tensor([[.5, .5], [.5, 1.5], [.5, 2.5], [1.5, .5], [1.5, 1.5], [1.5, 2.5]]))

@pytest.mark.parametrize("flip, turns", D4)
def test_an_equivariant_encoder_finds_every_token(flip, turns):
    assert match(Colours(), patches(), element(flip, turns, (4, 4)), 1).right.all()

def test_an_encoder_of_places_finds_those_that_stayed():
    """A flip of four columns moves all; half a turn moves all; nothing moves none."""
    for flip, turns, right in ((True, 0, 0), (False, 2, 0), (False, 0, 16)):
        assert match(Places(), patches(), element(flip, turns, (4, 4)), 1).right.sum() == right

@pytest.mark.parametrize("grid", [(8, 8), (4, 8), (8, 4)])
def test_a_changed_scale_is_known(grid):
    """Twice as many rows or columns: all tokens at whose border the centre lies are right, others
    are not; distances count tokens of the copy."""
    g = element(False, 0, grid)
    joined = match(Colours(), patches(), g, 1)
    assert joined.right.float().mean() > 0.8     # resampling mixes neighbours
    there = destination(g, centres((4, 4))) * torch.tensor(grid)
    close(joined.expected, there)
    far = correspondence.Match(there, there + torch.tensor([0.0, 0.6]))
    near = correspondence.Match(there, there - torch.tensor([0.5, 0.0]))
    assert not far.right.any() and near.right.all() and (far.distance - 0.6).abs().max() < 1e-5

def test_shares_are_means_over_tokens_and_images():
    """100% of an equivariant encoder for a turn and a flip; of places what loops count."""
    images = torch.stack([patches(seed) for seed in range(5)])
    found = shares(Colours(), images, 1, seed=0)
    assert found["turn"]["right"] == found["flip"]["right"] == 100
    assert found["turn"]["chance"] == pytest.approx(100 / 16)
    found = shares(Places(), images, 1, seed=0)["all three"]
    right = []
    near = []
    for index, image in enumerate(images):
        joined = match(Places(), image, draw_element("all three", index, 4, 0), 1)
        for a, b in zip(joined.expected.tolist(), joined.nearest.tolist()):
            apart = max(abs(a[0] - b[0]), abs(a[1] - b[1]))
            right.append(apart <= 0.501)
            near.append(apart <= 1.501)
    assert found["right"] == pytest.approx(100 * sum(right) / len(right))
    assert found["within one token"] == pytest.approx(100 * sum(near) / len(near))
    assert found["right"] < found["within one token"]

def test_elements_are_drawn_by_image_and_turn_and_flip_never_leave_it():
    for name in ELEMENTS:
        drawn = [draw_element(name, index, 14, 0) for index in range(40)]
        assert drawn[3].grid == draw_element(name, 3, 14, 0).grid
        flips = {bool(g.flip) for g in drawn}
        turns = {int(g.turns) for g in drawn}
        scaled = len({g.grid for g in drawn}) > 5
        assert flips == {"flip": {True}, "all three": {False, True}}.get(name, {False})
        assert turns == {"turn": {1, 2, 3}, "all three": {0, 1, 2, 3}}.get(name, {0})
        assert scaled == (name in ("scale", "all three"))

def test_a_comparison_is_a_small_picture_and_its_numbers(tmp_path, capsys):
    """From the command line, of files and folders, and of checkpoints of two methods; the untrained
    encoder is beside them, and the same seed writes the same picture."""
    pytest.importorskip("matplotlib")
    class_folders(tmp_path / "photos", 2, 40)
    one = tmp_path / "photos" / "n00" / "000.png"
    a = toy_checkpoint(tmp_path / "control", moco_hidden=16)
    b = toy_checkpoint(tmp_path / "ser", dino.build, dino.Settings, hidden=16, outputs=8, shaken=1)
    given = ["--data", str(tmp_path / "photos"), str(one), "--checkpoint", a, b, "--images", "3",
             "--label", "control", "with SER"]
    assert correspondence.main(given) == 0
    found = json.loads(Path(a).with_name("correspondence.json").read_text())
    picture = Path(a).with_name("correspondence.png")
    assert list(found["shares"]) == ["untrained", "control", "with SER"]
    assert len(found["images"]) == 3
    assert found["layer"] == 1 and len(set(found["sha256"])) == 2
    text = capsys.readouterr().out
    assert f"{found['shares']['with SER']['turn']['right']:.1f}" in text and str(picture) in text
    with Image.open(picture) as image:
        assert image.mode == "P" and image.width > 3 * 300
        colours = {image.getpalette()[3 * i:3 * i + 3].__str__() for i in range(96)}
    before = picture.read_bytes()
    assert len(before) < 300_000 and len(colours) > 10
    assert correspondence.main(given) == 0 and picture.read_bytes() == before
    other = ["--layer", "3", "--seed", "1", "--rows", "1"]
    assert correspondence.main([*given, *other]) == 2
    assert "holds a result of another layer (0, now 3)" in capsys.readouterr().err
    assert correspondence.main([*given, *other, "--out", str(tmp_path / "deeper.png")]) == 0
    assert (tmp_path / "deeper.png").read_bytes() != before
    deeper = json.loads((tmp_path / "deeper.json").read_text())
    assert deeper["layer"] == 3 and deeper["shares"] != found["shares"]
    assert set(deeper["images"]) != set(found["images"])

def test_right_lines_are_green_wrong_ones_red_and_they_end_at_the_nearest_token():
    """Of the lines that matplotlib is given: from the photograph to the copy at its right."""
    figure_module = pytest.importorskip("matplotlib.figure")
    for encoder, name in ((Colours(), "green"), (Places(), "red")):
        g = element(True, 0, (4, 4))
        photograph = patches().sigmoid()
        joined = match(encoder, photograph, g, 1)
        panel = figure_module.Figure().subplots()
        copy = ser.rho(g, photograph[None], 4)[0]
        correspondence.draw_panel(panel, photograph, copy, joined, torch.arange(16))
        wrong, right = panel.collections
        shown, empty = (right, wrong) if name == "green" else (wrong, right)
        assert len(shown.get_segments()) == 16 and len(empty.get_segments()) == 0
        red, green, blue, _ = shown.get_color()[0]
        assert (green > 0.5 > red) if name == "green" else (red > 0.5 > green)
        (x, y), (x_end, y_end) = shown.get_segments()[0]
        assert (x, y) == (2, 2)
        column = 3 if name == "green" else 0     # the flip, or the same place
        assert (x_end - 1.12 * 16, y_end) == pytest.approx((4 * column + 2, 2), abs=1e-4)

def test_torchrun_is_refused(tmp_path, monkeypatch, capsys):
    """All ranks would do all the work, and write the same files."""
    monkeypatch.setenv("RANK", "0")
    assert correspondence.main(["--data", str(tmp_path)]) == 2
    assert "without torchrun" in capsys.readouterr().err

def test_mistakes_are_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    photos = class_folders(tmp_path / "photos", 1, 40)
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    a = toy_checkpoint(tmp_path / "a", moco_hidden=16)
    other = toy_checkpoint(tmp_path / "other", moco_hidden=16, patch_size=8)
    of_a = ["--checkpoint", a, "--data", photos]
    for given, words in (
            (["--checkpoint", a], "--data"),
            ([*of_a, "--layer", "9"], "choose among 1..3"),
            (["--checkpoint", a, other, "--data", photos], "--checkpoint other"),
            (["--checkpoint", a, "--data", str(broken)], "cannot read"),
            ([*of_a, "--rows", "9"], "--rows 9"),
            ([*of_a, "--out", str(tmp_path / "no" / "a.png")], "cannot write"),
            ([*of_a, "--label", "untrained"], "names must")):
        assert correspondence.main(given) == 2
        message = capsys.readouterr().err.strip()
        assert words in message and message.count("\n") == 0
