"""The page and its HTTP endpoint, in Gradio."""

from collections.abc import Callable
from functools import wraps
from html import escape
from importlib import resources
from inspect import getdoc
from typing import Any

import gradio as gr
from fastapi import FastAPI
from gradio.data_classes import GradioRootModel

from mldec.demo.answering import (
    MAX_PHOTOS,
    MAX_PIXELS,
    Answerer,
    Answers,
    Photo,
    ranked,
    stored_or,
)
from mldec.demo.cards import render
from mldec.demo.door import MAX_FILE, taken
from mldec.demo.shelf import Shelf
from mldec.errors import UserError
from mldec.inference.engine import TorchEngine
from mldec.inference.scoring import DEFAULT_THRESHOLD

MAX_WAITING = 200  # requests in the queue; more are refused
SESSIONS = 32  # pages whose last answer Gradio keeps
OWN, SLIDER = "those of the model", "one for all classes"
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
CODE_FONTS = ["ui-monospace", "Consolas", "monospace"]
SAMPLE = 12  # names of classes at the top of the page
DIGITS = 6  # of a score after the point in the JSON of the endpoint
MAP_DIGITS = 4  # likewise of a heat map


class Waiting(GradioRootModel):
    """The photos of a request behind the door: names instead of files."""

    root: list[dict[str, Any]] | None


def application(
    answerer: Answerer, uploads: Shelf[Photo], kept: Shelf[Answers], title: str
) -> FastAPI:
    """Return the page and the endpoint as an ASGI application, to be put behind a `Door`.

    Args:
        answerer: that answers for photos.
        uploads: where photos wait.
        kept: where the answers of open pages are kept, for another threshold.
        title: of the page.
    """
    blocks = build(answerer, uploads, kept, title)
    blocks.queue(max_size=MAX_WAITING, default_concurrency_limit=1)
    blocks.state_session_capacity = SESSIONS

    # Every setting that a variable of the environment could change is said here.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    return gr.mount_gradio_app(
        app,
        blocks,
        path="/",
        max_file_size=MAX_FILE,
        show_error=False,
        footer_links=["api"],
        run_history=False,
        ssr_mode=False,
        enable_monitoring=False,
        pwa=False,
        mcp_server=False,
        theme=gr.themes.Default(font=FONTS, font_mono=CODE_FONTS),
        css=resources.files("mldec.demo").joinpath("page.css").read_text(encoding="utf-8"),
    )


def build(answerer: Answerer, uploads: Shelf[Photo], kept: Shelf[Answers], title: str) -> gr.Blocks:
    """Return the page; the arguments are those of `application`."""
    engine = answerer.engine
    has_thresholds = engine.thresholds is not None
    exclusive = engine.classes.exclusive

    with gr.Blocks(title=title, analytics_enabled=False) as blocks:
        gr.HTML(_heading(title, _summary(answerer)), padding=False)
        token = gr.State("")

        with gr.Row():
            with gr.Column(scale=1, min_width=300):
                photos = gr.File(
                    label="Photos",
                    file_count="multiple",
                    file_types=["image"],
                    height=180,
                    elem_id="photos",
                )
                photos.data_model = Waiting

                source = gr.Radio(
                    [OWN, SLIDER],
                    value=OWN if has_thresholds else SLIDER,
                    label="Thresholds",
                    visible=has_thresholds and not exclusive,
                    elem_id="source",
                )
                slider = gr.Slider(
                    0,
                    1,
                    value=DEFAULT_THRESHOLD,
                    step=0.01,
                    label="Threshold for all classes",
                    visible=not exclusive,
                    elem_id="threshold",
                )
                heat = gr.Checkbox(
                    label="Show where the model looked",
                    visible=answerer.explains,
                    elem_id="heat",
                )
                classes = gr.Textbox(
                    label="Classes",
                    info="Names with commas between; empty: those of the model",
                    placeholder="zebra, umbrella",
                    visible=answerer.takes_classes,
                    elem_id="classes",
                )
                gr.HTML(_small(_limits(answerer)), padding=False)
            with gr.Column(scale=2, min_width=300):
                welcome = _small(["The answers appear here."])
                shown = gr.HTML(welcome, elem_id="answers", padding=False)

        # What comes from the page is checked here: a client may send anything.
        def shown_of(answers: Answers, own: Any, threshold: Any, heat_maps: Any) -> str:
            chosen = None if own == OWN else _number("threshold", threshold)
            return render(answerer, answers, chosen, heat=heat_maps is True)

        @told
        def add(files: Any, own: Any, threshold: Any, heat_maps: Any, names: Any) -> list[Any]:
            answers = answerer.answer(taken(uploads, files), _text(names))
            return [None, _keep(kept, answers), shown_of(answers, own, threshold, heat_maps)]

        @told
        def rescore(name: str, own: Any, threshold: Any, heat_maps: Any, names: Any) -> list[Any]:
            if not name:
                return [name, gr.skip()]
            answers = answerer.again(_found(kept, name), _text(names))
            return [_keep(kept, answers), shown_of(answers, own, threshold, heat_maps)]

        @told
        def redraw(name: str, own: Any, threshold: Any, heat_maps: Any) -> Any:
            return shown_of(_found(kept, name), own, threshold, heat_maps) if name else gr.skip()

        @told
        def slide(name: str, threshold: Any, heat_maps: Any) -> list[Any]:
            return [SLIDER, redraw(name, SLIDER, threshold, heat_maps)]

        private = {"preprocess": False, "api_visibility": "private"}
        model: dict[str, Any] = {**private, "concurrency_id": "model"}
        drawing: dict[str, Any] = {
            **private,
            "concurrency_id": "drawing",
            "concurrency_limit": 4,
            "show_progress": "hidden",
            "trigger_mode": "always_last",
        }
        settings = [source, slider, heat]
        photos.upload(add, [photos, *settings, classes], [photos, token, shown], **model)
        classes.submit(rescore, [token, *settings, classes], [token, shown], **model)
        source.input(redraw, [token, *settings], shown, **drawing)
        heat.input(redraw, [token, *settings], shown, **{**drawing, "show_progress": "minimal"})
        slider.input(slide, [token, slider, heat], [source, shown], **drawing)

        answer = endpoint(answerer, uploads)
        gr.api(
            answer,
            api_name="answer",
            api_description=getdoc(answer),
            concurrency_id="model",
            concurrency_limit=1,
        )
    return blocks


