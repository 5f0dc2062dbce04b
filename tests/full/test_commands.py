"""What a user types and sees, on a quick run made by a real process."""

import csv
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from support import QUICK, made, one_line, write_coco

import mldec
from mldec import checkpoint
from mldec.checkpoint import load_model
from mldec.data.digits import NAMES, digits
from mldec.data.types import fixed_sample
from mldec.files.torch_files import read_torch

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three scenes as image files."""
    folder = tmp_path_factory.mktemp("scenes")
    (folder / "deeper").mkdir()
    dataset = made(digits, val_images=3).val.dataset
    for index, name in enumerate(["a.png", "b.jpg", "deeper/c.PNG"]):
        Image.fromarray(fixed_sample(dataset, index)[0].permute(1, 2, 0).numpy()).save(
            folder / name
        )
    (folder / "notes.txt").write_text("no image")
    return folder


def test_a_run_leaves_what_the_readme_says(digits_run: Path) -> None:
    found = {str(path.relative_to(digits_run)) for path in digits_run.rglob("*") if path.is_file()}
    assert {
        "config.yaml",
        "train.log",
        "metrics.jsonl",
        "checkpoints/last.pt",
        "checkpoints/best.pt",
    } <= found
    assert {"checkpoints/last.pt.sha256", "checkpoints/best.pt.sha256"} <= found
    assert {"checkpoints/last.1.pt", "checkpoints/last.1.pt.sha256"} <= found
    assert any(name.startswith("tensorboard/events") for name in found)
    assert "run.json" in found
    assert len(found) == 11
    lines = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 4, 6, 8, 8]
    assert all(line.keys() >= {"step", "epoch", "time"} for line in lines)
    assert "val/mAP" in lines[-1]
    assert "val_raw/mAP" in lines[-1]


def test_the_log_begins_with_the_command_the_version_and_the_commit(digits_run: Path) -> None:
    first, second = (digits_run / "train.log").read_text().splitlines()[:2]
    assert "-m mldec.train +experiment=digits" in first
    assert "data.train_images=64" in first
    state = read_torch(digits_run / "checkpoints" / "best.pt")
    assert first.endswith(f"(mldec {mldec.__version__}, commit {state['git'] or 'none'})")
    assert "fp32 (train.precision=auto) on cpu x 1" in second
    facts = json.loads((digits_run / "run.json").read_text())
    assert (facts["name"], facts["epochs"], facts["commit"]) == ("digits", 2, state["git"])
    assert facts["command"] in first


def test_a_resumed_run_says_its_command_too(
    cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch
) -> None:
    shutil.copytree(digits_run.parent, tmp_path / "outputs")
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("train", *QUICK, "resume=auto")
    assert status == 0, err
    lines = (tmp_path / "outputs" / "digits" / "train.log").read_text().splitlines()
    assert sum(f"(mldec {mldec.__version__}, commit " in line for line in lines) == 2


def test_half_precision_of_a_run_is_left_out_on_a_cpu(
    cli: Cli, digits_run: Path, tmp_path: Path
) -> None:
    path = digits_run / "checkpoints" / "best.pt"
    state = read_torch(path)
    state["config"]["train"]["precision"] = "bf16"
    torch.save(state, tmp_path / "half.pt")
    status, out, err = cli("evaluate", tmp_path / "half.pt", "--plugin", "patches")
    assert status == 0, err
    assert "evaluated in fp32 on a CPU, not in train.precision=bf16" in out
    assert f"  {state['best']['value']:7.3f}\n" in out
    status, out, err = cli(
        "evaluate", tmp_path / "half.pt", "--plugin", "patches", "train.precision=bf16"
    )
    assert status == 0, err
    assert "train.precision=bf16 is slow on a CPU" in out


def test_the_folder_of_a_run_stands_for_its_best_checkpoint(
    cli: Cli, digits_run: Path, tmp_path: Path
) -> None:
    status, out, err = cli("evaluate", digits_run, "--plugin", "patches")
    assert status == 0, err
    best = read_torch(digits_run / "checkpoints" / "best.pt")["best"]["value"]
    assert f"  {best:7.3f}\n" in out
    (tmp_path / "empty").mkdir()
    status, _, err = cli("evaluate", tmp_path / "empty")
    assert status == 1
    one_line(err, "empty is no folder of a run: there is neither", "best.pt nor", "last.pt")


def test_a_run_starts_from_the_folder_of_another(
    cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch
) -> None:
    folder = Path(shutil.copytree(digits_run, tmp_path / "old"))
    (folder / "checkpoints" / "best.pt").unlink()
    monkeypatch.chdir(tmp_path)
    words = ["name=new", f"init={folder}", "train.epochs=1", "train.precision=auto"]
    status, out, err = cli("train", *QUICK, *words)
    assert status == 0, err
    assert f"init from {folder / 'checkpoints' / 'last.pt'}: " in out
    assert "fp32 (train.precision=auto) on cpu x 1" in out
    assert "slow" not in out


def test_tensorboard_reads_the_run(digits_run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(digits_run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("val/mAP")] == [4, 8]
    assert [event.step for event in events.Images("val_images")] == [4, 8]

    # The micro curve holds the overall precision and recall at the threshold of the evaluation.
    for event in events.Tensors("val_pr/micro"):
        curve = make_ndarray(event.tensor_proto)
        for row, metric in ((4, "val/OP"), (5, "val/OR")):
            (value,) = [one.value for one in events.Scalars(metric) if one.step == event.step]
            assert 100 * curve[row, 50] == pytest.approx(value)


def test_an_existing_run_is_not_overwritten(
    cli: Cli, digits_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(digits_run.parents[1])
    before = (digits_run / "checkpoints" / "last.pt").read_bytes()
    status, _, err = cli("train", *QUICK)
    assert status == 1
    one_line(err, "digits holds a run: pass resume=auto to go on, or name=... for a new run")
    assert (digits_run / "checkpoints" / "last.pt").read_bytes() == before


def test_evaluate_gives_the_number_of_the_run_and_writes_it(
    cli: Cli, digits_run: Path, tmp_path: Path
) -> None:
    best = digits_run / "checkpoints" / "best.pt"
    words = ["--plugin", "patches", "--json", tmp_path / "r.json", "--csv", tmp_path / "r.csv"]
    status, out, err = cli("evaluate", best, *words)
    assert status == 0, err
    found = json.loads((tmp_path / "r.json").read_text())
    state = read_torch(best)
    assert found["metrics"]["mAP"] == pytest.approx(state["best"]["value"], abs=1e-9)
    assert found["weights"] == state["best"]["weights"]
    assert found["images"] == 40
    assert found["checkpoint"] == str(best)
    assert {"mAP", "CP", "CR", "CF1", "OP", "OR", "OF1"} <= found["metrics"].keys()
    assert tuple(found["per_class"]) == NAMES
    mean = sum(row["AP"] or 0 for row in found["per_class"].values()) / 10
    assert mean == pytest.approx(found["metrics"]["mAP"])
    assert f"mAP               {found['metrics']['mAP']:7.3f}" in out
    assert "on 40 images" in out
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [row["class"] for row in rows] == list(NAMES)
    assert float(rows[3]["AP"]) == pytest.approx(found["per_class"]["three"]["AP"], abs=1e-3)


def test_evaluate_takes_settings_and_other_weights(
    cli: Cli, digits_run: Path, tmp_path: Path
) -> None:
    last = digits_run / "checkpoints" / "last.pt"
    for weights, key in (("ema", "val/mAP"), ("raw", "val_raw/mAP")):
        path = tmp_path / f"{weights}.json"
        status, _, err = cli(
            "evaluate",
            last,
            "--weights",
            weights,
            "train.workers=1",
            "--json",
            path,
            "--plugin",
            "patches",
        )
        assert status == 0, err
        assert json.loads(path.read_text())["metrics"]["mAP"] == pytest.approx(
            read_torch(last)["metrics"][key], abs=1e-9
        )
    status, _, err = cli(
        "evaluate", last, "data.val_images=7", "--json", path, "--plugin", "patches"
    )
    assert json.loads(path.read_text())["images"] == 7


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["foo"], ["'foo' is not understood", "key=value"]),
        (["trai.epochs=3"], ["has no setting 'trai'; did you mean 'train.epochs'?"]),
        (["data.val_image=3"], ["digits takes no such argument; did you mean 'val_images'?"]),
        (["train.epochs=x"], ["train.epochs", "'x'"]),
        (["data=cocoo"], ["there is no such option; did you mean 'coco'?"]),
        (["data=coco", "data.root=/nowhere"], ["/nowhere", "DATASETS.md"]),
        (["device=cuda:99"], ["device cuda:99 is not there", "use device=cpu"]),
        (["--json", "/nowhere/r.json"], ["cannot write /nowhere/r.json"]),
    ],
)
def test_evaluate_refuses_in_one_line(
    cli: Cli, digits_run: Path, words: list[str], parts: list[str]
) -> None:
    status, out, err = cli(
        "evaluate", digits_run / "checkpoints" / "best.pt", "--plugin", "patches", *words
    )
    assert status == 1
    assert out == ""
    one_line(err, *parts)


def test_classes_of_checkpoint_and_data_must_agree(
    cli: Cli, digits_run: Path, tmp_path: Path
) -> None:
    write_coco(tmp_path, classes=12)
    best = digits_run / "checkpoints" / "best.pt"
    words = [
        "--plugin",
        "patches",
        "data=coco",
        f"data.root={tmp_path}",
        f"data.cache_dir={tmp_path / 'cache'}",
    ]
    status, _, err = cli("evaluate", best, *words)
    assert status == 1
    one_line(err, "best.pt knows 10 classes, the data has 12")


def test_predict_names_files_and_folders(cli: Cli, digits_run: Path, scenes: Path) -> None:
    best = digits_run / "checkpoints" / "best.pt"
    status, out, err = cli(
        "predict",
        best,
        scenes,
        scenes / "a.png",
        "--top",
        "3",
        "--plugin",
        "patches",
        "--device",
        "cpu",
    )
    assert status == 0, err
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        str(scenes / name) for name in ("a.png", "b.jpg", "deeper/c.PNG", "a.png")
    ]
    assert lines[0] == lines[3]
    loaded = load_model(best, plugins=["patches"])
    with torch.no_grad():
        image = torch.from_numpy(np.array(Image.open(scenes / "a.png"))).permute(2, 0, 1)
        expected = loaded.model(image[None]).sigmoid()[0]
    top = expected.argsort(descending=True)[:3]
    words = ", ".join(f"{NAMES[index]} {expected[index]:.3f}" for index in top)
    assert lines[0].endswith(": " + words)


def test_predict_writes_json_above_a_threshold(
    cli: Cli, digits_run: Path, scenes: Path, tmp_path: Path
) -> None:
    best = digits_run / "checkpoints" / "best.pt"
    options = ["--threshold", "0.3", "--plugin", "patches"]
    status, out, err = cli("predict", best, scenes, "--json", "-", *options)
    assert status == 0, err
    answers = json.loads(out)
    assert len(answers) == 3
    for answer in answers:
        scores = [item["score"] for item in answer["predictions"]]
        assert scores == sorted(scores, reverse=True)
        assert all(0.3 <= score <= 1 for score in scores)
    cli("predict", best, scenes, "--json", tmp_path / "p.json", "--batch-size", "1", *options)
    again = json.loads((tmp_path / "p.json").read_text())
    for answer, other in zip(answers, again, strict=True):
        assert answer["image"] == other["image"]
        assert [i["score"] for i in answer["predictions"]] == pytest.approx(
            [i["score"] for i in other["predictions"]]
        )


def test_the_image_size_applies_to_a_run_of_ours(
    cli: Cli, digits_run: Path, scenes: Path, tmp_path: Path
) -> None:
    best, shared = digits_run / "checkpoints" / "best.pt", ["--plugin", "patches"]
    plain = cli("predict", best, scenes / "a.png", *shared)[1]
    assert cli("predict", best, scenes / "a.png", *shared, "--image-size", "64")[1] == plain
    assert cli("predict", best, scenes / "a.png", *shared, "--image-size", "32")[1] != plain
    status, _, err = cli(
        "evaluate", best, *shared, "--image-size", "32", "--json", tmp_path / "r.json"
    )
    assert status == 0, err
    assert json.loads((tmp_path / "r.json").read_text())["images"] == 40


def test_predict_goes_on_after_a_bad_image(
    cli: Cli, digits_run: Path, scenes: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.jpg").write_bytes((scenes / "b.jpg").read_bytes()[:300])
    best = digits_run / "checkpoints" / "best.pt"
    status, out, err = cli(
        "predict",
        best,
        *[scenes / "a.png", tmp_path, scenes / "b.jpg"],
        *["--plugin", "patches", "--threshold", "0"],
    )
    assert status == 1
    assert len(out.splitlines()) == 2
    one_line(err, str(tmp_path / "bad.jpg"))


def test_predict_refuses_what_is_not_there(cli: Cli, digits_run: Path, tmp_path: Path) -> None:
    best = digits_run / "checkpoints" / "best.pt"
    for path, part in (
        (tmp_path / "x.jpg", "no such file or folder"),
        (tmp_path, "the folder holds no image"),
    ):
        status, _, err = cli("predict", best, path, "--plugin", "patches")
        assert status == 1
        one_line(err, str(path), part)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["no run is chosen: begin with +experiment=digits"]),
        (["+experiment=digit"], ["did you mean 'digits'?"]),
        (["experiment=digits"], ["write +experiment=digits, with a plus"]),
        (["+experiment=digits", "train.epoch=3"], ["did you mean 'epochs'?"]),
        (["+experiment=digits", "+train.epoch=3"], ["did you mean 'epochs'?"]),
        (["+experiment=digits", "train.epochs=abc"], ["train.epochs", "'abc'"]),
        (["+experiment=digits", "head=mll"], ["head=mll", "ml_decoder"]),
        (
            ["+experiment=digits", "head.num_grops=3"],
            ["head.num_grops: MLDecoder takes no such argument", "num_groups"],
        ),
        (["+experiment=digits", "head.num_groups=many"], ["'many' is not a whole number or null"]),
        (["+experiment=digits", "head.num_groups=0"], ["head.num_groups is 0"]),
        (
            ["+experiment=digits", "optim.name=adamm"],
            ["optim.name 'adamm' is unknown", "did you mean"],
        ),
        (
            ["+experiment=digits", "train.batch_size=63", "train.accumulate=2"],
            ["train.batch_size 63 is not divisible", "use 62 or 64"],
        ),
        (["+experiment=digits", "train.stop_epoch=5"], ["train.stop_epoch is 5", "epochs (2)"]),
        (
            ["+experiment=digits", "train.patience=1", "train.eval_every=4"],
            ["train.patience is 1", "no evaluation before the last epoch (2)"],
        ),
        (
            ["+experiment=digits", "train.stop_epoch=2", "train.ema_start_epoch=3"],
            ["train.ema_start_epoch is 3: it must be at most the last epoch (2)"],
        ),
        (
            ["+experiment=digits", "train.ema_start_epoch=2", "train.ema_decay=null"],
            ["train.ema_start_epoch is 2", "without train.ema_decay"],
        ),
        (["+experiment=digits", "train.batch_per_gpu=0"], ["train.batch_per_gpu is 0"]),
        (["+experiment=digits", "head=gap", "+head.num_groups=3"], ["GAP takes no such argument"]),
        (
            ["+experiment=digits", "loss._target_=os.system"],
            ["loss._target_ 'os.system' is refused"],
        ),
        (["+experiment=digits", "init=nothing.pt"], ["no file at nothing.pt"]),
        (["+experiment=digits", "resume=nothing.pt"], ["resume=nothing.pt: there is no such file"]),
        (["+experiment=digits", "name=a/b"], ["name 'a/b' cannot be the name of a folder"]),
        (
            ["+experiment=coco_tresnet_m", "data.root=/nowhere", "backbone.pretrained=false"],
            ["/nowhere", "DATASETS.md"],
        ),
    ],
)
def test_train_refuses_in_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("train", *words)
    assert status == 1
    one_line(err, *parts)
    assert not list(tmp_path.rglob("*.pt"))


def test_a_misspelt_key_in_an_experiment_file_is_refused(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults:\n  - digits\ntrain:\n  epoch: 3\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    status, _, err = cli("train", "--config-dir", tmp_path, "+experiment=mine")
    assert status == 1
    one_line(err, "train.epoch: train has no setting 'epoch'; did you mean 'epochs'?")


def test_a_non_finite_loss_names_the_step_and_the_images(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = cli("train", *QUICK, "loss._target_=patches.Exploding")
    assert status == 1
    one_line(err, "in step 3 (epoch 1)", "digit scene ", "no checkpoint was written yet")


def test_resume_ends_where_the_run_would_have(
    cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli("train", *QUICK, "train.epochs=1")[0] == 0
    status, out, err = cli("train", *QUICK, "resume=auto")
    assert status == 0, err
    assert "epoch 2 of 2" in out
    steps = [
        json.loads(line)["step"]
        for line in Path("outputs/digits/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [2, 4, 4, 6, 8, 8]
    status, _, err = cli("train", *QUICK, "resume=auto", "optim.lr=1")
    assert status == 1
    one_line(err, "optim.lr: 0.01 -> 1.0")


@pytest.mark.parametrize("words", [["loss=distribution_balanced"], ["loss.pos_weight=auto"]])
def test_a_resumed_run_whose_loss_counts_labels_equals_one_that_was_not_stopped(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for setting in ("name=whole", "name=parts train.stop_epoch=1", "name=parts resume=auto"):
        status, _, err = cli("train", *QUICK, *words, *setting.split())
        assert status == 0, err

    # The training scenes are drawn anew in each process, the labels are counted in each.
    files = [Path("outputs", name, "checkpoints", "last.pt") for name in ("whole", "parts")]
    weights = [checkpoint.load(file).model for file in files]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_a_run_that_has_ended_says_so_and_goes_on_when_its_end_is_moved(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("outputs/digits")
    words = [*QUICK, "train.epochs=3"]

    status, out, err = cli("train", *words, "train.stop_epoch=1")
    assert status == 0, err
    reason = "train.stop_epoch is 1, of 3 planned epochs"
    assert f"ended after epoch 1: {reason}" in out
    assert json.loads((folder / "run.json").read_text())["ended"] == reason
    before = (folder / "checkpoints" / "last.pt").read_bytes()

    status, out, err = cli("train", *words, "train.stop_epoch=1", "resume=auto")
    assert status == 0, err
    assert "ended after epoch 1, nothing is left to train" in out
    assert (folder / "checkpoints" / "last.pt").read_bytes() == before
    assert cli("summary").out.splitlines()[1].split()[3:5] == ["1/3", "finished"]

    status, out, err = cli("train", *words, "resume=auto")
    assert status == 0, err
    assert "epoch 2 of 3" in out
    assert "ended after epoch 3: train.epochs is 3" in out


def test_a_batch_per_gpu_replaces_the_batch_size(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*QUICK, "train.accumulate=2"]

    status, out, err = cli("train", *words, "train.batch_per_gpu=4", "train.epochs=1")
    assert status == 0, err
    assert (
        "batches of 8 images (train.batch_per_gpu 4 x 1 processes x train.accumulate 2, "
        "in place of train.batch_size)" in out
    )
    recorded = yaml.safe_load(Path("outputs/digits/config.yaml").read_text())["train"]
    assert (recorded["batch_size"], recorded["batch_per_gpu"]) == (8, 4)

    # A resume compares what it came to, however it is written.
    status, _, err = cli("train", *words, "train.batch_per_gpu=8", "resume=auto")
    assert status == 1
    one_line(err, "train.batch_size: 8 -> 16")
    assert cli("train", *words, "train.batch_size=8", "resume=auto").status == 0


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; sys.argv = ['train', '--help']\n"
        "from mldec import train\n"
        "try: train.main()\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'timm' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "+experiment=digits" in done.stdout


def test_init_starts_a_new_run_from_weights(
    cli: Cli, digits_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    best = digits_run / "checkpoints" / "best.pt"
    status, out, err = cli(
        "train", *QUICK, f"init={best}", "train.epochs=1", "optim.lr=1e-9", "train.ema_decay=null"
    )
    assert status == 0, err
    assert "tensors loaded" in out
    assert f"start weights: init={best}" in Path("outputs/digits/train.log").read_text()
    began = read_torch(best)
    start = began["ema" if began["best"]["weights"] == "ema" else "model"]
    end = read_torch(Path("outputs/digits/checkpoints/last.pt"))["model"]
    torch.testing.assert_close(end, start, atol=1e-5, rtol=0)
    assert not math.isnan(read_torch(Path("outputs/digits/checkpoints/last.pt"))["best"]["value"])


def test_a_full_disk_under_standard_output_ends_a_run_in_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mldec.train", *QUICK],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    one_line(done.stderr, "cannot write standard output: No space left on device")
