"""Who is answered, and what: a visitor of this machine who knows the token, up to a size, in one sentence."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest

from locant.explore.session import MAX_DROPPED, Session

pytest.importorskip("starlette", reason="the explorer needs the extra `explore`")

from starlette.testclient import TestClient

from locant.explore.server import application, run

TOKEN = "a-token"  # noqa: S105
HERE = "http://127.0.0.1:8000"


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def client(session: Session) -> TestClient:
    return TestClient(application(session, TOKEN), base_url=HERE, raise_server_exceptions=False)


def test_the_page_and_all_it_names_are_answered(client: TestClient) -> None:
    page = client.get(f"/{TOKEN}/")
    assert page.status_code == 200
    assert "page/start.js" in page.text
    assert client.get(f"/{TOKEN}/page/start.js").headers["content-type"].startswith("text/javascript")
    assert client.get(f"/{TOKEN}/page/style.css").headers["content-type"].startswith("text/css")
    assert client.get(f"/{TOKEN}", follow_redirects=False).headers["location"] == f"/{TOKEN}/"
    assert client.get(f"/{TOKEN}/alive").status_code == 204


def test_every_answer_forbids_what_the_page_does_not_need(client: TestClient) -> None:
    for path in (f"/{TOKEN}/", f"/{TOKEN}/page/start.js", f"/{TOKEN}/nothing", "/", "/favicon.ico"):
        headers = client.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/wrong/page/start.js", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/", f"//{TOKEN}/", "/%00/"]
)
def test_without_the_token_nothing_is_here(client: TestClient, path: str) -> None:
    assert client.get(HERE + path).status_code == 404
    assert client.post(HERE + path + "numbers/compare", content="{}").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:8000"}, 403),
        ({"host": "127.0.0.1.evil.example:8000"}, 403),
        ({"host": ""}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "https://127.0.0.1:8000"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"host": "localhost:8000", "origin": "http://localhost:8000"}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"origin": HERE, "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "none"}, 200),
    ],
)
def test_this_machine_is_answered_under_its_own_names_and_no_other_host_or_origin(
    client: TestClient, headers: dict[str, str], status: int
) -> None:
    assert client.get(f"/{TOKEN}/", headers=headers).status_code == status
    assert client.post(f"/{TOKEN}/numbers/compare", content="{}", headers=headers).status_code == status


@pytest.mark.parametrize(
    "path", ["page/../server.py", "page/%2e%2e/server.py", "page//etc/passwd", "page/index.html", "page/"]
)
def test_nothing_but_the_pages_own_files_is_read(client: TestClient, path: str) -> None:
    assert client.get(f"/{TOKEN}/{path}").status_code == 404


def test_numbers_are_answered_with_the_settings_that_were_taken(client: TestClient) -> None:
    answer = client.post(f"/{TOKEN}/numbers/compare", json={"length": "16"}).json()
    assert answer["screen"] == "compare"
    assert answer["state"]["length"] == "16"
    assert answer["state"]["1"] == "rotary"
    assert answer["controls"]["length"]["high"] == 2**17


@pytest.mark.parametrize(
    ("screen", "body", "words"),
    [
        ("compare", '{"length": "1"}', "for length"),
        ("compare", '{"length": "' + "9" * 5000 + '"}', "for length"),
        ("compare", '{"1": "rotray"}', "rotary"),
        ("compare", '{"1.base": "nan"}', "for base"),
        ("compare", '{"length": 16}', "JSON object of texts"),
        ("compare", "[" * 100_000, "JSON object of texts"),
        ("compare", "no json", "JSON object of texts"),
        ("compare", json.dumps({"length": "x" * 2**18}), "bytes for settings"),
        ("nowhere", "{}", "screen"),
    ],
)
def test_what_cannot_be_shown_costs_one_sentence(client: TestClient, screen: str, body: str, words: str) -> None:
    answer = client.post(f"/{TOKEN}/numbers/{screen}", content=body)
    assert answer.status_code == 422
    assert words in answer.json()["cause"]
    assert answer.json()["remedy"]
    assert "Traceback" not in answer.text


def test_a_dropped_file_is_kept_under_a_key_and_up_to_a_size(client: TestClient, session: Session) -> None:
    hostile = b"<script>alert(1)</script>\x00\xff"
    key = client.post(f"/{TOKEN}/files?name=../../x<b>", content=hostile).json()["key"]
    assert session.dropped[key].content == hostile
    too_large = client.post(f"/{TOKEN}/files?name=x", content=b"x" * (MAX_DROPPED + 1))
    assert too_large.status_code == 422
    assert "bytes for a dropped file" in too_large.json()["cause"]
    for number in range(40):
        client.post(f"/{TOKEN}/files", content=str(number))
    assert len(session.dropped) <= 16


def test_a_mistake_of_ours_is_said_as_one(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("locant.explore.server.answer", fail)
    answer = client.post(f"/{TOKEN}/numbers/compare", content="{}")
    assert answer.status_code == 500
    assert answer.json()["cause"] == "this is a mistake in locant: ZeroDivisionError: division by zero"


def test_every_part_of_an_answer_is_sent_at_once(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    listening: list[socket.socket] = []
    monkeypatch.setattr("uvicorn.Server.run", lambda _, sockets: listening.extend(each.dup() for each in sockets))
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # the other tests keep theirs
    run(session, 0, TOKEN, lambda address: None)

    async def accepted() -> int:
        sent_at_once: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            option = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            sent_at_once.set_result(option)
            writer.close()

        async with await asyncio.start_server(accept, sock=listening[0]) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            found = await sent_at_once
            writer.close()
        return found

    assert asyncio.run(accepted())


@contextmanager
def render_live_page(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an explorer that is served as the command does, in a thread, which has ended behind the block."""
    import uvicorn

    servers: list[uvicorn.Server] = []
    addresses: list[str] = []
    serve, ready = uvicorn.Server.run, threading.Event()

    def kept(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        servers.append(server)
        ready.set()
        serve(server, sockets)

    monkeypatch.setattr("uvicorn.Server.run", kept)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)  # the other tests keep theirs
    thread = threading.Thread(target=run, args=(session, 0, TOKEN, addresses.append))
    thread.start()
    assert ready.wait(60)
    yield urlsplit(addresses[0]).port or 0
    servers[0].should_exit = True
    thread.join()


