"""The application of `holdfast web`: which path is answered by what.

Every answer about a job is made once for each change of that job and kept, so that ten open pages cost
as much as one. It has an ETag: a browser that has it already is told so in a few bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from holdfast.config.values import Price
from holdfast.errors import HoldfastError, JobError
from holdfast.messages.wire import AskWhy, Why
from holdfast.view.history.timeline import Fold
from holdfast.view.metrics.text import OPENMETRICS, PLAIN, accepted, metrics_text
from holdfast.view.web import answers, evidence
from holdfast.view.web.actions import ACTIONS, act
from holdfast.view.web.elsewhere import SeenElsewhere
from holdfast.view.web.events import stream
from holdfast.view.web.guard import Secrets, WebGuard, refused
from holdfast.view.web.listing import JobList
from holdfast.view.web.parameters import BadParameter, integer, number, one_of, text
from holdfast.view.web.watched import WatchedJob, WatchedJobs
from holdfast.wire.visitors import ask_at

STATIC: Final = Path(__file__).parent / "static"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".json": "application/json",
}
FOLDS: Final[tuple[Fold, ...]] = ("rank", "node")
KEPT_ANSWERS: Final = 64
LOG_LINES: Final = 200
STACKS_EVIDENCE: Final = 64

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class WebApp:
    """What answers requests."""

    def __init__(
        self, jobs: WatchedJobs, may_act: bool, only: str | None, price: Price | None
    ) -> None:
        self.jobs = jobs
        self.may_act = may_act
        self._price = price
        self._only = only
        """The one job that is shown, if there is only one."""
        self._list = JobList()
        self._elsewhere = SeenElsewhere()
        self._kept: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._salt = secrets.token_hex(4)
        """Of the ETags: a browser may know those of an earlier server."""

    def routes(self) -> list[Route]:
        job = "/api/jobs/{job}"
        return [
            Route("/", self._page("index.html" if self._only is None else "job.html")),
            Route("/job/{job}", self._page("job.html")),
            Route("/static/{path:path}", self._static),
            Route("/metrics", _caught(self._metrics)),
            Route("/api/session", _caught(self._session)),
            Route("/api/jobs", _caught(self._jobs)),
            Route(f"{job}/now", _caught(self._now)),
            Route(f"{job}/timeline", _caught(self._timeline)),
            Route(f"{job}/goodput", _caught(self._goodput)),
            Route(f"{job}/incidents", _caught(self._incidents)),
            Route(f"{job}/incidents/{{number:int}}", _caught(self._incident)),
            Route(f"{job}/checkpoints", _caught(self._checkpoints)),
            Route(f"{job}/nodes", _caught(self._nodes)),
            Route(f"{job}/speed", _caught(self._speed)),
            Route(f"{job}/loss", _caught(self._loss)),
            Route(f"{job}/why", _caught(self._why)),
            Route(f"{job}/logs", _caught(self._logs)),
            Route(f"{job}/stream", _caught(self._stream)),
            Route(f"{job}/actions/{{action}}", _caught(self._act), methods=["POST"]),
        ]

    def close(self) -> None:
        self._elsewhere.close()
        self.jobs.close()

    # ---- files ----

    def _page(self, name: str) -> Handler:
        async def answer(request: Request) -> Response:
            return _file(STATIC / name)

        return answer

    async def _static(self, request: Request) -> Response:
        path = (STATIC / request.path_params["path"]).resolve()
        if not path.is_relative_to(STATIC.resolve()):
            return refused(404, "there is no such file")
        return _file(path)

    # ---- jobs ----

    async def _session(self, request: Request) -> Response:
        """What this visitor may do, which job the page is of, and what a rank costs in an hour."""
        acts = self.may_act and request.scope["role"] == "all"
        return _json(
            {
                "job": self._only,
                "may_act": acts,
                "actions": sorted(ACTIONS) if acts else [],
                "price": None if self._price is None else self._price._asdict(),
            }
        )

    async def _jobs(self, request: Request) -> Response:
        remote = self.jobs.remote
        if remote is None:
            return _json(await asyncio.to_thread(self._list.read))
        job = await self.jobs.get(remote.name)
        known = job.follower
        return _json([answers.summary(known.job, known.now, known.alive)])

    async def _metrics(self, request: Request) -> Response:
        """The metrics of the job that is shown, or of all that run; see `holdfast metrics`."""
        remote = self.jobs.remote
        names = [self._only or (remote.name if remote is not None else "")]
        if not names[0]:
            listed = await asyncio.to_thread(self._list.read)
            over = ("ended", "lost", "unreadable")
            names = [one["job"] for one in listed if one["state"] not in over]
        jobs = [await self.jobs.get(name) for name in names]
        openmetrics = accepted(request.headers.get("accept", ""))
        read = [job.follower for job in jobs if not job.follower.behind]
        content = metrics_text(*read, openmetrics=openmetrics)
        return Response(content, media_type=OPENMETRICS if openmetrics else PLAIN)

    async def _now(self, request: Request) -> Response:
        return await self._answer(request, WatchedJob.told_now)

    async def _timeline(self, request: Request) -> Response:
        given = request.query_params
        since, until = number(given, "from"), number(given, "to")
        width = integer(given, "width", 1000, 1, 4000)
        first = integer(given, "first", 0, 0, 1 << 30)
        count = integer(given, "count", 1 << 30, 1, 1 << 30)
        fold = one_of(given, "fold", FOLDS)
        return await self._answer(
            request,
            lambda job: answers.timeline(job.follower, since, until, width, first, count, fold),
        )

    async def _goodput(self, request: Request) -> Response:
        buckets = integer(request.query_params, "buckets", 200, 1, 2000)
        return await self._answer(request, lambda job: answers.goodput(job.follower, buckets))

    async def _incidents(self, request: Request) -> Response:
        given = request.query_params
        before = integer(given, "before", 1 << 30, 1, 1 << 30)
        limit = integer(given, "limit", 50, 1, 1000)
        return await self._answer(
            request, lambda job: answers.incidents(job.follower, before, limit), whole=True
        )

    async def _incident(self, request: Request) -> Response:
        job = await self._job(request)
        wanted = request.path_params["number"]
        found = answers.incident(job.follower, wanted)
        if found is None:
            return refused(404, f"job {job.name} has no incident {wanted}")
        told, home = found["incident"], job.home
        found["seen_elsewhere"] = []
        found["stacks"], found["log"], found["verdict"] = {}, {}, None
        if home is not None:
            seen = self._elsewhere.before(job.name, job.follower.job.incidents[wanted - 1])
            found["seen_elsewhere"] = None if seen is None else [one._asdict() for one in seen]
            found["stacks"] = await asyncio.to_thread(evidence.stacks, home, wanted)
            found["verdict"] = await asyncio.to_thread(evidence.verdict, home, wanted)
            if told["rank"] is not None:
                rank = told["rank"]
                lines = await asyncio.to_thread(
                    evidence.log_tail, home, told["round"], rank, LOG_LINES
                )
                found["log"] = {str(rank): lines}
        return _json(job.marked(found))

    async def _checkpoints(self, request: Request) -> Response:
        return await self._answer(request, lambda job: answers.checkpoints(job.follower))

    async def _nodes(self, request: Request) -> Response:
        return await self._answer(request, lambda job: answers.nodes(job.follower))

    async def _speed(self, request: Request) -> Response:
        return await self._answer(request, lambda job: answers.speed(job.follower))

    async def _loss(self, request: Request) -> Response:
        return await self._answer(request, lambda job: answers.loss(job.follower))

    async def _why(self, request: Request) -> Response:
        """Examine the ranks now, as `holdfast why` does."""
        given = request.query_params
        rank = integer(given, "rank", -1, 0, 1 << 30)
        job = await self._job(request)
        try:
            why = await asyncio.to_thread(lambda: ask_at(job.coordinates(), AskWhy(), Why))
        except JobError as error:
            return refused(503, str(error))
        chosen = [one for one in why.evidence if rank in (-1, one.rank)][:STACKS_EVIDENCE]
        return _json(
            {
                "suspicion": why.suspicion,
                "detects": why.detects,
                "verdict": why.verdict,
                "ranks": {str(one.rank): evidence.written(one) for one in chosen},
            }
        )

    async def _logs(self, request: Request) -> Response:
        """The end of a rank's log, or what was added to it."""
        given = request.query_params
        job = await self._job(request)
        rank = integer(given, "rank", 0, 0, 1 << 30)
        newest = job.follower.job.membership.round
        round = integer(given, "round", newest, 0, 1 << 30)
        after = integer(given, "after", -1, 0, 1 << 60)
        if job.home is None:
            return refused(
                404, "logs are on the machines of the job; this page follows it from afar"
            )
        said, offset = await asyncio.to_thread(
            evidence.log_after, job.home, round, rank, None if after < 0 else after
        )
        return _json({"rank": rank, "round": round, "text": said, "offset": offset})

    async def _stream(self, request: Request) -> Response:
        return stream(await self._job(request), request)

    async def _act(self, request: Request) -> Response:
        if not self.may_act:
            return refused(403, "this server only shows; start it with --allow-actions to act")
        name = text(request.path_params, "action")
        if name not in ACTIONS:
            return refused(
                404, f"there is no action {name}; there are: {', '.join(sorted(ACTIONS))}"
            )
        job = await self._job(request)
        client = request.client.host if request.client is not None else ""
        return _json({"line": await act(job, name, await request.body(), client)})

    # ---- answering ----

    async def _job(self, request: Request) -> WatchedJob:
        return await self.jobs.get(request.path_params["job"])

    async def _answer(
        self,
        request: Request,
        make: Callable[[WatchedJob], dict[str, Any]],
        whole: bool = False,
    ) -> Response:
        """Answer with what was made since the job last changed, or make it. One that is whole lacks
        nothing even if the past was not read."""
        job = await self._job(request)
        key = str(request.url.path) + "?" + str(request.url.query)
        version = f"{id(job)}-{job.version}"
        known = self._kept.get(key)
        if known is None or known[0] != version:
            made = make(job)
            known = (version, encoded(made if whole else job.marked(made)))
            self._kept[key] = known
            while len(self._kept) > KEPT_ANSWERS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        digest = hashlib.blake2b(known[1], digest_size=12, salt=self._salt.encode()).hexdigest()
        return _tagged(request, known[1], digest)


