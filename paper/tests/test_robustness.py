"""What paper/evaluations/robustness.py promises of ImageNet-C and -P, and of a C made here."""
import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import eval_linear
import ser
from paper.evaluations import corruptions, perturbations, robustness
from paper.evaluations.corruptions import ALEXNET, CORRUPTIONS, SEVERITIES, mean_corruption_error
from paper.evaluations.perturbations import (PERTURBATIONS, TEN, flip_probability, frame_pairs,
                                             read_video, top5_distance)
from paper.evaluations.robustness import PAPER, Settings, evaluate, table
from paper.methods import dino
from paper.tests.toys import CLASSES, class_folders, meet, toy_checkpoint, toy_head
from test_ser import close, run_ranks, seeded

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")

@pytest.fixture
def checkpoint(tmp_path):
    path = toy_checkpoint(tmp_path / "run", moco_hidden=16)
    toy_head(path)
    return path

def settings(checkpoint, **changes):
    return Settings(**dict(checkpoint=checkpoint, workers=0, batch_size=64) | changes)

def image_sets(root, names, layout="flat"):
    """Random colours as ImageNet-C, every set with images of its own."""
    for i, name in enumerate(names):
        for severity in SEVERITIES:
            place = Path(root, f"group{i % 4}" if layout == "nested" else "", name, str(severity))
            class_folders(place, 1, seed=10 * i + severity)
    return str(root)

def slow_scores(checkpoint, paths):
    """Top-1 and top-5 by one image at a time, as C's authors do it: the whole image, no crop."""
    encoder = ser.load_encoder(checkpoint)
    head = torch.load(Path(checkpoint).with_name("eval-head.pt"), weights_only=True)
    top1 = []
    top5 = []
    for path in paths:
        image = ser.resize(ser.read_image(str(path))[None], (16, 16)).float() / 255
        with torch.no_grad():
            features = encoder.last_cls(ser.normalise(image), 2)[0]
        order = (head["weight"] @ features + head["bias"]).argsort(descending=True).tolist()
        label = CLASSES.index(path.parent.name)
        top1.append(label == order[0])
        top5.append(label in order[:5])
    return 100 * sum(top1) / len(top1), 100 * sum(top5) / len(top5)

# ==== The tables ==================================================================================
def test_mce_of_alexnet_itself_is_100():
    """With AlexNet's errors, which differ between severities, mCE is 100; with half of them 50;
    with its error on one of the 15 alone 100 / 15."""
    for factor in (1.0, 0.5):
        top1 = {name: [100 * (1 - factor * ALEXNET[name] * w) for w in (0.8, 0.9, 1.0, 1.1, 1.2)]
                for name in CORRUPTIONS}
        assert mean_corruption_error(top1) == pytest.approx(100 * factor)
    alone = {name: [100.0] * 5 for name in CORRUPTIONS} | {"fog": [100 * (1 - ALEXNET["fog"])] * 5}
    assert mean_corruption_error(alone) == pytest.approx(100 / 15)

def test_the_papers_rows_have_its_columns_and_its_means():
    """Tables of A.5: 15 and 14 columns, whose plain mean the paper prints as Avg."""
    wanted = {
        "ImageNet-C, top-1 %": "39.47 38.93 33.33 40.58 37.45 42.66 42.91",
        "ImageNet-C, top-5 %": "61.76 61.90 54.83 63.53 60.33 65.92 65.48",
        "ImageNet-P, top-1 %":
            "63.91 63.58 61.85 65.13 64.44 66.58 68.00 62.27 62.92 54.77 58.89",
        "ImageNet-P, top-5 %": "84.67 84.69 83.30 85.69 85.66 87.01 87.41"}
    for title, means in wanted.items():
        header, *rows = PAPER[title].strip().splitlines()
        columns = len(CORRUPTIONS if "-C" in title else PERTURBATIONS)
        assert len(header.split()) == columns == (15 if "-C" in title else 14)
        for row, mean in zip(rows, means.split(), strict=True):
            shown = robustness.cells([float(value) for value in row.split()[1:]], title[9].lower())
            assert len(shown.split()) == columns + (1 if "-C" in title else 2)
            assert float(shown.split()[-1]) == pytest.approx(float(mean), abs=0.011)

