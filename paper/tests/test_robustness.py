"""What paper/evaluations/robustness.py promises of ImageNet-C and -P, and of a C made here."""
import json
from argparse import Namespace
from pathlib import Path
from statistics import mean

import pytest
import torch
import torch.nn.functional as F
from torchvision.utils import save_image

import eval_linear
import ser
from paper.evaluations import robustness
from paper.evaluations.robustness import ALEXNET, SETS, measure, score, table
from paper.tests.toys import CLASSES, class_folders, seeded, toy_checkpoint, toy_head

@pytest.fixture
def model(tmp_path):
    """An encoder and a head, of the checkpoint tmp_path/last.pt."""
    path = toy_checkpoint(tmp_path)
    head = Namespace(**torch.load(toy_head(path), weights_only=True))
    return ser.load_encoder(path), head

# ==== Tables ======================================================================================
def test_mce_of_alexnet_itself_is_100():
    """With half of its errors mCE is 50; with its error on one of the 15 alone 100 / 15."""
    errors = 100 * torch.tensor(list(ALEXNET.values()))
    alone = torch.where(torch.arange(15) == 9, errors, 0)
    for error, wanted in ((errors, 100), (errors / 2, 50), (alone, 100 / 15)):
        assert robustness.mean_corruption_error(100 - error) == pytest.approx(wanted)

def test_means_are_over_severities_and_then_over_the_columns_that_are_there():
    """Of the paper's rows, too. 100.00 does not touch its neighbour, "nan" is what is missing."""
    found = {}
    for place, name in enumerate(SETS["C"]):
        corruption, severity = divmod(place, 5)
        found[name] = {"top-1": 2.0 * corruption + severity, "top-5": 100.0}
    text = table("C", found, 1000)
    lines = [line.split() for line in text.splitlines()]
    assert list(map(float, lines[2][1:])) == [*range(2, 32, 2), 16.0]
    assert lines[6][1:] == ["100.00"] * 16 and (lines[4][-1], lines[8][-1]) == ("40.58", "63.53")
    assert "mCE" in text and "not 1000" not in text
    values = {"top-1": 50.0, "top-5": 50.0, "flip %": 3.0, "distance": 1.0}
    text = table("P", {"tilt": values, "scale": values}, 6)
    lines = [line.split() for line in text.splitlines()]
    assert lines[3] == ["here"] + ["nan"] * 11 + ["50.00", "50.00", "nan", "50.00"]
    assert lines[4][-1] == "56.38"     # MoCo-v3's 67.58 and 45.18
    assert "6 classes, not 1000: the paper's rows are of another task" in text

# ==== ImageNet-C ==================================================================================
def test_unaltered_images_have_the_accuracy_of_val(tmp_path):
    """Of eval_linear's own head, on its own crops of val, which are not cropped again; in both
    layouts, archives side by side and in folders of their own."""
    path = Path(toy_checkpoint(tmp_path))
    for part, per_class in (("train", 4), ("val", 7)):
        class_folders(tmp_path / "data" / part, per_class, 24)
    eval_linear.main(["--data", f"{tmp_path}/data", "--checkpoint", str(path), "--epochs", "20",
                      "--cache", "--workers", "0"])
    val = eval_linear.class_folder(tmp_path / "data/val", eval_linear.eval_transform(16))
    for i, (image, label) in enumerate(val):
        for name in ("snow/1", "weather/fog/2"):
            folder = tmp_path / "c" / name / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            save_image(image / 255, folder / f"{i}.png")
    robustness.main(["--checkpoint", str(path), "--c", str(tmp_path / "c"), "--workers", "0"])
    found = json.loads(path.with_name("robustness-c.json").read_text())["found"]
    rows = json.loads(path.with_name("eval.json").read_text())["rows"]
    probe = [row["trained"] for name, row in rows.items() if "top-" in name and "NN" not in name]
    assert list(found) == ["snow/1", "fog/2"] and 25 < probe[0] < 100
    for values in found.values():
        assert [values["top-1"], values["top-5"]] == pytest.approx(probe[:2], abs=0.01)

def test_a_made_c_has_its_layout_its_draws_and_its_size(tmp_path, monkeypatch):
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

