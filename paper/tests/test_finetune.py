"""What paper/evaluations/finetune.py promises."""
import json

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import eval_linear
import ser
from paper.evaluations import finetune
from paper.evaluations.finetune import Classifier, groups, settings, train
from paper.tests.toys import become_rank, class_folders, seeded, toy_checkpoint, values

QUICK = ["--epochs", "2", "--batch-size", "8", "--workers", "0"]

def model_of(folder, drop_path=0.0):
    torch.manual_seed(0)
    return Classifier(ser.load_encoder(toy_checkpoint(folder, shaken=False)), 6, drop_path)

def test_rates_and_decays_are_those_of_a_list_made_by_hand(tmp_path):
    """.75 ** (number of layers above), and only matrices decay; every parameter is in one group."""
    model = model_of(tmp_path)
    rates = {"head": 1.0, "norm": 1.0, "blocks.2": 0.75, "blocks.1": 0.5625, "blocks.0": 0.421875,
             "pos_embed": 0.31640625, "cls_token": 0.31640625, "patch_embed": 0.31640625}
    matrices = ("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight")
    found = {group["params"][0]: group for group in groups(model, settings(QUICK))}
    assert len(found) == len(groups(model, settings(QUICK))) == len([*model.parameters()])
    for name, p in model.named_parameters():
        short = name.removeprefix("encoder.")
        rate, = [rate for start, rate in rates.items() if short.startswith(start)]
        decay = 0.05 if name.endswith(matrices) else 0.0
        assert p.requires_grad and (found[p]["scale"], found[p]["weight_decay"]) == (rate, decay)

def test_branches_are_skipped_more_often_in_later_blocks(tmp_path):
    model = model_of(tmp_path, drop_path=0.5)
    torch.manual_seed(0)
    for block, share in zip(model.encoder.blocks, (0.0, 0.25, 0.5)):
        for layer in (block.attn["proj"], block.mlp["fc2"]):
            branch = layer(torch.randn(2000, 1, layer.in_features, generator=seeded(1)))
            assert (branch == 0).all(2).float().mean() == pytest.approx(share, abs=0.03)

@pytest.mark.parametrize("rank", [None, 0, 1])
def test_training_is_a_plain_loop_over_its_batches(rank, tmp_path, monkeypatch):
    """In order, with AdamW at the rate of step and layer. Two ranks have every other image."""
    if rank is not None:
        become_rank(monkeypatch, rank)
    args = settings([*QUICK, "--label-smoothing", "0.25"])
    args.warmup_epochs = 1
    model = model_of(tmp_path)
    images = torch.randint(256, (24, 3, 16, 16), generator=seeded(2), dtype=torch.uint8)
    labels = torch.arange(24) % 6
    keys = []
    monkeypatch.setattr(eval_linear, "Seeded", lambda data, *key: keys.append(key) or data)
    train(model, TensorDataset(images, labels), args, {}, tmp_path / "finetune.pt")
    assert keys == [(0, 0), (0, 1)]
    plain = model_of(tmp_path)
    optimizer = torch.optim.AdamW(groups(plain, args))
    for step in range(6):
        order = torch.randperm(24, generator=ser.rng(0, "finetune", step // 3))
        rows = order[step % 3 * 8:step % 3 * 8 + 8][rank::1 if rank is None else 2]
        log_p = plain(images[rows]).log_softmax(1)
        right = log_p[torch.arange(len(rows)), labels[rows]]
        optimizer.zero_grad()
        (-0.75 * right.mean() - 0.25 * log_p.mean()).backward()
        for group in optimizer.param_groups:
            share = [0, 1 / 3, 2 / 3, 1, 0.75, 0.25][step]     # one epoch of warmup, one of decay
            group["lr"] = 5e-4 * 8 / 256 * share * group["scale"]
        optimizer.step()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)

def test_the_command_goes_on_and_replaces_nothing_of_other_settings(tmp_path, monkeypatch):
    """On class folders. Scored without stochastic depth; random weights are the run's first."""
    for split, per_class in (("train", 2), ("val", 12)):
        class_folders(tmp_path / split, per_class, size=18)
    path = toy_checkpoint(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    line = [*QUICK, "--data", str(tmp_path), "--checkpoint", path, "--drop-path", "0.9", "--out"]
    finetune.finetune(settings([*line, str(whole)]))
    assert [json.loads(line)["step"] for line in open(whole / "finetune.jsonl")] == [1, 2]
    with monkeypatch.context() as stop:
        stop.setattr(ser, "record", lambda log, bar, step, *_: 1 // (2 - step))
        with pytest.raises(ZeroDivisionError):
            finetune.finetune(settings([*line, str(parts)]))
    finetune.finetune(settings([*line, str(parts)]))
    state = torch.load(parts / "finetune.pt")
    for name, weight in torch.load(whole / "finetune.pt")["model"].items():
        assert torch.equal(state["model"][name], weight)
    val = eval_linear.class_folder(tmp_path / "val", eval_linear.eval_transform(16))
    encoder = ser.load_encoder(parts / "finetune.pt")
    features, labels = eval_linear.extract(encoder, val, 1, settings([*line, ""]))
    logits = F.linear(features, state["model"]["head.weight"], state["model"]["head.bias"])
    scored = [*values(parts / "finetune.json").values()]
    assert scored == eval_linear.accuracy(logits, labels, torch.arange(6))
    with pytest.raises(SystemExit):
        finetune.finetune(settings([*line, str(parts), "--epochs", "3"]))
    finetune.finetune(settings([*line, str(parts), "--random-init", "--base-lr", "0"]))
    assert torch.load(parts / "finetune.pt")["step"] == 2
    assert [*values(parts / "finetune.json", encoder="trained").values()] == scored
    toy_checkpoint(tmp_path, shaken=False)
    begun = ser.load_encoder(parts / "finetune-random.pt")
    assert torch.equal(begun.pos_embed, ser.load_encoder(path).pos_embed)