def made_result(**changes):
    """The result of a whole evaluation: in set i of C and P, top-1 is i percent."""
    sets = {}
    for i, name in enumerate(CORRUPTIONS):
        for severity in SEVERITIES:
            sets[f"c/{name}/{severity}"] = dict(top1=i + severity, top5=2 * i, broken=[])
    for i, name in enumerate(PERTURBATIONS):
        sets[f"p/{name}"] = dict(top1=i, top5=2 * i, flips=3 * i, top5_distance=0.5, broken=[])
    return dict(checkpoint="x.pt", step=1, classes=1000, difficulty=1, sets=sets)

def test_the_table_has_the_papers_columns_means_over_severities_and_over_columns():
    lines = table(made_result()).splitlines()
    ours = [line.split()[1:] for line in lines if line.startswith("here")]
    close(torch.tensor(list(map(float, ours[0]))), torch.tensor([*range(3, 18), 10.0]))
    p = [float(value) for value in ours[2]]
    ten = [i for i, name in enumerate(PERTURBATIONS) if name in TEN]
    assert p == [*range(14), pytest.approx(sum(ten) / 10, abs=0.006), 6.5] and len(ten) == 10
    flips = next(line for line in lines if line.startswith("flip"))
    assert float(flips.split()[-1]) == 3 * 6.5
    top1 = {name: [i + severity for severity in SEVERITIES] for i, name in enumerate(CORRUPTIONS)}
    assert f"mCE {mean_corruption_error(top1):.2f} %" in "\n".join(lines)

@pytest.mark.parametrize("missing, dashes", [("c/fog/3", 2), ("p/tilt", 3), ("p/shear", 2)])
def test_what_is_missing_is_a_dash_and_so_is_the_mean_over_it(missing, dashes):
    """A severity of C or a column of P: of the ten, both means are missing, else that of 14."""
    result = made_result()
    del result["sets"][missing]
    text = table(result)
    ours = [line for line in text.splitlines() if line.startswith("here")]
    assert ours[0 if missing[0] == "c" else 2].split().count("-") == dashes
    assert ("mCE" in text) == (missing[0] == "p")

# ==== ImageNet-C ==================================================================================
@pytest.mark.parametrize("layout", ["flat", "nested"])
def test_c_is_found_in_both_layouts_and_scored_as_by_one_image_at_a_time(checkpoint, tmp_path,
                                                                        layout):
    root = image_sets(tmp_path / "c", ["snow", "fog", "saturate"], layout)
    sets = evaluate(settings(checkpoint, c=root))["sets"]
    assert sorted(sets) == sorted(f"c/{name}/{severity}" for name in ("snow", "fog", "saturate")
                                  for severity in SEVERITIES)
    for found in sets.values():
        paths = sorted(Path(found["folder"]).glob("*/*.png"))
        assert (found["top1"], found["top5"]) == pytest.approx(slow_scores(checkpoint, paths))
    assert len({found["top1"] for found in sets.values()}) > 2
    text = table({"checkpoint": checkpoint, "step": 7, "classes": 6, "difficulty": 1, "sets": sets})
    assert "6 classes, not 1000" in text and "extra, in no mean: saturate" in text