def endpoint(answerer: Answerer, uploads: Shelf[Photo]) -> Callable[..., list[dict[str, Any]]]:
    """Return the function behind the HTTP endpoint; its docstring is the documentation there."""

    @told
    def answer(
        photos: list[gr.FileData],
        threshold: float | None = None,
        top: int = 10,
        classes: str = "",
        heat_maps: bool = False,
    ) -> list[dict[str, Any]]:
        """Name what photos show.

        Args:
            photos: 1 to 16 uploaded files; paths and web addresses are not read.
            threshold: lowest score of a present class, 0 to 1; null: those of the model, 0.5 if it
                has none.
            top: classes per photo at most, highest score first.
            classes: names with commas between, for a zero-shot model; empty: its own.
            heat_maps: say where the model looked for each class; not with an exported file.

        Returns:
            Per photo {"image": name, "predictions": [{"name", "score", "threshold", "present"}]},
            or {"image": name, "error": what is wrong with it}. With heat_maps a prediction has
            "heat", rows of numbers from 0 on over the part "seen" of the photo: left, top, right,
            bottom in pixels.
        """
        answers = answerer.answer(taken(uploads, photos), _text(classes))
        thresholds = stored_or(answers.engine, _number("threshold", threshold))
        most = _number("top", top)
        if most is None or most < 1 or most != int(most):
            raise UserError(f"top: {top} is not a whole number from 1 on")

        entries = []
        for index, photo in enumerate(answers.photos):
            if photo.fault is not None:
                entries.append({"image": photo.name, "error": photo.fault})
                continue

            named = ranked(answers.engine, photo.scores, thresholds)[: int(most)]
            entry: dict[str, Any] = {"image": photo.name, "predictions": []}
            for item in named:
                prediction = {
                    "name": item.name,
                    "score": round(item.score, DIGITS),
                    "threshold": item.threshold,
                    "present": item.present,
                }
                entry["predictions"].append(prediction)
            if heat_maps:
                entry["seen"] = [*photo.seen]
                maps = answerer.heat(answers, index, [item.index for item in named])
                for prediction, heat in zip(entry["predictions"], maps, strict=True):
                    prediction["heat"] = heat.round(MAP_DIGITS).tolist()
            entries.append(entry)
        return entries

    return answer


def told(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let Gradio tell the user the message of a `UserError`, and of no other error."""

    @wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            raise gr.Error(escape(str(error), quote=False), print_exception=False) from error

    return telling


def _keep(kept: Shelf[Answers], answers: Answers) -> str:
    return kept.add(answers, answers.size, replace=True)


def _found(kept: Shelf[Answers], name: str) -> Answers:
    answers = kept.get(name)
    if answers is None:
        raise UserError("the photos are no longer kept: drop them again")
    return answers


def _text(value: Any) -> str:
    if not isinstance(value, str | None):
        raise UserError(f"classes: {value!r} is not a text")
    return value or ""


def _number(name: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise UserError(f"{name}: {value!r} is not a number")
    return value


def _summary(answerer: Answerer) -> str:
    """Return a sentence about the model."""
    engine = answerer.engine
    names = engine.classes.names
    kind = "one per photo" if engine.classes.exclusive else "any number per photo"
    sentence = f"{len(names):,} classes, {kind}: {', '.join(names[:SAMPLE])}"
    if len(names) > SAMPLE:
        sentence += ", ..."
    if not names:
        sentence = "A zero-shot model: type the classes to look for"
    return f"{sentence}."


def _limits(answerer: Answerer) -> list[str]:
    """Return sentences on what can be uploaded, and what this model cannot do."""
    engine = answerer.engine
    sentences = [
        f"Up to {MAX_PHOTOS} photos at a time, each up to {MAX_FILE // 2**20} MiB and "
        f"{MAX_PIXELS // 10**6} million pixels. They are not stored."
    ]
    if not answerer.explains:
        sentences.append("An exported file has no heat maps: the checkpoint has.")
    if engine.zero_shot and not answerer.takes_classes:
        sentences.append("Start it with --vectors FILE to type other classes.")
    if isinstance(engine, TorchEngine) and engine.loaded.calibration is None:
        sentences.append("The scores are not calibrated: they need not be probabilities.")
    return sentences


def _small(sentences: list[str]) -> str:
    """Return sentences as a small paragraph of HTML."""
    return f'<p class="mldec-note">{escape(" ".join(sentences), quote=False)}</p>'


def _heading(title: str, summary: str) -> str:
    return f"<h1>{escape(title)}</h1><p>{escape(summary)}</p>"
