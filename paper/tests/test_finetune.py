"""What paper/evaluations/finetune.py promises."""
import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import ser
from paper.evaluations import finetune
from paper.evaluations.finetune import Classifier, groups, settings, train
from paper.tests.toys import CLASSES, class_folders, seeded, toy_checkpoint

QUICK = ["--epochs", "2", "--warmup-epochs", "0", "--batch-size", "8", "--workers", "0"]

def colours(n=24):
    """Images of six classes, each of a colour of its own, with some noise."""
    labels = torch.arange(n) % 6
    rgb = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1]])[labels]
    images = 0.9 * rgb[:, :, None, None] + 0.1 * torch.rand(n, 3, 16, 16, generator=seeded(2))
    return (255 * images).to(torch.uint8), labels

def model_of(folder, drop_path=0.0):
    torch.manual_seed(0)
    return Classifier(ser.load_encoder(toy_checkpoint(folder, shaken=False)), 6, drop_path)

def test_rates_and_decays_are_those_of_a_list_made_by_hand(tmp_path):
    """.75 ** (number of layers above), and only matrices decay; every parameter is in one group."""
    model = model_of(tmp_path)
    rates = {"head": 1.0, "norm": 1.0, "blocks.2": 0.75, "blocks.1": 0.5625, "blocks.0": 0.421875,
             "pos_embed": 0.31640625, "cls_token": 0.31640625, "patch_embed": 0.31640625}
    matrices = ("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight")
    names = {p: name.removeprefix("encoder.") for name, p in model.named_parameters()}
    found = {}
    for group in groups(model, settings(QUICK)):
        p, = group["params"]
        assert names[p] not in found and p.requires_grad
        found[names[p]] = (group["scale"], group["weight_decay"])
    assert found.keys() == set(names.values())
    for name, pair in found.items():
        rate, = [rate for start, rate in rates.items() if name.startswith(start)]
        assert pair == (rate, 0.05 if name.endswith(matrices) else 0.0), name

def test_branches_are_skipped_more_often_in_later_blocks_and_only_in_training(tmp_path):
    model = model_of(tmp_path, drop_path=0.5)
    torch.manual_seed(0)
    for block, share in zip(model.encoder.blocks, (0.0, 0.25, 0.5)):
        for layer in (block.attn["proj"], block.mlp["fc2"]):
            branch = layer(torch.randn(2000, 1, layer.in_features, generator=seeded(1)))
            assert (branch == 0).all(2).float().mean() == pytest.approx(share, abs=0.03)
    images, _ = colours()
    plain = ser.load_encoder(tmp_path / "last.pt")(ser.normalise(images / 255)).cls
    torch.testing.assert_close(model.eval()(images), F.linear(plain, model.head.weight))

def test_training_is_a_plain_loop_over_its_batches(tmp_path):
    """The order of the epoch; the smoothed loss; AdamW at the rate of the step and layer."""
    args = settings([*QUICK, "--warmup-epochs", "1", "--label-smoothing", "0.25"])
    model = model_of(tmp_path)
    images, labels = colours()
    train(model, TensorDataset(images, labels), args)
    plain = model_of(tmp_path)
    optimizer = torch.optim.AdamW(groups(plain, args))
    for step in range(6):
        order = torch.randperm(24, generator=ser.rng(0, "finetune", step // 3))
        rows = order[step % 3 * 8:step % 3 * 8 + 8]
        log_p = plain(images[rows]).log_softmax(1)
        loss = -0.75 * log_p[torch.arange(8), labels[rows]].mean() - 0.25 * log_p.mean()
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            share = [0, 1 / 3, 2 / 3, 1, 0.75, 0.25][step]     # one epoch of warmup, one of decay
            group["lr"] = 5e-4 * 8 / 256 * share * group["scale"]
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)

def test_a_run_learns_its_task_and_leaves_a_checkpoint(tmp_path, monkeypatch, capsys):
    """Colours in place of the drawn images: 100 %, and the paper's rows are of another task."""
    path = toy_checkpoint(tmp_path, shaken=False)
    data = TensorDataset(*colours())
    monkeypatch.setattr(finetune, "load_sets", lambda *_: (range(6), {"train": data, "val": data}))
    finetune.finetune(settings([*QUICK, "--checkpoint", path, "--epochs", "20", "--base-lr", "0.1",
                                "--layer-decay", "1"]))
    assert json.loads((tmp_path / "finetune.json").read_text())["top1"] == 100
    printed = capsys.readouterr().out
    assert "74.33" in printed and "1000 classes, not of these 6" in printed
    head = torch.load(tmp_path / "finetune.pt", weights_only=True)["head"]
    cls = ser.load_encoder(tmp_path / "finetune.pt")(ser.normalise(data.tensors[0] / 255)).cls
    assert (F.linear(cls, **head).argmax(1) == data.tensors[1]).all()

def test_the_command_on_class_folders(tmp_path):
    """From the weights that the run began with, whatever has become of them."""
    for split in ("train", "val"):
        class_folders(tmp_path / split)
    path = toy_checkpoint(tmp_path)
    finetune.finetune(settings([*QUICK, "--data", str(tmp_path), "--checkpoint", path,
                                "--random-init", "--base-lr", "0"]))
    assert torch.load(tmp_path / "finetune.pt", weights_only=True)["classes"] == CLASSES
    toy_checkpoint(tmp_path, shaken=False)
    wanted = ser.load_encoder(path).pos_embed
    assert torch.equal(ser.load_encoder(tmp_path / "finetune.pt").pos_embed, wanted)
