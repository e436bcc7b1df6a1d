"""What paper/evaluations/finetune.py promises, and the loop that it shares with coco.py."""
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image

import eval_linear
import ser
from eval_linear import Crops, Split
from paper.evaluations import finetune, training
from paper.evaluations.finetune import Classifier, Settings, fraction_of, groups, layer_of
from paper.methods import dino
from paper.tests.toys import toy_checkpoint
from test_ser import close, run_ranks, same, seeded

QUICK = dict(epochs=2, warmup_epochs=0, batch_size=8, base_lr=0.02, workers=0)

def checkpoint(folder, build=ser.build, kind=ser.Config, **settings):
    """A checkpoint such as a run of ser.py, or of another method, begins with."""
    return toy_checkpoint(folder, build, kind, shaken=None, **settings)

@pytest.fixture
def toy(tmp_path):
    return checkpoint(tmp_path, moco_hidden=16)

def coloured():
    """24 images of six classes, each of a colour of its own, with some noise."""
    labels = torch.arange(24) % 6
    colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]])
    colours = colours[labels][:, :, None, None]
    images = 0.9 * colours + 0.1 * torch.rand(24, 3, 16, 16, generator=seeded(2))
    return Split((255 * images).to(torch.uint8), labels, list(range(6)))

@pytest.fixture
def drawn(monkeypatch):
    """Few images in place of eval_linear's drawn ones; those of val are those of train."""
    classes = [f"colour {label}" for label in range(6)]
    splits = {"train": coloured(), "val": coloured()}
    monkeypatch.setattr(eval_linear, "collect", lambda cfg, size: (classes, splits))

def image_folder(root, train=8, val=3):
    """Class folders of drawn images in the layout of ImageNet, the first of each split damaged."""
    images, labels = ser.draw_images(6 * (train + val), 24, seed=5)
    for n, (image, label) in enumerate(zip(images, labels)):
        split = "train" if n < 6 * train else "val"
        folder = Path(root, split, f"n0{label}")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{n:03}.png")
    for name in ("train/n00/000.png", f"val/n00/{6 * train:03}.png"):
        Path(root, name).write_bytes(b"no image")
    return str(root)

def model_of(path, **settings):
    cfg = Settings(checkpoint=path, **QUICK | settings)
    return Classifier(eval_linear.frozen_encoder(cfg)[0], 6, cfg), cfg

# ==== Model and optimizer =========================================================================
def test_groups_are_those_of_a_list_made_by_hand(toy):
    """A parameter's learning rate is .75 ^ (depth + 1 - l) of the head's, with l = 0 in front of
    the blocks, and only matrices decay; every parameter is in exactly one group."""
    model, cfg = model_of(toy, layer_decay=0.75, weight_decay=0.05)
    block = ("norm1.weight", "norm1.bias", "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight",
             "attn.proj.bias", "norm2.weight", "norm2.bias", "mlp.fc1.weight", "mlp.fc1.bias",
             "mlp.fc2.weight", "mlp.fc2.bias")
    layers = {"patch_embed.proj.weight": 0, "patch_embed.proj.bias": 0, "pos_embed": 0,
              "cls_token": 0, "norm.weight": 4, "norm.bias": 4, "head.weight": 4, "head.bias": 4}
    for i in range(3):
        layers |= {f"blocks.{i}.{name}": i + 1 for name in block}
    matrices = ("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight")
    expected = {}
    for name, layer in layers.items():
        rate = {0: 0.31640625, 1: 0.421875, 2: 0.5625, 3: 0.75, 4: 1.0}[layer]
        expected[name] = (rate, 0.05 if name.endswith(matrices) else 0.0)
    names = {p: name.removeprefix("base.encoder.") for name, p in model.named_parameters()}
    found = {}
    for group in groups(model, cfg):
        for p in group["params"]:
            assert names[p] not in found
            found[names[p]] = (group["scale"], group["weight_decay"])
    assert found == expected
    assert layer_of("base.encoder.blocks.11.norm1.weight", 12) == 12

