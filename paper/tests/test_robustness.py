"""What paper/evaluations/robustness.py promises."""
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision.transforms.functional as TF
from PIL import Image

import eval_linear
import ser
from paper.evaluations import robustness
from paper.evaluations.robustness import SETS, table
from paper.tests.toys import (CLASSES, become_rank, call, class_folders, toy_checkpoint, toy_head,
                              values)
from test_ser import seeded, sentence


def lines_of(kind, results):
    """The first word of a line -> the others."""
    rows = [line.split() for line in table(kind, results, 9).splitlines()]
    return {row[0]: row[1:] for row in rows}


def test_means_are_over_severities_and_then_over_the_columns_that_are_there():
    """Of the paper's, too; "nan" is what is missing."""
    results = {name: (float(place), 90.0) for place, name in enumerate(SETS["C"])}
    del results["gaussian_noise/3"]
    found = lines_of("C", results)
    assert found["gaussian_noise"][0] == "nan"
    assert found["fog"] == ["47.00", "90.00", "35.02", "36.04", "58.64", "60.49"]
    assert found["mean"][:3] == ["39.50", "90.00", "39.49"]

    found = lines_of("P", {"tilt": (50, 60), "scale": (70, 80)})
    assert found["mean"][:3] == ["60.00", "70.00", "56.38"]     # MoCo-v3's 67.58 and 45.18


# ==== Images =============================================================================
def test_images_are_scored_as_those_of_val(tmp_path):
    """By eval_linear's own head: unaltered images of C, and those that Pillow turned."""
    path = toy_checkpoint(tmp_path)
    for part, per_class in (("train", 4), ("val", 7)):
        class_folders(tmp_path / "data" / part, per_class, 24)
    eval_linear.main(["--data", f"{tmp_path}/data", "--checkpoint", path, "--epochs", "20",
                      "--cache", "--workers", "0"])
    val = eval_linear.class_folder(tmp_path / "data/val", eval_linear.eval_transform(16))
    for number, (image, label) in enumerate(val):
        upright = TF.to_pil_image(image)
        pictures = {"snow/1": upright, "frost/1": upright.transpose(Image.ROTATE_270)}
        if label == 0:
            pictures["contrast/3"] = upright
        for name, picture in pictures.items():
            folder = tmp_path / "c" / name / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{number}.png")

    call(robustness, "--checkpoint", path, "--workers", "0", "--c", tmp_path / "c",
         "--turned", tmp_path / "data/val")

    def found(name):
        return [*values(tmp_path / "robustness.json", set=name).values()]

    probe = [values(tmp_path / "eval.json")[f"linear top-{k} %"] for k in (1, 5)]
    assert 25 < probe[0] < 100
    assert found("C/snow/1") == pytest.approx(probe, abs=0.01)
    assert found("C/contrast/3")[0] < 100     # as among the only class that is there
    assert found("turned/270") == found("C/frost/1") != probe


# ==== Heads ==============================================================================
@pytest.fixture
def line(tmp_path):
    """A command on one set of images, and a checkpoint without a head."""
    class_folders(tmp_path / "c" / "fog" / "1")
    path = toy_checkpoint(tmp_path / "run")
    return ["--checkpoint", path, "--workers", "0", "--c", tmp_path / "c"]


def rows_of(folder):
    return json.loads(Path(folder, "robustness.json").read_text())["rows"]


def test_a_head_must_fit_and_be_the_only_one_and_others_replace_nothing(line, tmp_path):
    """Of two checkpoints in a folder, each has a head, which rows name, and rows of its own."""
    run = tmp_path / "run"
    assert "eval_linear.py" in sentence(call, robustness, *line)
    one = toy_head(line[1], "head-one.pt")
    call(robustness, *line)
    first = rows_of(run)
    made = dict(lr=0.1, rates=[0.1, 1.0], epochs=9, cached=True, seed=4)
    assert made.items() <= first[0]["head"].items() and "fingerprint" in first[0]["head"]

    Path(toy_checkpoint(tmp_path / "other", seed=1)).rename(run / "finetune.pt")
    other = ["--checkpoint", run / "finetune.pt", *line[2:]]
    assert "finetune.pt" in sentence(call, robustness, *other, "--head", one)
    two = toy_head(run / "finetune.pt", "head-two.pt")
    call(robustness, *other)
    rows = rows_of(run)
    assert rows[:2] == first and rows[2]["weights"] != first[0]["weights"] and len(rows) == 4

    three = toy_head(line[1], "head-three.pt")
    told = sentence(call, robustness, *line)
    assert one in told and three in told and two not in told and "--head" in told
    assert rows_of(run) == rows


