"""The routes of the web page, and the checks of their requests."""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from ipaddress import ip_address
from pathlib import PurePosixPath
from typing import Annotated
from urllib.parse import urlsplit

import torch
from fastapi import FastAPI, Form, HTTPException, Request, Response, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from PIL import Image
from pydantic import BaseModel, Field
from starlette.formparsers import MultiPartParser
from torch import Tensor

from mldec.checkpoint.classes import can_encode
from mldec.data.images import read_image
from mldec.errors import ConfigError, DataError, UserError, visible
from mldec.evaluation.class_list import read_classes
from mldec.evaluation.open import DEFAULT_THRESHOLD
from mldec.evaluation.options import split_names
from mldec.tools.demo.photos import Example, TrainingPhoto, TrainingPhotos
from mldec.tools.heat_maps import heated
from mldec.tools.pages import data_url, template
from mldec.tools.predict.answers import TOP, chosen_rule
from mldec.tools.predict.engine import Engine, TorchEngine

MiB = 2**20
MAX_PHOTOS = 16  # per request
MAX_FILE = 20 * MiB  # bytes per photo
MAX_UPLOAD = 100 * MiB  # bytes per request
MAX_PIXELS = 50_000_000  # per photo
MAX_CLASSES = 1000  # typed into the page
CLASS_LISTS = 8  # cached lists of typed classes
HEAT_MAPS = 6  # per photo
PICTURE = 480  # longer side of a picture on the page in pixels
HEAT_PICTURE = 240  # longer side of a heat map in pixels
QUALITY = 85  # of JPEG
DIGITS = 6  # decimals of a score
HEAT_DIGITS = 4  # decimals of a heat map
NAME_LENGTH = 100  # characters of the name of a photo
POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PredictRequest(BaseModel):
    """Photos and options."""

    photos: list[UploadFile] = Field(description=f"1 to {MAX_PHOTOS} image files")
    threshold: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description=f"lowest score of a present class; default: the thresholds of the model, or "
        f"{DEFAULT_THRESHOLD}; no effect on single-label models",
    )
    top: int | None = Field(
        default=None,
        ge=1,
        description=f"classes, also absent; default: those present, or {TOP} without thresholds",
    )
    classes: str = Field(default="", description="comma-separated names, for a zero-shot model")
    heat_maps: bool = Field(
        default=False,
        description=f"add `heat` to up to {HEAT_MAPS} present classes per photo, or to the best "
        f"listed class if none is present",
    )
    training_photos: bool = Field(
        default=False,
        description="add the `training_photos` that speak most for a class to the same classes",
    )
    pictures: bool = Field(default=False, description="add JPEG pictures as data URLs")


class Prediction(BaseModel):
    """The prediction of one class."""

    name: str
    score: float  # from 0 to 1
    threshold: float | None  # lowest score of a present class; None for single-label models
    present: bool
    heat: list[list[float]] | None = None  # heat map of the part `seen`: rows of values >= 0
    heat_picture: str | None = None  # heat map over the photo, a data URL
    training_photos: list[TrainingPhoto] | None = None  # largest contribution first


class Result(BaseModel):
    """The predictions for one photo, or an error."""

    image: str  # name of the file, without folders and control characters
    error: str | None = None  # reason why there are no predictions
    predictions: list[Prediction] = []  # highest score first
    seen: list[float] | None = None  # input of the model: left, top, right, bottom in pixels
    heat_method: str | None = None
    picture: str | None = None  # the part `seen`, a data URL


class Limits(BaseModel):
    """Limits of a request."""

    photos: int = MAX_PHOTOS
    bytes_per_photo: int = MAX_FILE
    bytes_per_request: int = MAX_UPLOAD
    pixels_per_photo: int = MAX_PIXELS
    typed_classes: int = MAX_CLASSES
    heat_maps_per_photo: int = HEAT_MAPS


class ModelInfo(BaseModel):
    """The model of the server."""

    name: str
    classes: list[str]
    exclusive: bool  # whether the model is single-label
    thresholds: list[float] | None  # one per class
    heat_maps: bool
    training_photos: bool  # whether the server can show them
    calibrated: bool | None  # None: unknown
    zero_shot: bool
    typed_classes: bool  # whether the server can score typed classes
    limits: Limits = Limits()


