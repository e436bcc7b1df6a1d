"""What paper/evaluations/correspondence.py promises."""
import pytest
import torch
import torch.nn.functional as F

import eval_linear
import ser
from paper.evaluations import correspondence
from paper.evaluations.correspondence import similarities, turn
from paper.tests.toys import call, class_folders, toy_checkpoint
from test_ser import close, noise


PLACES = torch.arange(16).view(4, 4)     # of tokens


def test_the_marked_token_is_compared_with_those_of_a_turned_copy():
    """Of an encoder whose tokens are colours: as the upright photograph's similarities, turned."""
    def colours(x, layers):
        return ser.Encoded(None, {layer: x for layer in layers}, None)

    photo = noise(3, 4, 4)
    tokens = ser.normalise(photo[None])[0]
    for place in range(16):
        marked = PLACES == place
        upright = F.cosine_similarity(tokens, tokens[:, marked][:, :, None], dim=0)
        turned = upright.mT.flip(0)
        close({place: similarities(colours, photo, marked, 1)}, {place: turned})


def test_the_picture_has_the_first_photographs_of_three_classes(tmp_path, monkeypatch):
    """And the maps of both runs after the block of L_equiv, which MoCo-v3's does not have."""
    figures = []
    module = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(module.Figure, "savefig", lambda figure, path: figures.append(figure))
    val = class_folders(tmp_path / "val", size=18)
    moco = toy_checkpoint(tmp_path / "moco", seed=1, ratio=0, equiv_layers=[])
    ours = toy_checkpoint(tmp_path / "ser", seed=2, equiv_layers=[2])
    call(correspondence, "--data", val, "--checkpoint", moco, ours, "--label", "MoCo-v3", "SER")

    panels = figures[0].axes
    assert [panel.get_title() for panel in panels[:4]] == ["photograph", "turned", "MoCo-v3", "SER"]
    crop = eval_linear.eval_transform(16)
    for number in range(3):
        photo = crop(ser.read_image(f"{val}/n{number:02}/{number:03}.png")) / 255
        wanted = [photo.movedim(0, 2), turn(photo).movedim(0, 2)]
        for path in (moco, ours):
            encoder = ser.load_encoder(path)
            wanted.append(similarities(encoder, photo, PLACES == 6, 2))

        # A frame around the token in row 1, column 2, and where a turn brings it.
        corners = [[2, 1], [1, 1], [1, 1], [1, 1]]
        for panel, image, corner in zip(panels[4 * number:], wanted, corners):
            shown = panel.images[0]
            close(torch.tensor(shown.get_array()), image)
            assert shown.get_clim() == (0, 1)
            assert shown.get_extent() == [0, 4, 4, 0]
            assert panel.lines[0].get_xydata().min(0).tolist() == corner
