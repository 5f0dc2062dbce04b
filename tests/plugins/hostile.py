"""Files that would run code, or end in a traceback, if they were read carelessly.

Each is made when it is asked for. The code leaves a trace: a file, a variable of the environment,
or a module that no other code imports.
"""

import io
import pickle
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from mldec import build, checkpoint
from mldec.config.compose import compose, to_dict
from mldec.data.base import Classes
from mldec.runtime import facts

VARIABLE = "MLDEC_HOSTILE"
NAMES = ("zero", "one", "two")
WORDS = [
    "+experiment=digits",
    "backbone.name=test_resnet",
    "backbone.model_args.channels=[16,16,16,16]",
]
WORDS += ["head.embed_dim=32", "head.mlp_dim=32", "train.workers=0"]


class Calls:
    """A pickle of this calls a function of any name when it is read by `pickle`."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.called = module, name, arguments


class Attacker(pickle._Pickler):  # type: ignore[name-defined]
    """Write `Calls` in the given opcodes: reduce, stack global, inst, obj, newobj, build."""

    def __init__(self, file: Any, protocol: int, opcode: str = "reduce") -> None:
        super().__init__(file, protocol)
        self.opcode = opcode

    def save(self, value: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(value, Calls):
            super().save(value, save_persistent_id)
            return
        module, name, arguments = value.called
        named = f"{module}\n{name}\n".encode()
        if self.opcode == "inst":
            self.write(pickle.MARK)
            for argument in arguments:
                super().save(argument)
            self.write(pickle.INST + named)
        elif self.opcode == "obj":
            self.write(pickle.MARK + pickle.GLOBAL + named)
            for argument in arguments:
                super().save(argument)
            self.write(pickle.OBJ)
        elif self.opcode == "stack_global":
            super().save(module)
            super().save(name)
            self.write(pickle.STACK_GLOBAL)
            super().save(arguments)
            self.write(pickle.REDUCE)
        else:
            self.write(pickle.GLOBAL + named)
            super().save(arguments)
            self.write({"newobj": pickle.NEWOBJ}.get(self.opcode, pickle.REDUCE))
            if self.opcode == "build":
                super().save({"command": arguments})
                self.write(pickle.BUILD)


def pickled(value: Any, protocol: int = 2, opcode: str = "reduce") -> bytes:
    """Return a pickle of containers with `Calls` in them."""
    file = io.BytesIO()
    Attacker(file, protocol, opcode).dump(value)
    return file.getvalue()


def archive(path: Path, content: bytes, name: str = "data.pkl", **members: bytes) -> None:
    """Write a file laid out as torch.save does, with this pickle in it."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"archive/{name}", content)
        for member, text in {"version": b"3\n", "byteorder": b"little", **members}.items():
            file.writestr(f"archive/{member}", text)


def write_program(path: Path, call: Calls) -> None:
    """Write a file of torch.export that makes a call when torch.export.load reads its inputs."""
    program = io.BytesIO()
    torch.export.save(torch.export.export(nn.Identity(), (torch.zeros(2),)), program)
    with zipfile.ZipFile(program) as source, zipfile.ZipFile(path, "w") as file:
        for name in source.namelist():
            is_pickle = name.endswith("sample_inputs/model.pt")
            file.writestr(name, pickled(call) if is_pickle else source.read(name))


