"""A tiny model folder and a text, which the tests of several programs train on."""

import pytest

from tests.helpers.model_folders import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(400)))
    return path


@pytest.fixture(autouse=True, scope="package")
def stores(tmp_path_factory):
    """Put stores of tokens into a temporary folder; child processes inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