def test_a_set_is_written_when_it_is_scored_and_folders_are_looked_for_first(line, tmp_path):
    toy_head(line[1])
    assert "/typo" in sentence(call, robustness, *line, "--p", tmp_path / "typo")
    assert not (tmp_path / "run/robustness.json").exists()
    (tmp_path / "c" / "fog" / "2").mkdir()     # without images
    with pytest.raises(FileNotFoundError):
        call(robustness, *line)
    assert len(rows_of(tmp_path / "run")) == 2


# ==== A C made here ======================================================================
def test_a_made_c_has_its_layout_its_own_numbers_and_its_size(tmp_path, monkeypatch):
    """Of the first two images of each class; stopped, it leaves nothing under its name."""
    pytest.importorskip("imagecorruptions")
    monkeypatch.setitem(SETS, "C", ["gaussian_noise/1", "gaussian_noise/5", "impulse_noise/5"])
    data = class_folders(tmp_path / "val", 3, 48, classes=CLASSES[:2])

    def make(name, seed=0):
        robustness.make(str(tmp_path / name), data, per_class=2, seed=seed)
        paths = sorted(Path(tmp_path, name).glob("*/*/*/*"))
        return {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in paths}

    first = make("a")
    files = ["n00/000", "n00/002", "n01/001", "n01/003"]
    assert list(first) == [f"{name}/{file}.JPEG" for name in SETS["C"] for file in files]
    assert first == make("b") and not set(first.values()) & set(make("c", seed=1).values())

    clean = eval_linear.eval_transform(224)(ser.read_image(f"{data}/n00/000.png")).float()
    change = []
    for name in SETS["C"]:
        altered = ser.read_image(f"{tmp_path}/a/{name}/n00/000.JPEG")
        change.append((altered - clean).abs().mean())
    assert 5 < change[0] < 0.7 * change[1]

    monkeypatch.setattr(robustness.Image.Image, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make("d")
    assert not (tmp_path / "d").exists()


# ==== ImageNet-P =========================================================================
def write_video(path, frames):
    """An mp4 without loss but that of the colour space."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=1, options={"qp": "0"})
        stream.height = stream.width = 16
        stream.pix_fmt = "yuv444p"
        for frame in frames.permute(0, 2, 3, 1).numpy().copy():
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())


def test_p_is_scored_as_by_one_frame_at_a_time(tmp_path, monkeypatch):
    """Videos of six frames, two of each of three classes, by one process; two ranks share them."""
    line = ["--checkpoint", toy_checkpoint(tmp_path), "--p", str(tmp_path), "--workers", "0"]
    toy_head(line[1])
    args = robustness.settings(line)
    checkpoint = eval_linear.load(args)
    head = robustness.load_head(args, checkpoint, torch.device("cpu"))
    wanted = torch.zeros(2)
    for number in range(6):
        label = torch.tensor([1 + number // 2])
        path = tmp_path / "tilt" / CLASSES[label] / f"{number}.mp4"
        colours = torch.randint(256, (6, 3, 4, 4), generator=seeded(number), dtype=torch.uint8)
        frames = F.interpolate(colours, (16, 16))
        write_video(path, frames)
        read = robustness.read_video(str(path))
        assert (read.int() - frames.int()).abs().max() <= 4
        for frame in read:
            logits = head.linear(eval_linear.cls_features(checkpoint.encoder, frame[None], 2))
            wanted += torch.tensor(eval_linear.accuracy(logits, label, torch.arange(6))) / 36

    call(robustness, *line)
    found = values(tmp_path / "robustness.json", set="P/tilt")
    assert [*found.values()] == pytest.approx(wanted.tolist())

    sums = torch.zeros(2)
    for rank in range(2):
        become_rank(monkeypatch, rank)
        own = robustness.score_videos(checkpoint.encoder, head, tmp_path / "tilt", args)
        sums += torch.tensor(own)
    assert sums.tolist() == pytest.approx(wanted.tolist())