def test_the_same_command_goes_on_after_the_last_finished_set(checkpoint, tmp_path, monkeypatch):
    """A kill leaves a whole result; finished sets are not scored again, for this checkpoint and
    head alone."""
    root = image_sets(tmp_path / "c", ["snow"])
    cfg = settings(checkpoint, c=root)
    scored = []
    whole = corruptions.score_images

    def failing(encoder, head, folder, cfg):
        if len(scored) == 2:
            raise KeyboardInterrupt
        scored.append(folder.name)
        return whole(encoder, head, folder, cfg)

    monkeypatch.setattr(robustness, "score_images", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(cfg)
    assert len(json.loads(cfg.result.read_text())["sets"]) == 2 == len(scored)
    scored.clear()
    monkeypatch.setattr(robustness, "score_images", lambda *given: (
        scored.append(given[2].name), whole(*given))[1])
    resumed = evaluate(cfg)
    assert scored == ["3", "4", "5"] and resumed == json.loads(cfg.result.read_text())
    monkeypatch.undo()
    cfg.result.unlink()
    assert evaluate(cfg) == resumed
    monkeypatch.setattr(robustness, "score_images", lambda *given: dict(top1=-1.0))
    assert all(one["top1"] >= 0 for one in evaluate(cfg)["sets"].values())
    image_sets(tmp_path / "d", ["snow"])     # more files in one of the sets
    shutil.copy(next(Path(tmp_path, "d/snow/2").glob("*/*.png")),
                next(Path(root, "snow/2").glob("*/")) / "more.png")
    values = {name: one["top1"] for name, one in evaluate(cfg)["sets"].items()}
    assert [name for name, top1 in values.items() if top1 < 0] == ["c/snow/2"]

@pytest.mark.parametrize("other", ["checkpoint", "head", "bias", "program"])
def test_the_result_of_another_checkpoint_head_or_program_is_not_replaced(
        checkpoint, tmp_path, other):
    root = image_sets(tmp_path / "c", ["snow"])
    cfg = settings(checkpoint, c=root)
    evaluate(cfg)
    if other == "checkpoint":
        toy_checkpoint(Path(checkpoint).parent, shaken=1, moco_hidden=16)
        toy_head(checkpoint)
    if other == "head":
        toy_head(checkpoint, seed=5)
    if other == "bias":
        path = Path(checkpoint).with_name("eval-head.pt")
        head = torch.load(path)
        torch.save(head | {"bias": head["bias"] + 1}, path)
    if other == "program":
        cfg.result.write_text(json.dumps({"linear": 1}))
    before = cfg.result.read_bytes()
    with pytest.raises(ser.UserError, match="choose another"):
        evaluate(cfg)
    assert cfg.result.read_bytes() == before

def test_sets_of_another_c_are_not_averaged_with_those_of_this_one(checkpoint, tmp_path):
    """A set that was deleted to make room for the next stays; P's sets beside C's do, too."""
    root = image_sets(tmp_path / "c", ["snow", "fog"])
    cfg = settings(checkpoint, c=root)
    first = evaluate(cfg)["sets"]
    shutil.rmtree(Path(root, "fog"))
    assert evaluate(cfg)["sets"] == first
    before = cfg.result.read_bytes()
    other = image_sets(tmp_path / "other", ["snow"])
    with pytest.raises(ser.UserError, match="has sets of .*fog/1, not of .*other: remove it or"):
        evaluate(settings(checkpoint, c=other))
    assert cfg.result.read_bytes() == before
    moved = shutil.copytree(root, tmp_path / "moved")
    Path(root, "snow").rename(Path(root, "fog"))
    shutil.copytree(root, moved, dirs_exist_ok=True)     # now all that was scored, elsewhere
    again = evaluate(settings(checkpoint, c=str(moved)))["sets"]
    assert {str(Path(one["folder"]).parents[1]) for one in again.values()} == {str(moved)}

def test_broken_images_are_named_and_wrong_and_too_many_are_refused(checkpoint, tmp_path):
    root = image_sets(tmp_path / "c", ["snow"])
    first = sorted(Path(root, "snow/1").glob("*/*.png"))
    for path in first[:2]:
        path.write_bytes(b"no image")
    after = evaluate(settings(checkpoint, c=root))["sets"]["c/snow/1"]
    assert after["broken"] == [str(path) for path in first[:2]] and after["images"] == 6
    assert after["top5"] == pytest.approx(slow_scores(checkpoint, first[2:])[1] * 4 / 6)
    for path in first[:4]:
        path.write_bytes(b"no image")
    with pytest.raises(ser.UserError, match="4 of the 6 images"):
        evaluate(settings(checkpoint, c=root, out=str(tmp_path / "c.json")))

def test_it_works_on_every_kind_of_checkpoint(tmp_path):
    """The untrained encoder with a head of its own; and a checkpoint of another method."""
    root = image_sets(tmp_path / "c", ["snow"])
    path = toy_checkpoint(tmp_path / "dino", dino.build, dino.Settings, hidden=16, outputs=8)
    toy_head(path)
    toy_head(path, "eval-random-init-head.pt", "-random-init")
    trained = evaluate(settings(path, c=root))
    untrained = evaluate(settings(path, c=root, random_init=True))
    assert trained["sha256"] + "-random-init" == untrained["sha256"]
    assert trained["sets"].keys() == untrained["sets"].keys()
    names = {item.name for item in Path(path).parent.glob("*.json")}
    assert names == {"robustness.json", "robustness-random-init.json"}

def test_mistakes_are_one_line(checkpoint, tmp_path, capsys):
    pytest.importorskip("av")
    (tmp_path / "empty").mkdir()
    class_folders(tmp_path / "odd" / "snow" / "1", 1, classes=["dog"])
    other = toy_checkpoint(tmp_path / "other", shaken=2, moco_hidden=16)
    missing = toy_checkpoint(tmp_path / "missing", shaken=2, moco_hidden=16)
    head = str(Path(checkpoint).with_name("eval-head.pt"))
    for given, words in (
            (["--checkpoint", checkpoint], "--c or --p"),
            (["--checkpoint", checkpoint, "--c", str(tmp_path / "empty")], "none of its sets"),
            (["--checkpoint", checkpoint, "--p", str(tmp_path / "empty")], "none of its sets"),
            (["--checkpoint", checkpoint, "--c", str(tmp_path / "odd")], "dog"),
            (["--checkpoint", other, "--head", head, "--c", "x"], "eval-head.pt is"),
            (["--checkpoint", missing, "--c", "x"], "run eval_linear.py"),
            (["--checkpoint", checkpoint, "--c", "x", "--out", str(tmp_path / "no" / "a.json")],
             "cannot write"),
            (["--make", str(tmp_path / "made")], "--data")):
        assert robustness.main([*given, "--workers", "0"]) == 2
        message = capsys.readouterr().err.strip()
        assert words in message and message.count("\n") == 0

# ==== ImageNet-P ==================================================================================
def orders(*predictions, classes=8):
    """The order of the classes of each frame: a letter per class that comes first."""
    return torch.stack([torch.roll(torch.arange(classes), "abc".index(p)) for p in predictions])

def test_flip_probability_in_closed_form():
    """FP(a a b b) = 1/3; in noise all frames are compared with the first: FP(a b a b) = 2/3."""
    for frames, noise, difficulty, wanted in (
            ("aabb", False, 1, 1 / 3), ("abab", False, 1, 1), ("abab", True, 1, 2 / 3),
            ("abab", False, 2, 0), ("abcb", False, 2, 1 / 2), ("abab", True, 2, 2 / 3)):
        pairs = frame_pairs(4, noise, difficulty)
        assert flip_probability(orders(*frames), pairs) == pytest.approx(wanted)

def test_top5_distance_in_closed_form():
    """0 where the top 5 stay, 15 = 5 + 4 + 3 + 2 + 1 where all leave, 2 where neighbours swap."""
    stay = torch.arange(12)
    leave = torch.roll(stay, 6)
    swap = torch.tensor([1, 0, *range(2, 12)])
    for order, wanted in (((stay, stay), 0), ((stay, leave), 15), ((stay, swap), 2),
                          ((stay, stay, leave), 7.5)):
        assert top5_distance(torch.stack(order), frame_pairs(len(order), False)) == wanted

def slow_top5_distance(logits, noise):
    """The distance from the ranks, in loops."""
    stats = pytest.importorskip("scipy.stats")
    ranks = [stats.rankdata(-frame, method="ordinal") for frame in logits.double().numpy()]
    total = []
    for later in range(1, len(ranks)):
        earlier = ranks[0] if noise else ranks[later - 1]
        distance = 0
        for i in range(1, 6):
            class_of_rank_i = list(earlier).index(i)
            distance += abs(i - min(ranks[later][class_of_rank_i], 6))
        total.append(distance)
    return sum(total) / len(total)

@pytest.mark.parametrize("noise", [False, True])
def test_a_video_is_measured_as_by_loops_over_scipys_ordinal_ranks(noise):
    """With ties, which go to the class that comes first."""
    logits = torch.randint(4, (7, 9), generator=seeded(1)).float()
    found = perturbations.measure(logits, 2, noise, 1)
    predictions = [frame.index(max(frame)) for frame in logits.tolist()]
    others = [predictions[0]] * 6 if noise else predictions[:-1]
    flips = [a != b for a, b in zip(others, predictions[1:])]
    assert found[0] == pytest.approx(sum(p == 2 for p in predictions) / 7)
    assert found[2] == pytest.approx(sum(flips) / 6) and 0 < found[2] < 1
    assert found[3] == pytest.approx(slow_top5_distance(logits, noise))
    fifth = numpy.argsort(-logits.numpy(), axis=1, kind="stable")[:, :5]
    assert found[1] == pytest.approx((fifth == 2).any(1).mean())

def write_video(path, frames):
    """Frames (n, h, w, 3) uint8 as an mp4 without loss but that of colour space."""
    av = pytest.importorskip("av")
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=1, options={"qp": "0"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv444p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame.numpy(), format="rgb24")))
        container.mux(stream.encode())

