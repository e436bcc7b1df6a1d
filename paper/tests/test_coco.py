import json
from functools import partial

import pytest
import torch

import eval_linear
import ser
from paper.evaluations import coco
from paper.tests.toys import become_rank, call, stopped_after_3, toy_checkpoint, values
from test_ser import close, same, sentence, write_image

pytest.importorskip("pycocotools")
CHANNELS = {3: 0, 90: 2}     # red and blue squares; COCO's categories have gaps, too


def write_split(root, name, objects):
    """32 x 32 pixels, ids go down. objects: category, box, if a crowd, then of the image before."""
    index = {"images": [], "annotations": [], "categories": [{"id": 3}, {"id": 90}]}
    for number, (category, box, crowd) in zip(range(len(objects), 0, -1), objects):
        left, top, width, height = box
        picture = torch.zeros(3, 32, 32, dtype=torch.uint8)
        picture[CHANNELS[category], top:top + height, left:left + width] = 255
        file = f"{number:012}.png"
        write_image(root / name / file, picture)
        index["images"].append(dict(id=number, file_name=file, width=32, height=32))
        index["annotations"].append(dict(
            id=number, image_id=number + crowd, category_id=category, bbox=box,
            area=width * height, iscrowd=crowd))

    (root / "annotations").mkdir(exist_ok=True)
    (root / f"annotations/instances_{name}.json").write_text(json.dumps(index))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    smaller = partial(coco.FasterRCNN, rpn_post_nms_top_n_train=50, rpn_post_nms_top_n_test=20)
    monkeypatch.setattr(coco, "FasterRCNN", smaller)
    monkeypatch.setattr(coco.Pyramid, "out_channels", 16)


def test_the_recipe_is_the_papers_45k_iterations_of_32_images():
    args = coco.settings("--data D --checkpoint C".split())
    recipe = dict(iterations=45000, batch_size=32, base_lr=1e-4, size=800, save_every=500)
    assert recipe.items() <= vars(args).items()
    rates = {499: 5e-5, 29999: 1e-4, 30000: 1e-5, 39999: 1e-5, 40000: 1e-6}
    assert {step: coco.lr_at(step, args) for step in rates} == pytest.approx(rates)


def test_a_patch_size_that_torchvision_would_round_is_refused():
    assert "patch size is 14" in sentence(coco.detector, ser.Namespace(patch_size=14), 3, None)


def test_a_small_detector_finds_squares(tmp_path, capsys):
    path = toy_checkpoint(tmp_path, image_size=32, dim=48)
    objects = [(category, [i % 5 * 4, i % 7 * 2, side, side], 0)
               for i, (category, side) in enumerate(70 * [(3, 8), (90, 16)])]
    write_split(tmp_path, "train2017", objects)
    write_split(tmp_path, "val2017", objects[:10] + 10 * [(3, [5, 5, 0, 9], 0)])     # never found
    line = f"--data {tmp_path} --checkpoint {path} --size 32 --iterations 100 --batch-size 3"
    call(coco, line, "--base-lr 2e-3")

    assert "0.242   0.428   0.244" in capsys.readouterr().out     # the paper's SER
    found = values(tmp_path / "coco.json", set="val2017", classes=2, ranks=1)
    assert found["AP50"] == pytest.approx(2 / 3, abs=0.06)
    row, *_ = eval_linear.read_results(tmp_path / "coco.json")["rows"]
    assert len(set(row["images"].split()[-2:])) == 2     # the boxes of both splits

    boxes = "[0, 0, 8, 8]", "[0, 0, 9, 9]", "coco_boxes"
    ids = '"id": 90}', '"id": 0}', "categories"     # first of one split, then of both
    for name, (old, new, told) in (("train", boxes), ("train", ids), ("val", ids)):
        index = tmp_path / f"annotations/instances_{name}2017.json"
        index.write_text(index.read_text().replace(old, new))
        assert told in sentence(call, coco, line, "--base-lr 2e-3")


