"""Photos in, JSON out: the routes of the web page, and what stands before them."""

import asyncio
import base64
import secrets
import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

import torch
from fastapi import FastAPI, Form, HTTPException, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.formparsers import MultiPartParser
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from mldec.checkpoint.classes import can_make
from mldec.data.images import read_image
from mldec.errors import ConfigError, DataError, UserError, visible
from mldec.evaluation.class_list import class_names, read_classes
from mldec.evaluation.open import DEFAULT_THRESHOLD
from mldec.evaluation.run import decided
from mldec.tools.pages import data_url, template
from mldec.tools.predict.engine import Engine, TorchEngine
from mldec.tools.predict.heat_maps import heated

MiB = 2**20
MAX_PHOTOS = 16  # per request
MAX_FILE = 20 * MiB  # bytes of a photo
MAX_UPLOAD = 100 * MiB  # bytes of a request
MAX_PIXELS = 50_000_000  # of a photo: the largest of today's telephones, but for special modes
MAX_CLASSES = 1000  # typed into the page
CLASS_LISTS = 8  # lists of typed classes whose word vectors are kept
HEAT_MAPS = 6  # per photo
PICTURE, HEAT_PICTURE = 480, 240  # longer sides in pixels of what the page shows
QUALITY = 85  # of JPEG
DIGITS, HEAT_DIGITS = 6, 4  # after the point, of a score and of a heat map
NAME_LENGTH = 100  # letters of a photo's name that are kept
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Settings(BaseModel):
    """What a request asks about its photos."""

    threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=f"lowest score of a present class; without it those of the model, "
        f"{DEFAULT_THRESHOLD} if it has none; no effect if a photo has one class",
    )
    top: int = Field(default=10, ge=1, description="classes per photo at most")
    classes: str = Field(default="", description="names with commas between, for a zero-shot model")
    heat_maps: bool = Field(
        default=False,
        description=f"add `heat` to the present classes, up to {HEAT_MAPS} per photo; to the best "
        f"class if none is present",
    )
    pictures: bool = Field(default=False, description="add what the page shows: JPEGs as data URLs")


class Question(Settings):
    """A request: photos, and what it asks about them."""

    photos: list[UploadFile] = Field(description=f"1 to {MAX_PHOTOS} image files")


class Prediction(BaseModel):
    """A class of a photo."""

    name: str
    score: float = Field(description="from 0 to 1")
    threshold: float | None = Field(
        description="lowest score of a present class; null: a photo has one class"
    )
    present: bool
    heat: list[list[float]] | None = Field(
        default=None,
        description="where the model looked: rows of numbers from 0 on, over the part `seen`",
    )
    heat_picture: str | None = Field(
        default=None, description="the same over the photo, a data URL"
    )


class Row(BaseModel):
    """What the model says of a photo: `predictions`, or an `error`."""

    image: str = Field(description="name of the file, without folders and control characters")
    error: str | None = Field(default=None, description="why there are no predictions")
    predictions: list[Prediction] = Field(default=[], description="highest score first")
    seen: list[float] | None = Field(
        default=None, description="what the model saw: left, top, right, bottom in pixels"
    )
    heat_method: str | None = Field(default=None, description="how the heat maps are made")
    picture: str | None = Field(default=None, description="the part that was seen, a data URL")


class Limits(BaseModel):
    """What a request may hold at most."""

    photos: int = MAX_PHOTOS
    bytes_per_photo: int = MAX_FILE
    bytes_per_request: int = MAX_UPLOAD
    pixels_per_photo: int = MAX_PIXELS
    typed_classes: int = MAX_CLASSES
    heat_maps_per_photo: int = HEAT_MAPS


class Model(BaseModel):
    """What the server can answer."""

    name: str
    classes: list[str]
    exclusive: bool = Field(description="a photo has one class")
    thresholds: list[float] | None = Field(description="of the classes; null: it stores none")
    heat_maps: bool = Field(description="it can say where it looked")
    calibrated: bool | None = Field(description="scores are probabilities; null: not known")
    zero_shot: bool = Field(description="it was trained to score any class")
    typed_classes: bool = Field(description="this server can score other classes than its own")
    limits: Limits = Limits()


