"""What paper/evaluations/correspondence.py promises."""
import itertools

import pytest
import torch
import torch.nn.functional as F

import eval_linear
import ser
from paper.evaluations import correspondence
from paper.evaluations.correspondence import similarities, turn
from paper.tests.toys import call, class_folders, toy_checkpoint
from test_ser import close, seeded


def colours(x, layers):
    """A perfectly equivariant encoder: its tokens are the colours of the patches."""
    return ser.Encoded(None, {layer: F.avg_pool2d(x, 4) for layer in layers}, {})


def at(row, column):
    """A mark on a grid of 4 x 4 tokens."""
    marked = torch.zeros(4, 4, dtype=torch.bool)
    marked[row, column] = True
    return marked


def test_an_equivariant_encoder_is_most_similar_at_the_true_place():
    """For every token; the other similarities are those to the upright map, turned."""
    photo = torch.rand(3, 4, 4, generator=seeded(0)).repeat_interleave(4, 1).repeat_interleave(4, 2)
    tokens = ser.normalise(photo[None])[0, :, ::4, ::4]
    for row, column in itertools.product(range(4), range(4)):
        found = similarities(colours, photo, at(row, column), 1)
        assert found.argmax() == 4 * (3 - column) + row, (row, column)
        upright = F.cosine_similarity(tokens, tokens[:, row, column, None, None], dim=0)
        close(found, turn(upright))


def test_the_picture_has_the_first_photographs_of_three_classes(tmp_path, monkeypatch):
    """And the maps of both runs after the block of L_equiv, which MoCo-v3's does not have."""
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path: figures.append(self))
    val = class_folders(tmp_path / "val", size=18)
    paths = [toy_checkpoint(tmp_path / "moco", seed=1, ratio=0, equiv_layers=[]),
             toy_checkpoint(tmp_path / "ser", seed=2, equiv_layers=[2])]
    call(correspondence, "--data", val, "--checkpoint", *paths, "--label", "MoCo-v3", "SER")

    panels = figures[0].axes
    assert [panel.get_title() for panel in panels[:4]] == ["photograph", "turned", "MoCo-v3", "SER"]
    crop = eval_linear.eval_transform(16)
    for number in range(3):
        photo = crop(ser.read_image(f"{val}/n{number:02}/{number:03}.png")) / 255
        row = panels[4 * number:4 * number + 4]
        shown = [torch.tensor(panel.images[0].get_array()) for panel in row]
        close(shown[0], photo.movedim(0, 2))
        close(shown[1], turn(photo).movedim(0, 2))
        for path, heat in zip(paths, shown[2:]):
            close(heat, similarities(ser.load_encoder(path), photo, at(1, 2), 2))

        # A frame around the token in row 1, column 2, and where a turn brings it.
        corners = [panel.lines[0].get_xydata().min(0).tolist() for panel in row]
        assert corners == [[2, 1], [1, 1], [1, 1], [1, 1]]