def test_a_stopped_training_goes_on_and_ranks_share_its_images(tmp_path, monkeypatch):
    path = toy_checkpoint(tmp_path, image_size=32)
    objects = [(3, [0, 30, n, 9], 0) for n in range(1, 9)]
    objects += [(3, [5, 5, 9, 9], 1), (3, [5, 5, 0, 9], 0), (3, [5, 5, 9, 0], 0)]
    write_split(tmp_path, "train2017", objects)
    line = f"--data {tmp_path} --checkpoint {path} --workers 0 --size 32 --iterations 4"
    args = coco.settings(f"{line} --batch-size 4 --save-every 2".split())
    assert len(coco.photos(args, "train2017", train=False)) == 11     # also without objects
    seen = []     # of each image its width, if it was flipped, the seed of flips and proposals

    def look(_, given):
        for image, target in zip(*given):
            (left, top, right, bottom), = target["boxes"].int().tolist()     # and no crowd
            assert image[0, 31].nonzero().flatten().tolist() == [*range(left, right)]
            assert (top, bottom, image.max()) == (30, 32, 1)
            seen.append([right - left, left > 0, torch.initial_seed()])

    def train(name):
        seen.clear()
        model = coco.detector(ser.load_encoder(path), 91, args).train()
        model.register_forward_pre_hook(look)
        data = coco.photos(args, "train2017", train=True)
        coco.train(model, data, args, {}, tmp_path / f"{name}.pt")
        widths, flips, seeds = torch.tensor(seen).T
        return widths, flips, seeds.unique().tolist(), model.state_dict()

    whole, flips, seeds, weights = train("whole")
    first, second = whole.view(2, 8).tolist()
    assert sorted(first) == sorted(second) == [*range(1, 9)]
    assert set(flips.view(4, 4).sum(1).tolist()) - {0, 4}     # images of a step
    assert len(seeds) == 4 and ser.seed_of(0, "coco", 3, 0) in seeds
    group, = ser.load_checkpoint(tmp_path / "whole.pt")["optimizer"]["param_groups"]
    assert (group["lr"], group["weight_decay"]) == (coco.lr_at(3, args), 0.1)

    with stopped_after_3(monkeypatch):
        train("parts")
    widths, *_, parts = train("parts")
    assert widths.tolist() == second and same(parts, weights)

    shares, drawn, calls = [], set(), []
    monkeypatch.setattr(ser, "log_and_check", lambda *_: calls.append("sums"))
    for rank in range(2):
        become_rank(monkeypatch, rank)
        monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel",
                            lambda model: lambda *given: calls.append("DDP") or model(*given))
        widths, _, seeds, _ = train(f"rank{rank}")
        drawn |= set(seeds)
        shares.append(widths.view(4, 2))
    assert len(drawn) == calls.count("DDP") == 2 * calls.count("sums") == 8
    assert same(torch.cat(shares, dim=1).sort().values, whole.view(4, 4).sort().values)


def test_the_ground_truth_has_average_precision_1(tmp_path, monkeypatch):
    """And nothing at all 0. 7 of 26 pixels aside, IoU is .576: right at two of ten thresholds."""
    write_split(tmp_path, "val2017", [(3, [0, 2, 26, 24], 0), (90, [4, 2, 26, 24], 0)])
    args = coco.settings(f"--data {tmp_path} --checkpoint C --workers 0".split())
    val = coco.photos(args, "val2017", train=False)

    def precision(shift, n=1):
        def detector(images):
            left, label = (shift, 3) if images[0][0].any() else (shift + 4, 90)
            boxes = torch.tensor([[left, 2.0, left + 26, 26]])[:n]
            return [dict(boxes=boxes, labels=torch.full((n,), label), scores=torch.ones(n))]

        return [*coco.precision(detector, val, torch.device("cpu"), args).values()]

    assert [*precision(0), *precision(7)] == pytest.approx([1, 1, 1, 0.2, 1, 0])
    assert precision(0, n=0) == [0, 0, 0]

    gathered = []

    def gather(parts, own):
        gathered.append(own)
        parts[:] = gathered

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    for rank in (1, 0):
        become_rank(monkeypatch, rank)
        found = precision(0)
    assert [[one["image_id"] for one in own] for own in gathered] == [[2], [1]]
    assert found == pytest.approx([1, 1, 1])


def test_the_pyramid_is_five_maps_of_the_normalised_last_map(tmp_path, monkeypatch):
    """Of a frozen encoder. With patches of 4, anchors have 8 to 128 pixels, coarsest cells 16."""
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    model = coco.detector(encoder, 91, ser.Namespace(size=32, seed=0))
    other = coco.detector(encoder, 91, ser.Namespace(size=32, seed=1))
    assert not same(model.state_dict(), other.state_dict())
    assert model.roi_heads.box_roi_pool.scales == [1, 0.5, 0.25, 0.125]     # before any image
    change = model.transform
    assert (change.min_size, change.max_size, change.size_divisible) == ((32,), 53, 16)
    normal = torch.stack([ser.MEAN, ser.STD]).flatten(1)
    close(torch.tensor([change.image_mean, change.image_std]), normal)
    assert model.rpn.anchor_generator.sizes == [(8,), (16,), (32,), (64,), (128,)]
    assert model.rpn.anchor_generator.aspect_ratios == 5 * [(0.5, 1.0, 2.0)]
    assert not any(p.requires_grad for p in encoder.parameters())
    x = torch.rand(1, 3, 32, 48)
    assert [found.shape[2] for found in model.backbone(x).values()] == [32, 16, 8, 4, 2]

    assert len({level[n] for level in model.backbone.levels for n in (2, 4)}) == 8     # norms
    assert model.backbone.levels[0][0][0] is not model.backbone.levels[1][0]
    assert [type(layer).__name__ for layer in model.backbone.levels[0][0]] == [
        "ConvTranspose2d", "LayerNorm2d", "GELU", "ConvTranspose2d"]
    model.backbone.levels[2] = torch.nn.Identity()
    close(model.backbone(x)["2"], eval_linear.map_after(encoder, 3, x))
    monkeypatch.setattr(eval_linear, "autocast", lambda x: torch.autocast("cpu", torch.bfloat16))
    assert model.backbone(x)["0"].dtype == torch.float32