class Predictor:
    """Predictions and heat maps for photos. `vectors` are for typed classes, see `read_classes`."""

    training: TrainingPhotos | None = None  # to explain predictions

    def __init__(self, engine: Engine, vectors: str | None = None) -> None:
        self.engine = engine
        self._vectors = vectors
        self._cached_engine = lru_cache(CLASS_LISTS)(self._engine_for_classes)

    @property
    def info(self) -> ModelInfo:
        """Description of the model."""
        engine = self.engine
        name = engine.path.name
        calibrated = None
        if isinstance(engine, TorchEngine):
            name = engine.loaded.config.name if engine.loaded.of_run else name
            calibration = engine.loaded.calibration
            calibrated = calibration is not None and calibration.images > 0
        has_vectors = self._vectors is not None or can_encode(engine.classes)
        return ModelInfo(
            name=name,
            classes=list(engine.classes.names),
            exclusive=engine.classes.exclusive,
            thresholds=None if engine.thresholds is None else list(engine.thresholds),
            heat_maps=isinstance(engine, TorchEngine),
            training_photos=self.training is not None,
            calibrated=calibrated,
            zero_shot=engine.zero_shot,
            typed_classes=engine.zero_shot and has_vectors,
        )

    def predict(self, photos: Sequence[tuple[str, bytes]], options: PredictRequest) -> list[Result]:
        """Return one result per photo, given its name and content. Not thread-safe."""
        engine = self.engine
        if options.classes.strip():
            engine = self._cached_engine(options.classes)
        elif not engine.classes.names:
            raise ConfigError("classes: this model has no classes; type some")
        if options.heat_maps and not isinstance(engine, TorchEngine):
            raise ConfigError("heat_maps: an exported file has none; serve its checkpoint")
        if options.training_photos and self.training is None:
            raise ConfigError("training_photos: start the server with --training-photos FOLDER")

        results = []
        for file_name, content in photos:
            # The name is only displayed. No file is opened.
            path = PurePosixPath(visible(file_name.replace("\\", "/")))
            result = Result(image=path.name[-NAME_LENGTH:] or "photo")
            try:
                self._fill(result, content, engine, options)
            except DataError as error:
                result.error = str(error).removeprefix(f"{result.image}: ")
            results.append(result)
        return results

    def _fill(
        self, result: Result, content: bytes, engine: Engine, options: PredictRequest
    ) -> None:
        if len(content) > MAX_FILE:
            raise DataError(f"more than {MAX_FILE // MiB} MiB")
        image = read_image(result.image, content, max_pixels=MAX_PIXELS)
        small = image
        if engine.min_side is not None:
            small = read_image(result.image, content, draft=engine.min_side)
        pixels = engine.transform(small)[None]
        scores = engine.answer(pixels).scores[0].cpu()
        if not torch.isfinite(scores).all():
            raise DataError("the scores are not finite")

        predictions = _ranked(engine, scores, options)
        seen: tuple[float, float, float, float] = (0, 0, *image.size)
        if isinstance(engine, TorchEngine):
            seen = engine.loaded.transform.visible_part(image.size)
        picture = image.crop(seen)
        picture.thumbnail((PICTURE, PICTURE), Image.Resampling.LANCZOS)
        if options.pictures:
            result.picture = data_url(picture, quality=QUALITY)

        explained = [item for item in predictions if item.present][:HEAT_MAPS] or predictions[:1]
        indices = [engine.classes.names.index(item.name) for item in explained]
        if options.training_photos and self.training and isinstance(engine, TorchEngine):
            head = engine.loaded.model.head
            found = self.training.images.speaking_for(head, engine.tokens(pixels), indices)
            for item, photos in zip(explained, found, strict=True):
                item.training_photos = [self.training.show(*photo) for photo in photos]

        if options.heat_maps and isinstance(engine, TorchEngine):
            [maps] = engine.heat_maps(pixels, [indices])

            picture.thumbnail((HEAT_PICTURE, HEAT_PICTURE))
            for item, heat in zip(explained, maps.numpy(), strict=True):
                item.heat = heat.round(HEAT_DIGITS).tolist()
                if options.pictures:
                    item.heat_picture = data_url(heated(picture, heat), quality=QUALITY)
            result.seen = list(seen)
            result.heat_method = engine.explainer.method
        result.predictions = predictions

    def _engine_for_classes(self, classes: str) -> Engine:
        if not self.info.typed_classes:
            raise ConfigError(
                "classes: this server only scores the classes of its model; use a zero-shot model "
                "and mldec demo --vectors FILE"
            )
        try:
            names = split_names(classes)
        except ValueError as error:
            raise ConfigError(f"classes: {error}") from error
        if len(names) > MAX_CLASSES:
            raise ConfigError(f"classes: {len(names):,} names; type at most {MAX_CLASSES:,}")
        # Do not write the input of clients to the cache on the disk.
        named = read_classes(names, self._vectors, self.engine.classes, keep=False)
        return self.engine.for_classes(named)


