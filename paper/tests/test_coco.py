"""What paper/evaluations/coco.py promises, on drawn images in the layout of COCO."""
import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.datasets import CocoDetection
from torchvision.transforms.functional import to_tensor

import ser
from paper.evaluations import coco
from paper.evaluations.coco import Loaded, Photo, Settings
from paper.evaluations.detector import MapNorm, Pyramid, detector
from paper.tests.test_finetune import checkpoint
from ser import Key
from test_ser import close, same, seeded

pytest.importorskip("pycocotools")

QUICK = dict(min_size=64, max_size=96, anchors=(8, 16, 24, 32, 48), batch_size=4, warmup=0, lr=1e-3,
             workers=0)
SQUARE, DISC = 3, 90     # category ids, with a gap as COCO's have

def draw(path, boxes, size=(64, 64), mode="RGB", **options):
    """Write a dark image with a bright square for every box."""
    image = Image.new(mode, size)
    for left, top, width, height in boxes:
        colour = 255 if mode == "L" else (255, 220, 0)
        image.paste(colour, (left, top, left + width, top + height))
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=95, **options)

def write(root, name, images, items):
    """The JSON of a split: images (id, width, height), items (image, category, box, iscrowd)."""
    Path(root, "annotations").mkdir(parents=True, exist_ok=True)
    found = {"images": [], "annotations": [],
             "categories": [dict(id=SQUARE, name="square"), dict(id=DISC, name="disc")]}
    for number, width, height in images:
        file = f"{number:012}.jpg"
        found["images"].append(dict(id=number, file_name=file, width=width, height=height))
    for n, (number, category, box, crowd) in enumerate(items):
        found["annotations"].append(dict(id=n + 1, image_id=number, category_id=category, bbox=box,
                                         area=box[2] * box[3], iscrowd=crowd, segmentation=[]))
    Path(root, "annotations", f"instances_{name}.json").write_text(json.dumps(found))

@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """DIR of 9 images of train2017 and 5 of val2017, with all of COCO's oddities."""
    root = tmp_path_factory.mktemp("coco")
    for name, first, n in (("train2017", 9, 9), ("val2017", 100, 5)):
        images = []
        items = []
        for i in range(n):
            number = first - i if name == "train2017" else first + 7 * i     # not in order
            box = [6 + 3 * i, 30 - 3 * i, 26, 24]
            draw(root / name / f"{number:012}.jpg", [box], mode="L" if i == 1 else "RGB")
            images.append((number, 64, 64))
            items.append((number, SQUARE, box, 0))
        odd = images[0][0]
        items.append((odd, SQUARE, [0, 0, 64, 64], 1))     # a crowd
        if name == "train2017":
            items.append((odd, DISC, [5, 5, 0, 9], 0))     # no area
        draw(root / name / f"{first + 1:012}.jpg", [])
        images.append((first + 1, 64, 64))                 # nothing in it
        write(root, name, images, items)
    return str(root)

@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("run"), moco_hidden=16, image_size=32, patch_size=16,
                      dim=32)

def tiny_encoder(patch_size):
    return ser.ViT(2 * patch_size, patch_size, dim=32, depth=1, heads=2, cls_layer=0)

