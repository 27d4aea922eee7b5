"""Wrong command lines of every service are one line and exit code 2."""

import importlib

import pytest

from troupe.common.errors import ConfigError
from troupe.common.runtime.parser import Parser, integer, real

WRONG = [
    ("learner", "--log-level info", "--run-dir is needed"),
    ("learner", "--run-dir x --metrics-port 99999", "--metrics-port: should be from 0 to 65535"),
    ("replay", "serve --seed -1", "--seed: should be at least 0, not -1"),
    ("replay", "serve --metrics-port 99999", "--metrics-port: should be from 0 to 65535, not 99999"),
    ("replay", "serve --join-timeout-s nan", "--join-timeout-s: should be finite"),
    ("replay", "serve --max-bytes -5", "--max-bytes: should be at least 1"),
    ("replay", "serve --index many", "--index: should be a whole number, not 'many'"),
    ("replay", "serve --max 5", "unknown argument --max"),
    ("actor", "--learner ipc://x --nope", "unknown argument --nope"),
    ("actor", "--nope", "required: --learner"),
    ("actor", "--learner ipc://x --slots -1", "--slots: should be at least 1"),
    ("evaluator", "--learner ipc://x --join-timeout-s soon", "--join-timeout-s: should be a number"),
    ("evaluator", "--learner ipc://x --metrics-port -1", "--metrics-port: should be from 0 to 65535"),
]


@pytest.mark.parametrize(("service", "line", "text"), WRONG, ids=[f"{s} {line}" for s, line, _ in WRONG])
def test_wrong_options_of_services_are_one_line(service, line, text, capsys):
    assert importlib.import_module(f"services.{service}.__main__").main(line.split()) == 2
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert stderr.startswith("troupe: error: ")
    assert stderr.count("\n") == 1
    assert text in stderr
    command = f"{service} serve" if service == "replay" else service
    assert f"`troupe {command} --help` shows the usage" in stderr


def test_bounds_are_included():
    assert [integer(0, 3)(text) for text in ("0", "3")] == [0, 3]
    assert [real(0, 1)(text) for text in ("0", "1")] == [0.0, 1.0]
    parser = Parser(prog="x")
    parser.add_argument("--share", type=real(0, 1))
    with pytest.raises(ConfigError, match="--share: should be from 0 to 1, not"):
        parser.parse_args(["--share", "1.5"])
