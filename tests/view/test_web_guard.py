"""Nobody comes in without a secret, under a wrong name, or from another website."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from journals import home_with, unfinished
from serving_web import page, run

from holdfast.view.web import events
from holdfast.view.web.keyfile import WebKey

ACT = {"x-holdfast": "1"}


@pytest.fixture(autouse=True)
def home() -> None:
    home_with(unfinished())


def test_without_a_secret_nothing_is_shown() -> None:
    async def test() -> None:
        async with page() as web, httpx.AsyncClient(base_url=web.base, trust_env=False) as stranger:
            for path in ("/", "/job/j", "/api/jobs", "/api/jobs/j/now", "/static/job.js"):
                answer = await stranger.get(path)
                assert answer.status_code == 401, path
                assert "j" not in answer.text.replace("job", ""), "not even the job's name"
            for wrong in ("", "x", web.secrets.tokens["view"]):
                assert (await stranger.get("/", params={"token": wrong})).status_code == 401
            bearer = {"authorization": "Bearer wrong"}
            assert (await stranger.get("/api/jobs", headers=bearer)).status_code == 401
            cookie = {"cookie": f"holdfast-{web.port}={web.secrets.tokens['all']}"}
            assert (await stranger.get("/api/jobs", headers=cookie)).status_code == 401

    run(test)


def test_a_browser_that_asks_for_an_icon_gets_no_error_and_no_secret() -> None:
    async def test() -> None:
        async with page() as web, httpx.AsyncClient(base_url=web.base, trust_env=False) as stranger:
            answer = await stranger.get("/favicon.ico")
            assert (answer.status_code, answer.content) == (204, b"")

    run(test)


def test_new_tokens_end_streams_that_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SILENT_S", 0.05)
    path = tmp_path / "web.key"

    async def test() -> None:
        async with page(key=WebKey(path)) as web:
            heard = await web.events("/api/jobs/j/stream", lambda name, _: name == "here")
            assert heard[-1] == ("here", {})

            def renew(name: str, _: object) -> bool:
                if name == "here":
                    WebKey(path, renew=True)
                return False

            await web.events("/api/jobs/j/stream", renew)
            assert (await web.client.get("/api/session")).status_code == 401

    run(test)


def test_a_link_sets_a_strict_cookie_and_goes_on_without_its_token() -> None:
    async def test() -> None:
        async with page() as web, httpx.AsyncClient(base_url=web.base, trust_env=False) as browser:
            link = {"token": web.secrets.tokens["all"], "incident": "3"}
            answer = await browser.get("/job/j", params=link)
            assert answer.status_code == 200
            assert web.secrets.tokens["all"] not in answer.text
            assert 'url=/job/j?incident=3"' in answer.text
            cookie = answer.headers["set-cookie"].lower()
            assert "httponly" in cookie
            assert "samesite=strict" in cookie
            assert web.secrets.tokens["all"].lower() not in cookie
            assert (await browser.get("/api/jobs/j/now")).status_code == 200

    run(test)


def test_a_link_leads_to_no_other_website() -> None:
    """Who has the link for looking could send others one that begins here and ends elsewhere."""

    async def test() -> None:
        async with page() as web:
            link = f"{web.base}//elsewhere.example/x?view={web.secrets.tokens['view']}"
            answer = await web.client.get(link)
            assert answer.status_code == 200
            assert 'url=/elsewhere.example/x"' in answer.text
            assert "//" not in answer.text

    run(test)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1:1", ""])
def test_another_name_is_refused_whatever_secret_is_shown(host: str) -> None:
    async def test() -> None:
        async with page() as web:
            named = {"host": host.format(port=web.port)}
            assert (await web.client.get("/api/jobs", headers=named)).status_code == 421

    run(test)


def test_the_names_of_this_server_are_taken() -> None:
    async def test() -> None:
        async with page(names=("train.example",)) as web:
            for host in (f"127.0.0.1:{web.port}", f"localhost:{web.port}", "train.example"):
                answer = await web.client.get("/api/session", headers={"host": host})
                assert answer.status_code == 200, host

    run(test)


def test_every_answer_forbids_scripts_and_frames_of_others() -> None:
    async def test() -> None:
        async with page() as web:
            for path in ("/api/jobs", "/api/jobs/nobody/now", "/static/none.js", "/nowhere"):
                headers = (await web.client.get(path)).headers
                policy = headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert headers["x-content-type-options"] == "nosniff"
                assert headers["x-frame-options"] == "DENY"
                assert "access-control-allow-origin" not in headers

    run(test)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-holdfast": "1"},
        {"x-holdfast": "1", "origin": "http://evil.example"},
        {"x-holdfast": "1", "origin": "null"},
        {"origin": "{base}"},
        {"x-holdfast": "1", "origin": "{base}", "sec-fetch-site": "cross-site"},
    ],
)
def test_what_another_website_sends_does_nothing(headers: dict[str, str]) -> None:
    async def test() -> None:
        async with page(may_act=True) as web:
            sent = {name: value.format(base=web.base) for name, value in headers.items()}
            answer = await web.client.post(
                "/api/jobs/j/actions/stop", headers=sent, json={"confirm": "j"}
            )
            assert answer.status_code == 403

    run(test)


def test_requests_across_sites_are_refused_even_to_look() -> None:
    async def test() -> None:
        async with page() as web:
            answer = await web.client.get("/api/jobs", headers={"sec-fetch-site": "cross-site"})
            assert answer.status_code == 403

    run(test)


def test_the_link_for_looking_cannot_act_nor_can_a_server_that_only_shows() -> None:
    async def test() -> None:
        guests = httpx.AsyncClient
        async with page(may_act=True) as web, guests(base_url=web.base, trust_env=False) as guest:
            await guest.get("/", params={"view": web.secrets.tokens["view"]})
            assert (await guest.get("/api/session")).json()["may_act"] is False
            sent = {**ACT, "origin": web.base}
            answer = await guest.post("/api/jobs/j/actions/stop", headers=sent, json={})
            assert answer.status_code == 403
            assert "only looks" in answer.json()["error"]
        async with page(may_act=False) as web:
            sent = {**ACT, "origin": web.base}
            answer = await web.client.post(
                "/api/jobs/j/actions/stop", headers=sent, json={"confirm": "j"}
            )
            assert answer.status_code == 403
            assert "--allow-actions" in answer.json()["error"]

    run(test)
