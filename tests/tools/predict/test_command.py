"""The command: outputs, resuming, shards and errors."""

import csv
import json
import shutil
import signal
from pathlib import Path

import numpy as np
import patches
import pytest
import torch
from pictures import picture
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from support import assert_same_rows, one_line

from mldec.files.run_folder import RunLock
from mldec.files.torch_files import read_torch
from mldec.tools.predict import results
from mldec.tools.predict.run import FORMATS

SHARED = ["--plugin", "patches", "--device", "cpu", "--threshold", "0", "--top", "2"]


XMP = """<x:xmpmeta xmlns:x="adobe:ns:meta/">
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description rdf:about=""
 xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:subject><rdf:Bag><rdf:li>{}</rdf:li></rdf:Bag>
</dc:subject></rdf:Description></rdf:RDF></x:xmpmeta>"""


@pytest.fixture(autouse=True)
def small_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "FLUSHED_ROWS", 2)
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


@pytest.fixture
def predict(cli, best, photos):
    """Run the command on the photos."""
    return lambda *words: cli("predict", best, photos, *SHARED, *words)


@pytest.fixture
def stop_at(monkeypatch):
    """Send this process a signal in one of the next forward passes; 0 sends none."""

    def send(name, number):
        monkeypatch.setattr(patches, "forwards", 0)
        monkeypatch.setenv("PATCHES_SIGNAL", f"{name}:{number}")

    return send


def all_files(folder="."):
    """Return a result file per format."""
    return {name: Path(folder, f"r.{name}{'.npy' * (name == 'features')}") for name in FORMATS}


def options(files):
    words = []
    for name, path in files.items():
        words += ["--" + name.replace("_", "-"), str(path)]
    return words


def rows_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_all_formats_have_the_same_rows(cli, best, photos, predict):
    parquet = pytest.importorskip("pyarrow.parquet")
    files = all_files()
    status, out, err = predict(*options(files), "--batch-size", "3")
    assert status == 1
    assert "10 images, 1 " in out

    rows = rows_of(files["jsonl"].read_text())
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

    # The console has a line per image. Standard output contains only the rows.
    status, out, err = predict()
    precision, first, *others = out.splitlines()
    assert precision == f"{best}: scoring in fp32 on cpu with torch"
    scores = ", ".join(f"{item['name']} {item['score']:.3f}" for item in rows[0]["predictions"])
    assert (status, first, len(others)) == (1, f"{photos / '0.png'}: {scores}", 8)
    for option, read in (("--jsonl", rows_of), ("--json", json.loads)):
        status, out, err = cli("predict", best, photos / "0.png", *SHARED, option, "-")
        assert (status, err, read(out)) == (0, f"{precision}\n", rows[:1])


def test_complete_result_is_not_changed(photos, predict):
    words = ["--jsonl", "r.jsonl"]
    assert predict(*words).status == 1
    before = {path: path.stat().st_mtime_ns for path in Path().glob("r.*")}
    assert [path.name for path in sorted(before)] == ["r.jsonl", "r.jsonl.run.json"]
    settings = json.loads(Path("r.jsonl.run.json").read_text())["made_with"]
    assert settings["--engine"] == "torch", "OpenVINO gives slightly different scores"
    # A process that is killed just before its end leaves its rows.
    progress = Path("r.jsonl" + results.PROGRESS)
    progress.mkdir()
    (progress / results.ROWS).touch()
    status, out, err = predict(*words)
    assert not progress.exists()
    assert (status, err) == (1, ""), "an image has an error"
    assert "is complete" in out
    assert {path: path.stat().st_mtime_ns for path in Path().glob("r.*")} == before

    picture(64, 64).save(photos / "new.png")
    status, _, err = predict(*words)
    assert status == 1
    assert "r.jsonl" in err
    assert "10 images" in err
    assert "11" in err
    assert predict(*words, "--overwrite").status == 1
    assert len(rows_of(Path("r.jsonl").read_text())) == 11