def calls(trace: Path) -> dict[str, Calls]:
    """Return calls that would leave a trace, or reach out of the process, if they were made."""
    shell, python = f"touch {trace}", f"open({str(trace)!r}, 'w')"
    return {
        "os.system": Calls("os", "system", shell),
        "posix.system": Calls("posix", "system", shell),
        "os.popen": Calls("os", "popen", shell),
        "os.putenv": Calls("os", "putenv", VARIABLE, "1"),
        "subprocess.Popen": Calls("subprocess", "Popen", ["touch", str(trace)]),
        "subprocess.check_output": Calls("subprocess", "check_output", ["touch", str(trace)]),
        "builtins.eval": Calls("builtins", "eval", python),
        "builtins.exec": Calls("builtins", "exec", python),
        "__builtin__.eval": Calls("__builtin__", "eval", python),
        "builtins.open": Calls("builtins", "open", str(trace), "w"),
        "builtins.__import__": Calls("builtins", "__import__", "antigravity"),
        "builtins.getattr": Calls(
            "builtins", "getattr", Calls("builtins", "__import__", "os"), "system"
        ),
        "builtins.breakpoint": Calls("builtins", "breakpoint"),
        "importlib.import_module": Calls("importlib", "import_module", "antigravity"),
        "runpy.run_path": Calls("runpy", "run_path", str(trace.with_suffix(".py"))),
        "runpy._run_code": Calls("runpy", "_run_code", python, {}),
        "pty.spawn": Calls("pty", "spawn", ["touch", str(trace)]),
        "timeit.timeit": Calls("timeit", "timeit", python, "pass", 1),
        "code.InteractiveInterpreter": Calls(
            "code", "InteractiveInterpreter", {"__name__": python}
        ),
        "webbrowser.open": Calls("webbrowser", "open", "https://example.invalid"),
        "torch.hub.load": Calls("torch.hub", "load", str(trace.parent), "model", "local"),
        "torch.load": Calls("torch", "load", str(trace.with_suffix(".pkl")), None, None),
        "torch.ops.load_library": Calls("torch._ops", "_OpNamespace.load_library", str(trace)),
        "torch.jit.load": Calls("torch.jit", "load", str(trace)),
        "torch.storage._load_from_bytes": Calls(
            "torch.storage", "_load_from_bytes", pickled(Calls("os", "system", shell))
        ),
        "numpy._reconstruct": Calls(
            "numpy.core.multiarray", "_reconstruct", Calls("numpy", "ndarray"), (0,), b"b"
        ),
        "numpy.load": Calls("numpy", "load", str(trace), None, True),
        "numpy.f2py": Calls("numpy.f2py.capi_maps", "getinit", shell, {}),
        "functools.partial": Calls("functools", "partial", Calls("os", "system", shell)),
        "operator.attrgetter": Calls("operator", "attrgetter", "system"),
        "operator.methodcaller": Calls("operator", "methodcaller", "system", shell),
        "codecs.decode": Calls("codecs", "decode", "b3MuZXhlYw==", "base64"),
        "marshal.loads": Calls("marshal", "loads", b"c\x00"),
        "types.FunctionType": Calls("types", "FunctionType", None, {}),
        "pickle.loads": Calls("pickle", "loads", pickled(Calls("os", "system", shell))),
        "shutil.rmtree": Calls("shutil", "rmtree", str(trace.parent / "kept")),
        "pathlib.Path": Calls("pathlib", "PosixPath", str(trace)),
        "socket.socket": Calls("socket", "create_connection", ("127.0.0.1", 9)),
        "ctypes.CDLL": Calls("ctypes", "CDLL", str(trace)),
        "hydra.utils.instantiate": Calls(
            "hydra.utils", "instantiate", {"_target_": "os.system", "command": shell}
        ),
        "mldec.build": Calls("mldec.build", "importlib.import_module", "antigravity"),
    }


