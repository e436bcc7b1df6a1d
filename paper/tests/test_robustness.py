import pytest
import torch

import eval_linear
import ser
from paper.evaluations import robustness
from paper.tests.toys import CLASSES, become_rank, call, class_folders, images_in, parsed
from paper.tests.toys import toy_checkpoint, train_and_val, values
from test_ser import TF, evaluate_by, noise, pixels, sentence, write_image


def toy_head(checkpoint, name="head-toy.pt"):
    path = ser.Path(checkpoint).with_name(name)
    weights = eval_linear.fingerprint(ser.load_encoder(checkpoint))
    ser.save(path, weight=noise(6, 32, seed=3), bias=noise(6, seed=4), classes=CLASSES, lr=0.1,
             weights=weights, settings={"lr": [0.1, 1.0]}, images="train: 9 images")
    return str(path)


def test_means_are_over_severities_and_then_over_the_columns_that_are_there():
    told = robustness.table("P", {"tilt": (1, 2)}, 9).partition("tilt")[2]
    assert told.split()[:7] == ["1.00", "2.00", "67.58", "68.60", "87.48", "88.17", "scale"]
    results = {name: (float(place), 90.0) for place, name in enumerate(robustness.SETS["C"])}
    del results["gaussian_noise/3"]
    results["snow/5"] = (89.0, 90.0)     # in place of 39
    lines = robustness.table("C", results, 9).splitlines()
    assert lines[1].split() == ["top-1", "top-5"] + 2 * ["MoCo-v3", "SER"]
    found = {name: cells for name, *cells in map(str.split, lines)}
    assert found["fog"] == ["47.00", "90.00", "35.02", "36.04", "58.64", "60.49"]
    assert found["snow"] == ["47.00", "90.00", "30.61", "30.71", "52.52", "53.23"]
    names = ("motion_blur", "zoom_blur", "elastic_transform", "pixelate", "jpeg_compression")
    assert [found[name][2] for name in names] == ["31.49", "25.86", "54.65", "55.78", "53.37"]
    assert found["mean"][:5] == ["of", "14", "40.21", "90.00", "39.49"]


def test_images_are_scored_as_those_of_val(tmp_path, capsys):
    path = toy_checkpoint(tmp_path)
    train_and_val(tmp_path / "data", 4, 7, size=24, seed=5)
    evaluate_by(path, f"--data {tmp_path}/data --epochs 20 --cache --workers 0")
    for number, (image, label) in enumerate(images_in(tmp_path / "data/val")):
        file = f"{CLASSES[label]}/{number}.png"
        for turns, name in enumerate(("snow", "frost", "fog", "brightness")):
            write_image(tmp_path / "c" / name / "1" / file, image.rot90(turns, (1, 2)))
        write_image(tmp_path / "c/contrast" / ("3" if label == 5 else "4") / file, image)

    call(robustness, f"--checkpoint {path} --kind turned --data {tmp_path}/data/val")
    call(robustness, f"--checkpoint {path} --kind C --data {tmp_path}/c")

    def found(name):
        return values(tmp_path / "robustness.json", set=name)

    probe = values(tmp_path / "eval.json")
    del probe["20-NN top-1 %"]
    assert 25 < probe["linear top-1 %"] < 100
    assert found("C/snow/1") == pytest.approx(probe, abs=0.01)
    one, others = [found(f"C/contrast/{n}")["linear top-1 %"] for n in (3, 4)]
    assert (one + 5 * others) / 6 == pytest.approx(probe["linear top-1 %"], abs=0.01)
    for degrees, name in ((90, "frost"), (180, "fog"), (270, "brightness")):
        assert found(f"turned/{degrees}") == found(f"C/{name}/1") != probe
    told = capsys.readouterr().out
    turned = {degrees: [*found(f"turned/{degrees}").values()] for degrees in ("90", "180", "270")}
    assert robustness.table("turned", turned, 6) in told
    assert "['snow/1', 'frost/1', 'fog/1', 'brightness/1']" in told and "['contrast/3'], " in told


