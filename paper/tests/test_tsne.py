"""What paper/evaluations/tsne.py promises."""
import json
import math

import pytest
import torch

from paper.evaluations import tsne
from paper.evaluations.tsne import sample_classes, separation
from paper.tests.toys import CLASSES, call, class_folders, toy_checkpoint, values

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


def test_a_comparison_is_one_picture_with_a_legend_and_its_numbers(tmp_path, monkeypatch, capsys):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = {}
    monkeypatch.setattr(figure_module.Figure, "savefig",
                        lambda self, path: figures.setdefault(path.name, self))
    val = class_folders(tmp_path / "val", per_class=12, size=24)
    runs = [toy_checkpoint(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    line = ["--data", val, "--checkpoint", *runs, "--label", "A", "B", "--classes=4", "--workers=0"]
    call(tsne, *line)
    path = tmp_path / "one" / "tsne.json"
    found = {name: values(path, encoder=name) for name in ("untrained", "A", "B")}
    purity = found["A"]["20-NN purity"]
    assert len(purity) == 10 and len(set(purity)) > 4     # each sample has other classes
    assert len({one["silhouette"][0] for one in found.values()}) == 3
    assert f"purity {sum(found['B']['20-NN purity']) / 10:.3f} ±" in capsys.readouterr().out
    call(tsne, *line, "--ready")     # no centre crop; the others stay
    rows = json.loads(path.read_text())["rows"]
    assert [row["value"] for row in rows[:2]] != [row["value"] for row in rows[6:8]]
    assert len(rows) == 12 and len(figures) == 2
    figure, _ = figures.values()
    assert [panel.get_title().split("\n")[0] for panel in figure.axes] == ["untrained", "A", "B"]

    # A colour for each class of the first sample, in all panels, and the legend says which.
    labels = torch.arange(6).repeat_interleave(12)
    drawn = labels[sample_classes(labels, 4, 0, 0)]
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.texts] == [CLASSES[k] for k in drawn.unique()]
    for panel in figure.axes:
        dots = panel.collections[0]
        assert dots.get_array().tolist() == drawn.unique(return_inverse=True)[1].tolist()
        colours = [dots.to_rgba(number) for number in range(4)]
        assert [handle.get_color() for handle in legend.legend_handles] == colours