def pickles(folder: Path, trace: Path) -> None:
    """Make files whose pickles call something, in every container and in every opcode."""
    dangerous = calls(trace)
    for name, call in dangerous.items():
        archive(folder / f"zip-{name}.pth", pickled({"format": 1, "model": call}))
    system = dangerous["os.system"]
    for protocol in range(6):
        (folder / f"pickle-{protocol}.pth").write_bytes(pickled({"model": system}, protocol))
        head = (
            pickled(0x1950A86A20F9469CFC6C, 2)
            + pickled(1001, 2)
            + pickled({"little_endian": True}, 2)
        )
        (folder / f"legacy-{protocol}.pth").write_bytes(
            head + pickled({"model": system}, protocol) + pickled([], 2)
        )
    for opcode in ("stack_global", "inst", "obj", "newobj", "build"):
        archive(folder / f"opcode-{opcode}.pth", pickled({"model": system}, opcode=opcode))
    with tarfile.open(folder / "tar.pth", "w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            content = pickled({"model": system})
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    archive(
        folder / "constants.pth",
        pickled({"model": 1}),
        constants=b"",
        **{"constants.pkl": pickled(system)},
    )
    for name in ("program.pt2", "program.pth"):
        write_program(folder / name, system)
    with warnings.catch_warnings(action="ignore"):
        torch.jit.script(nn.Linear(2, 2)).save(str(folder / "torchscript.pth"))


def good(words: list[str] = WORDS, queries: torch.Tensor | None = None) -> dict[str, Any]:
    """Return a whole checkpoint of ours, of an untrained network."""
    config = compose(words)
    classes = Classes(NAMES)
    model = build.model(build.check(config, build.MODEL_PARTS), classes, pretrained=False)
    weights = model.state_dict()
    return {
        "format": checkpoint.FORMAT,
        "config": to_dict(config),
        "classes": {"names": list(NAMES), "exclusive": False, "queries": queries},
        "transform": {"image_size": 64},
        "metrics": {"val/mAP": 1.0},
        "best": {"metric": "mAP", "value": 1.0, "weights": "raw", "epoch": 1},
        "epoch": 1,
        "step": 4,
        "model": weights,
        "ema": {name: tensor.clone() for name, tensor in weights.items()},
        "optimizer": {
            "state": {0: {"exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 1e-4, "params": [0]}],
        },
        "scaler": {},
        "steps_per_epoch": 4,
        "loss": {},
        "log": {"lines": 1, "loss": 0.0, "steps": 0, "skipped": 0, "bad_images": 0},
        "versions": facts.installed(),
        "git": None,
    }


def put(state: dict[str, Any], place: str, value: Any) -> None:
    """Replace what is at a place, such as config/head/num_layers."""
    *parents, last = place.split("/")
    for name in parents:
        state = state[name]
    state[last] = value


def _copied(value: Any) -> Any:
    """Return other containers with the same content."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _holds_itself() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def _doubled(value: Any, times: int) -> Any:
    for _ in range(times):
        value = [value, value]
    return value


def _shadowed(**attributes: Any) -> OrderedDict[str, Any]:
    value: OrderedDict[str, Any] = OrderedDict(weight=torch.zeros(2))
    value.__dict__.update(attributes)
    return value


with warnings.catch_warnings(
    action="ignore"
):  # torch is about to drop them, but files that hold them stay
    QUANTISED = torch._empty_affine_quantized([3], scale=0.1, zero_point=0, dtype=torch.qint8)

TARGETS = [
    "os.system",
    "builtins.eval",
    "subprocess.run",
    "torch.hub.load",
    "torch.load",
    "pdb.Pdb._getval",
    "logging.os.system",
    "logging.config.dictConfig",
    "hydra.utils.instantiate",
    "hydra.utils.get_method",
    "hydra._internal.instantiate._instantiate2.instantiate",
    "mldec.heads.__builtins__.eval",
    "mldec.heads.gap.os.system",
    "mldec.heads.gap.GAP.__init__.__globals__",
    "mldec.heads.gap.nn.Linear",
    "mldec.heads.gap",
    "mldec.heads.",
    "mldec.heads..gap.GAP",
    "mldec.heads.gap\x00.GAP",
    ".mldec.heads.gap.GAP",
    "mldec.train.main",
    "mldec.checkpoint.zoo.download",
    "antigravity.webbrowser",
    "patches.MeanHead",
    "",
]

# What a checkpoint of ours may have changed into: the place, and the value there.
CHANGES: dict[str, tuple[str, Any]] = {
    **{f"head {target!r}": ("config/head", {"_target_": target}) for target in TARGETS},
    "data that is no data": (
        "config/data",
        {"_target_": "mldec.data.files.check_folder", "root": "/", "what": "", "see": ""},
    ),
    "data that downloads": (
        "config/data",
        {"_target_": "mldec.checkpoint.zoo.download", "url": "https://example.invalid"},
    ),
    "hub name": ("config/backbone/name", "hf-hub:someone/something"),
    "local name": ("config/backbone/name", "local-dir:/tmp"),
    "nested target": ("config/head/num_groups", {"_target_": "os.system", "command": "true"}),
    "environment": ("config/data/root", "${oc.env:HOME}"),
    "environment in a key": ("config/${oc.env:HOME}", 1),
    "resolver": ("config/name", "${oc.decode:'1'}"),
    "missing": ("config/name", "???"),
    "folder name": ("config/name", "../../tmp/x"),
    "config of text": ("config", "text"),
    "config of numbers": ("config", {1: 2}),
    "config with a tensor": ("config/seed", torch.zeros(1)),
    "deep config": ("config/data/deep", _doubled(1, 40)),
    "endless config": ("config/data/deep", _holds_itself()),
    "huge number": ("config/seed", 10**10_000),
    "huge network": ("config/head/embed_dim", 2**50),
    "negative network": ("config/head/embed_dim", -4),
    "layers without end": ("config/head/num_layers", 10**7),
    "60,000 layers": ("config/head/num_layers", 60_000),
    "many layers": ("config/head/num_layers", 10**5),
    "layers of 30 digits": ("config/head/num_layers", 10**19),
    "wide network": ("config/head/mlp_dim", 2**30),
    "wide words": ("config/head/word_dim", 10**9),
    "deep backbone": ("config/backbone/model_args", {"layers": [1, 1, 1, 10**6]}),
    "wide backbone": ("config/backbone/model_args", {"channels": [2**17, 32, 32, 32]}),
    "endless backbone": ("config/backbone/model_args", {"layers": [1, 1, 1, 10**12]}),
    "dropout that is no number": ("config/head/dropout", float("nan")),
    "dropout without end": ("config/head/dropout", float("inf")),
    "rate that is no number": ("config/backbone/model_args", {"drop_rate": float("nan")}),
    "format of text": ("format", "1\x1b[2J"),
    "format of a tensor": ("format", torch.zeros(3)),
    "format of an empty tensor": ("format", torch.zeros(0)),
    "format of one number": ("format", torch.tensor(1)),
    "format of truth": ("format", True),
    "format with a point": ("format", 1.0),
    "huge format": ("format", 10**9_000),
    "no format": ("format", None),
    "names of text": ("classes/names", "abc"),
    "no names": ("classes/names", []),
    "names twice": ("classes/names", ["a", "a", "b"]),
    "names of numbers": ("classes/names", [1, 2, 3]),
    "names that steer": ("classes/names", ["a", "b", "\x1b]0;title\x07"]),
    "exclusive text": ("classes/exclusive", "no"),
    "queries of text": ("classes/queries", "x"),
    "queries that do not fit": ("classes/queries", torch.zeros(2, 5)),
    "an origin of text": ("classes/origin", "glove.txt"),
    "an origin without a hash": ("classes/origin", {"source": "glove.txt", "templates": []}),
    "an origin with a tensor": (
        "classes/origin",
        {"source": torch.zeros(2), "sha256": "0" * 64, "templates": []},
    ),
    "templates without a place": (
        "classes/origin",
        {"source": "clip:ViT-B-32:openai", "sha256": "0" * 64, "templates": ["a photo"]},
    ),
    "huge image": ("transform", {"image_size": 10**9}),
    "large image": ("transform", {"image_size": 8192}),
    "no image": ("transform", {"image_size": 0}),
    "image of truth": ("transform", {"image_size": True}),
    "image of a tensor": ("transform", {"image_size": torch.tensor(64)}),
    "crop 1e-6": ("transform", {"image_size": 32, "crop": 1e-6}),
    "crop 1e-300": ("transform", {"image_size": 32, "crop": 1e-300}),
    "crop below 0": ("transform", {"image_size": 32, "crop": -1.0}),
    "crop above 1": ("transform", {"image_size": 32, "crop": 1.5}),
    "crop that is none": ("transform", {"image_size": 32, "crop": float("nan")}),
    "crop of truth": ("transform", {"image_size": 32, "crop": True}),
    "crop of text": ("transform", {"image_size": 32, "crop": "0.9"}),
    "interpolation of a list": ("transform", {"image_size": 32, "interpolation": ["bilinear"]}),
    "interpolation of a tensor": ("transform", {"image_size": 32, "interpolation": torch.zeros(2)}),
    "image of text": ("transform", {"image_size": "64"}),
    "unknown transform": ("transform", {"image_size": 64, "__class__": 1}),
    "metrics of text": ("metrics", {"val/mAP": "\x1b[31m"}),
    "best of text": ("best/value", "high"),
    "best of other weights": ("best/weights", "optimizer"),
    "best of a list": ("best/weights", ["raw"]),
    "best that is no number": ("best/value", float("nan")),
    "best without end": ("best/value", float("inf")),
    "best without a metric": ("best/metric", None),
    "loss that is no number": ("log/loss", float("nan")),
    "loss without end": ("log/loss", float("inf")),
    "step before its epoch": ("step", 3),
    "step after its epoch": ("step", 9),
    "no steps": ("step", 0),
    "a million steps": ("step", 10**6),
    "epoch without steps": ("epoch", 10**6),
    "epoch below 0": ("epoch", -1),
    "epoch of truth": ("epoch", True),
    "huge step": ("step", 2**63),
    "step of text": ("step", "4"),
    "model of a list": ("model", [torch.zeros(2)]),
    "model of text": ("model", {"weight": "x"}),
    "model by numbers": ("model", {1: torch.zeros(2)}),
    "shadowed keys": ("model", _shadowed(keys=5)),
    "shadowed metadata": ("model", _shadowed(_metadata="x")),
    "counter": ("model", Counter(a=1)),
    "sparse": ("model/odd", torch.eye(3).to_sparse()),
    "quantised": ("model/odd", QUANTISED),
    "complex": ("model/odd", torch.zeros(3, dtype=torch.complex64)),
    "meta": ("model/odd", torch.zeros(10**12, device="meta")),
    "expanded": ("model/odd", torch.zeros(1).expand(10**12)),
    "no average": ("ema", 3),
    "optimiser of a list": ("optimizer", []),
    "optimiser without groups": ("optimizer", {"state": {}}),
    "optimiser of text": ("optimizer", {"state": {0: "x"}, "param_groups": ["x"]}),
    "scaler of text": ("scaler", "x"),
    "loss of text": ("loss", "x"),
    "log of a list": ("log", [1]),
    "a set": ("metrics", {"a": {1, 2}}),
    "bytes": ("git", bytearray(b"x")),
    "a class": ("git", torch.float32),
}


def changed(folder: Path) -> None:
    """Make checkpoints of ours with one thing in them that is not what it should be."""
    torch.save(good(), folder / "good.pt")
    whole = good()
    for number, (name, (place, value)) in enumerate(CHANGES.items()):
        state = _copied(whole)
        put(state, place, value)
        path = folder / f"ours-{number:02}-{''.join(c if c.isalnum() else '_' for c in name)}.pt"
        torch.save(state, path)


def broken(folder: Path) -> None:
    """Make files that are no checkpoints: bombs, halves, other formats, memory-hungry pickles."""
    whole = folder / "good.pt"
    if not whole.exists():
        torch.save(good(), whole)
    content = whole.read_bytes()
    (folder / "empty.pt").touch()
    (folder / "half.pt").write_bytes(content[: len(content) // 2])
    (folder / "no-tail.pt").write_bytes(content[:-30])
    (folder / "html.pt").write_bytes(b"<!DOCTYPE html><script>x</script>")
    (folder / "magic.pt").write_bytes(b"PK\x03\x04")
    (folder / "opcodes.pt").write_bytes(bytes(range(255, 0, -1)))
    (folder / "deep.pt").write_bytes(b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".")
    memory = Calls("builtins", "bytearray", 2**62)
    archive(folder / "memory.pt", pickled({"model": memory}))
    archive(folder / "doubled.pt", pickled({"weight": _doubled(1, 40)}))
    archive(folder / "list.pt", pickled([1, 2]))
    with (
        zipfile.ZipFile(whole) as old,
        zipfile.ZipFile(folder / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    with zipfile.ZipFile(folder / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", pickled({}))
        file.writestr("archive/data/0", bytes(2**26))
    _overlap(folder / "bomb.pt", folder / "liar.pt")
    for name, content in archives().items():
        (folder / f"archive-{name}.pt").write_bytes(content)


class Archive:
    """A zip archive whose parts can be put together otherwise than they should be.

    Args:
        members: name -> content, or -> (packed content, unpacked size) of a deflated one.
    """

    def __init__(self, members: dict[str, bytes | tuple[bytes, int]]) -> None:
        self.body = b""
        self.entries: list[
            tuple[str, int, int, int, int]
        ] = []  # name, method, packed, unpacked, offset
        for name, content in members.items():
            data, unpacked, method = (
                (content, len(content), 0) if isinstance(content, bytes) else (*content, 8)
            )
            self.entries.append((name, method, len(data), unpacked, len(self.body)))
            head = struct.pack(
                "<4s5H3L2H",
                b"PK\x03\x04",
                20,
                0,
                method,
                0,
                0,
                0,
                len(data),
                unpacked,
                len(name),
                0,
            )
            self.body += head + name.encode() + data

    def directory(self, **lies: int) -> bytes:
        """Return the directory; the arguments that are given replace the values of every member."""
        written = b""
        for name, *values in self.entries:
            told = dict(zip(("method", "packed", "unpacked", "offset"), values, strict=True)) | lies
            fields = (
                20,
                20,
                0,
                told["method"],
                0,
                0,
                0,
                told["packed"],
                told["unpacked"],
                len(name),
            )
            written += struct.pack(
                "<4s6H3L5H2L", b"PK\x01\x02", *fields, 0, 0, 0, 0, 0, told["offset"]
            )
            written += name.encode()
        return written

    def end(
        self, *, offset: int, size: int, count: int | None = None, comment: bytes = b""
    ) -> bytes:
        """Return an end record."""
        number = len(self.entries) if count is None else count
        return (
            struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, number, number, size, offset, len(comment))
            + comment
        )

    def end_64(self, *, offset: int, size: int, place: int) -> bytes:
        """Return an end record of 64 bits that lies at a place, and its locator."""
        number = len(self.entries)
        record = struct.pack(
            "<4sQ2H2L4Q", b"PK\x06\x06", 44, 20, 20, 0, 0, number, number, size, offset
        )
        return record + struct.pack("<4sLQL", b"PK\x06\x07", 0, place, 1)


def archives() -> dict[str, bytes]:
    """Return archives that are bombs, or that two readers read differently."""
    zeros = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = zeros.compress(bytes(2**26)) + zeros.flush()
    bomb = Archive({"archive/data.pkl": pickled({}), "archive/data/0": (packed, 2**26)})
    honest, modest = bomb.directory(), bomb.directory(method=0, packed=1, unpacked=1)
    start, size = len(bomb.body), len(honest)
    both = bomb.body + honest + modest
    wide = bomb.end_64(offset=start, size=size, place=len(both))

    stored = Archive({"archive/data.pkl": pickled({}), "archive/data/0": bytes(2**16)})
    directory = stored.directory()
    place = len(stored.body)
    one = Archive({"archive/data/0": bytes(2**16)})
    shared = one.directory() * 1000
    plain_end = stored.end(offset=place, size=len(directory))
    whole = stored.body + directory + plain_end
    return {
        # Python's zipfile reads the modest directory, which is before the end record; torch reads
        # the honest one.
        "two-directories": both + bomb.end(offset=start, size=size),
        "two-directories-64": both + wide + bomb.end(offset=start + size, size=size),
        "two-ends": both + wide + bomb.end(offset=start, size=size),
        "locator-elsewhere": bomb.body
        + modest
        + bomb.end_64(offset=start, size=size, place=0)
        + bomb.end(offset=start, size=size),
        "deflated-in-secret": bomb.body + modest + bomb.end(offset=start, size=size),
        "comment": whole[:-2] + struct.pack("<H", len(plain_end)) + plain_end,
        "after": whole + b"x",
        "before": whole[:4] + b"x" + whole[4:],
        "shared": one.body + shared + one.end(offset=len(one.body), size=len(shared), count=1000),
        "fewer": stored.body + directory + stored.end(offset=place, size=len(directory), count=1),
        "more": stored.body + directory + stored.end(offset=place, size=len(directory), count=9),
        "outside": stored.body + stored.directory(offset=2**31) + plain_end,
        "full": stored.body + stored.directory(unpacked=2**32 - 1) + plain_end,
        "reaches": stored.body + stored.directory(packed=2**20, unpacked=2**20) + plain_end,
    }


def data_files(folder: Path) -> None:
    """Make files where one tensor, or a dict of texts, is wanted."""
    ones = torch.ones(3, 4)
    with warnings.catch_warnings(action="ignore"):
        csr = torch.eye(3).to_sparse_csr()
    for name, value in {
        "sparse": ones.to_sparse(),
        "csr": csr,
        "meta": torch.zeros(3, 4, device="meta"),
        "quantised": QUANTISED,
        "expanded": torch.ones(1, 1).expand(3, 10**9),
        "complex": torch.ones(3, 4, dtype=torch.complex64),
        "conjugate": torch.ones(3, 4, dtype=torch.complex64).conj(),
        "negative": torch.ones(3, 4, dtype=torch.complex64).conj().imag,
        "overlapping": torch.arange(6.0).as_strided((3, 4), (1, 1)),
        "empty": torch.zeros(3, 0),
        "no-dimension": torch.tensor(1.0),
        "truth": torch.ones(3, 4, dtype=torch.bool),
        "float8": torch.ones(3, 4).to(torch.float8_e4m3fn),
        "shadowed-metadata": _shadowed(_metadata="x"),
        "counter": Counter(a=1),
        "set": {"a"},
        "numbers": {"/m/0a": 7},
        "itself": _holds_itself(),
        "depth": _doubled(1, 40),
    }.items():
        torch.save(value, folder / f"data-{name}.pth")
    for attribute in ("items", "get", "values", "keys", "__class__"):
        start = (
            b"\x80\x02ccollections\nOrderedDict\n)R"
            + pickled("/m/0a")[2:-1]
            + pickled("Ball")[2:-1]
            + b"s"
        )
        archive(
            folder / f"data-shadowed-{attribute}.pth", start + pickled({attribute: 5})[2:-1] + b"b."
        )
    (folder / "data-unhashable.pth").write_bytes(b"\x80\x02}]K\x01s.")
    archive(folder / "data-unhashable-zip.pth", b"\x80\x02}]K\x01s.")
    archive(folder / "data-persistent.pth", b"\x80\x02K\x01Q.")
    for protocol in (3, 4, 5):
        torch.save({"a": ones}, folder / f"data-protocol-{protocol}.pth", pickle_protocol=protocol)
        torch.save(
            {"a": "b"},
            folder / f"data-old-{protocol}.pth",
            pickle_protocol=protocol,
            _use_new_zipfile_serialization=False,
        )


def _overlap(source: Path, target: Path) -> None:
    """Say of every member that it is stored, and as large as it would unpack to."""
    content = bytearray(source.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        place = content.find(mark)
        while place >= 0:
            struct.pack_into("<H", content, place + offset, zipfile.ZIP_STORED)
            place = content.find(mark, place + 4)
    target.write_bytes(content)


def images(folder: Path, trace: Path) -> None:
    """Make files that are called images and are programs, documents, bombs or halves."""
    script = f"(%pipe%touch {trace}) (w) file pop"
    eps = (
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
        f"{script}\nshowpage\n%%EOF\n"
    )
    (folder / "eps.jpg").write_text(eps)
    (folder / "postscript.eps").write_text(eps)
    (folder / "pdf.jpg").write_bytes(
        b"%PDF-1.4\n1 0 obj<</OpenAction<</S/JavaScript/JS(x)>>>>endobj\n%%EOF"
    )
    svg = f'<svg xmlns="http://www.w3.org/2000/svg"><script href="file://{trace}"/></svg>'
    (folder / "svg.png").write_text(
        f'<?xml version="1.0"?><!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]>{svg}'
    )
    (folder / "mvg.png").write_text(
        f"push graphic-context\nimage over 0,0 0,0 'ephemeral:{trace}'\n"
    )
    (folder / "xpm.gif").write_bytes(b'/* XPM */ static char *a[] = {"9 9 1 1", "a c black"')
    (folder / "pickle.jpg").write_bytes(pickled(calls(trace)["os.system"]))
    (folder / "empty.png").touch()
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    png = (
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    )
    (folder / "bomb.png").write_bytes(
        png + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    )
    entries = {
        256: 60_000,
        257: 60_000,
        258: 8,
        259: 1,
        262: 1,
        273: 8,
        277: 1,
        278: 60_000,
        279: 1,
    }
    tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    (folder / "bomb.tif").write_bytes(
        b"II*\0" + struct.pack("<IH", 8, len(entries)) + tags + bytes(4)
    )
    jpeg = io.BytesIO()
    Image.new("RGB", (64, 64)).save(jpeg, "JPEG")
    (folder / "half.jpg").write_bytes(jpeg.getvalue()[:300])
    start = jpeg.getvalue().index(b"\xff\xc0")
    (folder / "bomb.jpg").write_bytes(
        jpeg.getvalue()[: start + 5]
        + struct.pack(">HH", 65_500, 65_500)
        + jpeg.getvalue()[start + 9 :]
    )


ANNOTATIONS = {
    "deep": "[" * 200_000,
    "huge number": '{"images": [{"id": ' + "9" * 10_000 + "}]}",
    "not a number": (
        '{"images": [{"id": NaN, "file_name": "a"}], "annotations": NaN, "categories": []}'
    ),
    "infinity": '{"images": Infinity, "annotations": [], "categories": []}',
    "lists as ids": (
        '{"images": [{"id": [], "file_name": "a"}], "annotations": [], "categories": []}'
    ),
    "a pickle": pickled(Calls("os", "system", "true"), 0).decode(),
    "numbers": "12",
    "nothing": "",
    "mixed ids": '{"images": [{"id": 1, "file_name": "a"}, {"id": "x", "file_name": "b"}],'
    ' "annotations": [], "categories": []}',
    "names of numbers": '{"images": [{"id": 1, "file_name": 5}], '
    '"annotations": [{"id": 1, "image_id": 1,'
    ' "category_id": 1}], "categories": [{"id": 1, "name": {}}]}',
}
YAML = {
    "object": "!!python/object/apply:os.system ['touch {trace}']",
    "new": "!!python/object/new:subprocess.Popen [['touch', '{trace}']]",
    "name": "!!python/name:os.system",
    "module": "!!python/module:antigravity",
    "target": "{{_target_: os.system, command: 'touch {trace}'}}",
}