class SmallHead(torch.nn.Module):
    """In place of 13 million weights: regions (n, 256, 7, 7) -> (n, 1024)."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(256, 1024)

    def forward(self, x):
        return F.relu(self.fc(x.mean((2, 3))))

@pytest.fixture
def small(monkeypatch):
    """A detector with a small head, which learns from 16 regions of an image, not 512."""
    def smaller(*arguments):
        model = detector(*arguments)
        model.roi_heads.box_head = SmallHead()
        model.roi_heads.fg_bg_sampler.batch_size_per_image = 16
        model.rpn._post_nms_top_n = dict(training=100, testing=50)
        return model

    monkeypatch.setattr(coco, "detector", smaller)
    return smaller

def loaded(root, name):
    return coco.photos(coco.annotations(root, name), f"{root}/{name}")

# ==== Data ========================================================================================
def test_photos_are_what_the_annotations_say(root):
    """In the order of ids; boxes as corners; without crowds and boxes of no width."""
    found = loaded(root, "train2017")
    assert [photo.image_id for photo in found] == list(range(1, 11))
    assert found[8].boxes == [[6, 30, 32, 54]] and found[8].labels == [SQUARE]
    assert found[9].boxes == [] and found[9].labels == []
    assert found[3].path == f"{root}/train2017/000000000004.jpg"

def test_boxes_end_at_the_border(tmp_path):
    write(tmp_path, "val2017", [(1, 64, 48)], [(1, DISC, [40, 30, 24.5, 20], 0)])
    assert loaded(str(tmp_path), "val2017")[0].boxes == [[40, 30, 64, 48]]

def test_flips_move_boxes_with_the_pixels(root):
    images = Loaded(loaded(root, "train2017"), seed=0)
    flips = 0
    for index in range(9):
        still = images[Key(None, index, index, False)]
        assert still[0].shape == (3, 64, 64) and still[4] == ""     # gray ones too
        for epoch in range(4):
            image, boxes, labels, *_ = images[Key(epoch, index, index, False)]
            assert same(labels, still[2])
            left, top, right, bottom = boxes[0].int().tolist()
            inside = image[0, top + 2:bottom - 2, left + 2:right - 2]
            assert inside.min() > 128 and image[0].float().mean() < 255 * 0.2
            assert right - left == 26
            flips += not torch.equal(image, still[0])
            assert torch.equal(image, still[0]) or torch.equal(image.flip(-1), still[0])
    assert 8 < flips < 28
    again = Loaded(images.source, seed=0)[Key(2, 5, 5, False)]
    assert same(list(again), list(images[Key(2, 5, 5, False)]))

def test_pixels_are_as_stored(tmp_path):
    """No turn by EXIF, unlike ser.read_image: COCO's boxes are for the stored pixels."""
    exif = Image.Exif()
    exif[274] = 6
    draw(tmp_path / "a.jpg", [(0, 0, 8, 8)], size=(40, 20), exif=exif)
    photo = Photo(1, str(tmp_path / "a.jpg"), [[0.0, 0, 8, 8]], [3])
    image, *_ = Loaded([photo], 0)[Key(None, 0, 0, False)]
    assert image.shape == (3, 20, 40) and ser.read_image(photo.path).shape == (3, 40, 20)

def test_a_broken_file_is_named_and_teaches_nothing(tmp_path):
    photo = Photo(1, str(tmp_path / "a.jpg"), [[1.0] * 4] * 2, [1, 1])
    _, boxes, labels, number, name = Loaded([photo], 0)[Key(0, 0, 0, False)]
    assert number == 1 and len(boxes) == len(labels) == 0 and name.startswith(photo.path)

# ==== Detector ====================================================================================
def test_the_pyramid_is_five_maps_of_the_normalised_last_map(path):
    """4, 2, 1, 1/2 and 1/4 times the token grid, of any image; position codes are resized to it."""
    encoder = ser.load_encoder(path)
    pyramid = Pyramid(encoder)
    x = torch.rand(1, 3, 128, 192, generator=seeded())
    maps = pyramid(x)
    assert {name: tuple(m.shape[1:]) for name, m in maps.items()} == {
        "0": (256, 32, 48), "1": (256, 16, 24), "2": (256, 8, 12), "3": (256, 4, 6),
        "pool": (256, 2, 3)}
    assert maps["0"].dtype == torch.float32 and same(maps["pool"], maps["3"][:, :, ::2, ::2])
    pyramid.levels["2"] = torch.nn.Identity()
    with torch.no_grad():
        encoder.norm.weight.normal_(generator=seeded(1))
        last = encoder([x], (3,))[0].maps[3]
        tokens = F.layer_norm(last.flatten(2).mT, (32,), encoder.norm.weight, None, 1e-6)
    close(pyramid(x)["2"].flatten(2).mT, tokens)

def test_each_place_of_a_map_is_normalised_over_its_channels():
    x = torch.randn(2, 4, 3, 5, generator=seeded())
    norm = MapNorm(4, eps=1e-6)
    close(norm(x), (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True, correction=0), 1e-4)

def test_the_encoder_stays_frozen(path):
    cfg = Settings(**QUICK)
    model = detector(ser.load_encoder(path), 91, cfg).train()
    encoder = model.backbone.encoder
    assert model.training and not any(module.training for module in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())
    others = [p for name, p in model.named_parameters() if ".encoder." not in name]
    assert all(p.requires_grad for p in others) and len(others) > 20
    again = detector(ser.load_encoder(path), 91, cfg)
    assert same(dict(again.state_dict()), dict(model.state_dict()))

