"""What paper/evaluations/correspondence.py promises."""
import pytest
import torch
from PIL import Image
from torch import nn

import ser
from eval_linear import Checkpoint
from paper.evaluations import correspondence
from paper.evaluations.correspondence import centres, destination, match, settings
from paper.tests.toys import class_folders, seeded

class Colours(nn.Module):
    """A perfectly equivariant encoder: its tokens are the colours of the patches."""
    grid = 4
    patch_size = 4
    def forward(self, x, layers):
        return ser.Encoded(None, {layer: nn.functional.avg_pool2d(x, 4) for layer in layers}, {})

class Places(Colours):
    """It sees nothing but the place in its grid, however the image is moved."""
    def forward(self, x, layers):
        places = torch.randn(1, 8, 6, 6, generator=seeded(1))
        z = places[:, :, :x.shape[2] // 4, :x.shape[3] // 4]
        return ser.Encoded(None, {layer: z for layer in layers}, {})

IMAGE = torch.rand(3, 4, 4, generator=seeded(0)).repeat_interleave(4, 1).repeat_interleave(4, 2)

def element(flip, turns, grid=(4, 4)):
    return ser.Geometry(torch.tensor([flip]), torch.tensor([turns]), grid)

@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_an_equivariant_encoder_finds_every_token(flip, turns):
    """And rho moves the tokens' numbers to the places that `destination` names."""
    g = element(flip, turns)
    _, places, right = match(Colours(), IMAGE, g, 1)
    assert right.all() and torch.equal(places[:, 0], centres((4, 4)))
    there = (4 * destination(g, centres((4, 4)))).long()
    moved = ser.rho(g, torch.arange(16.0).view(1, 1, 4, 4))[0, 0]
    assert moved[there[:, 0], there[:, 1]].tolist() == list(range(16))

def test_a_change_of_scale_is_measured_in_tokens_of_the_copy():
    """On 4 x 5 tokens, the centres of columns 0 to 3 come to .625, 1.875, 3.125 and 4.375, that is
    into columns 0, 1, 3 and 4: of those found, 0 to 3, two are right."""
    _, places, right = match(Places(), IMAGE, element(False, 0, (4, 5)), 1)
    assert right.view(4, 4).tolist() == [[True, True, False, False]] * 4
    assert places[5].tolist() == [[0.375, 0.375], pytest.approx([0.375, 0.3])]

def test_the_picture_has_the_printed_shares(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    run = {"equiv_layers": [2], "cls_layer": 2}
    encoders = [("blind", Checkpoint(Places(), "a", 0, {})),
                ("perfect", Checkpoint(Colours(), "b", 0, run))]
    monkeypatch.setattr(correspondence, "load_encoders", lambda _, name: (
        encoders, tmp_path / name))
    plotted = []
    plot_panel = correspondence.plot_panel
    monkeypatch.setattr(correspondence, "plot_panel", lambda panel, *rest: (
        plotted.append((panel.get_title(), rest[-1].any())), plot_panel(panel, *rest)))
    args = settings(["--data", class_folders(tmp_path / "photos", size=16), "--checkpoint", "A"])
    correspondence.evaluate(args, torch.device("cpu"))
    assert args.layer == 2
    printed = capsys.readouterr().out.splitlines()
    # Nothing stays in its place: turns and flips are never the identity.
    assert printed[:2] == ["blind, rot90: 0.0 % right", "blind, hflip: 0.0 % right"]
    assert printed[3:5] == ["perfect, rot90: 100.0 % right", "perfect, hflip: 100.0 % right"]
    assert plotted == [(printed[0], False), ("", False), (printed[3], True), ("", True)]
    assert Image.open(*tmp_path.glob("correspondence-*.png")).size == (720, 380)

def test_lines_lead_from_a_token_to_the_one_that_it_found_and_tell_whether_it_is_right():
    figure_module = pytest.importorskip("matplotlib.figure")
    for right, colour in ((True, "lime"), (False, "red")):
        panel = figure_module.Figure().subplots()
        places = torch.tensor([[[0.25, 0.5], [0.5, 0.75]]])
        correspondence.plot_panel(panel, torch.zeros(3, 20, 20), torch.ones(3, 20, 20) / 2, places,
                                  torch.tensor([right]))
        assert panel.images[0].get_array()[0, ::20, 0].tolist() == [0, 1, 0.5]
        assert panel.lines[0].get_xydata().tolist() == [[10, 5], [22 + 15, 10]]
        assert panel.lines[0].get_color() == colour
