"""What paper/evaluations/robustness.py promises of ImageNet-C and -P, of turned images, of heads,
and of a C made here."""
import itertools
import json
from argparse import Namespace
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


def test_means_are_over_severities_and_then_over_the_columns_that_are_there():
    """Of the paper's rows, too. 100.00 does not touch its neighbour, "nan" is what is missing."""
    def lines(kind, results):
        return [line.split() for line in table(kind, results, 1000).splitlines()]

    results = {}
    for place, name in enumerate(SETS["C"]):
        corruption, severity = divmod(place, 5)
        results[name] = (2.0 * corruption + severity, 100.0)
    whole = lines("C", results)
    assert list(map(float, whole[3][1:])) == [*range(2, 32, 2), 16.0]
    assert whole[7][1:] == ["100.00"] * 16 and (whole[5][-1], whole[9][-1]) == ("40.58", "63.53")
    del results["gaussian_noise/3"]
    part = lines("C", results)
    assert "14" in part[1] and part[3][1::15] == ["nan", "17.00"]
    part = lines("P", {"tilt": (50, 60), "scale": (70, 80)})
    assert part[3] == ["here"] + ["nan"] * 11 + ["50.00", "70.00", "nan", "60.00"]
    assert part[4][-1] == "56.38"     # MoCo-v3's 67.58 and 45.18


# ==== Images =============================================================================
TURNS = {90: Image.ROTATE_90, 180: Image.ROTATE_180, 270: Image.ROTATE_270}


def test_images_are_scored_as_those_of_val(tmp_path):
    """By eval_linear's own head: unaltered images of C as they are, in archives side by side or in
    folders, have the accuracy of val; and turned ones that of images that Pillow turned."""
    path = toy_checkpoint(tmp_path)
    for part, per_class in (("train", 4), ("val", 7)):
        class_folders(tmp_path / "data" / part, per_class, 24)
    eval_linear.main(["--data", f"{tmp_path}/data", "--checkpoint", path, "--epochs", "20",
                      "--cache", "--workers", "0"])
    val = eval_linear.class_folder(tmp_path / "data/val", eval_linear.eval_transform(16))
    for number, (image, label) in enumerate(val):
        upright = TF.to_pil_image(image)
        pictures = {"snow/1": upright, "weather/fog/2": upright}
        if label == 0:
            pictures["contrast/3"] = upright
        for severity, turn in enumerate(TURNS.values(), start=1):
            pictures[f"frost/{severity}"] = upright.transpose(turn)
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
    assert found("C/snow/1") == found("C/fog/2") == pytest.approx(probe, abs=0.01)
    assert found("C/contrast/3")[0] < 100     # as among the only class that is there
    for severity, degrees in enumerate(TURNS, start=1):
        assert found(f"turned/{degrees}") == found(f"C/frost/{severity}") != probe, degrees


# ==== Heads ==============================================================================
@pytest.fixture
def line(tmp_path):
    """A command on one set of images, and a checkpoint without a head."""
    class_folders(tmp_path / "c" / "fog" / "1")
    path = toy_checkpoint(tmp_path / "run")
    return ["--checkpoint", path, "--workers", "0", "--c", tmp_path / "c"]


def rows_of(folder):
    return json.loads(Path(folder, "robustness.json").read_text())["rows"]