def test_files_of_others_are_not_replaced(predict, stop_at):
    words = ["--batch-size", "1", "--jsonl", "a.jsonl", "--csv", "s.csv"]
    Path("s.csv").write_text("before the start")
    assert "s.csv" in predict(*words).err
    Path("s.csv").unlink()

    stop_at("SIGTERM", 6)
    assert predict(*words).status == 143
    stop_at("SIGTERM", 0)
    Path("s.csv").write_text("during a stop")
    assert "s.csv" in predict(*words).err.splitlines()[-1]
    Path("s.csv").unlink()

    assert predict(*words).status == 1
    assert patches.forwards == 9 - 6, "the rows are kept"
    Path("s.csv").write_text("after the end")
    assert "s.csv" in predict(*words).err

    # --overwrite replaces the file, also if it is stopped and resumed.
    stop_at("SIGTERM", 6)
    assert predict(*words, "--overwrite").status == 143
    stop_at("SIGTERM", 0)
    assert predict(*words).status == 1
    assert Path("s.csv").read_text() != "after the end"
    names = {path.name for path in Path().iterdir()}
    assert names == {"a.jsonl", "a.jsonl.run.json", "photos", "s.csv"}


def test_folders_of_the_user_are_kept(predict):
    folder = Path("r.jsonl.progress")
    folder.mkdir()
    (folder / "a.txt").write_text("precious")
    for _ in range(2):
        assert predict("--jsonl", "r.jsonl").status == 1
    assert [path.name for path in folder.iterdir()] == ["a.txt"]
    Path("s.jsonl.progress").mkdir()
    file = Path("s.jsonl.progress", results.ROWS)
    file.write_text("precious")
    for words in ([], ["--overwrite"]):
        one_line(predict("--jsonl", "s.jsonl", *words).err.splitlines()[-1], file.name)
    assert file.read_text() == "precious"


def test_unusable_sidecar_is_an_error_of_its_photo(cli, best, photos):
    """The list names photos below --root. The current folder has a photo of the same name."""
    shutil.copy(photos / "0.png", "0.png")
    Path("list.txt").write_text("0.png\n1.png\n2.png")
    (photos / "1.png.xmp").write_text("broken")
    words = ["--list", "list.txt", "--root", photos, *SHARED, "--xmp", "--jsonl", "r.jsonl"]
    status, out, err = cli("predict", best, *words)
    assert status == 1
    assert "2 sidecars written, 0 removed, 0 unchanged" in out + err
    assert "1.png.xmp" in err
    assert (photos / "1.png.xmp").read_text() == "broken"
    rows = rows_of(Path("r.jsonl").read_text())
    assert ["error" in row for row in rows] == [False, True, False]
    assert (photos / "0.png.xmp").exists()
    assert not Path("0.png.xmp").exists()
    (photos / "1.png.xmp").unlink()
    assert cli("predict", best, *words).status == 0
    assert (photos / "1.png.xmp").exists()


def test_photo_with_a_name_too_long_for_a_sidecar_keeps_its_prediction(cli, best, photos):
    folder = photos.parent / "long"
    folder.mkdir()
    name = f"{'n' * 249}.png"
    shutil.copy(photos / "0.png", folder / name)
    words = ["predict", best, folder, *SHARED, "--suggest", "--xmp", "--jsonl", "r.jsonl"]
    first = cli(*words)
    assert first.status == 0
    one_line(first.err, name)
    [row] = rows_of(Path("r.jsonl").read_text())
    assert row["predictions"]
    again = cli(*words)
    assert (again.status, again.err) == (0, "")
    assert again.out.splitlines()[-1].startswith("r.jsonl is complete: 1 image")

    # photo.xmp has a valid name.
    sidecar = (folder / name).with_suffix(".xmp")
    sidecar.write_text(XMP.format("dog"))
    assert "1 sidecars written" in cli.out(*words[:-2])
    assert "1 sidecars written" in cli.out("predict", folder / name, "--xmp-undo")
    assert sidecar.read_text() == XMP.format("dog")