def test_all_is_trained_but_fixed_position_codes(tmp_path):
    for position in ("learned", "sincos"):
        model, cfg = model_of(checkpoint(tmp_path, moco_hidden=16, position=position))
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert frozen == ([] if position == "learned" else ["base.encoder.pos_embed"])
        grouped = sum(len(group["params"]) for group in groups(model, cfg))
        assert grouped == len(list(model.parameters())) - len(frozen)

def test_stochastic_depth_rises_from_block_to_block_and_rests_in_evaluation(toy):
    model, cfg = model_of(toy, drop_path=0.5)
    assert [block.drop for block in model.base["encoder"].blocks] == [0.0, 0.25, 0.5]
    images = ser.draw_images(8, 16, 1)[0]
    x = ser.normalise(images.float() / 255)
    plain = ser.load_encoder(toy)([x])[0].cls
    close(model.eval()(images), F.linear(plain, model.head.weight, model.head.bias))
    assert model.head.weight.std().item() == pytest.approx(0.01, rel=0.3)
    assert (model.head.bias == 0).all()
    assert not torch.equal(model.train()(images), model(images))

def test_the_learning_rate_warms_up_and_ends_at_zero():
    cfg = Settings(epochs=10, warmup_epochs=2, batch_size=512, base_lr=1e-3)
    n = 512 * 5 + 7     # 5 steps in an epoch
    assert (cfg.steps(n), cfg.save_steps(n)) == (50, 5)
    close(torch.tensor([cfg.lr_at(step, n) for step in (0, 5, 10, 30, 50)]),
          torch.tensor([0.0, 1e-3, 2e-3, 1e-3, 0.0]), 1e-7)
    short = dataclasses.replace(cfg, epochs=2, warmup_epochs=5)
    assert short.lr_at(1, n) == pytest.approx(2e-3) and short.lr_at(9, n) < 1e-3

# ==== Data ========================================================================================
def test_a_fraction_is_that_share_of_each_class():
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 3)
    paths = [f"{label}/{i}" for i, label in enumerate(labels.tolist())]
    split = Split(paths, labels, [0, 1, 2])
    tenth = fraction_of(split, 0.1, seed=0)
    assert tenth.labels.tolist() == [0] * 4 + [1] * 2 + [2]
    assert all(path.startswith(f"{label}/") for path, label in zip(tenth.source, tenth.labels))
    fifth = fraction_of(split, 0.2, seed=0)
    assert set(tenth.source) < set(fifth.source) and len(fifth.labels) == 13
    assert fraction_of(split, 0.1, seed=1).source != tenth.source
    assert fraction_of(split, 1.0, seed=3).source == paths
    pixels = torch.arange(63, dtype=torch.uint8).view(63, 1, 1, 1)
    drawn = fraction_of(split._replace(source=pixels), 0.1, seed=0)
    assert [paths[i] for i in drawn.source.flatten().tolist()] == tenth.source

# ==== Training ====================================================================================
def test_learning_rate_zero_leaves_everything(toy, drawn):
    model, cfg = model_of(toy)
    images = finetune.Labelled(coloured(), 16, 0)
    before, _ = finetune.accuracy(model, images, cfg, torch.device("cpu"))
    result = finetune.finetune(Settings(checkpoint=toy, **QUICK | dict(base_lr=0.0)))
    assert {name: result[name] for name in before} == before
    after = ser.load_checkpoint(Path(toy).with_name("finetune.pt"))["model"]
    assert same(after, dict(model.state_dict()))

def test_the_rate_of_each_layer_is_scaled(toy, drawn):
    """With a decay of almost 0 per block, only what is behind the blocks moves."""
    cfg = Settings(checkpoint=toy, **QUICK | dict(epochs=1, layer_decay=1e-8, weight_decay=0.0))
    finetune.finetune(cfg)
    model, _ = model_of(toy)
    after = ser.load_checkpoint(Path(toy).with_name("finetune.pt"))["model"]
    for name, before in model.state_dict().items():
        moves = name.startswith(("head", "base.encoder.norm"))
        assert ((after[name] - before).abs().max() > 1e-5) == moves, name

