import json

import pytest
import torch
import torch.nn.functional as F
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

import eval_linear
import ser
from paper.evaluations import segmentation
from paper.evaluations.segmentation import CLASSES, score, shares, tokens, train_head
from paper.tests.toys import call, toy_checkpoint, values
from test_ser import close, noise, pixels, same, seeded, write_image


def street(root, n, seed):
    """n photographs 16 x 24 whose patches of 4 x 4 have the colour of their class, or none."""
    names = torch.randint(CLASSES + 1, (n, 4, 6), generator=seeded(seed))
    colours = pixels(CLASSES + 1, 3, 1, 1, seed=9)[:, :, 0, 0]
    for number, label in enumerate(names.repeat_interleave(4, 1).repeat_interleave(4, 2)):
        write_image(root / f"{number}.png", colours[label].movedim(2, 0))
        write_image(root.with_name(root.name + "annot") / f"{number}.png", label[None].byte())
    return names


def test_the_head_is_asked_about_photographs_after_each_turn(tmp_path, monkeypatch):
    encoder = ser.load_encoder(toy_checkpoint(tmp_path))
    images = pixels(18, 3, 8, 16)
    x = ser.normalise(torch.rot90(images, 3, (2, 3)) / 255)
    wanted = torch.rot90(eval_linear.map_after(encoder, 3, x), 1, (2, 3)).movedim(1, 3)
    close(tokens(encoder, images, 3), wanted.detach())

    street(tmp_path / "train", 40, 1)
    street(tmp_path / "test", 3, 2)
    line = f"--data {tmp_path} --checkpoint {tmp_path}/last.pt --size 16 24"
    assert segmentation.settings(line.split()[:4]).size == [352, 480]
    seen = []
    heads = []

    def record(x, y, seed):
        seen.append(x)
        heads.append(train_head(x, y, seed))
        return heads[-1]

    monkeypatch.setattr(segmentation, "train_head", record)
    call(segmentation, line, "--turn")
    photographs, _, _ = segmentation.load(tmp_path / "train", (16, 24))
    for i in (0, 1, 2, 7):
        one = tokens(encoder, photographs[i:i + 1], i % 4)
        close(seen[0].unflatten(0, (40, 4, 6))[i], one[0], 1e-4)

    call(segmentation, line)
    photographs, labels, _ = segmentation.load(tmp_path / "test", (16, 24))
    for turns in range(4):
        wanted = score(heads[-1], tokens(encoder, photographs, turns), labels)
        name = f"test turned {90 * turns}"
        assert values(tmp_path / "segmentation.json", set=name) == pytest.approx(wanted)
    upright = values(tmp_path / "segmentation.json", set="test turned 0", block=3)
    assert upright["pixel accuracy %"] > 60     # 9 by chance
    images = json.loads((tmp_path / "segmentation.json").read_text())["rows"][0]["images"]
    names = ser.checksum(["0.png", "1.png", "2.png"])
    assert images.startswith("train: 40 images") and f", test: 3 images {names}" in images


def test_labels_are_those_of_a_pixel_no_colours_and_at_most_eleven(tmp_path):
    names = street(tmp_path / "train", 3, 1)
    images, labels, _ = segmentation.load(tmp_path / "train", (4, 6))
    assert labels.equal(names)     # resized, and no mixtures
    image = ser.read_image(str(tmp_path / "train/1.png"))
    assert images[1].equal(resize(image, (4, 6), InterpolationMode.BICUBIC))

    for wrong in (torch.full((1, 8, 8), 12), torch.full((3, 8, 8), 1)):
        write_image(tmp_path / "trainannot" / "0.png", wrong.byte())
        with pytest.raises(ValueError, match="0.png: its pixels"):
            segmentation.load(tmp_path / "train", (4, 6))

    (tmp_path / "train" / "0.png").rename(tmp_path / "train" / "0.jpg")     # whose labels are .png
    with pytest.raises(FileNotFoundError, match="0.jpg"):
        segmentation.load(tmp_path / "train", (4, 6))


def test_a_head_is_trained_with_a_cosine(monkeypatch):
    rates = []
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda adamw: rates.append(adamw.param_groups[0]["lr"]))
    train_head(noise(8, 4), torch.ones(8, CLASSES) / CLASSES, 0)
    assert [rates[step] for step in (0, 250, 499)] == pytest.approx([1e-2, 5e-3, 0], abs=1e-6)


def test_a_head_learns_the_share_of_each_class_in_a_patch():
    labels = torch.full((1, 4, 8), CLASSES)
    labels[0, :, :3] = 2
    labels[0, 0, 3] = 5
    y = shares(labels, 4)
    assert y.shape == (1, 1, 2, CLASSES) and y[0, 0, 1].eq(0).all()
    assert (y[0, 0, 0, [2, 5]] * 16).tolist() == [12, 1]

    y[0, 0, 1, 7] = 1 / 16
    x = 100 + 50 * torch.tensor([[1.0], [-1.0]])
    head, same_head, other = [train_head(x, y[0, 0], seed) for seed in (0, 0, 1)]
    assert same(head.state_dict(), same_head.state_dict())
    assert not same(head.state_dict(), other.state_dict())
    p = head(x).softmax(1)
    assert not head.training     # it would normalise each image by its own statistics
    assert (p[0, 2] / p[0, 5]).item() == pytest.approx(12, rel=0.1) and p[1].argmax() == 7


def test_scores_count_all_labelled_pixels_together():
    logits = F.one_hot(torch.tensor([[[0, 1]], [[2, 2]]]), CLASSES).float()     # (2, 1, 2, C)
    logits[0, 0, 0, 0] = 4     # and so the third pixel, which lies between both, is of class 0
    labels = torch.tensor([[[0, 0, 1, 11]], [[2, 2, 2, 0]]])
    found = score(torch.nn.Identity(), logits, labels)
    assert found == pytest.approx({
        "pixel accuracy %": 100 * 5 / 7, "mIoU %": 100 * (2 / 4 + 0 + 3 / 4) / 3})