def videos(root, names=("gaussian_noise", "tilt"), classes=CLASSES[:3]):
    """Videos of six frames in the layout of ImageNet-P, in folders of their own, as downloaded."""
    for i, name in enumerate(names):
        for j, class_name in enumerate(classes):
            for k in range(2):
                generator = seeded(100 * i + 10 * j + k)
                colours = torch.randint(256, (6, 3, 4, 4), generator=generator, dtype=torch.uint8)
                frames = F.interpolate(colours, (16, 16)).permute(0, 2, 3, 1).contiguous()
                write_video(Path(root, f"group{i}", name, class_name, f"v{k}.mp4"), frames)
    return str(root)

def test_p_is_scored_as_by_one_frame_at_a_time(checkpoint, tmp_path):
    """Accuracy: the mean over videos of the mean over frames, of frames that are not cropped."""
    root = videos(tmp_path / "p")
    hidden = Path(root, "group0", "gaussian_noise", ".cache")     # no class
    hidden.mkdir()
    (hidden / "v0.mp4").write_bytes(b"")
    sets = evaluate(settings(checkpoint, p=root))["sets"]
    assert list(sets) == ["p/gaussian_noise", "p/tilt"]
    encoder = ser.load_encoder(checkpoint)
    head = torch.load(Path(checkpoint).with_name("eval-head.pt"), weights_only=True)
    for name, found in sets.items():
        sums = torch.zeros(4, dtype=torch.float64)
        for path in sorted(Path(found["folder"]).glob("n*/*.mp4")):
            frames = read_video(str(path), 16)
            assert frames.shape == (6, 3, 16, 16)
            with torch.no_grad():
                rows = [encoder.last_cls(ser.normalise(frame[None] / 255), 2) for frame in frames]
            logits = F.linear(torch.cat(rows), head["weight"])
            label = CLASSES.index(path.parent.name)
            sums += perturbations.measure(logits, label, "noise" in name, 1) / 6
        wanted = [100 * sums[0], 100 * sums[1], 100 * sums[2], sums[3]]
        assert [found[key] for key in ("top1", "top5", "flips", "top5_distance")] == pytest.approx(
            [value.item() for value in wanted])
    text = table({"checkpoint": checkpoint, "step": 7, "classes": 6, "difficulty": 1, "sets": sets})
    ours = next(line for line in text.splitlines() if line.startswith("here"))
    assert ours.split().count("-") == 14     # twelve perturbations and both means