def test_the_detector_is_as_the_settings_say(path):
    cfg = Settings(min_size=48, max_size=80, anchors=(8, 16, 24, 32, 48))
    model = detector(ser.load_encoder(path), 91, cfg)
    assert (model.transform.min_size, model.transform.max_size) == ((48,), 80)
    assert model.rpn.anchor_generator.sizes == ((8,), (16,), (24,), (32,), (48,))
    assert model.roi_heads.box_predictor.cls_score.out_features == 91
    close(torch.tensor(model.transform.image_mean), ser.MEAN.flatten())
    close(torch.tensor(model.transform.image_std), ser.STD.flatten())
    # Images are padded to places of the coarsest level, so that anchors are as far apart as these.
    for patch_size, divisible in ((8, 32), (16, 64), (64, 256)):
        wide = detector(tiny_encoder(patch_size), 91, cfg)
        assert wide.transform.size_divisible == divisible
    with pytest.raises(ser.UserError, match="14 pixels"):     # of which torchvision makes 1/16
        detector(tiny_encoder(patch_size=14), 91, cfg)
    assert model.eval()([torch.rand(3, 50, 61)])[0]["boxes"].shape[1] == 4

def test_the_schedule_is_that_of_45k_iterations():
    cfg = Settings()
    steps = (0, 499, 999, 29_999, 30_000, 39_999, 40_000, 44_999)
    found = torch.tensor([cfg.lr_at(step, 117_266) for step in steps])
    close(1e4 * found, torch.tensor([0.001, 0.5, 1, 1, 0.1, 0.1, 0.01, 0.01]))
    assert cfg.steps(117_266) == 45_000 and cfg.batch_size == 32

# ==== Average precision ===========================================================================
class Oracle(torch.nn.Module):
    """Finds what is there, image by image in the order it is asked."""

    def __init__(self, source):
        super().__init__()
        self.rest = iter(source)

    def forward(self, images):
        found = [next(self.rest) for _ in images]
        return [dict(boxes=torch.tensor(photo.boxes).view(-1, 4), labels=torch.tensor(photo.labels),
                     scores=torch.ones(len(photo.boxes))) for photo in found]

def test_the_ground_truth_has_average_precision_1(root):
    """Through all formats, on one rank as on two; nothing at all has 0."""
    truth = coco.annotations(root, "val2017")
    val = Loaded(loaded(root, "val2017"), 0)
    parts = []
    for ranks in (1, 2):
        for rank in range(ranks):
            oracle = Oracle(val.source[rank::ranks])
            found, broken = coco.detect(oracle, val, Settings(**QUICK), torch.device("cpu"), rank,
                                        ranks)
            assert not broken
            parts.append(found)
    whole, first, second = parts
    assert whole[0] == dict(image_id=100, category_id=SQUARE, score=1.0, bbox=[6, 30, 26, 24])
    assert len(whole) == 5 and sorted(map(str, first + second)) == sorted(map(str, whole))
    assert coco.precision(truth, whole) == {"AP": 1.0, "AP50": 1.0, "AP75": 1.0}
    assert coco.precision(truth, []) == {"AP": 0.0, "AP50": 0.0, "AP75": 0.0}
    shifted = [found | dict(bbox=[found["bbox"][0] + 7, *found["bbox"][1:]]) for found in whole]
    assert coco.precision(truth, shifted) == {     # IoU 19 / 33 = .576: right at .50 and .55
        "AP": pytest.approx(0.2), "AP50": 1.0, "AP75": 0.0}

def test_what_is_found_in_place_of_a_broken_file_does_not_count(root, tmp_path):
    val = loaded(root, "val2017")
    val[0] = val[0]._replace(path=str(tmp_path / "gone.jpg"))
    found, broken = coco.detect(Oracle(val), Loaded(val, 0), Settings(**QUICK), torch.device("cpu"),
                                0, 1)
    assert len(found) == 4 and 100 not in {item["image_id"] for item in found}
    assert [name.startswith(val[0].path) for name in broken] == [True]

