"""What paper/evaluations/tsne.py promises."""
import math

import pytest
import torch
from torchvision.transforms import v2

import eval_linear
import ser
from paper.evaluations import tsne
from paper.evaluations.tsne import sample_classes, separation
from paper.tests.toys import call, class_folders, toy_checkpoint, values

pytest.importorskip("sklearn")


def on_a_circle(*degrees):
    angles = torch.tensor(degrees) * math.pi / 180
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def test_purity_and_silhouette_of_literal_clusters():
    """By hand: two classes of two points at a right angle, and mixed; lengths do not matter."""
    labels = torch.tensor([0, 0, 1, 1])
    apart = on_a_circle(0, 0, 90, 90)
    assert separation(apart, labels, k=1) == (pytest.approx(1), 1)
    mixed = on_a_circle(0, 90, 1, 91) * torch.tensor([1, 2, 3, 4])[:, None]
    assert separation(mixed, labels, k=1) == (pytest.approx(-0.491, abs=0.01), 0)
    assert separation(mixed, labels, k=2)[1] == 0.25     # one of 0, and one of 91 degrees


def test_a_comparison_is_one_picture_with_its_numbers(tmp_path, monkeypatch):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, path: figures.append(self))
    val = class_folders(tmp_path / "val", per_class=12, size=24)
    runs = [toy_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    call(tsne, "--data", val, "--checkpoint", *runs, "--label", "A", "B", "--classes=4",
         "--ready", "--workers=0")

    # Against features taken by hand, without a crop.
    path = tmp_path / "one" / "tsne.json"
    data = eval_linear.class_folder(val, v2.Resize((16, 16)))
    images = torch.stack([image for image, _ in data])
    labels = torch.tensor(data.targets)
    sample = sample_classes(labels, 4, 0)
    assert len(labels[sample].unique()) == 4 and sample.sum() == 48
    for name, run in zip("AB", runs):
        features = eval_linear.cls_features(ser.load_encoder(run), images, 1)
        silhouette, purity = separation(features[sample], labels[sample])
        found = values(path, encoder=name, classes=4)
        assert found == pytest.approx({"silhouette": silhouette, "20-NN purity": purity}, abs=1e-5)

    # A colour for each class, in both panels.
    colours = labels[sample].unique(return_inverse=True)[1]
    for panel in figures[0].axes:
        assert panel.collections[0].get_array().tolist() == colours.tolist()
