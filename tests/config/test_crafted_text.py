"""TOML that is made to break the parser ends in one line, at once."""

import subprocess
import sys

import pytest

from troupe.common.config.text import load_toml


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = " + "[" * 50_000, "nested too deep"),
        ("[run]\n" + ".".join("a" * 100_000) + " = 1", "64 parts"),
        ("[" + " . ".join(['"a b"'] * 20_000) + "]\n", "64 parts"),
        ("x = {" + ".".join("a" * 100_000) + " = 1}", "64 parts"),
        ("[run]\nseed = " + "9" * 5000, "hundreds of digits"),
        ("[env]\nkwargs = {a = [0x" + "f" * 5000 + "]}", "hundreds of digits"),
        ("[run]\ntotal_steps = 9_223_372_036_854_775_807", "2^53"),
        ("[actor]\nslots = 1_000_000_000", "less than or equal to 1024"),
    ],
    ids=["brackets", "key", "table", "inline", "digits", "hexadecimal", "steps", "slots"],
)
def test_absurd_toml_is_refused(tmp_path, text, said):
    path = tmp_path / "absurd.toml"
    path.write_text(text)
    words = [sys.executable, "-m", "troupe", "config", "validate", str(path)]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    assert said in run.stderr


def test_long_texts_and_lists_are_no_keys():
    numbers = [0.5] * 1000
    assert load_toml(f"x = {numbers}\ny = \"{'word ' * 1000}\"\nz = 'a.b.c'")["x"] == numbers