def test_suggest_leaves_out_keywords_of_the_photo(cli, best, photos):
    words = ["predict", best, photos / "0.png", *SHARED, "--suggest", "--jsonl", "-"]
    [before] = rows_of(cli.out(*words))
    first, second = [prediction["name"] for prediction in before["predictions"]]
    text = PngInfo()
    text.add_itxt("XML:com.adobe.xmp", XMP.format(first))
    Image.open(photos / "0.png").save(photos / "0.png", pnginfo=text)
    writing = cli(*words, "--xmp", "--xmp-parent", "New")
    assert "1 sidecars written" in writing.err
    [after] = rows_of(writing.out)
    assert [prediction["name"] for prediction in after["predictions"]] == [second]
    sidecar = photos / "0.png.xmp"
    assert f"<rdf:li>New/{second}</rdf:li>" in sidecar.read_text()

    # Neither a checkpoint nor decodable images are needed.
    for arguments, removed in ((["gone.pt", photos], 1), ([photos], 0)):
        out = cli.out("predict", *arguments, "--xmp-undo")
        assert f"0 sidecars written, {removed} removed, 0 unchanged" in out
        assert not sidecar.exists()
    words = ["predict", best, photos, *SHARED, "--xmp-parent"]
    one_line(cli.fault(*words, "A"), "--xmp-parent")


def test_other_settings_raise_an_error(cli, best, photos, predict):
    predict("--jsonl", "r.jsonl")
    content = Path("r.jsonl").read_bytes()
    # A copy of the checkpoint is the same checkpoint.
    shutil.copy(best, "other.pt")
    assert "is complete" in cli("predict", "other.pt", photos, *SHARED, "--jsonl", "r.jsonl").out
    state = torch.load(best, weights_only=True)
    state["ema"]["head.pool_bias"] += 1
    torch.save(state, "other.pt")
    for checkpoint, words, name in (
        (best, ["--draft"], "--draft false, not true"),
        (best, ["--views", "flip"], '--views null, not "flip"'),
        (best, ["--csv", "r.csv"], "the result files"),
        (best, [photos / "0.png"], "the images"),
        ("other.pt", [], "the checkpoint"),
    ):
        words = ["predict", checkpoint, photos, *SHARED, "--jsonl", "r.jsonl", *words]
        one_line(cli.fault(*words), "r.jsonl", name)
    assert Path("r.jsonl").read_bytes() == content


def test_stopped_command_resumes(predict, stop_at):
    predict(*options(all_files()), "--batch-size", "1")
    whole = {option: path.read_bytes() for option, path in all_files().items()}

    Path("again").mkdir()
    files = all_files("again")
    words = [*options(files), "--batch-size", "1"]
    # The fourth image has no forward pass.
    stop_at("SIGINT", 6)
    status, _, err = predict(*words)
    assert status == 130
    assert "SIGINT after 7 images" in err.splitlines()[-1]
    assert not any(path.exists() for path in files.values())

    stop_at("SIGTERM", 0)
    folder = Path("again", "r.jsonl.progress")
    with RunLock(folder, of_run=False) as lock:
        lock.take()
        assert str(folder) in predict(*words).err

    status, out, _ = predict(*words)
    assert status == 1
    assert "7 images" in out
    assert patches.forwards == 3, "images with a row are not predicted again"
    assert {option: path.read_bytes() for option, path in files.items()} == whole
    assert not folder.exists()


@pytest.fixture
def repair(photos):
    """Remove three photos; return a function that restores one of them."""
    contents = {}
    for name in ("1.png", "5.png", "6.png"):
        contents[name] = (photos / name).read_bytes()
        (photos / name).unlink()
    return lambda name: (photos / name).write_bytes(contents[name])


