"""What paper/evaluations/bench3die.py promises, on coloured squares in the layout of 3DIEBench."""
import json
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from paper.evaluations import bench3die
from paper.evaluations.bench3die import Settings, Views, collect
from paper.tests.test_finetune import checkpoint

SYNSETS = ("02691156", "02747177", "02954340")
VALIDATED = ("02691156/b", "02747177/d", "02954340/a", "02954340/c")

@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three synsets of four objects, each of 50 views: red tells the synset, green the view."""
    root = tmp_path_factory.mktemp("data") / "3DIEBench"
    for label, synset in reversed(list(enumerate(SYNSETS))):
        for name in "dcba":
            folder = root / synset / name
            folder.mkdir(parents=True)
            for view in range(50):
                Image.new("RGB", (16, 16), (120 * label, 5 * view, 0)).save(
                    folder / f"image_{view}.jpg", quality=100, subsampling=0)
                numpy.save(folder / f"latent_{view}.npy", numpy.zeros(7))
    (root / "LICENSE").write_text("CC-BY-NC")
    (root / ".cache").mkdir()
    return str(root)

@pytest.fixture
def listed(tmp_path):
    """The authors' list: a unicode array with a slash on both sides."""
    path = tmp_path / "val_images.npy"
    numpy.save(path, numpy.array([f"/{name}/" for name in VALIDATED]))
    return str(path)

def test_the_split_is_that_of_the_list(root, listed):
    """Val is every view of the listed objects, train all the other objects, each once; classes are
    the sorted synsets, and no latent, no LICENSE is an item."""
    classes, splits = collect(Settings(data=root, split=listed), 16)
    assert classes == list(SYNSETS) and list(splits) == ["train", "val"]
    train, val = splits["train"], splits["val"]
    objects = [f"{synset}/{name}" for synset in SYNSETS for name in "abcd"]
    left = [name for name in objects if name not in VALIDATED]
    assert train.source == [f"{root}/{name}" for name in left]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert val.source == [f"{root}/{name}/image_{view}.jpg" for name in VALIDATED
                          for view in range(50)]
    assert val.labels.tolist() == [0] * 50 + [1] * 50 + [2] * 100
    assert val.among == [0, 1, 2] and "right on 50.00%" in val.note
    fewer = collect(Settings(data=root, split=listed, views=3), 16)[1]["val"]
    assert fewer.source == [f"{root}/{name}/image_{view}.jpg" for name in VALIDATED
                            for view in range(3)]

def test_training_sees_one_view_drawn_by_seed_epoch_and_object(root, listed):
    train = collect(Settings(data=root, split=listed), 16)[1]["train"]

    def seen(seed, epoch, index):
        image, label = Views(train, 16, seed)[epoch, index]
        assert label == train.labels[index] and image.shape == (3, 16, 16)
        return round(image[1].float().mean().item() / 5)

    drawn = [seen(0, epoch, 3) for epoch in range(120)]
    assert len(set(drawn)) > 40 and min(drawn) < 4 and max(drawn) > 45
    assert drawn[:9] == [seen(0, epoch, 3) for epoch in range(9)]
    assert drawn[:9] != [seen(1, epoch, 3) for epoch in range(9)]
    assert drawn[:9] != [seen(0, epoch, 4) for epoch in range(9)]
    assert seen(0, None, 3) == 0     # for k-NN

def test_images_are_resized_without_a_crop(root, listed, tmp_path):
    """The border of an image is still its border, in training and in validation."""
    image = Image.new("RGB", (32, 32), (255, 0, 0))
    image.paste((0, 0, 0), (2, 2, 30, 30))
    for view in range(50):
        folder = tmp_path / "object"
        folder.mkdir(exist_ok=True)
        image.save(folder / f"image_{view}.jpg", quality=100, subsampling=0)
    train = collect(Settings(data=root, split=listed), 16)[1]["train"]
    split = train._replace(source=[str(folder), str(folder / "image_7.jpg")],
                           labels=torch.tensor([1, 1]))
    for key in ((0, 0), (5, 0), (None, 1)):
        pixels, _ = Views(split, 16, 0)[key]
        assert (pixels[0, 0] > 180).all() and (pixels[0, :, -1] > 180).all()
        assert pixels[0, 3:-3, 3:-3].max() < 60

def test_the_command(root, listed, tmp_path, capsys):
    """Colours tell the classes: the probe finds them all, but for a file that is broken."""
    path = checkpoint(tmp_path, moco_hidden=16)
    broken = Path(root, "02747177/d/image_1.jpg")
    whole = broken.read_bytes()
    broken.write_bytes(b"no image")
    argv = ["--data", root, "--split", listed, "--checkpoint", path, "--epochs", "6", "--views",
            "5", "--batch-size", "8", "--workers", "0", "--lr", "3", "30"]
    try:
        assert bench3die.main(argv) == 0
    finally:
        broken.write_bytes(whole)
    printed = capsys.readouterr().out
    assert "  MoCo-v3 + SER (2+4 views)        70.91 / 93.15\n" in printed
    assert "1 broken images in val" in printed and "5 renderings of each object" in printed
    result = json.loads((tmp_path / "bench3die-5-views.json").read_text())
    assert result["images"] == {"train": 8, "val": 20} and result["broken"]["val"] == [str(broken)]
    assert result["linear"]["best"]["val"]["top1"] == pytest.approx(95)
    assert bench3die.main([*argv, "--knn", "--random-init"]) == 0
    assert (tmp_path / "bench3die-5-views-knn-random-init.json").exists()
    of_fewer = [*argv, "--out", str(tmp_path / "bench3die-5-views.json")]
    of_fewer[of_fewer.index("--views") + 1] = "4"
    capsys.readouterr()
    assert bench3die.main(of_fewer) == 2
    assert "holds a result of another views (5, now 4)" in capsys.readouterr().err

def test_held_out_objects_are_seen_once(root, listed):
    _, splits = collect(Settings(data=root, split=listed, select_split=0.25), 16)
    assert [len(split.labels) for split in splits.values()] == [6, 200, 2]
    assert not set(splits["train"].source) & set(splits["held-out"].source)

def test_mistakes_are_one_line(root, listed, tmp_path, capsys):
    path = checkpoint(tmp_path, moco_hidden=16)
    numpy.save(tmp_path / "more.npy", numpy.array(["/02691156/b/", "/02691156/zz/"]))
    numpy.save(tmp_path / "few.npy", numpy.array(["/02691156/b/"]))
    (tmp_path / "text.npy").write_text("no list")
    numpy.save(tmp_path / "numbers.npy", numpy.arange(3))
    for argv, line in (
            ([], "--data: the folder of 3DIEBench is needed"),
            (["--data", "nowhere"], "--data nowhere: no such folder"),
            (["--data", root, "--split", "none.npy"], f"download {bench3die.LIST}"),
            (["--data", root, "--split", str(tmp_path / "text.npy")], "is no list of names"),
            (["--data", root, "--split", str(tmp_path / "numbers.npy")], "is no list of names"),
            (["--data", root, "--split", str(tmp_path / "more.npy")],
             f"1 of its objects are not in --data {root}, as 02691156/zz"),
            (["--data", root, "--split", str(tmp_path / "few.npy")],
             "1 of 3 synsets have objects to validate on"),
            (["--data", root, "--split", listed, "--test", f"v2={root}"], "no other test sets"),
            (["--data", root, "--split", listed, "--views", "51"], "must lie in 1..50")):
        assert bench3die.main(["--checkpoint", path, *argv]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and line in error[0]
        assert error[0].startswith("-m paper.evaluations.bench3die: ")