# ==== Training ====================================================================================
def test_the_loss_of_a_step_is_torchvisions_own(root, path, tmp_path, small):
    """All train images in one batch, read by torchvision, boxes converted here, one by one."""
    cfg = Settings(data=root, checkpoint=path, out=str(tmp_path / "coco.json"),
                   **QUICK | dict(iterations=1, batch_size=9, lr=0.0))
    result = coco.evaluate(cfg)
    theirs = CocoDetection(f"{root}/train2017", f"{root}/annotations/instances_train2017.json")
    ours = Loaded([photo for photo in loaded(root, "train2017") if len(photo.boxes)], cfg.seed)
    keys = next(ser.batch_keys(9, cfg, 0, 1))
    images = []
    targets = []
    for key in keys:
        image, items = theirs[theirs.ids.index(ours.source[key.index].image_id)]
        x = to_tensor(image)
        boxes = []
        for item in items:
            left, top, width, height = item["bbox"]
            if not item["iscrowd"] and width > 0:
                boxes.append([left, top, left + width, top + height])
        boxes = torch.tensor(boxes).float()
        stored = ours[Key(None, key.index, 0, False)][0]
        if not torch.equal(ours[key][0], stored):
            x = x.flip(-1)
            boxes[:, [0, 2]] = 64 - boxes[:, [2, 0]]
        images.append(x)
        targets.append(dict(boxes=boxes, labels=torch.full((len(boxes),), SQUARE)))
    model = small(ser.load_encoder(path), 91, cfg).train()
    torch.manual_seed(ser.seed_of(cfg.seed, "coco", 0, 0))
    losses = model(images, targets)
    assert sorted(losses) == ["loss_box_reg", "loss_classifier", "loss_objectness",
                              "loss_rpn_box_reg"]
    close(torch.tensor(result["losses"]), sum(losses.values()).detach().view(1), 1e-5)
    assert result["images"] == {"train": 9, "val": 6}

def command(root, path, out, **settings):
    """The command line of a run."""
    argv = ["--data", root, "--checkpoint", path, "--out", str(out)]
    for name, value in (QUICK | settings).items():
        values = value if isinstance(value, tuple) else (value,)
        argv += ["--" + name.replace("_", "-"), *map(str, values)]
    return argv

def test_a_few_steps_find_squares(root, path, tmp_path, capsys, small):
    """The command lifts AP50 above 0, prints the paper's rows, and leaves the encoder as it was."""
    out = tmp_path / "coco.json"
    settings = dict(iterations=30, save_every=15, batch_size=2, lr=2e-3)
    assert coco.main(command(root, path, out, **settings)) == 0
    assert "0.242   0.428   0.244" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert result["AP50"] > 0.05 and len(result["losses"]) == 2
    assert result["losses"][1] < 0.8 * result["losses"][0]
    before = dict(ser.load_encoder(path).state_dict())
    after = ser.load_checkpoint(tmp_path / "coco.pt")["model"]
    assert same({name: after[f"backbone.encoder.{name}"] for name in before}, before)

def test_a_break_changes_nothing(root, path, tmp_path, monkeypatch, small):
    """Equal to the last bit."""
    save = ser.save_whole

    def save_and_stop(path, state):
        save(path, state)
        raise KeyboardInterrupt

    settings = dict(iterations=4, save_every=2, batch_size=2)
    assert coco.main(command(root, path, tmp_path / "whole.json", **settings)) == 0
    argv = command(root, path, tmp_path / "parts.json", **settings)
    with monkeypatch.context() as patch:
        patch.setattr(ser, "save_whole", save_and_stop)
        assert coco.main(argv) == 130
    assert ser.load_checkpoint(tmp_path / "parts.pt")["step"] == 2
    assert coco.main(argv) == 0
    whole, parts = (ser.load_checkpoint(tmp_path / f"{name}.pt") for name in ("whole", "parts"))
    assert same(whole["model"], parts["model"]) and whole["losses"] == parts["losses"]

# ==== Mistakes ====================================================================================
@pytest.mark.parametrize("argv, line", [
    ([], "--data: the folder of COCO 2017 is needed"),
    (["--data", "nowhere"], "give the folder that holds annotations/, train2017/ and val2017/"),
    (["--data", "ROOT", "--anchors", "8", "16"], "--anchors 8 16: give five, one for each level"),
    (["--data", "ROOT"], "--batch-size 32: of 9 images; try 9")])
def test_mistakes_are_one_line(argv, line, root, path, capsys):
    argv = [root if word == "ROOT" else word for word in argv]
    assert coco.main(["--checkpoint", path, *argv]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and line in error[0]
    assert error[0].startswith("-m paper.evaluations.coco: ")

def test_a_missing_pycocotools_is_one_line(root, path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    assert coco.main(["--data", root, "--checkpoint", path]) == 2
    assert "pycocotools: pip install -r paper/requirements.txt" in capsys.readouterr().err