def test_rows_name_the_head_that_is_found_beside_the_checkpoint_or_the_results(line, tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    head = Path(toy_head(line[1]))
    call(robustness, *line)
    made = rows_of(run)[0]["head"]
    wanted = dict(lr=0.1, rates=[0.1, 1.0], epochs=9, cached=True, seed=4)
    assert made == wanted | {"fingerprint": made["fingerprint"]}
    out.mkdir()
    head.rename(out / "head-moved.pt")
    call(robustness, *line, "--out", out)
    assert rows_of(out)[0]["head"] == made


def test_a_head_must_fit_and_be_the_only_one_and_others_replace_nothing(line, tmp_path):
    """Of two checkpoints in a folder, each has a head and rows of its own."""
    run = tmp_path / "run"
    assert "eval_linear.py" in sentence(call, robustness, *line)
    one = toy_head(line[1], "head-one.pt")
    call(robustness, *line)
    first = rows_of(run)
    Path(toy_checkpoint(tmp_path / "other", seed=1)).rename(run / "finetune.pt")
    other = ["--checkpoint", run / "finetune.pt", *line[2:]]
    assert one in sentence(call, robustness, *other, "--head", one)
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
    (tmp_path / "c" / "fog" / "2").mkdir()     # without images
    with pytest.raises(FileNotFoundError):
        call(robustness, *line)
    rows = rows_of(tmp_path / "run")
    for flag in ("--c", "--p", "--turned"):
        assert "/typo" in sentence(call, robustness, *line, flag, tmp_path / "typo"), flag
    assert rows_of(tmp_path / "run") == rows


# ==== A C made here ======================================================================
@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that makes a C of three sets and returns its files, and a val folder."""
    pytest.importorskip("imagecorruptions")
    monkeypatch.setitem(SETS, "C", ["gaussian_noise/1", "gaussian_noise/5", "impulse_noise/5"])
    data = class_folders(tmp_path / "val", 3, 48, classes=CLASSES[:2])
    Path(data, ".DS_Store").touch()
    Path(data, "n00/.DS_Store").touch()

    def make(folder, seed=0):
        robustness.make(str(tmp_path / folder), data, per_class=2, seed=seed)
        paths = sorted(Path(tmp_path, folder).glob("*/*/*/*"))
        return {str(path.relative_to(tmp_path / folder)): path.read_bytes() for path in paths}

    return make, data


def test_a_made_c_has_its_layout_its_own_numbers_and_its_size(made, tmp_path, monkeypatch):
    make, data = made
    first = make("a")
    files = ["n00/000", "n00/002", "n01/001", "n01/003"]
    assert list(first) == [f"{name}/{file}.JPEG" for name in SETS["C"] for file in files]
    assert first == make("b") and not set(first.values()) & set(make("c", seed=1).values())
    clean = eval_linear.eval_transform(224)(ser.read_image(f"{data}/n00/000.png")).float()
    mild, strong = [(ser.read_image(f"{tmp_path}/a/{name}/n00/000.JPEG") - clean).abs().mean()
                    for name in SETS["C"][:2]]
    assert 5 < mild < 0.7 * strong
    monkeypatch.setattr(robustness.Image.Image, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):     # stopped: what is there is complete
        make("d")
    assert not (tmp_path / "d").exists()


def test_two_processes_that_make_a_c_do_not_meet(made, tmp_path, monkeypatch):
    """One begins and ends while the other has made the first image. Its images stay."""
    make, _ = made
    inner = []

    def one_by_one(sources, _):
        yield sources[0]
        if not inner:
            inner.append({})
            inner[0] = make("c", seed=1)
        yield from sources[1:]

    monkeypatch.setattr(robustness, "tqdm", one_by_one)
    assert make("c", seed=0) == inner[0] and len(inner[0]) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "val"]


# ==== ImageNet-P =========================================================================
def videos(root, names):
    """Two videos of six frames for each of three classes, in the layout of P, as mp4 without loss
    but that of the colour space; the last has the frames that are returned, beside root."""
    av = pytest.importorskip("av")
    for number, (name, label, k) in enumerate(itertools.product(names, CLASSES[1:4], "vw")):
        path = Path(root, f"group-{name}", name, label, f"{k}.mp4")
        path.parent.mkdir(parents=True, exist_ok=True)
        colours = torch.randint(256, (6, 3, 4, 4), generator=seeded(number), dtype=torch.uint8)
        frames = F.interpolate(colours, (16, 16))
        with av.open(str(path), "w") as file:
            stream = file.add_stream("libx264", rate=1, options={"qp": "0"})
            stream.height = stream.width = 16
            stream.pix_fmt = "yuv444p"
            for frame in frames.permute(0, 2, 3, 1).numpy().copy():
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            file.mux(stream.encode())
    return str(root), frames


def test_p_is_scored_as_by_one_frame_at_a_time(tmp_path, monkeypatch):
    """By one process; and two ranks share the videos."""
    root, frames = videos(tmp_path / "p", ["gaussian_noise", "tilt"])
    read = robustness.read_video(f"{root}/group-tilt/tilt/{CLASSES[3]}/w.mp4")
    assert (read.int() - frames.int()).abs().max() <= 4
    path = toy_checkpoint(tmp_path)
    encoder = ser.load_encoder(path)
    weight = torch.load(toy_head(path), weights_only=True)["weight"]
    call(robustness, "--checkpoint", path, "--p", root, "--workers", "0")
    for name in ("gaussian_noise", "tilt"):
        sums = torch.zeros(2)
        for video in Path(root).glob(f"*/{name}/*/*.mp4"):
            label = torch.tensor([CLASSES.index(video.parent.name)])
            for frame in robustness.read_video(str(video)):
                logits = eval_linear.cls_features(encoder, frame[None], 2) @ weight.T
                sums += torch.tensor(eval_linear.accuracy(logits, label, torch.arange(6))) / 36
        found = [*values(tmp_path / "robustness.json", set=f"P/{name}").values()]
        assert found == pytest.approx(sums.tolist()), name

    linear = torch.nn.Linear(32, 6, bias=False).requires_grad_(False)
    linear.weight.copy_(weight)
    head = Namespace(linear=linear, blocks=2, classes=CLASSES)
    sums = torch.zeros(2)
    for rank in range(2):
        become_rank(monkeypatch, rank)
        sums += torch.tensor(robustness.score_videos(
            encoder, head, Path(root, "group-tilt/tilt"), Namespace(workers=0)))
    assert found == pytest.approx(sums.tolist())
