"""What paper/evaluations/coco.py promises, on squares in the layout of COCO."""
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import ser
from paper.evaluations import coco
from paper.tests.toys import become_rank, call, toy_checkpoint, values
from test_ser import close, same, seeded, sentence

pytest.importorskip("pycocotools")
COLOURS = {3: (255, 220, 0), 90: (0, 80, 255)}     # of categories, with a gap as COCO's have


def write_split(root, name, images):
    """A split. images: for each, whose ids go down, a list of (category, box, iscrowd)."""
    found = {"images": [], "annotations": [], "categories": [{"id": 3}, {"id": 90}]}
    Path(root, name).mkdir(parents=True)
    Path(root, "annotations").mkdir(exist_ok=True)
    for number, items in zip(range(len(images), 0, -1), images):
        picture = Image.new("RGB", (32, 32))
        found["images"].append(dict(id=number, file_name=f"{number:012}.png", width=32, height=32))
        for category, (left, top, width, height), crowd in items:
            if not crowd:
                picture.paste(COLOURS[category], (left, top, left + width, top + height))
            found["annotations"].append(dict(
                id=len(found["annotations"]) + 1, image_id=number, category_id=category,
                bbox=[left, top, width, height], area=width * height, iscrowd=crowd))
        picture.save(Path(root, name, f"{number:012}.png"))
    Path(root, "annotations", f"instances_{name}.json").write_text(json.dumps(found))


def squares(seed, n):
    """An object in each image, of 8 or 16 pixels and a category of its own."""
    places = 4 * torch.randint(5, (n, 2), generator=seeded(seed))
    return [[((3, 90)[i % 2], [*place.tolist(), 8 + i % 2 * 8, 8 + i % 2 * 8], 0)]
            for i, place in enumerate(places)]


@pytest.fixture
def small(monkeypatch):
    """A detector with fewer channels and proposals."""
    detector = coco.detector

    def smaller(*given):
        model = detector(*given)
        model.roi_heads.fg_bg_sampler.batch_size_per_image = 16
        model.rpn._post_nms_top_n = dict(training=50, testing=20)
        return model

    monkeypatch.setattr(coco, "detector", smaller)
    monkeypatch.setattr(coco.Pyramid, "out_channels", 16)


def test_defaults(small):
    """The paper's 45k iterations of 32 images: 1,000 of warmup, falls after 30,000 and 40,000."""
    args = coco.settings(["--data", "D", "--checkpoint", "C"])
    assert (args.iterations, args.batch_size, args.base_lr, args.size) == (45000, 32, 1e-4, 800)
    rates = [coco.lr_at(step, args) for step in (499, 999, 29999, 30000, 39999, 40000, 44999)]
    assert rates == pytest.approx([5e-5, 1e-4, 1e-4, 1e-5, 1e-5, 1e-6, 1e-6])

    model = coco.detector(ser.ViT(32, 16, dim=8, depth=1, heads=1, cls_layer=0), 91, args)
    assert model.transform.size_divisible == 64     # a cell of the coarsest map is 4 patches of 16
    assert model.rpn.anchor_generator.sizes == [(32,), (64,), (128,), (256,), (512,)]


def test_a_small_detector_finds_squares(small, tmp_path):
    """With a frozen encoder. The finished detector is not scored for other images."""
    path = toy_checkpoint(tmp_path, shaken=False, image_size=32, patch_size=4, dim=48)
    write_split(tmp_path, "train2017", squares(100, 160))
    write_split(tmp_path, "val2017", squares(0, 10))
    line = ["--data", tmp_path, "--checkpoint", path, "--size", "32", "--workers", "0",
            "--iterations", "72", "--batch-size", "2", "--base-lr", "3e-3"]
    call(coco, *line)

    assert values(tmp_path / "coco.json", set="val2017", classes=2)["AP"] > 0.5
    state = torch.load(tmp_path / "coco.pt")
    for name, weight in ser.load_encoder(path).state_dict().items():
        assert torch.equal(state["model"][f"backbone.encoder.{name}"], weight), name

    index = tmp_path / "annotations/instances_train2017.json"
    index.write_text(index.read_text().replace("0001.png", "000A.png"))
    assert "checksum" in sentence(call, coco, *line)


