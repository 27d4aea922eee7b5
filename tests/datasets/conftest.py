"""Data sets are made and looked for in a folder of the test's own."""

import pytest


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    folder = tmp_path / "datasets"
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder
