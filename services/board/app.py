"""The page's server: what may be asked for, and how."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from troupe.common.errors import ConfigError, TroupeError
from troupe.services.board import films, notes, views
from troupe.services.board.access import HEALTH, Access
from troupe.services.board.charts import AXES, MAX_RUNS, Chart, Charts
from troupe.services.board.library import Entry, Library
from troupe.services.board.reducing import MAX_COLUMNS
from troupe.services.board.sweeps import Sweeps
from troupe.services.board.timeline import Limits, as_values, moments_of
from troupe.services.board.traces import GAMES, NAME, Traces
from troupe.services.board.watching import Watch

STATIC = Path(__file__).parent / "static"
_MAX_STREAMS = 64
_RANGE = re.compile(r"bytes=(\d{1,12})-(\d{0,12})")
_HEARTBEAT_S, _LOOK_S = 15.0, 0.5
_MAX_BODY_BYTES = 8 * notes.MAX_BYTES
"""A note as JSON: a character may take six bytes there."""


class Json(Response):
    """Values as JSON that has nothing but ASCII in it, so that no text of a run can break it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Board:
    """Answers requests for the runs of a library."""

    def __init__(self, library: Library, watch: Watch) -> None:
        """Serve `library`, which `watch` keeps up to date."""
        self._library, self._watch = library, watch
        self._traces = Traces()
        self._charts = Charts(self._traces)
        self._sweeps = Sweeps(library)
        self._limits = Limits()
        self._streams = 0

    def app(self, token: str = "") -> Starlette:
        """The application; with "" for a token, of this machine's browsers only."""
        routes = [
            Route("/", _page),
            Route(HEALTH, lambda request: PlainTextResponse("ok\n")),
            Route("/api/runs", self._guarded(self._runs)),
            Route("/api/runs/{run}", self._guarded(self._run)),
            Route("/api/runs/{run}/timeline", self._guarded(self._timeline)),
            Route("/api/runs/{run}/films/{film}", self._film),
            Route("/api/runs/{run}/note", self._note, methods=["PUT"]),
            Route("/api/sweeps/{sweep}", self._guarded(self._sweep)),
            Route("/api/differences", self._guarded(self._differences)),
            Route("/api/chart", self._guarded(self._chart)),
            Route("/api/events", self._events),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        middleware = [Middleware(Access, token=token), Middleware(GZipMiddleware, minimum_size=500)]
        return Starlette(routes=routes, middleware=middleware)

    def _guarded(self, answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
        """In a thread, since files are read; a run that cannot be read is an answer like any other."""

        def endpoint(request: Request) -> Response:
            self._watch.catch_up()
            try:
                return Json(answer(request))
            except _NotFoundError as error:
                return Json({"error": str(error)}, 404)
            except (TroupeError, OSError, ValueError) as error:
                return Json({"error": str(error)}, 400)

        return endpoint

    def _runs(self, request: Request) -> dict[str, Any]:
        after = int(_number(request, "after", 0, 0, 1 << 53))
        return views.listing(self._library, self._sweeps, after)

    def _run(self, request: Request) -> dict[str, Any]:
        return views.details(self._entry(request.path_params["run"]), self._traces)

    def _timeline(self, request: Request) -> dict[str, Any]:
        """What services did over the last minutes, where it is not what was told, and what limits the run."""
        entry = self._entry(request.path_params["run"])
        moments = moments_of(self._traces, entry.path)
        answer = {"version": moments.version, **self._limits.of(entry.path)} if not entry.problem else {}
        if moments.version != int(_number(request, "after", 0, 0, 1 << 53)):
            answer |= as_values(moments)
        return answer

    def _sweep(self, request: Request) -> dict[str, Any]:
        folder = self._library.sweep(request.path_params["sweep"])
        if folder is None:
            raise _NotFoundError("there is no such sweep any more")
        return self._sweeps.details(folder, request.query_params.get("after", ""))

    def _differences(self, request: Request) -> dict[str, Any]:
        return views.differences(self._entries(request))

    def _chart(self, request: Request) -> dict[str, Any]:
        asked = request.query_params
        metric, axis = asked.get("metric", ""), asked.get("x", "steps")
        if metric and metric not in GAMES and not NAME.fullmatch(metric):
            raise ConfigError("no metric has such a name")
        if axis not in AXES:
            raise ConfigError(f"x should be one of {', '.join(AXES)}")
        has_ends = "from" in asked and "to" in asked
        chart = Chart(
            metric,
            axis,
            int(_number(request, "columns", 800, 1, MAX_COLUMNS)),
            _number(request, "smooth", 0.0, 0.0, 1.0),
            asked.get("bands") == "1",
            _number(request, "from", 0.0, -1e18, 1e18) if has_ends else None,
            _number(request, "to", 0.0, -1e18, 1e18) if has_ends else None,
        )
        return self._charts.draw(self._entries(request), chart, asked.get("after", ""))

    def _film(self, request: Request) -> Response:
        """A film, or the part of it that a player asks for."""
        try:
            entry = self._entry(request.path_params["run"])
            film, kind = films.opened(entry.path, request.path_params["film"])
        except (_NotFoundError, OSError):
            return PlainTextResponse("there is no such video\n", 404)
        size = os.fstat(film.fileno()).st_size
        headers = {"accept-ranges": "bytes", "content-encoding": "identity"}
        asked = _RANGE.fullmatch(request.headers.get("range", ""))
        first, last, status = 0, size - 1, 200
        if asked is not None and int(asked[1]) <= min(int(asked[2] or size), size - 1):
            first, last, status = int(asked[1]), min(int(asked[2] or size), size - 1), 206
            headers["content-range"] = f"bytes {first}-{last}/{size}"
        headers["content-length"] = str(last + 1 - first)
        return StreamingResponse(films.part(film, first, last + 1 - first), status, headers, kind)

    async def _note(self, request: Request) -> Response:
        try:
            entry = self._entry(request.path_params["run"])
            text = json.loads(await _body(request))["text"]
            if not isinstance(text, str):
                raise ValueError
            await run_in_threadpool(notes.write, entry.path, text)
        except _NotFoundError as error:
            return Json({"error": str(error)}, 404)
        except ConfigError as error:
            return Json({"error": str(error)}, 400)
        except (ValueError, KeyError, TypeError, RecursionError):
            return Json({"error": 'a note is {"text": "..."}'}, 400)
        return Json({"note": text})

    async def _events(self, request: Request) -> Response:
        if self._streams >= _MAX_STREAMS:
            return PlainTextResponse("too many pages watch: close some\n", 503)
        try:
            after = int(_number(request, "after", 0, 0, 1 << 53))
        except ConfigError as error:
            return Json({"error": str(error)}, 400)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(self._stream(after), media_type="text/event-stream", headers=headers)

    async def _stream(self, after: int) -> AsyncIterator[str]:
        """An event with the library's version whenever it has another one, until the browser goes."""
        self._streams += 1
        try:
            while not self._watch.is_over:
                self._watch.asked()
                version = self._library.version
                yield f"event: change\ndata: {version}\n\n" if version != after else ": still here\n\n"
                after = version
                for _ in range(int(_HEARTBEAT_S / _LOOK_S)):
                    if self._library.version != after or self._watch.is_over:
                        break
                    self._watch.asked()
                    await asyncio.sleep(_LOOK_S)
        finally:
            self._streams -= 1

    def _entries(self, request: Request) -> list[Entry]:
        """The runs that are asked for, those that are there."""
        ids = list(dict.fromkeys(filter(None, request.query_params.get("runs", "").split(","))))
        if len(ids) > MAX_RUNS:
            raise ConfigError(f"a chart has at most {MAX_RUNS} runs, not {len(ids):,}")
        return [entry for run_id in ids if (entry := self._library.get(run_id)) is not None]

    def _entry(self, run_id: str) -> Entry:
        entry = self._library.get(run_id)
        if entry is None:
            raise _NotFoundError("there is no such run any more")
        return entry


class _NotFoundError(Exception):
    """A run, or a sweep, that is not there."""


def _page(request: Request) -> Response:
    return Response((STATIC / "index.html").read_bytes(), media_type="text/html; charset=utf-8")


async def _body(request: Request) -> bytes:
    """What a request brings, without keeping more than a note can be."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise ConfigError(f"the note is too long: shorten it to {notes.MAX_BYTES:,} bytes")
    return body


def _number(request: Request, name: str, default: float, low: float, high: float) -> float:
    """A number of the address, within bounds."""
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else float(default)
    except ValueError:
        raise ConfigError(f"{name} should be a number") from None
    if not math.isfinite(value):
        raise ConfigError(f"{name} should be a number")
    return min(high, max(low, value))
