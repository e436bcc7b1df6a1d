"""What paper/evaluations/tsne.py promises."""
import functools
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import eval_linear
from paper.evaluations import tsne
from paper.evaluations.tsne import (Settings, compare, embed, purity, sample_classes,
                                    silhouette)
from paper.methods import dino
from paper.tests.toys import class_folders, meet, toy_checkpoint
from test_ser import run_ranks, seeded

sklearn = pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
QUICK = dict(classes=3, per_class=4, draws=2, neighbors=3, perplexity=3.0, workers=0, batch_size=16)

def hurry(patch):
    """A quarter of the iterations, for tests that look at no cluster of the picture."""
    manifold = pytest.importorskip("sklearn.manifold")
    patch.setattr(manifold, "TSNE", functools.partial(manifold.TSNE, max_iter=250))

@pytest.fixture
def quick(monkeypatch):
    hurry(monkeypatch)

def blobs(spread, n=60):
    """n points around three corners of a space of eight dimensions, and which of the corners."""
    labels = torch.arange(n) % 3
    return torch.eye(8)[labels] + spread * torch.randn(n, 8, generator=seeded(1)), labels

def test_three_blobs_stay_apart_and_noise_does_not():
    """Silhouette above .5 and purity 1, in the space and in the picture; at chance for one blob."""
    features, labels = blobs(0.05)
    assert silhouette(features, labels) > 0.5 and purity(features, labels, 10) == 1
    points = embed(features, Settings(perplexity=10.0))
    from sklearn.metrics import silhouette_score
    assert silhouette_score(points, labels.numpy()) > 0.5
    noise = torch.randn(300, 8, generator=seeded(2))
    labels = torch.arange(300) % 3
    assert abs(silhouette(noise, labels)) < 0.05 and abs(purity(noise, labels, 20) - 1 / 3) < 0.05

def test_purity_and_silhouette_are_those_of_loops_over_cosines():
    features, labels = blobs(0.8, 24)
    z = torch.nn.functional.normalize(features, dim=1)
    distance = 1 - z @ z.T
    shares = []
    widths = []
    for i in range(24):
        others = [j for j in range(24) if j != i]
        nearest = sorted(others, key=lambda j: distance[i, j].item())[:5]
        shares.append(sum(labels[j] == labels[i] for j in nearest).item() / 5)
        mean = {}
        for label in range(3):
            own = [j for j in others if labels[j] == label]
            mean[label] = distance[i, own].mean().item()
        a = mean.pop(int(labels[i]))
        b = min(mean.values())
        widths.append((b - a) / max(a, b))
    assert purity(features, labels, 5) == pytest.approx(sum(shares) / 24)
    assert silhouette(features, labels) == pytest.approx(sum(widths) / 24, abs=1e-4)
    assert purity(7 * features, labels, 5) == purity(features, labels, 5)

@pytest.fixture
def data(tmp_path):
    return class_folders(tmp_path / "val", 6, 24)

def test_a_draw_is_of_some_classes_and_some_images_of_each(data):
    _, split = eval_linear.labelled("--data", data)
    cfg = Settings(**QUICK)
    draws = [sample_classes(split, cfg, number) for number in range(12)]
    for draw in draws:
        assert len(draw.labels.unique()) == 3
        assert (torch.bincount(draw.labels)[draw.among] == 4).all()
        assert len(set(draw.source)) == 12
        assert all(f"/n{label:02}/" in path for path, label in zip(draw.source, draw.labels))
    assert draws[0].source == sample_classes(split, cfg, 0).source
    assert len({tuple(draw.among) for draw in draws}) > 6
    assert set().union(*(draw.among for draw in draws)) == set(range(6))
    few = sample_classes(split, Settings(**QUICK | dict(per_class=50)), 0)
    assert len(few.source) == 18