WHOLE = b"Content-Length: 1000\r\n\r\n" + b"x" * 1000
PAGE = f"GET /{TOKEN}/page/style.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("files?name=x", WHOLE[:-1]),
        ("files?name=x", WHOLE),  # it leaves during the answer
        ("numbers/compare", WHOLE[:-999]),
        ("numbers/compare", b"Content-Length: 2\r\n\r\n{}"),
        ("files?name=x", b"Transfer-Encoding: chunked\r\n\r\n10\r\nfive"),
        ("files?name=x", b"Transfer-Encoding: chunked\r\n\r\nxyz\r\nfive"),
        ("files?name=x", b"Content-Length: 1\r\n\r\nabc"),  # more than that
        ("files?name=x", b"Content-Length: many\r\n\r\nabc"),
        ("files?name=x", b"Content-Le"),
    ],
)
def test_a_client_that_leaves_or_sends_half_costs_one_line_and_no_trace(
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    path: str,
    sent: bytes,
    resets: bool,
) -> None:
    head = f"POST /{TOKEN}/{path} HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
    with render_live_page(session, monkeypatch) as port:
        with socket.create_connection(("127.0.0.1", port)) as gone:
            gone.sendall(head + sent)
            if resets:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(PAGE)
            assert other.recv(12) == b"HTTP/1.1 200"
    said = capfd.readouterr().err
    assert "Traceback" not in said
    assert len(said.splitlines()) <= 1
