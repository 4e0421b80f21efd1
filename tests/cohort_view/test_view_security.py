"""Who may read the page: raw requests to a real server."""

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort_view.server.security import Guard
from cohort_view.server.serve import ViewServer, build_app
from completions_files import a_row, write_rows
from view_server import Client, make_run, serving

SECRET = "text of a file beside the run folder"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ViewServer]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "secret.txt").write_text(SECRET)
    with serving(make_run(folder / "run")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ViewServer) -> Client:
    return Client(server)


PATHS = [
    "/",
    "/static/js/app.js",
    "/api/runs",
    "/api/runs/run/now",
    "/api/runs/run/search?text=a",
    "/api/curves.csv",
    "/events",
]


@pytest.mark.parametrize("path", PATHS)
def test_every_route_needs_the_cookie(client: Client, path: str) -> None:
    refused = client.get(path)
    assert refused.status == 403
    assert b"the address that `cohort view` printed" in refused.body
    other = "y" if client.cookie.endswith("x") else "x"
    wrong = client.get(path, f"Cookie: {client.cookie[:-1]}{other}")
    assert wrong.status == 403
    # a browser sends the cookies of all programs on localhost, broken ones too
    assert client.get("/", f'Cookie: a="; {client.cookie}; =b').status == 200


def test_the_token_is_exchanged_for_a_cookie(client: Client) -> None:
    answer = client.get(f"/?token={client.token}")
    assert answer.status == 303
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"cohort-view-{client.port}=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(cookie.split("; "))
    assert client.token not in cookie  # other programs on localhost get the cookie
    assert client.get(f"/?a=1&token={client.token}").headers["location"] == "/?a=1"
    # through an SSH tunnel the browser's port is another one
    assert (
        client.get(f"/?token={client.token}", host="localhost:9000")
        .headers["set-cookie"]
        .startswith("cohort-view-9000=")
    )


@pytest.mark.parametrize("query", ["token=", "token=wrong", "token=%00", "token=a&token={token}", "token=%F0%9F%98%80"])
def test_wrong_tokens_are_refused(client: Client, query: str) -> None:
    refused = client.get(f"/?{query.format(token=client.token)}")
    assert refused.status == 403
    assert "set-cookie" not in refused.headers


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8080", "LOCALHOST:65535"])
def test_any_port_of_localhost_is_answered(client: Client, host: str) -> None:
    port = host.rpartition(":")[2] if ":" in host.replace("::1", "") else "80"
    value = client.cookie.partition("=")[2]
    assert client.get("/", f"Cookie: cohort-view-{port}={value}", host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil:1", "127.0.0.2", "0", "[::1", "@"],
)
def test_other_host_names_are_refused(client: Client, host: str) -> None:
    assert client.get_in("/", host=host).status == 421
    assert client.get(f"/?token={client.token}", host=host).status == 421  # DNS rebinding needs no cookie


def test_a_repeated_or_missing_host_is_refused(client: Client) -> None:
    request = f"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\nCookie: {client.cookie}\r\n\r\n"
    assert client.send(request.encode()).status in (400, 421)
    assert client.send(f"GET / HTTP/1.0\r\nCookie: {client.cookie}\r\n\r\n".encode()).status == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_only_reading_methods_are_answered(client: Client, method: str) -> None:
    assert client.get_in("/", method=method).status == 405
    assert client.get_in("/api/runs", method=method).status == 405


def test_requests_of_other_sites_are_refused(client: Client) -> None:
    assert client.get_in("/api/runs", "Sec-Fetch-Site: cross-site").status == 403
    assert client.get_in("/api/runs", "Sec-Fetch-Site: same-site").status == 403  # another port of localhost
    assert client.get_in("/events", "Sec-Fetch-Site: cross-site").status == 403


def test_a_link_on_another_site_leads_to_the_page(client: Client) -> None:
    # The browser sends no SameSite=Strict cookie then, until the page has it ask again.
    answer = client.get("/", "Sec-Fetch-Site: cross-site")
    assert answer.status == 200
    assert answer.body.endswith(b'<meta http-equiv="refresh" content="0;url=/">')
    assert client.get("/", "Sec-Fetch-Site: same-origin").status == 403


@pytest.mark.parametrize("path", ["/", "/api/runs/none/now", "/static/none.js"])
def test_every_answer_has_the_headers(client: Client, path: str) -> None:
    for answer in (client.get_in(path, "Origin: https://evil.example"), client.get(path)):
        headers = answer.headers
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        policy = headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "style-src 'self'", "frame-ancestors 'none'"} <= set(policy)
        assert not any("unsafe" in part or "http" in part for part in policy)
        assert not any(name.startswith("access-control-") for name in headers)
        assert "server" not in headers


