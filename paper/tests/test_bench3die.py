"""What paper/evaluations/bench3die.py promises, on coloured squares in the layout of 3DIEBench."""
from argparse import Namespace

import numpy
import pytest
from PIL import Image

from eval_linear import Seeded
from paper.evaluations import bench3die
from paper.tests.toys import call, toy_checkpoint, values

SYNSETS = ["02691156", "02747177", "02954340"]
VALIDATED = ["02691156/b", "02747177/d", "02954340/a", "02954340/c"]


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    """Three synsets of four objects, each of 50 views: red tells the synset, green the view, blue
    the border. The list has slashes on both sides, as the authors'."""
    root = tmp_path_factory.mktemp("data")
    for label, synset in enumerate(SYNSETS):
        for name in "dcba":
            folder = root / "3DIEBench" / synset / name
            folder.mkdir(parents=True)
            (folder / "latent_0.npy").touch()
            for view in range(50):
                image = Image.new("RGB", (16, 16), (0, 0, 250))
                image.paste((120 * label, 5 * view, 0), (1, 1, 15, 15))
                image.save(folder / f"image_{view}.jpg", quality=100, subsampling=0)
    (root / "3DIEBench" / "LICENSE").touch()
    numpy.save(root / "val_images.npy", numpy.array([f"/{name}/" for name in VALIDATED]))
    return Namespace(data=str(root / "3DIEBench"), split=str(root / "val_images.npy"))


def seen(item):
    """The view and the label; the border must be there, as nothing is cropped."""
    image, label = item
    assert image.shape == (3, 16, 16) and image[2, 0].min() > 180
    return round(image[1, 8, 8].item() / 5), label


def test_the_split_is_that_of_the_list(args):
    """Val is every view of the listed objects, train one of 50 of each other object."""
    classes, train, crops, tests = bench3die.load_sets(args, 16)
    sets = {"train": train, "crops": crops, **tests}
    found = {part: ["/".join(folder.parts[-2:]) for folder, _, _ in data.items]
             for part, data in sets.items()}
    names = [f"{synset}/{name}" for synset in SYNSETS for name in "abcd"]
    assert classes == SYNSETS and found["val"] == [one for one in VALIDATED for _ in range(50)]
    assert found["crops"] == found["train"] == [one for one in names if one not in VALIDATED]
    val = [seen(sets["val"][place]) for place in range(200)]
    assert val == list(zip([*range(50)] * 4, [0] * 50 + [1] * 50 + [2] * 100))

    views = [seen(Seeded(crops, 0, epoch)[3])[0] for epoch in range(120)]
    assert len(set(views)) > 40 and min(views) < 4 and max(views) > 45
    assert seen(train[3]) == (0, 1)     # for k-NN and --cache


def test_the_command(args, tmp_path):
    """Colours tell the classes: the probe finds all."""
    path = toy_checkpoint(tmp_path, shaken=False)
    call(bench3die, "--data", args.data, "--split", args.split, "--checkpoint", path,
         "--epochs", "40", "--batch-size", "8", "--workers", "0")
    assert values(tmp_path / "bench3die.json", set="val", classes=3)["linear top-1 %"] == 100
