"""Zero-shot from files on disk to an answer for new class names, by the commands a user types."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import official
import pytest
import torch
from clip_towers import siglip_folder
from support import CONFIGS, one_line

from mldec import checkpoint
from mldec.checkpoint import check_classes, check_queries, load_model
from mldec.data.text_encoder import open_encoder
from mldec.data.transforms import read_image
from mldec.data.types import Classes
from mldec.data.word_vectors import word_vectors
from mldec.errors import CheckpointError
from mldec.files.torch_files import read_torch

Cli = Callable[..., tuple[int, str, str]]
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_digits.py"
QUICK = [
    "+experiment=nuswide_zsl_tresnet_m",
    "plugins=[patches]",
    "backbone=patches",
    f"--config-dir={CONFIGS}",
    "name=zsl",
    "data.image_size=32",
    "head.word_dim=14",
    "head.embed_dim=32",
    "head.mlp_dim=32",
    "train.batch_size=16",
    "train.epochs=1",
    "train.workers=0",
    "train.precision=fp32",
    "device=cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in the NUS-WIDE layout, and a finished run on them; tests must not change it."""
    folder = tmp_path_factory.mktemp("zsl")
    made = [
        str(SCRIPT),
        "--layout",
        "nuswide",
        "data",
        "--train",
        "96",
        "--val",
        "48",
        "--size",
        "32",
    ]
    for words in (made, ["-m", "mldec.train", *QUICK, "data.root=data", "data.cache_dir=cache"]):
        done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def command(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(folder)

    def command(name: str, *words: str | Path) -> tuple[int, str, str]:
        return cli(name, "outputs/zsl/checkpoints/best.pt", "--plugin", "patches", *words)

    return command


def some_image(folder: Path) -> Path:
    return min((folder / "data" / "images").iterdir())


def test_evaluate_gives_the_number_of_the_run(command: Cli, folder: Path, tmp_path: Path) -> None:
    state = read_torch(folder / "outputs/zsl/checkpoints/best.pt")
    assert state["best"]["metric"] == "zsl_mAP"
    assert state["classes"]["queries"].shape == (40, 14)
    status, out, err = command("evaluate", "--json", tmp_path / "r.json")
    assert status == 0, err
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["metrics"]["zsl_mAP"] == pytest.approx(state["best"]["value"], abs=1e-9)
    assert sum(row["unseen"] for row in found["per_class"].values()) == 8
    assert ["zsl_mAP", f"{state['best']['value']:.3f}"] in [
        line.split() for line in out.splitlines()
    ]


def test_evaluate_on_all_images_and_on_other_unseen_classes(
    command: Cli, folder: Path, tmp_path: Path
) -> None:
    status, out, err = command("evaluate", "data.val_images=all")
    assert status == 0, err
    assert "zsl_all_mAP" in out
    assert "on 48 images" in out
    other = tmp_path / "other"
    shutil.copytree(folder / "data", other)
    text = (
        (other / "data.csv").read_text().replace("grey", "black")
    )  # ten classes that the run had no name for
    (other / "data.csv").write_text(text)
    names = (other / "wordvec_array.txt").read_text().replace("grey", "black")
    (other / "wordvec_array.txt").write_text(names)
    (other / "benchmark_81_v0.json").write_text(
        json.dumps({"test class": ["blacktwo", "blackone", "redsix"]})
    )
    status, _, err = command("evaluate", f"data.root={other}", "--json", tmp_path / "r.json")
    assert status == 0, err
    rows = json.loads((tmp_path / "r.json").read_text())["per_class"]
    assert [name for name, row in rows.items() if row["unseen"]] == [
        "blackone",
        "blacktwo",
        "redsix",
    ]


def test_evaluate_refuses_vectors_of_another_width(
    command: Cli, folder: Path, tmp_path: Path
) -> None:
    names = (folder / "data/wordvec_array.txt").read_text().split()
    (tmp_path / "v.txt").write_text("".join(f"{name} 1.0 {len(name)}.5\n" for name in names))
    status, _, err = command("evaluate", f"data.vectors={tmp_path / 'v.txt'}")
    assert status == 1
    one_line(err, "best.pt asks by word vectors of 14 numbers, the data has vectors of 2 numbers")
    saved = checkpoint.load(folder / "outputs/zsl/checkpoints/best.pt").classes
    with pytest.raises(CheckpointError, match="by word vectors of 14 numbers, the data has none"):
        check_queries(saved, Classes(saved.names), "best.pt")


def test_predict_knows_its_own_classes_and_new_ones(
    command: Cli, folder: Path, tmp_path: Path
) -> None:
    image = some_image(folder)
    status, _, err = command("predict", image, "--top", "40", "--json", tmp_path / "own.json")
    assert status == 0, err
    own = {
        item["name"]: item["score"]
        for item in json.loads((tmp_path / "own.json").read_text())[0]["predictions"]
    }
    assert len(own) == 40
    vectors = word_vectors(str(folder / "data/wordvec_array.pth"), ["redfive", "bluetwo"]).queries
    lines = [
        f"{name} {' '.join(map(str, row.tolist()))}\n"
        for name, row in zip(("a", "b"), vectors, strict=True)
    ]
    (tmp_path / "v.txt").write_text("".join(lines) + "c " + "0.1 " * 14 + "\n")
    words = [
        "--classes",
        "b, a,c",
        "--vectors",
        tmp_path / "v.txt",
        "--json",
        tmp_path / "new.json",
    ]
    status, _, err = command("predict", image, *words)
    assert status == 0, err
    new = {
        item["name"]: item["score"]
        for item in json.loads((tmp_path / "new.json").read_text())[0]["predictions"]
    }
    assert new.keys() == {"a", "b", "c"}
    assert new["a"] == pytest.approx(own["redfive"], abs=1e-6)
    assert new["b"] == pytest.approx(own["bluetwo"], abs=1e-6)
    loaded = load_model(folder / "outputs/zsl/checkpoints/best.pt", plugins=["patches"])
    with torch.no_grad():
        logits = loaded.model(loaded.transform(read_image(image))[None], torch.full((1, 14), 0.1))
    assert new["c"] == pytest.approx(logits.sigmoid().item(), abs=1e-6)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ["--classes", "redfive"],
            "was trained with the word vectors of wordvec_array.pth (sha256 ",
        ),
        (["--vectors", "data/wordvec_array.pth"], "no effect without --classes"),
        (["--classes", " ,", "--vectors", "data/wordvec_array.pth"], "names no class"),
        (
            ["--classes", "redfive,redfive", "--vectors", "data/wordvec_array.pth"],
            "--classes names 'redfive' twice",
        ),
        (
            ["--classes", "zebra", "--vectors", "data/wordvec_array.pth"],
            "1 of 1 names have no vector: zebra",
        ),
        (
            ["--classes", "zebra", "--vectors", "narrow.txt"],
            "of 14 numbers, the data has vectors of 2 numbers",
        ),
        (
            ["--classes", "zebra", "--vectors", "other.txt"],
            "was trained with other word vectors: those of 1 classes that both know, such as 'blue",
        ),
        (["--classes", "zebra", "--vectors", "data/data.csv"], "data.csv"),
        (["--classes", "zebra", "--vectors", "nowhere.txt"], "nowhere.txt cannot be used"),
    ],
)
def test_predict_refuses_in_one_line(
    command: Cli, folder: Path, words: list[str], part: str
) -> None:
    (folder / "narrow.txt").write_text("zebra 1.0 2.5\nhorse 1.0 2.0\n")
    # A file of the same width that has one name of the training, with other numbers.
    numbers = "-0.5 " * 14
    name = checkpoint.load(folder / "outputs/zsl/checkpoints/best.pt").classes.names[0]
    (folder / "other.txt").write_text(f"zebra {numbers}\n{name} {numbers}\n")
    status, _, err = command("predict", some_image(folder), *words)
    assert status == 1
    one_line(err, part)