# ==== ImageNet-P ==================================================================================
def test_flip_probability_and_top5_distance_in_closed_form():
    """FP(a a b b) = 1/3; in noise all frames are compared with the first: FP(a b a b) = 2/3. The
    distance is 0 where the top 5 stay, 15 = 5 + 4 + 3 + 2 + 1 where all leave, 2 for a swap."""
    a = list(range(12))
    b = [*range(6, 12), *range(6)]     # another prediction, and all leave the top 5
    swap = [1, 0, *range(2, 12)]
    for orders, noise, flips, distance in (
            ([a, a, b, b], False, 1 / 3, 5), ([a, b, a, b], False, 1, 15), ([a, swap], False, 1, 2),
            ([a, b, a, b], True, 2 / 3, 10), ([a, a, a, b], True, 1 / 3, 5)):
        ranks = torch.tensor(orders).argsort(1)
        assert measure(-ranks.float(), 0, noise)[2:].tolist() == pytest.approx([flips, distance])
    # Ties go to the first class.
    assert measure(torch.zeros(2, 9), 0, False).tolist() == [1, 1, 0, 0]
    assert measure(torch.eye(9)[[1, 2, 2, 8]], 2, True)[:2].tolist() == [0.5, 1]

def videos(root, names):
    """Two videos of six frames for each of three classes, in the layout of P, as mp4 without loss
    but that of the colour space; the last has the frames that are returned, beside root."""
    av = pytest.importorskip("av")
    places = [f"group-{name}/{name}/{place}" for name in names for place in CLASSES[1:4]]
    for number, path in enumerate(f"{place}/{k}.mp4" for place in places for k in "vw"):
        Path(root, path).parent.mkdir(parents=True, exist_ok=True)
        colours = torch.randint(256, (6, 3, 4, 4), generator=seeded(number), dtype=torch.uint8)
        frames = F.interpolate(colours, (16, 16))
        with av.open(str(Path(root, path)), "w") as file:
            stream = file.add_stream("libx264", rate=1, options={"qp": "0"})
            stream.height = stream.width = 16
            stream.pix_fmt = "yuv444p"
            for frame in frames.permute(0, 2, 3, 1).numpy().copy():
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            file.mux(stream.encode())
    return str(root), frames

def test_p_is_scored_as_by_one_frame_at_a_time(model, tmp_path, capsys):
    root, frames = videos(tmp_path / "p", ["gaussian_noise", "tilt"])
    read = robustness.read_video(f"{root}/group-tilt/tilt/{CLASSES[3]}/w.mp4")
    assert (read.int() - frames.int()).abs().max() <= 4
    before = tmp_path / "robustness-c.json"
    before.write_text("of an earlier call")
    robustness.main(["--checkpoint", f"{tmp_path}/last.pt", "--p", root, "--workers", "0"])
    printed = capsys.readouterr().out
    assert "ImageNet-P" in printed and "ImageNet-C" not in printed
    assert before.read_text() == "of an earlier call"
    found = json.loads((tmp_path / "robustness-p.json").read_text())["found"]
    assert list(found) == ["gaussian_noise", "tilt"]
    encoder, head = model
    scale = torch.tensor([100, 100, 100, 1])
    for name, values in found.items():
        sums = torch.zeros(4, dtype=torch.float64)
        for video in Path(root).glob(f"*/{name}/*/*.mp4"):
            frames = robustness.read_video(str(video))
            x = torch.cat([eval_linear.cls_features(encoder, frame[None], 2) for frame in frames])
            logits = x @ head.weight.T
            sums += measure(logits, CLASSES.index(video.parent.name), name == "gaussian_noise") / 6
        assert list(values.values()) == pytest.approx((sums * scale).tolist())

def test_the_shares_of_two_ranks_are_the_whole(model, tmp_path, monkeypatch):
    given = (videos(tmp_path / "p", ["tilt"])[0], *model, Namespace(workers=0))
    whole = score("P", *given)["tilt"]
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda sums: None)
    parts = []
    for rank in range(2):
        monkeypatch.setattr(ser, "ranks_and_rank", lambda: (2, rank))
        parts.append(score("P", *given)["tilt"])
    for key, value in whole.items():
        assert parts[0][key] + parts[1][key] == pytest.approx(value)