def test_a_head_must_be_of_the_encoder_and_the_only_one(tmp_path):
    stranger = toy_head(toy_checkpoint(tmp_path, seed=1), "head-stranger.pt")
    path = toy_checkpoint(tmp_path)     # in place of the stranger's

    def load(*flags):
        args = parsed(robustness, f"--checkpoint {path} --kind C --data C", *flags)
        return robustness.load_head(args, eval_linear.read_checkpoint(args))

    one = toy_head(path, "head-one.pt")
    assert "eval_linear.py" in sentence(load, "--head", stranger)
    assert load().path == one

    two = toy_head(path, "head-two.pt")
    assert str([one, two]) in sentence(load)
    assert load("--head", two).path == two


def test_a_set_is_written_when_it_is_scored_and_folders_are_looked_for_first(tmp_path):
    class_folders(tmp_path / "c/fog/1")
    (tmp_path / "c/fog/2").mkdir()     # without images
    path = toy_checkpoint(tmp_path)
    toy_head(path)
    line = f"--checkpoint {path} --kind C --data {tmp_path}/c"
    assert "/c/fog" in sentence(call, robustness, f"{line}/fog")

    pytest.raises(FileNotFoundError, call, robustness, line)
    top1, _ = eval_linear.read_results(tmp_path / "robustness.json")["rows"]
    head = dict(lr=0.1, settings={"lr": [0.1, 1.0]}, images="train: 9 images")
    assert head.items() <= top1["head"].items() and top1["block"] == 3


def test_p_is_scored_by_the_mean_over_videos_of_the_mean_over_their_frames(tmp_path, monkeypatch):
    """Two videos (GIFs inside) of each of three classes, of 1 to 6 frames; two ranks share them."""
    pytest.importorskip("av")
    path = toy_checkpoint(tmp_path)
    toy_head(path)
    line = f"--checkpoint {path} --kind P --data {tmp_path} --workers 0"
    args = parsed(robustness, line)
    encoder = eval_linear.read_checkpoint(args).encoder
    head = robustness.load_head(args, eval_linear.read_checkpoint(args))
    scores, resized = [], []
    for number in range(6):
        label = 1 + number // 2
        colours = pixels(1 + number, 3, 4, 4, seed=number)
        frames = colours.repeat_interleave(6, dim=2).repeat_interleave(6, dim=3)
        path = tmp_path / "tilt" / CLASSES[label] / f"{number}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        first, *others = [TF.to_pil_image(frame) for frame in frames]
        first.save(path, "GIF", save_all=True, append_images=others)
        assert torch.equal(robustness.read_video(str(path)), frames)
        resized.append(TF.resize(frames, [16, 16]))
        logits = head.linear(eval_linear.cls_features(encoder, resized[-1]))
        labels = torch.full((len(frames),), label)
        scores.append(eval_linear.accuracy(logits, labels, torch.arange(6)))
    wanted = torch.tensor(scores).mean(0).tolist()

    call(robustness, line)
    assert [*values(tmp_path / "robustness.json", set="P/tilt").values()] == pytest.approx(wanted)
    row, *_ = eval_linear.read_results(tmp_path / "robustness.json")["rows"]
    names = [f"{CLASSES[1 + number // 2]}/{number}.mp4" for number in range(6)]
    assert row["images"].endswith(ser.checksum(names)) and row["classes"] == 6
    assert row["head"]["fingerprint"] == eval_linear.fingerprint(head.linear)

    resize = robustness.transform_of("P", "tilt", encoder)
    sums = torch.zeros(2)
    for rank in range(2):
        become_rank(monkeypatch, rank)
        own, videos = robustness.score_videos(encoder, head, tmp_path / "tilt", resize, args)
        sums += torch.tensor(own)
    assert (sums / 10).tolist() == pytest.approx(wanted)
    for (frames, _), plain in zip(videos, resized, strict=True):
        assert (frames.int() - plain).abs().max() <= 1
