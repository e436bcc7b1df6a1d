"""What paper/evaluations/coco.py promises, on squares in the layout of COCO."""
import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import ser
from paper.evaluations import coco
from paper.tests.toys import become_rank, seeded, stop_after_a_save, toy_checkpoint, values

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
    images = []
    for number in range(n):
        side, category = ((8, 3), (16, 90))[number % 2]
        place = 4 * torch.randint((36 - side) // 4, (2,), generator=seeded(seed + number))
        images.append([(category, [*place.tolist(), side, side], 0)])
    return images

def test_a_small_detector_finds_squares(tmp_path, monkeypatch, capsys):
    """The command reaches an AP above .5, and prints it beside the paper's rows."""
    path = toy_checkpoint(tmp_path, shaken=False, image_size=32, patch_size=4, dim=48)
    write_split(tmp_path, "train2017", squares(100, 160))
    write_split(tmp_path, "val2017", squares(0, 10))
    detector = coco.detector

    def smaller(*given):
        model = detector(*given)
        model.roi_heads.fg_bg_sampler.batch_size_per_image = 16
        model.rpn._post_nms_top_n = dict(training=50, testing=20)
        return model

    monkeypatch.setattr(coco, "detector", smaller)
    monkeypatch.setattr(coco.Pyramid, "out_channels", 16)
    coco.main(["--data", str(tmp_path), "--checkpoint", path, "--size", "32", "--workers", "0",
               "--iterations", "72", "--batch-size", "2", "--base-lr", "3e-3"])
    assert values(tmp_path / "coco.json", set="val2017", classes=2)["AP"] > 0.5
    assert "0.242   0.428   0.244" in capsys.readouterr().out
    state = torch.load(tmp_path / "coco.pt")
    for name, weight in ser.load_encoder(path).state_dict().items():
        assert torch.equal(state["model"][f"backbone.encoder.{name}"], weight)

def test_the_rate_rises_and_falls_twice():
    """Of 45,000 steps 1,000 are warmup; the rate falls after 30,000 and after 40,000."""
    args = coco.settings(["--data", "D", "--checkpoint", "C"])
    for step, wanted in ((0, 1e-7), (499, 5e-5), (999, 1e-4), (29999, 1e-4), (30000, 1e-5),
                         (39999, 1e-5), (40000, 1e-6), (44999, 1e-6)):
        assert coco.lr_at(step, args) == pytest.approx(wanted)

class Counter(nn.Module):
    """In place of a detector: it notes the numbers of images, which are the widths of their boxes,
    and its loss depends on their pixels and on chance."""
    def __init__(self, encoder):
        super().__init__()
        self.backbone = nn.ModuleDict({"encoder": encoder.requires_grad_(False)})
        self.backbone.encoder = encoder
        self.weight = nn.Parameter(torch.zeros(()))
        self.seen = []

    def forward(self, images, targets):
        self.seen.append([int(target["boxes"][0, 2] - target["boxes"][0, 0]) for target in targets])
        ramp = torch.arange(32.0)
        return {"loss_box": self.weight * (torch.rand(()) + sum((x * ramp).mean() for x in images))}

def test_a_stopped_training_goes_on_and_ranks_share_its_images(tmp_path, monkeypatch):
    path = toy_checkpoint(tmp_path)
    write_split(tmp_path, "train2017", [[(3, [0, 0, n + 1, 9], 0)] for n in range(8)])
    args = coco.settings(["--data", str(tmp_path), "--checkpoint", path, "--workers", "0",
                          "--iterations", "6", "--batch-size", "4", "--save-every", "3"])
    data = coco.photos(args, "train2017", train=True)

    def trained(name):
        model = Counter(ser.load_encoder(path))
        coco.train(model, data, args, tmp_path / f"{name}.pt")
        return model

    whole = trained("whole")
    assert all(len(set(a + b)) == 8 for a, b in zip(whole.seen[::2], whole.seen[1::2]))
    stop_after_a_save(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        trained("parts")
    parts = trained("parts")
    assert parts.seen == whole.seen[3:] and torch.equal(parts.weight, whole.weight)
    log = (tmp_path / "parts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in log] == [3, 6]
    ranks = []
    for rank in range(2):
        become_rank(monkeypatch, rank)
        ranks.append(trained(f"rank{rank}").seen)
    for step, first, second in zip(whole.seen, *ranks):
        assert sorted(step) == sorted(first + second)

def test_targets_are_what_the_annotations_say(tmp_path):
    """Boxes as corners within the image; no crowds, empty boxes, or images without boxes."""
    write_split(tmp_path, "train2017", [
        [(90, [20, 30, 24, 9], 0), (3, [4, 6, 8, 10], 0), (3, [0, 0, 32, 32], 1)],
        [(3, [5, 5, 0, 9], 0)], [], [(3, [1, 2, 3, 4], 0)]])
    args = coco.settings(["--data", str(tmp_path), "--checkpoint", "C"])
    assert len(coco.photos(args, "train2017", train=False)) == 4
    data = coco.photos(args, "train2017", train=True)
    assert data.ids == [1, 4]
    _, target = data[1]
    assert target["boxes"].tolist() == [[20, 30, 32, 32], [4, 6, 12, 16]]
    assert target["labels"].tolist() == [90, 3]

def test_the_ground_truth_has_average_precision_1(tmp_path):
    """Through all formats; nothing at all has 0; 7 of 26 pixels aside IoU is 19 / 33 = .576, right
    at .50 and .55 of ten thresholds."""
    write_split(tmp_path, "val2017", [[(3, [0, 2, 26, 24], 0)], [(90, [4, 2, 26, 24], 0)]])
    args = coco.settings(["--data", str(tmp_path), "--checkpoint", "C", "--workers", "0"])
    val = coco.photos(args, "val2017", train=False)
    boxes = torch.tensor([[[4.0, 2, 30, 26]], [[0, 2, 26, 26]]])
    for shift, n, wanted in ((0, 1, [1, 1, 1]), (7, 1, [0.2, 1, 0]), (0, 0, [0, 0, 0])):
        answers = iter([dict(boxes=box[:n] + torch.tensor([shift, 0, shift, 0]),
                             labels=torch.tensor([label] * n), scores=torch.ones(n))
                        for box, label in zip(boxes, (90, 3))])
        found = coco.precision(lambda images: [next(answers)], val, torch.device("cpu"), args)
        assert list(found.values()) == pytest.approx(wanted)

def test_two_ranks_share_the_images_of_val(tmp_path, monkeypatch):
    write_split(tmp_path, "val2017", squares(0, 5))
    args = coco.settings(["--data", str(tmp_path), "--checkpoint", "C", "--workers", "0"])
    val = coco.photos(args, "val2017", train=False)
    seen = []
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda parts, own: (
        seen.extend(one["image_id"] for one in own)))
    for rank in range(2):
        become_rank(monkeypatch, rank)
        output = dict(boxes=torch.ones(1, 4), labels=torch.tensor([3]), scores=torch.ones(1))
        coco.precision(lambda images: [output], val, torch.device("cpu"), args)
    assert sorted(seen) == [1, 2, 3, 4, 5]

def test_the_pyramid_is_five_maps_of_the_normalised_last_map(tmp_path):
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    pyramid = coco.Pyramid(encoder)
    x = torch.rand(1, 3, 32, 48)
    assert [tuple(found.shape[1:]) for found in pyramid(x).values()] == [
        (256, 32, 48), (256, 16, 24), (256, 8, 12), (256, 4, 6), (256, 2, 3)]
    pyramid.levels[2] = torch.nn.Identity()
    tokens = encoder(x, [3]).maps[3].movedim(1, -1)
    torch.testing.assert_close(pyramid(x)["2"], encoder.norm(tokens).movedim(-1, 1))
