import shutil

import pytest
import torch

import eval_linear
import ser
from paper.evaluations import finetune, training_settings
from paper.tests.toys import call, parsed, stopped_after_3, toy_checkpoint, train_and_val, values
from test_ser import F, close, pixels, run_ranks, same, sentence

QUICK = "--data D --checkpoint C --epochs 2 --batch-size 8 --workers 0"


def model_of(folder):
    torch.manual_seed(0)
    return finetune.Classifier(ser.load_encoder(toy_checkpoint(folder)), 6, 0.0)


def test_the_recipe_is_plain_and_has_mae_s_rates():
    recipe = dict(epochs=50, warmup_epochs=5, batch_size=1024, base_lr=5e-4, weight_decay=0.05,
                  layer_decay=0.75, drop_path=0.1, label_smoothing=0.1)
    assert recipe.items() <= vars(parsed(finetune, "--data D --checkpoint C")).items()


def test_logits_are_fp32_under_autocast(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_linear, "autocast", lambda x: torch.autocast("cpu", torch.bfloat16))
    assert model_of(tmp_path)(pixels(2, 3, 16, 16)).dtype == torch.float32


def test_training_is_a_plain_loop_over_its_batches(tmp_path, monkeypatch):
    """At .75 ** (layers above) times its rate; only matrices decay; 2 of 26 images are not used."""
    line = f"{QUICK} --label-smoothing 0.25 --weight-decay 20 --base-lr 0.05 --seed 3"
    args = parsed(finetune, line)
    assert args.warmup_epochs == 0.2
    args.warmup_epochs = 1
    images = pixels(26, 3, 16, 16)
    labels = torch.arange(26) % 6
    keys = []
    monkeypatch.setattr(eval_linear, "Seeded", lambda data, *key: keys.append(key) or data)
    model = model_of(tmp_path)
    seeds = set()     # of stochastic depth
    model.register_forward_pre_hook(lambda *_: seeds.add(torch.initial_seed()))
    finetune.train(model, [*zip(images, labels)], args, {}, tmp_path / "finetune.pt")
    assert keys == [(3, 0), (3, 1)]
    assert seeds == {ser.seed_of(3, "finetune", step, 0) for step in range(6)}

    plain = model_of(tmp_path)
    above = {"head": 0, "encoder.norm": 0, "encoder.blocks.2": 1, "encoder.blocks.1": 2,
             "encoder.blocks.0": 3, "encoder.p": 4, "encoder.cls": 4}
    matrices = ("proj.weight", "qkv.weight", "fc1.weight", "fc2.weight", "head.weight")
    groups = []
    for name, p in plain.named_parameters():
        layers, = [above[start] for start in above if name.startswith(start)]
        decay = 20 if name.endswith(matrices) else 0
        assert p.requires_grad, name
        groups.append(dict(params=[p], scale=0.75 ** layers, weight_decay=decay))
    optimizer = torch.optim.AdamW(groups)
    for step, share in enumerate([0, 1 / 3, 2 / 3, 1, 0.75, 0.25]):     # warmup, then decay
        order = torch.randperm(26, generator=ser.rng(3, "finetune", step // 3))
        rows = order[:24].view(3, 8)[step % 3]
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 8 / 256 * share * group["scale"]
        optimizer.zero_grad()
        cls = plain.encoder(ser.normalise(images[rows] / 255)).cls
        F.cross_entropy(plain.head(cls), labels[rows], label_smoothing=0.25).backward()
        optimizer.step()
    close(model.state_dict(), plain.state_dict(), 1e-6)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("finetune")
    train_and_val(root / "data", 3, 12, size=18, seed=5)
    shutil.rmtree(root / "data/val/n05")     # scores are among all classes
    line = f"{QUICK} --data {root}/data --checkpoint {toy_checkpoint(root)}"
    call(finetune, line, f"--out {root}/whole")
    return root / "whole", line


def weights_of(folder):
    return torch.load(folder / "finetune.pt", weights_only=True)["model"]


def test_a_stopped_training_goes_on(done, tmp_path, monkeypatch):
    whole, line = done
    with stopped_after_3(monkeypatch):
        call(finetune, line, f"--out {tmp_path}")
    assert torch.load(tmp_path / "finetune.pt")["step"] == 2     # an epoch
    call(finetune, line, f"--out {tmp_path}")
    assert same(weights_of(tmp_path), weights_of(whole))


def test_the_score_is_that_of_the_head_on_val(done):
    whole, _ = done
    data = eval_linear.ClassFolder(whole.parent / "data/val", eval_linear.eval_transform(16))
    encoder = ser.load_encoder(whole / "finetune.pt")
    close(encoder.state_dict(), ser.load_encoder(whole.parent / "last.pt").state_dict(), 1e-3)
    features, labels = eval_linear.extract(encoder, data, parsed(finetune, QUICK))
    head = weights_of(whole)
    logits = F.linear(features[:, -16:], head["head.weight"], head["head.bias"])
    top1, top5 = eval_linear.accuracy(logits, labels, torch.arange(6))
    found = values(whole / "finetune.json")
    assert found == {"fine-tuned top-1 %": top1, "fine-tuned top-5 %": top5}
    assert (whole / "finetune.json").read_text().count("train: 18 images") == 2     # in both rows
    assert (whole / "finetune.jsonl").exists()


def test_a_finished_head_is_not_trained_on_other_images(done, tmp_path, monkeypatch, capsys):
    whole, line = done
    load = eval_linear.load_sets
    monkeypatch.setattr(eval_linear, "load_sets", lambda *a: load(*a)._replace(train_centre=None))
    shutil.copytree(whole, tmp_path / "out")
    moved = shutil.copytree(whole.parent / "data", tmp_path / "moved")
    line = f"{line} --out {tmp_path}/out --data {moved}"
    call(finetune, line)
    assert "74.33  top-5  91.79" in capsys.readouterr().out     # the paper's SER
    assert same(weights_of(tmp_path / "out"), weights_of(whole))

    (moved / "train/n00/000.png").rename(moved / "train/n00/other.png")
    assert "finetune_checksum_of_names" in sentence(call, finetune, line)


def finetune_rank(rank, ranks, out, line):
    call(finetune, line, f"--out {out} --drop-path 0")
    return torch.initial_seed()     # of the last step


def test_two_ranks_train_and_score_as_one_process(done, tmp_path):
    whole, line = done
    finetune_rank(0, 1, tmp_path / "one", line)
    first, second = run_ranks(finetune_rank, 2, tmp_path / "two", line)
    assert first != second, "ranks share the draws of stochastic depth"
    close(weights_of(tmp_path / "two"), weights_of(tmp_path / "one"))
    assert not same(weights_of(tmp_path / "one"), weights_of(whole))
    found = values(tmp_path / "two/finetune.json", ranks=2)
    assert found == values(tmp_path / "one/finetune.json", ranks=1) != {}


def test_a_training_names_its_encoder_and_its_ranks_share_a_batch(monkeypatch):
    monkeypatch.setattr(ser, "ranks_and_rank", lambda: (3, 0))
    given = (eval_linear.Checkpoint(None, "weights", 7, {}), list("123456789"))
    for size in (8, 12):
        sentence(training_settings, "any", ser.Namespace(batch_size=size), *given)
    args = dict(batch_size=9, seed=4, epochs=3, checkpoint="C", workers=1, save_every=2)
    own = training_settings("any", ser.Namespace(**args, out="O", data="D"), *given)
    assert own == dict(any_batch_size=9, any_epochs=3, any_checkpoint="weights", any_ranks=3,
                       any_seed=4, any_images=9, any_checksum_of_names=ser.checksum("123456789"),
                       any_bf16=eval_linear.has_bf16(), data="D")
