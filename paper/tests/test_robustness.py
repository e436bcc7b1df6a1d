"""What paper/evaluations/robustness.py promises of ImageNet-C and -P, and of a C made here."""
import itertools
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torchvision.utils import save_image

import eval_linear
import ser
from paper.evaluations import robustness
from paper.evaluations.robustness import SETS, table
from paper.tests.toys import (CLASSES, become_rank, class_folders, seeded, toy_checkpoint, toy_head,
                              values)

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

# ==== ImageNet-C ==================================================================================
def test_unaltered_images_have_the_accuracy_of_val(tmp_path):
    """By eval_linear's own head, on images as they are; archives side by side or in folders."""
    path = Path(toy_checkpoint(tmp_path))
    for part, per_class in (("train", 4), ("val", 7)):
        class_folders(tmp_path / "data" / part, per_class, 24)
    eval_linear.main(["--data", f"{tmp_path}/data", "--checkpoint", str(path), "--epochs", "20",
                      "--cache", "--workers", "0"])
    val = eval_linear.class_folder(tmp_path / "data/val", eval_linear.eval_transform(16))
    for i, (image, label) in enumerate(val):
        for name in ["snow/1", "weather/fog/2"] + ["contrast/3"] * (label == 0):
            folder = tmp_path / "c" / name / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            save_image(image / 255, folder / f"{i}.png")
    robustness.main(["--checkpoint", str(path), "--head", f"{tmp_path}/head-cache.pt",
                     "--workers", "0", "--c", f"{tmp_path}/c"])
    probe = [values(tmp_path / "eval.json")[f"linear top-{k} %"] for k in (1, 5)]
    assert 25 < probe[0] < 100
    snow, fog, contrast = [[*values(tmp_path / "robustness.json", set=f"C/{name}").values()]
                           for name in ("snow/1", "fog/2", "contrast/3")]
    assert snow == fog == pytest.approx(probe, abs=0.01)
    assert contrast[0] < 100     # which it would be among the only class that is there

def test_another_head_and_mistyped_folders_end_the_evaluation_and_replace_nothing(tmp_path):
    path = toy_checkpoint(tmp_path)
    class_folders(tmp_path / "c" / "fog" / "1")
    line = ["--checkpoint", path, "--workers", "0", "--c"]
    with pytest.raises(SystemExit, match="head.pt"):
        robustness.main([*line, f"{tmp_path}/c"])
    toy_head(path)
    (tmp_path / "c" / "fog" / "2").mkdir()     # empty: what was scored before it is written
    with pytest.raises(FileNotFoundError):
        robustness.main([*line, f"{tmp_path}/c"])
    results = (tmp_path / "robustness.json").read_text()
    for typo in ([f"{tmp_path}/d"], [f"{tmp_path}/c", "--p", f"{tmp_path}/d"]):
        with pytest.raises(SystemExit, match="/d"):
            robustness.main([*line, *typo])
    toy_checkpoint(tmp_path, seed=1)
    with pytest.raises(SystemExit, match="head.pt"):
        robustness.main([*line, f"{tmp_path}/c"])
    assert (tmp_path / "robustness.json").read_text() == results

def test_a_made_c_has_its_layout_its_own_numbers_and_its_size(tmp_path, monkeypatch):
    pytest.importorskip("imagecorruptions")
    names = ["gaussian_noise/1", "gaussian_noise/5", "impulse_noise/5"]
    monkeypatch.setitem(SETS, "C", names)
    data = class_folders(tmp_path / "val", 3, 48, classes=CLASSES[:2])
    made = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        robustness.make(str(tmp_path / folder), data, per_class=2, seed=seed)
        paths = sorted(Path(tmp_path, folder).glob("*/*/*/*.JPEG"))
        made.append({str(p.relative_to(tmp_path / folder)): p.read_bytes() for p in paths})
    files = ["n00/000", "n00/002", "n01/001", "n01/003"]
    assert list(made[0]) == [f"{name}/{file}.JPEG" for name in names for file in files]
    assert made[0] == made[1] and not set(made[0].values()) & set(made[2].values())
    clean = eval_linear.eval_transform(224)(ser.read_image(f"{data}/n00/000.png")).float()
    mild, strong = [(ser.read_image(f"{tmp_path}/a/{name}/n00/000.JPEG") - clean).abs().mean()
                    for name in names[:2]]
    assert 5 < mild < 0.7 * strong
    monkeypatch.setattr(robustness.Image.Image, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):     # stopped: what is there is complete
        robustness.make(str(tmp_path / "d"), data)
    assert not (tmp_path / "d").exists()

# ==== ImageNet-P ==================================================================================
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
    head = Namespace(**torch.load(toy_head(path), weights_only=True))
    robustness.main(["--checkpoint", path, "--p", root, "--workers", "0"])
    for name in ("gaussian_noise", "tilt"):
        sums = torch.zeros(2)
        for video in Path(root).glob(f"*/{name}/*/*.mp4"):
            label = torch.tensor([CLASSES.index(video.parent.name)])
            for frame in robustness.read_video(str(video)):
                logits = eval_linear.cls_features(encoder, frame[None], 2) @ head.weight.T
                sums += torch.tensor(eval_linear.accuracy(logits, label, torch.arange(6))) / 36
        found = [*values(tmp_path / "robustness.json", set=f"P/{name}").values()]
        assert found == pytest.approx(sums.tolist())
    sums = torch.zeros(2)
    for rank in range(2):
        become_rank(monkeypatch, rank)
        sums += torch.tensor(robustness.score_videos(
            encoder, head, Path(root, "group-tilt/tilt"), Namespace(workers=0)))
    assert found == pytest.approx(sums.tolist())
