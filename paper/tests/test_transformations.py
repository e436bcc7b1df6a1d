"""What paper/evaluations/transformations.py promises."""
import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import eval_linear
import ser
from eval_linear import Split
from paper.evaluations import transformations
from paper.evaluations.transformations import PAPER, TASKS, MovedTokens, Settings, evaluate, predict
from paper.methods import barlow_twins
from paper.tests.toys import class_folders, meet, toy_checkpoint
from test_ser import close, run_ranks, seeded

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding")
QUICK = dict(layers=(1, 3), images=40, test_images=20, epochs=2, hidden=16, workers=0,
             batch_size=16, probe_batch=16, lr=1e-2)

class Tokens(nn.Module):
    """An artificial encoder of one block, whose tokens are made of 4 x 4 patches by `tokens`."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens = tokens
        self.cls_token = torch.zeros(1)
        self.dim = 4
        self.shape = dict(image_size=16)

    def forward(self, images, map_layers):
        encoded = []
        for x in images:
            patches = nn.functional.avg_pool2d(x, 4)
            maps = {layer: self.tokens(patches) for layer in map_layers}
            encoded.append(ser.Encoded(None, maps, {}))
        return encoded

def knows_where(patches):
    """(B, 3, 4, 4) -> (B, 4, 4, 4): brightness, in a channel of the quarter of the image."""
    bright = patches.mean(1)
    tokens = bright.new_zeros(len(bright), 4, 4, 4)
    for channel, (top, left) in enumerate(((0, 0), (0, 2), (2, 0), (2, 2))):
        rows = slice(top, top + 2)
        columns = slice(left, left + 2)
        tokens[:, channel, rows, columns] = bright[:, rows, columns]
    return tokens

def knows_nothing(patches):
    """Colours without a place: their mean is that of the image, however it is moved."""
    return torch.cat([patches, patches.mean(1, keepdim=True)], dim=1)

def lit(n, seed):
    """n noisy images with light from the upper left, and less from the upper right."""
    noise = torch.rand(n, 3, 16, 16, generator=seeded(seed))
    noise[:, :, :8, :8] += 2
    noise[:, :, :8, 8:] += 1
    return Split((noise * 85).to(torch.uint8), torch.zeros(n, dtype=torch.int64), [0], ready=True)

SPLITS = {"train": lit(120, 1), "val": lit(60, 2)}

@pytest.mark.parametrize("single", [False, True])
def test_an_encoder_that_knows_the_place_tells_every_turn_and_flip(single):
    """Of lit images, whose element can be seen even in g x alone."""
    cfg = Settings(**QUICK | dict(layers=(1,), single=single, epochs=10))
    found = predict(Tokens(knows_where), SPLITS, cfg)
    assert found == {"rotation": [100.0], "flip": [100.0], "broken": []}

@pytest.mark.parametrize("single", [False, True])
def test_an_invariant_encoder_stays_at_chance(single):
    """Whose mean token is equal for all versions: exactly as often right as a constant answer."""
    cfg = Settings(**QUICK | dict(layers=(1,), single=single))
    found = predict(Tokens(knows_nothing), SPLITS, cfg)
    assert found["rotation"][0] == pytest.approx(25, abs=0.5)
    assert found["flip"][0] == pytest.approx(50, abs=0.5)

def test_features_are_the_mean_patch_tokens_of_the_versions_layer_by_layer(tmp_path):
    """Against a pass per version and layer: turns are counter-clockwise, [CLS] has no part."""
    encoder = ser.load_encoder(toy_checkpoint(tmp_path, moco_hidden=16))
    x = torch.randn(3, 3, 16, 16, generator=seeded(1))
    features = MovedTokens(encoder, (1, 3)).last_cls(x, 10).unflatten(1, (5, 2, 16))
    for version in range(5):
        g = ser.Geometry(torch.full((3,), version == 4), torch.full((3,), version % 4), (4, 4))
        for i, layer in enumerate((1, 3)):
            tokens = encoder([ser.rho(g, x, 4)], (layer,))[0].maps[layer]
            close(features[:, version, i], tokens.mean((2, 3)))

def test_the_probe_learns_from_train_and_is_scored_on_val():
    """Labels that follow the versions on train and their reverse on val: 0% right."""
    train = torch.randn(200, 5, 4, generator=seeded(1)) * 0.1
    train[:, 4] += 1
    test = -train[:50]
    test[:, 0] += 1
    cfg = Settings(**QUICK | dict(single=True, epochs=10))
    assert transformations.probe(train, train[:50], TASKS["flip"], cfg) == 100
    assert transformations.probe(train, test, TASKS["flip"], cfg) == 0

def test_a_pair_tells_what_one_image_does_not():
    """Features u and u + 0.5 of a random u: only the difference tells the versions apart."""
    train, test = (torch.randn(n, 5, 4, generator=seeded(n)) for n in (400, 100))
    for features in (train, test):
        features[:, 1:] = features[:, :1].clone()
        features[:, 4] += 0.5
    cfg = Settings(**QUICK | dict(epochs=10, hidden=32, probe_batch=64))
    assert transformations.probe(train, test, TASKS["flip"], cfg) > 95
    alone = dataclasses.replace(cfg, single=True)
    assert transformations.probe(train, test, TASKS["flip"], alone) < 80

def test_features_are_standardised_by_the_training_images():
    """A scale and a shift of all features change nothing."""
    features = torch.randn(100, 5, 4, generator=seeded(3)) + torch.arange(5)[:, None]
    cfg = Settings(**QUICK)
    plain = transformations.probe(features, features[:50], TASKS["rotation"], cfg)
    other = 1000 * features + 5000
    found = transformations.probe(other, other[:50], TASKS["rotation"], cfg)
    assert found == pytest.approx(plain, abs=1) and 50 < plain < 100

@pytest.fixture
def data(tmp_path):
    class_folders(tmp_path / "data" / "train", 8, 24, seed=1)
    class_folders(tmp_path / "data" / "val", 4, 24, seed=2)
    Path(tmp_path, "data/train/n00/000.png").write_bytes(b"no image")
    return str(tmp_path / "data")

def test_a_run_measures_a_checkpoint_and_its_beginning_and_writes_both(data, tmp_path, capsys):
    """From the command line, on a checkpoint of another method; the broken file is named."""
    path = toy_checkpoint(tmp_path / "bt", barlow_twins.build, barlow_twins.Settings, hidden=16)
    given = ["--data", data, "--checkpoint", path, "--layers", "1", "2", "3", "--workers", "0",
             "--epochs", "1", "--hidden", "8"]
    assert transformations.main(given) == 0
    found = json.loads(Path(path).with_name("transformations.json").read_text())
    assert found["images"] == {"train": 48, "val": 24} and found["step"] == 7
    text = capsys.readouterr().out
    for name in ("trained", "untrained"):
        assert len(found[name]["rotation"]) == len(found[name]["flip"]) == 3
        assert found[name]["broken"] == [f"{data}/train/n00/000.png"]
    assert found["trained"]["rotation"] != found["untrained"]["rotation"]
    assert "1 broken images" in text and "MoCo-v3 + SER" not in text     # three layers, not five
    assert transformations.main([*given, "--single"]) == 0
    assert Path(path).with_name("transformations-single.json").exists()

def test_a_broken_image_has_no_part_in_probes(data, tmp_path, monkeypatch):
    """47 of 48 training images are left: not black ones in their place."""
    given = []

    def remember(train, test, versions, cfg):
        given.append((tuple(train.shape), tuple(test.shape)))
        return 0.0

    monkeypatch.setattr(transformations, "probe", remember)
    encoder = ser.load_encoder(toy_checkpoint(tmp_path, moco_hidden=16))
    _, splits = eval_linear.collect(eval_linear.Settings(data=data, test=()), 0)
    predict(encoder, splits, Settings(**QUICK))
    assert given == [((47, 5, 16), (24, 5, 16))] * 4

def test_images_are_drawn_by_the_seed_from_all_classes(data):
    _, splits = eval_linear.collect(eval_linear.Settings(data=data, test=()), 0)
    for seed in (0, 1):
        chosen = transformations.some(splits["train"], 20, seed)
        assert len(set(chosen.source)) == 20 and len(chosen.labels.unique()) == 6
        assert all(f"/n{label:02}/" in path for path, label in zip(chosen.source, chosen.labels))
    first, other = (transformations.some(splits["train"], 20, seed).source for seed in (0, 1))
    assert first != other

def test_the_papers_rows_stand_below_those_of_its_layers():
    rows = {"rotation": [1.0] * 5, "flip": [2.0] * 5, "broken": []}
    result = {"checkpoint": "x", "step": 1, "settings": vars(Settings()), "trained": rows,
              "untrained": rows, "images": {"train": 1, "val": 1}}
    text = transformations.table(result)
    assert "99.73" in text and "75.95" in text and text.count("MoCo-v3 + ") == 6
    assert all(len(row) == 5 for task in PAPER.values() for row in task.values())

def test_mistakes_are_one_line(data, tmp_path, capsys):
    path = toy_checkpoint(tmp_path / "run", moco_hidden=16)
    for given, words in ((["--checkpoint", path], "--data"),
                         (["--checkpoint", path, "--data", data], "try --layers 1 2 3"),
                         (["--checkpoint", "none.pt", "--data", data], "none.pt")):
        assert transformations.main(given) == 2
        message = capsys.readouterr().err.strip()
        assert words in message and message.count("\n") == 0

def rank_main(rank, ranks, folder):
    meet(rank, ranks, folder)
    given = json.loads(Path(folder, "settings.json").read_text())
    evaluate(Settings(**given | {"layers": tuple(given["layers"])}))
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def test_two_ranks_equal_one(data, tmp_path):
    path = toy_checkpoint(tmp_path / "run", moco_hidden=16)
    cfg = Settings(**QUICK | dict(data=data, checkpoint=path, out=str(tmp_path / "two.json")))
    (tmp_path / "settings.json").write_text(json.dumps(vars(cfg)))
    run_ranks(rank_main, 2, tmp_path)
    one = evaluate(dataclasses.replace(cfg, out=str(tmp_path / "one.json")))
    two = json.loads((tmp_path / "two.json").read_text())
    for name in ("trained", "untrained"):
        assert one[name]["broken"] == two[name]["broken"]
        assert one[name]["rotation"] == pytest.approx(two[name]["rotation"])
        assert one[name]["flip"] == pytest.approx(two[name]["flip"])
