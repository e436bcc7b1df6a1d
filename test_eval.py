"""What eval_linear.py claims, as executable sentences; the slow oracles are written from the paper's 4.1."""
from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.functional import pil_to_tensor

import eval_linear
import ser
from eval_linear import (Crops, Frozen, Heads, Settings, Split, accuracy, collect, evaluate, fit, knn, main,
                         parse)

EVAL_SHAPE = dict(image_size=16, patch_size=4, dim=16, depth=3, heads=2, cls_layer=1)


def eval_checkpoint(folder: Path, **changes) -> Path:
    """A checkpoint of an untrained tiny encoder, as ser.py writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = ser.Config(**{**EVAL_SHAPE, "moco_hidden": 8, "equiv_layers": (1,), **changes})
    model = ser.build(cfg)
    for p in model.base.encoder.parameters():   # not what random_init gives
        p.data.mul_(1.5)
    ser.save_checkpoint(folder / "last.pt", cfg, model, torch.optim.SGD(model.parameters(), lr=1.0), 7)
    return folder / "last.pt"


def eval_tree(root: Path, train: int = 9, val: int = 5, classes: int = 3) -> Path:
    """DATA/train/CLASS/*.png and DATA/val/CLASS/*.png of drawn textures, as many in each class as said."""
    for part, n in (("train", train), ("val", val)):
        images, labels = ser.draw_images(n * 8, 24, seed=len(part))
        for i, (image, label) in enumerate(zip(images, labels.tolist())):
            if label < classes:
                path = root / part / f"class{label}" / f"{i:03}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return root


def eval_frozen(n: int = 20, **settings) -> Frozen:
    """A frozen random encoder, and a train and a val split of drawn images."""
    torch.manual_seed(0)
    encoder = ser.ViT(**EVAL_SHAPE).eval()
    splits = {name: Split(*ser.draw_images(n, 20, seed), list(range(8)))
              for seed, name in enumerate(("train", "val"))}
    return Frozen(encoder, 2, Settings(**{"workers": 0, "batch_size": 8, **settings}), splits)


def eval_command(argv: list[str], capsys) -> str:
    """The one line on stderr of a command that must end with code 2."""
    assert main(argv) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("eval_linear.py: "), lines
    return lines[0]


def test_features_are_the_normalised_cls_of_the_last_blocks_written_by_hand():
    """Protocol: final LayerNorm on the outputs of the last blocks, their [CLS] concatenated, in order."""
    frozen = eval_frozen()
    images = torch.stack([Crops(frozen.splits["val"], 16, 0)[None, i][0] for i in range(5)])
    e, x = frozen.encoder, (images.float() / 255 - ser.MEAN) / ser.STD
    with torch.no_grad():
        t = e.patch_embed["proj"](x).flatten(2).mT + ser.position_codes(4, 4, 16, 4)
        t = e.blocks[0](t.flatten(0, 1), [(5, 16)]).view(5, 16, 16)
        t, found = torch.cat([e.cls_token.expand(5, 1, 16), t], 1), []
        for block in e.blocks[1:]:
            t = block(t.flatten(0, 1), [(5, 17)]).view(5, 17, 16)
            found.append(F.layer_norm(t[:, 0], (16,), e.norm.weight, e.norm.bias, 1e-6))
    features, labels = next(frozen.read("val", [[(None, i) for i in range(5)]]))
    torch.testing.assert_close(features, torch.cat(found, 1), rtol=1e-5, atol=1e-5)
    assert labels.tolist() == [0, 1, 2, 3, 4]
    # k-NN uses the last D numbers of it: the final embedding.
    torch.testing.assert_close(features[:, 16:], e([x])[0].cls, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("h, w", [(24, 40), (40, 24), (16, 16), (31, 47)])
def test_validation_crops_are_pillows_bicubic_resize_and_the_centre(h, w):
    """Protocol: resize the shorter side to 256 / 224 of the size, bicubic, then the centre."""
    image = torch.randint(256, (3, h, w), dtype=torch.uint8)
    short = round(16 * 256 / 224)
    size = (short * w // h, short) if w > h else (short, short * h // w)
    resized = pil_to_tensor(Image.fromarray(image.permute(1, 2, 0).numpy()).resize(size, Image.BICUBIC))
    top, left = (resized.shape[1] - 16) // 2, (resized.shape[2] - 16) // 2
    expected = resized[:, top:top + 16, left:left + 16]
    assert (eval_linear.centre_crop(image, 16).int() - expected.int()).abs().max() <= 1


def test_training_crops_depend_on_seed_epoch_and_index_alone():
    """Every draw comes from its key: workers, ranks and a resumed run see the same crops."""
    split = Split(*ser.draw_images(4, 40, 0), list(range(8)))
    crops = Crops(split, 16, seed=3)
    first = crops[2, 1][0]
    torch.rand(9)
    assert torch.equal(Crops(split, 16, seed=3)[2, 1][0], first)
    assert not torch.equal(crops[3, 1][0], first)
    assert not torch.equal(Crops(split, 16, seed=4)[2, 1][0], first)


def test_a_sweep_trains_each_rate_as_torch_would_train_it_alone():
    """Protocol: SGD, momentum .9, no weight decay, cosine to zero per step without warmup, for every rate."""
    g = torch.Generator().manual_seed(0)
    data = [(torch.randn(6, 5, generator=g), torch.randint(3, (6,), generator=g)) for _ in range(12)]
    lrs = [0.02, 0.3, 4.0]
    heads = Heads(lrs, 3, 5, seed=1)
    first = heads.weight[0].detach().clone()
    fit(heads, torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9), data, 0, 12, lambda step: None)
    for r, lr in enumerate(lrs):
        alone = torch.nn.Linear(5, 3)
        alone.load_state_dict({"weight": first, "bias": torch.zeros(3)})
        optimizer = torch.optim.SGD(alone.parameters(), lr=lr, momentum=0.9, weight_decay=0)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(alone(x), y).backward()
            optimizer.step()
            schedule.step()
        torch.testing.assert_close(heads.weight[r], alone.weight, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(heads.bias[r], alone.bias, rtol=1e-4, atol=1e-5)


def test_one_rate_of_the_command_equals_the_same_rate_within_a_sweep():
    """The batched product changes no head: through the loader, with crops and flips."""
    found = {}
    for rates in ((3.0,), (0.1, 3.0, 10.0)):
        cfg = dict(lr=rates, epochs=2, cache=True)
        frozen = eval_frozen(**cfg)
        found[rates] = eval_linear.linear(frozen, 8, frozen.cfg, {})["rates"]
    assert found[(3.0,)][0]["val"] == found[(0.1, 3.0, 10.0)][1]["val"]


def test_heads_start_from_normal_weights_and_zero_biases():
    """Protocol: N(0, .01), bias 0; the same for each rate, so that only the rate differs."""
    heads = Heads([1.0, 2.0], 100, 200, seed=0)
    assert abs(heads.weight.std().item() - 0.01) < 2e-4 and heads.bias.abs().max() == 0
    assert torch.equal(heads.weight[0], heads.weight[1])


def test_a_linear_problem_with_a_known_solution_is_solved():
    """Classes that a hyperplane separates are told apart without a mistake, and the weights point its way."""
    g = torch.Generator().manual_seed(0)
    normal = F.normalize(torch.randn(6, generator=g), dim=0)
    x = torch.randn(400, 6, generator=g)
    y = (x @ normal > 0).long()
    x += (2 * y[:, None] - 1) * normal   # a margin
    heads = Heads([0.001, 1.0], 2, 6, seed=0)
    batches = [(x[i:i + 50], y[i:i + 50]) for _ in range(40) for i in range(0, 400, 50)]
    fit(heads, torch.optim.SGD(heads.parameters(), lr=1.0, momentum=0.9), batches, 0, 320, lambda step: None)
    assert accuracy(heads, [(x, y)], [0, 1])[1] == {"top1": 100.0}
    assert F.cosine_similarity(heads.weight[1, 1] - heads.weight[1, 0], normal, dim=0) > 0.95


def test_accuracy_counts_by_rank_among_the_given_classes_only():
    """Protocol: top-1 and top-5; a set with fewer classes is scored among its own; label -1 is wrong."""
    heads = Heads([1.0], 8, 8, seed=0)
    heads.weight.data = torch.eye(8)[None]
    x = torch.arange(8.0).flip(0).expand(4, 8)              # class 0 first, 7 last
    y = torch.tensor([0, 4, 5, -1])
    assert accuracy(heads, [(x[:3], y[:3]), (x[3:], y[3:])], range(8)) == [{"top1": 25.0, "top5": 50.0}]
    assert accuracy(heads, [(x, torch.tensor([4, 5, 7, 4]))], [4, 5, 7]) == [{"top1": 50.0}]


def test_knn_is_a_loop_over_neighbours_with_exponential_votes():
    """Protocol: cosine, k = 20, weights exp(s / .07), as DINO."""
    g = torch.Generator().manual_seed(0)
    train, labels = torch.randn(60, 4, generator=g), torch.randint(5, (60,), generator=g)
    test, truth, right = torch.randn(30, 4, generator=g), torch.randint(5, (30,), generator=g), 0
    for x, y in zip(test, truth):
        pairs = [(F.cosine_similarity(x, t, dim=0).item(), c) for t, c in zip(train, labels.tolist())]
        pairs = sorted(pairs)[-20:]
        votes = [sum(math.exp(s / 0.07) for s, c in pairs if c == k) for k in range(5)]
        right += votes.index(max(votes)) == y
    assert knn(train, labels, test, truth) == pytest.approx(right / 30)
    assert knn(train, labels, train, labels, k=1) == 1.0


def test_two_gloo_ranks_give_the_accuracy_of_one_process_exactly(tmp_path):
    """Validation of 3 x 5 images in batches of 7 on two ranks: none is counted twice, none is left out."""
    tree, checkpoint = eval_tree(tmp_path / "data"), eval_checkpoint(tmp_path / "run")
    flags = ["--data", str(tree), "--checkpoint", str(checkpoint), "--batch-size", "7", "--epochs", "2",
             "--workers", "0", "--test", f"again={tree}/val"]
    kinds = {"linear": [], "cache": ["--cache", "--select-split", "0.3"]}
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def start(ranks: int, rank: int) -> subprocess.Popen:
        runs = [[*flags, *kind, "--out", str(tmp_path / f"{name}{ranks}.json")]
                for name, kind in kinds.items()]
        # gloo may abort an interpreter that ends normally, so that it must not.
        code = f"import os, eval_linear\ncodes = [eval_linear.main(a) for a in {runs}]\nos._exit(max(codes))"
        several = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost",
                   "MASTER_PORT": port}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                       **{k: str(v) for k, v in several.items() if ranks > 1}}
        return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=Path(__file__).parent,
                                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    processes = [start(1, 0), start(2, 0), start(2, 1)]
    try:
        for process in processes:
            errors = process.communicate(timeout=120)[1]
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    for name in kinds:
        one, two = (json.loads((tmp_path / f"{name}{ranks}.json").read_text()) for ranks in (1, 2))
        assert (one["ranks"], two["ranks"]) == (1, 2) and one["images"]["val"] == 15
        assert one["linear"] == two["linear"] and one.get("knn") == two.get("knn")
        assert all(row["val"] == row["again"] for row in two["linear"]["rates"])


def test_test_sets_are_matched_by_class_name_and_scored_among_their_own(tmp_path):
    """Protocol: ImageNet-R has 200 of the 1000 classes; a label is that of the training class of its name."""
    tree = eval_tree(tmp_path / "data")
    (tmp_path / "few").mkdir()
    os.symlink(tree / "val" / "class2", tmp_path / "few" / "class2")
    os.symlink(tree / "val" / "class0", tmp_path / "few" / "class0")
    cfg = parse(["--data", str(tree), "--test", f"few={tmp_path}/few", "--test", f"all={tree}/val"])
    classes, splits = collect(cfg, 16)
    assert classes == ["class0", "class1", "class2"] and list(splits) == ["train", "val", "few", "all"]
    assert splits["few"].labels.tolist() == [0] * 5 + [2] * 5 and splits["few"].among == [0, 2]
    assert splits["all"].among == [0, 1, 2]
    cfg = parse(["--data", str(tree), "--test", f"few={tmp_path}/few", "--all-classes"])
    assert collect(cfg, 16)[1]["few"].among == [0, 1, 2]


def test_select_split_holds_out_training_images_and_chooses_on_them(tmp_path):
    """Protocol: the release chooses the rate on a part of train; no image is on both sides."""
    tree, checkpoint = eval_tree(tmp_path / "data"), eval_checkpoint(tmp_path / "run")
    cfg = Settings(data=str(tree), checkpoint=str(checkpoint), select_split=0.3, cache=True, epochs=2,
                   workers=0)
    splits = collect(cfg, 16)[1]
    assert len(splits["train"].labels) == 19 and len(splits["held-out"].labels) == 8
    assert not set(splits["train"].source) & set(splits["held-out"].source)
    result = evaluate(cfg)["linear"]
    assert result["best"] == max(result["rates"], key=lambda row: row["held-out"]["top1"])
    assert result["chosen_on"] == "held-out"


def test_an_interrupted_run_continues_to_the_same_result(tmp_path, monkeypatch):
    """Resume: heads, momentum, order and crops go on as if nothing had happened; then the file is removed."""
    tree, checkpoint = eval_tree(tmp_path / "data"), eval_checkpoint(tmp_path / "run")
    cfg = Settings(data=str(tree), checkpoint=str(checkpoint), batch_size=8, epochs=4, workers=0,
                   lr=(0.1, 3.0))
    whole, seen, real = evaluate(cfg)["linear"], [], Frozen.settle

    def settle(self, name):   # the end of the third epoch, before it is saved
        seen.append(name)
        if len(seen) == 3:
            raise KeyboardInterrupt
        real(self, name)
    monkeypatch.setattr(Frozen, "settle", settle)
    with pytest.raises(KeyboardInterrupt):
        evaluate(cfg)
    monkeypatch.undo()
    assert torch.load(tmp_path / "run" / "eval.pt")["epoch"] == 2
    with pytest.raises(ser.UserError, match="epochs 4 there, 5 here"):
        evaluate(Settings(**{**vars(cfg), "epochs": 5}))
    assert evaluate(cfg)["linear"] == whole
    assert not (tmp_path / "run" / "eval.pt").exists()


def test_the_result_says_what_was_evaluated_on_what_and_how(tmp_path, capsys):
    """JSON beside the checkpoint, one per protocol; chance in it and in the table."""
    tree, checkpoint = eval_tree(tmp_path / "data"), eval_checkpoint(tmp_path / "run")
    flags = ["--data", str(tree), "--checkpoint", str(checkpoint), "--workers", "0", "--epochs", "2"]
    assert main([*flags, "--cache"]) == 0 and main([*flags, "--knn", "--random-init"]) == 0
    screen = capsys.readouterr().out
    assert screen.count("chance") == 2 and "33.33" in screen and "not the paper's protocol" in screen
    assert "of the last 2 blocks (of 4: [CLS] enters after block 1 of 3)" in screen
    linear, vote = (json.loads((checkpoint.parent / name).read_text())
                    for name in ("eval-cache.json", "eval-knn-random-init.json"))
    assert linear["step"] == 7 and linear["classes"] == 3 and linear["images"] == {"train": 27, "val": 15}
    assert linear["settings"]["epochs"] == 2 and linear["settings"]["data"] == str(tree)
    assert linear["chance"] == {"val": {"top1": pytest.approx(100 / 3)}}
    assert len(linear["linear"]["rates"]) == 8 and linear["linear"]["best"] in linear["linear"]["rates"]
    assert {"torch", "torchvision", "device", "seed", "minutes", "command", "protocol"} <= set(linear)
    assert "linear" not in vote and vote["knn"]["k"] == 20 and vote["step"] == 0
    assert not list(checkpoint.parent.glob("*.tmp"))


def test_random_init_is_the_encoder_that_the_run_began_with(tmp_path):
    """The comparison differs in training alone: same shape, same seed, same draws."""
    checkpoint = eval_checkpoint(tmp_path, seed=5)
    encoder = eval_linear.frozen_encoder(Settings(checkpoint=str(checkpoint), random_init=True))[0]
    began = ser.build(ser.Config(**EVAL_SHAPE, moco_hidden=8, equiv_layers=(1,), seed=5)).base.encoder
    for (name, p), q in zip(encoder.named_parameters(), began.parameters()):
        assert torch.equal(p, q), name


def test_a_broken_image_teaches_nothing_counts_as_wrong_and_is_named_once(tmp_path, capfd):
    """A corrupt file in val stays in the denominator; more than three, or 1 in 1000, stop the evaluation."""
    tree, checkpoint = eval_tree(tmp_path / "data"), eval_checkpoint(tmp_path / "run")
    (tree / "val" / "class1" / "000.png").write_bytes(b"no image")
    (tree / "train" / "class1" / "000.png").write_bytes(b"no image")
    flags = ["--data", str(tree), "--checkpoint", str(checkpoint), "--workers", "0", "--epochs", "2"]
    assert main(flags) == 0
    out, err = capfd.readouterr()
    assert err.count("cannot read") == 2 and "1 broken images in val" in out
    result = json.loads((checkpoint.parent / "eval.json").read_text())
    assert result["images"]["val"] == 16 and [len(files) for files in result["broken"].values()] == [1, 1]
    for n in range(4):
        (tree / "val" / "class2" / f"x{n}.png").write_bytes(b"")
    assert main([*flags, "--knn"]) == 2 and "cannot be read" in capfd.readouterr().err


def test_mistakes_are_one_line_that_names_the_value_and_exit_code_2(tmp_path, capsys):
    """DESIGN: bad input gets a clear sentence, no traceback."""
    tree, checkpoint = eval_tree(tmp_path / "data"), eval_checkpoint(tmp_path / "run")
    good = ["--data", str(tree), "--checkpoint", str(checkpoint), "--workers", "0"]

    def line(*flags: str) -> str:
        return eval_command([*good, *flags], capsys)
    assert "--nonsense" in line("--nonsense", "1")
    assert "--lr -1.0 must lie between" in line("--lr", "0.1", "-1")
    assert "nan" in line("--lr", "nan") and "--lr" in line("--lr", "fast")
    assert "--select-split 1.5 must lie" in line("--select-split", "1.5")
    assert "--select-split 0.01" in line("--select-split", "0.01")
    assert "--select-split 0.9" in line("--select-split", "0.9")
    assert "--epochs 0 must lie" in line("--epochs", "0")
    assert "NAME=DIR" in line("--test", "nothing") and "NAME=DIR" in line("--test", "=x")
    assert "val is taken" in line("--test", f"val={tree}/val")
    assert "no such folder" in line("--test", f"a={tree}/nowhere")
    (tmp_path / "odd" / "zebra").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "odd" / "zebra" / "1.png")
    assert "match no training class: zebra" in line("--test", f"odd={tmp_path}/odd")
    assert "no such folder" in line("--data", str(tmp_path / "nowhere"))
    assert "no class folders" in line("--test", f"flat={tree}/val/class1")
    assert "missing" in line("--checkpoint", str(tmp_path / "none.pt"))
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    assert "no checkpoint of ser.py" in line("--checkpoint", str(tmp_path / "other.pt"))
    state = torch.load(checkpoint)
    torch.save({k: v for k, v in state.items() if k != "shape"}, tmp_path / "lacks.pt")
    assert "lacks shape" in line("--checkpoint", str(tmp_path / "lacks.pt"))
    state["model"].pop("base.encoder.norm.weight")
    torch.save(state, tmp_path / "keys.pt")
    assert "norm.weight" in line("--checkpoint", str(tmp_path / "keys.pt"))
    assert "No such file" in line("--out", str(tmp_path / "no" / "folder.json"))
    one = eval_tree(tmp_path / "one", classes=1)
    assert "only one class" in line("--data", str(one))
    (tree / "val" / "class2").rename(tree / "val" / "class9")
    assert "train lacks classes of the other: class9" in line()
    (tree / "val" / "class9").rename(tmp_path / "away")
    assert "val lacks classes of the other: class2" in line()
    (tree / "val" / "class2").mkdir()
    assert "no image" in line()


def test_the_equivariance_score_of_an_equivariant_map_is_one():
    """Paper A.2: mean cos(rho_g f(x), f(rho_g x)); exact for flips when the map is the pixels themselves."""
    class Pixels:
        grid, patch_size = 8, 1

        def __call__(self, images, layers):
            return [ser.Encoded(x[:, :, 0, 0], {1: x}) for x in images]
    images = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    for element in ("hflip", "rot90"):
        cosine, top1 = eval_linear.equivariance(Pixels(), images, 1, element)
        assert cosine == pytest.approx(1.0, abs=1e-6) and top1 == 1.0


def test_the_report_of_a_run_on_drawn_images_shows_untrained_trained_and_chance(tmp_path, capsys):
    """What ser.py prints at its end."""
    checkpoint = eval_checkpoint(tmp_path)
    cfg = ser.Config(**EVAL_SHAPE, moco_hidden=8, equiv_layers=(1,), out="runs/x")
    eval_linear.report(cfg, checkpoint)
    out = capsys.readouterr().out
    assert "untrained   trained    chance" in out and "0.1250" in out and "--out runs/x-control" in out