def create_app(
    predictor: Predictor, host: str = "localhost", examples: Sequence[Example] = ()
) -> FastAPI:
    """Return the web application; `host` is an additional host name of this machine."""
    # The parser writes larger uploads to the disk.
    MultiPartParser.spool_max_size = MAX_UPLOAD
    app = FastAPI(
        title="mldec demo",
        description="Classify photos.",
        docs_url=None,
        redoc_url=None,
        max_body_size=MAX_UPLOAD,
    )
    own_names = {host.lower(), "localhost", socket.gethostname().lower()}
    engine_lock = asyncio.Lock()
    html_page = template("mldec.tools.demo", "page.html")

    @app.middleware("http")
    async def check_origin(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Reject requests of web pages from other sites."""
        # DNS rebinding: the host name of another site can resolve to this machine.
        name = request.headers.get("host", "")
        if not _is_own_name(name, own_names):
            return JSONResponse({"detail": f"unknown host name {visible(name)}"}, 403)

        # Browsers send Sec-Fetch-Site only over HTTPS or to localhost, but Origin with each POST.
        site = request.headers.get("sec-fetch-site")
        origin = request.headers.get("origin", f"//{name}")
        is_own = site in ("same-origin", "none") if site else origin.partition("//")[2] == name
        if request.method == "POST" and not is_own:
            return JSONResponse({"detail": "requests from other sites are not allowed"}, 403)
        return await call_next(request)

    @app.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        options = {"model": predictor.info, "default": DEFAULT_THRESHOLD, "examples": examples}
        html = html_page.render(options, nonce=nonce)
        headers = {
            "content-security-policy": POLICY.format(nonce=nonce),
            "referrer-policy": "no-referrer",
        }
        return HTMLResponse(html, headers=headers)

    @app.get("/api/examples/{number}", include_in_schema=False)
    def example(number: int) -> Response:
        # The content is in memory: a request opens no file.
        if not 0 <= number < len(examples):
            raise HTTPException(404, f"{number}: there are {len(examples)} examples")
        return Response(examples[number].content, media_type="application/octet-stream")

    @app.get("/api/model")
    def model() -> ModelInfo:
        """Describe the model: classes, thresholds, features and limits."""
        return predictor.info

    @app.post("/api/predict", response_model_exclude_unset=True)
    async def predict(
        request: Annotated[PredictRequest, Form(media_type="multipart/form-data")],
    ) -> list[Result]:
        """Return one result per photo, in the order of the photos."""
        count = len(request.photos)
        if count > MAX_PHOTOS:
            raise HTTPException(413, f"{count} photos: pass at most {MAX_PHOTOS} in a request")
        files = [(photo.filename or "", await photo.read()) for photo in request.photos]
        async with engine_lock:
            return await run_in_threadpool(predictor.predict, files, request)

    @app.exception_handler(UserError)
    def user_error(request: Request, error: UserError) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 400)

    @app.exception_handler(RequestValidationError)
    def validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"detail": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    return app


def _is_own_name(host: str, names: set[str]) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or ip_address(name) is not None
    except ValueError:
        return False


def _ranked(engine: Engine, scores: Tensor, options: PredictRequest) -> list[Prediction]:
    threshold = options.threshold
    is_exclusive = engine.classes.exclusive
    is_ranking = is_exclusive or (threshold is None and engine.thresholds is None)
    if is_ranking:
        threshold = None if is_exclusive else DEFAULT_THRESHOLD
    rule = chosen_rule(engine, content="decisions", threshold=threshold)
    limits = rule.min_scores()
    [present] = rule.selected(scores[None], limits)

    order = scores.argsort(descending=True, stable=True)
    if options.top is None and not is_ranking:
        order = order[present[order]]
    else:
        order = order[: options.top or TOP]
    limits = limits.expand(len(scores))
    predictions = []
    for index in order.tolist():
        prediction = Prediction(
            name=engine.classes.names[index],
            score=round(scores[index].item(), DIGITS),
            threshold=None if is_exclusive else round(limits[index].item(), DIGITS),
            present=bool(present[index]),
        )
        predictions.append(prediction)
    return predictions