_encoder = msgspec.json.Encoder(enc_hook=lambda value: list(value))


def encoded(content: Any) -> bytes:
    return _encoder.encode(content)


def _json(content: Any) -> Response:
    return Response(
        encoded(content), media_type="application/json", headers={"cache-control": "no-store"}
    )


def _tagged(request: Request, body: bytes, digest: str) -> Response:
    headers = {"etag": f'W/"{digest}"', "cache-control": "private, no-cache"}
    shown = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    if headers["etag"] in shown:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _file(path: Path) -> Response:
    if not path.is_file() or path.suffix not in TYPES:
        return refused(404, "there is no such file")
    # The files change with the version of Holdfast alone; their ETags make asking again cheap.
    return FileResponse(
        path, media_type=TYPES[path.suffix], headers={"cache-control": "private, no-cache"}
    )


def _caught(handler: Handler) -> Handler:
    """Turn errors that are Holdfast's own into a sentence and a status."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except BadParameter as error:
            return refused(400, str(error))
        except JobError as error:
            return refused(404, str(error))
        except HoldfastError as error:  # A journal that cannot be read.
            return refused(503, str(error))

    return answer


def make_app(
    jobs: WatchedJobs,
    secrets: Secrets,
    port: int,
    names: Sequence[str] = (),
    may_act: bool = False,
    only: str | None = None,
    price: Price | None = None,
) -> Starlette:
    """Make the application, with its guard."""
    web = WebApp(jobs, may_act, only, price)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        closing = asyncio.create_task(jobs.close_unused())
        try:
            yield
        finally:
            closing.cancel()
            web.close()

    return Starlette(
        routes=web.routes(),
        lifespan=lifespan,
        middleware=[
            Middleware(WebGuard, secrets=secrets, names=names, port=port),
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
        ],
    )
