import pytest

from troupe.common.config import load_config, preset_names, to_toml
from troupe.common.config.presets import read_toml
from troupe.common.errors import ConfigError
from troupe.services.experiments import fields
from troupe.services.experiments.fields import read_tables


@pytest.mark.parametrize("preset", preset_names())
def test_runs_are_read_as_the_parser_reads_them_and_by_lines(tmp_path, preset, monkeypatch):
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load_config(preset)))
    wanted = read_toml(file)
    monkeypatch.setattr(fields, "read_toml", None)
    assert read_tables(file) == wanted


@pytest.mark.parametrize(
    "text",
    [
        'a = """\nb = 1\n"""\n',
        "a = [\n1,\n2]\n",
        "[a]\nb = 1\n[a.c]\nd = 2\n",
        "a.b = 1\n",
        "[[a.b]]\n[a]\n",
        'a = "x" # said\n',
        "'a b' = 1\n",
        "[a]\n[[a.b]]\nc = 1\n[[a.b]]\nc = 2\n[d]\ne = 1979-05-27\n",
        "a = {b = 1, c = [1, 2]}\n",
    ],
)
def test_other_documents_are_read_as_well(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert read_tables(file) == read_toml(file)


@pytest.mark.parametrize(
    "text",
    [
        "a = 1\na = 2\n",
        "[a]\n[a]\n",
        "[a]\nb = []\n[[a.b]]\nc = 1\n",
        "[a]\nb = 1\n[[a.b]]\n",
        "a = 1\n[a]\n",
        "a = 1 b = 2\n",
        "a = x\n",
        "\x00",
        "[a]\n[[a.b]]\nc = 1\nc = 2\n",
    ],
)
def test_what_the_parser_refuses_is_refused(tmp_path, text):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_tables(file)


def test_runs_do_not_share_what_can_be_changed(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("a = [[1], {b = 2}]\n")
    first = read_tables(file)
    first["a"][0].append(3)
    assert read_tables(file)["a"][0] == [1]