def test_the_frames_are_those_that_were_written(tmp_path):
    """In order, upright, red before blue; resized where the encoder has another size."""
    frames = torch.zeros(6, 32, 32, 3, dtype=torch.uint8)
    for n in range(6):
        frames[n, :, :, 0] = 40 * n      # red grows with time
        frames[n, :16, :, 2] = 200       # blue above
    write_video(tmp_path / "v.mp4", frames)
    found = read_video(str(tmp_path / "v.mp4"), 32)
    assert (found.int() - frames.permute(0, 3, 1, 2).int()).abs().max() <= 4
    small = read_video(str(tmp_path / "v.mp4"), 16)
    assert small.shape == (6, 3, 16, 16)
    assert small[0, 2, :7].min() > 190 and small[0, 2, 9:].max() < 10

def test_a_truncated_video_is_named_and_wrong_and_too_many_are_refused(checkpoint, tmp_path):
    root = videos(tmp_path / "p", ("tilt",))
    whole = evaluate(settings(checkpoint, p=root, out=str(tmp_path / "a.json")))["sets"]["p/tilt"]
    paths = sorted(Path(root).glob("*/*/*/*.mp4"))
    paths[0].write_bytes(paths[0].read_bytes()[:500])
    found = evaluate(settings(checkpoint, p=root, out=str(tmp_path / "b.json")))["sets"]["p/tilt"]
    assert whole["broken"] == [] and len(found["broken"]) == 1 and found["videos"] == 6
    assert whole["class_folders"] == len({path.parent for path in paths}) > 1
    assert found["broken"][0].startswith(f"{paths[0]} (")
    rest = videos(tmp_path / "rest", ("tilt",))
    Path(rest, "group0/tilt", *paths[0].parts[-2:]).unlink()
    others = evaluate(settings(checkpoint, p=rest, out=str(tmp_path / "c.json")))["sets"]["p/tilt"]
    assert found["top5"] == pytest.approx(others["top5"] * 5 / 6)
    assert found["flips"] == pytest.approx(others["flips"]) and found["flips"] > 0
    text = table({"checkpoint": checkpoint, "step": 7, "classes": 6, "difficulty": 1,
                  "sets": {"p/tilt": found}})
    assert f"1 broken files in p/tilt, counted as wrong: {paths[0]}" in text
    for path in paths[1:4]:
        path.write_bytes(b"")
    with pytest.raises(ser.UserError, match="4 of the 6 videos"):
        evaluate(settings(checkpoint, p=root, out=str(tmp_path / "d.json")))

