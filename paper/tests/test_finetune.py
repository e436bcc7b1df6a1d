"""What paper/evaluations/finetune.py promises, and that all evaluations' headers can be pasted."""
import importlib
import json
import re
import shlex

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import eval_linear
import ser
from paper.evaluations import finetune
from paper.evaluations.finetune import Classifier, groups, settings, train
from paper.tests.toys import (become_rank, class_folders, seeded, stop_after_a_save,
                              toy_checkpoint, values)

QUICK = ["--epochs", "2", "--batch-size", "8", "--workers", "0"]

@pytest.mark.parametrize("name", ["bench3die", "coco", "correspondence", "finetune", "robustness",
                                  "transformations", "tsne"])
def test_every_command_of_a_header_parses(name):
    """Those of eval_linear.py, too, also over two lines; there is a checkpoint where data are."""
    module = importlib.import_module(f"paper.evaluations.{name}")
    lines = re.findall(r"^    python (.*)", module.__doc__.replace("\\\n", " "), re.M)
    assert lines
    for line in lines:
        script, *words = shlex.split(line, comments=True)
        assert ("--checkpoint" in words) == (len(words) > 2)
        if script == "eval_linear.py":
            eval_linear.arguments().parse_args(words)
        else:
            assert words[0] == module.__name__
            module.settings(words[1:])

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
    args = settings([*QUICK, "--label-smoothing", "0.25"])
    args.warmup_epochs = 1
    model = model_of(tmp_path)
    images, labels = colours()
    train(model, TensorDataset(images, labels), args, {}, tmp_path / "finetune.pt")
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

def test_two_ranks_share_the_images_of_every_step(tmp_path, monkeypatch):
    images = torch.arange(24, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 16, 16)
    seen = []
    for rank in (None, 0, 1):
        if rank is not None:
            become_rank(monkeypatch, rank)
        model = model_of(tmp_path)
        model.register_forward_pre_hook(lambda _, given: seen.append(given[0][:, 0, 0, 0].tolist()))
        train(model, TensorDataset(images, colours()[1]), settings(QUICK), {}, tmp_path / f"{rank}.pt")
    for whole, first, second in zip(seen[:6], seen[6:12], seen[12:]):
        assert len(set(whole)) == 8 and sorted(first + second) == sorted(whole)

def test_a_run_learns_its_task(tmp_path, monkeypatch, capsys):
    """Colours in place of the synthetic images: 100 %, beside the paper's rows."""
    path = toy_checkpoint(tmp_path, shaken=False)
    data = TensorDataset(*colours())
    monkeypatch.setattr(eval_linear, "load_sets",
                        lambda *_: (range(6), {"train": data, "val": data}))
    finetune.finetune(settings([*QUICK, "--checkpoint", path, "--epochs", "20", "--base-lr", "0.1",
                                "--layer-decay", "1"]))
    assert values(tmp_path / "finetune.json")["fine-tuned top-1 %"] == 100
    assert "74.33" in capsys.readouterr().out

def test_the_command_goes_on_and_replaces_nothing_of_other_settings(tmp_path, monkeypatch):
    """On class folders. Scored without stochastic depth; random weights are the run's first."""
    for split, per_class in (("train", 2), ("val", 12)):
        class_folders(tmp_path / split, per_class, size=18)
    path = toy_checkpoint(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    line = [*QUICK, "--data", str(tmp_path), "--checkpoint", path, "--drop-path", "0.9"]
    finetune.finetune(settings([*line, "--out", str(whole)]))
    stop_after_a_save(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        finetune.finetune(settings([*line, "--out", str(parts)]))
    finetune.finetune(settings([*line, "--out", str(parts)]))
    state = torch.load(whole / "finetune.pt")
    for name, weight in torch.load(parts / "finetune.pt")["model"].items():
        assert torch.equal(state["model"][name], weight)
    log = (parts / "finetune.jsonl").read_text().splitlines()
    assert [json.loads(one)["step"] for one in log] == [1, 2]
    val = eval_linear.class_folder(tmp_path / "val", eval_linear.eval_transform(16))
    features, labels = eval_linear.extract(ser.load_encoder(whole / "finetune.pt"), val, 1,
                                           settings(line))
    logits = F.linear(features, state["model"]["head.weight"], state["model"]["head.bias"])
    scored = [*values(whole / "finetune.json").values()]
    assert scored == eval_linear.accuracy(logits, labels, torch.arange(6))
    with pytest.raises(SystemExit):
        finetune.finetune(settings([*line, "--out", str(parts), "--epochs", "3"]))
    finetune.finetune(settings([*line, "--out", str(parts), "--random-init", "--base-lr", "0"]))
    assert torch.load(parts / "finetune.pt")["step"] == 2
    assert [*values(parts / "finetune.json", encoder="trained").values()] == scored
    toy_checkpoint(tmp_path, shaken=False)
    begun = ser.load_encoder(parts / "finetune-random.pt")
    assert torch.equal(begun.pos_embed, ser.load_encoder(path).pos_embed)
