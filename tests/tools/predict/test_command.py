"""The command: what is printed and written, how it goes on, and what is refused."""

import csv
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import patches
import pytest
import torch
from pictures import picture
from PIL import ExifTags, Image, ImageOps
from scipy.special import logit
from support import assert_same_rows, one_line

import mldec
from mldec.errors import ConfigError
from mldec.files.run_folder import RunLock
from mldec.files.torch_files import read_torch
from mldec.runtime.devices import MAX_IMAGE_SIZE
from mldec.tools.predict import answers, engine, results
from mldec.tools.predict.inputs import chosen_shard
from mldec.tools.predict.run import FORMATS

SHARED = ["--plugin", "patches", "--device", "cpu", "--threshold", "0", "--top", "2"]


@pytest.fixture(autouse=True)
def small_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FLUSHED_ROWS", 2)
    monkeypatch.setattr(results, "CHUNK", 3)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def photos(tmp_path):
    """A folder of ten images, the fourth of which cannot be read."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(10):
        picture(64, 64, seed=number).save(folder / f"{number}.png")
    (folder / "3.png").write_bytes(b"no image")
    return folder


def all_files(folder="."):
    """Return a result file per format."""
    return {
        option: Path(folder, f"r.{option}{'.npy' * (option == 'features')}") for option in FORMATS
    }


def options(files):
    return [word for option, path in files.items() for word in (f"--{option}", str(path))]


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_all_formats_at_once(cli, best, photos):
    parquet = pytest.importorskip("pyarrow.parquet")
    files = all_files()
    status, out, err = cli("predict", best, photos, *SHARED, *options(files), "--batch-size", "3")
    assert status == 1
    assert out == f"{files['jsonl']}: 10 images, 1 without an answer\n"

    rows = rows_of(files["jsonl"].read_text())
    one_line(err, str(photos / "3.png"), "not an image")
    assert err == f"mldec: {rows[3]['error']}\n"
    assert [row["image"] for row in rows] == [str(photos / f"{number}.png") for number in range(10)]
    keys = [["image", "error" if number == 3 else "predictions"] for number in range(10)]
    assert [list(row) for row in rows] == keys
    assert json.loads(files["json"].read_text()) == rows
    with files["csv"].open(newline="") as file:
        assert [cells["image"] for cells in csv.DictReader(file)] == [row["image"] for row in rows]
    assert parquet.read_table(files["parquet"]).num_rows == 10
    features = np.load(files["features"])
    assert np.isnan(features).any(1).tolist() == [number == 3 for number in range(10)]

    # Without a file there is a line per image; on standard output the rows are alone.
    status, out, err = cli("predict", best, photos, *SHARED)
    first, *others = out.splitlines()
    shown = ", ".join(f"{item['name']} {item['score']:.3f}" for item in rows[0]["predictions"])
    assert (status, first, len(others)) == (1, f"{photos / '0.png'}: {shown}", 8)
    for option, read in (("--jsonl", rows_of), ("--json", json.loads)):
        status, out, err = cli("predict", best, photos / "0.png", *SHARED, option, "-")
        assert (status, err, read(out)) == (0, "", rows[:1])
    err = cli.fault("predict", best, photos / "0.png", *SHARED, "--json", "/dev/full")
    one_line(err, "cannot write /dev/full: No space left on device")


def test_files_of_unsupported_formats_are_named_at_the_end(cli, best, photos):
    (photos / "3.png").unlink()
    (photos / "IMG_1.HEIC").write_bytes(b"photo")
    words = ["predict", best, photos, *SHARED, "--jsonl", "r.jsonl"]
    for _ in range(2):
        status, _, err = cli(*words)
        assert status == 0
        one_line(err, "1 .heic", str(photos / "IMG_1.HEIC"))
    record = json.loads(Path("r.jsonl.run.json").read_text())
    assert record["unsupported_files"][".heic"]["files"] == 1
    assert record["images"] == 9


def test_a_complete_result_stays_as_it_is(cli, best, photos):
    words = ["predict", best, photos, *SHARED, "--jsonl", "r.jsonl"]
    Path("r.jsonl").write_text("mine")
    status, _, err = cli(*words)
    assert status == 1
    one_line(err, "r.jsonl exists, and nothing says how it was made", "--overwrite")
    assert Path("r.jsonl").read_text() == "mine"

    assert cli(*words, "--overwrite").status == 1
    before = {path: path.stat().st_mtime_ns for path in Path().glob("r.*")}
    assert [path.name for path in sorted(before)] == ["r.jsonl", "r.jsonl.run.json"]
    # What a process leaves that is killed just before its end.
    left = Path("r.jsonl" + results.JOURNAL, "0")
    left.mkdir(parents=True)
    (left / results.ROWS).touch()
    (left / results.HOW).touch()
    status, out, err = cli(*words)
    assert (status, err) == (1, ""), "an image has no answer"
    assert out == "r.jsonl is complete: 10 images, 1 without an answer; nothing to do\n"
    assert {path: path.stat().st_mtime_ns for path in Path().glob("r.*")} == before

    picture(64, 64).save(photos / "new.png")
    status, _, err = cli(*words)
    assert status == 1
    one_line(err, "the images are not those that it was begun with (10 images then, 11 now)")
    assert cli(*words, "--overwrite").status == 1
    assert len(rows_of(Path("r.jsonl").read_text())) == 11


@pytest.mark.parametrize("journal", ["kept", "lost"])
def test_a_rerun_tries_failed_images_again(cli, best, photos, monkeypatch, journal):
    names = [f"{number}.png" for number in range(10)]
    Path("list.txt").write_text("\n".join(names))
    words = ["predict", best, "--list", "list.txt", "--root", photos, *SHARED]
    words += ["--batch-size", "1"]
    cli(*words, *options(all_files()))
    whole = {option: path.read_bytes() for option, path in all_files().items()}

    Path("again").mkdir()
    words += options(all_files("again"))
    contents = {name: (photos / name).read_bytes() for name in ("1.png", "5.png", "6.png")}
    for name in contents:
        (photos / name).unlink()
    status, out, _ = cli(*words)
    assert status == 1
    assert "10 images, 4 without an answer" in out
    first = rows_of(all_files("again")["jsonl"].read_text())
    assert [row["image"] for row in first if "error" in row] == ["1.png", "3.png", "5.png", "6.png"]

    # Two of three images are there again. A stop between them keeps the first answer.
    for name in ("1.png", "5.png"):
        (photos / name).write_bytes(contents[name])
    if journal == "lost":
        shutil.rmtree("again/r.jsonl.progress")
        assert cli(*words).status == 1
    else:
        monkeypatch.setattr(patches, "forwards", 0)
        monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:1")
        assert cli(*words).status == 143
        monkeypatch.delenv("PATCHES_SIGNAL")
        assert cli(*words).status == 1
        assert patches.forwards == 2, "only the images that failed are answered"

    (photos / "6.png").write_bytes(contents["6.png"])
    assert cli(*words).status == 1, "an image cannot be decoded"
    assert {option: path.read_bytes() for option, path in all_files("again").items()} == whole
    assert not Path("again/r.jsonl.progress").exists()
    status, out, _ = cli(*words)
    assert (status, out.splitlines()[-1]) == (
        1,
        "again/r.jsonl is complete: 10 images, 1 without an answer; nothing to do",
    )


def test_a_file_of_somebody_else_is_never_replaced(cli, best, photos, monkeypatch):
    words = ["predict", best, photos, *SHARED, "--batch-size", "1"]
    # A file that appears while the command is stopped.
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:6")
    assert cli(*words, "--jsonl", "r.jsonl").status == 143
    monkeypatch.delenv("PATCHES_SIGNAL")
    Path("r.jsonl").write_text("mine")
    one_line(cli.fault(*words, "--jsonl", "r.jsonl"), "r.jsonl exists, and nothing says")
    assert Path("r.jsonl").read_text() == "mine"
    Path("r.jsonl").unlink()
    assert "images are done, going on" in cli(*words, "--jsonl", "r.jsonl").out

    # A second result file that another command writes meanwhile.
    write = results.write

    def slow(kind, rule, lines, file):
        if kind == "jsonl":
            Path("s.csv").write_text("of another command")
        write(kind, rule, lines, file)

    with monkeypatch.context() as patch:
        patch.setattr(results, "write", slow)
        err = cli.fault(*words, "--jsonl", "a.jsonl", "--csv", "s.csv")
    assert "s.csv exists" in err.splitlines()[-1]
    assert Path("s.csv").read_text() == "of another command"
    Path("s.csv").unlink()
    out = cli(*words, "--jsonl", "a.jsonl", "--csv", "s.csv").out
    assert "10 images are done, going on" in out
    Path("s.csv").write_text("changed")
    one_line(cli.fault(*words, "--jsonl", "a.jsonl", "--csv", "s.csv"), "s.csv exists")

    # An earlier file is replaced only by --overwrite, also if that is stopped.
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:6")
    assert cli(*words, "--jsonl", "a.jsonl", "--csv", "s.csv", "--overwrite").status == 143
    monkeypatch.delenv("PATCHES_SIGNAL")
    assert "are done, going on" in cli(*words, "--jsonl", "a.jsonl", "--csv", "s.csv").out
    assert Path("s.csv").read_text() != "changed"
    assert sorted(path.name for path in Path().iterdir()) == [
        "a.jsonl",
        "a.jsonl.run.json",
        "photos",
        "r.jsonl",
        "r.jsonl.run.json",
        "s.csv",
    ]
    err = cli.fault(*words, "--jsonl", "b.jsonl", "--csv", "b.jsonl.run.json")
    one_line(err, "cannot write two results")


@pytest.mark.parametrize("is_link", [False, True])
def test_folders_of_the_user_beside_a_result_stay(cli, best, photos, is_link):
    folder = Path("album" if is_link else "r.jsonl.progress")
    (folder / "0").mkdir(parents=True)
    (folder / "0" / "a.txt").write_text("precious")
    if is_link:
        Path("r.jsonl.progress").symlink_to("album")
    words = ["predict", best, photos, *SHARED, "--jsonl"]
    for _ in range(2):
        assert cli(*words, "r.jsonl").status == 1
    assert [path.name for path in folder.rglob("*")] == ["0", "a.txt"]
    Path("s.jsonl.progress/0").mkdir(parents=True)
    Path("s.jsonl.progress/0/rows.jsonl").write_text("precious")
    one_line(cli.fault(*words, "s.jsonl"), "rows.jsonl exists, and nothing says how it was made")
    assert Path("s.jsonl.progress/0/rows.jsonl").read_text() == "precious"


def test_a_sidecar_that_cannot_be_used_is_an_error_of_its_photo(cli, best, photos):
    """The list names photos below --root; others of the same name lie in the current folder."""
    (photos / "3.png").unlink()
    shutil.copy(photos / "0.png", "0.png")
    Path("list.txt").write_text("0.png\n1.png\n2.png")
    (photos / "1.png.xmp").write_text("broken")
    words = ["predict", best, "--list", "list.txt", "--root", photos, *SHARED, "--xmp"]
    words += ["--jsonl", "r.jsonl"]
    status, _, err = cli(*words)
    assert status == 1
    one_line(err, "1.png.xmp cannot be used")
    assert (photos / "1.png.xmp").read_text() == "broken"
    rows = rows_of(Path("r.jsonl").read_text())
    assert ["error" in row for row in rows] == [False, True, False]
    assert (photos / "0.png.xmp").exists()
    assert not Path("0.png.xmp").exists()

    (photos / "1.png.xmp").unlink()
    assert cli(*words).status == 0
    assert (photos / "1.png.xmp").exists()


def test_other_options_or_another_checkpoint_are_refused(cli, best, photos):
    cli("predict", best, photos, *SHARED, "--jsonl", "r.jsonl")
    content = Path("r.jsonl").read_bytes()
    # The same weights in another file are no other checkpoint; the other set of weights is.
    shutil.copy(best, "other.pt")
    out = cli("predict", "other.pt", photos, *SHARED, "--jsonl", "r.jsonl").out
    assert out.endswith("nothing to do\n")
    state = torch.load(best, weights_only=True)
    for weights in (state["model"], state["ema"]):
        weights["head.pool_bias"] += 1
    torch.save(state, "other.pt")
    for checkpoint, words, part in (
        (best, ["--draft"], "--draft false, not true"),
        (best, ["--views", "flip"], '--views none, not "flip"'),
        (best, ["--weights", "raw"], '--weights none, not "raw"'),
        (best, ["--csv", "r.csv"], "the result files"),
        (best, [photos / "0.png"], "the images"),
        ("other.pt", [], "the checkpoint"),
    ):
        err = cli.fault("predict", checkpoint, photos, *SHARED, "--jsonl", "r.jsonl", *words)
        one_line(err, f"r.jsonl was begun with {part}", "name another file, or pass --overwrite")
    assert Path("r.jsonl").read_bytes() == content


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_same_command_goes_on(name, cli, best, photos, monkeypatch):
    cli("predict", best, photos, *SHARED, *options(all_files()), "--batch-size", "1")
    whole = {option: path.read_bytes() for option, path in all_files().items()}

    Path("again").mkdir()
    files = all_files("again")
    words = ["predict", best, photos, *SHARED, *options(files), "--batch-size", "1"]
    # Six images have an answer in this forward pass, and the fourth has none without one.
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:6")
    status, out, err = cli(*words)
    assert status == (130 if name == "SIGINT" else 143)
    last = err.splitlines()[-1]
    assert last == f"mldec: stopped by {name} after 7 images; the same command goes on"
    assert not any(path.exists() for path in files.values())

    monkeypatch.setenv("PATCHES_SIGNAL", "SIGTERM:0")
    monkeypatch.setattr(patches, "forwards", 0)
    folder = Path("again", "r.jsonl.progress", "0")
    with RunLock(folder, of_run=False) as lock:
        lock.take()
        status, _, err = cli(*words)
    assert status == 1
    one_line(err, "another run is using this folder", "or name another file")

    status, out, err = cli(*words)
    assert status == 1, "an image that was done before has no answer"
    assert f"{files['jsonl']}: 7 images are done, going on" in out
    assert patches.forwards == 3, "what was answered is not answered again"
    assert {option: path.read_bytes() for option, path in files.items()} == whole
    assert not folder.parent.exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1"])
def test_a_signal_keeps_what_is_streamed(name, cli, best, photos, monkeypatch):
    (photos / "3.png").unlink()
    monkeypatch.setattr(patches, "forwards", 0)
    monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:2")
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = cli("predict", best, photos, *SHARED, "--json", "-", "--batch-size", "2")
    assert status == (130 if name == "SIGINT" else 143)
    assert err.splitlines()[-1] == f"mldec: stopped by {name} after 4 images"
    assert len(json.loads(out)) == 4
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_ctrl_c_keeps_the_list_too(cli, best, photos, monkeypatch):
    answered = []

    def slow(*arguments, **options):
        if len(answered) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        answered.append(None)
        return []

    monkeypatch.setattr(answers.Rule, "predictions", slow)
    status, out, err = cli("predict", best, photos, *SHARED, "--json", "-")
    assert status == 130
    one_line(err, "interrupted")
    assert len(json.loads(out)) == 2


def test_the_rows_of_an_exported_file_are_those_of_its_checkpoint(cli, best, photos):
    pytest.importorskip("onnxruntime")
    assert cli("export", best, "m.onnx", "--plugin", "patches", "--threshold", "0.4").status == 0
    rule = ["--content", "decisions"]
    cli("predict", "m.onnx", photos, *rule, "--jsonl", "a.jsonl")
    words = ["--plugin", "patches", "--threshold", "0.4", "--device", "cpu"]
    cli("predict", best, photos, *rule, *words, "--jsonl", "b.jsonl")
    assert Path("a.jsonl").read_text() == Path("b.jsonl").read_text()

    for given in (["--weights", "raw"], ["--image-size", "32"], ["--plugin", "patches"]):
        status, _, err = cli("predict", "m.onnx", photos, *given)
        assert status == 1
        one_line(err, f"{given[0]} has no effect on an exported file such as m.onnx")
    assert cli("predict", "m.onnx", photos, "--device", "cuda:0").status == 1


def test_two_views_have_the_mean_of_their_logits(cli, best, photos):
    ImageOps.mirror(Image.open(photos / "0.png")).save("mirrored.png")
    (model, viewed) = (
        mldec.load(best, plugin=["patches"], device="cpu", threshold=0.0, top=100, views=views)
        for views in (None, "flip")
    )
    single, mirrored, both = (
        {name: logit(score) for name, score in answer}
        for answer in (*model([photos / "0.png", "mirrored.png"]), viewed(photos / "0.png"))
    )
    assert both == {
        name: pytest.approx((single[name] + mirrored[name]) / 2, abs=1e-4) for name in single
    }


def test_pictures_are_of_the_same_classes_as_the_scores(cli, best, photos, monkeypatch):
    (photos / "again").mkdir()
    Image.new("RGB", (90, 30)).save(photos / "again" / "0.png")
    words = ["--pictures", "drawn/here", "--json", "p.json"]
    assert cli("predict", best, photos, *SHARED, *words).status == 1
    rows = json.loads(Path("p.json").read_text())
    drawn = [Path(row["picture"]) for row in rows if "picture" in row]
    assert len(drawn) == len(rows) - 1 == 10
    assert sorted(drawn) == sorted(Path("drawn", "here").iterdir())
    for path in drawn:
        with Image.open(path) as sheet:
            assert sheet.width > 3 * 150, "the image and two classes"

    calls = []
    monkeypatch.setattr(
        answers, "draw", lambda *arguments: calls.append(arguments) or Image.new("RGB", (9, 9))
    )
    words = ["--pictures", "p", "--top", "3", "--json", "q.json"]
    assert cli("predict", best, photos / "0.png", *SHARED, *words).status == 0
    [(image, title, findings, method, _)] = calls
    [row] = json.loads(Path("q.json").read_text())
    shown = [(item["name"], item["score"]) for item in row["predictions"]]
    assert [texts for texts, _ in findings] == [(n, f"{score:.3f}") for n, score in shown]
    assert (image.size, title) == ((64, 64), "0.png")
    assert method.startswith("attention of the query of the class")


def test_what_cannot_be_scored_is_one_line(cli, best, photos, monkeypatch):
    state = read_torch(best)
    for weights in ("model", "ema"):
        state[weights]["head.pool_bias"].fill_(float("nan"))
    torch.save(state, "nan.pt")
    photo = photos / "0.png"
    status, out, err = cli("predict", "nan.pt", photo, *SHARED, "--jsonl", "p.jsonl")
    assert (status, out) == (1, "p.jsonl: 1 image, 1 without an answer\n")
    one_line(err, f"{photo}: its scores are not finite; look at the weights of the checkpoint")
    [row] = rows_of(Path("p.jsonl").read_text())
    assert row == {"image": str(photo), "error": err.strip()[len("mldec: ") :]}

    def full(*arguments):
        raise MemoryError

    monkeypatch.setattr(engine, "probabilities", full)
    err = cli.fault("predict", best, photo, *SHARED, "--batch-size", "7")
    one_line(err, "out of memory on cpu: batches of 1, images of 64 pixels; pass a smaller --batch")


def test_a_checkpoint_without_thresholds_is_named(cli, best, photos):
    words = ["predict", best, photos / "0.png", "--plugin", "patches", "--device", "cpu"]
    status, _, err = cli(*words)
    assert status == 0
    one_line(err, "has no thresholds: classes are listed by score alone")
    assert cli(*words, "--content", "scores").err == ""
    assert cli(*words, "--content", "scores", "--draft").err == ""


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--parquet", "-"], "standard output takes one of --jsonl, --json, --csv alone"),
        (["--jsonl", "-", "--csv", "x.csv"], "standard output takes one of --jsonl, --json, --csv"),
        (["--content", "decisions"], "the checkpoint has no thresholds; pass --threshold"),
        (["--jsonl", "missing/p.jsonl"], "there is no folder"),
        (
            ["--pictures", "p", "--font", "photos/0.png"],
            "0.png cannot be used (OSError: unknown file format); name a .ttf",
        ),
        (["--features", "f.npy", "--views", "flip"], "of a single view: leave --views"),
    ],
)
def test_options_that_do_not_fit_are_one_line(cli, best, photos, words, part):
    status, out, err = cli("predict", best, photos / "0.png", "--plugin", "patches", *words)
    assert (status, out) == (1, "")
    one_line(err, part)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_the_parts_of_shards_are_the_result(cli, best, photos, kind, shards):
    pytest.importorskip("pyarrow")
    words = ["predict", best, photos, *SHARED]
    assert cli(*words, f"--{kind}", f"whole.{kind}").status == 1
    for number in reversed(range(shards)):
        assert cli(*words, "--shard", f"{number}/{shards}", f"--{kind}", "parts").status in (0, 1)
    out = cli(*words, "--shard", f"0/{shards}", f"--{kind}", "parts").out
    assert out.endswith("nothing to do\n")
    parts = [path for path in Path("parts").iterdir() if path.name.startswith("part-")]
    assert len({path.name.partition("_")[0].partition(".")[0] for path in parts}) == shards
    assert sorted(path.name for path in Path("parts").iterdir() if path not in parts) == ["_mldec"]

    status, out, _ = cli(*words, "--merge", "parts", f"--{kind}", f"joined.{kind}")
    assert (status, out) == (1, f"joined.{kind}: 10 images, 1 without an answer\n")
    if kind == "jsonl":
        assert_same_rows("joined.jsonl", "whole.jsonl")
        cli(*words, "--merge", "parts/", "--csv", "joined.csv")
        with Path("joined.csv").open(newline="") as file:
            assert len(list(csv.DictReader(file))) == 10
    else:
        assert_same_rows("joined.parquet", "whole.parquet")
        parquet = pytest.importorskip("pyarrow.parquet")
        assert parquet.read_table("parts").num_rows == 10
    assert cli(*words, "--merge", "parts", f"--{kind}", f"joined.{kind}").out.endswith("to do\n")


def test_chunks_of_a_part_are_those_of_its_record(cli, best, photos):
    pytest.importorskip("pyarrow")
    (photos / "3.png").unlink()
    words = ["predict", best, photos, *SHARED, "--parquet"]
    part = [*words, "parts", "--shard", "0/1"]
    assert cli(*part).status == 0
    chunks = sorted(Path("parts").glob("*.parquet"))
    assert len(chunks) == 3
    merge = [*words, "joined.parquet", "--merge", "parts"]
    contents = [chunk.read_bytes() for chunk in chunks]

    for content, message in ((None, "is missing"), (b"", "has changed"), (b"x", "has changed")):
        chunks[1].unlink(missing_ok=True)
        if content is not None:
            chunks[1].write_bytes(contents[1][:-9] if content else b"")
        one_line(cli.fault(*merge), chunks[1].name, message, "shard")
    one_line(cli.fault(*part), chunks[1].name, "exists, and nothing says how it was made")
    chunks[1].unlink()
    assert cli(*part).status == 0
    assert [chunk.read_bytes() for chunk in chunks] == contents
    assert cli(*merge).status == 0

    # Fewer images: a chunk that is not replaced is removed if it is ours, and refused if not.
    chunks[0].unlink()
    for number in (7, 8, 9):
        (photos / f"{number}.png").unlink()
    assert cli(*part).status == 0
    assert sorted(Path("parts").glob("*.parquet")) == chunks[:2]
    one_line(cli.fault(*merge), "joined.parquet was begun with the parts")
    assert cli(*merge, "--overwrite").status == 0
    shutil.rmtree("parts/_mldec")
    one_line(cli.fault(*part), chunks[0].name, "exists, and nothing says how it was made")
    chunks[0].unlink()
    one_line(cli.fault(*part), chunks[1].name, "exists, and nothing says how it was made")
    assert chunks[1].exists()


def test_parts_with_failed_images_are_completed(cli, best, photos):
    (photos / "3.png").unlink()
    (photos / "4.png").unlink()
    (photos / "4.png").symlink_to("later.png")
    words = ["predict", best, photos, *SHARED, "--jsonl"]
    shards = [[*words, "parts", "--shard", f"{number}/2"] for number in range(2)]
    assert sorted(cli(*shard).status for shard in shards) == [0, 1]
    assert sorted(cli(*shard).status for shard in shards) == [0, 1]
    picture(64, 64).save(photos / "later.jpg", "PNG")
    (photos / "later.jpg").rename(photos / "later.png.d")
    (photos / "4.png").unlink()
    (photos / "4.png").symlink_to("later.png.d")
    assert [cli(*shard).status for shard in shards] == [0, 0]
    assert cli(*words, "joined.jsonl", "--merge", "parts").status == 0
    assert len(rows_of(Path("joined.jsonl").read_text())) == 9


def test_the_last_process_of_torchrun_joins_the_rows(cli, best, photos, monkeypatch):
    words = ["predict", best, photos, *SHARED]
    cli(*words, *options(all_files()))
    Path("again").mkdir()
    files = all_files("again")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in (1, 2, 0):
        monkeypatch.setenv("RANK", str(rank))
        assert not files["jsonl"].exists()
        status, _, _ = cli(*words, *options(files))
        assert status == (1 if rank == 0 else 0), "a status of 1 would end the others"
        # The lock of the result is free for whoever is the last.
        assert Path("again", "r.jsonl.progress").exists() == (rank != 0)
    for option, path in files.items():
        assert path.read_bytes() == all_files()[option].read_bytes()
    assert cli(*words, *options(files)).out.endswith("nothing to do\n")

    # Another number of processes does not go on.
    again = [*words, "--jsonl", "b.jsonl"]
    cli(*again)
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    one_line(cli.fault(*again), "b.jsonl was begun with the number of processes 3, not 1")


def test_a_shard_takes_its_number_from_one_source(monkeypatch):
    for variables, option, shard in (
        ({}, None, (0, 1)),
        ({"RANK": "2", "WORLD_SIZE": "4"}, None, (2, 4)),
        ({}, "3/7", (3, 7)),
        ({"SLURM_ARRAY_TASK_ID": "17"}, "auto/4096", (17, 4096)),
        ({"JOB_COMPLETION_INDEX": "0"}, "auto/1", (0, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "auto", (1, 2)),
        ({}, "0/0", "there is no shard 0 of 0; shards count from 0 to N - 1, with N from 1 on"),
        ({}, "7/7", "there is no shard 7 of 7"),
        ({}, "-1/7", "there is no shard -1 of 7"),
        ({}, "3", "there is no shard 3 of ?"),
        ({"SLURM_ARRAY_TASK_ID": "4"}, "auto/4", "there is no shard 4 of 4"),
        ({}, "auto", "takes its number from RANK alone, and nothing is set"),
        ({}, "auto/4", "from SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX alone, and nothing"),
        (
            {"SLURM_ARRAY_TASK_ID": "1", "JOB_COMPLETION_INDEX": "1"},
            "auto/4",
            "SLURM_ARRAY_TASK_ID and JOB_COMPLETION_INDEX is set; pass --shard I/N instead",
        ),
        ({"RANK": "1", "WORLD_SIZE": "2", "SLURM_ARRAY_TASK_ID": "1"}, "auto", "and RANK is set"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "1/4", "is that of all processes of torchrun: pass a"),
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            if isinstance(shard, tuple):
                assert chosen_shard(option) == shard
            else:
                with pytest.raises(ConfigError) as error:
                    chosen_shard(option)
                assert shard in str(error.value)


def test_shards_that_do_not_fit_are_one_line(cli, best, photos):
    words = ["predict", best, photos, *SHARED]
    part = [*words, "--jsonl", "parts", "--shard"]
    cli(*part, "1/3")
    for given, message in (
        ([*part, "1/3", "--draft"], "part-00001-of-00003.jsonl was begun with --draft false, not"),
        ([*part, "1/4"], "parts holds parts of 3 shards, not 4: name another folder"),
        ([*part, "0/3", "--overwrite"], "--overwrite is for a single process"),
        ([*words, "--csv", "parts", "--shard", "0/3"], "a shard writes --jsonl or --parquet"),
        ([*words, "--jsonl", "r.jsonl", "--merge", "parts"], "part-00000-of-00003.jsonl is not co"),
        ([*words, "--jsonl", "r.jsonl", "--merge", "photos"], "--merge photos: there are no parts"),
        ([*words, "--merge", "parts"], "--merge has no effect without a result file"),
        ([*words, "--jsonl", "xyz://x/r.jsonl"], "the scheme xyz:// is unknown; choose one of s3"),
        (["predict", best, "xyz://x", *SHARED], "the scheme xyz:// is unknown; choose one of s3"),
    ):
        one_line(cli.fault(*given), message)


def test_numbers_out_of_range_are_refused(cli):
    for option, value in (("--threshold", "nan"), ("--image-size", str(MAX_IMAGE_SIZE + 1))):
        status, out, err = cli("predict", "no.pt", "a.png", option, value)
        assert (status, out) == (2, "")
        assert f"mldec: argument {option}: " in err.splitlines()[-1]


def test_one_line_of_python_gives_the_answers_of_the_command(cli, best, photos):
    paths = [photos / f"{number}.png" for number in (0, 1, 2)]
    _, out, _ = cli("predict", best, *paths, *SHARED, "--json", "-")
    model = mldec.load(best, plugin=["patches"], device="cpu", threshold=0.0, top=2)
    expected = [
        [(item["name"], pytest.approx(item["score"], abs=1e-6)) for item in row["predictions"]]
        for row in json.loads(out)
    ]
    assert [list(row) for row in model(paths)] == expected
    assert list(model(str(paths[0]))) == expected[0]
    assert list(model(Image.open(paths[1]))) == expected[1]
    assert model([]) == []

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.open(paths[0]).save("turned.png", exif=exif)
    turned = list(model("turned.png"))
    assert turned != expected[0]
    assert list(model(Image.open("turned.png"))) == turned

    with pytest.raises(ConfigError, match="treshold: there is no such option; did you mean 'thr"):
        mldec.load(best, treshold=0.5)
    with pytest.raises(ConfigError, match="content: there is no such option"):
        mldec.load(best, content="scores")