def test_a_video_that_lost_its_last_frames_is_broken(tmp_path):
    """It decodes, but announces more frames than it has."""
    av = pytest.importorskip("av")
    write_video(tmp_path / "v.mp4", torch.zeros(6, 16, 16, 3, dtype=torch.uint8))

    class Short:
        def __init__(self, container):
            self.container = container
            self.streams = container.streams

        def decode(self, stream):
            return list(self.container.decode(stream))[:4]

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.container.close()

    opened = av.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(av, "open", lambda path: Short(opened(path)))
        with pytest.raises(ser.UserError, match="4 of 6 frames"):
            read_video(str(tmp_path / "v.mp4"), 16)

def rank_main(rank, ranks, folder):
    meet(rank, ranks, folder)
    cfg = Settings(**json.loads(Path(folder, "settings.json").read_text()))
    evaluate(cfg)
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def test_two_ranks_equal_one(checkpoint, tmp_path):
    """Scores and broken files of C and P, written once."""
    pytest.importorskip("av")
    c = image_sets(tmp_path / "c", ["snow"])
    p = videos(tmp_path / "p", ("tilt",))
    next(Path(c, "snow/2").glob("*/*.png")).write_bytes(b"no image")
    sorted(Path(p).glob("*/*/*/*.mp4"))[1].write_bytes(b"no video")
    cfg = settings(checkpoint, c=c, p=p, out=str(tmp_path / "two.json"))
    (tmp_path / "settings.json").write_text(json.dumps(vars(cfg)))
    run_ranks(rank_main, 2, tmp_path)
    one = evaluate(dataclasses.replace(cfg, out=str(tmp_path / "one.json")))
    two = json.loads((tmp_path / "two.json").read_text())
    assert one["sets"].keys() == two["sets"].keys() and len(one["sets"]) == 6
    for name, found in one["sets"].items():
        there = two["sets"][name]
        assert there.pop("broken") == found.pop("broken")
        assert there.pop("folder") == found.pop("folder") and there == pytest.approx(found)

