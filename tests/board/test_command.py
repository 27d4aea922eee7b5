import http.client
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.experiments.folders import make_run
from tests.harness import end_tree
from tests.replay.ports import free_port
from troupe.common.errors import ConfigError, TroupeError
from troupe.services.board.command import _token, board, listen
from troupe.services.launcher.supervisor import FINAL_EXIT_CODES


@pytest.fixture
def start():
    """Starts `troupe board`; returns the process and the address that it prints."""
    processes = []

    def run(*words, **variables):
        command = [sys.executable, "-m", "troupe", "board", *map(str, words)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | variables
        )
        processes.append(process)
        return process, process.stdout.readline().strip()

    yield run
    for process in processes:
        end_tree(process)
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal(start, tmp_path, number):
    make_run(tmp_path / "run")
    process, address = start(tmp_path, "--port", 0)
    port = int(re.fullmatch(r"http://localhost:(\d+)/", address)[1])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/api/events", headers={"Host": "localhost"})
    stream = connection.getresponse()  # somebody watches still
    assert stream.status == 200
    process.send_signal(number)
    assert process.wait(60) == 0
    assert process.stderr.read() == ""
    stream.close()
    connection.close()


def test_an_address_that_others_reach_needs_a_token(start, tmp_path):
    _, address = start(tmp_path, "--port", 0, "--host", "0.0.0.0", TROUPE_BOARD_TOKEN="")
    port, token = re.fullmatch(r"http://[^:]+:(\d+)/\?token=([\w-]{32})", address).groups()
    for path, status in (("/api/runs", 401), (f"/?token={token}", 303)):
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        connection.request("GET", path)
        assert connection.getresponse().status == status
        connection.close()


@pytest.mark.parametrize(
    ("published", "printed", "status"),
    [
        ("127.0.0.1:7000", r"http://localhost:7000/", 200),
        ("0.0.0.0:7000", r"http://localhost:7000/\?token=[\w-]{32}", 401),
        ("192.0.2.1:7000", r"http://192\.0\.2\.1:7000/\?token=[\w-]{32}", 401),
    ],
)
def test_the_address_that_browsers_use_decides_about_the_token(start, tmp_path, published, printed, status):
    port = free_port()
    _, address = start(
        tmp_path, "--port", port, "--host", "0.0.0.0", "--published", published, TROUPE_BOARD_TOKEN=""
    )
    assert re.fullmatch(printed, address)
    # Who restarts a container asks without a token; a page elsewhere whose name leads here is refused.
    for host, path, expected in (
        ("localhost", "/api/runs", status),
        ("evil.example", "/api/runs", 421 if status == 200 else 401),
        ("localhost", "/healthz", 200),
    ):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path, headers={"Host": host})
        assert connection.getresponse().status == expected
        connection.close()


def test_beside_a_training_it_serves_at_one_port_or_ends(tmp_path):
    run = make_run(tmp_path / "run")
    listener = listen("127.0.0.1", free_port())
    port = listener.getsockname()[1]
    command = [sys.executable, "-P", "-m", "troupe.services.board.beside", str(run), str(port)]
    done = subprocess.run(command, capture_output=True, text=True)
    # No exit code that is final: the launcher finds another port and starts it again.
    assert (done.returncode, done.stdout) == (TroupeError.exit_code, "")
    assert done.returncode not in FINAL_EXIT_CODES
    assert f"port {port} was taken" in done.stderr
    listener.close()
    # With a token, which must not be in the log of the training.
    variables = os.environ | {"TROUPE_BOARD_TOKEN": "x" * 16}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    assert process.stdout.readline() == f"http://localhost:{port}/\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    process.stdout.close()


def test_a_server_that_ends_by_itself_is_an_error(tmp_path):
    code = (
        "import socket, sys; from pathlib import Path; from troupe.common.runtime.lifecycle import run_main; "
    )
    code += "from troupe.services.board.command import Address, serve; "
    code += "from troupe.services.board.library import Library; "
    code += "none = socket.socket(type=socket.SOCK_DGRAM); none.bind(('127.0.0.1', 0)); "
    code += (
        "sys.exit(run_main(lambda: serve(Library([Path(sys.argv[1])]), Address(*none.getsockname()), none)))"
    )
    command = [sys.executable, "-c", code, str(make_run(tmp_path / "run"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 70
    assert "has exited" in done.stderr


def test_a_token_of_ones_own_is_long_enough(monkeypatch):
    monkeypatch.setenv("TROUPE_BOARD_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        _token("0.0.0.0")
    monkeypatch.setenv("TROUPE_BOARD_TOKEN", "x" * 16)
    assert _token("127.0.0.1") == "x" * 16
    monkeypatch.delenv("TROUPE_BOARD_TOKEN")
    assert (_token("127.0.0.1"), _token("::1"), _token("localhost")) == ("", "", "")
    assert _token("192.0.2.1") != _token("192.0.2.1") != ""


def test_a_port_that_is_taken_is_passed_over():
    first = listen("127.0.0.1", 0)
    port = first.getsockname()[1]
    second = listen("127.0.0.1", port)
    assert port < second.getsockname()[1] <= port + 20
    first.close()
    second.close()


def test_a_wrong_word_is_one_line(tmp_path):
    for words, what in (
        ([tmp_path / "none"], "does not exist"),
        (["--host", "192.0.2.1", tmp_path], "cannot listen"),
    ):
        with pytest.raises(ConfigError, match=what):
            board([str(word) for word in words])
