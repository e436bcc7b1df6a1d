"""What paper/evaluations/coco.py promises, on squares in the layout of COCO."""
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import ser
from paper.evaluations import coco
from paper.tests.toys import become_rank, call, toy_checkpoint, values
from test_ser import close, same, sentence

pytest.importorskip("pycocotools")
COLOURS = {3: (255, 220, 0), 90: (0, 80, 255)}     # of categories, with a gap as COCO's have


def write_split(root, name, objects):
    """A split of images of 32 x 32 pixels, whose ids go down, with an object each: its category,
    its box (left, top, width, height), and whether it is a crowd."""
    index = {"images": [], "annotations": [], "categories": [{"id": 3}, {"id": 90}]}
    Path(root, name).mkdir(parents=True)
    for place, (category, box, crowd) in enumerate(objects):
        number = len(objects) - place
        file = f"{number:012}.png"
        index["images"].append(dict(id=number, file_name=file, width=32, height=32))
        left, top, width, height = box
        index["annotations"].append(dict(
            id=number, image_id=number, category_id=category, bbox=box,
            area=width * height, iscrowd=crowd))
        picture = Image.new("RGB", (32, 32))
        picture.paste(COLOURS[category], (left, top, left + width, top + height))
        picture.save(Path(root, name, file))

    path = Path(root, "annotations", f"instances_{name}.json")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(index))


@pytest.fixture(autouse=True)
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


def test_defaults():
    """The paper's 45k iterations of 32 images: 1,000 of warmup, falls after 30,000 and 40,000."""
    args = coco.settings("--data D --checkpoint C".split())
    recipe = dict(iterations=45000, batch_size=32, base_lr=1e-4, size=800)
    assert recipe.items() <= vars(args).items()
    steps = {499: 5e-5, 29999: 1e-4, 30000: 1e-5, 39999: 1e-5, 40000: 1e-6}
    for step, rate in steps.items():
        assert coco.lr_at(step, args) == pytest.approx(rate), step

    encoder = ser.ViT(32, 16, dim=8, depth=1, heads=1, cls_layer=0)
    model = coco.detector(encoder, 91, args)
    assert model.transform.size_divisible == 64     # a cell of the coarsest map is 4 patches of 16
    anchors = torch.tensor(model.rpn.anchor_generator.sizes)
    assert anchors.flatten().tolist() == [32, 64, 128, 256, 512]


def test_a_small_detector_finds_squares(tmp_path):
    """Of two sizes and categories, with a frozen encoder; not scored for other images."""
    path = toy_checkpoint(tmp_path, shaken=False, image_size=32, patch_size=4, dim=48)
    objects = []
    for i in range(140):
        category, side = ((3, 8), (90, 16))[i % 2]
        objects.append((category, [i % 5 * 4, i % 7 * 2, side, side], 0))
    write_split(tmp_path, "train2017", objects)
    write_split(tmp_path, "val2017", objects[:10])
    line = f"--data {tmp_path} --checkpoint {path} --size 32 --workers 0".split()
    line += "--iterations 72 --batch-size 2 --base-lr 3e-3".split()
    call(coco, *line)

    assert values(tmp_path / "coco.json", set="val2017", classes=2)["AP50"] > 0.9
    state = torch.load(tmp_path / "coco.pt")
    for name, weight in ser.load_encoder(path).state_dict().items():
        assert torch.equal(state["model"][f"backbone.encoder.{name}"], weight), name

    index = tmp_path / "annotations/instances_train2017.json"
    index.write_text(index.read_text().replace("0001.png", "000A.png"))
    assert "checksum" in sentence(call, coco, *line)


def test_a_stopped_training_goes_on_and_ranks_share_its_images(tmp_path, monkeypatch):
    """Images are known by the widths of their boxes; no crowds and no empty boxes."""
    path = toy_checkpoint(tmp_path, image_size=32)
    objects = [(3, [0, 30, n, 9], 0) for n in range(1, 9)]
    objects += [(3, [5, 5, 9, 9], 1), (3, [5, 5, 0, 9], 0)]
    write_split(tmp_path, "train2017", objects)
    line = f"--data {tmp_path} --checkpoint {path} --workers 0 --size 32 --iterations 4"
    args = coco.settings(f"{line} --batch-size 4 --save-every 2".split())
    flips = []

    def train(name):
        steps = []

        def look(_, given):
            widths = []
            for image, target in zip(*given):
                (left, top, right, bottom), = target["boxes"].int().tolist()
                assert (top, bottom) == (30, 32)
                coloured = image[1, 31].nonzero()
                assert coloured.flatten().tolist() == [*range(left, right)]
                widths.append(right - left)
                flips.append(left > 0)
            steps.append(widths)

        model = coco.detector(ser.load_encoder(path), 91, args).train()
        model.register_forward_pre_hook(look)
        data = coco.photos(args, "train2017", train=True)
        coco.train(model, data, args, {}, tmp_path / f"{name}.pt")
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

    become_rank(monkeypatch, 0)
    first, _ = train("rank0")
    become_rank(monkeypatch, 1)
    second, _ = train("rank1")
    for one, other, both in zip(first, second, whole):
        assert sorted(one + other) == sorted(both)


def test_the_ground_truth_has_average_precision_1(tmp_path, monkeypatch):
    """And nothing at all 0. 7 of 26 pixels aside IoU is 19 / 33 = .576, right at .50 and .55 of ten
    thresholds. Two ranks share the images."""
    objects = [(3, [0, 2, 26, 24], 0), (90, [4, 2, 26, 24], 0)]
    write_split(tmp_path, "val2017", objects)
    args = coco.settings(f"--data {tmp_path} --checkpoint C --workers 0".split())
    val = coco.photos(args, "val2017", train=False)

    def precision(shift, n=1, found=((90, 4.0), (3, 0.0))):
        answers = []
        for label, left in found:
            left += shift
            boxes = torch.tensor([[left, 2, left + 26, 26]])[:n]
            labels = torch.tensor([label])[:n]
            answers.append(dict(boxes=boxes, labels=labels, scores=torch.ones(n)))
        images = iter(answers)
        results = coco.precision(lambda _: [next(images)], val, torch.device("cpu"), args)
        return list(results.values())

    assert precision(0) == pytest.approx([1, 1, 1])
    assert precision(7) == pytest.approx([0.2, 1, 0])
    assert precision(0, n=0) == [0, 0, 0]

    seen = []
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda _, own: seen.extend(own))
    for rank in range(2):
        become_rank(monkeypatch, rank)
        precision(0, found=[(3, 0.0)])
    assert [one["image_id"] for one in seen] == [1, 2]


def test_the_pyramid_is_five_maps_of_the_normalised_last_map(tmp_path):
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    pyramid = coco.Pyramid(encoder)
    x = torch.rand(1, 3, 32, 48)
    heights = [found.shape[2] for found in pyramid(x).values()]
    assert heights == [32, 16, 8, 4, 2]

    pyramid.levels[2] = torch.nn.Identity()
    tokens = encoder(x, [3]).maps[3].movedim(1, -1)
    wanted = encoder.norm(tokens).movedim(-1, 1)
    close(pyramid(x)["2"], wanted)