def test_the_loss_is_the_smoothed_cross_entropy_of_the_probes_crops(toy, drawn):
    """Smoothing by s: (1 - s) times the cross-entropy plus s times that with the uniform target."""
    settings = dict(base_lr=0.0, drop_path=0.0, batch_size=24, epochs=1, seed=3)
    settings |= dict(label_smoothing=0.25)
    result = finetune.finetune(Settings(checkpoint=toy, **QUICK | settings))
    model, _ = model_of(toy, **settings)
    crops = Crops(coloured(), 16, seed=3)
    images, labels = zip(*(crops[0, index] for index in range(24)))
    log_p = model.eval()(torch.stack(images)).log_softmax(1)
    own = -log_p[torch.arange(24), torch.tensor(labels)].mean()
    close(torch.tensor(result["losses"]), (0.75 * own - 0.25 * log_p.mean()).view(1), 1e-6)

def test_a_run_is_a_plain_loop_over_its_batches(toy, drawn):
    """Step by step: the crops of the order, the loss, its gradient alone, and AdamW at the rate of
    the step times the scale of the layer; the losses are means over the steps of an epoch."""
    model, cfg = model_of(toy, warmup_epochs=1, drop_path=0.0, label_smoothing=0.0)
    result = finetune.finetune(cfg)
    crops = Crops(coloured(), 16, cfg.seed)
    optimizer = torch.optim.AdamW(groups(model, cfg))
    losses = []
    for step, keys in enumerate(ser.batch_keys(24, cfg, 0, 6)):
        images, labels = zip(*(crops[key.epoch, key.index] for key in keys))
        loss = F.cross_entropy(model(torch.stack(images)), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr_at(step, 24) * group["scale"]
        optimizer.step()
        losses.append(loss.item())
    close(torch.tensor(result["losses"]), torch.tensor(losses).view(2, 3).mean(1), 1e-6)
    after = ser.load_checkpoint(Path(toy).with_name("finetune.pt"))["model"]
    for name, weight in model.state_dict().items():
        close(after[name], weight, 1e-6)

def test_it_learns_the_images_it_sees(toy, drawn):
    fast = dict(epochs=10, base_lr=0.15, drop_path=0.0, layer_decay=1.0, label_smoothing=0.0)
    result = finetune.finetune(Settings(checkpoint=toy, **QUICK | fast))
    assert result["top1"] > 80 and result["top5"] >= result["top1"]     # chance: 16.7
    assert result["losses"][-1] < 0.8 * result["losses"][0]

def test_a_resumed_run_is_bit_for_bit_the_run_without_a_break(toy, drawn, tmp_path, monkeypatch):
    whole = Settings(checkpoint=toy, **QUICK, out=str(tmp_path / "whole.json"))
    broken = dataclasses.replace(whole, out=str(tmp_path / "broken.json"))
    finetune.finetune(whole)
    save = ser.save_whole

    def save_and_stop(path, state):
        save(path, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ser, "save_whole", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            finetune.finetune(broken)
    assert ser.load_checkpoint(tmp_path / "broken.pt")["step"] == 3
    assert not Path(broken.out).exists()
    finetune.finetune(broken)
    states = [ser.load_checkpoint(tmp_path / name) for name in ("whole.pt", "broken.pt")]
    assert same(*states) and states[0]["step"] == 6
    results = [json.loads(Path(cfg.out).read_text()) for cfg in (whole, broken)]
    assert results[0]["top1"] == results[1]["top1"] and results[0]["losses"] == results[1]["losses"]
    with pytest.raises(ser.UserError, match="another run .epochs 2 there, 3 here.*use a new --out"):
        finetune.finetune(dataclasses.replace(broken, epochs=3))
    again = finetune.finetune(dataclasses.replace(broken, workers=1))     # finished: only evaluated
    assert again["losses"] == results[0]["losses"]

def test_the_state_of_another_checkpoint_or_data_set_is_refused(toy, drawn, tmp_path):
    """Also where it lies at the same place."""
    cfg = Settings(checkpoint=toy, **QUICK | dict(epochs=1))
    finetune.finetune(cfg)
    fewer = dataclasses.replace(cfg, fraction=0.5, out=str(cfg.result))
    with pytest.raises(ser.UserError, match="images 24, .* there, 12, .* here"):
        finetune.finetune(fewer)
    checkpoint(tmp_path, moco_hidden=16, seed=1)
    with pytest.raises(ser.UserError, match="a result of another checkpoint"):
        finetune.finetune(cfg)
    cfg.result.unlink()     # interrupted before there was one
    with pytest.raises(ser.UserError, match="sha256 .* there"):
        finetune.finetune(cfg)

@pytest.mark.parametrize("other", ["images", "classes"])
def test_as_many_other_images_or_classes_are_another_run(other, toy, tmp_path):
    """A finished run would else be scored on a data set that it has not learned from."""
    data = image_folder(tmp_path / "data", train=4, val=2)
    cfg = Settings(checkpoint=toy, data=data, **QUICK | dict(epochs=1))
    finetune.finetune(cfg)
    if other == "images":
        image = next(Path(data, "train", "n01").iterdir())
        image.rename(image.with_name("another.png"))
    else:
        for split in ("train", "val"):
            Path(data, split, "n01").rename(Path(data, split, "n011"))
    with pytest.raises(ser.UserError, match=f"another run .{other} .* there"):
        finetune.finetune(cfg)

def test_the_head_multiplies_in_float32(toy, monkeypatch):
    """On a GPU the encoder is in bfloat16; so coarse, the logits of many classes would tie."""
    within = []
    monkeypatch.setattr(finetune.torch, "autocast", lambda *_, **__: Within(within))
    model, _ = model_of(toy)
    seen = []
    for module in (model.base["encoder"], model.head):
        module.register_forward_hook(lambda *_: seen.append(len(within)))
    assert model(torch.zeros(2, 3, 16, 16)).dtype == torch.float32 and seen == [1, 0]

class Within:
    """A context: the list holds an item while one is inside."""

    def __init__(self, within):
        self.within = within

    def __enter__(self):
        self.within.append(self)

    def __exit__(self, *_):
        self.within.pop()

class Heard(torch.utils.data.Dataset):
    """Its items are what the process that reads them does on a stop signal."""
    collate = staticmethod(list)

    def __len__(self):
        return 2

    def __getitem__(self, key):
        return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

def test_loader_processes_leave_stop_signals_to_the_training():
    """Ctrl-C reaches all processes, and one line on the screen is enough."""
    cfg = Settings(**QUICK | dict(batch_size=2, workers=1))
    batch, = training.loader_of(Heard(), cfg, 0, 1)
    assert batch == [(signal.SIG_IGN, signal.SIG_IGN)] * 2

def rank_main(rank, ranks, folder):
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=ranks)
    cfg = Settings(data=f"{folder}/images", checkpoint=f"{folder}/last.pt",
                   out=f"{folder}/two.json", **QUICK | dict(drop_path=0.0, epochs=1))
    if rank > 0:     # only rank 0 writes
        ser.save_whole = training.write_json = lambda *_: os._exit(3)
    found = finetune.finetune(cfg)
    assert finetune.finetune(cfg)["broken"] == found["broken"]     # finished: only evaluated
    spoilt = dataclasses.replace(cfg, data=f"{folder}/spoilt", out=f"{folder}/spoilt.json")
    with pytest.raises(ser.UserError, match="4 of 48 images cannot be read"):
        finetune.finetune(spoilt)
    with pytest.raises(ser.UserError, match="--batch-size 9: 2 ranks share it"):
        finetune.finetune(dataclasses.replace(cfg, batch_size=9, out=f"{folder}/nine.json"))
    dist.destroy_process_group()
    os._exit(0)     # gloo's threads can abort an interpreter that ends normally

def spoilt_folder(root, cfg):
    """image_folder's, where each of two ranks meets two broken files of train in an epoch."""
    image_folder(root)
    Image.new("RGB", (24, 24)).save(root / "train/n00/000.png")     # mended
    paths = sorted(root.glob("train/*/*.png"))
    for rank in (0, 1):
        first = next(ser.batch_keys(48, cfg, 0, 6, rank, 2))
        for key in first[:2]:
            paths[key.index].write_bytes(b"no image")

def test_two_ranks_equal_one(toy, tmp_path):
    """Weights, accuracy and broken files, where each of the ranks meets one broken file or none;
    four broken files are too many, although neither rank alone meets more than the three that are
    tolerated."""
    data = image_folder(tmp_path / "images")
    spoilt_folder(tmp_path / "spoilt", Settings(**QUICK))
    run_ranks(rank_main, 2, tmp_path)
    cfg = Settings(data=data, checkpoint=toy, **QUICK | dict(drop_path=0.0, epochs=1))
    one = finetune.finetune(cfg)
    two = json.loads((tmp_path / "two.json").read_text())
    assert (one["top1"], one["top5"], one["broken"]) == (two["top1"], two["top5"], two["broken"])
    close(torch.tensor(one["losses"]), torch.tensor(two["losses"]))
    models = [ser.load_checkpoint(tmp_path / name)["model"] for name in ("finetune.pt", "two.pt")]
    assert not same(models[0], dict(model_of(toy)[0].state_dict()))
    for name, weight in models[0].items():
        close(weight, models[1][name], 1e-4)

# ==== Command line ================================================================================
def test_the_command_on_class_folders(toy, tmp_path, capsys):
    """Broken files are named, teach nothing and are wrong; the weights are a checkpoint."""
    data = image_folder(tmp_path / "images", val=10)
    argv = ["--data", data, "--checkpoint", toy, "--epochs", "1", "--batch-size", "8", "--workers",
            "0", "--fraction", "0.5", "--random-init"]
    assert finetune.main(argv) == 0
    printed = capsys.readouterr().out
    assert "untrained encoder, 50% of the labels" in printed and "75.02   92.12" in printed
    result = json.loads((tmp_path / "finetune-0.5-random-init.json").read_text())
    assert result["images"] == {"train": 24, "val": 60}
    damaged = f"{data}/val/n00/048.png"
    assert damaged in result["broken"] and f"cannot read {damaged}" in printed
    assert result["top5"] <= 100 * 59 / 60
    fine = str(tmp_path / "finetune-0.5-random-init.pt")
    moved = ser.load_encoder(fine).state_dict()
    assert not same(moved, eval_linear.untrained(0, ser.load_encoder(toy).shape).state_dict())

def test_a_checkpoint_of_dino(tmp_path, drawn):
    path = checkpoint(tmp_path, dino.build, dino.Settings, hidden=16, outputs=32)
    result = finetune.finetune(Settings(checkpoint=path, **QUICK | dict(epochs=1, seed=3)))
    assert result["encoder"] == "trained"
    # Other scripts read the encoder's settings there, as the seed of --random-init.
    fine = ser.load_checkpoint(tmp_path / "finetune.pt")
    assert fine["config"] == ser.load_checkpoint(path)["config"] and fine["identity"]["seed"] == 3
    student = ser.load_checkpoint(path)["model"]
    for name, value in model_of(path)[0].base["encoder"].state_dict().items():
        assert torch.equal(value, student[f"base.encoder.{name}"])

@pytest.mark.parametrize("argv, line", [
    (["--fraction", "0"], "--fraction 0.0: must lie in 1e-09..1"),
    (["--batch-size", "4096"], "--batch-size 4096: of 24 images; try 24"),
    (["--base-lr", "1e30", "--epochs", "3", "--batch-size", "8"], "the loss is nan"),
    (["--checkpoint", "nowhere.pt"], "nowhere.pt is missing")])
def test_mistakes_are_one_line(argv, line, toy, drawn, capsys):
    assert finetune.main(["--checkpoint", toy, *argv] if "--checkpoint" not in argv else argv) == 2
    printed = capsys.readouterr().err.splitlines()
    error = [text for text in printed if text.startswith("-m paper.evaluations.finetune:")]
    assert len(error) == 1 and line in error[0]

def test_more_than_one_broken_file_in_a_thousand_stops(toy, tmp_path):
    training.check_broken({"a", "b", "c"}, 100)
    training.check_broken(set("abcde"), 5000)
    with pytest.raises(ser.UserError, match="6 of 5000 images cannot be read, as a"):
        training.check_broken(set("abcdef"), 5000)
