"""The page's server: answers, live events, run folders, and how it starts and stops."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cohort.errors import UserError
from cohort.processes.page import PageStartError, start_page
from cohort_view.search.search import Progress
from cohort_view.server import process
from cohort_view.server.process import describe_address, open_browser
from cohort_view.server.runs import Runs, check_is_run, find_run_folders
from cohort_view.server.serve import EventStream, ViewServer
from completions_files import a_row, write_rows
from view_server import Client, make_run, serving
from waiting import PATIENCE_S


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ViewServer]:
    with serving(folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ViewServer) -> Client:
    return Client(server)


def test_answers_have_no_bare_nan(client: Client) -> None:
    [curve] = client.get_in("/api/curves?runs=run&names=reward").json["curves"]
    assert (curve["x"], curve["y"]) == ([1, 2], [0.5, None])


def test_the_first_view_reads_no_completions_and_imports_none_of_their_readers(folder: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom view_server import Client, serving\n"
        "with serving(Path(sys.argv[1])) as server:\n"
        "    client = Client(server)\n"
        "    paths = ['/', '/api/runs', '/api/runs/run/now', '/api/runs/run/metrics', '/api/curves?names=reward']\n"
        "    assert [client.get_in(path).status for path in paths] == [200] * 5\n"
        "    assert 'pyarrow' not in sys.modules, 'imported'\n"
        "    assert client.get_in('/api/runs/run/questions').status == 200\n"
        "    assert 'pyarrow' in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=environment)


def test_a_metric_with_a_comma(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    row = {"kind": "train", "step": 1, "rewards/a,b/mean": 0.5, "reward": 1.0, "timestamp": 10.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with serving(folder) as server:
        curves = Client(server).get_in("/api/curves?runs=run&names=rewards/a%252Cb/mean,reward").json["curves"]
    assert {curve["name"]: curve["y"] for curve in curves} == {
        "rewards/a,b/mean": [0.5],
        "reward": [1.0],
    }


def test_curves_as_csv(client: Client) -> None:
    answer = client.get_in("/api/curves.csv?runs=run&names=reward,eval/accuracy")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert answer.body.decode().splitlines() == [
        "run,step,timestamp,reward,eval/accuracy",
        "run,1,10.0,0.5,",
        "run,0,9.0,,0.25",
    ]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/api/curves?points=1", "points: '1' is not a whole number from 4 to 20000"),
        ("/api/curves?x=minutes", "x: 'minutes' is not one of step, time"),
        ("/api/curves?from=inf", "from: 'inf' is not a number"),
        ("/api/runs/run/search?text=a&limit=5001", "limit: '5001' is not a whole number from 1 to 5000"),
        ("/api/runs/run/questions?kind=replaced", "kind: 'replaced' is not one of step, eval"),
        ("/api/runs/run/search?step=x", "step: 'x' is not a whole number from 0 to 1000000000000"),
        (
            "/api/runs/run/steps/1?sort=worst",
            "sort: 'worst' is not one of order, spread, length, equal, staleness, reward",
        ),
    ],
)
def test_bad_values_are_named(client: Client, path: str, error: str) -> None:
    answer = client.get_in(path)
    assert (answer.status, answer.json) == (400, {"error": error})


@pytest.mark.parametrize(
    "path", ["/api/runs/x/now", "/api/curves?runs=run,x&names=reward", "/api/runs/x/search?text=a"]
)
def test_unknown_runs_are_not_found(client: Client, path: str) -> None:
    answer = client.get_in(path)
    assert (answer.status, answer.json) == (404, {"error": "There is no run 'x' on this page. Its runs: run."})


@pytest.mark.parametrize(
    "odd", ["1e999", "-1e308", f"1{'0' * 400}", '{"a": []}', '["x"]', '"</script>"', '"\\ud83d"', "true"]
)
def test_odd_values_are_no_error(tmp_path: Path, odd: str) -> None:
    run = make_run(tmp_path / "run")
    names = ["reward", "frac_reward_zero_std", "grad_norm", "timestamp", "step_time", "memory/peak_bytes", "entropy"]
    odd_values = ", ".join(f'"{name}": {odd}' for name in names)
    rows = [f'{{"step": {step}, {odd_values}}}' for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    (run / "events.jsonl").write_text(f'{{"step": {odd}, "timestamp": {odd}, "event": "warning", "text": {odd}}}\n')
    (run / "config.yaml").write_text(
        f'{{"train": {{"steps": {odd}}}, "rollout": {{"max_turns": {odd}, "top_p": {odd}}}}}'
    )
    (run / "plan.json").write_text(f'{{"memory": {odd}, "phases": {odd}}}')
    (run / "status.json").write_text(f'{{"phase": "train", "timestamp": {odd}, "pid": {odd}, "step": {odd}}}')
    with serving(run) as server:
        client = Client(server)
        for path in (
            "",
            *(f"/run/{name}" for name in ("now", "metrics", "config", "questions", "tools", "log", "steps/1")),
        ):
            answer = client.get_in(f"/api/runs{path}")
            assert (answer.status, "error" in answer.json) == (200, False)


def test_static_files_are_compressed_and_kept_by_the_browser(client: Client) -> None:
    answer = client.get_in("/static/js/app.js", "Accept-Encoding: gzip")
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.body.startswith(b"//")
    again = client.get_in("/static/js/app.js", f"If-None-Match: {answer.headers['etag']}")
    assert (again.status, again.raw) == (304, b"")
    assert client.get_in("/static/js/app.js").body == answer.body  # and uncompressed, if asked so


def test_head_has_no_body(client: Client) -> None:
    for path in ("/", "/api/runs", "/events", "/api/runs/run/search?text=a"):
        answer = client.get_in(path, method="HEAD")
        assert (answer.status, answer.raw) == (200, b"")


def test_open_tabs_are_told_what_changes(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    with serving(first, second) as server:
        client = Client(server)
        assert len(client.get_in("/api/runs").json["runs"]) == 2
        with client.stream("/events?runs=a") as one, client.stream("/events") as both:
            assert _wait_until(lambda: server.watcher.num_listeners == 2)
            for run in (second, first):
                with (run / "metrics.jsonl").open("a") as file:
                    file.write('{"step": 3, "reward": 1.0}\n')
            name, change = next(one)
            assert (name, change["run"], change["step"], change["parts"]) == ("changed", "a", 3, ["metrics"])
            assert {next(both)[1]["run"], next(both)[1]["run"]} == {"a", "b"}
            server.should_exit = True  # ends the streams at once
            assert list(one) == list(both) == []


def test_tabs_that_vanish_are_forgotten(server: ViewServer, client: Client) -> None:
    with client.stream("/events"):
        assert _wait_until(lambda: server.watcher.num_listeners == 1)
    assert _wait_until(lambda: server.watcher.num_listeners == 0)


def test_a_tab_that_opens_late_is_told_of_changes_just_before(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with serving(run) as server:
        client = Client(server)
        assert client.get_in("/api/runs/run/now").json["step"] == 2
        (run / "metrics.jsonl").write_text('{"step": 9, "reward": 1.0}\n')
        assert _wait_until(lambda: client.get_in("/api/runs/run/now").json["step"] == 9)
        with client.stream("/events") as events:
            assert next(events)[1]["step"] == 9


def test_a_search_streams_its_matches(client: Client, folder: Path) -> None:
    rows = [a_row(0, 0.0, completion="one"), a_row(0, 1.0, completion="two </b>")]
    write_rows(folder, rows, step=2)
    with client.stream("/api/runs/run/search?where=reward%20%3E%200.5") as events:
        found = list(events)
    [match] = [data for name, data in found if name == "match"]
    assert (match["step"], match["row"], match["parts"]) == (2, 1, ["two </b>"])
    assert (match["group"], match["prompt"]) == (0, "Question 0?")
    assert (found[-1][0], found[-1][1]["reason"], found[-1][1]["by_step"]) == ("done", "end", {"2": 1})
    with client.stream("/api/runs/run/search?where=reward%20%3E") as events:
        name, error = next(events)
    assert name == "error"
    assert error["error"] and error["position"] == 8


def test_a_stream_ends_with_its_tab_while_it_sends() -> None:
    ended = []
    sending = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"event: progress\n\n"
        finally:
            ended.append(True)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sending.set()
            await asyncio.sleep(3600)

    async def receive() -> dict[str, str]:
        await sending.wait()
        return {"type": "http.disconnect"}

    stream = events()

    async def serve() -> list[bool]:
        await EventStream(stream)({"type": "http"}, receive, send)
        return list(ended)  # asyncio.run closes what is left

    assert asyncio.run(serve()) == [True]


def test_a_search_ends_with_its_tab(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def search(run: object, wanted: object, cancelled: Callable[[], bool]) -> Iterator[object]:
        try:
            yield Progress(files_total=1)
            while not cancelled():
                time.sleep(0.01)
        finally:  # closed, if it ends before the next event is asked for
            ended.set()

    monkeypatch.setattr("cohort_view.search.search.search", search)
    with client.stream("/api/runs/run/search?text=a") as events:
        assert next(events)[0] == "progress"
        assert not ended.is_set()
    assert ended.wait(PATIENCE_S)


def test_runs_get_names_of_their_own(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name) for name in ("a/run", "b/run", "c/a b é&?", "d/...")]
    runs = Runs([*folders, folders[0]])
    assert [run.id for run in runs.all()] == ["run", "run-2", "a-b", "run-3"]
    assert runs.find("run-2").path == folders[1].resolve()


def test_runs_below_a_root_are_found_also_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cohort_view.server.runs._SCAN_EVERY_S", 0.0)
    make_run(tmp_path / "project" / "first")
    make_run(tmp_path / ".hidden" / "run")
    (tmp_path / "link").symlink_to(tmp_path / "project")
    runs = Runs([], root=tmp_path)
    assert [run.id for run in runs.all()] == ["first"]
    make_run(tmp_path / "second")
    assert [run.id for run in runs.all()] == ["first", "second"]
    assert find_run_folders(tmp_path, max_depth=1) == [tmp_path / "second"]


def test_folders_without_a_run_name_the_runs_near_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "demo")
    check_is_run(run)
    with pytest.raises(UserError, match=r"holds no run .*Run folders below it: .*/runs/demo$"):
        check_is_run(tmp_path / "runs")
    with pytest.raises(UserError, match=r"does not exist\. Run folders in '.*/runs': .*/runs/demo$"):
        check_is_run(tmp_path / "runs" / "dmeo")
    with pytest.raises(UserError, match="is a file; give the run's folder"):
        check_is_run(run / "config.yaml")
    (run / "config.yaml").unlink()  # half deleted
    check_is_run(run)


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port: {port} cannot be used: Address already in use; leave it out"):
            ViewServer([], port=port)


def test_the_tunnel_is_printed_over_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "me")
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    address = "http://127.0.0.1:7600/?token=abc"
    assert "ssh" not in describe_address(address, {})
    lines = describe_address(address, {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 2222"}).splitlines()
    assert lines == [
        f"page: {address}",
        "on your own machine, first: ssh -p 2222 -N -L 7600:127.0.0.1:7600 me@box",
    ]


def test_browsers_get_the_token_from_a_private_file(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    file = open_browser("http://127.0.0.1:7600/?token=secret&x=1")
    try:
        assert opened == [file.as_uri()]  # arguments of commands are visible to other users
        assert file.stat().st_mode & 0o777 == 0o600
        assert "url=http://127.0.0.1:7600/?token=secret&amp;x=1" in file.read_text()
    finally:
        file.unlink()
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    assert open_browser("http://127.0.0.1:7600/") is None


def test_ctrl_c_ends_the_command_at_once(folder: Path) -> None:
    command = [sys.executable, "-m", "cohort", "view", str(folder), "--port", "0", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as view:
        address = view.stdout.readline().removeprefix("page: ").strip()
        port = int(address.split(":")[2].split("/")[0])
        assert address.partition("token=")[2] not in Path(f"/proc/{view.pid}/cmdline").read_text()
        with socket.create_connection(("127.0.0.1", port)) as waiting:  # a tab
            waiting.sendall(f"GET /{address.partition('/?')[2]} HTTP/1.1\r\n".encode())
            view.send_signal(signal.SIGINT)
            output = view.stdout.read()
            view.wait(timeout=10)
    assert view.returncode == 0
    assert output == "Ctrl-C stops the page; runs go on.\n"


def test_the_page_beside_a_run_ends_after_it(folder: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom cohort.processes.page import start_page\n"
        "print(start_page(Path(sys.argv[1])), flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True) as run:
        address = run.stdout.readline().removeprefix("page: ").strip()
        [child] = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        assert address.partition("token=")[2] not in Path(f"/proc/{child}/cmdline").read_text()
        assert os.getsid(int(child)) != os.getsid(run.pid)  # Ctrl-C does not reach it
        assert os.getpriority(os.PRIO_PROCESS, int(child)) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        run.kill()
    # the run's output is closed although the page goes on
    assert Path(f"/proc/{child}").exists()
    os.kill(int(child), signal.SIGTERM)
    assert _wait_until(lambda: not _is_alive(int(child)))


def test_the_page_stays_while_a_tab_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(process, "_TICK_S", 0.0)
    monkeypatch.setattr(process.os, "getppid", lambda: 1)
    server = _FakeServer(clock=lambda: now[0])
    # another second passes at each look: 100 seconds with a tab, then without
    server.watcher.looks = lambda: now.__setitem__(0, now[0] + 1) or now[0] < 1100
    process._stop_after_run(server, 77, clock=lambda: now[0])
    assert server.should_exit
    assert now[0] == 1100 + process.GRACE_S


def test_a_page_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PageStartError, match="the page did not start: no answer; to see why: cohort view"):
        start_page(tmp_path)


class _FakeServer:
    def __init__(self, clock: Callable[[], float]):
        self.should_exit = False
        self.clock = clock
        self.last_listened = clock()
        self.watcher = self
        self.looks = lambda: False

    @property
    def num_listeners(self) -> int:
        if found := self.looks():
            self.last_listened = self.clock()
        return int(found)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition: object, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
