"""Delivers a notice to one target: posts it to a webhook, or runs a command with it.

A target may be slow, refuse, or never answer. `deliver` takes a limited time and says what became of
the notice: taken, worth another try, or refused for good. Neither the text of a URL nor the words of a
command may get into a message: both hold secrets. A target is named by the host, or by the program.
"""

from __future__ import annotations

import base64
import http.client
import os
import shlex
import signal
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from holdfast.config.values import is_url
from holdfast.messages.units import Seconds
from holdfast.view.notices.notice import Notice

ANSWER_S: Seconds = 5.0
"""How long a webhook may be silent."""
RUN_S: Seconds = 30.0
"""How long a command may run."""
LONGEST_PAUSE_S: Seconds = 300.0
TRY_AGAIN = frozenset({408, 425, 429})
"""Refusals that do not last; all others below 500 do."""


@dataclass(frozen=True)
class Outcome:
    """What became of a notice."""

    taken: bool
    why: str = ""
    """Why it was not taken."""
    final: bool = False
    """Whether another try would be in vain."""
    pause_s: Seconds = 0.0
    """How long the target wants to be left alone."""


class Target:
    """A webhook or a command."""

    name: str
    """The name for messages, which holds no secret."""

    def deliver(self, notice: Notice) -> Outcome:
        raise NotImplementedError

    def abort(self) -> None:
        """End what a delivery in another thread has started and would outlive this process."""


def target_of(text: str) -> Target:
    return Webhook(text) if is_url(text) else Command(text)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A post that is redirected would become a get of some other page, which succeeds."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Webhook(Target):
    """A URL that takes JSON with a `text`, as Slack's incoming webhooks do."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self.name = parts.hostname or "webhook"
        self._headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
        if parts.username is not None:
            pair = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
            self._headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        host = parts.netloc.rpartition("@")[2]
        self._url = urllib.parse.urlunsplit(parts._replace(netloc=host, fragment=""))
        self._opener = urllib.request.build_opener(_NoRedirects)

    def deliver(self, notice: Notice) -> Outcome:
        body = msgspec.json.encode(notice)
        try:
            request = urllib.request.Request(self._url, body, self._headers, method="POST")
            with self._opener.open(request, timeout=ANSWER_S):
                return Outcome(taken=True)
        except urllib.error.HTTPError as error:
            with error:
                final = error.code < 500 and error.code not in TRY_AGAIN
                pause_s = _retry_after(error.headers.get("Retry-After"))
                return Outcome(False, f"HTTP status {error.code}", final, pause_s)
        except urllib.error.URLError as error:  # Its text holds no URL, the reason's neither.
            return Outcome(False, _named(error.reason))
        except (OSError, http.client.HTTPException) as error:
            return Outcome(False, _named(error))
        except ValueError:  # The URL, which its text would show.
            return Outcome(False, "not a URL that can be posted to", final=True)


def _named(reason: object) -> str:
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return type(reason).__name__ if isinstance(reason, BaseException) else str(reason)


def _retry_after(value: str | None) -> Seconds:
    try:
        return min(LONGEST_PAUSE_S, max(0.0, float(value or 0)))
    except ValueError:
        return 0.0


class Command(Target):
    """A program that gets the notice on its standard input, and the gist in its environment."""

    def __init__(self, text: str) -> None:
        self._words = shlex.split(text)
        self.name = os.path.basename(self._words[0])
        self._running: subprocess.Popen[bytes] | None = None

    def deliver(self, notice: Notice) -> Outcome:
        told = {"KIND": notice.kind, "JOB": notice.job, "TEXT": notice.text}
        environment = {f"HOLDFAST_NOTICE_{name}": value for name, value in told.items()}
        try:
            process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        except OSError as error:
            return Outcome(False, error.strerror or "cannot be started", final=True)
        self._running = process
        try:
            process.communicate(msgspec.json.encode(notice), timeout=RUN_S)
        except subprocess.TimeoutExpired:
            self.abort()
            process.wait()
            return Outcome(False, f"killed after {RUN_S:.0f} s")
        finally:
            self._running = None
        if process.returncode != 0:
            return Outcome(False, f"exit code {process.returncode}")
        return Outcome(taken=True)

    def abort(self) -> None:
        if (process := self._running) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
