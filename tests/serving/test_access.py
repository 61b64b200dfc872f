"""Who may use a server: where it may listen, tokens, slow clients, sockets and logins."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.analysis.viewer_run import viewing, write_run
from tests.fakes.serving import serving
from tests.serving.hostile_requests import send_raw

import skyfleet as sf
from skyfleet.analysis.viewer.server import ViewerAccess
from skyfleet.cli.main import app
from skyfleet.config.loading import load_config
from skyfleet.envs.env import close_env, grade_env
from skyfleet.envs.mcp.server import mcp_app
from skyfleet.envs.openenv.server import openenv_app
from skyfleet.envs.registry import env_factory
from skyfleet.errors import ConfigError, EnvError
from skyfleet.serving import guard, listening
from skyfleet.serving.access import (
    AccessPolicy,
    build_access_policy,
    format_url,
    is_loopback,
    read_token,
)
from skyfleet.trainer.tasks import load_sources
from skyfleet.worlds.catalog import open_world

SOURCE = "world:github?split=train&count=1"
TOKEN = "a-token"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.invalid", "0", ""])
@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--dry-run"],
        ["serve"],
        ["worlds", "serve", SOURCE, "--dry-run"],
        ["worlds", "serve", SOURCE, "--protocol", "mcp"],
        ["worlds", "serve", SOURCE, "--protocol", "fleet"],
        ["view", "runs/none"],
    ],
)
def test_no_server_listens_beyond_this_machine_without_a_token(
    host: str, command: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = "SKYFLEET_API_KEY", "FLEET_API_KEY"
    if "fleet" in command:
        own, other = other, own
    monkeypatch.delenv(own, raising=False)
    monkeypatch.setenv(other, "the-key-of-another-server")
    with pytest.raises(ConfigError, match=rf"no token; set the environment variable {own} "):
        app([*command, "--host", host], standalone_mode=False)


def test_the_python_api_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYFLEET_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"sf\.serve: host='0\.0\.0\.0' lets other machines use"):
        sf.serve("tiny", host="0.0.0.0", port=0)
    run = sf.load_run(write_run(tmp_path, plain=1))
    with pytest.raises(ConfigError, match=r"run\.view\(host='0\.0\.0\.0'\) .* pass token="):
        run.view(host="0.0.0.0", open_browser=False)


def test_loopback_addresses_are_recognised_in_every_spelling() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "127.1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "", "10.0.0.1", "name.invalid", "0"]))


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "schlüssel"])
def test_a_token_that_no_header_can_carry_is_refused(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYFLEET_API_KEY", token)
    with pytest.raises(ConfigError, match="which no HTTP header can carry") as refused:
        read_token()
    assert token not in str(refused.value)


def test_a_server_on_all_interfaces_answers_to_addresses_and_allowed_names_only() -> None:
    policy = build_access_policy("0.0.0.0", token=None, allowed_hosts=["Train.Example"])
    hosts = ("10.1.2.3:8000", "[fe80::1]", "train.example", "localhost", socket.gethostname())
    for host in hosts:
        assert policy.check("GET", "/", [(b"host", host.encode())]) is None
    refusal = policy.check("GET", "/", [(b"host", b"evil.example")])
    assert refusal is not None
    assert refusal.status == 403


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("Train.Example:8443", "train.example"),
        ("train.example", "train.example:8443"),
        ("192.0.2.7:80", "192.0.2.7"),
        ("[2001:db8::1]:80", "[2001:db8::1]:8000"),
        ("2001:db8::1", "[2001:db8::1]"),
    ],
)
def test_an_allowed_host_is_allowed_with_every_port(given: str, host: str) -> None:
    policy = build_access_policy("127.0.0.1", token=None, allowed_hosts=[given])
    assert policy.check("GET", "/", [(b"host", host.encode())]) is None


@pytest.mark.parametrize("given", ["https://train.example", "a b", "train.example/x", "", "a:b"])
@pytest.mark.parametrize("command", [["serve"], ["worlds", "serve", SOURCE]])
def test_an_allowed_host_that_no_header_can_match_is_refused(
    given: str, command: Sequence[str]
) -> None:
    with pytest.raises(ConfigError, match=r"--allow-host .* is not the name of a host; give one"):
        app([*command, "--allow-host", given, "--dry-run"], standalone_mode=False)


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.1"])
def test_every_server_listens_on_ipv4_and_ipv6(host: str, tmp_path: Path) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("needs IPv6")
    with sf.serve("tiny", host=host, port=0) as served:
        assert host.strip("[]") in served.url
        assert httpx.get(served.url.replace("/v1", "/health")).status_code == 200
    with viewing(write_run(tmp_path, plain=4), access=ViewerAccess(host)) as viewer:
        assert httpx.get(viewer.url).status_code == 200
    assert format_url(host, 80) == f"http://{'[::1]' if ':' in host else host}:80"


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_pages_of_the_same_origin_and_links_to_a_page_are_served() -> None:
    policy, host = AccessPolicy(), (b"host", b"127.0.0.1:80")
    for origin in (b"http://127.0.0.1", b"http://127.0.0.1:80", b"https://127.0.0.1:80"):
        assert policy.check("POST", "/", [host, (b"origin", origin)]) is None
    link = [(b"sec-fetch-site", b"cross-site"), (b"sec-fetch-mode", b"navigate")]
    assert policy.check("GET", "/", [host, *link, (b"sec-fetch-dest", b"document")]) is None
    refused = policy.check("POST", "/", [host, *link, (b"sec-fetch-dest", b"document")])
    assert refused is not None


async def _echo(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body; on a socket it repeats each message."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})
    elif scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})


async def test_slow_clients_are_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEADER_SECONDS", 0.05)
    monkeypatch.setattr(guard, "IDLE_SECONDS", 0.05)
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    async with serving(_echo) as url:
        port = int(url.rpartition(":")[2])
        for request in (b"", head, head + b"\r\n", head + b"\r\n12345"):
            assert (await send_raw(port, request))[0] == 408
        assert (await send_raw(port, head + b"\r\n123456789"))[0] == 200


async def test_a_viewer_disconnects_slow_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyfleet.serving.threaded.REQUEST_SECONDS", 0.05)
    with viewing(write_run(tmp_path, plain=4)) as server:
        for request in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            assert (await send_raw(server.server_port, request))[0] == 0
        good = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert (await send_raw(server.server_port, good))[0] == 200


async def test_a_socket_message_over_the_limit_closes_the_socket() -> None:
    from websockets.asyncio.client import connect
    from websockets.exceptions import ConnectionClosed

    async with serving(_echo, AccessPolicy(max_body_bytes=1000)) as url:
        async with connect(url.replace("http", "ws")) as small:
            await small.send("x" * 1000)
            assert len(await small.recv()) == 1000
        async with connect(url.replace("http", "ws")) as large:
            await large.send("x" * 1001)
            with pytest.raises(ConnectionClosed) as closed:
                await large.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


@pytest.mark.parametrize("protocol", ["openenv", "mcp"])
async def test_our_clients_send_the_token_of_worlds_serve(
    protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYFLEET_API_KEY", TOKEN)
    task = load_sources([SOURCE], key="SOURCE")[0]
    is_mcp = protocol == "mcp"
    served = (
        mcp_app([task], open_world) if is_mcp else openenv_app([task], open_world, max_sessions=2)
    )
    async with serving(served, AccessPolicy(token=TOKEN)) as url:
        section = f"environment.{protocol}"
        settings = [
            f"environment.env_class={protocol}",
            f"environment.mcp.url={url}/{{task_key}}/mcp",
            f"environment.mcp.grade_url={url}/{{task_key}}/grade",
            f"environment.openenv.base_url={url}",
        ]
        header = f"{section}.headers.Authorization=Bearer ${{oc.env:SKYFLEET_API_KEY}}"
        env = await env_factory(load_config("", [*settings, header]))(task)
        assert len((await env.reset()).tools) > 1
        grade = await grade_env(env, []) if is_mcp else None
        assert grade is None or grade.reward == 0
        await close_env(env)
        stranger = await env_factory(load_config("", settings))(task)
        with pytest.raises(EnvError, match=r"401|Unauthorized"):
            await stranger.reset()
        await close_env(stranger)


def test_a_browser_logs_in_to_a_viewer_once(tmp_path: Path) -> None:
    run = write_run(tmp_path, plain=4)
    with (
        viewing(run, access=ViewerAccess(token=TOKEN)) as server,
        httpx.Client(base_url=server.url) as browser,
    ):
        for path in (
            "/",
            "/viewer.js",
            "/api/run",
            "/?token=wrong",
            "/?token=",
            "/api/run?token=x",
        ):
            assert browser.get(path).status_code == 401
        login = browser.get("/", params={"token": TOKEN})
        assert (login.status_code, login.headers["Location"]) == (303, "/")
        assert "HttpOnly; SameSite=Strict" in login.headers["Set-Cookie"]
        assert TOKEN not in login.headers["Set-Cookie"]
        assert browser.get("/api/run").status_code == 200
        assert browser.get("/api/run", headers={"Host": "evil.example"}).status_code == 403
        assert browser.get("/api/run", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(f"{server.url}api/run", headers=bearer).status_code == 200


def test_a_server_keeps_an_idle_connection_longer_than_any_client() -> None:
    # httpx drops one after 5 s, aiohttp after 15 s; the side that closes first must be the client.
    assert listening.build_uvicorn_config(_echo, AccessPolicy()).timeout_keep_alive > 15