class Answerer:
    """Score photos, and say where the model looked; one call at a time."""

    def __init__(self, engine: Engine, vectors: str | None = None) -> None:
        self.engine = engine
        self._vectors = vectors
        self._engine_of = lru_cache(CLASS_LISTS)(self._make_engine)

    @property
    def model(self) -> Model:
        """Describe the model to a program or the page."""
        engine, calibrated = self.engine, None
        if isinstance(engine, TorchEngine):
            calibration = engine.loaded.calibration
            calibrated = calibration is not None and calibration.images > 0
        has_vectors = self._vectors is not None or can_make(engine.classes)
        return Model(
            name=engine.path.name,
            classes=[*engine.classes.names],
            exclusive=engine.classes.exclusive,
            thresholds=None if engine.thresholds is None else [*engine.thresholds],
            heat_maps=isinstance(engine, TorchEngine),
            calibrated=calibrated,
            zero_shot=engine.zero_shot,
            typed_classes=engine.zero_shot and has_vectors,
        )

    def answer(self, photos: Sequence[tuple[str, bytes]], settings: Settings) -> list[Row]:
        """Answer for photos, each a name and the bytes of its file."""
        engine = self.engine
        if settings.classes.strip():
            engine = self._engine_of(settings.classes)
        elif not engine.classes.names:
            raise ConfigError("this model has no classes of its own: type some")
        if settings.heat_maps and not isinstance(engine, TorchEngine):
            raise ConfigError(
                "an exported file has no heat maps: start mldec demo with its checkpoint"
            )

        rows = []
        for file_name, content in photos:
            # The name of a stranger's file is a text, never a path of this machine.
            path = PurePosixPath(visible(file_name.replace("\\", "/")))
            row = Row(image=path.name[-NAME_LENGTH:] or "photo")
            try:
                self._fill(row, content, engine, settings)
            except DataError as error:
                row.error = str(error).removeprefix(f"{row.image}: ")
            rows.append(row)
        return rows

    def _fill(self, row: Row, content: bytes, engine: Engine, settings: Settings) -> None:
        """Add the predictions to a row, with heat maps and pictures if they are wanted."""
        if len(content) > MAX_FILE:
            raise DataError(f"more than {MAX_FILE // MiB} MiB")
        image = read_image(row.image, content, max_pixels=MAX_PIXELS)
        pixels = engine.transform(image)[None]
        scores = engine.answer(pixels).scores[0].cpu()
        if not torch.isfinite(scores).all():
            raise DataError("its scores are not finite")

        predictions = _ranked(engine, scores, settings.threshold, settings.top)
        seen: tuple[float, float, float, float] = (0, 0, *image.size)
        if isinstance(engine, TorchEngine):
            seen = engine.loaded.transform.visible_part(image.size)
        picture = image.crop(seen)
        picture.thumbnail((PICTURE, PICTURE), Image.Resampling.LANCZOS)
        if settings.pictures:
            row.picture = data_url(picture, quality=QUALITY)

        if settings.heat_maps and isinstance(engine, TorchEngine):
            shown = [item for item in predictions if item.present][:HEAT_MAPS] or predictions[:1]
            indices = [engine.classes.names.index(item.name) for item in shown]
            [maps] = engine.heat_maps(pixels, [indices])

            picture.thumbnail((HEAT_PICTURE, HEAT_PICTURE))
            for item, heat in zip(shown, maps.numpy(), strict=True):
                item.heat = heat.round(HEAT_DIGITS).tolist()
                if settings.pictures:
                    item.heat_picture = data_url(heated(picture, heat), quality=QUALITY)
            row.seen, row.heat_method = [*seen], engine.explainer.method
        row.predictions = predictions

    def _make_engine(self, classes: str) -> Engine:
        """Return the engine for typed classes."""
        if not self.model.typed_classes:
            raise ConfigError(
                "this server scores the classes of its model only: it is no zero-shot model, or "
                "mldec demo was started without --vectors FILE"
            )
        count = len(class_names(classes))
        if count > MAX_CLASSES:
            raise ConfigError(f"{count:,} classes: name at most {MAX_CLASSES:,}")
        # What strangers type is not written to this machine.
        named = read_classes(classes, self._vectors, self.engine.classes, keep=False)
        return self.engine.for_classes(named)


