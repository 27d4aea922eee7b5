import logging

from troupe.common.runtime.logging import OneLineFormatter


def test_what_a_peer_says_cannot_forge_a_line():
    record = logging.LogRecord(
        "x", logging.INFO, "x", 1, "%s leaves (%s)", ("actor-0", "h\n2026 ERROR\x1b]0;x\x07"), None
    )
    assert OneLineFormatter("%(levelname)s %(message)s").format(record) == (
        "INFO actor-0 leaves (h\\x0a2026 ERROR\\x1b]0;x\\x07)"
    )


def test_traces_keep_their_lines():
    try:
        raise ValueError("two\nlines\x1b[2J")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("x", logging.ERROR, "x", 1, "failed", (), info)
    first, *rest = OneLineFormatter("%(message)s").format(record).splitlines()
    assert first == "failed"
    assert len(rest) > 2
    assert rest[-1] == "lines\\x1b[2J"