# ==== --make ======================================================================================
def test_a_made_c_has_its_layout_its_seeds_and_its_size(checkpoint, tmp_path, monkeypatch, capsys):
    """Files of an equal seed are equal, also of the two that have random generators of their own;
    what is there stays; a broken image is named; the result can be scored."""
    pytest.importorskip("imagecorruptions")
    names = ("gaussian_noise", "impulse_noise", "glass_blur")
    monkeypatch.setattr(corruptions, "CORRUPTIONS", names)
    monkeypatch.setattr(corruptions, "EXTRA", ())
    monkeypatch.setattr(corruptions, "SEVERITIES", (1, 5))
    monkeypatch.setattr(corruptions, "SIDE", 40)
    class_folders(tmp_path / "data" / "val", 2, 48, classes=CLASSES[:2])
    broken = tmp_path / "data" / "val" / CLASSES[0] / "002.png"
    broken.write_bytes(b"no image")

    def made(name, seed, *more):
        given = ["--data", str(tmp_path / "data"), "--make", str(tmp_path / name), "--workers", "0"]
        assert robustness.main([*given, "--seed", str(seed), *more]) == 0
        return {str(path.relative_to(tmp_path / name)): path.read_bytes()
                for path in sorted(Path(tmp_path, name).glob("*/*/*/*"))}

    first = made("a", 0)
    assert f"cannot read {broken}" in capsys.readouterr().out
    assert len(first) == 3 * 2 * 3 and "glass_blur/5/n01/001.JPEG" in first
    assert first == made("b", 0)
    other = made("c", 1)
    assert all(other[name] != image for name, image in first.items())
    image = ser.read_image(str(tmp_path / "a/gaussian_noise/5/n00/000.JPEG"))
    clean = eval_linear.centre_crop(ser.read_image(str(broken.with_name("000.png"))), 40)
    mild = ser.read_image(str(tmp_path / "a/gaussian_noise/1/n00/000.JPEG"))
    errors = [(one.float() - clean.float()).abs().mean() for one in (mild, image)]
    assert image.shape == (3, 40, 40) and 5 < errors[0] < 0.7 * errors[1]
    kept = tmp_path / "a/gaussian_noise/1/n00/000.JPEG"
    kept.write_bytes(b"mine")
    assert made("a", 0)["gaussian_noise/1/n00/000.JPEG"] == b"mine"
    assert len(made("d", 0, "--make-images", "1")) == 3 * 2 * 2
    sets = evaluate(settings(checkpoint, c=str(tmp_path / "b")))["sets"]
    assert set(sets) == {f"c/{name}/{severity}" for severity in (1, 5) for name in names}