def test_a_stopped_training_goes_on_and_ranks_share_its_images(small, tmp_path, monkeypatch):
    """Images are numbered by the widths of their boxes; no crowds, no empty boxes or images."""
    path = toy_checkpoint(tmp_path, image_size=32)
    images = [[((3, 90)[n % 2], [0, 30, n, 9], 0), (3, [0, 0, 32, 32], 1)] for n in range(1, 9)]
    write_split(tmp_path, "train2017", [*images, [(3, [5, 5, 0, 9], 0)], []])
    args = coco.settings(["--data", str(tmp_path), "--checkpoint", path, "--workers", "0", "--size",
                          "32", "--iterations", "4", "--batch-size", "4", "--save-every", "2"])
    flips = []

    def train(name):
        steps = []

        def look(_, given):
            steps.append([])
            for image, target in zip(*given):
                (left, top, right, bottom), = target["boxes"].int().tolist()
                assert image[1, 31].nonzero().flatten().tolist() == [*range(left, right)]
                n = right - left
                assert (top, bottom, target["labels"].item()) == (30, 32, (3, 90)[n % 2])
                steps[-1].append(n)
                flips.append(left > 0)

        model = coco.detector(ser.load_encoder(path), 91, args).train()
        model.register_forward_pre_hook(look)
        coco.train(model, coco.photos(args, "train2017", True), args, {}, tmp_path / f"{name}.pt")
        return steps, model.state_dict()

    whole, weights = train("whole")
    assert sorted(whole[0] + whole[1]) == sorted(whole[2] + whole[3]) == [*range(1, 9)]
    assert whole[:2] != whole[2:] and 0 < sum(flips) < 16

    with monkeypatch.context() as stop:
        stop.setattr(ser, "record", lambda log, bar, step, *_: 1 // (4 - step))
        with pytest.raises(ZeroDivisionError):
            train("parts")
    steps, parts = train("parts")
    assert steps == whole[2:] and same(parts, weights)

    shares = []
    for rank in range(2):
        become_rank(monkeypatch, rank)
        shares.append(train(f"rank{rank}")[0])
    assert [sorted(a + b) for a, b in zip(*shares)] == [sorted(step) for step in whole]


def test_the_ground_truth_has_average_precision_1(tmp_path, monkeypatch):
    """And nothing at all 0. 7 of 26 pixels aside IoU is 19 / 33 = .576, right at .50 and .55 of ten
    thresholds. Two ranks share the images."""
    write_split(tmp_path, "val2017", [[(3, [0, 2, 26, 24], 0)], [(90, [4, 2, 26, 24], 0)]])
    args = coco.settings(["--data", str(tmp_path), "--checkpoint", "C", "--workers", "0"])
    val = coco.photos(args, "val2017", train=False)
    boxes = torch.tensor([[[4.0, 2, 30, 26]], [[0, 2, 26, 26]]])

    def precision(shift, n, answers=(0, 1)):
        outputs = iter([dict(boxes=boxes[i][:n] + torch.tensor([shift, 0, shift, 0]),
                             labels=torch.tensor([(90, 3)[i]] * n), scores=torch.ones(n))
                        for i in answers])
        found = coco.precision(lambda _: [next(outputs)], val, torch.device("cpu"), args)
        return list(found.values())

    for shift, n, wanted in ((0, 1, [1, 1, 1]), (7, 1, [0.2, 1, 0]), (0, 0, [0, 0, 0])):
        assert precision(shift, n) == pytest.approx(wanted)

    seen = []
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda _, own: (
        seen.extend(one["image_id"] for one in own)))
    for rank in range(2):
        become_rank(monkeypatch, rank)
        precision(0, 1, [rank])
    assert seen == [1, 2]


def test_the_pyramid_is_five_maps_of_the_normalised_last_map(tmp_path):
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    pyramid = coco.Pyramid(encoder)
    x = torch.rand(1, 3, 32, 48)
    assert [tuple(found.shape[1:]) for found in pyramid(x).values()] == [
        (256, 32, 48), (256, 16, 24), (256, 8, 12), (256, 4, 6), (256, 2, 3)]

    pyramid.levels[2] = torch.nn.Identity()
    tokens = encoder(x, [3]).maps[3].movedim(1, -1)
    close(pyramid(x)["2"], encoder.norm(tokens).movedim(-1, 1))