def test_a_comparison_is_one_picture_and_its_numbers(quick, data, tmp_path, capsys):
    """From the command line, of checkpoints of two methods and the untrained encoder; the same seed
    writes the same files. A broken image is named and left out."""
    Path(data, "n00/000.png").write_bytes(b"no image")
    a = toy_checkpoint(tmp_path / "a", moco_hidden=16)
    b = toy_checkpoint(tmp_path / "b", dino.build, dino.Settings, hidden=16, outputs=8, shaken=1)
    given = ["--data", str(tmp_path), "--checkpoint", a, b, "--random-init", "--classes", "6",
             "--per-class", "6", "--draws", "2", "--neighbors", "3", "--perplexity", "3",
             "--workers", "0"]
    assert tsne.main(given) == 0
    picture = Path(a).with_name("tsne.png").read_bytes()
    numbers = Path(a).with_name("tsne.json").read_text()
    encoders = json.loads(numbers)["encoders"]
    assert list(encoders) == ["untrained", "a", "b"]
    for found in encoders.values():
        assert len(found["purity"]["values"]) == 2 and found["broken"] == [f"{data}/n00/000.png"]
        assert found["purity"]["mean"] == pytest.approx(sum(found["purity"]["values"]) / 2)
        assert -1 <= found["silhouette"]["mean"] <= 1
    assert len({found["silhouette"]["mean"] for found in encoders.values()}) == 3
    text = capsys.readouterr().out
    assert "1 broken images" in text and f"{encoders['b']['purity']['mean']:.4f} ±" in text
    assert tsne.main(given) == 0
    assert Path(a).with_name("tsne.png").read_bytes() == picture
    assert Path(a).with_name("tsne.json").read_text() == numbers
    other = [*given, "--seed", "1"]     # of the same images
    assert tsne.main(other) == 2
    assert "holds a result of another seed (0, now 1)" in capsys.readouterr().err
    assert tsne.main([*other, "--out", str(tmp_path / "other.png")]) == 0
    assert (tmp_path / "other.png").read_bytes() != picture
    Path(data, "n00/000.png").unlink()     # the numbers are those without it
    assert tsne.main(given) == 0
    without = json.loads(Path(a).with_name("tsne.json").read_text())["encoders"]
    for label, found in encoders.items():
        assert without[label]["broken"] == []
        for measure in ("silhouette", "purity"):
            wanted = pytest.approx(found[measure]["mean"], abs=1e-6)
            assert without[label][measure]["mean"] == wanted

def test_ready_images_are_not_cropped_again(quick, data, tmp_path):
    """The features of a corruption's set are those of whole images, of val those of centres."""
    path = toy_checkpoint(tmp_path / "a", moco_hidden=16)
    found = {}
    for ready in (False, True):
        cfg = Settings(**QUICK | dict(data=data, checkpoint=(path,), random_init=True, ready=ready,
                                      out=str(tmp_path / f"{ready}.png")))
        found[ready] = compare(cfg)["encoders"]["a"]["silhouette"]["values"]
    assert found[False] != found[True]
    _, split = eval_linear.labelled("--data", data)
    assert sample_classes(split, cfg, 0).ready

def test_mistakes_are_one_line(data, tmp_path, capsys):
    path = toy_checkpoint(tmp_path / "a", moco_hidden=16)
    two = ["--checkpoint", path, path, "--label", "a", "b", "--workers", "0"]
    for given, words in ((two, "--data"),
                         (["--data", data, "--checkpoint", path], "a comparison takes two"),
                         ([*two, "--data", data], "try --classes 6"),
                         (["--data", data, "--checkpoint", path, path], "names must differ"),
                         (["--data", data, *two, "c"], "unrecognized arguments: c"),
                         (["--data", data, "--checkpoint", path, path, "--label", "a"], "as many"),
                         ([*two, "--data", data, "--classes", "2", "--per-class", "5"],
                          "--neighbors 20")):
        assert tsne.main(given) == 2
        message = capsys.readouterr().err.strip()
        assert words in message and message.count("\n") == 0

def rank_main(rank, ranks, folder):
    meet(rank, ranks, folder)
    hurry(pytest.MonkeyPatch())
    given = json.loads(Path(folder, "settings.json").read_text())
    compare(Settings(**given | {name: tuple(given[name]) for name in ("checkpoint", "label")}))
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def test_two_ranks_equal_one(quick, data, tmp_path):
    path = toy_checkpoint(tmp_path / "a", moco_hidden=16)
    cfg = Settings(**QUICK | dict(data=data, checkpoint=(path,), random_init=True,
                                  out=str(tmp_path / "two.png")))
    (tmp_path / "settings.json").write_text(json.dumps(vars(cfg)))
    run_ranks(rank_main, 2, tmp_path)
    one = compare(cfg)["encoders"]
    compare_two = json.loads((tmp_path / "two.json").read_text())["encoders"]
    for label, found in one.items():
        for measure in ("silhouette", "purity"):
            assert found[measure]["values"] == pytest.approx(
                compare_two[label][measure]["values"], abs=1e-5)