@pytest.mark.parametrize("is_kept", [True, False])
def test_images_that_could_not_be_read_are_retried(cli, best, photos, repair, stop_at, is_kept):
    Path("list.txt").write_text("\n".join(f"{number}.png" for number in range(10)))
    words = ["predict", best, "--list", "list.txt", "--root", photos, *SHARED, "--batch-size", "1"]
    files = all_files()
    words += options(files)
    status, out, _ = cli(*words)
    assert status == 1
    assert "10 images, 4 with an error; run the same command to retry 3 of them" in out
    rows = rows_of(files["jsonl"].read_text())
    assert [row["image"][0] for row in rows if "error" in row] == ["1", "3", "5", "6"]

    # Two images are repaired. A stop between them keeps the first row.
    repair("1.png")
    repair("5.png")
    if not is_kept:
        shutil.rmtree("r.jsonl.progress")
    stop_at("SIGTERM", 1)
    assert cli(*words).status == 143
    assert rows_of(files["jsonl"].read_text()) == rows
    stop_at("SIGTERM", 0)
    assert cli(*words).status == 1
    assert patches.forwards == (1 if is_kept else 7)
    repair("6.png")
    stop_at("SIGTERM", 0)
    assert "10 images, 1 with an error\n" in cli(*words).out, "an image cannot be decoded"
    assert patches.forwards == 1
    assert not Path("r.jsonl.progress").exists()
    again = {option: path.read_bytes() for option, path in files.items()}
    assert "is complete" in cli(*words).out
    cli(*words, "--overwrite")
    assert {option: path.read_bytes() for option, path in files.items()} == again


def test_stopped_stream_keeps_its_rows(photos, predict, stop_at):
    (photos / "3.png").unlink()
    stop_at("SIGUSR1", 2)
    before = signal.getsignal(signal.SIGTERM)
    status, out, err = predict("--jsonl", "-", "--batch-size", "2")
    assert status == 143
    assert "SIGUSR1 after 4 images" in err.splitlines()[-1]
    assert len(rows_of(out)) == 4
    assert signal.getsignal(signal.SIGTERM) == before


def test_pictures_show_the_predicted_classes(photos, predict):
    (photos / "again").mkdir()
    Image.new("RGB", (90, 30)).save(photos / "again" / "0.png")
    assert predict("--pictures", "drawn/here", "--json", "p.json").status == 1
    rows = json.loads(Path("p.json").read_text())
    drawn = [Path(row["picture"]) for row in rows if "picture" in row]
    assert len(drawn) == len(rows) - 1 == 10
    assert sorted(drawn) == sorted(Path("drawn", "here").iterdir())
    for path in drawn:
        with Image.open(path) as sheet:
            assert sheet.width > 3 * 150, "the image and two classes"


def test_pictures_without_glyphs_name_the_option(cli, best, photos):
    Path("names.txt").write_text("\n".join(["\u732b", *"abcdefghi"]), encoding="utf-8")
    words = ("predict", best, photos / "0.png", *SHARED, "--pictures", "drawn")
    assert "--font" not in cli(*words).err
    err = cli(*words, "--class-names", "names.txt").err
    assert "--pictures" in err
    assert "\u732b" in err
    assert "--font" in err


