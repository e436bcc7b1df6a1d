import numpy
import pytest
import torchvision.transforms.v2.functional as TF

import eval_linear
import ser
from paper.evaluations import bench3die
from paper.tests.toys import call, parsed, toy_checkpoint, values
from test_ser import sentence

SYNSETS = ["02691156", "02747177", "02954340"]
OBJECTS = [f"{synset}/{name}" for synset in SYNSETS for name in "abcd"]
VALIDATED = ["02691156/b", "02747177/d", "02954340/a", "02954340/c"]


@pytest.fixture(scope="module")
def args(tmp_path_factory):
    """50 views of each object: red tells the object, green the view, blue the border."""
    root = tmp_path_factory.mktemp("3DIEBench")
    (root / ".hidden").mkdir()     # no class, as is the next file
    split = root / "val_images.npy"
    numpy.save(split, numpy.array([f"/{name}/" for name in VALIDATED]))
    for number, name in reversed(list(enumerate(OBJECTS))):
        (root / name).mkdir(parents=True)
        for view in range(50):
            image = ser.Image.new("RGB", (16, 16), (0, 0, 250))
            image.paste((20 * number, 5 * view, 0), (1, 1, 15, 15))
            image.save(root / name / f"image_{view}.jpg", quality=100, subsampling=0)
    return parsed(bench3die, "--checkpoint C --data", root, "--split", split)


def seen(item):
    image, label = item
    assert image[2, 0].min() > 180, "the border is cropped"
    red, green, _ = image[:, 10, 10].tolist()
    return OBJECTS[round(red / 20)], round(green / 5), label


def test_the_split_is_that_of_the_list(args, monkeypatch):
    _, train, crops, tests = bench3die.load_sets(args, 20)

    def listed(names, views):
        return [(name, view, SYNSETS.index(name[:8])) for name in names for view in views]

    others = [name for name in OBJECTS if name not in VALIDATED]
    assert [seen(item) for item in tests["val"]] == listed(VALIDATED, range(50))
    assert [seen(item) for item in train] == listed(others, [0])     # for k-NN and --cache
    image = ser.read_image(f"{args.data}/{VALIDATED[0]}/image_0.jpg")
    assert bench3die.load_sets(args, 8).tests["val"][0][0].equal(TF.resize(image, (8, 8)))

    for flags in ("--val D", "--test x=D", "--equivariance"):
        assert "--test" in sentence(parsed, bench3die, "--data D --checkpoint C", flags)
    monkeypatch.setattr(numpy, "load", lambda _: numpy.array([VALIDATED[0], "02691156/z"]))
    assert "such as 02691156/z" in sentence(bench3die.load_sets, args, 16)

    drawn = [seen(eval_linear.Seeded(crops, 0, epoch)[3]) for epoch in [*range(500), 0, 1, 2]]
    assert drawn[500:] == drawn[:3] and set(drawn) == set(listed(["02747177/a"], range(50)))


def test_the_heads_are_scored_beside_the_papers_rows(args, tmp_path, capsys):
    line = f"--data {args.data} --split {args.split} --epochs 40 --batch-size 8 --checkpoint"
    call(bench3die, line, toy_checkpoint(tmp_path, dim=64))
    assert values(tmp_path / "bench3die.json", set="val", classes=3)["linear top-1 %"] > 80
    assert "70.17   92.78" in capsys.readouterr().out     # the paper's SER
    row, *_ = eval_linear.read_results(tmp_path / "bench3die.json")["rows"]
    assert row["images"].split()[-1] == ser.checksum(sorted(numpy.load(args.split).tolist()))