def test_the_page_allows_its_import_map_and_no_other_inline_script(client: Client) -> None:
    answer = client.get_in("/")
    [import_map] = re.findall(rb'<script type="importmap">(.*?)</script>', answer.body, re.S)
    digest = base64.b64encode(hashlib.sha256(import_map).digest()).decode()
    assert f"; script-src 'self' 'sha256-{digest}'; " in answer.headers["content-security-policy"]
    assert answer.body.count(b"<script") == answer.body.count(b"<script src=") + 2
    assert "; script-src 'self'; " in client.get_in("/api/runs").headers["content-security-policy"]


TRAVERSALS = [
    "/../secret.txt",
    "/static/../../../../secret.txt",
    "/static/%2e%2e/%2e%2e/app.py",
    "/static/..%2f..%2fserver%2fapp.py",
    "/static/..\\..\\server\\app.py",
    "/static/..%5c..%5cserver%5capp.py",
    "/static//etc/passwd",
    "/static/%2fetc%2fpasswd",
    "/static/index.html%00.js",
    "/static/%00",
    "/static/%252e%252e/app.py",
    "/static/./index.html/..",
    "/api/runs/..%2f..%2fsecret.txt/now",
    "/api/runs/%2e%2e/config",
    "/api/runs/run/steps/..%2f..%2fsecret",
    "/api/runs/run/steps/1%00",
    "/api/runs/run/steps/-1",
    "/api/runs/run/steps/1/completions/..%2f1",
    "//etc/passwd",
    "http://evil.example/etc/passwd",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("path", TRAVERSALS)
def test_paths_lead_nowhere_else(client: Client, path: str) -> None:
    answer = client.get_in(path)
    assert answer.status in (400, 404)
    assert SECRET.encode() not in answer.body
    assert b"root:" not in answer.body
    assert b"import" not in answer.body


def test_the_token_is_in_no_log(
    client: Client, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    client.get(f"/?token={client.token}")
    client.get_in("/api/runs/none/now")
    out, err = capfd.readouterr()
    assert out + err + caplog.text == ""


def test_tokens_are_long_and_new_each_time(server: ViewServer) -> None:
    tokens = {Guard(build_app(server.watcher)).token for _ in range(3)}
    assert len(tokens) == 3
    assert all(re.fullmatch(r"[\w-]{32,}", token, re.ASCII) for token in tokens)


def test_errors_are_json_sentences(client: Client) -> None:
    answer = client.get_in("/api/runs/none/now")
    assert answer.status == 404
    assert answer.json == {"error": "There is no run 'none' on this page. Its runs: run."}


def test_links_out_of_a_run_folder_are_not_followed(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside")
    (outside / "config.yaml").write_text(f"data: {{path: {SECRET}}}\n")
    (outside / "metrics.jsonl").write_text('{"step": 987654321, "reward": 1.0}\n')
    (outside / "plan.json").write_text(f'{{"secret": "{SECRET}"}}')
    write_rows(outside, [a_row(0, 1.0, prompt=SECRET, completion=SECRET)], step=1)
    (outside / "logs").mkdir()
    (outside / "logs" / "a.log").write_text(SECRET)
    (tmp_path / "one").mkdir()
    for name in ("config.yaml", "metrics.jsonl", "plan.json", "completions", "logs"):
        (tmp_path / "one" / name).symlink_to(outside / name)
    two = make_run(tmp_path / "two")
    (two / "completions" / "step-000001.parquet").symlink_to("../../outside/completions/step-000001.parquet")
    (two / "completions" / "eval-000001.parquet").symlink_to("../../outside/completions/step-000001.parquet")
    (two / "completions" / "step-000002.parquet").symlink_to("step-000003.parquet")
    with serving(tmp_path / "one", two) as server:
        client = Client(server)
        paths = ["now", "config", "log", "log?name=a.log", "metrics", "questions", "questions/0", "questions?kind=eval"]
        paths += ["tools", "steps", "steps/1", "steps/1/groups/0"]
        for path in [f"/api/runs/{run}/{path}" for run in ("one", "two") for path in (*paths, "steps/1/completions/0")]:
            answer = client.get_in(path)
            assert answer.status in (200, 404)
            assert SECRET.encode() not in answer.body
            assert b"987654321" not in answer.body
        with client.stream("/api/runs/two/search?text=text") as events:
            assert not [name for name, _ in events if name == "match"]
        problems = client.get_in("/api/runs/two/steps/1").json["problems"]
        assert problems == [
            "completions/step-000001.parquet cannot be read: a link that leads outside of the run folder."
        ]