def linked(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*.png"))


@pytest.mark.parametrize("words", [[], ["--copy"]])
def test_photos_are_sorted_by_class(cli, best, photos, words):
    (photos / "again").mkdir()
    picture(64, 64, seed=90).save(photos / "again" / "0.png")
    Path("names.txt").write_text("\n".join(["a/b", "..", *"cdefghij"]))
    words = ["predict", best, photos, *SHARED, "--class-names", "names.txt", *words]
    words += ["--sort", "sorted", "--jsonl"]
    assert cli(*words, "r.jsonl").status == 1

    expected = {}
    for row in rows_of(Path("r.jsonl").read_text()):
        for prediction in row.get("predictions", []):
            folder = {"a/b": "a_b", "..": "_"}.get(prediction["name"], prediction["name"])
            expected.setdefault(folder, set()).add(Path(row["image"]).read_bytes())
    for folder, contents in expected.items():
        files = list(Path("sorted", folder).iterdir())
        assert {file.read_bytes() for file in files} == contents
        assert len(files) == len(contents), "each photo once, also photos of the same name"
        assert {file.is_symlink() for file in files} == {"--copy" not in words}
    assert {path.name for path in Path("sorted").iterdir()} == expected.keys()

    # The same photos again, and a file of the user with the name of a photo.
    before = linked("sorted")
    assert cli(*words, "again.jsonl").status == 1
    assert linked("sorted") == before
    file = Path("sorted", next(name for name in before if name.endswith("/1.png")))
    file.unlink()
    file.write_text("precious")
    assert cli(*words, "other.jsonl").status == 1
    assert file.read_text() == "precious"
    assert len(linked("sorted")) == len(before) + 1


def test_scores_that_are_not_finite_are_an_error_row(cli, best, photos):
    state = read_torch(best)
    for weights in ("model", "ema"):
        state[weights]["backbone.project.bias"].fill_(3e38)
    torch.save(state, "nan.pt")
    photo = photos / "0.png"
    status, _, err = cli("predict", "nan.pt", photo, *SHARED, "--jsonl", "p.jsonl")
    assert status == 1
    assert f"{photo}: " in err
    [row] = rows_of(Path("p.jsonl").read_text())
    assert row == {"image": str(photo), "error": err.strip()[len("mldec: ") :]}

    # No image is left to choose from.
    words = [photo, "--plugin", "patches", "--device", "cpu"]
    assert "1 have an error" in cli.fault("next", "nan.pt", *words)


def test_checkpoint_without_thresholds_is_reported(cli, best, photos):
    words = ["predict", best, photos / "0.png", "--plugin", "patches", "--device", "cpu"]
    status, _, err = cli(*words)
    assert status == 0
    assert str(best) in err
    assert "mldec calibrate" in err
    assert cli(*words, "--content", "scores").err == ""


def test_shards_are_slices_of_the_images(photos, predict):
    assert predict("--jsonl", "whole.jsonl").status == 1
    whole = rows_of(Path("whole.jsonl").read_text())
    for number in (2, 0, 1):
        shard = ["--shard", f"{number}/3", "--jsonl", f"{number}.jsonl"]
        # The fourth image cannot be read.
        assert predict(*shard).status == int(number == 0)
        assert_same_rows(f"{number}.jsonl", write_rows(whole[number::3]))
    assert "is complete: 4 images, 1 with" in predict("--shard", "0/3", "--jsonl", "0.jsonl").out
    assert rows_of(predict("--shard", "2/3", "--jsonl", "-").out)[0]["image"].endswith("2.png")

    one_line(predict("--shard", "1/3", "--jsonl", "0.jsonl").err, "0.jsonl", "--shard")
    for value in ("3/3", "-1/3", "3", "auto/3"):
        status, _, err = predict(f"--shard={value}", "--jsonl", "s.jsonl")
        assert status == 2
        one_line(err, "--shard", value)


def write_rows(rows):
    path = Path("expected.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--parquet", "-"], "--jsonl"),
        (["--json", "/dev/full"], "/dev/full"),
        (["--jsonl", "missing/p.jsonl"], "missing"),
        (["--features", "f.npy", "--views", "flip"], "--features"),
        (["s3://bucket/a.png"], "s3://bucket/a.png"),
        (["--sort", "photos/sorted"], "--sort photos/sorted"),
        (["--copy"], "--copy"),
    ],
)
def test_unusable_options_raise_an_error(photos, predict, words, name):
    (photos / "3.png").unlink()
    status, _, err = predict(*words)
    assert status == 1
    one_line(err, name)