def test_one_threshold_serves_the_classes_of_any_words(
    command: Cli, cli: Cli, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.pt"
    status, text, err = command("calibrate", "--out", out, "--json", tmp_path / "c.json")
    assert status == 0, err
    assert "images: threshold 0." in text
    content = json.loads((tmp_path / "c.json").read_text())
    thresholds = {values["threshold"] for values in content["per_class"].values()}
    assert content["scope"] == "global"
    assert len(thresholds) == 1

    words = ["--plugin", "patches", "--json", tmp_path / "r.json"]
    status, text, err = cli("evaluate", out, *words)
    assert status == 0, err
    assert "which were fitted on these images" in text
    metrics = json.loads((tmp_path / "r.json").read_text())["metrics"]
    assert metrics["gzsl_OF1"] == pytest.approx(content["fitted"]["OF1"])

    words = [*words[:2], "--classes", "redfive,bluetwo", "--json", "-"]
    words += ["--vectors", folder / "data/wordvec_array.pth"]
    status, text, err = cli("predict", out, some_image(folder), *words)
    assert (status, err) == (0, "")
    for item in json.loads(text)[0]["predictions"]:
        assert item["score"] >= item["threshold"]
        assert {item["threshold"]} == thresholds


def test_classes_of_any_words_have_no_thresholds_of_their_own(command: Cli) -> None:
    status, _, err = command("calibrate", "--scope", "class")
    assert status == 1
    one_line(err, "--scope class: outputs/zsl/checkpoints/best.pt scores any classes by their")


def test_a_checkpoint_of_its_own_classes_takes_no_others(
    cli: Cli, digits_run: Path, folder: Path
) -> None:
    best, image = digits_run / "checkpoints/best.pt", some_image(folder)
    words = [
        "--plugin",
        "patches",
        "--classes",
        "redfive",
        "--vectors",
        folder / "data/wordvec_array.pth",
    ]
    status, _, err = cli("predict", best, image, *words)
    assert status == 1
    one_line(err, "knows its own classes only")


def test_a_run_goes_on_with_the_same_vectors_only(folder: Path) -> None:
    saved = checkpoint.load(folder / "outputs/zsl/checkpoints/last.pt").classes
    check_classes(saved, saved, "last.pt")
    with pytest.raises(
        CheckpointError,
        match=r"^last\.pt is of other word vectors than the data: put the same .* back$",
    ):
        check_classes(saved, replace(saved, queries=saved.queries.flip(0)), "last.pt")


def test_a_head_of_another_width_than_the_vectors(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [f"data.root={folder / 'data'}", f"data.cache_dir={tmp_path}", "head.word_dim=15"]
    status, _, err = cli("train", *QUICK, *settings)
    assert status == 1
    [line] = [line for line in err.splitlines() if line.startswith("mldec: ")]
    assert "head.word_dim=15 needs word queries of that width, [K, 15] floating point, got " in line
    assert "Traceback" not in err


def test_other_classes_from_the_checkpoint_alone_after_a_text_encoder(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = f"clip:{siglip_folder(tmp_path / 'tower')}"
    settings = [f"data.root={folder / 'data'}", f"data.vectors={source}", "data.prompts=simple7"]
    status, _, err = cli("train", *QUICK, *settings, "head.word_dim=16")
    assert status == 0, err
    best = tmp_path / "outputs/zsl/checkpoints/best.pt"
    origin = checkpoint.load(best).classes.origin
    assert origin is not None
    assert origin.source == source
    assert len(origin.templates) == 7

    def predicted(path: Path, *words: str | Path) -> dict[str, float]:
        options = ["--plugin", "patches", "--classes", "zebra, traffic jam", *words]
        status, out, err = cli("predict", path, some_image(folder), *options, "--json", "-")
        assert status == 0, err
        [row] = json.loads(out)
        return {item["name"]: item["score"] for item in row["predictions"]}

    alone = predicted(best)
    loaded = load_model(best, plugins=["patches"])
    vectors = open_encoder(source).encode_names(["zebra", "traffic jam"], origin.templates)
    image = loaded.transform(read_image(some_image(folder)))
    with torch.no_grad():
        wanted = loaded.model(image[None], vectors)[0].sigmoid().tolist()
    assert [alone["zebra"], alone["traffic jam"]] == pytest.approx(wanted, abs=1e-6)

    # The published form has no folder of this machine, and takes the encoder by its name.
    out = tmp_path / "published"
    status, _, err = cli("publish", best, "me/x", "--plugin", "patches", "--dry-run", out)
    assert status == 0, err
    assert str(tmp_path) not in (out / "config.json").read_text()
    assert predicted(out, "--vectors", source) == pytest.approx(alone, abs=1e-6)
    words = ["--plugin", "patches", "--classes", "zebra"]
    status, _, err = cli("predict", out, some_image(folder), *words)
    assert status == 1
    one_line(err, "makes word vectors by clip:.../tower (sha256 ", "with --vectors clip:MODEL:FILE")


def test_check_data_lists_the_nearest_seen_classes(cli: Cli, folder: Path, tmp_path: Path) -> None:
    words = [
        "data=nuswide_zsl",
        f"data.root={folder / 'data'}",
        f"data.cache_dir={tmp_path}",
        "train.workers=0",
    ]
    status, out, err = cli("check_data", *words, "--json", tmp_path / "r.json")
    assert status == 0, err
    near = json.loads((tmp_path / "r.json").read_text())["nearest_seen"]
    assert len(near) == 8
    for name, found in near.items():
        assert [cosine for _, cosine in found] == pytest.approx(
            [0.5] * 3
        )  # the digit or the colour is the same
        assert {other for other, _ in found}.isdisjoint(near)
        assert f"unseen {name}: nearest {found[0][0]} 0.50, " in out


def test_a_zero_shot_file_of_the_official_code_is_given_names_and_vectors(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    body = official.rebuilt(official.read("tresnet_m_coco_224.keys"))
    path = tmp_path / "official.pth"
    torch.save(official.zero_shot_file(body, word_dim=14), path)
    size = ["--image-size", "32"]
    data = ["data=nuswide_zsl", "data.root=data", "data.cache_dir=cache", "train.workers=0"]

    report = tmp_path / "r.json"
    status, out, err = cli("evaluate", path, *size, *data, "device=cpu", "--json", report)
    assert status == 0, err
    assert "pixels" not in out  # the data's own 224 do not replace --image-size
    assert len(json.loads(report.read_text())["per_class"]) == 40
    classes = ["--classes", "redfive,bluetwo", "--vectors", "data/wordvec_array.pth"]
    status, out, err = cli("predict", path, some_image(folder), *size, *classes)
    assert status == 0, err
    assert "redfive " in out
    assert "bluetwo " in out

    status, _, err = cli("predict", path, some_image(folder), *size)
    assert status == 1
    one_line(err, f"{path} names no classes and holds no word vectors: pass --classes and --vect")

    status, _, err = cli("calibrate", path, *size, *data, "device=cpu")
    assert status == 1
    one_line(err, f"{path} names no classes and holds no word vectors: thresholds cannot be stored")


def test_data_of_another_image_size_is_noticed(command: Cli) -> None:
    data = ["data=nuswide_zsl", "data.root=data", "data.cache_dir=cache", "train.workers=0"]
    warning = "evaluated at 224 pixels, the default of this data; outputs/zsl/checkpoints/best.pt"
    advice = " is for 32: pass data.image_size=32 for that\n"
    for words, is_warned in [(data, True), ([*data, "data.image_size=64"], False)]:
        status, out, err = command("evaluate", *words)
        assert status == 0, err
        assert (warning + advice in out) is is_warned


def test_names_are_not_given_where_they_have_no_effect(command: Cli, folder: Path) -> None:
    names = ["--class-names", "data/wordvec_array.txt"]
    no_effect = "--class-names has no effect: outputs/zsl/checkpoints/best.pt scores the classes"
    for words in (["evaluate"], ["calibrate"], ["report", "--out", "r.html"]):
        status, _, err = command(words[0], *words[1:], *names)
        assert status == 1
        one_line(err, no_effect)
    classes = ["--classes", "redfive", "--vectors", "data/wordvec_array.pth"]
    status, _, err = command("predict", some_image(folder), *names, *classes)
    assert status == 1
    one_line(err, "--classes and --class-names exclude each other")
