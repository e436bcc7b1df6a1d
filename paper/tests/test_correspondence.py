import torch
from PIL import Image

import eval_linear
import ser
from paper.evaluations import correspondence
from paper.evaluations.correspondence import copies, matched
from paper.tests.toys import call, class_folders, saved_pictures, toy_checkpoint
from test_ser import close, noise, pixels, refused, sentence, write_image


def test_a_token_is_found_where_it_is_the_most_similar_to_its_counterpart():
    still = noise(3, 4, 4)
    moved = still.rot90(1, (1, 2)).clone()
    moved[:, 2, 2], moved[:, 1, 1] = -moved[:, 2, 2], moved[:, 3, 0]
    moved[0, 3, 0] += 0.1     # now its counterpart is nearer to (1, 1)
    both = torch.stack([still, moved])

    colours = lambda x, layers: ser.Encoded(None, dict.fromkeys(layers, x), None)
    colours.depth, colours.norm = 2, torch.abs
    wanted = torch.ones(4, 4, dtype=torch.bool)
    wanted[2, 2] = wanted[1, 1] = wanted[3, 0] = False
    assert matched(colours, both, 1).equal(wanted)
    wanted[2, 2] = True     # the last block's tokens are normalised, as in eval_linear
    assert matched(colours, both, 2).equal(wanted)

    photo = torch.zeros(3, 8, 8)
    photo[:, 0, 7] = 1     # at the right, so the turn brings it to the left
    assert copies(photo, 0)[1].mean(0).argmax() == 0
    assert copies(photo, 0).ne(copies(photo, 1)).flatten(1).any(1).all()     # both recoloured
    close(copies(photo.repeat(1, 2, 2), 0)[0, :, :8, :8], copies(photo, 0)[0])     # of any size


def test_the_picture_has_the_first_photographs_of_three_classes(tmp_path, monkeypatch, capsys):
    saved = saved_pictures(monkeypatch)
    val = class_folders(tmp_path / "val", size=18)
    write_image(ser.Path(val, "n00/._000.png"), pixels(3, 18, 18))
    moco = toy_checkpoint(tmp_path / "moco", seed=1, ratio=0, equiv_layers=[])
    ours = toy_checkpoint(tmp_path / "ser", seed=2, equiv_layers=[2])
    runs = f"--checkpoint {moco} {ours} --label MoCo-v3 SER"
    call(correspondence, f"--data {val}", runs)
    (three, *_), = saved

    for number in range(3):
        image = ser.read_image(f"{val}/n{number:02}/{number:03}.png")
        photo = eval_linear.eval_transform(16)(image) / 255
        shown = eval_linear.eval_transform(32)(image) / 255     # finer than the encoder's
        still, copy = copies(shown, number) * ser.STD + ser.MEAN
        assert min((copy - x.rot90(1, (1, 2))).abs().mean() for x in (shown, still)) > 0.02
        wanted = {"photograph": shown, "rotated and recoloured": copy}
        for name, path in (("MoCo-v3", moco), ("SER", ours)):
            tokens = matched(ser.load_encoder(path), copies(photo, number), 2)
            seen = tokens.repeat_interleave(8, dim=0).repeat_interleave(8, dim=1)
            pale = 0.85 + 0.15 * copy
            wanted[f"{name}:\n{tokens.sum()} of 16 matched"] = torch.where(seen, copy, pale)

        panels = three.axes[4 * number:4 * number + 4]
        for panel, (title, picture) in zip(panels, wanted.items(), strict=True):
            assert panel.get_title() == title
            close(torch.tensor(panel.images[0].get_array()), picture.movedim(0, 2))

    phone = tmp_path / "phone.png"     # lies on its side, and says so
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.open(f"{val}/n01/001.png").rotate(90).save(phone, exif=exif)
    call(correspondence, f"--data {phone} --layer 3", runs)
    assert "block 3" in capsys.readouterr().out
    toy_checkpoint(tmp_path / "moco", seed=3, ratio=0, equiv_layers=[])
    call(correspondence, f"--data {phone} --layer 3", runs)
    assert len({path for _, path, _ in saved}) == 3     # none replaces another, or older weights
    assert {path.parent for _, path, _ in saved} == {tmp_path / "moco"}
    _, (one, _, made_by), _ = saved
    of_phone, of_class = [axes.images[0].get_array() for axes in (one.axes[0], three.axes[4])]
    assert (of_phone == of_class).all()
    assert eval_linear.fingerprint(ser.load_encoder(ours)) in made_by["Description"]

    Image.new("I;16", (20, 20)).save(phone)
    refused(call, correspondence, f"--data {phone} --layer 3", runs, error=OSError)
    for told, layer, size in (("--layer", 3, 16), ("several sizes", 2, 20)):
        other = toy_checkpoint(tmp_path / "other", equiv_layers=[layer], image_size=size)
        assert told in sentence(call, correspondence, f"--data {val} --checkpoint {ours} {other}")