def application(answerer: Answerer, names: Iterable[str] = (), token: str | None = None) -> FastAPI:
    """Return the page and its routes, behind a `RequestGuard`."""
    # The parser of uploads writes files above this size to the disk.
    MultiPartParser.spool_max_size = MAX_UPLOAD
    app = FastAPI(
        title="mldec.tools.demo",
        description="Name what photos show.",
        docs_url=None,
        redoc_url=None,
        max_body_size=MAX_UPLOAD,
    )
    app.add_middleware(RequestGuard, names=names, token=token)
    one_at_a_time = asyncio.Lock()
    html_page = template("mldec.tools.demo", "page.html")

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        html = html_page.render(model=answerer.model, default=DEFAULT_THRESHOLD, nonce=nonce)
        # The browser loads nothing but the answers of this server.
        headers = {"content-security-policy": POLICY.format(nonce=nonce)}
        return HTMLResponse(html, headers=headers | {"referrer-policy": "no-referrer"})

    @app.get("/api/model")
    def model() -> Model:
        """Describe the model: its classes, thresholds, abilities and limits."""
        return answerer.model

    @app.post("/api/predict", response_model_exclude_unset=True)
    async def predict(
        question: Annotated[Question, Form(media_type="multipart/form-data")],
    ) -> list[Row]:
        """Name what photos show, each in a row of its own, in the order of the photos."""
        if (count := len(question.photos)) > MAX_PHOTOS:
            raise HTTPException(413, f"{count} photos: pass at most {MAX_PHOTOS} in a request")
        files = [(photo.filename or "", await photo.read()) for photo in question.photos]
        async with one_at_a_time:
            return await run_in_threadpool(answerer.answer, files, question)

    @app.exception_handler(UserError)
    def user_fault(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    @app.exception_handler(RequestValidationError)
    def parameter_fault(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    return app


class RequestGuard:
    """Refuse requests of strangers and of other sites' pages.

    This machine is called by `names`, its addresses, "localhost" and its own name.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], token: str | None) -> None:
        self._app = app
        self._names = {name.lower() for name in [*names, "localhost", socket.gethostname()]}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        answer = self._refusal(scope["method"], Headers(scope=scope)) or self._app
        await answer(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> JSONResponse | None:
        """Return the answer to a request that is not let through."""
        # A page of another site can call this machine by a name of its own (DNS rebinding).
        host = headers.get("host", "")
        if not self._is_own(host):
            return JSONResponse({"detail": f"this server is not called {visible(host)}"}, 403)

        # Browsers say where a request comes from; programs send no such header.
        site = headers.get("sec-fetch-site", "none")
        if method == "POST" and site not in ("same-origin", "none"):
            return JSONResponse({"detail": "pages of other sites may not use this server"}, 403)

        if self._token is not None and not _brings(headers.get("authorization", ""), self._token):
            fault = "pass the token as a password, or in a header: Authorization: Bearer TOKEN"
            challenge = {"www-authenticate": 'Basic realm="mldec demo", charset="UTF-8"'}
            return JSONResponse({"detail": fault}, 401, challenge)
        return None

    def _is_own(self, host: str) -> bool:
        """Tell whether a header names this machine: by one of its names, or by any address."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or ip_address(name) is not None
        except ValueError:
            return False


def _brings(authorization: str, token: str) -> bool:
    """Tell whether a header holds the token: as the password of any user, or by itself."""
    scheme, _, value = authorization.partition(" ")
    given = value.encode("latin-1")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(value).partition(b":")[2]
        except ValueError:
            return False
    return secrets.compare_digest(given, token.encode())


def _ranked(engine: Engine, scores: Tensor, threshold: float | None, top: int) -> list[Prediction]:
    """Return the classes of a photo, highest score first; of equal scores the lower index."""
    thresholds = engine.thresholds
    if threshold is not None or thresholds is None:
        thresholds = [DEFAULT_THRESHOLD if threshold is None else threshold] * len(scores)
    lowest = None if engine.classes.exclusive else torch.tensor(thresholds)
    present = decided(scores[None], lowest)[0].tolist()

    values, order = scores.sort(descending=True, stable=True)
    return [
        Prediction(
            name=engine.classes.names[index],
            score=round(score, DIGITS),
            threshold=None if lowest is None else round(lowest[index].item(), DIGITS),
            present=present[index],
        )
        for index, score in zip(order[:top].tolist(), values[:top].tolist(), strict=True)
    ]
